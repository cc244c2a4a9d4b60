"""The judgement whether the workers of one node have stopped moving. Pure: samples in, an opinion out.

    nothing is known -> a rhythm is seen -> nothing moves for far too long -> quiet -> something moves -> ...

A job moves when its script says a step, enters or leaves a scope of the watchdog, or when its processes do something
that a process which only waits does not: read or write, touch new memory, be woken often, use a processor for a part of
the time. One that waits is either asleep, or it spins: some threads want a processor all the time and do nothing else
that can be seen. Both are *still*.

How long a job may be still is learned from the job itself: the longest time that it was still and then went on, in this
generation and in earlier ones, times a generous factor, and never less than what was asked for.

Laws (tests cite the numbers):

H1  Nobody is judged before its rhythm was seen in this generation: some steps; or, without steps, ``hang_after_s`` of
    movement, or a good deal of it over a much longer time. A start takes as long as it takes.
H2  Who says that it is in a phase (``tenax.progress.phase``) is not quiet, and neither is one that writes to a disk:
    that is a checkpoint. If other bytes flow, steps that are missing mean something only after a much longer time.
H3  Quiet is only a node of which every worker that runs is still, without a break, for at least ``hang_after_s`` and
    ten times as long as it was ever still before; and three times that if it spins and says no steps, for that is also
    what computing looks like. A job of one worker that computes is never quiet. On any doubt it is not.
    Without steps, scopes are a rhythm too, if they have come for long: then quiet is also who has none for six times as
    long as that, although a thread beside it logs a line now and then; but not if any worker has computed in all that
    time, or bytes have flowed, and never a job of one worker. In a scope everything takes six times as long: it has a
    time of its own, and the watchdog keeps it.
H4  Whatever moves ends it at once, and what was learned stays: another stillness of that length is no news. Who was
    ended because its scopes were missing could not show that it would have gone on: the next time takes six times as
    long.
"""

from __future__ import annotations

import msgspec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

PATIENCE = 10.0  # times the longest gap
SPIN_PATIENCE = 3.0  # times as long again
DOUBT_PATIENCE = 6.0  # times as long again, if steps are said and it is not clear what that they are missing means
START_PATIENCE = 2.0  # times the longest gap of a start, where workers wait for each other
_FEW_STEPS = 3
_START_MOVES = 10  # looks in which something had moved, or steps were said: before that it is a start
_FEW_MOVES, _LONG = 20, 5.0  # so many looks, and so many times as long as must be still: a rhythm of bursts
_ASLEEP = 0.05  # of the time that a thread wants a processor
_AWAKE = 0.9
_BLUR_S = 0.1  # the kernel notes only later what a thread that is in a queue waits for
_MAX_WAKES = 100.0  # a second, of threads that are asleep: watchdogs and heartbeats look around now and then
_MAX_WAITS = 5.0  # a second, of a thread that spins
_MAX_FAULTS = 20.0  # a second: a page of memory now and then
_MANY_BYTES = 64 << 10  # a second
_MANY_FAULTS = 100.0  # a second: more than a line of a log takes
_WORKS = 0.1  # of one processor: more than a heartbeat takes
_TICKS_S = 0.02  # what the kernel counts of a process is no finer
_LATE = 3.0  # a sample that comes so many intervals late says nothing: who looked was stopped


class Thread(msgspec.Struct, frozen=True):
    """What one thread has done since it began."""

    wanted_s: float  # a processor, whether it got one or not
    runs: int  # how often it was put on one
    waits: int | None = None  # how often it waited for something; None: not looked at


class ProcessCounters(msgspec.Struct, frozen=True):
    """What a worker and everything below it have done since they began. Counters only grow, but for deaths below."""

    read_bytes: int = 0  # by system calls, whatever it was: files, pipes, lines
    written_bytes: int = 0
    calls: int = 0  # that read or wrote
    disk_bytes: int = 0  # that went to a disk, or will
    faults: int = 0  # pages of memory that were touched for the first time
    processes: int = 1
    is_stopped: bool = False  # by a signal or a debugger
    threads: Mapping[int, Thread] | None = None  # by number; None: not looked at, as it had moved anyway
    cpu_s: float = 0.0  # of all of it, where threads cannot be looked at
    has_threads: bool = True  # whether this system tells of threads


class Scopes(msgspec.Struct, frozen=True):
    """What one worker has said to the watchdog (``core.watchdog``) in this generation."""

    beats: int  # scopes entered and left
    first_at: float
    last_at: float
    is_in_one: bool


