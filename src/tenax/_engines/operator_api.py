"""Answers operators' requests in the process that hosts the coordinator.

It decides nothing: a request to change the run becomes a coordinator event, a query is answered from the coordinator's
state, and what only a node can answer is forwarded to that node. Invariants:

- Every request gets exactly one answer: a value, or an error message.
- Long polling: a status request that carries the mark of the last status is answered when something has changed, plus
  a short delay, so that a thousand joining nodes cause one answer and not a thousand. It waits no longer than the
  request allows, nor than ``_MAX_WAIT_S``.
- Requests cannot harm the run: an expensive status is cached for a multiple of its cost, and a status that cannot be
  built is answered with an error.
"""

from __future__ import annotations

import os
import time

import msgspec

from tenax._core.coordinator import CancelRequested, DrainRequested, Over, Paused, RestartRequested, Running
from tenax._core.text import some_of
from tenax._io.loop import NO_TIMER

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from tenax._core.requests import AnyRequest, OfNode
    from tenax._engines.coordinator_host import CoordinatorHost
    from tenax._io.interfaces import Cancellable, EventLoop, Reply
    from tenax._view.status import RunStatus

_MAX_NAMES_SHOWN = 8
_MAX_DIGITS = 10
_MAX_NAME_SHOWN = 100
_MAX_WAIT_S = 30.0
_COALESCE_S = 0.2  # changes within this time share one answer
_MAX_WAITING = 256
_CLOCK_WAS_SET_S = 1.0
_ACTIVITY_S = 2.0  # how long a status waits for the activity of all nodes, ...
_ACTIVITY_EVERY_S = 1.0  # ... and how old it may be
_GONE = "the coordinator is no longer on this node; try again"
_CACHE_PER_COST = 20  # a status is cached for this multiple of the CPU time it took to build
_EXPENSIVE_S = 0.005  # above this cost, even if the run has changed since; its mark shows that


class _Waiting(msgspec.Struct, eq=False):
    reply: Reply
    is_due: bool  # something has changed: answered after the short delay
    timer: Cancellable = NO_TIMER


