"""The template's life: import once, fork standbys, and let each of them become a worker when the keeper asks.

Four kinds of process run this file, each forked from the one before:

    root       the interpreter as it was started. Forks a trial, and another one without what the first could not keep.
    template   a trial in which every module was imported and can be forked. Waits for orders to breed.
    midwife    forks standbys and ends at once, so that the keeper (their subreaper) becomes their parent:
               it hears of their deaths itself, with the exact status, as of any other worker.
    standby    waits on a socket of its own; what arrives there makes it a worker, and it returns from this file.

Nobody outlives the keeper: root has its death signal, each child of root that of its parent, a standby that of the
keeper as soon as the midwife is gone; and the end of a socket means the same.

What is said to the keeper (``marshal`` in the frames of ``tenax._io.channel``), and heard:

    prepare, modules, late names,    ready, seconds, names, {name: why it was left out}
      whether arguments differ
    breed, number  + sockets         refused, {name: why}
                                     bred, number, pids
"""

import contextlib
import ctypes
import gc
import marshal
import os
import select
import signal
import socket
import struct
import sys
import time

import tenax_preload  # type: ignore[import-not-found]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_HEADER = struct.Struct("<IB")  # as in tenax._io.channel
_PR_SET_PDEATHSIG = 1
_MARSHAL_VERSION = 2  # any Python 3 reads it
_MAX_DESCRIPTORS = 250
_CANNOT_START = 127
_LONGEST_TRYING_S = 20.0  # each trial imports from the beginning, and the workers wait

_prctl = ctypes.CDLL(None).prctl


def become_worker_when_asked(number: int) -> None:
    """Returns in a worker, and only there."""
    keeper = os.getppid()
    own_name = _own_name()
    _show_name(b"tenax-template")
    # Schedulers signal every process of a job. What is meant for workers must not end what they are made of.
    signal.pthread_sigmask(signal.SIG_BLOCK, _CATCHABLE)
    channel = _Channel(number)
    message = channel.receive()[0]
    if message is None:
        os._exit(0)
    _, modules, late, has_own_arguments = message
    _answer_for_torchelastic()
    tenax_preload.show_own_path()
    title = _Title()
    _be_template(channel, modules, frozenset(late), has_own_arguments)
    # From here on: a standby.
    channel.close()
    _show_name(b"tenax-standby")
    title.write(b"tenax-standby")
    sock = _Birth.sock
    assert sock is not None
    _die_with_keeper(keeper)
    order, descriptors = _wait_for_order(sock)
    _forget_signals(keeper)
    title.restore()
    _show_name(own_name)
    _become_worker(order, descriptors)


def _answer_for_torchelastic() -> None:
    """Under ``--compat``, before anything of torch is imported. Where that is impossible, its own hook says so."""
    if os.environ.get("TENAX_COMPAT", "0") != "0":
        with contextlib.suppress(ImportError):
            __import__("tenax.compat")


class _Birth:
    """What a standby is born with."""

    sock: "socket.socket | None" = None
    midwife = 0


_CATCHABLE = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


# --- root and trials --------------------------------------------------------------------------------------------------


def _be_template(channel: "_Channel", modules: "list[str]", late: "frozenset[str]", has_own_arguments: bool) -> None:
    """Returns in standbys only."""
    why = tenax_preload.why_no_template({0, 1, 2, channel.fileno()})
    wanted = tenax_preload.JobSelector([] if why else modules)
    left_out: dict[str, str] = {"": why} if why else dict(wanted.left_out)
    rest = wanted.names
    began = time.monotonic()
    while True:
        if left_out and time.monotonic() - began > _LONGEST_TRYING_S:
            left_out[""] = "finding out what can be forked takes too long; name the modules that can with --preload"
            rest = []
        if not rest:
            channel.send(("refused", left_out))
            os._exit(0)
        heard, say = os.pipe()
        root = os.getpid()
        trial = os.fork()
        if trial == 0:
            os.close(heard)
            _die_with(root)
            wanted.names = rest
            _be_trial(channel, wanted, late, has_own_arguments, left_out, say)
            return
        os.close(say)
        lines = _listen(heard, trial)
        os.close(heard)
        status = os.waitstatus_to_exitcode(os.waitpid(trial, 0)[1])
        if lines[-1:] == ["ready"]:  # it was the template, and has ended
            os._exit(128 - status if status < 0 else status)
        name, why = _culprit(lines)
        name = name or rest[0]
        left_out[name] = why or _how_it_ended(status)
        rest = [other for other in rest if other != name and not other.startswith(f"{name}.")]