class Sample(msgspec.Struct, frozen=True):
    """One look at one worker."""

    local_rank: int
    vitals: ProcessCounters | None = None  # None: it could not be looked at
    step: int | None = None  # the last that it said
    step_at: float = 0.0
    first_step: int = 0
    first_step_at: float = 0.0
    phase: str = ""
    scopes: Scopes | None = None  # None: it has none


class Opinion(msgspec.Struct, frozen=True):
    """Of a node. ``since`` is when something was last seen to move."""

    is_quiet: bool
    since: float = 0.0
    why: str = ""
    stopped: tuple[int, ...] = ()  # local ranks that somebody has stopped


class Learned(msgspec.Struct):
    """What outlives a generation."""

    longest_gap_s: float = 0.0  # still, and then it went on
    longest_start_s: float = 0.0  # the same, at the start of a generation
    longest_step_s: float = 0.0  # between two steps of one worker
    longest_scope_s: float = 0.0  # between two beats of its scopes


class _Worker(msgspec.Struct):
    """What was last seen of one, and since when it is still."""

    last: Sample
    moved_at: float
    worked_at: float  # when it was last seen to do more than a heartbeat beside one that waits
    is_spinning: bool = False
    flowed_at: float | None = None  # when bytes were last seen to flow
    steps_seen: int = 0
    has_stepped: bool = False  # between the last two looks
    step_looks: int = 0  # in which it had
    step_moved_at: float = 0.0
    scope_moved_at: float = 0.0