class OperatorApi(msgspec.Struct, eq=False):
    """The API of one coordinator. ``forward`` sends a request to a node, by id, and passes its answer to ``reply``."""

    _coordinator: CoordinatorHost
    _loop: EventLoop
    _forward: Callable[[str, OfNode, Reply], None]
    _wall_clock: Callable[[], float] = time.time
    _work_clock: Callable[[], float] = time.thread_time
    _cached: RunStatus | None = None
    _cached_until: float = 0.0
    _is_expensive: bool = False
    _name: str = msgspec.field(default_factory=lambda: os.urandom(4).hex())  # so that marks of coordinators differ
    _steps: int = 0
    _wall_offset: float | None = None
    _is_counting: bool = False
    _is_closed: bool = False
    _asked_at: float = float("-inf")  # when the nodes were last asked for their workers' activity
    _waiting: list[_Waiting] = []  # status requests

    def watch(self, on_step: Callable[[], None]) -> None:
        """Call ``on_step`` after every step of the coordinator: the status may have changed."""
        self._coordinator.watchers.append(on_step)

    def unwatch(self, on_step: Callable[[], None]) -> None:
        self._coordinator.watchers.remove(on_step)

    def status(self) -> RunStatus:
        from tenax._view.status import status_of

        self._count()
        now = self._loop.now()
        coordinator = self._coordinator
        status = status_of(
            coordinator.state, coordinator.recent, coordinator.describe_activity(), now, self._offset(now)
        )
        return msgspec.structs.replace(status, mark=self._mark)

    def _reply_with_status(self, reply: Reply) -> None:
        """Answer with the status. An error while building it must never end the run."""
        try:
            status = self._cached_status()
        except Exception as error:
            reply(None, f"could not build the status: {type(error).__name__}: {error}")
            return
        reply(status, "")

    def _cached_status(self) -> RunStatus:
        cached, is_over = self._cached, isinstance(self._coordinator.state.phase, Over)
        if (
            cached is not None
            and self._loop.now() < self._cached_until
            and (cached.mark == self._mark or self._is_expensive)
            and is_over == bool(cached.outcome)  # the end of the run is always shown
        ):
            return cached
        import tenax._view.status  # noqa: F401 - the import is not part of the cost

        began = self._work_clock()
        self._cached = status = self.status()
        took_s = self._work_clock() - began
        self._is_expensive = took_s > _EXPENSIVE_S
        self._cached_until = self._loop.now() + took_s * _CACHE_PER_COST
        return status

    def _offset(self, now: float) -> float:
        """Return wall clock minus loop clock. Changes only if the clock is set, so that an event keeps its time."""
        offset = self._wall_clock() - now
        if self._wall_offset is None or abs(offset - self._wall_offset) > _CLOCK_WAS_SET_S:
            self._wall_offset = offset
        return self._wall_offset

    # --- waiting for a change -----------------------------------------------------------------------------------------

    @property
    def _mark(self) -> str:
        return f"{self._name}.{self._steps}"

    def _count(self) -> None:
        """Start counting steps. Without status requests nothing is counted."""
        if not self._is_counting:
            self._is_counting = True
            self._coordinator.watchers.append(self._on_step)

    def _on_step(self) -> None:
        self._steps += 1
        is_over = isinstance(self._coordinator.state.phase, Over)
        for waiting in list(self._waiting):
            if is_over:  # answer now: this process may exit soon
                self._answer(waiting)
            elif not waiting.is_due:
                waiting.is_due = True
                self._answer_within(waiting, _COALESCE_S)

    def _when_changed(self, mark: str, wait_s: float, reply: Reply) -> None:
        is_full = len(self._waiting) >= _MAX_WAITING
        if not mark or is_full or isinstance(self._coordinator.state.phase, Over):
            self._reply_with_status(reply)
            return
        self._count()
        waiting = _Waiting(reply, is_due=mark != self._mark)
        self._waiting.append(waiting)
        self._answer_within(waiting, _COALESCE_S if waiting.is_due else max(_COALESCE_S, min(wait_s, _MAX_WAIT_S)))

    def _answer_within(self, waiting: _Waiting, seconds: float) -> None:
        waiting.timer.cancel()
        waiting.timer = self._loop.at(self._loop.now() + seconds, lambda: self._answer(waiting))

    def _answer(self, waiting: _Waiting) -> None:
        if waiting in self._waiting:
            self._waiting.remove(waiting)
            waiting.timer.cancel()
            self._reply_with_status(waiting.reply)

    def close(self) -> None:
        """Fail the waiting requests: the coordinator is no longer in this process."""
        self._is_closed = True
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            each.timer.cancel()
            each.reply(None, _GONE)

    # --- activity ---------------------------------------------------------------------------------------------------

    def _ask_for_activity(self, then: Callable[[], None]) -> None:
        """Let every node report what its workers do, unless they did so recently; call ``then`` once, soon."""
        from tenax._core.requests import ActivityRequest

        now, state = self._loop.now(), self._coordinator.state
        if now < self._asked_at + _ACTIVITY_EVERY_S:
            then()
            return
        self._asked_at = now
        awaited = {node_id for node_id in state.members if node_id in state.nodes}
        if not awaited:
            then()
            return

        def stop_waiting(answered: set[str]) -> None:
            if awaited & answered:
                awaited.difference_update(answered)
                if not awaited:
                    timer.cancel()
                    then()

        timer = self._loop.at(now + _ACTIVITY_S, lambda: stop_waiting(set(awaited)))
        for node_id in sorted(awaited):
            self._forward(node_id, ActivityRequest(node_id), lambda *_, each=node_id: stop_waiting({each}))

    # --- requests -----------------------------------------------------------------------------------------------------

    def submit(self, request: AnyRequest, reply: Reply) -> None:
        from tenax._core import requests

        if self._is_closed:
            reply(None, _GONE)
            return
        is_over = isinstance(self._coordinator.state.phase, Over)
        match request:
            case requests.StatusRequest(mark, wait_s, with_activity):
                if with_activity and not is_over:
                    self._ask_for_activity(lambda: self._when_changed(mark, wait_s, reply))
                else:
                    self._when_changed(mark, wait_s, reply)
            case requests.StopRequest() | requests.RestartRequest() | requests.DrainRequest() if is_over:
                reply(None, "the run is over")
            case requests.StopRequest(why):
                # Answer first: the end of the run may close the operator's connection.
                reply("stopping the run on every node", "")
                self._coordinator.step(CancelRequested(why))
            case requests.RestartRequest(why):
                generation = self._coordinator.state.generation
                if not isinstance(self._coordinator.state.phase, Running | Paused):
                    reply(None, f"no generation to restart: {self._coordinator.describe_activity()}")
                elif leaving := self._last_leaving():
                    reply(None, f"generation {generation} is already ending: {leaving}")
                else:
                    reply(f"stopping generation {generation}; the next one follows", "")
                    self._coordinator.step(RestartRequested(why))
            case requests.DrainRequest() | requests.NodeRequest() | requests.LogsRequest() | requests.StacksRequest():
                node_id, trouble = self.find(request.node)
                if trouble:
                    reply(None, trouble)
                elif isinstance(request, requests.DrainRequest):
                    reply(f"draining {self._coordinator.state.nodes[node_id].label}", "")
                    self._coordinator.step(DrainRequested(node_id, request.why))
                elif isinstance(request, requests.NodeRequest):
                    reply(node_id, "")
                else:
                    self._forward(node_id, request, reply)
            case _:
                reply(None, "the coordinator cannot answer this request; send it to an agent")

    def _last_leaving(self) -> str:
        """Name the draining nodes if too few nodes remain for another generation; else return an empty string."""
        state = self._coordinator.state
        leaving = [record.label for record in state.nodes.values() if record.is_draining]
        if not leaving or len(state.nodes) - len(leaving) >= state.settings.min_nodes:
            return ""
        return f"{some_of(leaving)} {'is' if len(leaving) == 1 else 'are'} draining"

    def find(self, node: str) -> tuple[str, str]:
        """Return the id of the node that ``node`` names, and an error message if there is not exactly one."""
        state = self._coordinator.state
        if node in state.nodes:
            return node, ""
        if node in state.names.labels:
            return state.names.labels[node], ""
        found = [
            node_id
            for node_id, record in state.nodes.items()
            if record.info.host == node or (record.info.name and record.info.name == node)
        ]
        if not found and node.isdecimal() and len(node) < _MAX_DIGITS:
            found = [each for each, rank in state.members.items() if rank == int(node) and each in state.nodes]
        if len(found) == 1:
            return found[0], ""
        ranks = {each: f" (rank {rank})" for each, rank in state.members.items() if state.last.has(each)}
        names = [f"{record.label}{ranks.get(node_id, '')}" for node_id, record in state.nodes.items()]
        shown = ", ".join(names[:_MAX_NAMES_SHOWN]) + (", ..." if len(names) > _MAX_NAMES_SHOWN else "")
        asked = repr(node if len(node) <= _MAX_NAME_SHOWN else f"{node[:_MAX_NAME_SHOWN]}...")
        if found:
            return "", f"{asked} matches {len(found)} nodes; use one of {shown}"
        return "", f"no node {asked}; known nodes: {shown or 'none yet'}"
