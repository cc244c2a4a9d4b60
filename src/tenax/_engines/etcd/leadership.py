"""One term of a leader: from its election until another node leads, or it leaves.

It hosts the coordinator, starting from the record in etcd. Outgoing messages pass through ``Decisions``; ``Authority``
decides whether its answers keep workers alive; and while it waits for members of an earlier generation, it probes
whether earlier leaders are dead.
"""

from __future__ import annotations

from tenax._core.authority import Authority
from tenax._core.coordinator import EarlierCoordinatorGone, Ending, Gathering, Paused, Recovering
from tenax._engines.etcd.decisions import Decisions
from tenax._engines.etcd.keys import RECORD_TTL_S
from tenax._engines.etcd.leader_address import LeaderProbe
from tenax._engines.tcp.server import CoordinatorServer
from tenax._io.etcd.operations import Put, Transaction

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    import ssl
    from collections.abc import Callable

    from tenax._core.authority import AuthorityTerms
    from tenax._core.coordinator import AnyCoordinatorEvent, CoordinatorState, Opened, RunSettings, Send, Step
    from tenax._core.record import RunRecord
    from tenax._engines.etcd.candidacy import Candidacy, Elected
    from tenax._engines.etcd.keys import Keys
    from tenax._engines.etcd.leader_address import LeaderAddress
    from tenax._io.etcd.client import EtcdClient
    from tenax._io.etcd.errors import EtcdError
    from tenax._io.etcd.operations import TransactionAnswer
    from tenax._io.interfaces import Cancellable, ControlledNode, EventLoop

_PROBE_EVERY_S = 0.5  # the death of an earlier leader is not announced, so it is probed
_PUT_BACK_S = 1.0