def _listen(descriptor: int, trial: int) -> "list[str]":
    """What a trial says, until it has said how it went, or is gone: what it has left behind may hold the pipe open."""
    os.set_blocking(descriptor, False)
    end = os.pidfd_open(trial)
    waited = [end, descriptor]
    text = b""
    while True:
        ready = select.select(waited, [], [])[0]
        with contextlib.suppress(BlockingIOError):
            while data := os.read(descriptor, 1 << 16):
                text += data
            waited = [end]  # closed: it has become another program
        lines = text.decode(errors="replace").split("\0")[:-1]
        if end in ready or lines[-1:] == ["ready"] or (lines and lines[-1].startswith("left ")):
            os.close(end)
            return lines


def _culprit(lines: "list[str]") -> "tuple[str, str]":
    """The module that could not be kept, and why; without a reason: its import did not come to an end."""
    if lines and lines[-1].startswith("left "):
        _, name, why = lines[-1].split(" ", 2)
        return name, why
    return (lines[-1].partition(" ")[2] if lines else ""), ""


def _how_it_ended(status: int) -> str:
    how = f"was killed by signal {-status}" if status < 0 else f"ended with exit code {status}"
    with contextlib.suppress(ValueError):  # not every signal has a name
        how = f"was killed by {signal.Signals(-status).name}"
    return f"the process that imported it {how}"


def _be_trial(
    channel: "_Channel",
    wanted: "tenax_preload.Wanted",
    late: "frozenset[str]",
    has_own_arguments: bool,
    left_out: "dict[str, str]",
    say: int,
) -> None:
    """Import everything. Returns in standbys only."""
    began = time.monotonic()
    own = os.getpid()

    def leave_out(name: str, why: str) -> None:
        os.write(say, f"left {name} {why}\0".encode())
        os._exit(0)

    name = ""
    with (
        tenax_preload.watched_environment(late) as environment,
        tenax_preload.script_folder_first(),
        tenax_preload.script_as_main(),
        tenax_preload.watched_arguments(has_own_arguments, lambda why: leave_out(name, why)),
        tenax_preload.watched_calls(lambda why: leave_out(name, why)),
    ):
        before = tenax_preload.Condition()
        for name in wanted.names:
            loaded = set(sys.modules)
            os.write(say, f"import {name}\0".encode())
            why = tenax_preload.bring_in(name)
            if os.getpid() != own:
                os._exit(0)  # the import has forked, and this is a process that it has no use for
            why = why or before.why_it_cannot_be_forked(environment) or wanted.why_not(name, loaded)
            if why:
                leave_out(name, why)
    _Changes.made = tuple(environment.changes())
    gc.collect()
    gc.freeze()  # what is here now is everybody's: a collection in a worker must not make its own copy of it
    os.write(say, b"ready\0")
    os.close(say)
    channel.send(("ready", time.monotonic() - began, wanted.names, left_out))
    while True:
        message, descriptors = channel.receive()
        if message is None:
            os._exit(0)
        if _breed(channel, message[1], descriptors):
            return


class _Changes:
    """What the imports did to the environment: a worker that had imported by itself would have it too."""

    made: "tuple[tuple[str, str | None], ...]" = ()


