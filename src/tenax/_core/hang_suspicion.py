"""A suspicion: nothing moves on any node of a generation. What the coordinator does then, as functions on its state.

    every member quiet -> suspected: where are your workers? -> all have told, or the time is over -> found -> reported
                                          '-> something moves: it was nothing

Laws (tests cite the numbers; H1 to H4 are a node's own, in ``hang.py``):

H5  A hang is suspected only when every member that is at work says that nothing moves there, and nothing was heard to
    move for as long as that takes (``hang_after_s``). One that says nothing of it is busy.
H6  A suspicion ends: in a report that is said to every member, when all have answered or the time for it is over; or
    because something moves. That it goes on is said only after a report.
H7  A report alone changes nothing. If a restart was asked for, it ends the generation by the failure of the odd one
    out, charged like any other.
H8  Nothing of it outlives the generation.

Imported when a node says that nothing moves there, which none does unless it was asked to look (``--on-hang``).
"""

from __future__ import annotations

import msgspec

from tenax._core import events, messages
from tenax._core.hang_report import make_report, merged, ranks_in_words, reason_of, where_in_words
from tenax._core.model import HANG, Evidence, Failure
from tenax._core.run_state import RunDeadline, RunPhase, Send, Suspicion
from tenax._core.text import some_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tenax._core.run_state import CoordinatorState, NodeRecord

_SIGTERM = 15
_PLACES_SAID = 3
_WHAT_FOLLOWS = {
    "report": "nothing is done about it (--on-hang report)",
    "restart": "its workers are ended and started again, if restarts are left (--on-hang restart)",
    "off": "",
}


def suspected(state: CoordinatorState, now: float) -> list[Send]:
    """Ask everybody where its workers are, if all are quiet and have been for long enough (H5)."""
    if state.phase is not RunPhase.RUNNING or state.hang is not None:
        return []
    at_work = _at_work(state)
    if not at_work or any(each not in state.quiet or state.nodes[each].is_draining for each in at_work):
        state.deadlines.pop(RunDeadline.QUIET, None)
        return []
    sure_at = state.moved_at + state.settings.hang_after_s
    if now < sure_at:  # they were quiet because they waited for one that has just moved
        state.deadlines[RunDeadline.QUIET] = sure_at
        return []
    state.deadlines.pop(RunDeadline.QUIET, None)
    last = max(at_work, key=lambda each: state.quiet[each].since)
    state.suspicions += 1
    why = some_of(list(dict.fromkeys(state.quiet[each].why for each in at_work)))
    state.hang = Suspicion(state.suspicions, state.quiet[last].since, why, set(at_work))
    state.deadlines[RunDeadline.STACKS] = now + state.settings.stacks_timeout_s
    return [Send(tuple(at_work), events.StacksRequested(state.generation, state.suspicions, why))]


def moved(state: CoordinatorState, now: float) -> list[Send]:
    """Whatever was suspected is not so; not any more, at least (H6)."""
    hang, state.hang = state.hang, None
    state.moved_at = now
    for deadline in (RunDeadline.STACKS, RunDeadline.QUIET):
        state.deadlines.pop(deadline, None)
    members = _present(state)
    was_reported = hang is not None and hang.report is not None
    return [Send(tuple(members), events.HangOver(state.generation))] if was_reported and members else []


def told_where(
    state: CoordinatorState, record: NodeRecord, number: int, places: tuple[messages.StackPlace, ...]
) -> bool:
    """A member has told where its workers are. Says whether it was the last that was waited for."""
    hang = state.hang
    if hang is None or hang.number != number or record.info.node_id not in hang.awaited:
        return False
    hang.awaited.discard(record.info.node_id)
    ours = (msgspec.structs.replace(place, host=record.info.host) for place in places)
    hang.places = merged((*hang.places, *ours))
    return not hang.awaited


def found(state: CoordinatorState, now: float) -> list[Send]:
    """Tell everybody who is where, the odd one out first (H6)."""
    hang = state.hang
    assert hang is not None, "suspected before"
    state.deadlines.pop(RunDeadline.STACKS, None)
    unheard = [place for each in sorted(hang.awaited) if (place := _unheard(state, each)) is not None]
    hang.awaited = set()
    hang.report = make_report(
        (*hang.places, *unheard),
        generation=state.generation,
        nodes=len(_at_work(state)),
        quiet_s=now - hang.since,
        why=hang.why,
        what_follows=_WHAT_FOLLOWS[state.settings.on_hang],
    )
    members = _present(state)
    return [Send(tuple(members), events.HangFound(state.generation, hang.report))] if members else []


def failure_by_hang(state: CoordinatorState) -> Failure:
    """The failure of the odd one out, by which the generation ends if that was asked for (H7)."""
    hang = state.hang
    assert hang is not None and hang.report is not None, "found before"  # noqa: PT018 - one fact
    report = hang.report
    odd = report.places[0] if report.places else messages.StackPlace((0,), local_rank=0)
    return Failure(
        generation=state.generation,
        local_rank=max(0, odd.local_rank),
        global_rank=odd.ranks[0],
        pid=odd.pid,
        exit_code=-_SIGTERM,  # how it is ended, if it lets itself be ended
        seen_at=hang.since,
        reason=reason_of(report),
        evidence=Evidence(stacks=odd.stacks, cause=HANG),
        asked_to_end=True,
        host=odd.host,
    )


def hang_in_words(state: CoordinatorState, now: float) -> str:
    """That nothing moves, if that is so; else nothing."""
    hang = state.hang
    if hang is None:
        return ""
    still = f"generation {state.generation} seems to hang: nothing has moved for {now - hang.since:.0f} s"
    return f"{still}; {where}" if (where := places_in_words(hang)) else still


def places_in_words(hang: Suspicion) -> str:
    """Who is elsewhere, as far as it is known; if nobody stands out, where all are."""
    if hang.report is None:
        return "asking where its workers are"
    places = hang.report.places
    if hang.report.is_odd or len(places) < 2:
        return "; ".join(_place_in_words(place) for place in places[:1])
    said = [_place_in_words(place) for place in places[:_PLACES_SAID]]
    more = len(places) - len(said)
    if more:
        said.append("1 more place" if more == 1 else f"{more} more places")
    return f"no rank stands out: {'; '.join(said)}"


def _place_in_words(place: messages.StackPlace) -> str:
    return f"{ranks_in_words(place.ranks)}{f' on {place.host}' if place.host else ''}: {where_in_words(place)}"


def _present(state: CoordinatorState) -> list[str]:
    return [each for each in state.members if each in state.nodes and each not in state.gone]


def _at_work(state: CoordinatorState) -> list[str]:
    return [each for each in _present(state) if each not in state.done]


def _unheard(state: CoordinatorState, node_id: str) -> messages.StackPlace | None:
    record = state.nodes.get(node_id)
    if record is None or record.part is None:
        return None
    first = record.part.first_global_rank
    ranks = tuple(range(first, first + record.info.slots))
    why = f"{record.label} has not told it within {state.settings.stacks_timeout_s:g} s"
    return messages.StackPlace(ranks, why=why, local_rank=0, pid=(*record.pids, 0)[0], host=record.info.host)