class HangJudge:
    """Of one node. ``begin`` a generation, then ``look`` at every sample of all its workers that run."""

    def __init__(self, hang_after_s: float, interval_s: float) -> None:
        self._after_s = hang_after_s
        self._interval_s = interval_s
        self.learned = Learned()
        self._scopes_missing_s = 0.0  # it is quiet because of that, for so long
        self.begin(1, 0.0)

    def begin(self, world_size: int, now: float) -> None:
        """A new generation: what was learned stays, a rhythm must be shown again."""
        self.learned.longest_scope_s = max(self.learned.longest_scope_s, self._scopes_missing_s / PATIENCE)
        self._scopes_missing_s = 0.0
        self._is_alone = world_size == 1
        self._workers: dict[int, _Worker] = {}
        self._looked_at = now
        self._first_moved_at: float | None = None
        self._last_moved_at = now
        self._moves, self._moved_s = 0, 0.0
        self.is_disturbed = True

    def rebase(self) -> None:
        """Somebody has disturbed them: what they do until the next look is not their doing. Look closely then."""
        self.is_disturbed = True

    def look(self, samples: list[Sample], now: float) -> Opinion:
        late = now - self._looked_at > _LATE * self._interval_s
        elapsed_s, self._looked_at = now - self._looked_at, now
        known = self._workers
        self._workers = {}
        has_moved = not samples  # nobody runs: nothing to say
        has_moved |= bool(known.keys() - {sample.local_rank for sample in samples})  # one has ended
        for sample in samples:
            before = known.get(sample.local_rank)
            if before is None:
                before = _Worker(sample, now, now, step_moved_at=now, scope_moved_at=now)
                self._workers[sample.local_rank] = before
                self._meet_steps(before, sample)
                has_moved = True
                continue
            self._workers[sample.local_rank] = before
            has_moved |= self._compare(before, sample, elapsed_s, now, is_void=late or self.is_disturbed)
            before.last = sample
        if late:  # and how long they were still meanwhile is not known either
            self._last_moved_at = now
            for worker in self._workers.values():
                worker.moved_at = worker.worked_at = worker.step_moved_at = worker.scope_moved_at = now
        self.is_disturbed = False
        if has_moved:
            self._note_movement(now)
        return self._opinion(now)

    # --- what one has done --------------------------------------------------------------------------------------------

    def _compare(self, worker: _Worker, sample: Sample, elapsed_s: float, now: float, *, is_void: bool) -> bool:
        """Whether it has moved, as far as can be seen; a doubt is a movement."""
        before = worker.last
        has_stepped = sample.step is not None and (sample.step, sample.step_at) != (before.step, before.step_at)
        if has_stepped:
            if before.step is None:
                self._meet_steps(worker, sample)
            else:
                self.learned.longest_step_s = max(self.learned.longest_step_s, self._step_gap(worker, sample, now))
                worker.steps_seen += 1
            worker.step_moved_at = now
            worker.step_looks += 1
        worker.has_stepped = has_stepped
        has_beaten = _beats(sample) > _beats(before)
        if has_beaten:
            if _beats(before):
                self.learned.longest_scope_s = max(self.learned.longest_scope_s, now - worker.scope_moved_at)
            worker.scope_moved_at = now
        is_in_phase = bool(sample.phase) or before.phase != sample.phase
        if is_in_phase:
            worker.step_moved_at = worker.scope_moved_at = now  # the time of a phase is no gap
        has_moved = has_stepped or has_beaten or is_in_phase
        if before.vitals is None or sample.vitals is None:
            has_moved = True
            worker.worked_at = now
        elif not is_void:
            kind = _stillness(before.vitals, sample.vitals, elapsed_s)
            if _flows(before.vitals, sample.vitals, elapsed_s):
                worker.flowed_at = now
            if _works(before.vitals, sample.vitals, elapsed_s):
                worker.worked_at = now
            if sample.vitals.disk_bytes - before.vitals.disk_bytes > _MANY_BYTES * elapsed_s:
                worker.step_moved_at = worker.scope_moved_at = now
            if kind is None:
                has_moved = True
            else:
                worker.is_spinning = kind
                has_moved |= kind and self._is_alone  # it may compute
        if has_moved:
            worker.moved_at = now
        return has_moved

    def _meet_steps(self, worker: _Worker, sample: Sample) -> None:
        """The first that is seen of its steps may be many."""
        if sample.step is not None:
            worker.steps_seen = max(1, sample.step - sample.first_step)
            worker.has_stepped = True
            if worker.steps_seen == 1:
                gap_s = min(max(0.0, sample.step_at - sample.first_step_at), self._interval_s)
                self.learned.longest_step_s = max(self.learned.longest_step_s, gap_s)

    def _step_gap(self, worker: _Worker, sample: Sample, now: float) -> float:
        """Between two steps of one worker, as far as it is known: at most what lies between the last of two looks.

        Of many steps from look to look, the time from the last of them until now is a part of such a gap, taken at
        random: in the course of some looks the longest of them comes near the longest gap.
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
        elif gap_s > 1.5 * self._interval_s:
            if self._moves < _START_MOVES:
                self.learned.longest_start_s = max(self.learned.longest_start_s, gap_s)
            else:
                self.learned.longest_gap_s = max(self.learned.longest_gap_s, gap_s)
        self._last_moved_at = now
        self._moves += 1
        self._moved_s += min(gap_s, self._interval_s)

    # --- what that means ----------------------------------------------------------------------------------------------

    def _opinion(self, now: float) -> Opinion:
        workers = self._workers.values()
        self._scopes_missing_s = 0.0
        if not workers or any(worker.last.phase for worker in workers):
            return Opinion(is_quiet=False)
        steps_seen = max(worker.steps_seen for worker in workers)
        is_in_scope = any(worker.last.scopes is not None and worker.last.scopes.is_in_one for worker in workers)
        patience = DOUBT_PATIENCE if is_in_scope else 1.0
        if steps_seen >= _FEW_STEPS:
            return self._by_steps(now, patience)
        opinion = self._by_vitals(now, DOUBT_PATIENCE if steps_seen else patience)
        return opinion if opinion.is_quiet or is_in_scope else self._by_scopes(now)

    def _by_steps(self, now: float, patience: float) -> Opinion:
        """Those that say steps decide; but not against what is plain to see."""
        workers = list(self._workers.values())
        since = max(worker.step_moved_at for worker in workers if worker.steps_seen)
        if self._is_alone:
            since = max(since, *(worker.worked_at for worker in workers))
        longest_s = self.learned.longest_step_s
        if max(worker.step_looks for worker in workers) < _START_MOVES:
            longest_s = max(longest_s, self._interval_s)  # what lay between the looks is not known yet
        wait_s = max(self._after_s, PATIENCE * longest_s)
        quiet_s = now - since
        if self._have_bytes_flowed(now):
            patience = DOUBT_PATIENCE  # an evaluation, a download
        if quiet_s < patience * wait_s:
            return Opinion(is_quiet=False)
        return Opinion(True, since, "no worker says a step any more", _stopped(workers))

    def _by_scopes(self, now: float) -> Opinion:
        """A script need not use them all the time: they must have come for long, and be missing for longer."""
        workers = list(self._workers.values())
        having = [(worker, worker.last.scopes) for worker in workers if worker.last.scopes is not None]
        is_rhythm = any(
            scopes.beats >= _FEW_MOVES and scopes.last_at - scopes.first_at >= _LONG * self._after_s
            for _, scopes in having
        )
        if not is_rhythm or self._is_alone:
            return Opinion(is_quiet=False)
        since = max(*(worker.scope_moved_at for worker, _ in having), *(worker.worked_at for worker in workers))
        if now - since < DOUBT_PATIENCE * max(self._after_s, PATIENCE * self.learned.longest_scope_s):
            return Opinion(is_quiet=False)
        self._scopes_missing_s = now - since
        return Opinion(True, since, "no worker enters or leaves a scope any more", _stopped(workers))

    def _have_bytes_flowed(self, now: float) -> bool:
        return any(
            worker.flowed_at is not None and now - worker.flowed_at < self._after_s for worker in self._workers.values()
        )

    def _by_vitals(self, now: float, patience: float) -> Opinion:
        workers = list(self._workers.values())
        if not self._has_rhythm():
            return Opinion(is_quiet=False)
        since = max(worker.moved_at for worker in workers)
        learned_s = max(PATIENCE * self.learned.longest_gap_s, START_PATIENCE * self.learned.longest_start_s)
        wait_s = patience * max(self._after_s, learned_s)
        spinning = [worker for worker in workers if worker.is_spinning]
        if spinning:
            wait_s *= SPIN_PATIENCE
        if now - max(since, self._last_moved_at) < wait_s:
            return Opinion(is_quiet=False)
        how = "asleep" if not spinning else "spinning" if len(spinning) == len(workers) else "asleep or spinning"
        why = f"all workers are {how}, and nothing is read, written or computed"
        return Opinion(True, max(since, self._last_moved_at), why, _stopped(workers))

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


def _flows(before: ProcessCounters, after: ProcessCounters, elapsed_s: float) -> bool:
    """Bytes, in a quantity that only comes of work."""
    moved = abs(after.read_bytes - before.read_bytes) + abs(after.written_bytes - before.written_bytes)
    return moved > _MANY_BYTES * elapsed_s


def _works(before: ProcessCounters, after: ProcessCounters, elapsed_s: float) -> bool:
    """More than a thread that logs a heartbeat beside one that waits. One that spins may work."""
    if _flows(before, after, elapsed_s) or after.faults - before.faults > _MANY_FAULTS * max(1.0, elapsed_s):
        return True
    most_s = _WORKS * elapsed_s + _TICKS_S
    if abs(after.cpu_s - before.cpu_s) > most_s:  # what a child that ended had used is not counted any more
        return True
    if before.threads is None or after.threads is None:
        return False
    both = [(before.threads[number], after.threads[number]) for number in before.threads.keys() & after.threads.keys()]
    wanted_s = sum(now.wanted_s - then.wanted_s for then, now in both)
    return wanted_s > most_s or sum(now.runs - then.runs for then, now in both) > _MAX_WAKES * elapsed_s


def _stillness(before: ProcessCounters, after: ProcessCounters, elapsed_s: float) -> bool | None:
    """None: it moves. Else whether it spins."""
    is_the_same = (
        before.calls == after.calls
        and before.read_bytes == after.read_bytes
        and before.written_bytes == after.written_bytes
        and before.disk_bytes == after.disk_bytes
        and before.processes == after.processes
    )
    if not is_the_same or elapsed_s <= 0 or after.faults - before.faults > _MAX_FAULTS * elapsed_s:
        return None
    if not after.has_threads:
        return _stillness_by_cpu(before, after, elapsed_s)
    if before.threads is None or after.threads is None or before.threads.keys() != after.threads.keys():
        return None
    is_spinning, wakes = False, 0
    for number, now in after.threads.items():
        then = before.threads[number]
        wanted_s = now.wanted_s - then.wanted_s
        if wanted_s <= _ASLEEP * elapsed_s:
            wakes += now.runs - then.runs
        elif wanted_s < _AWAKE * elapsed_s - _BLUR_S:
            return None
        elif now.waits is None or then.waits is None or now.waits - then.waits > _MAX_WAITS * elapsed_s:
            return None  # who waits for something, again and again, gets it
        else:
            is_spinning = True
    return None if wakes > _MAX_WAKES * elapsed_s else is_spinning


def _stillness_by_cpu(before: ProcessCounters, after: ProcessCounters, elapsed_s: float) -> bool | None:
    """Where threads cannot be looked at: only whole processors, or none."""
    used = (after.cpu_s - before.cpu_s) / elapsed_s
    whole = round(used)
    return None if abs(used - whole) > _ASLEEP * max(1, whole) else whole > 0
