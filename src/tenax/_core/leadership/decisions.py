"""Holds back the coordinator's messages until the decision behind them is stored in etcd.

If a step has decided something (``_core/record.py``), its messages and all later ones wait, in order, until etcd has
the record. Invariants:

- Each write is guarded by the leader's term and by the revision of the record it replaces, so a late write of an
  abandoned attempt has no effect. If the guard fails and the record is not this leader's, another node leads: all
  waiting messages are dropped, and ``deposed`` is called.
- While etcd is down, decisions wait. The end of a generation is not a decision: it is sent at once.
- A message waits for the node it was addressed to. A node that was lost and has joined again under the same id is a new
  node to the coordinator, and gets none of the old messages. A node whose link only broke gets its assignment once,
  although the coordinator sends it again. A refused node gets its refusal even if the coordinator has dropped it since:
  it may still be linked, and is sent nothing else.
"""

from __future__ import annotations

from collections import deque
from math import ceil

import msgspec

from tenax._core.coordinator import Send
from tenax._core.etcd.errors import EtcdRejected, EtcdUnavailable
from tenax._core.etcd.operations import GrantLease, Put, Transaction
from tenax._core.events import GenerationFormed, JoinRefused
from tenax._core.leadership.keys import VERDICT_TTL_S, LeaderAndRecord, Written
from tenax._core.model import Outcome
from tenax._core.record import mark_of, record_of
from tenax._core.text import encodable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from tenax._core.authority import AuthorityTerms
    from tenax._core.coordinator import CoordinatorState
    from tenax._core.etcd.errors import EtcdError
    from tenax._core.etcd.operations import TransactionAnswer
    from tenax._core.leadership.calls import Call, Calls, Timer
    from tenax._core.leadership.candidacy import Elected
    from tenax._core.leadership.keys import Keys
    from tenax._core.model import Verdict
    from tenax._core.record import Mark, RunRecord

_AGAIN_S = 0.25
_MAX_RECORD_BYTES = 1 << 20  # etcd's default limit is 1.5 MiB


class _Held:
    """A waiting message, with the coordinator's records of its recipients at that time."""

    def __init__(self, send: Send, state: CoordinatorState) -> None:
        self.send = send
        self._state = state
        self._recipients = {node_id: state.nodes.get(node_id) for node_id in send.to}

    def for_same_nodes(self) -> Send:
        """Return the message without recipients that were lost since, unless it refuses them."""
        nodes, is_refusal = self._state.nodes, isinstance(self.send.event, JoinRefused)
        to = tuple(
            node_id
            for node_id, node in self._recipients.items()
            if nodes.get(node_id) is node or (is_refusal and node_id not in nodes)
        )
        return self.send if to == self.send.to else Send(to, self.send.event)


class _Decision:
    def __init__(self, record: RunRecord, grace_s: float) -> None:
        self.record = record
        self.grace_s = grace_s  # how long workers may take to stop
        self.held: list[_Held] = []


