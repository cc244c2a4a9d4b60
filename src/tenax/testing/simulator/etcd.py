"""etcd in the simulation: a model on a host of its own, and the clients of the agents.

Each agent has one connection to etcd. While the path is cut, requests wait at the sender and may be executed long after
the client has given them up, as with a real connection. A watch reports every change in order, however late. etcd may
be suspended, and drops the keys of a lease at its end or up to half a second later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from tenax._core.etcd.errors import EtcdError, EtcdUnavailable
from tenax._core.etcd.operations import Change, RangeAnswer
from tenax._core.leadership.keys import Keys, Written
from tenax.testing.etcd_model import EtcdModel
from tenax.testing.simulator.network import End, Host, Stream
from tenax.testing.simulator.process import Process
from tenax.testing.simulator.scheduler import cancel

if TYPE_CHECKING:
    from tenax._core.leadership.calls import Request
    from tenax.testing.simulator.agent import AgentProcess
    from tenax.testing.simulator.cluster import Cluster
    from tenax.testing.simulator.elected import ElectedAgent
    from tenax.testing.simulator.network import Payload
    from tenax.testing.simulator.scheduler import Plan
    from tenax.testing.simulator.server import Server

ETCD = -1  # the index of its host
_LEADER, _RECORD = Keys("run").leader, Keys("run").record
_MAX_LATE_S = 0.5  # how late a lease may expire


class EtcdProcess(Process):
    """etcd, with all its members as one process."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster, Host(ETCD, 0.0))
        self.model = EtcdModel()
        self._expiry: Plan | None = None

    def is_led_by(self, server: Server) -> bool:
        leader = self.model.keys.get(_LEADER)
        return leader is not None and leader.create_revision == server.term

    def connect(self, agent: AgentProcess, on_payload: Callable[[End, Payload], None]) -> End:
        """Return the agent's end of a connection."""
        ours, theirs = End(agent.host, agent, on_payload), End(self.host, self, self._on_payload)
        Stream(self.cluster.network, ours, theirs)
        Stream(self.cluster.network, theirs, ours)
        return ours

    def _on_payload(self, end: End, payload: Any) -> None:
        match payload:
            case ("watch", bytes(key)):
                changed: Callable[[list[Change]], None] = lambda changes: end.send(("changed", changes))  # noqa: E731
                end.send(("followed", self.model.watch(key, b"", changed)))
            case ("call", int(number), operation):
                before = self.model.keys.get(_RECORD)
                try:
                    answer: object = self.model.call(operation, self.clock())
                except EtcdError as error:
                    answer = error
                record = self.model.keys.get(_RECORD)
                if record is not None and record != before:
                    written = msgspec.json.decode(record.value, type=Written)
                    self.cluster.checks.recorded(written, is_first=record.version == 1)
                end.send(("answer", number, answer))
                self._plan_expiry()

    def _plan_expiry(self) -> None:
        cancel(self._expiry)
        at = self.model.next_expiry()
        if at is not None:
            late_s = _MAX_LATE_S * self.cluster.rng.random()
            self._expiry = self.later(at - self.clock() + late_s, self._expire)

    def _expire(self) -> None:
        was_recorded = _RECORD in self.model.keys
        self.model.expire(self.clock())
        if was_recorded and _RECORD not in self.model.keys:
            self.cluster.checks.may_begin_anew = True
        self._plan_expiry()

    def resume(self) -> None:
        """Leases that have expired meanwhile are prolonged if etcd has elected another leader of its own."""
        if self.is_paused and self.cluster.rng.random() < 0.5:
            self.model.prolong(self.clock())
        super().resume()


class EtcdClientModel:
    """One agent's client: requests with a time limit, and the watch on one key."""

    def __init__(self, agent: ElectedAgent) -> None:
        self._agent = agent
        self._calls: dict[int, tuple[float, Plan]] = {}
        self._end = agent.cluster.etcd.connect(agent, self._on_payload)

    def follow(self) -> None:
        """Watch the leader."""
        self._end.send(("watch", _LEADER))

    def request(self, request: Request) -> None:
        timeout = self._agent.later(request.patience_s, self._time_out, request.number)
        self._calls[request.number] = (self._agent.clock(), timeout)
        self._end.send(("call", request.number, request.operation))

    def cancel(self, number: int) -> None:
        if number in self._calls:
            cancel(self._calls.pop(number)[1])

    def _time_out(self, number: int) -> None:
        if self._calls.pop(number, None) is not None:
            self._fail(number, EtcdUnavailable("no answer in time"))

    def _fail(self, number: int, error: EtcdError) -> None:
        self._agent.act(self._agent.leadership.failed(number, error, self._agent.clock()))

    def _on_payload(self, _: End, payload: Any) -> None:
        act, leadership, now = self._agent.act, self._agent.leadership, self._agent.clock()
        match payload:
            case ("answer", int(number), answer) if number in self._calls:
                sent_at, timeout = self._calls.pop(number)
                cancel(timeout)
                if isinstance(answer, EtcdError):
                    self._fail(number, answer)
                else:
                    act(leadership.answered(number, answer, sent_at, now))
            case ("followed", RangeAnswer() as answer):
                act(leadership.followed(answer, now))
            case ("changed", changes):
                act(leadership.changed(changes, now))
