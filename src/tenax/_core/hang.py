"""Detects whether the workers of one node have stopped making progress. Samples in, an assessment out.

    nothing known -> a rhythm is established -> no activity for far too long -> quiet -> activity -> ...

A job is active if its script reports a step, enters or leaves a watchdog scope, or if a thread does something that a
waiting thread does not. Each thread is judged by itself. A thread that waits sleeps, polls (wakes up at most 150 times
a second and hardly runs) or spins (is runnable all the time and never waits). A worker of which all threads wait is
*still*, unless it reads or writes, touches new memory, or starts processes. If its main threads are blocked, the few
bytes of a thread that logs do not count either.

How long a job may be still is learned from the job itself: the longest stillness that was followed by activity, in this
generation and earlier ones, times a generous factor, and at least ``hang_after_s``.

Invariants (tests cite the numbers):

H1  A node is assessed only after a rhythm was established in this generation: a few steps; or, without steps,
    ``hang_after_s`` of activity, or a fair amount of it over a much longer time. A start may take any time.
H2  A worker in a reported phase (``tenax.progress.phase``) is not quiet, nor is one that writes to a disk, which is
    probably a checkpoint. While other bytes flow, missing steps count only after a much longer time.
H3  A node is quiet only if every running worker has been still without interruption for at least ``hang_after_s`` and
    ten times its longest earlier stillness; three times as long if it spins and reports no steps, because computing
    looks the same. A job of one computing worker is never quiet. In doubt, a node is not quiet. Inside a watchdog scope
    all periods are six times as long: a scope has its own timeout, which the watchdog enforces.
H4  A quiet period ends with progress, and its reason names it: a step, a scope, I/O, computing. Page faults or wake-ups
    do not end it. The next one must last twice as long as this one.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

# Factors of how long a job may be still.
PATIENCE = 10.0  # of the longest gap
SPIN_PATIENCE = 3.0  # in addition, if it spins
DOUBT_PATIENCE = 6.0  # in addition, if missing steps may have another explanation
QUIET_PATIENCE = 2.0  # of the longest quiet period that ended
START_PATIENCE = 2.0  # of the longest gap during a start, when workers wait for each other
_FEW_STEPS = 3
_START_MOVES = 10  # samples with activity or steps: before that the job is starting
_FEW_MOVES, _LONG = 20, 5.0  # samples with activity, over this multiple of ``hang_after_s``: a rhythm of bursts
_ASLEEP = 0.05  # share of the time that a thread is runnable
_HARDLY = 0.01  # the same: so little that it does not matter how often it was preempted
_AWAKE = 0.9
_BLUR_S = 0.1  # the kernel accounts the time of queued threads late
_MAX_WAKES = 150.0  # per second, of a thread that polls: each loop of gloo wakes up 100 times a second
_BLOCKED_WAKES = 1.0  # per second, of a thread that waits without polling
_SLEEPS = 0.5  # share of the times it stopped running in which a polling thread did so by itself
_MAX_WAITS = 5.0  # per second, of a spinning thread
_MAX_FAULTS = 20.0  # per second: an occasional page of memory
_FEW_BYTES = 4 << 10  # per second, and for once: a thread that logs
_FEW_PAGES = 16 << 10  # bytes: a line changes two pages of a file, and again after the kernel has written them to disk
_MANY_BYTES = 64 << 10  # per second
_MANY_FAULTS = 100.0  # per second: more than writing a log line takes
_WORKS = 0.1  # of one CPU: more than a heartbeat takes
_TICKS_S = 0.02  # the resolution of the kernel's CPU time of a process
_LATE = 3.0  # intervals: a later sample is discarded, because the sampler itself was suspended


class Thread(msgspec.Struct, frozen=True):
    """Counters of one thread since it started."""

    ran_s: float  # time on a CPU
    wanted_s: float  # time that it was runnable, on a CPU or not
    runs: int  # how often it was scheduled
    waits: int | None = None  # how often it blocked; None: not read
    is_main: bool = False  # of its process


class ProcessCounters(msgspec.Struct, frozen=True):
    """Counters of a worker and its descendants since they started. They only grow, except when a descendant exits."""

    read_bytes: int = 0  # by system calls, from files, pipes and sockets
    written_bytes: int = 0
    calls: int = 0  # read and write calls
    main_calls: int = 0  # of the main threads
    disk_bytes: int = 0  # written to a disk, or to its cache
    faults: int = 0  # page faults
    processes: int = 1
    is_stopped: bool = False  # by a signal or a debugger
    threads: Mapping[int, Thread] | None = None  # by thread id; None: not read, because other counters changed
    cpu_s: float = 0.0  # in total, if threads cannot be read
    has_threads: bool = True  # whether this system provides counters of threads


class Scopes(msgspec.Struct, frozen=True):
    """One worker's use of watchdog scopes (``watchdog.py``) in this generation."""

    beats: int  # scopes entered and left
    first_at: float
    last_at: float
    is_in_one: bool


