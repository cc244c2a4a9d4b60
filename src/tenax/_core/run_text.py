"""What a run is doing and what it waits for, as messages for nodes and operators."""

from __future__ import annotations

from itertools import islice

from tenax._core.model import assert_never
from tenax._core.run_state import CoordinatorState, Ending, Gathering, Over, Paused, Recovering, RunDeadline, Running
from tenax._core.text import MAX_NAMES, counted, format_duration, some_of


def describe_activity(state: CoordinatorState, now: float) -> str:
    """Describe what the run is doing, for display."""
    last = state.last
    if not isinstance(state.phase, Running):
        return describe_waiting(state, now)
    if last.unstarted:
        names = some_of([last.labels.get(each, each[:8]) for each in sorted(last.unstarted)])
        return f"generation {state.generation} is starting; waiting for the workers of {names}"
    if state.hang is not None:
        from tenax._core.hang_suspicion import describe_hang

        return describe_hang(state, now)
    done = f"; {counted(len(last.done), 'node')} of {len(last.members)} done" if last.done else ""
    where = f"{counted(last.world_size, 'worker')} on {counted(len(last.members), 'node')}"
    return f"generation {state.generation} is running, {where}{done}"


def describe_waiting(state: CoordinatorState, now: float) -> str:
    """Describe what a node that is ready waits for."""
    settings, phase = state.settings, state.phase
    match phase:
        case Running():
            is_full = len(state.members) >= settings.max_nodes
            spare = f"this node is a spare: the run has its maximum of {counted(settings.max_nodes, 'node')}"
            what = spare if is_full else "this node will join the next one"
            return f"generation {state.generation} is running; {what}"
        case Ending():
            names = some_of([state.nodes[node_id].label for node_id in sorted(phase.unstopped)])
            return f"generation {state.generation} is ending ({phase.why}); waiting for {names}"
        case Paused():
            return f"waiting before the restart: {state.next_why}"
        case Recovering():
            names = some_of(list(phase.awaited.values())) or "the nodes of the earlier coordinator"
            left = state.seconds_left(RunDeadline.RECOVER, now)
            return f"the coordinator was replaced; waiting up to {format_duration(left)} for {names} to reconnect"
        case Over():
            return f"the run is over: {phase.verdict.why}"
        case Gathering():
            return _describe_gathering(state, now)
        case _:
            return assert_never(phase)


def _describe_gathering(state: CoordinatorState, now: float) -> str:
    settings, count = state.settings, len(state.ready)
    here = f"{count} of {span_text(settings.min_nodes, settings.max_nodes)} nodes ready"
    if RunDeadline.LAST_CALL in state.deadlines:
        left = state.seconds_left(RunDeadline.LAST_CALL, now)
        return f"{here}; waiting {format_duration(left)} for more (--rdzv-conf last_call_timeout)"
    left = state.seconds_left(RunDeadline.JOIN, now)
    # Some hosts by name, because thousands of nodes may join one by one.
    shown = [state.nodes[node_id].label for node_id in islice(state.ready, MAX_NAMES)]
    hosts = f" ({some_of(shown, count)})" if shown else ""
    missing = settings.min_nodes - count
    return f"{here}{hosts}; waiting up to {format_duration(left)} for {missing} more{describe_lost(state)}"


def describe_lost(state: CoordinatorState) -> str:
    lost = state.last.lost
    return f"; lost: {some_of([f'{host} ({why})' for host, why in lost.items()])}" if lost else ""


def span_text(minimum: int, maximum: int) -> str:
    return str(minimum) if minimum == maximum else f"{minimum} to {maximum}"
