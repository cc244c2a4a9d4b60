"""Records the transitions of the leadership machines of a simulated history, as the model of leadership names them.

A *transition* is a tuple: when it happened, its name in ``LeadershipTrace.tla``, and its parameters. Times and ages are
in units of ``UNIT_S``. The machines under test are extended, not changed: each method calls the original, then notes
what has happened.

What never has an effect is left out, because messages on their way are not modelled one by one: answers and assignments
that their node does not read.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec

from tenax._core import events
from tenax._core.coordinator import EarlierCoordinatorGone
from tenax._core.etcd.operations import KeepAlive, RevokeLease
from tenax._core.leadership.keys import Keys, Leader, Written
from tenax._core.leadership.term import StepCoordinator
from tenax._core.link import client, wire
from tenax._core.link.client import LinkPhase
from tenax._core.link.server import SendFrame
from tenax._core.messages import NodeLeft
from tenax.testing.etcd_model import EtcdModel
from tenax.testing.simulator.checks import Checks, PropertyBroken
from tenax.testing.simulator.cluster import Cluster, Parts
from tenax.testing.simulator.elected import ElectedAgent

if TYPE_CHECKING:
    from tenax.testing.simulator.setup import Setup
    from tenax.testing.simulator.workers import Worker

UNIT_S = 0.0001
_EVERY, _PROMPT, _TRIP = (round(seconds / UNIT_S) for seconds in (2.1, 1.0, 4.0))  # see ``_thinned``
_KEYS = Keys("run")

Transition = tuple[Any, ...]


class Recorder:
    """The transitions of one history."""

    def __init__(self) -> None:
        self.cluster: Cluster
        self.transitions: list[Transition] = []
        self.nodes: dict[str, Any] = {}  # their leadership machines
        self.terms: dict[bytes, int] = {}  # the ordinal of a leader's term, by its secret
        self.leaders: dict[bytes, tuple[str, int]] = {}  # of a connection, by its nonce: the leader and its term
        self.read: set[tuple[Any, ...]] = set()  # answers and assignments that their node has read
        self.over: set[str] = set()  # nodes that know the verdict
        self.left: set[str] = set()  # nodes that have left the run, and will start no workers
        self.followed: set[bytes] = set()  # nonces of connections on which a node has proved the secret before it left

    @property
    def now(self) -> int:
        return round(self.cluster.schedule.now / UNIT_S)

    def note(self, *what: object) -> None:
        transition = (self.now, *what)
        if what[0] != "works" or self.transitions[-1] != transition:
            self.transitions.append(transition)

    def history(self) -> list[Transition]:
        """Return the transitions that matter."""
        return _thinned([each for each in map(self._as_read, self.transitions) if each is not None])

    def _as_read(self, transition: Transition) -> Transition | None:
        """Return a transition as its node has noticed it."""
        when, name, *rest = transition
        if name == "answer":
            leader, node, counts, is_sure, *key = rest
            is_read = tuple(key) in self.read
            return (when, name, leader, node, counts, is_sure) if is_read else (when, "receive", leader, node)
        if name == "deliver":
            leader, node, *key = rest
            return (when, name, leader, node) if tuple(key) in self.read else None
        return transition


def _thinned(transitions: list[Transition]) -> list[Transition]:
    """Leave out beats, keep-alives and messages that others follow soon: each replaces the ones before.

    A beat is kept if its answer, or the next one, is late, so that every age that matters is exact. So are all round
    trips of the time before an answer that counts without etcd.
    """
    unsure: dict[str, list[int]] = {}
    pairs: dict[tuple[str, str, int], list[tuple[int, int]]] = {}  # positions of an answer and its reading
    unread: dict[str, list[tuple[str, int]]] = {}
    received: dict[tuple[str, str, int], list[int]] = {}  # by leader, node and term
    renewed: dict[tuple[str, int], list[tuple[int, int]]] = {}  # positions of a keep-alive and its answer
    executed: dict[str, int] = {}
    term = 0
    for position, (when, name, *rest) in enumerate(transitions):
        if name == "answer":
            unread.setdefault(rest[1], []).append((rest[0], position))
            if not rest[3]:
                unsure.setdefault(rest[0], []).append(when)
        elif name == "answered":
            leader, answer = unread[rest[0]].pop(0)
            pairs.setdefault((leader, rest[0], term), []).append((answer, position))
        elif name == "receive":
            received.setdefault((rest[0], rest[1], term), []).append(position)
        elif name == "keep-alive" and rest[1] == "key":
            executed[rest[0]] = position
        elif name == "prove" and rest[1] == "key" and rest[0] in executed:
            renewed.setdefault((rest[0], term), []).append((executed.pop(rest[0]), position))
        term += name == "won"
    dropped: set[int] = set()
    for (leader, *_), found in pairs.items():
        kept_at = -_EVERY
        for (answer, reading), (_, next_reading) in pairwise(found):
            when, counts = transitions[answer][0], transitions[answer][4]
            sent_at, age = _sent_at(transitions[reading])
            next_sent_at, next_age = _sent_at(transitions[next_reading])
            is_prompt = age < _PROMPT and next_age < _PROMPT and next_sent_at - sent_at < _EVERY
            is_needed = any(0 <= at - when <= _TRIP for at in unsure.get(leader, ()))
            if is_prompt and not is_needed and sent_at - kept_at < _EVERY:
                dropped |= {answer, reading}
            else:
                kept_at = sent_at if counts else -_EVERY
    for found in renewed.values():
        kept_at = -_EVERY
        for (execution, answer), (_, next_answer) in pairwise(found):
            sent_at, age = _sent_at(transitions[answer])
            next_sent_at, next_age = _sent_at(transitions[next_answer])
            is_prompt = max(age, next_age) < _PROMPT // 2 and next_sent_at - sent_at < _PROMPT
            if is_prompt and sent_at - kept_at < _PROMPT:
                dropped |= {execution, answer}
            else:
                kept_at = sent_at
    for positions in received.values():
        kept_at = -_EVERY
        for position, following in pairwise(positions):
            when, next_at = transitions[position][0], transitions[following][0]
            if next_at - when < _PROMPT and when - kept_at < _PROMPT:
                dropped.add(position)
            else:
                kept_at = when
    return [
        each[:5] if each[1] == "answer" else each for number, each in enumerate(transitions) if number not in dropped
    ]


def _sent_at(reading: Transition) -> tuple[int, int]:
    """Return when the beat or keep-alive was sent whose answer is read, and its age."""
    when, *_, age = reading
    return when - age, age


def ticks(seconds: float) -> int:
    return max(0, round(seconds / UNIT_S))


def record(setup: Setup, parts: Parts | None = None) -> Recorder:
    """Simulate a setup and record it, up to its end or to the first property that is broken."""
    recorder, parts = Recorder(), parts or Parts()
    parts = msgspec.structs.replace(
        parts,
        make_client=_extended(_Client, parts.make_client, recorder),
        make_server=_extended(_Server, parts.make_server, recorder),
        make_leadership=_extended(_Leadership, parts.make_leadership, recorder),
    )
    recorder.cluster = cluster = _Cluster(setup, parts)
    cluster.checks = _Checks(cluster)
    cluster.etcd.model = _Etcd(recorder)
    with suppress(PropertyBroken):  # of a broken machine
        cluster.run()
    return recorder


def _extended(mixin: type, base: Any, recorder: Recorder) -> Any:
    return type(f"Recorded{base.__name__}", (mixin, base), {"recorder": recorder})


class _Agent(ElectedAgent):
    @property
    def recorder(self) -> Recorder:
        return self.leadership.recorder  # type: ignore[attr-defined, no-any-return]

    def step(self, event: events.AnyEvent, at: float = 0.0) -> None:
        super().step(event, at)
        if isinstance(event, events.NodeCleared):
            self.recorder.note("stop", self.info.node_id)

    def exit(self) -> None:
        if self.is_alive:
            self.recorder.note("die", self.info.node_id)
        super().exit()

    def on_cleared(self) -> None:
        self.recorder.note("die", self.info.node_id)
        super().on_cleared()

    def vanish(self) -> None:
        super().vanish()
        self.recorder.note("die", self.info.node_id)


class _Cluster(Cluster):
    make_elected = _Agent


class _Checks(Checks):
    def began(self, worker: Worker) -> None:
        self._note(worker)
        super().began(worker)

    def ended(self, worker: Worker) -> None:
        self._note(worker)
        super().ended(worker)

    def _note(self, worker: Worker) -> None:
        agent = worker.keeper.agent
        recorder = agent.leadership.recorder  # type: ignore[attr-defined]
        if agent.info.node_id not in recorder.over:  # else it has its grace period
            recorder.note("works", agent.info.node_id, worker.generation)


class _Etcd(EtcdModel):
    """etcd, with what happens to the leader's key and the record."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder
        self._is_expiring = False

    def _age_of(self, lease_id: int, now: float) -> int:
        ttl_s, expires_at = self.leases[lease_id]
        return ticks(now - (expires_at - ttl_s))

    def expire(self, now: float) -> None:
        self._is_expiring = True
        super().expire(now)
        self._is_expiring = False

    def prolong(self, now: float) -> None:
        super().prolong(now)
        self._recorder.note("prolong")

    def call(self, operation: Any, now: float) -> Any:
        leader, record = self.keys.get(_KEYS.leader), self.keys.get(_KEYS.record)
        recorder = self._recorder
        if isinstance(operation, KeepAlive) and operation.id in self.leases:
            for which, kv in (("key", leader), ("record", record)):
                if kv is not None and kv.lease == operation.id and leader is not None:
                    recorder.note("keep-alive", self._holder(leader.value), which)
        answer = super().call(operation, now)
        new_leader, new_record = self.keys.get(_KEYS.leader), self.keys.get(_KEYS.record)
        if leader is not None and new_leader is None:
            revoked = "revoke" if isinstance(operation, RevokeLease) else "depose"
            recorder.note("expire" if self._is_expiring else revoked)
        if new_leader is not None and (leader is None or leader.value != new_leader.value):
            assert new_record is not None
            self._won(new_leader, new_record, now)
        elif record is not None and new_record is None:
            recorder.note("expire record")
        elif new_record is not None and new_record != record:
            by, age = _writer(new_record.value), self._age_of(new_record.lease, now)
            holder = self._holder(leader.value) if leader is not None else by
            recorder.note(*(("put", by, age) if by == holder else ("put back", holder, by)))
        return answer

    @staticmethod
    def _holder(value: bytes) -> str:
        return msgspec.json.decode(value, type=Leader).address.node_id

    def _won(self, leader: Any, record: Any, now: float) -> None:
        recorder, node_id = self._recorder, self._holder(leader.value)
        machine = recorder.nodes[node_id]
        secret = msgspec.json.decode(leader.value, type=Leader).secret
        recorder.terms[secret] = len(recorder.terms) + 1
        recorder.note(
            "won",
            node_id,
            machine.stands_with(secret),
            self._age_of(leader.lease, now),
            self._age_of(record.lease, now),
        )