class Sample(msgspec.Struct, frozen=True):
    """One sample of one worker."""

    local_rank: int
    vitals: ProcessCounters | None = None  # None: they could not be read
    step: int | None = None  # the last reported one
    step_at: float = 0.0
    first_step: int = 0
    first_step_at: float = 0.0
    phase: str = ""
    scopes: Scopes | None = None  # None: it has used none


class Assessment(msgspec.Struct, frozen=True):
    """Whether a node is quiet, and since when."""

    is_quiet: bool
    since: float = 0.0  # the last activity
    why: str = ""
    stopped: tuple[int, ...] = ()  # local ranks that are stopped by SIGSTOP or a debugger
    active_rank: int = -1  # local rank of a worker that is active, and ...
    activity: str = ""  # ... what it does


class Learned(msgspec.Struct):
    """What is kept across generations."""

    longest_gap_s: float = 0.0  # the longest stillness that was followed by activity
    longest_start_s: float = 0.0  # the same, at the start of a generation
    longest_step_s: float = 0.0  # between two steps of one worker
    longest_quiet_s: float = 0.0  # the longest quiet period that ended


class _Worker(msgspec.Struct):
    """The last sample of one worker, and when it was last active."""

    last: Sample
    moved_at: float
    worked_at: float  # when it last did more than a heartbeat thread does
    is_spinning: bool = False
    flowed_at: float | None = None  # when bytes last flowed
    steps_seen: int = 0
    has_stepped: bool = False  # between the last two samples
    step_looks: int = 0  # number of samples with a new step
    step_moved_at: float = 0.0


