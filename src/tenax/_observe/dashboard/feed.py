"""The feed of the dashboard: a full status for a new page, then differences. Pure.

Invariants (tests cite the numbers):

F1  ``before`` plus the change is ``after``.
F2  A change contains only nodes, generations and events that differ.
F3  Passing time is not a change. The page updates ages and durations itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from tenax._core.ledger import Goodput
from tenax._view.status import EventStatus, FailureStatus, GenerationStatus, NodeStatus, RunStatus

# Times differ slightly between statuses, because the wall clock may be adjusted meanwhile.
_SAME_TIME_S = 0.25
_TIMES = frozenset({"since", "step_at", "at", "formed_at", "running_at", "ended_at", "settled_at", "hang_since"})
_LISTS_OF_TIMES = frozenset({"outputs", "stepped"})
# Compared separately, or not at all: ``hang`` contains a duration; hang_since and hang_where replace it.
_EXCLUDED = frozenset({"now", "nodes", "generations", "failures", "earlier", "events", "goodput", "hang"})


class Change(msgspec.Struct, frozen=True, omit_defaults=True):
    """A difference between two statuses. Missing lists have not changed."""

    now: float
    goodput: Goodput
    run: dict[str, Any] = {}  # fields of the status by name
    nodes: tuple[NodeStatus, ...] = ()  # new, or replacing those with the same id
    gone: tuple[str, ...] = ()  # ids of nodes
    generations: tuple[GenerationStatus, ...] = ()  # new, or replacing those with the same number
    oldest_generation: int = 0  # earlier ones are removed; 0: none is
    failures: tuple[FailureStatus, ...] | None = None
    earlier: tuple[FailureStatus, ...] | None = None
    events: tuple[EventStatus, ...] = ()  # new ones


def change(before: RunStatus, after: RunStatus) -> Change | None:
    """Return the difference; None if there is no visible one."""
    known_nodes = {node.node_id: node for node in before.nodes}
    known_generations = {entry.number: entry for entry in before.generations}
    numbers = {entry.number for entry in after.generations}
    run = {
        name: getattr(after, name)
        for name in after.__struct_fields__
        if name not in _EXCLUDED and not _is_same_value(name, getattr(before, name), getattr(after, name))
    }
    if after.hang_since is not None:
        run.pop("doing", None)  # the hang as a message
    nodes = tuple(node for node in after.nodes if not _is_same(known_nodes.pop(node.node_id, None), node))
    generations = tuple(
        entry for entry in after.generations if not _is_same_generation(known_generations.get(entry.number), entry)
    )
    last = before.events[-1].moment if before.events else float("-inf")
    found = Change(
        now=after.now,
        goodput=after.goodput,
        run=run,
        nodes=nodes,
        gone=tuple(known_nodes),  # the others were removed above
        generations=generations,
        oldest_generation=min(numbers, default=0) if any(each not in numbers for each in known_generations) else 0,
        failures=None if _are_same(before.failures, after.failures) else after.failures,
        earlier=None if _are_same(before.earlier, after.earlier) else after.earlier,
        events=tuple(event for event in after.events if event.moment > last),
    )
    return found if found != Change(after.now, after.goodput) else None


def _is_same(known: msgspec.Struct | None, found: msgspec.Struct, *, but: str = "") -> bool:
    if known is None:
        return False
    if known == found:
        return True
    return all(
        name == but or _is_same_value(name, getattr(known, name), getattr(found, name))
        for name in found.__struct_fields__
    )


def _is_same_value(name: str, before: Any, after: Any) -> bool:
    if before == after:
        return True
    if name in _LISTS_OF_TIMES:
        return len(before) == len(after) and all(
            abs(one - other) < _SAME_TIME_S for one, other in zip(before, after, strict=True)
        )
    return name in _TIMES and None not in (before, after) and bool(abs(before - after) < _SAME_TIME_S)


def _is_same_generation(known: GenerationStatus | None, found: GenerationStatus) -> bool:
    """Compare generations. The time spent is compared only once the generation has settled, because it grows."""
    if known is not None and known.settled_at is not None:
        spent = ((getattr(known.spent, name), getattr(found.spent, name)) for name in found.spent.__struct_fields__)
        if any(abs(before - after) >= 1e-6 for before, after in spent):
            return False
    return _is_same(known, found, but="spent")


def _are_same(known: Sequence[FailureStatus], found: Sequence[FailureStatus]) -> bool:
    return len(known) == len(found) and all(map(_is_same, known, found))
