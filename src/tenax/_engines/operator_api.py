"""The desk: where an operator's requests are answered, next to the coordinator.

It decides nothing: what is wanted becomes a fact for the coordinator, what is asked is a view of its state, and what
only a node knows is passed on to that node. Every request gets exactly one answer: a value, or a sentence that says why
there is none.

Who watches a run asks for its status with the mark of the last one. That answer waits until something has changed, so
that nobody asks in vain, and a little longer, so that a thousand nodes that join are one answer and not a thousand. It
never waits for longer than was asked, nor than the limit here.

However many ask, and whatever goes wrong with an answer, the run does not notice: where a status takes its time to be
made, one is shown to all who ask within a multiple of that time; and one that cannot be made is a sentence.
"""

from __future__ import annotations

import os
import time

import msgspec

from tenax._core.coordinator import CancelRequested, DrainRequested, RestartRequested, RunPhase
from tenax._core.text import some_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from tenax._core.requests import AnyRequest, OfNode
    from tenax._engines.coordinator_host import CoordinatorHost
    from tenax._io.ports import Cancellable, EventLoop, Reply
    from tenax._view.status import RunStatus

_MAX_NAMES_SHOWN = 8
_MAX_DIGITS = 10
_MAX_NAME_SHOWN = 100
_MAX_WAIT_S = 30.0
_COALESCE_S = 0.2  # what happens within that time is one answer
_MAX_WAITING = 256
_CLOCK_WAS_SET_S = 1.0
_GONE = "the coordinator has just gone from here; ask again"
_SHOWN_PER_WORK = 20  # so many times as long as it took to make, a status is shown again
_EXPENSIVE_S = 0.005  # ... even if something has happened since: the mark tells