class HangDetector:
    """Assesses one node. Call ``begin`` for each generation, then ``look`` with samples of all running workers."""

    def __init__(self, hang_after_s: float, interval_s: float) -> None:
        self._after_s = hang_after_s
        self._interval_s = interval_s
        self.learned = Learned()
        self.begin(1, 0.0)

    def begin(self, world_size: int, now: float) -> None:
        """Start a new generation: a rhythm must be established again; what was learned is kept."""
        self._is_alone = world_size == 1
        self._workers: dict[int, _Worker] = {}
        self._looked_at = now
        self._first_moved_at: float | None = None
        self._last_moved_at = now
        self._last_activity = -1, ""  # local rank, and what it did
        self._moves, self._moved_s = 0, 0.0
        self._quiet_since: float | None = None
        self.is_disturbed = True

    def rebase(self) -> None:
        """Ignore activity until the next sample, which must include threads: tenax itself disturbed the workers."""
        self.is_disturbed = True

    def look(self, samples: list[Sample], now: float) -> Assessment:
        late = now - self._looked_at > _LATE * self._interval_s
        elapsed_s, self._looked_at = now - self._looked_at, now
        known = self._workers
        self._workers = {}
        activities: list[tuple[int, str]] = []
        if not samples or known.keys() - {sample.local_rank for sample in samples}:
            activities.append((-1, "a worker has exited"))
        for sample in samples:
            if (worker := known.get(sample.local_rank)) is None:
                worker, what = _Worker(sample, now, now, step_moved_at=now), "has started"
                self._meet_steps(worker, sample)
            else:
                what = self._compare(worker, sample, elapsed_s, now, is_void=late or self.is_disturbed)
                worker.last = sample
            self._workers[sample.local_rank] = worker
            if what:
                activities.append((sample.local_rank, what))
        if late and self._quiet_since is None:  # their activity in between is not known
            self._last_moved_at = now
            for worker in self._workers.values():
                worker.moved_at = worker.worked_at = worker.step_moved_at = now
        self.is_disturbed = False
        if activities:
            self._last_activity = activities[0]
            self._note_movement(now)
        assessment = self._assess(now)
        if assessment.is_quiet:
            self._quiet_since = assessment.since
            return assessment
        if self._quiet_since is not None:
            self.learned.longest_quiet_s = max(self.learned.longest_quiet_s, now - self._quiet_since)
            self._quiet_since = None
        rank, what = self._last_activity
        return Assessment(is_quiet=False, active_rank=rank, activity=what)

    # --- comparing samples --------------------------------------------------------------------------------------------

    def _compare(self, worker: _Worker, sample: Sample, elapsed_s: float, now: float, *, is_void: bool) -> str:
        """Return what the worker did, or "" if it was still. In doubt it was active."""
        before, what = worker.last, ""
        has_stepped = sample.step is not None and (sample.step, sample.step_at) != (before.step, before.step_at)
        if has_stepped:
            if before.step is None:
                self._meet_steps(worker, sample)
            else:
                if self._quiet_since is None:
                    self.learned.longest_step_s = max(self.learned.longest_step_s, self._step_gap(worker, sample, now))
                worker.steps_seen += 1
            worker.step_moved_at = now
            worker.step_looks += 1
            what = "reported a step"
        worker.has_stepped = has_stepped
        if _beats(sample) > _beats(before):
            what = what or "entered or left a watchdog scope"
        if sample.phase or before.phase != sample.phase:
            worker.step_moved_at = now  # a phase is not a gap
            what = what or "reported a phase"
        if before.vitals is None or sample.vitals is None:
            what = what or "cannot be observed"
            worker.worked_at = now
        elif not is_void:
            change = _change(before.vitals, sample.vitals, elapsed_s)
            if _flows(before.vitals, sample.vitals, elapsed_s):
                worker.flowed_at = now
            if _works(before.vitals, sample.vitals, elapsed_s):
                worker.worked_at = now
            if sample.vitals.disk_bytes - before.vitals.disk_bytes > _MANY_BYTES * elapsed_s:
                worker.step_moved_at = now
            if not change.what:
                worker.is_spinning = change.is_spinning
                if change.is_spinning and self._is_alone:
                    what = what or "may be computing"
            elif self._quiet_since is None or not change.is_slight:
                what = what or change.what
        if what:
            worker.moved_at = now
        return what

    def _meet_steps(self, worker: _Worker, sample: Sample) -> None:
        """Take the first known steps of a worker, which may be many."""
        if sample.step is not None:
            worker.steps_seen = max(1, sample.step - sample.first_step)
            worker.has_stepped = True
            if worker.steps_seen == 1:
                gap_s = min(max(0.0, sample.step_at - sample.first_step_at), self._interval_s)
                self.learned.longest_step_s = max(self.learned.longest_step_s, gap_s)

    def _step_gap(self, worker: _Worker, sample: Sample, now: float) -> float:
        """Estimate the gap between two steps of one worker: at most the time between the last steps of two samples.

        With many steps per sample, the time since the last step is a random part of a gap; over several samples the
        longest of these approaches the longest gap.
        """
        before = worker.last
        gap_s = min(max(0.0, sample.step_at - before.step_at), now - worker.step_moved_at + self._interval_s)
        are_many = worker.has_stepped and (sample.step or 0) - (before.step or 0) > 1
        part_s = now - sample.step_at
        return part_s if are_many and 0 <= part_s <= gap_s else gap_s

    def _note_movement(self, now: float) -> None:
        gap_s = now - self._last_moved_at
        if self._first_moved_at is None:
            self._first_moved_at = now
        elif gap_s > 1.5 * self._interval_s and self._quiet_since is None:
            if self._moves < _START_MOVES:
                self.learned.longest_start_s = max(self.learned.longest_start_s, gap_s)
            else:
                self.learned.longest_gap_s = max(self.learned.longest_gap_s, gap_s)
        self._last_moved_at = now
        self._moves += 1
        self._moved_s += min(gap_s, self._interval_s)

    # --- assessing ----------------------------------------------------------------------------------------------------

    def _assess(self, now: float) -> Assessment:
        workers = self._workers.values()
        if not workers or any(worker.last.phase for worker in workers):
            return Assessment(is_quiet=False)
        steps_seen = max(worker.steps_seen for worker in workers)
        is_in_scope = any(worker.last.scopes is not None and worker.last.scopes.is_in_one for worker in workers)
        patience = DOUBT_PATIENCE if is_in_scope else 1.0
        if steps_seen >= _FEW_STEPS:
            return self._by_steps(now, patience)
        return self._by_vitals(now, DOUBT_PATIENCE if steps_seen else patience)

    def _by_steps(self, now: float, patience: float) -> Assessment:
        """Assess by missing steps, allowing more time while other activity is visible."""
        workers = list(self._workers.values())
        since = max(worker.step_moved_at for worker in workers if worker.steps_seen)
        if self._is_alone:
            since = max(since, *(worker.worked_at for worker in workers))
        longest_s = self.learned.longest_step_s
        if max(worker.step_looks for worker in workers) < _START_MOVES:
            longest_s = max(longest_s, self._interval_s)  # gaps shorter than the interval are not known yet
        if self._have_bytes_flowed(now):
            patience = DOUBT_PATIENCE  # it may be an evaluation or a download
        if now - since < self._wait_s(PATIENCE * longest_s, patience):
            return Assessment(is_quiet=False)
        return Assessment(True, since, "no worker reports steps any more", _stopped(workers))

    def _have_bytes_flowed(self, now: float) -> bool:
        return any(
            worker.flowed_at is not None and now - worker.flowed_at < self._after_s for worker in self._workers.values()
        )

    def _by_vitals(self, now: float, patience: float) -> Assessment:
        workers = list(self._workers.values())
        if not self._has_rhythm():
            return Assessment(is_quiet=False)
        since = max(worker.moved_at for worker in workers)
        spinning = [worker for worker in workers if worker.is_spinning]
        if spinning:
            patience *= SPIN_PATIENCE
        learned_s = max(PATIENCE * self.learned.longest_gap_s, START_PATIENCE * self.learned.longest_start_s)
        if now - max(since, self._last_moved_at) < self._wait_s(learned_s, patience):
            return Assessment(is_quiet=False)
        how = "asleep" if not spinning else "spinning" if len(spinning) == len(workers) else "asleep or spinning"
        why = f"all workers are {how}, and nothing is read, written or computed"
        return Assessment(True, max(since, self._last_moved_at), why, _stopped(workers))

    def _wait_s(self, learned_s: float, patience: float) -> float:
        wait_s = patience * max(self._after_s, learned_s)
        return max(wait_s, QUIET_PATIENCE * self.learned.longest_quiet_s)

    def _has_rhythm(self) -> bool:
        if self._first_moved_at is None or self._moved_s >= self._after_s:
            return self._first_moved_at is not None
        return self._moves >= _FEW_MOVES and self._last_moved_at - self._first_moved_at >= _LONG * self._after_s