def _writer(value: bytes) -> str:
    return msgspec.json.decode(value, type=Written).by.node_id


class _Leadership:
    """Extends ``Leadership``."""

    recorder: Recorder

    def __init__(self: Any, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)  # type: ignore[call-arg]
        self.node_id = self.client.node.node_id
        self.recorder.nodes[self.node_id] = self
        make_term = _extended(_Term, self.make_term, self.recorder)
        make_term.make_decisions = _extended(_Decisions, self.make_term.make_decisions, self.recorder)
        self.make_term = make_term

    def stands_with(self: Any, secret: bytes) -> bool:
        """Return whether this node will lead if it wins with this secret."""
        agent = next(node.agent for node in self.recorder.cluster.nodes if _is_of(node.agent, self))
        return agent.is_alive and self._candidacy is not None and self._candidate.secret == secret

    def _step_down(self: Any, why: str) -> None:
        if self.leading is not None:
            self.recorder.note("step down", self.node_id)
        super()._step_down(why)  # type: ignore[misc]

    def _withdraw(self: Any) -> None:
        if self._candidacy is not None:
            self.recorder.note("resign", self.node_id)
        super()._withdraw()  # type: ignore[misc]

    def _resign(self: Any) -> None:
        self.recorder.note("resign", self.node_id)
        super()._resign()  # type: ignore[misc]


