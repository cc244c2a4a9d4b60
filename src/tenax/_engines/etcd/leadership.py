"""A leadership: what a node does from the moment it was elected until another leads, or it leaves.

It serves the coordinator, from the record in etcd. What the coordinator says passes through ``Decisions``; whether its
answers keep workers alive is said by ``Authority``; and while it waits for members of an earlier generation, it looks
whether those who led before are dead.
"""

from __future__ import annotations

from tenax._core.authority import Authority
from tenax._core.coordinator import EarlierCoordinatorGone, RunPhase
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
    from tenax._core.coordinator import AnyCoordinatorEvent, CoordinatorState, Opened, RunSettings, Send
    from tenax._core.record import RunRecord
    from tenax._engines.etcd.candidacy import Candidacy, Elected
    from tenax._engines.etcd.keys import Keys
    from tenax._engines.etcd.leader_address import LeaderAddress
    from tenax._io.etcd.client import EtcdClient
    from tenax._io.etcd.errors import EtcdError
    from tenax._io.etcd.operations import TransactionAnswer
    from tenax._io.ports import Cancellable, ControlledNode, EventLoop

_PROBE_EVERY_S = 0.5  # whether an earlier leader is dead; nothing announces that
_PUT_BACK_S = 1.0


class Leadership:
    """One term. ``deposed`` is told once, unless it was closed before."""

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
        """``on_change``: something was heard or decided; who waits for others looks again."""
        self._loop = loop
        self._client = client
        self._keys = keys
        self._candidacy = candidacy
        self.elected = elected
        self._node_id = node_id
        self._on_change = on_change
        self._record_run = node.record_run(run)
        self._serves = node.serves
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
            self.server.deliver,
            deposed,
            troubled,
            self._on_written,
        )
        self.last_record: RunRecord | None = None  # that was written
        # Earlier leaders of which it is not known that they are dead. What we were in another term answers nobody.
        self._alive = [place for place in elected.written.before if place.node_id != node_id]
        self._probing: LeaderProbe | None = None
        self._probe_later: Cancellable | None = None

    def open(self, opened: Opened) -> None:
        self._serves(lambda: self.server.operator_api)
        self.server.open(opened)
        if self.elected.written.before and not self._alive:
            self.server.coordinator.step(EarlierCoordinatorGone(""))
        self._probe()

    # --- answers and decisions ----------------------------------------------------------------------------------------

    def _prove(self) -> None:
        self._authority.prove(self._candidacy.lease.proven_at)

    def _keep_record(self) -> None:
        self._authority.keep_record(self._candidacy.record_lease.proven_at + RECORD_TTL_S)

    def _counts(self, server: CoordinatorServer) -> bool:
        # An end that is decided and not written yet is not known to the workers.
        is_at_work = server.is_at_work or (server.is_over and self._decisions.is_waiting)
        return self._authority.counts(self._loop.now(), is_at_work, server.members_proven_at())

    def _after_step(self, now: float, event: AnyCoordinatorEvent, says: list[Send], state: CoordinatorState) -> None:
        self._record_run(now, event, says, state)
        self._on_change()
        if state.phase is not RunPhase.RECOVERING:
            self._decisions.forget_earlier(state)

    def _hold_back(self, say: Send, state: CoordinatorState) -> None:
        self._decisions.say(say, state)

    def _on_written(self, record: RunRecord) -> None:
        self.last_record = record
        if record.verdict is not None:
            self._candidacy.holds_record = False  # it has a lease of its own
        self._authority.lapse()
        self._on_change()

    def is_deciding(self) -> bool:
        """Whether what our leave means for the others is not said yet."""
        state = self.server.coordinator.state
        # Whether it does not know yet that we leave.
        is_unheard = self._node_id in state.nodes and state.phase is not RunPhase.RECOVERING
        # Whether the others leave as well: then the run ends with us.
        is_deserted = bool(state.nodes) and all(record.is_draining for record in state.nodes.values())
        return is_unheard or is_deserted or state.phase is RunPhase.ENDING or self._decisions.is_waiting

    # --- earlier leaders ----------------------------------------------------------------------------------------------

    def _probe(self) -> None:
        """Is a leader before us dead? As long as that matters; one after the other, the last first."""
        if not self._alive or self.server.coordinator.state.phase is not RunPhase.RECOVERING:
            return
        before = self._alive.pop()

        def opened(sock: socket.socket) -> None:
            sock.close()
            self._probe_again(before)

        def dead() -> None:
            self._probing = None
            self.server.coordinator.step(EarlierCoordinatorGone(before.node_id, len(self._alive)))
            self._probe()

        self._probing = LeaderProbe(self._loop, before, opened, dead, lambda _: self._probe_again(before))
        self._probing.start()

    def _probe_again(self, before: LeaderAddress) -> None:
        self._probing = None
        self._alive.insert(0, before)
        self._probe_later = self._loop.at(self._loop.now() + _PROBE_EVERY_S, self._probe)

    # --- the end ------------------------------------------------------------------------------------------------------

    def resign(self, then: Callable[[], None]) -> None:
        """Give the key back, so that another leads at once. If the run is over, the server goes on telling of it."""
        candidacy = self._candidacy
        if self.server.is_over:
            candidacy.end(then)
            return
        state = self.server.coordinator.state
        put_back: Transaction | None = None
        if state.phase in (RunPhase.GATHERING, RunPhase.PAUSED):
            if not state.nodes.keys() - {self._node_id}:
                candidacy.holds_record = False  # the run ends with its last node
        elif state.phase is RunPhase.RECOVERING and len(state.awaited) == len(state.members):
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
        """We have seen nobody of the generation: the record is as we found it, and runs out when it would have."""
        elected, found = self.elected, self.elected.found
        if found is None:
            return None
        guards = (*self._keys.is_led_by(elected.leader, elected.term), self._keys.is_recorded_at(elected.recorded_at))
        return Transaction(guards, (Put(self._keys.record, found.value, found.lease),))

    def close(self) -> None:
        """Serve no longer, and let the leases run out."""
        self._candidacy.close()
        self._stop()

    def _stop(self) -> None:
        self._decisions.close()
        if self._probing is not None:
            self._probing.close()
        if self._probe_later is not None:
            self._probe_later.cancel()
        self._serves(None)
        self.server.close()
