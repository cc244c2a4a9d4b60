"""Suspected hangs: what the coordinator does when no node of a generation shows activity, as functions on its state.

    every member quiet -> suspected, stacks requested -> all have replied, or the deadline passed
                       -> stacks requested again -> the same stacks: reported
                          '-> other stacks, or activity: the suspicion ends

Invariants (tests cite the numbers; H1 to H4 concern a single node and are in ``hang.py``):

H5  A hang is suspected only if every member that runs workers has reported to be quiet, and no activity was reported
    for ``hang_after_s``. A member that has not reported is busy.
H6  Stacks are requested twice. If no main thread has made another call in between, a report is sent to every member;
    otherwise the suspicion ends, and the next one needs another ``hang_after_s``, but the sixth in a row is reported in
    any case: a worker may retry forever. Activity ends a suspicion. The end of a hang is sent only after a report.
H7  A report alone changes nothing. With ``--on-hang restart`` it ends the generation with the failure of the worker
    that stands out, charged like any other failure.
H8  A suspicion ends with its generation.

Imported only when a node reports to be quiet, which requires ``--on-hang``.
"""

from __future__ import annotations

import msgspec

from tenax._core import events, messages
from tenax._core.hang_report import calls_of, describe_location, format_ranks, make_report, merged, reason_of
from tenax._core.model import HANG, Evidence, Failure
from tenax._core.run_state import HangWatch, ReportedHang, RunDeadline, Send, Suspicion
from tenax._core.text import counted, format_duration, format_seconds, some_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tenax._core.run_state import CoordinatorState, NodeRecord, Running

_SIGTERM = 15
_MAX_REFUTED = 5
_CONFIRM_S = 5.0  # between the two requests for stacks, or a quarter of ``hang_after_s``
_MAX_LOCATIONS = 3  # in a one-line description
_WHAT_FOLLOWS = {
    "report": "no action is taken (--on-hang report)",
    "restart": "restarting its workers if restarts are left (--on-hang restart)",
    "off": "",
}


def suspect(state: CoordinatorState, running: Running, now: float) -> list[Send]:
    """Request the stacks of all workers, if all members have been quiet for long enough (H5)."""
    watch, deadlines = running.watch, running.deadlines
    earlier = None
    if (hang := watch.suspicion) is not None:
        if hang.awaited or hang.report is not None or RunDeadline.QUIET in deadlines:
            return []
        earlier = hang.locations
    at_work = _at_work(state)
    deadlines.pop(RunDeadline.QUIET, None)
    if not at_work or any(each not in watch.quiet or state.nodes[each].is_draining for each in at_work):
        watch.suspicion = None
        return []
    sure_at = watch.moved_at + state.settings.hang_after_s
    if now < sure_at:  # they were quiet because they waited for a member that was active until recently
        deadlines[RunDeadline.QUIET] = sure_at
        return []
    since = max(watch.quiet[each].since for each in at_work)
    state.suspicions += 1
    why = some_of(list(dict.fromkeys(watch.quiet[each].why for each in at_work)))
    watch.suspicion = Suspicion(state.suspicions, since, why, set(at_work), earlier=earlier)
    deadlines[RunDeadline.STACKS] = now + state.settings.stacks_timeout_s
    return [Send(tuple(at_work), events.StacksRequested(state.generation, state.suspicions, why))]


def end_suspicion(state: CoordinatorState, running: Running, why: str, now: float) -> list[Send]:
    """End the suspicion, if any, because of the activity ``why`` (H6)."""
    hang = running.watch.suspicion
    running.watch = HangWatch(running.watch.quiet, now)
    running.deadlines = {}
    members = _present(state)
    was_reported = hang is not None and hang.report is not None
    if was_reported:
        state.ledger.resumed(now)
        if state.last.hang is not None:
            state.last.hang.over_at = now
    return [Send(tuple(members), events.HangOver(state.generation, why))] if was_reported and members else []


def add_stacks(hang: Suspicion, record: NodeRecord, number: int, locations: tuple[messages.StackLocation, ...]) -> bool:
    """Add the locations of a member's workers; return whether all members have replied."""
    if hang.number != number or record.info.node_id not in hang.awaited:
        return False
    hang.awaited.discard(record.info.node_id)
    own = (msgspec.structs.replace(location, host=record.info.where) for location in locations)
    hang.locations = merged((*hang.locations, *own))
    return not hang.awaited


