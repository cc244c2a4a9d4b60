"""The keeper: the process above all workers of a node. It starts, reaps and ends them; it decides nothing.

Why it exists: agents die too. The keeper is an ancestor of every worker and their subreaper, so that a descendant that
changed its session or lost its parent is still found below it. When the agent's channel closes, for whatever reason,
the keeper kills everything below itself and leaves. It runs from the standard library alone, holds no user code (except
for the start method ``fork``, where it is a copy of the agent), and has one thread: a worker's death signal (PDEATHSIG,
the belt to these braces should the keeper itself be killed) is tied to the thread that forked it.

Orders from the agent                                       Answers
  template, spec, plan  + descriptors                         warm, seconds, modules, {module: why it was left out}
                                                              cold, {module: why}
                                                              slow, seconds waited, seconds at most
                                                              said, what the template printed
  start, generation, local_rank, spec  + descriptors          started, generation, local_rank, pid
                                                              start_failed, generation, local_rank, errno, text
  signal, generation, signum                                  exited, generation, local_rank, exit code, asked
  dump, generation, local_rank, signum                        dump_refused, generation, local_rank, why
  end, generation, local_rank, signum
  clear, generation                                           cleared, generation
  kill, generation                                            cleared, generation
  hold, seconds                                               fenced, generation
  keep, name  + descriptor
  release, name

"Template" makes the workers warm: they are forked from a process that has imported what they need (``nursery.py``). A
worker that waits for it is started cold as soon as anybody has to hear or end it.

"Dump" and "end" are for one worker. We are its parent, so its number cannot be another's before we have reaped it.

"Hold" is a lease on the workers' lives: unless it is said again in time, everything below is killed, and so is whatever
is started before it is said again. An agent that was cut off from the other nodes must not keep its workers, and one
that is stopped itself cannot see to it. 0 seconds: no limit.

"Keep" gives us a copy of one of the agent's connections. Its other end sees it closed when the last copy is, so it
learns of the agent's death when nothing that the agent started is alive any more, and not before.

"Cleared" has a proof: ``waitpid`` says that this process has no children, or every worker was reaped and the list of
our children holds none but the nursery's. (Children leave that list when we reap them, so nobody can be missing in it.)
Every descendant is below a child of ours or, as an orphan, is one; but for a warm worker in its first moment, which is
still its midwife's child. That one we know by its number, which nobody else can have before we have reaped it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress

from tenax._io.channel import Channel, ChannelClosed
from tenax._processes.descendants import children, descendants, parent_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from tenax._processes.warm_pool import WarmPool

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_STUBBORN_S = 2.0  # after the agent's death: how long a process that SIGKILL does not end may hold us
_MAX_THREADS_SHOWN = 100  # by faulthandler, the newest
_ENOUGH_FILES = 65536
_MAX_LOOKS = 1000  # at a tree that grows while it is cut; deaths make us come back anyway

# Python ignores these two at start and a program started from here would inherit that.
_RESTORED = (signal.SIGPIPE, signal.SIGXFSZ)


class _Worker:
    def __init__(self, generation: int, local_rank: int, pid: int, complaint: int) -> None:
        self.generation = generation
        self.local_rank = local_rank
        self.pid = pid
        self.complaint = complaint  # read end of a pipe that speaks only if the program could not be started
        self.alive = True
        self.asked = False  # with all others
        self.ended = False  # alone


class Keeper:
    """The whole process: one poll over the agent's channel and the deaths of children."""

    def __init__(self, channel: Channel, call: Callable[[dict[str, Any]], None] | None = None) -> None:
        self._channel = channel
        self._call = call  # start methods fork and forkserver: what a forked worker does instead of exec
        self._workers: dict[int, _Worker] = {}
        self._waiting: list[tuple[int, int, dict[str, Any], list[int]]] = []  # to be started, with what that takes
        self._nursery: WarmPool | None = None
        self._own_descriptors: tuple[int, ...] = ()
        self._clearing = 0  # the generation whose end the agent waits for; 0: none
        self._killing = False
        self._held_until: float | None = None
        self._is_lease_over = False  # nobody may live until it is renewed
        self._is_fenced = False  # ... and what is alive is being killed
        self._kept: dict[str, int] = {}
        self._inherited_ignored = [number for number in _catchable() if signal.getsignal(number) is signal.SIG_IGN]
        self._open_files: tuple[int, int] | None = None  # the limit that workers have, where ours was raised
        self._pid = os.getpid()
        self._prctl = _prctl()
        if self._prctl is not None:
            self._prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def run_with_many_files(self) -> None:
        """Serve, with as many open files as may be had: those of workers that wait to be started are with us."""
        import resource

        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = before[1] if before[1] != resource.RLIM_INFINITY else _ENOUGH_FILES
        if before[0] < min(most, _ENOUGH_FILES):
            _limit_open_files((min(most, _ENOUGH_FILES), before[1]))
            self._open_files = before
        self.run()

    def run(self) -> None:
        """Serve until the agent is gone, then leave nothing behind."""
        for number in _catchable():
            signal.signal(number, signal.SIG_IGN)
        deaths, wakeup = self._own_descriptors = os.pipe()
        os.set_blocking(deaths, False)
        os.set_blocking(wakeup, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        poll = select.poll()
        poll.register(deaths, select.POLLIN)
        poll.register(self._channel.fileno(), select.POLLIN)
        watched: set[int] = set()  # of the nursery
        try:
            while True:
                poll.modify(self._channel.fileno(), _interest(self._channel))
                watched = self._watch_nursery(poll, watched)
                ready = {descriptor for descriptor, _ in poll.poll(self._patience_ms())}
                if deaths in ready:
                    _drain(deaths)
                    self._settle()
                if self._channel.fileno() in ready:
                    self._serve()
                if self._nursery is not None:
                    self._tend(self._nursery)
                if self._held_until is not None and time.monotonic() >= self._held_until:
                    self._fence()
        except ChannelClosed:
            self._end_everything(deaths)

    # --- orders -------------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        self._channel.flush()
        for message, descriptors in self._channel.receive():
            match message:
                case ("start", generation, local_rank, spec):
                    self._waiting.append((generation, local_rank, spec, descriptors))
                    self._start_waiting()
                case ("template", spec, plan):
                    self._open_nursery(spec, descriptors, plan)
                case ("signal", generation, number):
                    self._signal(generation, number)
                case ("dump", generation, local_rank, number):
                    self._dump(generation, local_rank, number)
                case ("end", generation, local_rank, number):
                    self._end(generation, local_rank, number)
                case ("clear", generation):
                    self._clear(generation)
                case ("kill", generation):
                    self._start_waiting(at_once=True)
                    self._clearing = generation
                    self._killing = True
                    self._settle()
                case ("hold", seconds):
                    self._held_until = time.monotonic() + seconds if seconds > 0 else None
                    self._is_lease_over = False
                case ("keep", name):
                    self._release(name)
                    self._kept[name] = descriptors[0]
                case ("release", name):
                    self._release(name)

    def _release(self, name: str) -> None:
        descriptor = self._kept.pop(name, -1)
        if descriptor >= 0:
            os.close(descriptor)

    def _patience_ms(self) -> float | None:
        nursery_at = self._nursery.next_moment() if self._nursery is not None else None
        moments = [moment for moment in (self._held_until, nursery_at) if moment is not None]
        return max(0.0, min(moments) - time.monotonic()) * 1000 if moments else None

    def _fence(self) -> None:
        """The lease is over: end what is below us, also what dead workers have left. A standby does no work."""
        self._start_waiting(at_once=True)
        self._held_until = None
        self._is_lease_over = True
        if not self._reap() or not self._workers:  # who is dead already did not die of this
            return
        self._is_fenced = True
        for worker in self._workers.values():
            worker.asked = worker.asked or worker.alive
        self._channel.send(("fenced", max(worker.generation for worker in self._workers.values())))
        self._kill_below(set())

    def _start_waiting(self, *, at_once: bool = False) -> None:
        """Start each worker from a standby; cold if none will come, or if it must be there now."""
        nursery = self._nursery
        while self._waiting:
            if nursery is not None:
                if self._start_warm(nursery, *self._waiting[0]):
                    del self._waiting[0]
                    continue
                nursery.expect(len(self._waiting))
                if nursery.is_coming and not at_once:
                    return
            self._start_cold(*self._waiting.pop(0))

    def _start_warm(
        self, nursery: WarmPool, generation: int, local_rank: int, spec: dict[str, Any], descriptors: list[int]
    ) -> bool:
        try:
            complaint, complain = os.pipe()
        except OSError:
            return False  # cold it fails as well, and says so
        os.set_blocking(complaint, False)
        pid = nursery.activate(spec, descriptors, complain)
        os.close(complain)
        if not pid:
            os.close(complaint)
            return False
        for descriptor in descriptors:
            os.close(descriptor)
        self._has_started(generation, local_rank, pid, complaint)
        return True

    def _start_cold(self, generation: int, local_rank: int, spec: dict[str, Any], descriptors: list[int]) -> None:
        try:
            pid, complaint = self._fork_worker(spec, descriptors)
        except OSError as error:
            reason = os.strerror(error.errno or 0)
            self._channel.send(("start_failed", generation, local_rank, error.errno or 0, reason, time.monotonic()))
        else:
            self._has_started(generation, local_rank, pid, complaint)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _has_started(self, generation: int, local_rank: int, pid: int, complaint: int) -> None:
        self._workers[pid] = _Worker(generation, local_rank, pid, complaint)
        self._channel.send(("started", generation, local_rank, pid))
        if self._is_lease_over:  # the agent was stopped between its decision and this order
            self._fence()

    def _fork_worker(self, spec: dict[str, Any], descriptors: list[int]) -> tuple[int, int]:
        """The pid, and the end of the pipe on which the worker complains if it cannot become what it should."""
        complaint, complain = os.pipe()
        os.set_blocking(complaint, False)
        # We ignore what a worker must hear. Until the worker has changed that for itself, signals to it wait.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            pid = os.fork()
            if pid == 0:
                self._become_worker(spec, descriptors, complaint, complain)
        except OSError:
            os.close(complaint)
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            os.close(complain)
        return pid, complaint

    # --- warm workers -------------------------------------------------------------------------------------------------

    def _open_nursery(self, spec: dict[str, Any], descriptors: list[int], plan: dict[str, Any]) -> None:
        """Start the template as a worker is started, with a channel to it."""
        from tenax._processes.warm import CHANNEL_DESCRIPTOR
        from tenax._processes.warm_pool import WarmPool

        opened = list(descriptors)
        try:
            output, printed = os.pipe()
            opened.append(printed)
            ours, theirs = Channel.pair()
            opened += [os.dup(printed), theirs.detach()]
            spec["numbers"] = [*spec["numbers"], 1, 2, CHANNEL_DESCRIPTOR]
            pid, complaint = self._fork_worker(spec, opened)
        except OSError as error:
            self._channel.send(("cold", {"": f"a template cannot be started ({error.strerror})"}))
            return
        finally:
            for descriptor in opened:
                os.close(descriptor)
        os.close(complaint)
        os.set_blocking(output, False)
        self._nursery = WarmPool(pid, ours, output, plan["standbys"])
        self._nursery.prepare(plan["modules"], plan["late"], plan["has_own_arguments"])

    def _watch_nursery(self, poll: select.poll, watched: set[int]) -> set[int]:
        wanted = set(self._nursery.descriptors()) if self._nursery is not None else set()
        for descriptor in watched - wanted:
            poll.unregister(descriptor)
        for descriptor in wanted - watched:
            poll.register(descriptor, select.POLLIN)
        return wanted

    def _tend(self, nursery: WarmPool) -> None:
        """Whatever woke us: take what the template said, breed when it is time, start who can be started."""
        nursery.listen()
        now = time.monotonic()
        nursery.refill(now)
        self._start_waiting(at_once=nursery.has_waited_too_long(now))
        nursery.is_awaited(len(self._waiting), now)
        for message in nursery.said():
            self._channel.send(message)

    # --- ends ---------------------------------------------------------------------------------------------------------

    def _signal(self, generation: int, number: int) -> None:
        self._start_waiting(at_once=True)
        self._reap()  # who is dead already did not die of this
        for worker in self._workers.values():
            if worker.alive and worker.generation == generation:
                worker.asked = True
                with suppress(PermissionError):  # it runs a program of another user now, such as sudo
                    os.kill(worker.pid, number)
                    os.kill(worker.pid, signal.SIGCONT)  # a stopped process could not obey

    def _dump(self, generation: int, local_rank: int, number: int) -> None:
        """The signal would end a worker that does not expect it."""
        worker = self._living(generation, local_rank)
        if worker is None:
            return  # its end says more
        status = _status(worker.pid)
        why = _why_not(status, number)
        if not why:
            try:
                if _has_many_threads(status) and not _why_not(status, number + 1):
                    # Its main thread would not be among those that are shown, so that is asked for first. A dump that
                    # begins during another one is dropped; as both are for one thread, they rarely meet.
                    _signal_main_thread(worker.pid, number + 1)
                    _signal_main_thread(worker.pid, number)
                else:
                    os.kill(worker.pid, number)
                os.kill(worker.pid, signal.SIGCONT)
            except PermissionError:
                why = "it runs a program of another user"
        if why:
            self._channel.send(("dump_refused", generation, local_rank, why))

    def _end(self, generation: int, local_rank: int, number: int) -> None:
        worker = self._living(generation, local_rank)
        if worker is not None:
            worker.ended = True
            with suppress(PermissionError):
                os.kill(worker.pid, number)
                os.kill(worker.pid, signal.SIGCONT)  # a stopped process could not obey

    def _living(self, generation: int, local_rank: int) -> _Worker | None:
        self._start_waiting(at_once=True)
        self._reap()
        for worker in self._workers.values():
            if worker.alive and (worker.generation, worker.local_rank) == (generation, local_rank):
                return worker
        return None

    def _clear(self, generation: int) -> None:
        """The workers are gone. Ask what is left in the group of a worker that was asked; kill everything else."""
        self._start_waiting(at_once=True)
        self._clearing = generation
        for worker in self._workers.values():
            if worker.asked:
                _signal_group(worker.pid, signal.SIGTERM)
                _signal_group(worker.pid, signal.SIGCONT)
        self._settle()

    # --- deaths -------------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """After a death or an order: report who ended, push who must go, and say so when nobody is left."""
        if not self._reap():
            self._say_cleared()
        elif self._clearing or self._is_fenced:
            spared = (
                set()
                if self._killing or self._is_fenced
                else {worker.pid for worker in self._workers.values() if worker.asked}
            )
            self._kill_below(spared)

    def _reap(self) -> bool:
        """Take note of every child that died; is there any child left, but for the nursery's?"""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return self._nursery is None or self._has_strangers(self._nursery)
            worker = self._workers.get(pid)
            if worker is not None and worker.alive:
                self._say_ended(worker, os.waitstatus_to_exitcode(status))
            elif self._nursery is not None:
                self._nursery.has_died(pid, os.waitstatus_to_exitcode(status))

    def _has_strangers(self, nursery: WarmPool) -> bool:
        found = children(self._pid)
        nursery.listen()  # in this order: who was born before we looked is known by name now
        is_alive = any(worker.alive for worker in self._workers.values())
        return is_alive or bool(set(found) - nursery.children())

    def _say_ended(self, worker: _Worker, exit_code: int) -> None:
        worker.alive = False
        now = time.monotonic()  # the agent may be stopped, and read this later
        complaint = b""
        with suppress(BlockingIOError):  # a forked worker's own children may hold the other end
            complaint = os.read(worker.complaint, 4096)
        os.close(worker.complaint)
        if complaint:
            number, _, text = complaint.decode(errors="replace").partition(" ")
            self._channel.send(("start_failed", worker.generation, worker.local_rank, int(number), text, now))
        else:
            was_ours = worker.asked or worker.ended
            self._channel.send(("exited", worker.generation, worker.local_rank, exit_code, was_ours, now))

    def _kill_below(self, spared_groups: set[int]) -> None:
        """Kill everybody below us. Deaths wake us, and then we look again, until nobody is left."""
        if not os.path.exists("/proc/self/task"):  # no list of descendants: the groups of our workers stand for them
            for worker in self._workers.values():
                if worker.pid not in spared_groups:
                    _signal_group(worker.pid, signal.SIGKILL)
            return
        seen = {self._pid}
        for _ in range(_MAX_LOOKS):  # who was forked while we looked is found by the next look
            below = [pid for pid in descendants(self._pid) if pid not in seen]
            workers = {worker.pid for worker in self._workers.values() if worker.alive}
            if self._nursery is not None:
                spared = self._nursery.members()
                self._nursery.listen()  # as above
                spared = (spared | self._nursery.members()) - workers
                below = [pid for pid in below if pid not in spared]
            if not below:
                return
            seen.update(below)
            for pid in below:
                if not spared_groups or _group_of(pid) not in spared_groups:
                    _kill(pid, seen | {parent_of(pid)} if pid in workers else seen)  # a worker is ours to reap

    def _say_cleared(self) -> None:
        self._is_fenced = False
        if self._clearing:
            generation, self._clearing, self._killing = self._clearing, 0, False
            self._workers.clear()
            self._channel.send(("cleared", generation))

    def _end_everything(self, deaths: int) -> None:
        """The agent is gone: nobody may outlive it."""
        poll = select.poll()
        poll.register(deaths, select.POLLIN)
        self._channel.close()
        for worker in self._workers.values():  # should we be short of descriptors: looking at /proc takes some
            if worker.alive:
                os.close(worker.complaint)
        self._workers.clear()  # nobody listens any more: deaths are only counted
        self._nursery = None
        while self._reap():
            self._kill_below(set())
            if not poll.poll(_STUBBORN_S * 1000):
                break  # stuck in the kernel; init will have it
            _drain(deaths)
        for descriptor in self._kept.values():
            _finish(descriptor)

    # --- in the worker ------------------------------------------------------------------------------------------------

    def _become_worker(self, spec: dict[str, Any], descriptors: list[int], complaint: int, complain: int) -> None:
        """After fork, in the child. Never returns."""
        trying = ""
        try:
            os.setsid()
            if self._prctl is not None:
                self._prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
                if os.getppid() != self._pid:
                    os._exit(1)  # the keeper died before the line above took effect
            self._close_own(complaint)
            complain, spec["places"] = _place_descriptors(descriptors, spec["numbers"], complain)
            if spec.get("cwd"):
                trying = os.fsdecode(spec["cwd"])
                os.chdir(spec["cwd"])
            if spec.get("cpus"):
                trying = f"CPUs {spec['cpus']}"
                os.sched_setaffinity(0, spec["cpus"])
            self._restore_signals(is_function=not spec["argv"])
            if self._open_files is not None:
                _limit_open_files(self._open_files)
            if spec["argv"]:
                trying = os.fsdecode(spec["argv"][0])
                signal.pthread_sigmask(signal.SIG_SETMASK, ())
                os.execvpe(spec["argv"][0], spec["argv"], spec["env"])
        except OSError as error:
            text = os.strerror(error.errno) if error.errno else str(error)
            if error.errno == errno.ENOENT and os.path.isfile(trying):
                text = "the interpreter that its first line names does not exist"
            os.write(complain, f"{error.errno or 0} {text}: {trying!r}".encode(errors="replace"))
            os._exit(127)
        except BaseException as error:
            os.write(complain, f"0 {type(error).__name__}: {error}".encode(errors="replace"))
            os._exit(127)
        self._call_function(spec, complain)

    def _close_own(self, complaint: int) -> None:
        """What is the keeper's alone. (``exec`` would do it; a function stays in this process.)"""
        signal.set_wakeup_fd(-1)
        others = [worker.complaint for worker in self._workers.values() if worker.alive]
        for descriptor in (*self._own_descriptors, *self._kept.values(), *others, complaint):
            os.close(descriptor)

    def _call_function(self, spec: dict[str, Any], complain: int) -> None:
        try:
            os.close(complain)
            os.environb.clear()
            os.environb.update(spec["env"])
            assert self._call is not None, "this keeper was not started to fork functions"
            self._call(spec)  # ends this process; signals are still held back, and it lets them in
        finally:
            os._exit(70)  # whatever happens, a worker does not go on as a second keeper

    def _restore_signals(self, *, is_function: bool) -> None:
        for number in (*_catchable(), signal.SIGCHLD):
            if number not in self._inherited_ignored:
                signal.signal(number, signal.SIG_DFL)
        if is_function:  # it expects what any Python program finds
            if signal.SIGINT not in self._inherited_ignored:
                signal.signal(signal.SIGINT, signal.default_int_handler)
        else:
            for number in _RESTORED:
                signal.signal(number, signal.SIG_DFL)


def main(descriptor: int) -> None:
    """Entry of the helper process."""
    Keeper(Channel.from_descriptor(descriptor)).run_with_many_files()
    os._exit(0)  # nothing is left to tear down, and the agent waits for our end


def _limit_open_files(limits: tuple[int, int]) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def _catchable() -> list[signal.Signals]:
    """What a scheduler or a person may send to every process of a job: we go when the agent does."""
    return [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2]


def _interest(channel: Channel) -> int:
    return select.POLLIN | (select.POLLOUT if channel.wants_to_write else 0)


def _drain(descriptor: int) -> None:
    with suppress(BlockingIOError):
        while os.read(descriptor, 4096):
            pass


def _finish(descriptor: int) -> None:
    """Close in good order. Merely closing would reset a connection on which something unread has arrived."""
    with suppress(OSError):  # it listens only, or the other side is gone
        socket.socket(fileno=os.dup(descriptor)).shutdown(socket.SHUT_WR)


def _kill(pid: int, family: set[int]) -> None:
    """SIGKILL, if the process with this number is still the one that was seen below us."""
    with suppress(ProcessLookupError, PermissionError):
        if not hasattr(os, "pidfd_open"):
            os.kill(pid, signal.SIGKILL)
            return
        handle = os.pidfd_open(pid)
        try:
            if parent_of(pid) in family:  # the number was not given to somebody else before we had the handle
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)


