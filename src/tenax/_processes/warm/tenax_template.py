"""The template process: imports once, forks standbys, and each standby becomes a worker on the keeper's command.

Four kinds of process run this file, each forked from the one before:

    root       the interpreter as it was started. Forks a trial, then another one without the modules that failed.
               A trial does the same after long imports, so that these are not repeated; it then waits for its trial.
    template   a trial that imported every module and is safe to fork. Waits for fork commands.
    forker     forks standbys and exits at once, so that the keeper, the subreaper, becomes their parent and reaps them
               with the exact status, like any other worker.
    standby    waits on its own socket. The launch spec received there makes it a worker, and it returns from this file.

No process outlives the keeper: root has a death signal, each child of root has its parent's, and a standby has the
keeper's as soon as the forker is gone. A closed socket means the same.

Messages from the keeper (``marshal`` in the frames of ``tenax._io.helper_channel``), and replies:

    prepare, modules, late names,    ready, seconds, names, {name: why it was left out}
      whether arguments differ
    fork, number  + sockets          refused, {name: why}
                                     forked, number, pids
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

_HEADER = struct.Struct("<IB")  # as in tenax._io.helper_channel
_PR_SET_PDEATHSIG = 1
_MARSHAL_VERSION = 2  # any Python 3 reads it
_MAX_DESCRIPTORS = 250
_CANNOT_START = 127
_MAX_TRIALS_S = 20.0  # the workers wait
_WORTH_KEEPING_S = 0.3
_MAX_RESERVED = 1000  # descriptors
_MAX_ERROR_LENGTH = 500  # characters

_prctl = ctypes.CDLL(None).prctl


def run_template(number: int) -> None:
    """Run the template. Returns only in a worker."""
    keeper = os.getppid()
    own_name = _process_name()
    _set_process_name(b"tenax-template")
    # Schedulers signal every process of a job. Signals for workers must not end the template.
    signal.pthread_sigmask(signal.SIG_BLOCK, _CATCHABLE)
    channel = _Channel(number)
    (_, modules, late, has_own_arguments), _ = channel.receive()
    # Under --compat, redirect torch's elastic modules before torch is imported. Its own hook reports failures.
    if os.environ.get("TENAX_COMPAT", "0") != "0":
        with contextlib.suppress(ImportError):
            __import__("tenax.compat")
    tenax_preload.restore_pythonpath()
    title = _Title()
    forker, sock = _run_root(channel, modules, frozenset(late), has_own_arguments)
    # From here on: a standby.
    channel.close()
    _set_process_name(b"tenax-standby")
    title.write(b"tenax-standby")
    _wait_for_end(forker)  # so that the keeper is the parent
    _die_with(keeper)
    spec, descriptors = _receive_spec(sock)
    reserved: list[int] = []
    if spec["setup"]:
        reserved = _set_up(spec)
        spec, descriptors = _receive_spec(sock)
    sock.close()
    _discard_signals(keeper)
    title.restore()
    _set_process_name(own_name)
    _become_worker(spec, descriptors)
    for descriptor in set(reserved).difference(spec["numbers"]):
        os.close(descriptor)


_CATCHABLE = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


# --- root and trials --------------------------------------------------------------------------------------------------


def _run_root(
    channel: "_Channel", modules: "list[str]", late: "frozenset[str]", has_own_arguments: bool
) -> "tuple[int, socket.socket]":
    """Fork trials until one has imported what can be forked. Returns only in standbys, the forker and the socket."""
    began = time.monotonic()
    why = next(tenax_preload.reasons_against_template({0, 1, 2, channel.fileno()}), "")
    selection = tenax_preload.Selection([] if why else modules)
    left_out: dict[str, str] = {"": why} if why else dict(selection.left_out)
    names = _fork_trials(selection.names, left_out)
    if not names:
        channel.send(("refused", left_out))
        os._exit(0)
    imported = _run_trial(selection, names, late, has_own_arguments, left_out)
    tenax_preload.Trial.report("ready")
    os.close(tenax_preload.Trial.writer)
    channel.send(("ready", time.monotonic() - began, imported, left_out))
    while True:
        (_, number), descriptors = channel.receive()
        standby = _fork_standbys(channel, number, descriptors)
        if standby is not None:
            return standby


def _fork_trials(names: "list[str]", left_out: "dict[str, str]") -> "list[str]":
    """Fork a trial for these modules, then another one without those that failed.

    Returns the names in a trial, and nothing in this process when no name is left. If a trial became the template, this
    process exits with it.
    """
    began = time.monotonic()
    while names:
        if left_out and time.monotonic() - began > _MAX_TRIALS_S:
            why = "finding the modules that can be preloaded took too long; name them with --preload"
            left_out.update(dict.fromkeys(names, why))
            break
        reader, writer = os.pipe()
        parent = os.getpid()
        trial = os.fork()
        if trial == 0:
            os.close(reader)
            _die_with(parent)
            if tenax_preload.Trial.writer >= 0:
                os.close(tenax_preload.Trial.writer)
            tenax_preload.Trial.pid, tenax_preload.Trial.writer, tenax_preload.Trial.name = os.getpid(), writer, ""
            return names
        os.close(writer)
        lines = _read_trial(reader, trial)
        os.close(reader)
        is_template = lines[-1:] == ["ready"]
        if is_template and tenax_preload.Trial.writer >= 0:  # this process is a trial itself
            tenax_preload.Trial.report("ready")
        status = os.waitstatus_to_exitcode(os.waitpid(trial, 0)[1])
        if is_template:  # it has exited
            os._exit(128 - status if status < 0 else status)
        # "left MODULE WHY", or "import MODULE" if that import did not return.
        _, name, *reason = (lines[-1] if lines else f"import {names[0]}").split(" ", 2)
        left_out[name] = reason[0] if reason else f"the process that imported it {_how_it_ended(status)}"
        names = [other for other in names if other != name and not other.startswith(f"{name}.")]
    return []


def _read_trial(descriptor: int, trial: int) -> "list[str]":
    """Read a trial's lines until its result or its death: processes that it left behind may hold the pipe open."""
    os.set_blocking(descriptor, False)
    end = os.pidfd_open(trial)
    waited = [end, descriptor]
    text = b""
    while True:
        ready = select.select(waited, [], [])[0]
        with contextlib.suppress(BlockingIOError):
            while data := os.read(descriptor, 1 << 16):
                text += data
            waited = [end]  # closed: the trial called exec
        lines = text.decode(errors="replace").split("\0")[:-1]
        if end in ready or lines[-1:] == ["ready"] or (lines and lines[-1].startswith("left ")):
            os.close(end)
            return lines


