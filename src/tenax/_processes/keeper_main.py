"""The keeper process: the parent of all workers of a node. It starts, reaps and kills them; it makes no decisions.

It exists because agents die too. The keeper is an ancestor of every worker and their subreaper, so a descendant that
changed its session or lost its parent is still below it. When the agent's channel closes, for any reason, the keeper
kills everything below itself and exits. It uses the standard library alone, holds no user code (except for the start
method ``fork``, where it is a copy of the agent), and has one thread: a worker's death signal (PDEATHSIG, the backup
should the keeper itself be killed) is tied to the thread that forked it.

Commands from the agent                                     Replies
  template, spec, plan  + descriptors                         warm, seconds, modules, {module: why it was left out}
                                                              cold, {module: why}
                                                              slow, seconds waited, maximum in seconds
                                                              printed, output of the template
  start, generation, local_rank, spec  + descriptors          started, generation, local_rank, pid
                                                              start_failed, generation, local_rank, errno, text
  signal, generation, signum                                  exited, generation, local_rank, exit code, requested
  dump, generation, local_rank, signum                        dump_refused, generation, local_rank, why
  end, generation, local_rank, signum
  clear, generation, held, number                             cleared, generation, held, number
  kill, generation                                            cleared, generation, [], 0
  adopt, generation, local_rank, next generation              started or exited, next generation, local_rank, ...
  hold, seconds                                               fenced, generation
  keep, name  + descriptor
  release, name
  stop_gently, seconds

"template" makes the workers warm: they are forked from a process that has imported what they need (``warm_pool.py``).
A worker that waits for a standby is started cold as soon as a command needs its process to exist.

"clear" ends what exited workers left behind. The held workers (their local ranks), what descends from them and what is
in their sessions stay; "adopt" makes a held one a worker of the next generation. Held workers are killed like all
others by "kill", at the end of the lease, and after the agent's death.

"dump" and "end" address one worker. The keeper is its parent, so its pid cannot be reused before the keeper reaps it.

"hold" is a lease on the workers: unless it is renewed in time, the keeper kills everything below itself, and anything
it starts before the next renewal. An agent that is cut off from the other nodes must not keep its workers, and a
stopped agent (SIGSTOP) cannot kill them. 0 seconds: no limit.

"keep" gives the keeper a copy of one of the agent's connections. The peer sees it close when the last copy is closed:
after everything that the agent started is gone, and not before.

"stop_gently" is for a server as the only worker (etcd): when the agent is gone, it gets SIGTERM and that many seconds
before everything is killed.

"cleared" is proven: either ``waitpid`` reports that the keeper has no children, or every worker that is not held was
reaped and the keeper's list of children holds only those of the warm pool, the held workers and orphans in their
sessions. (A child leaves that list only when the keeper reaps it, so the list is complete.) Every descendant is below
a child of the keeper or, as an orphan, is one. The exception is a warm worker that was just forked and is still its
forker's child; the keeper has its pid, which cannot be reused before the keeper reaps it.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import _socket as socket
import ctypes
import errno
import os
import select
import signal
import sys
import time
from contextlib import suppress

from tenax._io.helper_channel import Channel, ChannelClosed
from tenax._processes.descendants import children, descendants, parent_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

    from tenax._processes.warm_pool import WarmPool

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_UNKILLABLE_WAIT_S = 2.0  # after the agent's death: how long to wait for a process that survives SIGKILL
_MAX_THREADS_SHOWN = 100  # faulthandler shows the newest
_MAX_OPEN_FILES = 65536
_NEVER = float("inf")
_MAX_SCANS = 1000  # of a tree that grows while it is killed; each death triggers another scan anyway

# Signals that a scheduler or user may send to every process of a job: the keeper ignores them.
_CATCHABLE = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
# Python ignores these two at startup, and workers would inherit that.
_RESTORED = (signal.SIGPIPE, signal.SIGXFSZ)
_C_LIBRARY = ctypes.CDLL(None)


class _Worker:
    def __init__(self, generation: int, local_rank: int, pid: int, error_reader: int) -> None:
        self.generation = generation
        self.local_rank = local_rank
        self.pid = pid
        self.error_reader = error_reader  # pipe that carries data only if the program could not be started
        self.alive = True
        self.stop_requested = False  # together with all others
        self.end_requested = False  # of this worker alone
        self.exit_code = 0  # of one that is not alive ...
        self.ended_at = 0.0


class Keeper:
    """The main loop: one poll over the agent's channel, the deaths of children and the warm pool."""

    def __init__(self, channel: Channel, call: Callable[[dict[str, Any]], None] | None = None) -> None:
        self._channel = channel
        self._call = call  # start methods fork and forkserver: what a forked worker calls instead of exec
        self._workers: dict[int, _Worker] = {}
        self._pending: list[tuple[int, int, dict[str, Any], list[int]]] = []  # to be started
        self._warm_pool: WarmPool | None = None
        self._own_descriptors: tuple[int, ...] = ()
        self._clearing = 0  # the generation that the agent waits to have cleared; 0: none
        self._clear_number = 0  # in its generation; 0: after a kill
        self._killing = False
        self._held: list[int] = []  # local ranks of the workers that stay when the node is cleared
        self._lease_ends_at = _NEVER
        self._is_lease_expired = False  # no worker may run until it is renewed
        self._is_fenced = False  # the lease expired with workers alive, and they are being killed
        self._kept: dict[str, int] = {}
        self._grace_s = 0.0  # for the workers after the agent's death
        self._inherited_ignored = [number for number in _CATCHABLE if signal.getsignal(number) is signal.SIG_IGN]
        self._open_files: tuple[int, int] | None = None  # the workers' limit, if the keeper's was raised
        self._pid = os.getpid()
        if sys.platform == "linux":
            _C_LIBRARY.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def run_with_many_files(self) -> None:
        """Raise the limit on open files and run: the keeper holds the descriptors of workers not yet started."""
        import resource

        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = before[1] if before[1] != resource.RLIM_INFINITY else _MAX_OPEN_FILES
        if before[0] < min(most, _MAX_OPEN_FILES):
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, _MAX_OPEN_FILES), before[1]))
            self._open_files = before
        self.run()

    def run(self) -> None:
        for number in _CATCHABLE:
            signal.signal(number, signal.SIG_IGN)
        deaths, wakeup = self._own_descriptors = os.pipe()
        os.set_blocking(deaths, False)
        os.set_blocking(wakeup, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        try:
            while True:
                poll = select.poll()
                writes = select.POLLOUT if self._channel.wants_to_write else 0
                poll.register(self._channel.fileno(), select.POLLIN | writes)
                for descriptor in (deaths, *(self._warm_pool.descriptors() if self._warm_pool is not None else ())):
                    poll.register(descriptor, select.POLLIN)
                ready = {descriptor for descriptor, _ in poll.poll(self._timeout_ms())}
                if deaths in ready:
                    _drain(deaths)
                    self._settle()
                if self._channel.fileno() in ready:
                    self._serve()
                if self._warm_pool is not None:
                    self._update_warm_pool(self._warm_pool)
                if time.monotonic() >= self._lease_ends_at:
                    self._fence()
        except ChannelClosed:
            self._shut_down(deaths)

    # --- commands -----------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        self._channel.flush()
        for message, descriptors in self._channel.receive():
            match message:
                case ("start", generation, local_rank, spec):
                    self._pending.append((generation, local_rank, spec, descriptors))
                    self._start_pending()
                case ("template", spec, plan):
                    self._open_warm_pool(spec, descriptors, plan)
                case ("signal", generation, number):
                    self._signal(generation, number)
                case ("dump", generation, local_rank, number):
                    self._dump(generation, local_rank, number)
                case ("end", generation, local_rank, number):
                    self._end(generation, local_rank, number)
                case ("clear", generation, held, number):
                    self._clear(generation, held, number)
                case ("adopt", generation, local_rank, following):
                    self._adopt(generation, local_rank, following)
                case ("kill", generation):
                    self._start_pending(at_once=True)
                    self._killing = True
                    self._clearing, self._held, self._clear_number = generation, [], 0
                    self._settle()
                case ("hold", seconds):
                    self._lease_ends_at = time.monotonic() + seconds if seconds > 0 else _NEVER
                    self._is_lease_expired = False
                case ("keep", name):
                    self._release(name)
                    self._kept[name] = descriptors[0]
                case ("release", name):
                    self._release(name)
                case ("stop_gently", seconds):
                    self._grace_s = seconds

    def _release(self, name: str) -> None:
        descriptor = self._kept.pop(name, -1)
        if descriptor >= 0:
            os.close(descriptor)

    def _timeout_ms(self) -> float | None:
        pool_at = self._warm_pool.next_deadline() if self._warm_pool is not None else _NEVER
        first = min(self._lease_ends_at, pool_at)
        return max(0.0, first - time.monotonic()) * 1000 if first < _NEVER else None

    def _fence(self) -> None:
        """The lease expired: kill all descendants but the standbys, including those that dead workers left behind."""
        self._start_pending(at_once=True)
        self._lease_ends_at = _NEVER
        self._is_lease_expired = True
        if not self._reap() or not self._workers:  # reap first: a worker that is already dead did not die of this
            return
        self._is_fenced = True
        self._held = []
        for worker in self._workers.values():
            worker.stop_requested = worker.stop_requested or worker.alive
        self._channel.send(("fenced", max(worker.generation for worker in self._workers.values())))
        self._kill_descendants(set(), set())

    def _start_pending(self, *, at_once: bool = False) -> None:
        """Start each pending worker from a standby; cold if none will come or if it must exist ``at_once``."""
        pool = self._warm_pool
        if pool is not None:
            waiting, self._pending = self._pending, []
            self._pending += [each for each in waiting if not self._start_warm(pool, *each)]
            pool.request(len(self._pending))
            if pool.is_worth_waiting and not at_once:
                return
        while self._pending:
            self._start_cold(*self._pending.pop(0))

    def _start_warm(
        self, pool: WarmPool, generation: int, local_rank: int, spec: dict[str, Any], descriptors: list[int]
    ) -> bool:
        try:
            error_reader, error_writer = os.pipe()
        except OSError:
            return False  # the cold start fails too, and reports it
        os.set_blocking(error_reader, False)
        pid = pool.activate(spec, descriptors, error_writer)
        os.close(error_writer)
        if not pid:
            os.close(error_reader)
            return False
        for descriptor in descriptors:
            os.close(descriptor)
        self._add_worker(generation, local_rank, pid, error_reader)
        return True

    def _start_cold(self, generation: int, local_rank: int, spec: dict[str, Any], descriptors: list[int]) -> None:
        try:
            pid, error_reader = self._fork_worker(spec, descriptors)
        except OSError as error:
            reason = os.strerror(error.errno or 0)
            self._channel.send(("start_failed", generation, local_rank, error.errno or 0, reason, time.monotonic()))
        else:
            self._add_worker(generation, local_rank, pid, error_reader)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _add_worker(self, generation: int, local_rank: int, pid: int, error_reader: int) -> None:
        self._workers[pid] = _Worker(generation, local_rank, pid, error_reader)
        self._channel.send(("started", generation, local_rank, pid))
        if self._is_lease_expired:  # the agent was stopped (SIGSTOP) while it sent this command
            self._fence()

    def _fork_worker(self, spec: dict[str, Any], descriptors: list[int]) -> tuple[int, int]:
        """Return the pid and the read end of the pipe to which the worker writes if it cannot start."""
        error_reader, error_writer = os.pipe()
        os.set_blocking(error_reader, False)
        # The keeper ignores signals that a worker must receive. Block them until the worker has restored its handlers.
        _set_signal_mask(_signal.valid_signals())
        try:
            pid = os.fork()
            if pid == 0:
                self._become_worker(spec, descriptors, error_reader, error_writer)
        except OSError:
            os.close(error_reader)
            raise
        finally:
            _set_signal_mask(())
            os.close(error_writer)
        return pid, error_reader

    # --- warm workers -------------------------------------------------------------------------------------------------

    def _open_warm_pool(self, spec: dict[str, Any], descriptors: list[int], plan: dict[str, Any]) -> None:
        """Start the template the way a worker is started, with a channel to it."""
        from tenax._processes.warm import CHANNEL_DESCRIPTOR
        from tenax._processes.warm_pool import WarmPool

        opened = list(descriptors)
        try:
            output, printed = os.pipe()
            opened.append(printed)
            ours, theirs = Channel.pair()
            opened += [os.dup(printed), theirs.detach()]
            spec["numbers"] = [*spec["numbers"], 1, 2, CHANNEL_DESCRIPTOR]
            pid, error_reader = self._fork_worker(spec, opened)
        except OSError as error:
            self._channel.send(("cold", {"": f"could not start the template ({error.strerror})"}))
            return
        finally:
            for descriptor in opened:
                os.close(descriptor)
        os.close(error_reader)
        os.set_blocking(output, False)
        self._warm_pool = WarmPool(pid, ours, output, plan)

    def _update_warm_pool(self, pool: WarmPool) -> None:
        """After each wakeup: read the template's messages, refill the pool if due, start the workers that can start."""
        pool.receive()
        now = time.monotonic()
        pool.refill(now)
        self._start_pending(at_once=pool.has_timed_out(now))
        pool.set_waiting(len(self._pending), now)
        for message in pool.take_messages():
            self._channel.send(message)

    # --- ends ---------------------------------------------------------------------------------------------------------

    def _signal(self, generation: int, number: int) -> None:
        self._start_pending(at_once=True)
        self._reap()  # a worker that is already dead did not die of this
        for worker in self._workers.values():
            if worker.alive and worker.generation == generation:
                worker.stop_requested = True
                _stop(os.kill, worker.pid, number)

    def _dump(self, generation: int, local_rank: int, number: int) -> None:
        """Make a worker dump its stacks. Refused if it does not catch the signal, which would kill it."""
        worker = self._find_alive(generation, local_rank)
        if worker is None:
            return  # its exit is reported instead
        status = _status(worker.pid)
        why = _why_no_dump(status, number)
        if not why:
            try:
                has_many_threads = int(status.get(b"Threads", b"0")) > _MAX_THREADS_SHOWN
                if has_many_threads and not _why_no_dump(status, number + 1):
                    # The main thread would not be among those shown, so it is dumped first. A dump that starts during
                    # another one is dropped; both signals go to one thread, so they rarely overlap.
                    _signal_main_thread(worker.pid, number + 1)
                    _signal_main_thread(worker.pid, number)
                else:
                    os.kill(worker.pid, number)
                os.kill(worker.pid, signal.SIGCONT)
            except PermissionError:
                why = "it runs as another user"
        if why:
            self._channel.send(("dump_refused", generation, local_rank, why))

    def _end(self, generation: int, local_rank: int, number: int) -> None:
        worker = self._find_alive(generation, local_rank)
        if worker is not None:
            worker.end_requested = True
            _stop(os.kill, worker.pid, number)

    def _find_alive(self, generation: int, local_rank: int) -> _Worker | None:
        self._start_pending(at_once=True)
        self._reap()
        return next((worker for worker in self._find(generation, local_rank) if worker.alive), None)

    def _find(self, generation: int, local_rank: int) -> list[_Worker]:
        where = (generation, local_rank)
        return [worker for worker in self._workers.values() if (worker.generation, worker.local_rank) == where]

    def _adopt(self, generation: int, local_rank: int, following: int) -> None:
        """Make a held worker one of the next generation. If it has exited, report that for the next one."""
        for worker in self._find(generation, local_rank):
            worker.generation = following
            if worker.alive:
                worker.stop_requested = worker.end_requested = False
                self._channel.send(("started", following, local_rank, worker.pid))
            else:
                self._send_exit(worker)
        if self._is_lease_expired:
            self._fence()

    def _clear(self, generation: int, held: list[int], number: int) -> None:
        """Clean up after the workers: SIGTERM to the groups of workers that were stopped, SIGKILL to the rest."""
        self._start_pending(at_once=True)
        self._clearing, self._held, self._clear_number = generation, held, number
        for worker in self._workers.values():
            if worker.stop_requested:
                _stop(os.killpg, worker.pid, signal.SIGTERM)
        self._settle()

    # --- deaths -------------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """After a death or a command: report exits, kill what must go, and report when no process is left."""
        has_children = self._reap()
        is_forced = self._killing or self._is_fenced
        ranks = self._held if self._clearing and not is_forced else []
        held = {worker.pid for worker in self._workers.values() if worker.alive and worker.local_rank in ranks}
        if not has_children or (held and not self._has_other_children(held)):
            self._report_cleared()
        elif self._clearing or self._is_fenced:
            stopped = {worker.pid for worker in self._workers.values() if worker.stop_requested}
            self._kill_descendants(set() if is_forced else stopped, held)

    def _reap(self) -> bool:
        """Reap every dead child and report workers. Return whether children remain besides the warm pool's."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return self._warm_pool is None or self._has_other_children(set())
            worker = self._workers.get(pid)
            if worker is not None and worker.alive:
                self._report_exit(worker, os.waitstatus_to_exitcode(status))
            elif self._warm_pool is not None:
                self._warm_pool.on_child_death(pid, os.waitstatus_to_exitcode(status))

    def _has_other_children(self, held: set[int]) -> bool:
        """Return whether children remain besides the warm pool's, the held workers and orphans in their sessions."""
        found, pool = children(self._pid), self._warm_pool
        if pool is not None:
            pool.receive()  # after listing the children: the pids of standbys forked before that have been announced
        if any(worker.alive and worker.pid not in held for worker in self._workers.values()):
            return True
        others = set(found) - held - (pool.children() if pool is not None else set())
        return not all(_is_in(os.getsid, pid, held) for pid in others) if held else bool(others)

    def _report_exit(self, worker: _Worker, exit_code: int) -> None:
        worker.alive = False
        worker.exit_code, worker.ended_at = exit_code, time.monotonic()  # a stopped agent reads this later
        error = b""
        with suppress(BlockingIOError):  # a forked worker's own children may hold the other end
            error = os.read(worker.error_reader, 4096)
        os.close(worker.error_reader)
        if error:
            number, _, text = error.decode(errors="replace").partition(" ")
            failed = ("start_failed", worker.generation, worker.local_rank, int(number), text, worker.ended_at)
            self._channel.send(failed)
        else:
            self._send_exit(worker)

    def _send_exit(self, worker: _Worker) -> None:
        requested = worker.stop_requested or worker.end_requested
        where = (worker.generation, worker.local_rank)
        self._channel.send(("exited", *where, worker.exit_code, requested, worker.ended_at))

    def _kill_descendants(self, spared_groups: set[int], held: set[int]) -> None:
        """Kill all descendants outside these groups, but no held worker and nothing below it or in its session.

        Each death triggers another call, until none is left.
        """
        if not os.path.exists("/proc/self/task"):  # descendants cannot be listed: signal the workers' groups instead
            for worker in self._workers.values():
                if worker.pid not in spared_groups | held:
                    _stop(os.killpg, worker.pid, signal.SIGKILL)
            return
        seen = {self._pid}
        for _ in range(_MAX_SCANS):  # the next scan finds what was forked during this one
            below = [pid for pid in descendants(self._pid) if pid not in seen]
            workers = {worker.pid for worker in self._workers.values() if worker.alive}
            if self._warm_pool is not None:
                spared = self._warm_pool.members()
                self._warm_pool.receive()  # includes standbys announced meanwhile
                spared = (spared | self._warm_pool.members()) - workers
                below = [pid for pid in below if pid not in spared]
            if held:
                kept = held.union(*(descendants(pid) for pid in held))
                below = [pid for pid in below if pid not in kept and not _is_in(os.getsid, pid, held)]
            if not below:
                return
            seen.update(below)
            for pid in below:
                if not spared_groups or not _is_in(os.getpgid, pid, spared_groups):
                    # A worker's pid cannot be reused before the keeper reaps it, whatever its parent.
                    _kill(pid, seen | {parent_of(pid)} if pid in workers else seen)

    def _report_cleared(self) -> None:
        self._is_fenced = False
        if self._clearing:
            generation, self._clearing, self._killing = self._clearing, 0, False
            self._workers = {pid: worker for pid, worker in self._workers.items() if worker.alive}
            held = sorted(worker.local_rank for worker in self._workers.values())
            self._held = []
            self._channel.send(("cleared", generation, held, self._clear_number))

    def _shut_down(self, deaths: int) -> None:
        """The agent is gone: kill everything below."""
        poll = select.poll()
        poll.register(deaths, select.POLLIN)
        self._channel.close()
        alive = [worker for worker in self._workers.values() if worker.alive]
        for worker in alive:  # free descriptors: scanning /proc needs some
            os.close(worker.error_reader)
        self._workers.clear()  # there is no agent to report exits to
        self._warm_pool = None
        until = time.monotonic() + self._grace_s
        for worker in alive if self._grace_s else ():
            _stop(os.killpg, worker.pid, signal.SIGTERM)
        while (left_s := until - time.monotonic()) > 0 and self._reap() and poll.poll(left_s * 1000):
            _drain(deaths)
        while self._reap():
            self._kill_descendants(set(), set())
            if not poll.poll(_UNKILLABLE_WAIT_S * 1000):
                break  # stuck in the kernel; init adopts it
            _drain(deaths)
        for descriptor in self._kept.values():
            _send_fin(descriptor)

    # --- in the worker ------------------------------------------------------------------------------------------------

    def _become_worker(
        self, spec: dict[str, Any], descriptors: list[int], error_reader: int, error_writer: int
    ) -> None:
        """After fork, in the child. Never returns."""
        trying = ""
        try:
            os.setsid()
            if sys.platform == "linux":
                _C_LIBRARY.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
                if os.getppid() != self._pid:
                    os._exit(1)  # the keeper died before the line above took effect
            self._close_keeper_descriptors(error_reader)
            error_writer, spec["placed"] = _renumber_descriptors(descriptors, spec["numbers"], error_writer)
            if spec["cwd"]:
                trying = os.fsdecode(spec["cwd"])
                os.chdir(spec["cwd"])
            if spec["cpus"]:
                trying = f"CPUs {spec['cpus']}"
                os.sched_setaffinity(0, spec["cpus"])
            self._restore_signals(is_function=not spec["argv"])
            if self._open_files is not None:
                import resource

                resource.setrlimit(resource.RLIMIT_NOFILE, self._open_files)
            if spec["argv"]:
                trying = os.fsdecode(spec["argv"][0])
                _set_signal_mask(())
                os.execvpe(spec["argv"][0], spec["argv"], spec["env"])
        except BaseException as error:
            failure = f"0 {type(error).__name__}: {error}"
            if isinstance(error, OSError):
                text = os.strerror(error.errno) if error.errno else str(error)
                if error.errno == errno.ENOENT and os.path.isfile(trying):
                    text = "the interpreter in its first line does not exist"
                failure = f"{error.errno or 0} {text}: {trying!r}"
            os.write(error_writer, failure.encode(errors="replace"))
            os._exit(127)
        try:
            os.close(error_writer)
            os.environb.clear()
            os.environb.update(spec["env"])
            assert self._call is not None, "this keeper was not started to fork functions"
            self._call(spec)  # unblocks signals and exits this process
        finally:
            os._exit(70)  # a worker must never continue as a second keeper

    def _close_keeper_descriptors(self, error_reader: int) -> None:
        """Close the keeper's own descriptors. (``exec`` would do it, but a function stays in this process.)"""
        signal.set_wakeup_fd(-1)
        others = [worker.error_reader for worker in self._workers.values() if worker.alive]
        for descriptor in (*self._own_descriptors, *self._kept.values(), *others, error_reader):
            os.close(descriptor)

    def _restore_signals(self, *, is_function: bool) -> None:
        for number in (*_CATCHABLE, signal.SIGCHLD):
            if number not in self._inherited_ignored:
                signal.signal(number, signal.SIG_DFL)
        if is_function:  # the defaults of a Python program
            if signal.SIGINT not in self._inherited_ignored:
                signal.signal(signal.SIGINT, signal.default_int_handler)
        else:
            for number in _RESTORED:
                signal.signal(number, signal.SIG_DFL)


def main(descriptor: int) -> None:
    Keeper(Channel.from_descriptor(descriptor)).run_with_many_files()
    os._exit(0)  # nothing is left to tear down, and the agent waits for this exit


def _set_signal_mask(numbers: Iterable[int]) -> None:
    """Block these signals and no others. (``signal`` would make 64 enum members of the result, for every worker.)"""
    _signal.pthread_sigmask(_signal.SIG_SETMASK, numbers)


def _drain(descriptor: int) -> None:
    with suppress(BlockingIOError):
        while os.read(descriptor, 4096):
            pass


def _send_fin(descriptor: int) -> None:
    """Shut down the sending side. Closing alone would reset a connection that has unread input."""
    with suppress(OSError):  # a listening socket, or the peer is gone
        socket.socket(fileno=os.dup(descriptor)).shutdown(socket.SHUT_WR)


def _kill(pid: int, family: set[int]) -> None:
    """Send SIGKILL if this pid is still the descendant that was found: its parent is in ``family``."""
    with suppress(ProcessLookupError, PermissionError):
        if not hasattr(os, "pidfd_open"):
            os.kill(pid, signal.SIGKILL)
            return
        handle = os.pidfd_open(pid)
        try:
            if parent_of(pid) in family:  # the pid was not reused before the handle was opened
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)


