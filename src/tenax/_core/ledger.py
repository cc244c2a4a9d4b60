"""The ledger: how the time of a run was spent, per generation. Part of the coordinator's state.

    waiting -> starting -> training <-> hung -> stopping -> waiting ...

A generation is *starting* until the workers of all its nodes run and their scripts have imported their modules and, if
a script reports its steps (``tenax.progress``), until its first step. It is *hung* from the last activity before a
reported hang until there is activity again, or until it ends. Training time is *lost* if a later generation repeats its
steps, or if it came after the last step; both are known only for scripts that report steps.

All other time is *waiting*: for the first nodes, for replacements of lost nodes, for the pause of a restart policy, and
for the members of an earlier coordinator's generation to reconnect.

Invariants (tests cite the numbers):

L1  Every second from the first node to the end of the run is in exactly one of the six sums. The time of an earlier
    coordinator counts up to the last generation in its record.
L2  Sums never shrink as time passes. Only reports of workers and of a hang move seconds: imports and steps between
    starting and training of a generation, steps from training to lost, a hang to hung. Lost and hung seconds stay so.
L3  The number of generations kept is limited; the sums of dropped ones are kept.
"""

from __future__ import annotations

from operator import add

import msgspec

from tenax._core.bounds import Count, SumSeconds

_MAX_ENTRIES = 100
_MAX_HANGS = 100  # of one generation: each must take longer than the one before


class Spent(msgspec.Struct, frozen=True, omit_defaults=True):
    """Seconds, by what they were spent on."""

    waiting_s: SumSeconds = 0.0
    starting_s: SumSeconds = 0.0
    training_s: SumSeconds = 0.0
    stopping_s: SumSeconds = 0.0
    lost_s: SumSeconds = 0.0
    hung_s: SumSeconds = 0.0

    @property
    def total_s(self) -> float:
        return self.waiting_s + self.starting_s + self.training_s + self.stopping_s + self.lost_s + self.hung_s

    @property
    def ratio(self) -> float | None:
        """The effective training time ratio; None if no time has passed."""
        total_s = self.total_s
        return self.training_s / total_s if total_s > 0 else None

    def __add__(self, other: Spent) -> Spent:
        return Spent(*map(add, msgspec.structs.astuple(self), msgspec.structs.astuple(other)))


class Mean(msgspec.Struct, frozen=True, omit_defaults=True):
    """The mean of durations, without storing them."""

    count: Count = 0
    sum_s: SumSeconds = 0.0

    def with_one(self, seconds: float) -> Mean:
        return Mean(self.count + 1, self.sum_s + max(0.0, seconds))

    @property
    def seconds(self) -> float | None:
        return self.sum_s / self.count if self.count else None


class Goodput(msgspec.Struct, frozen=True, omit_defaults=True):
    """The totals of the ledger, for a verdict, a page and a metric."""

    spent: Spent = Spent()
    to_detect: Mean = Mean()  # from a failure until the coordinator ended its generation
    to_recover: Mean = Mean()  # from then until all workers of the next generation ran
    lost_steps: Count = 0
    survivors: Count = 0  # workers that kept their process in a new generation, of all generations