def _how_it_ended(status: int) -> str:
    with contextlib.suppress(ValueError):  # not every signal has a name
        return f"was killed by {signal.Signals(-status).name}"
    return f"was killed by signal {-status}" if status < 0 else f"exited with code {status}"


def _run_trial(
    selection: "tenax_preload.Selection",
    names: "list[str]",
    late: "frozenset[str]",
    has_own_arguments: bool,
    left_out: "dict[str, str]",
) -> "list[str]":
    """Import these modules, and return those that were imported, in the process that is to be the template.

    When the imports so far took a while, the rest is tried in a fork of this process: if a module must be left out,
    what was good is not imported again.
    """
    trial = tenax_preload.Trial
    imported: list[str] = []
    with (
        tenax_preload.watched_environment(late),
        tenax_preload.script_folder_first(),
        tenax_preload.script_as_main(has_own_arguments),
        tenax_preload.watched_calls(),
        tenax_preload.no_collections(),
    ):
        before, began = tenax_preload.Condition(), time.monotonic()
        while names:
            if imported and time.monotonic() - began > _WORTH_KEEPING_S:
                names = _fork_trials(names, left_out)
                if not names:
                    break
                before, began = tenax_preload.Condition(), time.monotonic()
            trial.name, *names = names
            loaded = set(sys.modules)
            trial.report(f"import {trial.name}")
            why = tenax_preload.import_module(trial.name)
            if os.getpid() != trial.pid:
                os._exit(0)  # the import forked, and this is the child
            why = why or next(before.reasons_not_to_fork(), "") or selection.why_not(trial.name, loaded)
            if why:
                trial.leave_out(why)
            imported.append(trial.name)
        gc.freeze()  # keeps these pages shared: a collection in a worker would copy them
    return imported