def _status(pid: int) -> dict[bytes, bytes]:
    """Return the fields of /proc/PID/status; empty if it cannot be read."""
    with suppress(OSError), open(f"/proc/{pid}/status", "rb") as file:
        return dict(line.split(b":", 1) for line in file if b":" in line)
    return {}


def _why_no_dump(status: dict[bytes, bytes], number: int) -> str:
    """Return why this process cannot dump its stacks at that signal, or an empty string."""
    if not number:
        return "this system has no signal for stack dumps"
    if b"SigCgt" not in status:
        return "/proc does not show which signals it catches"
    is_caught = int(status[b"SigCgt"], 16) >> (number - 1) & 1
    return "" if is_caught else "it is not a Python program prepared for stack dumps"


def _signal_main_thread(pid: int, number: int) -> None:
    """Signal the main thread alone: any thread may take a signal sent to the process."""
    if hasattr(_C_LIBRARY, "tgkill"):  # missing in older C libraries
        _C_LIBRARY.tgkill(pid, pid, number)
    else:
        os.kill(pid, number)


def _stop(signal_it: Callable[[int, int], None], pid: int, number: int) -> None:
    """Send a signal with ``os.kill`` or ``os.killpg``. A stopped process could not react, so let it continue."""
    with suppress(ProcessLookupError, PermissionError):  # it may run a program of another user now, such as sudo
        signal_it(pid, number)
        signal_it(pid, signal.SIGCONT)


def _is_in(get_id: Callable[[int], int], pid: int, leaders: set[int]) -> bool:
    """Return whether a process is in the session (``os.getsid``) or group (``os.getpgid``) of one of these leaders."""
    with suppress(OSError):
        return get_id(pid) in leaders
    return False


def _renumber_descriptors(received: list[int], numbers: list[int], error_writer: int) -> tuple[int, dict[int, int]]:
    """Give each descriptor the number the worker expects, or a free one where that is negative.

    Return the new number of the error pipe, and of each descriptor by its requested number.
    """
    import fcntl

    beyond = max([*numbers, 2]) + 1
    asides = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, beyond) for descriptor in (error_writer, *received)]
    for descriptor in (error_writer, *received):
        os.close(descriptor)
    error_writer, *rest = asides
    placed = dict(zip(numbers, rest, strict=True))
    for number, aside in placed.items():
        if number >= 0:
            os.dup2(aside, number)
            os.close(aside)
            placed[number] = number
    return error_writer, placed