class Leadership:
    """One term. ``deposed`` is called at most once, and never after ``close``."""

    def __init__(
        self,
        loop: EventLoop,
        client: EtcdClient,
        keys: Keys,
        candidacy: Candidacy,
        elected: Elected,
        *,
        node_id: str,
        node: ControlledNode,
        listener: socket.socket,
        secret: bytes,
        tls: ssl.SSLContext | None,
        accepts_operators: bool,
        run: RunSettings,
        terms: AuthorityTerms,
        deposed: Callable[[str], None],
        troubled: Callable[[EtcdError], None],
        on_change: Callable[[], None],
    ) -> None:
        """``on_change`` is called after every step and every stored decision."""
        self._loop = loop
        self._client = client
        self._keys = keys
        self._candidacy = candidacy
        self.elected = elected
        self._node_id = node_id
        self._on_change = on_change
        self._record_run = node.record_run(run)
        self._set_operator_api = node.set_operator_api
        self._authority = Authority(terms, candidacy.lease.proven_at)
        candidacy.lease.on_proven = self._prove
        candidacy.record_lease.on_proven = self._keep_record
        self._keep_record()
        self.server = CoordinatorServer(
            [listener],
            run,
            terms.lease,
            secret,
            loop,
            policy=node.policy,
            tls=tls,
            record=self._after_step,
            on_node_gone=on_change,
            counts=self._counts,
            hold_back=self._hold_back,
            accepts_operators=accepts_operators,
        )
        self._decisions = Decisions(
            client,
            keys,
            elected,
            candidacy.record_lease.id,
            terms,
            deliver=self.server.deliver,
            deposed=deposed,
            troubled=troubled,
            written=self._on_written,
        )
        self.last_record: RunRecord | None = None  # the last one written
        # Earlier leaders that are not known to be dead. This node's own earlier terms are over.
        self._unconfirmed = [leader for leader in elected.written.before if leader.node_id != node_id]
        self._probing: LeaderProbe | None = None
        self._probe_later: Cancellable | None = None

    def open(self, opened: Opened) -> None:
        self._set_operator_api(lambda: self.server.operator_api)
        self.server.open(opened)
        if self.elected.written.before and not self._unconfirmed:
            self.server.coordinator.step(EarlierCoordinatorGone(""))
        self._probe()

    # --- answers and decisions ----------------------------------------------------------------------------------------

    def _prove(self) -> None:
        self._authority.prove(self._candidacy.lease.proven_at)

    def _keep_record(self) -> None:
        self._authority.keep_record(self._candidacy.record_lease.proven_at + RECORD_TTL_S)

    def _counts(self, now: float) -> bool:
        server = self.server
        # The workers do not know of an end that is decided but not written yet.
        is_at_work = server.is_at_work or (server.is_over and self._decisions.is_waiting)
        return self._authority.counts(now, is_at_work, server.members_proven_at())

    def _after_step(self, now: float, event: AnyCoordinatorEvent, step: Step, state: CoordinatorState) -> None:
        self._record_run(now, event, step, state)
        self._on_change()
        if not isinstance(state.phase, Recovering):
            self._decisions.forget_earlier(state)

    def _hold_back(self, send: Send, state: CoordinatorState) -> None:
        self._decisions.submit(send, state)

    def _on_written(self, record: RunRecord) -> None:
        self.last_record = record
        if record.verdict is not None:
            self._candidacy.holds_record = False  # a verdict has its own lease
        self._authority.lapse()
        self._on_change()

    def is_deciding(self) -> bool:
        """Return whether the consequences of this node's departure are still to be decided or delivered."""
        state = self.server.coordinator.state
        # The coordinator has not processed the departure yet.
        is_unprocessed = self._node_id in state.nodes and not isinstance(state.phase, Recovering)
        # All other nodes leave too: the run ends.
        is_deserted = bool(state.nodes) and all(record.is_draining for record in state.nodes.values())
        return is_unprocessed or is_deserted or isinstance(state.phase, Ending) or self._decisions.is_waiting

    # --- earlier leaders ----------------------------------------------------------------------------------------------

    def _probe(self) -> None:
        """Probe the earlier leaders, one at a time, the last first, while the coordinator is recovering."""
        if not self._unconfirmed or not isinstance(self.server.coordinator.state.phase, Recovering):
            return
        before = self._unconfirmed.pop()

        def opened(sock: socket.socket) -> None:
            sock.close()
            self._probe_again(before)

        def dead() -> None:
            self._probing = None
            self.server.coordinator.step(EarlierCoordinatorGone(before.node_id, len(self._unconfirmed)))
            self._probe()

        self._probing = LeaderProbe(self._loop, before, opened, dead, lambda _: self._probe_again(before))
        self._probing.start()

    def _probe_again(self, before: LeaderAddress) -> None:
        self._probing = None
        self._unconfirmed.insert(0, before)
        self._probe_later = self._loop.at(self._loop.now() + _PROBE_EVERY_S, self._probe)

    # --- the end ------------------------------------------------------------------------------------------------------

    def resign(self, then: Callable[[], None]) -> None:
        """Delete the leader key, so that another node leads at once. If the run is over, the server stays open."""
        candidacy = self._candidacy
        if self.server.is_over:
            candidacy.end(then)
            return
        state = self.server.coordinator.state
        put_back: Transaction | None = None
        if isinstance(state.phase, Gathering | Paused):
            if not state.nodes.keys() - {self._node_id}:
                candidacy.holds_record = False  # the run ends with its last node
        elif isinstance(state.phase, Recovering) and len(state.phase.awaited) == len(state.members):
            put_back = self._put_back()
        self._stop()

        def done(answer: TransactionAnswer) -> None:
            candidacy.holds_record = not answer.succeeded
            candidacy.end(then)

        if put_back is None:
            candidacy.end(then)
        else:
            self._client.call(put_back, done, lambda _: candidacy.end(then), patience_s=_PUT_BACK_S)

    def _put_back(self) -> Transaction | None:
        """Restore the record as it was found, with its old lease: no member of the generation has returned."""
        elected, found = self.elected, self.elected.found
        if found is None:
            return None
        guards = (*self._keys.is_led_by(elected.leader, elected.term), self._keys.is_recorded_at(elected.recorded_at))
        return Transaction(guards, (Put(self._keys.record, found.value, found.lease),))

    def close(self) -> None:
        """Stop serving and let the leases expire."""
        self._candidacy.close()
        self._stop()

    def _stop(self) -> None:
        self._decisions.close()
        if self._probing is not None:
            self._probing.close()
        if self._probe_later is not None:
            self._probe_later.cancel()
        self._set_operator_api(None)
        self.server.close()
