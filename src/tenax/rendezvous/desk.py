"""The desk: where an operator's requests are answered, next to the coordinator.

It decides nothing: what is wanted becomes a fact for the coordinator, what is asked is a view of its state, and what
only a node knows is passed on to that node. Every request gets exactly one answer: a value, or a sentence that says why
there is none.
"""

from __future__ import annotations

import time

from tenax.core.coordinator import CancelRequested, DrainRequested, RestartRequested, RunPhase

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from tenax.core.requests import AnyRequest, OfNode
    from tenax.ports import EventLoop, Reply
    from tenax.rendezvous.seat import CoordinatorSeat
    from tenax.view.status import RunStatus

_NAMES_SAID = 8


class Desk:
    """One coordinator's. ``pass_on`` sends a request to a node, by its id, and its answer to ``reply``."""

    def __init__(
        self,
        seat: CoordinatorSeat,
        loop: EventLoop,
        pass_on: Callable[[str, OfNode, Reply], None],
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._seat = seat
        self._loop = loop
        self._pass_on = pass_on
        self._wall_clock = wall_clock

    def watch(self, on_step: Callable[[], None]) -> None:
        """Call this after every step of the coordinator. What it shows may have changed."""
        self._seat.watchers.append(on_step)

    def unwatch(self, on_step: Callable[[], None]) -> None:
        self._seat.watchers.remove(on_step)

    def status(self) -> RunStatus:
        from tenax.view.status import status_of

        now = self._loop.now()
        seat = self._seat
        return status_of(seat.state, seat.recent, seat.doing_in_words(), now, self._wall_clock() - now)

    def ask(self, request: AnyRequest, reply: Reply) -> None:
        from tenax.core import requests as want

        is_over = self._seat.state.phase is RunPhase.OVER
        match request:
            case want.StatusWanted():
                reply(self.status(), "")
            case want.StopWanted() | want.RestartWanted() | want.DrainWanted() if is_over:
                reply(None, "the run is over")
            case want.StopWanted(why):
                # First the answer: the end of the run may close the way to whoever asked.
                reply("the run is being ended on every node", "")
                self._seat.step(CancelRequested(why))
            case want.RestartWanted(why):
                phase = self._seat.state.phase
                if phase not in (RunPhase.RUNNING, RunPhase.PAUSED):
                    reply(None, f"no generation is running that could be restarted: {self._seat.doing_in_words()}")
                    return
                reply(f"generation {self._seat.state.generation} is being ended, and another follows", "")
                self._seat.step(RestartRequested(why))
            case want.DrainWanted(node, why):
                node_id, trouble = self.find(node)
                if trouble:
                    reply(None, trouble)
                    return
                reply(f"{self._seat.state.nodes[node_id].label} is asked to leave", "")
                self._seat.step(DrainRequested(node_id, why))
            case want.LogsWanted(node):
                node_id, trouble = self.find(node)
                if trouble:
                    reply(None, trouble)
                else:
                    self._pass_on(node_id, request, reply)
            case _:
                reply(None, "this is asked of an agent, not of the coordinator")

    def find(self, node: str) -> tuple[str, str]:
        """The id of the node that is meant; or why it is not known who is."""
        state = self._seat.state
        if node in state.nodes:
            return node, ""
        if node in state.labels:
            return state.labels[node], ""
        found = [
            node_id
            for node_id, record in state.nodes.items()
            if record.info.host == node or (record.info.name and record.info.name == node)
        ]
        if not found and node.isdecimal():
            found = [each for each, rank in state.members.items() if rank == int(node) and each in state.nodes]
        if len(found) == 1:
            return found[0], ""
        names = [record.label for record in state.nodes.values()]
        shown = ", ".join(names[:_NAMES_SAID]) + (", ..." if len(names) > _NAMES_SAID else "")
        if found:
            return "", f"{node!r} may be {len(found)} nodes; say which of {shown}"
        return "", f"there is no node {node!r}; there are {shown or 'none yet'}"