def _is_of(agent: Any, machine: Any) -> bool:
    return agent is not None and agent.leadership is machine


class _Term:
    """Extends ``Term``."""

    recorder: Recorder

    def __init__(self: Any, *arguments: Any, **options: Any) -> None:
        output = options.pop("output")

        def noted(each: Any) -> None:
            if isinstance(each, StepCoordinator) and isinstance(each.event, EarlierCoordinatorGone):
                earlier = self._was_probing
                if earlier is not None:  # else all earlier terms were its own
                    self.recorder.note("probed", self._node_id, earlier.node_id)
            output(each)

        self._was_probing = None
        super().__init__(*arguments, output=noted, **options)  # type: ignore[call-arg]

    def probed(self: Any, *, is_dead: bool) -> None:
        self._was_probing = self._probing
        super().probed(is_dead=is_dead)  # type: ignore[misc]

    def _prove(self: Any) -> None:
        super()._prove()  # type: ignore[misc]
        self.recorder.note("prove", self._node_id, "key", self._age_of(self._candidacy.lease))

    def _keep_record(self: Any) -> None:
        super()._keep_record()  # type: ignore[misc]
        if self._is_record_kept and hasattr(self, "_decisions"):  # else the term begins with it
            self.recorder.note("prove", self._node_id, "record", self._age_of(self._candidacy.record_lease))

    def _age_of(self: Any, lease: Any) -> int:
        return ticks(self._client.loop.now() - lease.proven_at)