class GenerationEntry(msgspec.Struct, omit_defaults=True):
    """One generation. Times are on the coordinator's clock."""

    number: int
    why: str  # why it was formed
    nodes: int
    workers: int
    formed_at: float
    waited_s: float = 0.0  # since the previous one had stopped, or since the first node joined
    running_at: float | None = None  # when all its workers ran
    ended_at: float | None = None  # when the coordinator ended it, or all its workers had succeeded
    settled_at: float | None = None  # when it had stopped on every node
    ended_by: str = ""  # failure, loss, drain, join, request, success, cancel ...
    ended_why: str = ""
    # The steps that its workers reported, taken together.
    first_step: int = -1
    last_step: int = -1
    first_step_at: float | None = None  # may be earlier than ``formed_at`` under a later coordinator
    last_step_at: float | None = None
    lost_steps: int = 0
    lost_s: float = 0.0
    imported_at: float | None = None  # when the last of its workers had imported the modules of its script
    hangs: list[tuple[float, float | None]] = []  # since when and until when; None: until now, or until it ended

    @property
    def trains_since(self) -> float | None:
        """When training began; None if it has not."""
        if self.running_at is None:
            return None
        return max(at for at in (self.running_at, self.imported_at, self.first_step_at) if at is not None)

    @property
    def is_hung(self) -> bool:
        return self.ended_at is None and bool(self.hangs) and self.hangs[-1][1] is None

    def hung_between(self, since: float, until: float) -> float:
        """Return the seconds of hangs in this time."""
        ends = self.ended_at if self.ended_at is not None else until
        spans = ((begins, ends if over is None else over) for begins, over in self.hangs)
        return sum(max(0.0, min(over, until) - max(begins, since)) for begins, over in spans)

    def spent(self, now: float) -> Spent:
        until = now if self.ended_at is None else self.ended_at
        since = self.trains_since
        since = until if since is None else min(max(since, self.formed_at), until)
        stopped_at = self.settled_at if self.settled_at is not None else now
        hung_early_s, hung_s = self.hung_between(self.formed_at, since), self.hung_between(since, until)
        trained_s = max(0.0, until - since - hung_s)
        lost_s = min(self.lost_s, trained_s)
        return Spent(
            waiting_s=self.waited_s,
            starting_s=max(0.0, since - self.formed_at - hung_early_s),
            training_s=trained_s - lost_s,
            stopping_s=0.0 if self.ended_at is None else max(0.0, stopped_at - self.ended_at),
            lost_s=lost_s,
            hung_s=hung_early_s + hung_s,
        )