def _beats(sample: Sample) -> int:
    return sample.scopes.beats if sample.scopes is not None else 0


def _stopped(workers: list[_Worker]) -> tuple[int, ...]:
    return tuple(
        worker.last.local_rank for worker in workers if worker.last.vitals is not None and worker.last.vitals.is_stopped
    )


def _moved_bytes(before: ProcessCounters, after: ProcessCounters) -> int:
    return abs(after.read_bytes - before.read_bytes) + abs(after.written_bytes - before.written_bytes)


def _flows(before: ProcessCounters, after: ProcessCounters, elapsed_s: float) -> bool:
    """Whether more bytes were read or written than by heartbeats and logging."""
    return _moved_bytes(before, after) > _MANY_BYTES * elapsed_s


def _works(before: ProcessCounters, after: ProcessCounters, elapsed_s: float) -> bool:
    """Whether a worker did more than a heartbeat thread does. A spinning worker counts as working."""
    if _flows(before, after, elapsed_s) or after.faults - before.faults > _MANY_FAULTS * max(1.0, elapsed_s):
        return True
    max_s = _WORKS * elapsed_s + _TICKS_S
    if abs(after.cpu_s - before.cpu_s) > max_s:  # abs: the CPU time of exited children is no longer included
        return True
    if before.threads is None or after.threads is None:
        return False
    both = [(before.threads[number], after.threads[number]) for number in before.threads.keys() & after.threads.keys()]
    wanted_s = sum(now.wanted_s - then.wanted_s for then, now in both)
    return wanted_s > max_s or any(now.runs - then.runs > _MAX_WAKES * elapsed_s for then, now in both)


