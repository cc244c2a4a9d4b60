"""Decisions: nobody hears of one before it is written.

What the coordinator says passes through here. If it has decided something (``_core/record.py``), what it says then and
after that waits until etcd has the record, in order. Each write is guarded by the leader's term and by the revision of
the record that it replaces: of an attempt that was thought to be lost, and comes late, nothing is left. If the guard
fails and the record is not ours, another leads: everything that waits is dropped, and ``deposed`` is told.

While etcd is away decisions wait. That a generation ends is none: it is said at once.

What waits is for the node that was meant. One that was given up meanwhile and came back is another to the coordinator,
though it has the same name: it hears nothing of what was said to its former self. One whose link only broke is told its
part again by the coordinator, and hears it once.
"""

from __future__ import annotations

from collections import deque

import msgspec

from tenax._core.coordinator import Send
from tenax._core.events import GenerationFormed
from tenax._core.record import mark_of, record_of
from tenax._core.text import encodable
from tenax._engines.etcd.keys import VERDICT_TTL_S, LeaderAndRecord, Written
from tenax._io.etcd.errors import EtcdRejected, EtcdUnavailable
from tenax._io.etcd.operations import GrantLease, Put, Transaction

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from tenax._core.authority import AuthorityTerms
    from tenax._core.coordinator import CoordinatorState
    from tenax._core.record import Mark, RunRecord
    from tenax._engines.etcd.candidacy import Elected
    from tenax._engines.etcd.keys import Keys
    from tenax._io.etcd.call import EtcdCall
    from tenax._io.etcd.client import EtcdClient
    from tenax._io.etcd.errors import EtcdError
    from tenax._io.etcd.operations import TransactionAnswer
    from tenax._io.ports import Cancellable

_AGAIN_S = 0.25
_MAX_RECORD_BYTES = 1 << 20  # etcd takes one and a half million


class _Held:
    """What waits to be said, and the nodes that it is for, as the coordinator knew them then."""

    def __init__(self, say: Send, state: CoordinatorState) -> None:
        self.say = say
        self._state = state
        self._meant = {node_id: state.nodes.get(node_id) for node_id in say.to}

    def to_the_same(self) -> Send:
        """Without those that were given up since."""
        nodes = self._state.nodes
        to = tuple(node_id for node_id, node in self._meant.items() if nodes.get(node_id) is node)
        return self.say if to == self.say.to else Send(to, self.say.event)


class _Decision:
    def __init__(self, record: RunRecord) -> None:
        self.record = record
        self.held: list[_Held] = []


class Decisions:
    """Of one leader, in one term."""

    def __init__(
        self,
        client: EtcdClient,
        keys: Keys,
        elected: Elected,
        lease_id: int,
        terms: AuthorityTerms,
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
        self._parts: dict[tuple[str, ...], _Held] = {}  # that wait; the last of each node
        self._call: EtcdCall | None = None
        self._timer: Cancellable | None = None
        self._is_over = False

    @property
    def is_waiting(self) -> bool:
        return bool(self._waiting)

    def say(self, say: Send, state: CoordinatorState) -> None:
        mark = mark_of(state)
        if mark != self._mark:
            self._mark = mark
            self._decide(state)
        if not self._waiting:
            self._deliver(say)
        elif not self._is_held(say):
            held = _Held(say, state)
            self._waiting[-1].held.append(held)
            if isinstance(say.event, GenerationFormed):
                self._parts[say.to] = held

    def _is_held(self, say: Send) -> bool:
        """A part that its node is still to hear, on whatever link it has by then."""
        held = self._parts.get(say.to)
        return held is not None and held.say == say and held.to_the_same() == say

    def forget_earlier(self, state: CoordinatorState) -> None:
        """Every member of the record is here, or has stopped: a successor need not know who led before us."""
        if self._before and not self._is_over:
            self._before = ()
            self._mark = mark_of(state)
            self._decide(state)

    def _decide(self, state: CoordinatorState) -> None:
        self._waiting.append(_Decision(record_of(state)))
        if len(self._waiting) == 1:
            self._write()

    def _write(self) -> None:
        self._timer = None
        record = self._waiting[0].record
        if record.verdict is None:
            self._put(record, self._lease_id)
            return
        # After the end the name is soon free again; until then whoever comes late is told.
        lease_id = self._lease_id ^ 1

        def granted(_: object) -> None:
            self._put(record, lease_id)

        self._call = self._client.call(GrantLease(VERDICT_TTL_S, lease_id), granted, self._not_written)

    def _put(self, record: RunRecord, lease_id: int) -> None:
        keys, elected = self._keys, self._elected
        was = elected.written
        longest = was.longest if self._before else self._terms
        value = _encode(Written(record, was.by, self._before, longest, was.fit))
        guards = (*keys.is_led_by(elected.leader, elected.term), keys.is_recorded_at(self._recorded_at))
        attempt = Transaction(guards, (Put(keys.record, value, lease_id),), keys.both().then)

        def done(answer: TransactionAnswer) -> None:
            if answer.succeeded:
                self._written(answer.revision)
                return
            try:
                standing = LeaderAndRecord(answer)
            except EtcdRejected as error:
                self._not_written(error)
                return
            is_ours = standing.is_led_by(elected.leader, elected.term)
            if is_ours and standing.record_kv is not None and standing.record_kv.value == value:
                self._written(standing.recorded_at)  # by an attempt of whose success we did not hear
            else:
                self.close()
                self._deposed("another leads" if standing.leader_kv is not None else "its lease ran out")

        self._call = self._client.call(attempt, done, self._not_written)

    def _written(self, revision: int) -> None:
        self._recorded_at = revision
        decision = self._waiting[0]
        self._on_written(decision.record)
        for held in decision.held:  # also what is said while these are delivered
            if self._parts.get(held.say.to) is held:
                del self._parts[held.say.to]
            say = held.to_the_same()
            if say.to:
                self._deliver(say)
        if not self._is_over:
            self._waiting.popleft()
        if self._waiting:
            self._write()

    def _not_written(self, error: EtcdError) -> None:
        """It may still be: it is asked for again in the same words."""
        self._timer = self._client.loop.at(self._client.loop.now() + _AGAIN_S, self._write)
        if not isinstance(error, EtcdUnavailable):
            self._troubled(error)

    def close(self) -> None:
        self._is_over = True
        self._waiting.clear()
        for thing in (self._call, self._timer):
            if thing is not None:
                thing.cancel()


def _encode(written: Written) -> bytes:
    value = _as_json(written)
    if len(value) <= _MAX_RECORD_BYTES:
        return value
    record = written.record  # too much for one key: what only adds to the report goes
    verdict = record.verdict
    if verdict is not None:
        verdict = msgspec.structs.replace(verdict, failures=verdict.failures[:1], stopped=(), earlier=())
    return _as_json(
        msgspec.structs.replace(written, record=msgspec.structs.replace(record, earlier=(), verdict=verdict))
    )


def _as_json(written: Written) -> bytes:
    try:
        return msgspec.json.encode(written)
    except UnicodeEncodeError:  # a worker's last words may be any bytes
        return msgspec.json.encode(encodable(msgspec.to_builtins(written)))