class Decisions:
    """The decisions of one leader in one term."""

    def __init__(
        self,
        client: Calls,
        keys: Keys,
        elected: Elected,
        lease_id: int,
        terms: AuthorityTerms,
        *,
        deliver: Callable[[Send], None],
        deposed: Callable[[str], None],
        troubled: Callable[[EtcdError], None],
        written: Callable[[RunRecord], None],
    ) -> None:
        self._client = client
        self._keys = keys
        self._elected = elected
        self._lease_id = lease_id
        self._terms = terms
        self._deliver = deliver
        self._deposed = deposed
        self._troubled = troubled
        self._on_written = written
        record = elected.written.record
        self._before = elected.written.before
        self._mark: Mark = record.mark
        self._recorded_at = elected.recorded_at
        self._waiting: deque[_Decision] = deque()
        self._held_assignments: dict[tuple[str, ...], _Held] = {}  # the last one per node
        self._call: Call | None = None
        self._timer: Timer | None = None
        self._is_closed = False

    @property
    def is_waiting(self) -> bool:
        return bool(self._waiting)

    def submit(self, send: Send, state: CoordinatorState, wall_ahead_s: float = 0.0) -> None:
        """Deliver the message now, or once all decisions up to ``state`` are stored.

        ``wall_ahead_s``: how far the wall clock is ahead of this machine's; a successor on another host has another.
        """
        mark = mark_of(state)
        if mark != self._mark:
            self._mark = mark
            self._decide(state, wall_ahead_s)
        if not self._waiting:
            self._deliver(send)
        elif not self._is_held(send):
            held = _Held(send, state)
            self._waiting[-1].held.append(held)
            if isinstance(send.event, GenerationFormed):
                self._held_assignments[send.to] = held

    def _is_held(self, send: Send) -> bool:
        """Return whether this assignment is already waiting for the same node."""
        held = self._held_assignments.get(send.to)
        return held is not None and held.send == send and held.for_same_nodes() == send

    def forget_earlier(self, state: CoordinatorState, wall_ahead_s: float = 0.0) -> None:
        """Remove the earlier leaders from the record: all members have returned or stopped."""
        if self._before and not self._is_closed:
            self._before = ()
            self._mark = mark_of(state)
            self._decide(state, wall_ahead_s)

    def _decide(self, state: CoordinatorState, wall_ahead_s: float) -> None:
        grace_s = max((node.info.grace_s for node in state.nodes.values()), default=0.0)
        self._waiting.append(_Decision(record_of(state).shifted(wall_ahead_s), grace_s))
        if len(self._waiting) == 1:
            self._write()

    def _write(self) -> None:
        self._timer = None
        record, ttl_s = self._waiting[0].record, VERDICT_TTL_S
        if record.verdict is None or self._before:  # members that have not reconnected may work while it exists
            self._put(record, self._lease_id)
            return
        # The run id is soon free again: this record has a short lease. Nodes of this run find the verdict for a day.
        lease_id = self._lease_id ^ 1
        if record.verdict.outcome is Outcome.CANCELLED:  # workers are still running
            ttl_s += ceil(min(self._terms.record_s, self._terms.lease.lease_s + self._waiting[0].grace_s))

        def granted(_: object) -> None:
            self._put(record, lease_id)

        self._call = self._client.call(GrantLease(ttl_s, lease_id), granted, self._not_written)

    def _put(self, record: RunRecord, lease_id: int) -> None:
        keys, elected = self._keys, self._elected
        was = elected.written
        longest = was.longest if self._before else self._terms
        value = _encode(Written(record, was.by, self._before, longest, was.fit, was.run))
        guards = (*keys.is_led_by(elected.leader, elected.term), keys.is_recorded_at(self._recorded_at))
        puts: tuple[Put, ...] = (Put(keys.record, value, lease_id),)
        if record.verdict is not None:
            puts += (Put(keys.ended(was.run), _as_json(_short(record.verdict)), self._lease_id),)
        attempt = Transaction(guards, puts, keys.read(was.run).then)

        def done(answer: TransactionAnswer) -> None:
            if answer.succeeded:
                self._written(answer.revision)
                return
            try:
                found = LeaderAndRecord(answer)
            except EtcdRejected as error:
                self._not_written(error)
                return
            is_ours = found.is_led_by(elected.leader, elected.term)
            if is_ours and found.record_kv is not None and found.record_kv.value == value:
                self._written(found.recorded_at)  # by an attempt whose answer was lost
            else:
                self.close()
                has_leader = found.leader_kv is not None
                self._deposed("another node is the leader" if has_leader else "its lease in etcd expired")

        self._call = self._client.call(attempt, done, self._not_written)

    def _written(self, revision: int) -> None:
        self._recorded_at = revision
        decision = self._waiting[0]
        self._on_written(decision.record)
        for held in decision.held:  # may grow while these are delivered
            if self._held_assignments.get(held.send.to) is held:
                del self._held_assignments[held.send.to]
            send = held.for_same_nodes()
            if send.to:
                self._deliver(send)
        if not self._is_closed:
            self._waiting.popleft()
        if self._waiting:
            self._write()

    def _not_written(self, error: EtcdError) -> None:
        """Retry the same write, which may have succeeded."""
        self._timer = self._client.loop.at(self._client.loop.now() + _AGAIN_S, self._write)
        if not isinstance(error, EtcdUnavailable):
            self._troubled(error)

    def close(self) -> None:
        self._is_closed = True
        self._waiting.clear()
        for thing in (self._call, self._timer):
            if thing is not None:
                thing.cancel()


def _encode(written: Written) -> bytes:
    value = _as_json(written)
    if len(value) <= _MAX_RECORD_BYTES:
        return value
    record = written.record  # too large for one key
    verdict = _short(record.verdict) if record.verdict is not None else None
    return _as_json(
        msgspec.structs.replace(written, record=msgspec.structs.replace(record, earlier=(), left=(), verdict=verdict))
    )


def _short(verdict: Verdict) -> Verdict:
    """Drop the details of the report."""
    return msgspec.structs.replace(verdict, failures=verdict.failures[:1], stopped=(), members=(), earlier=())


def _as_json(value: Written | Verdict) -> bytes:
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:  # a worker's output may contain any bytes
        return msgspec.json.encode(encodable(msgspec.to_builtins(value)))