class _Change(NamedTuple):
    """What a worker did between two samples."""

    what: str = ""  # empty: it was still
    is_spinning: bool = False
    is_slight: bool = False  # it is not enough to end a quiet period


def _change(before: ProcessCounters, after: ProcessCounters, elapsed_s: float) -> _Change:
    few_bytes = _FEW_BYTES * (1.0 + elapsed_s)
    disk_bytes = after.disk_bytes - before.disk_bytes
    faults = after.faults - before.faults
    if before.processes != after.processes:
        return _Change("started or ended processes")
    if (
        before.main_calls != after.main_calls
        or _moved_bytes(before, after) > few_bytes
        or not 0 <= disk_bytes <= few_bytes + _FEW_PAGES
    ):
        return _Change("reads or writes")
    if elapsed_s <= 0 or faults > _MAX_FAULTS * elapsed_s:
        return _Change("uses new memory", is_slight=faults <= _MANY_FAULTS * max(1.0, elapsed_s))
    if not after.has_threads:
        return _change_of_cpu(before, after, elapsed_s)
    if before.threads is None or after.threads is None or before.threads.keys() != after.threads.keys():
        return _Change("started or ended threads", is_slight=True)
    has_read_or_written = before.calls != after.calls  # by another thread than a main thread
    is_spinning = False
    for number, now in after.threads.items():
        then = before.threads[number]
        wakes, waits = now.runs - then.runs, _difference(then.waits, now.waits)
        if has_read_or_written and now.is_main and wakes > 1 + _BLOCKED_WAKES * elapsed_s:
            return _Change("reads or writes")
        if _is_asleep(then, now, waits, elapsed_s):
            if wakes > _MAX_WAKES * elapsed_s:
                return _Change("wakes up often", is_slight=True)
        elif waits is None or now.wanted_s - then.wanted_s < _AWAKE * elapsed_s - _BLUR_S:
            return _Change("computes", is_slight=waits is None)
        elif waits > _MAX_WAITS * elapsed_s:
            return _Change("computes")  # a thread that blocks repeatedly gets what it waits for
        else:
            is_spinning = True
    return _Change(is_spinning=is_spinning)


def _is_asleep(then: Thread, now: Thread, waits: int | None, elapsed_s: float) -> bool:
    """Whether a thread hardly ran. On a busy machine a thread that polls waits for a CPU after each wake-up."""
    if now.wanted_s - then.wanted_s <= _ASLEEP * elapsed_s:
        return True
    if not waits:
        return False
    ran_s = now.ran_s - then.ran_s
    has_slept = waits >= _SLEEPS * (now.runs - then.runs)  # it was not preempted most times
    return ran_s <= _HARDLY * elapsed_s or (has_slept and ran_s <= _ASLEEP * elapsed_s)


def _difference(then: int | None, now: int | None) -> int | None:
    return None if then is None or now is None else now - then


def _change_of_cpu(before: ProcessCounters, after: ProcessCounters, elapsed_s: float) -> _Change:
    """Without counters of threads: still only if nothing is read or written and a whole number of CPUs is used."""
    if before.calls != after.calls:
        return _Change("reads or writes")
    used = (after.cpu_s - before.cpu_s) / elapsed_s
    whole = round(used)
    return _Change("computes") if abs(used - whole) > _ASLEEP * max(1, whole) else _Change(is_spinning=whole > 0)