def _status(pid: int) -> dict[bytes, bytes]:
    """What the system tells of a process, by name; nothing if it does not."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            return dict(line.split(b":", 1) for line in file if b":" in line)
    except OSError:
        return {}


def _why_not(status: dict[bytes, bytes], number: int) -> str:
    """Why this process cannot be asked for its stacks with that signal."""
    if not number:
        return "this system has no signal for that"
    if b"SigCgt" not in status:
        return "the system does not tell which signals it catches"
    is_caught = int(status[b"SigCgt"], 16) >> (number - 1) & 1
    return "" if is_caught else "it is no Python program, or not one that tenax prepared"


def _signal_main_thread(pid: int, number: int) -> None:
    """A signal to the process may be taken by any of its threads."""
    to_thread = getattr(ctypes.CDLL(None), "tgkill", None)  # older C libraries have none
    if to_thread is None:
        os.kill(pid, number)
    else:
        to_thread(pid, pid, number)


def _has_many_threads(status: dict[bytes, bytes]) -> bool:
    return int(status.get(b"Threads", b"0")) > _MAX_THREADS_SHOWN


def _signal_group(leader: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def _group_of(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except OSError:
        return 0


def _place_descriptors(received: list[int], numbers: list[int], complain: int) -> tuple[int, dict[int, int]]:
    """Give each descriptor the number the worker expects, or a free one where that is negative.

    Returns where the complaint pipe went, and where each of them is now, by the number that was asked for.
    """
    import fcntl

    beyond = max([*numbers, 2]) + 1
    asides = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, beyond) for descriptor in (complain, *received)]
    for descriptor in (complain, *received):
        os.close(descriptor)
    complain, *rest = asides
    places = dict(zip(numbers, rest, strict=True))
    for number, aside in places.items():
        if number >= 0:
            os.dup2(aside, number)
            os.close(aside)
            places[number] = number
    return complain, places


def _prctl() -> Callable[..., int] | None:
    if sys.platform != "linux":
        return None
    function: Callable[..., int] = ctypes.CDLL(None).prctl
    return function