def _breed(channel: "_Channel", number: int, descriptors: "list[int]") -> bool:
    """Fork a standby for each socket. Is this process one of them?"""
    template = os.getpid()
    try:
        midwife = os.fork()
    except OSError:
        channel.send(("bred", number, []))
        midwife = -1
    if midwife == 0:
        _die_with(template)
        if _deliver(channel, number, descriptors):
            return True
        os._exit(0)
    for descriptor in descriptors:
        os.close(descriptor)
    if midwife > 0 and os.waitpid(midwife, 0)[1]:  # killed, perhaps before it could say whom it had delivered
        channel.send(("bred", number, []))
    return False


def _deliver(channel: "_Channel", birth: int, descriptors: "list[int]") -> bool:
    """In the midwife. Is this process a standby?"""
    _Birth.midwife = os.getpid()
    pids = []
    for number in descriptors:
        try:
            pid = os.fork()
        except OSError:
            break
        if pid == 0:
            for other in descriptors:
                if other != number:
                    os.close(other)
            _Birth.sock = socket.socket(fileno=number)
            return True
        pids.append(pid)
    # Before our end: the keeper knows its new children by name when they become its own.
    channel.send(("bred", birth, pids))
    return False


# --- standby and worker -----------------------------------------------------------------------------------------------


def _die_with(parent: int) -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


def _die_with_keeper(keeper: int) -> None:
    """As soon as the keeper is our parent: when the midwife is gone."""
    try:
        midwife = os.pidfd_open(_Birth.midwife)
    except ProcessLookupError:
        pass
    else:
        select.select([midwife], [], [])
        os.close(midwife)
    _die_with(keeper)


def _wait_for_order(sock: "socket.socket") -> "tuple[dict[str, Any], list[int]]":
    _, ancillary, _, _ = sock.recvmsg(1, socket.CMSG_SPACE(_MAX_DESCRIPTORS * 4), socket.MSG_CMSG_CLOEXEC)
    descriptors = _descriptors_in(ancillary)
    if len(descriptors) < 2:
        os._exit(1)  # the keeper is gone, or has no use for us
    sock.close()
    complain, page, *rest = descriptors
    with open(page, "rb") as file:
        file.seek(0)
        order = marshal.load(file)  # noqa: S302 - written by our own keeper into a file that only we hold
    return order, [complain, *rest]


def _forget_signals(keeper: int) -> None:
    """What was sent to all processes of the job while we stood by was not meant for the worker that we are to be.

    But the keeper signals workers only, and may have done so since its order.
    """
    while (heard := signal.sigtimedwait(_CATCHABLE, 0)) is not None:
        if heard.si_pid == keeper:
            os.kill(os.getpid(), heard.si_signo)
            return


def _become_worker(order: "dict[str, Any]", descriptors: "list[int]") -> None:
    """Everything that the keeper does for a worker between fork and exec, and what exec does."""
    complain, *received = descriptors
    trying = ""
    try:
        os.setsid()
        complain = _place(received, order["numbers"], complain)
        if order["cwd"]:
            trying = os.fsdecode(order["cwd"])
            os.chdir(order["cwd"])
        if order["cpus"]:
            trying = f"CPUs {order['cpus']}"
            os.sched_setaffinity(0, order["cpus"])
    except OSError as error:
        text = f"{error.errno or 0} {os.strerror(error.errno or 0)}: {trying!r}"
        os.write(complain, text.encode(errors="replace"))
        os._exit(_CANNOT_START)
    os.environb.clear()
    os.environb.update(order["env"])
    tenax_preload.change_environment(_Changes.made)
    _take_arguments([os.fsdecode(word) for word in order["argv"]])
    tenax_preload.begin_anew()
    os.close(complain)