class _Decisions:
    """Extends ``Decisions``."""

    recorder: Recorder

    def _decide(self: Any, state: Any, wall_ahead_s: float) -> None:
        node_id = self._elected.leader.address.node_id
        was = getattr(self, "_was", self._elected.written.record)
        self._was = is_ = _decided(state)
        if is_[2]:
            self.recorder.note("verdict", node_id)
        elif is_[0] > (was[0] if isinstance(was, tuple) else was.generation):
            self.recorder.note("form", node_id, frozenset(state.members))
        elif is_[1] == is_[0] > 0 and is_[1] > (was[1] if isinstance(was, tuple) else was.settled):
            self.recorder.note("settle", node_id)
        else:
            self.recorder.note("adopt", node_id)
        super()._decide(state, wall_ahead_s)  # type: ignore[misc]

    def _written(self: Any, revision: int) -> None:
        self.recorder.note("written", self._elected.leader.address.node_id)
        super()._written(revision)  # type: ignore[misc]


def _decided(state: Any) -> tuple[int, int, bool]:
    return state.generation, state.settled, state.verdict is not None


class _Client:
    """Extends ``LinkClient``."""

    recorder: Recorder

    def received(self: Any, frame: Any, now: float) -> Any:
        was, attempted_at, node_id = self.phase, self._attempted_at, self.node.node_id
        sent_at = self.lease._sent.get(frame.number) if isinstance(frame, wire.BeatAnswer) else None
        outputs = super().received(frame, now)  # type: ignore[misc]
        recorder = self.recorder
        nonce = self._hello.nonce
        if node_id in recorder.left:
            return outputs
        if was is not self.phase is LinkPhase.PROVING:
            recorder.followed.add(nonce)
            recorder.note("follow", node_id, *recorder.leaders[nonce])
        elif was is not self.phase is LinkPhase.LINKED:
            recorder.read.add((nonce, 0))
            recorder.note("answered", node_id, ticks(now - attempted_at))
        elif isinstance(frame, wire.BeatAnswer):
            recorder.read.add((nonce, frame.number))
            recorder.note("answered", node_id, ticks(now - (sent_at if sent_at is not None else 0.0)))
        for output in outputs:
            match output:
                case client.Emit(events.GenerationFormed(part)):
                    recorder.read.add((nonce, "generation", part.generation))
                    recorder.note("start", node_id, part.generation)
                case client.Emit(events.RunEnded()):
                    recorder.over.add(node_id)
                    recorder.note("stop", node_id)
        return outputs

    def send(self: Any, message: Any) -> Any:
        if isinstance(message, NodeLeft):
            self.recorder.left.add(self.node.node_id)
        return super().send(message)  # type: ignore[misc]

    def ended(self: Any, event: Any, now: float) -> Any:
        if isinstance(event, events.RunEnded):
            self.recorder.over.add(self.node.node_id)
            self.recorder.note("stop", self.node.node_id)
        return super().ended(event, now)  # type: ignore[misc]

    def closed(self: Any, *arguments: Any, **options: Any) -> Any:
        if self.phase in (LinkPhase.PROVING, LinkPhase.LINKED):
            self.recorder.note("link lost", self.node.node_id)
        return super().closed(*arguments, **options)  # type: ignore[misc]


class _Server:
    """Extends ``LinkServer``."""

    recorder: Recorder

    @property
    def _leader(self: Any) -> str:
        return self._state().settings.serving_node  # type: ignore[no-any-return]

    def received(self: Any, peer: Any, frame: Any, now: float) -> Any:
        outputs = super().received(peer, frame, now)  # type: ignore[misc]
        if isinstance(frame, wire.Hello):
            machine = self.recorder.nodes[self._leader]
            term = self.recorder.terms[machine.leading.elected.leader.secret] if machine.leading is not None else 0
            self.recorder.leaders[frame.nonce] = (self._leader, term)
        elif peer.node_id and (peer.node_id not in self.recorder.left or peer.hello.nonce in self.recorder.followed):
            self._note_frame(peer, outputs)
        return outputs

    def _note_frame(self: Any, peer: Any, outputs: Any) -> None:
        for output in outputs:
            match output:
                case SendFrame(_, wire.Accepted(counts=counts)):
                    self._note_answer(peer, counts, 0)
                    return
                case SendFrame(_, wire.BeatAnswer(number, counts)):
                    self._note_answer(peer, counts, number)
                    return
        self.recorder.note("receive", self._leader, peer.node_id)

    def _note_answer(self: Any, peer: Any, counts: bool, number: int) -> None:
        term = self.recorder.nodes[self._leader].leading
        is_sure = term is not None and term.authority.is_sure(peer.received_at)
        self.recorder.note("answer", self._leader, peer.node_id, counts, is_sure, peer.hello.nonce, number)

    def deliver(self: Any, send: Any) -> Any:
        outputs = super().deliver(send)  # type: ignore[misc]
        if isinstance(send.event, events.GenerationFormed):
            for peer in (peer for output in outputs for peer in output.peers):
                key = (peer.hello.nonce, "generation", send.event.assignment.generation)
                self.recorder.note("deliver", self._leader, peer.node_id, *key)
        return outputs
