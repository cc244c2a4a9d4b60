"""Describes a change of the shared state as text, for events. Pure: two states in, texts out."""

from __future__ import annotations

from typing import NamedTuple

from tenax.rendezvous._dynamic.state import Standing, State

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tenax.rendezvous._dynamic.state import Node

_NAMES_SHOWN = 8


class Change(NamedTuple):
    text: str
    is_achieved: bool = False  # recorded as SUCCEEDED


def changes(before: State | None, after: State, node_id: str) -> list[Change]:
    """Describe what it means that this node replaces ``before`` by ``after``. Its name is put before each text."""
    found = [*_own_changes(before, after, node_id), *_removals(before, after, node_id)]
    is_same_round = before is not None and before.round == after.round
    if after.complete and not (is_same_round and before is not None and before.complete):
        nodes = "1 node" if len(after.members) == 1 else f"{len(after.members)} nodes"
        found.append(Change(f"completes round {after.round} with {nodes}", is_achieved=True))
    if after.closed and not (before is not None and before.closed):
        found.append(Change(f"closes the run: {after.closed}", is_achieved=True))
    return found


def _own_changes(before: State | None, after: State, node_id: str) -> list[Change]:
    was, now = _position(before, node_id), _position(after, node_id)
    if was == now:
        return []
    found = []
    if was is not None and (now is None or was[0] != now[0]):
        found.append(Change(f"leaves the {was[0]} of round {was[1]}"))
    if now is not None:
        found.append(Change(f"joins the {now[0]} of round {now[1]}"))
    return found


def _position(state: State | None, node_id: str) -> tuple[str, int] | None:
    node = state.node(node_id) if state is not None else None
    if state is None or node is None:
        return None
    match node.standing:
        case Standing.WAITING:
            return "wait list", state.round + 1 if state.complete else state.round
        case Standing.RUNNING if not state.complete:  # in the round before the gathering one
            return "participants", state.round - 1
        case _:
            return "participants", state.round


def _removals(before: State | None, after: State, node_id: str) -> list[Change]:
    """Other nodes remove a node only if it is silent or did not join in time."""
    still_there = {node.id for node in after.nodes} | {node_id}
    gone = [node for node in (before.nodes if before is not None else ()) if node.id not in still_there]
    return [Change(f"removes {_names(gone)}: no heartbeat, or not joined in time")] if gone else []


def _names(nodes: list[Node]) -> str:
    names = [f"{node.addr} ({node.id[:8]})" for node in nodes[:_NAMES_SHOWN]]
    more = [f"and {len(nodes) - _NAMES_SHOWN} more"] if len(nodes) > _NAMES_SHOWN else []
    return ", ".join(names + more)