def _fork_standbys(channel: "_Channel", number: int, descriptors: "list[int]") -> "tuple[int, socket.socket] | None":
    """Fork a standby for each socket. In a standby, return its forker and its socket."""
    template = os.getpid()
    try:
        forker = os.fork()
    except OSError:
        channel.send(("forked", number, []))
        forker = -1
    if forker == 0:
        _die_with(template)
        forker = os.getpid()
        return forker, _run_forker(channel, number, descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    if forker > 0 and os.waitpid(forker, 0)[1]:  # killed, perhaps before it sent the pids
        channel.send(("forked", number, []))
    return None


def _run_forker(channel: "_Channel", number: int, descriptors: "list[int]") -> "socket.socket":
    """Fork the standbys, in the forker. Returns only in standbys."""
    pids = []
    for descriptor in descriptors:
        try:
            pid = os.fork()
        except OSError:
            break
        if pid == 0:
            for other in descriptors:
                if other != descriptor:
                    os.close(other)
            return socket.socket(fileno=descriptor)
        pids.append(pid)
    # Sent before the forker exits: the keeper has the pids when it becomes their parent.
    channel.send(("forked", number, pids))
    os._exit(0)


# --- standby and worker -----------------------------------------------------------------------------------------------


def _die_with(parent: int) -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


def _wait_for_end(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(pid)
        select.select([handle], [], [])
        os.close(handle)


def _receive_spec(sock: "socket.socket") -> "tuple[dict[str, Any], list[int]]":
    _, descriptors = _receive(sock, 1)
    if not descriptors:
        os._exit(1)  # the keeper is gone or closed the pool
    memory, *rest = descriptors
    with open(memory, "rb") as file:
        file.seek(0)
        spec = marshal.load(file)  # noqa: S302 - written by the keeper into an anonymous file
    return spec, rest


def _set_up(spec: "dict[str, Any]") -> "list[int]":
    """Call the setup function, with the environment of the worker that this standby may replace.

    Returns descriptors that have the numbers that a worker's may have, so that nothing that the function opens has.
    """
    import resource

    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    reserved = [null]
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    most = _MAX_RESERVED if limit == resource.RLIM_INFINITY else min(_MAX_RESERVED, limit // 2)
    while reserved[-1] < most:
        reserved.append(os.dup(null))
    os.environb.clear()
    os.environb.update(spec["env"])
    tenax_preload.restore_pythonpath()
    tenax_preload.apply_environment_changes()
    if spec["cpus"]:
        os.sched_setaffinity(0, spec["cpus"])
    module, _, name = spec["setup"].partition(":")
    try:
        with tenax_preload.script_folder_first():
            __import__(module)
            getattr(sys.modules[module], name)()
    except Exception as error:  # the worker can do without, and what is wrong may show there
        text = " ".join(f"--standby-setup {spec['setup']} failed: {type(error).__name__}: {error}".split())
        os.write(2, f"{text[:_MAX_ERROR_LENGTH]}\n".encode(errors="replace"))
    return reserved


def _discard_signals(keeper: int) -> None:
    """Discard signals sent to all processes of the job before this one became a worker.

    Except the keeper's: it signals only workers, and may have done so since it sent the spec.
    """
    while (pending := signal.sigtimedwait(_CATCHABLE, 0)) is not None:
        if pending.si_pid == keeper:
            os.kill(os.getpid(), pending.si_signo)
            return


def _become_worker(spec: "dict[str, Any]", descriptors: "list[int]") -> None:
    """Do what the keeper does for a worker between fork and exec, and what exec does."""
    error_writer, *received = descriptors
    trying = ""
    try:
        os.setsid()
        error_writer = _renumber(received, spec["numbers"], error_writer)
        if spec["cwd"]:
            trying = os.fsdecode(spec["cwd"])
            os.chdir(spec["cwd"])
        if spec["cpus"]:
            trying = f"CPUs {spec['cpus']}"
            os.sched_setaffinity(0, spec["cpus"])
    except OSError as error:
        text = f"{error.errno or 0} {os.strerror(error.errno or 0)}: {trying!r}"
        os.write(error_writer, text.encode(errors="replace"))
        os._exit(_CANNOT_START)
    os.environb.clear()
    os.environb.update(spec["env"])
    tenax_preload.apply_environment_changes()
    _take_arguments([os.fsdecode(word) for word in spec["argv"]])
    tenax_preload.reset_process_state()
    os.close(error_writer)


def _take_arguments(argv: "list[str]") -> None:
    """Set this worker's own arguments, such as ``--local-rank=3``."""
    if argv[1:] == sys.orig_argv[1:]:
        return
    count = len(sys.argv) - 1
    if count:
        sys.argv[1:] = argv[-count:]
    sys.orig_argv[1:] = argv[1:]
    _Title().write(b"".join(os.fsencode(word) + b"\0" for word in argv))


def _renumber(received: "list[int]", numbers: "list[int]", error_writer: int) -> int:
    """Give each descriptor the number that the worker expects. Return the new number of the error pipe."""
    import fcntl

    beyond = max([*numbers, 2]) + 1
    asides = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, beyond) for descriptor in (error_writer, *received)]
    for descriptor in (error_writer, *received):
        os.close(descriptor)
    for number, aside in zip(numbers, asides[1:], strict=True):
        os.dup2(aside, number)
        os.close(aside)
    return asides[0]


class _Title:
    """The command line that process listings show: a fixed-size area of this process's memory."""

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
        except (OSError, ValueError, IndexError):  # hidden by the system; cosmetic
            self._before = b""

    def restore(self) -> None:
        self.write(self._before)

    def write(self, text: bytes) -> None:
        """Write as much as fits."""
        size = len(self._before)
        if not size:
            return
        try:
            with open("/proc/self/mem", "r+b", buffering=0) as memory:
                memory.seek(self._start)
                memory.write(text[: size - 1].ljust(size, b"\0") if len(text) != size else text)
        except OSError:  # cosmetic
            self._before = b""


def _process_name() -> bytes:
    with open("/proc/self/comm", "rb") as file:
        return file.read().rstrip(b"\n")


def _set_process_name(name: bytes) -> None:
    with open("/proc/self/comm", "wb", buffering=0) as file:
        file.write(name[:15])


# --- the channel ------------------------------------------------------------------------------------------------------


class _Channel:
    """One end of a ``tenax._io.helper_channel``, blocking."""

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
        """Return the next message and its descriptors. Exits when the keeper is gone."""
        while True:
            if len(self._received) >= _HEADER.size:
                size, count = _HEADER.unpack_from(self._received)
                end = _HEADER.size + size
                if len(self._received) >= end:
                    message = marshal.loads(self._received[_HEADER.size : end])  # noqa: S302 - from the keeper
                    self._received = self._received[end:]
                    descriptors = self._descriptors[:count]
                    del self._descriptors[:count]
                    return message, descriptors
            data, descriptors = _receive(self._sock, 1 << 16)
            self._descriptors += descriptors
            if not data:
                os._exit(0)
            self._received += data

    def fileno(self) -> int:
        return self._sock.fileno()

    def close(self) -> None:
        self._sock.close()


def _receive(sock: "socket.socket", size: int) -> "tuple[bytes, list[int]]":
    data, ancillary, _, _ = sock.recvmsg(size, socket.CMSG_SPACE(_MAX_DESCRIPTORS * 4), socket.MSG_CMSG_CLOEXEC)
    descriptors: list[int] = []
    for level, kind, payload in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            count = len(payload) // 4
            descriptors += struct.unpack(f"{count}i", payload[: count * 4])
    return data, descriptors