def confirm(state: CoordinatorState, running: Running, hang: Suspicion, now: float) -> bool:
    """All have replied, or the deadline passed: return whether to report, or else plan the next request (H6)."""
    running.deadlines.pop(RunDeadline.STACKS, None)
    if hang.earlier is None:
        hang.awaited = set()
        running.deadlines[RunDeadline.QUIET] = now + min(_CONFIRM_S, state.settings.hang_after_s / 4)
        return False
    if running.watch.refuted >= _MAX_REFUTED or calls_of(hang.earlier) == calls_of(hang.locations):
        return True
    running.watch = HangWatch(running.watch.quiet, now, refuted=running.watch.refuted + 1)
    running.deadlines = {RunDeadline.QUIET: now + state.settings.hang_after_s}
    return False


def report_hang(state: CoordinatorState, hang: Suspicion, now: float) -> list[Send]:
    """Send every member the locations of all workers, the one that stands out first (H6)."""
    missing = [location for each in sorted(hang.awaited) if (location := _missing_location(state, each)) is not None]
    hang.awaited = set()
    hang.report = make_report(
        (*hang.locations, *missing),
        generation=state.generation,
        nodes=len(_at_work(state)),
        quiet_s=now - hang.since,
        why=hang.why,
        what_follows=_WHAT_FOLLOWS[state.settings.on_hang],
    )
    state.last.hang = ReportedHang(hang.report)
    members = _present(state)
    return [Send(tuple(members), events.HangFound(state.generation, hang.report))] if members else []


def failure_by_hang(hang: Suspicion, generation: int) -> Failure:
    """Return the failure of the worker that stands out, with which ``--on-hang restart`` ends the generation (H7)."""
    assert hang.report is not None, "reported before"
    report = hang.report
    odd = report.locations[0] if report.locations else messages.StackLocation((0,), local_rank=0)
    return Failure(
        generation=generation,
        local_rank=max(0, odd.local_rank),
        global_rank=odd.ranks[0],
        pid=odd.pid,
        exit_code=-_SIGTERM,  # of the stop that follows
        seen_at=hang.since,
        reason=reason_of(report),
        evidence=Evidence(stacks=odd.stacks, cause=HANG),
        was_stopped=True,
        host=odd.host,
    )


def describe_hang(state: CoordinatorState, now: float) -> str:
    """Describe the suspected hang, or return "" if there is none."""
    hang = state.hang
    if hang is None:
        return ""
    still = f"generation {state.generation} seems to hang: no activity for {format_duration(now - hang.since)}"
    return f"{still}; {where}" if (where := describe_places(hang)) else still


def describe_places(hang: Suspicion) -> str:
    """Describe the location that stands out, or if none does, the first few locations."""
    if hang.report is None:
        return "requesting the stacks of its workers"
    locations = hang.report.locations
    if hang.report.is_odd or len(locations) < 2:
        return "; ".join(_describe_location(location) for location in locations[:1])
    shown = [_describe_location(location) for location in locations[:_MAX_LOCATIONS]]
    more = len(locations) - len(shown)
    if more:
        shown.append(counted(more, "more location"))
    return f"no rank stands out: {'; '.join(shown)}"


def _describe_location(location: messages.StackLocation) -> str:
    host = f" on {location.host}" if location.host else ""
    return f"{format_ranks(location.ranks)}{host}: {describe_location(location)}"


def _present(state: CoordinatorState) -> list[str]:
    return [each for each in state.last.members if each in state.nodes and each not in state.last.gone]


def _at_work(state: CoordinatorState) -> list[str]:
    return [each for each in _present(state) if each not in state.last.done]


def _missing_location(state: CoordinatorState, node_id: str) -> messages.StackLocation | None:
    record = state.nodes.get(node_id)
    if record is None or record.part is None:
        return None
    first = record.part.first_global_rank
    ranks = tuple(range(first, first + record.info.slots))
    why = f"{record.label} did not send its stacks within {format_seconds(state.settings.stacks_timeout_s)}"
    return messages.StackLocation(ranks, why=why, local_rank=0, pid=(*record.pids, 0)[0], host=record.info.where)