def _take_arguments(argv: "list[str]") -> None:
    """Where each worker has arguments of its own, such as ``--local-rank=3``."""
    if argv[1:] == sys.orig_argv[1:]:
        return
    count = len(sys.argv) - 1
    if count:
        sys.argv[1:] = argv[-count:]
    sys.orig_argv[1:] = argv[1:]
    _Title().write(b"".join(os.fsencode(word) + b"\0" for word in argv))


def _place(received: "list[int]", numbers: "list[int]", complain: int) -> int:
    """Give each descriptor the number that the worker expects; returns where the complaint pipe went."""
    import fcntl

    beyond = max([*numbers, 2]) + 1
    asides = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, beyond) for descriptor in (complain, *received)]
    for descriptor in (complain, *received):
        os.close(descriptor)
    for number, aside in zip(numbers, asides[1:], strict=True):
        os.dup2(aside, number)
        os.close(aside)
    return asides[0]


class _Title:
    """What process listings show as our command line: memory of ours, of a size that cannot change."""

    def __init__(self) -> None:
        self._before = b""
        self._start = 0
        try:
            with open("/proc/self/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
            self._start, end = int(fields[45]), int(fields[46])
            with open("/proc/self/mem", "rb", buffering=0) as memory:
                memory.seek(self._start)
                self._before = memory.read(end - self._start)
        except (OSError, ValueError, IndexError):  # a system that hides it: nothing depends on it
            self._before = b""

    def restore(self) -> None:
        self.write(self._before)

    def write(self, text: bytes) -> None:
        """As much of it as there is room for."""
        size = len(self._before)
        if not size:
            return
        try:
            with open("/proc/self/mem", "r+b", buffering=0) as memory:
                memory.seek(self._start)
                memory.write(text[: size - 1].ljust(size, b"\0") if len(text) != size else text)
        except OSError:  # nothing depends on it
            self._before = b""


def _own_name() -> bytes:
    with open("/proc/self/comm", "rb") as file:
        return file.read().rstrip(b"\n")


def _show_name(name: bytes) -> None:
    with open("/proc/self/comm", "wb", buffering=0) as file:
        file.write(name[:15])


# --- the channel ------------------------------------------------------------------------------------------------------


class _Channel:
    """One end of a ``tenax._io.channel``, as something to wait for."""

    def __init__(self, number: int) -> None:
        self._sock = socket.socket(fileno=number)
        self._sock.setblocking(True)
        self._sock.set_inheritable(False)
        self._received = b""
        self._descriptors: list[int] = []

    def send(self, message: "tuple[Any, ...]") -> None:
        body = marshal.dumps(message, _MARSHAL_VERSION)
        try:
            self._sock.sendall(_HEADER.pack(len(body), 0) + body)
        except OSError:  # the keeper is gone
            os._exit(0)

    def receive(self) -> "tuple[Any, list[int]]":
        """The next message and its descriptors; None when the keeper is gone."""
        while True:
            if len(self._received) >= _HEADER.size:
                size, count = _HEADER.unpack_from(self._received)
                end = _HEADER.size + size
                if len(self._received) >= end:
                    message = marshal.loads(self._received[_HEADER.size : end])  # noqa: S302 - from our own keeper
                    self._received = self._received[end:]
                    descriptors = self._descriptors[:count]
                    del self._descriptors[:count]
                    return message, descriptors
            data, ancillary, _, _ = self._sock.recvmsg(
                1 << 16, socket.CMSG_SPACE(_MAX_DESCRIPTORS * 4), socket.MSG_CMSG_CLOEXEC
            )
            self._descriptors += _descriptors_in(ancillary)
            if not data:
                return None, []
            self._received += data

    def fileno(self) -> int:
        return self._sock.fileno()

    def close(self) -> None:
        self._sock.close()


def _descriptors_in(ancillary: "list[tuple[int, int, bytes]]") -> "list[int]":
    found: list[int] = []
    for level, kind, payload in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            count = len(payload) // 4
            found += struct.unpack(f"{count}i", payload[: count * 4])
    return found