class _Waiting:
    """Somebody who wants to hear of the next change."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        self.timer: Cancellable | None = None


class OperatorApi:
    """One coordinator's. ``forward`` sends a request to a node, by its id, and its answer to ``reply``."""

    def __init__(
        self,
        seat: CoordinatorHost,
        loop: EventLoop,
        forward: Callable[[str, OfNode, Reply], None],
        wall_clock: Callable[[], float] = time.time,
        work_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._coordinator = seat
        self._loop = loop
        self._forward = forward
        self._wall_clock = wall_clock
        self._work_clock = work_clock
        self._shown: RunStatus | None = None  # the last one, to those who ask
        self._shown_until = 0.0
        self._is_expensive = False
        self._name = os.urandom(4).hex()  # another coordinator's marks are not ours
        self._steps = 0
        self._wall_offset: float | None = None
        self._is_counting = False
        self._is_closed = False
        self._waiting: list[_Waiting] = []  # for a change
        self._due: list[_Waiting] = []  # there was one

    def watch(self, on_step: Callable[[], None]) -> None:
        """Call this after every step of the coordinator. What it shows may have changed."""
        self._coordinator.watchers.append(on_step)

    def unwatch(self, on_step: Callable[[], None]) -> None:
        self._coordinator.watchers.remove(on_step)

    def status(self) -> RunStatus:
        from tenax._view.status import status_of

        self._count()
        now = self._loop.now()
        seat = self._coordinator
        status = status_of(seat.state, seat.recent, seat.doing_in_words(), now, self._offset(now))
        return msgspec.structs.replace(status, mark=self._mark)

    def _reply_with_status(self, reply: Reply) -> None:
        """One answer. A view that cannot be made must never end a run."""
        try:
            status = self._cached_status()
        except Exception as error:
            reply(None, f"the status cannot be made: {type(error).__name__}: {error}")
            return
        reply(status, "")

    def _cached_status(self) -> RunStatus:
        shown, is_over = self._shown, self._coordinator.state.phase is RunPhase.OVER
        if (
            shown is not None
            and self._loop.now() < self._shown_until
            and (shown.mark == self._mark or self._is_expensive)
            and is_over == (shown.phase == RunPhase.OVER.value)  # of the end everybody hears
        ):
            return shown
        began = self._work_clock()
        self._shown = shown = self.status()
        took_s = self._work_clock() - began
        self._is_expensive = took_s > _EXPENSIVE_S
        self._shown_until = self._loop.now() + took_s * _SHOWN_PER_WORK
        return shown

    def _offset(self, now: float) -> float:
        """The same as long as nobody sets the clock: what has happened has one time, however often it is told."""
        offset = self._wall_clock() - now
        if self._wall_offset is None or abs(offset - self._wall_offset) > _CLOCK_WAS_SET_S:
            self._wall_offset = offset
        return self._wall_offset

    # --- waiting for a change -----------------------------------------------------------------------------------------

    @property
    def _mark(self) -> str:
        return f"{self._name}.{self._steps}"

    def _count(self) -> None:
        """Nobody who does not ask pays for this."""
        if not self._is_counting:
            self._is_counting = True
            self._coordinator.watchers.append(self._on_step)

    def _on_step(self) -> None:
        self._steps += 1
        if self._coordinator.state.phase is RunPhase.OVER:  # soon nobody is here to answer
            for waiting in [*self._waiting, *self._due]:
                self._answer(waiting)
        elif self._waiting:
            now_due, self._waiting = self._waiting, []
            self._due += now_due
            for waiting in now_due:
                self._answer_within(waiting, _COALESCE_S)

    def _when_changed(self, mark: str, wait_s: float, reply: Reply) -> None:
        if (
            not mark
            or self._coordinator.state.phase is RunPhase.OVER
            or len(self._waiting) + len(self._due) >= _MAX_WAITING
        ):
            self._reply_with_status(reply)
            return
        self._count()
        waiting = _Waiting(reply)
        if mark == self._mark:
            self._waiting.append(waiting)
            self._answer_within(waiting, max(_COALESCE_S, min(wait_s, _MAX_WAIT_S)))
        else:
            self._due.append(waiting)
            self._answer_within(waiting, _COALESCE_S)

    def _answer_within(self, waiting: _Waiting, seconds: float) -> None:
        if waiting.timer is not None:
            waiting.timer.cancel()
        waiting.timer = self._loop.at(self._loop.now() + seconds, lambda: self._answer(waiting))

    def _answer(self, waiting: _Waiting) -> None:
        for group in (self._waiting, self._due):
            if waiting in group:
                group.remove(waiting)
        if waiting.timer is not None:
            waiting.timer.cancel()
        self._reply_with_status(waiting.reply)

    def close(self) -> None:
        """The coordinator is here no longer. Who waits for news of it would get old ones, or none."""
        self._is_closed = True
        waiting, self._waiting, self._due = [*self._waiting, *self._due], [], []
        for each in waiting:
            if each.timer is not None:
                each.timer.cancel()
            each.reply(None, _GONE)

    # --- requests -----------------------------------------------------------------------------------------------------

    def ask(self, request: AnyRequest, reply: Reply) -> None:
        from tenax._core import requests

        if self._is_closed:
            reply(None, _GONE)
            return
        is_over = self._coordinator.state.phase is RunPhase.OVER
        match request:
            case requests.StatusRequest(mark, wait_s):
                self._when_changed(mark, wait_s, reply)
            case requests.StopRequest() | requests.RestartRequest() | requests.DrainRequest() if is_over:
                reply(None, "the run is over")
            case requests.StopRequest(why):
                # First the answer: the end of the run may close the way to whoever asked.
                reply("the run is being ended on every node", "")
                self._coordinator.step(CancelRequested(why))
            case requests.RestartRequest(why):
                phase = self._coordinator.state.phase
                if phase not in (RunPhase.RUNNING, RunPhase.PAUSED):
                    reply(
                        None, f"no generation is running that could be restarted: {self._coordinator.doing_in_words()}"
                    )
                    return
                if leaving := self._last_leaving():
                    reply(None, f"generation {self._coordinator.state.generation} is ending already: {leaving}")
                    return
                reply(f"generation {self._coordinator.state.generation} is being ended, and another follows", "")
                self._coordinator.step(RestartRequested(why))
            case requests.DrainRequest(node, why):
                node_id, trouble = self.find(node)
                if trouble:
                    reply(None, trouble)
                    return
                reply(f"{self._coordinator.state.nodes[node_id].label} is asked to leave", "")
                self._coordinator.step(DrainRequested(node_id, why))
            case requests.NodeRequest(node):
                node_id, trouble = self.find(node)
                reply(node_id or None, trouble)
            case requests.LogsRequest(node):
                node_id, trouble = self.find(node)
                if trouble:
                    reply(None, trouble)
                else:
                    self._forward(node_id, request, reply)
            case _:
                reply(None, "this is asked of an agent, not of the coordinator")

    def _last_leaving(self) -> str:
        """Who was asked to leave, if too few are left then for another generation; else nothing."""
        state = self._coordinator.state
        leaving = [record.label for record in state.nodes.values() if record.is_draining]
        if not leaving or len(state.nodes) - len(leaving) >= state.settings.min_nodes:
            return ""
        return f"{some_of(leaving)} {'was' if len(leaving) == 1 else 'were'} asked to leave"

    def find(self, node: str) -> tuple[str, str]:
        """The id of the node that is meant; or why it is not known who is."""
        state = self._coordinator.state
        if node in state.nodes:
            return node, ""
        if node in state.labels:
            return state.labels[node], ""
        found = [
            node_id
            for node_id, record in state.nodes.items()
            if record.info.host == node or (record.info.name and record.info.name == node)
        ]
        if not found and node.isdecimal() and len(node) < _MAX_DIGITS:
            found = [each for each, rank in state.members.items() if rank == int(node) and each in state.nodes]
        if len(found) == 1:
            return found[0], ""
        ranks = {each: f" (rank {rank})" for each, rank in state.members.items() if each not in state.gone}
        names = [f"{record.label}{ranks.get(node_id, '')}" for node_id, record in state.nodes.items()]
        shown = ", ".join(names[:_MAX_NAMES_SHOWN]) + (", ..." if len(names) > _MAX_NAMES_SHOWN else "")
        asked = repr(node if len(node) <= _MAX_NAME_SHOWN else f"{node[:_MAX_NAME_SHOWN]}...")
        if found:
            return "", f"{asked} may be {len(found)} nodes; say which of {shown}"
        return "", f"there is no node {asked}; there are {shown or 'none yet'}"
