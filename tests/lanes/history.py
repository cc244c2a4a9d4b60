"""The observed history of one run, and checks of its invariants. Pure.

A worker was alive at the time of each of its signs of life, and whenever its connection was seen open. Only such proofs
count; a missing end of a worker proves nothing. So whatever is reported here is certainly broken.
"""

from __future__ import annotations

import itertools
from collections import defaultdict

import msgspec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from tenax._core.record import RunRecord


class WorkerLife(msgspec.Struct):
    """Times are on the monotonic clock of the host."""

    agent: str
    pid: int
    generation: int
    rank: int
    world_size: int
    store: str
    restarts: int
    began_at: float
    alive_at: float  # the last time at which it was certainly alive
    gone_at: float = 0.0  # when its connection was seen closed; 0: it is open

    def __str__(self) -> str:
        return f"generation {self.generation} rank {self.rank} of {self.world_size} on {self.agent}, pid {self.pid}"


class Recorded(msgspec.Struct, frozen=True):
    """The record's key from some revision on. None: it was deleted."""

    at: float
    revision: int
    record: RunRecord | None
    by: str = ""


class History(msgspec.Struct):
    max_restarts: int
    workers: list[WorkerLife] = []
    records: list[Recorded] = []
    caused_failures: int = 0  # worker failures that the plan caused


def broken(history: History) -> list[str]:
    """Return a description of each broken invariant."""
    return [
        *_overlaps(history.workers),
        *_inconsistent(history.workers),
        *_reverted_records(history),
        *_restarts(history),
        *_unrecorded(history),
    ]


def _overlaps(workers: list[WorkerLife]) -> Iterator[str]:
    """S1: no two generations have workers alive at the same time."""
    for old in workers:
        later = [new for new in workers if new.generation > old.generation and new.began_at < old.alive_at]
        if later:
            new = min(later, key=lambda each: each.began_at)
            yield f"S1: [{old}] was alive {old.alive_at - new.began_at:.3f} s after the start of [{new}]"


def _inconsistent(workers: list[WorkerLife]) -> Iterator[str]:
    """S2: a generation has one list of members."""
    for generation, group in _by_generation(workers).items():
        for what, values in (
            ("world sizes", {worker.world_size for worker in group}),
            ("stores", {worker.store for worker in group}),
            ("restart counts", {worker.restarts for worker in group}),
        ):
            if len(values) > 1:
                yield f"S2: generation {generation} has several {what}: {sorted(values)}"
        for one, other in itertools.combinations(group, 2):
            if one.rank == other.rank:
                yield f"S2: [{one}] and [{other}] have the same rank"
        for worker in group:
            if not 0 <= worker.rank < worker.world_size:
                yield f"S2: [{worker}] has a rank outside its world size"


def _by_generation(workers: list[WorkerLife]) -> dict[int, list[WorkerLife]]:
    groups: dict[int, list[WorkerLife]] = defaultdict(list)
    for worker in workers:
        groups[worker.generation].append(worker)
    return groups


def _reverted_records(history: History) -> Iterator[str]:
    """S2, S3, S4: decisions are not reverted."""
    formed: dict[int, tuple[object, ...]] = {}
    last: RunRecord | None = None
    is_deleted = False
    for each in history.records:
        record = each.record
        if record is None:
            if last is None or last.verdict is None:
                yield f"the record was deleted at revision {each.revision}, before the verdict"
            is_deleted = True
            continue
        if is_deleted:
            yield f"S3: at revision {each.revision} a new record was written"
        what = (record.members, record.store, record.world_size)
        if record.generation and formed.setdefault(record.generation, what) != what:
            yield f"S2: at revision {each.revision} generation {record.generation} differs from the earlier one"
        if last is not None:
            for name in ("generation", "settled", "restarts_used"):
                was, is_now = getattr(last, name), getattr(record, name)
                if is_now < was:
                    yield f"S4: at revision {each.revision} {name} decreased from {was} to {is_now}"
            if last.verdict is not None and record != last:
                yield f"S3: at revision {each.revision} the record changed after the verdict"
        last = record


def _restarts(history: History) -> Iterator[str]:
    most = max(
        [worker.restarts for worker in history.workers]
        + [each.record.restarts_used for each in history.records if each.record is not None],
        default=0,
    )
    if most > history.max_restarts:
        yield f"{most} restarts were charged; the maximum is {history.max_restarts}"
    if most > history.caused_failures:
        yield f"{most} restarts were charged, but only {history.caused_failures} failures were caused"


def _unrecorded(history: History) -> Iterator[str]:
    """S3: no worker is in a generation that was not recorded."""
    records = {each.record.generation: each.record for each in history.records if each.record is not None}
    for generation, group in _by_generation(history.workers).items():
        record = records.get(generation)
        if record is None:
            yield f"S3: generation {generation} had workers but no record: [{group[0]}]"
            continue
        for worker in group:
            assigned = (worker.world_size, worker.store)
            if assigned != (record.world_size, record.store):
                yield f"S2: [{worker}] was assigned {assigned}, but recorded is {(record.world_size, record.store)}"