class Ledger(msgspec.Struct, omit_defaults=True):
    """How the time of a run was spent."""

    began_at: float | None = None  # when the first node joined, or a later coordinator was opened
    over_at: float | None = None
    entries: list[GenerationEntry] = []  # the last ones
    forgotten: int = 0  # number of dropped entries
    before: Spent = Spent()  # of dropped entries, and of an earlier coordinator
    to_detect: Mean = Mean()
    to_recover: Mean = Mean()
    lost_steps: int = 0
    failed_at: float | None = None  # when a failure or a loss ended the last generation, until the next one runs
    survivors: int = 0  # workers that kept their process in a new generation, of all generations

    # --- events -------------------------------------------------------------------------------------------------------

    def begin(self, now: float) -> None:
        if self.began_at is None:
            self.began_at = now

    def formed(self, number: int, why: str, nodes: int, workers: int, now: float) -> None:
        self.begin(now)
        waited_s = max(0.0, now - self._idle_since(now))
        self.settled(now)
        self.entries.append(GenerationEntry(number, why, nodes, workers, now, waited_s))
        while len(self.entries) > _MAX_ENTRIES:
            self.before += self.entries.pop(0).spent(now)
            self.forgotten += 1

    def found(self, number: int, nodes: int, workers: int, now: float) -> None:
        """Continue with a running generation of an earlier coordinator."""
        self.formed(number, "formed by an earlier coordinator", nodes, workers, now)
        self.running(now)

    def running(self, now: float) -> None:
        entry = self.current
        if entry is not None and entry.running_at is None and entry.ended_at is None:
            entry.running_at = now
            if self.failed_at is not None:
                self.to_recover = self.to_recover.with_one(now - self.failed_at)
                self.failed_at = None

    def stepped(self, first_step: int, first_at: float, last_step: int, last_at: float, now: float) -> None:
        """Add steps that workers of the current generation reported."""
        entry = self.current
        if entry is None or entry.settled_at is not None:
            return
        first_at, last_at = min(first_at, now), min(last_at, now)
        begins_earlier = entry.first_step_at is None or first_step < entry.first_step
        if begins_earlier:
            entry.first_step = first_step
        if entry.first_step_at is None or first_at < entry.first_step_at:
            entry.first_step_at = first_at
        if entry.last_step_at is None or (last_step, -last_at) > (entry.last_step, -entry.last_step_at):
            entry.last_step, entry.last_step_at = last_step, last_at
        if begins_earlier:
            self._charge_repeated_steps(entry)

    def ended(self, ended_by: str, why: str, began_at: float | None, now: float) -> None:
        """End the current generation. ``began_at``: when the failure that ended it began."""
        entry = self.current
        if entry is None or entry.ended_at is not None:
            return
        entry.ended_at, entry.ended_by, entry.ended_why = now, ended_by, why
        if began_at is not None:
            self.to_detect = self.to_detect.with_one(now - began_at)
        if ended_by in ("failure", "loss"):
            self.failed_at = now

    def imported(self, at: float, now: float) -> None:
        """Add that a worker of the current generation imported modules of its script until then."""
        if (entry := self.current) is not None and entry.settled_at is None:
            entry.imported_at = max(min(at, now), entry.imported_at or 0.0)

    def hung(self, since: float) -> None:
        """Count the time since the last activity as hung, until ``resumed`` or the end of the generation."""
        entry = self.current
        if entry is None or entry.ended_at is not None or entry.is_hung:
            return
        before = entry.hangs[-1][1] if entry.hangs else None
        since = max(since, entry.formed_at, entry.formed_at if before is None else before)
        if len(entry.hangs) < _MAX_HANGS:
            entry.hangs.append((since, None))

    def resumed(self, now: float) -> None:
        """End a hang: there is activity again."""
        if (entry := self.current) is not None and entry.is_hung:
            entry.hangs[-1] = entry.hangs[-1][0], now

    def settled(self, now: float) -> None:
        entry = self.current
        if entry is not None and entry.ended_at is not None and entry.settled_at is None:
            entry.settled_at = now

    def over(self, ended_by: str, why: str, now: float) -> None:
        self.ended(ended_by, why, None, now)
        self.settled(now)
        self.failed_at = None
        if self.over_at is None:
            self.over_at = now

    # --- sums ---------------------------------------------------------------------------------------------------------

    @property
    def current(self) -> GenerationEntry | None:
        return self.entries[-1] if self.entries else None

    def spent(self, now: float) -> Spent:
        """Return all time up to now, or up to the end of the run."""
        now = now if self.over_at is None else self.over_at
        spent = self.before
        for entry in self.entries:
            spent += entry.spent(now)
        current = self.current
        if self.began_at is not None and (current is None or current.settled_at is not None):
            spent += Spent(waiting_s=max(0.0, now - self._idle_since(now)))
        return spent

    def spent_on_settled(self) -> Spent:
        """Return the time of settled generations, which does not depend on the clock."""
        spent = self.before
        for entry in self.entries:
            at = entry.settled_at
            spent += entry.spent(at) if at is not None else Spent(waiting_s=entry.waited_s)
        return spent

    def cost_so_far(self) -> Goodput:
        """Return the totals from which a later coordinator continues."""
        return Goodput(self.spent_on_settled(), self.to_detect, self.to_recover, self.lost_steps, self.survivors)

    def inherit(self, cost: Goodput) -> None:
        self.before, self.lost_steps, self.survivors = cost.spent, cost.lost_steps, cost.survivors
        self.to_detect, self.to_recover = cost.to_detect, cost.to_recover

    def goodput(self, now: float) -> Goodput:
        return Goodput(self.spent(now), self.to_detect, self.to_recover, self.lost_steps, self.survivors)

    def _idle_since(self, now: float) -> float:
        since = self.began_at if self.current is None else self.current.settled_at
        return now if since is None else since

    def _charge_repeated_steps(self, entry: GenerationEntry) -> None:
        """Count the steps that ``entry`` repeats as lost in earlier generations.

        That is usually the previous one; or several, if it reached no step or an older checkpoint was loaded.
        """
        for earlier in self.entries[:-1]:
            if earlier.last_step_at is None or earlier.first_step_at is None:
                continue
            again = max(0, earlier.last_step - max(entry.first_step, earlier.first_step) + 1)
            steps = earlier.last_step - earlier.first_step
            stepped_s = earlier.last_step_at - earlier.first_step_at
            stepped_s -= earlier.hung_between(earlier.first_step_at, earlier.last_step_at)
            step_s = max(0.0, stepped_s) / steps if steps > 0 else 0.0
            until = earlier.last_step_at if earlier.ended_at is None else earlier.ended_at
            unfinished_s = max(0.0, until - earlier.last_step_at - earlier.hung_between(earlier.last_step_at, until))
            self.lost_steps += max(0, again - earlier.lost_steps)
            earlier.lost_steps = max(earlier.lost_steps, again)
            earlier.lost_s = max(earlier.lost_s, again * step_s + unfinished_s)
