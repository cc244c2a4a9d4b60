"""Leadership, as a pure machine: who leads the run, whether this node stands for election, and what its term requires.

    follow the leader key -> none: stand for election -> won: host the coordinator, from the record in etcd
                          -> one: link to it              lost: link to the winner

A shell owns the connections, the client of etcd and the clock. It calls a method for everything that happens, carries
out what the method returns, in order, and calls ``tick`` at ``next_deadline``. The client side of the node's link
(``link/client.py``) is part of this machine: its outputs are among the outputs here, except for ``Lost``. Invariants:

E1  Every write of a leader is guarded by its term, so a deposed leader cannot write (``keys.py``), and its answers do
    not keep workers alive for longer than its successor waits (``authority.py``).
E2  A message leaves the coordinator only when the decision behind it is in etcd (``decisions.py``).
E3  Only a refused connection at a leader's address proves that its agent and all that it started are dead.
E4  A node has one link, and drops it before it connects to another leader. It sends the old one the key of the new one
    first: a leader that is cut off from etcd alone hands over, and its node follows.
E5  A node belongs to one run. If that has ended, it leaves with its verdict, and takes part in no later run with the
    same run id. If etcd has neither a record nor a verdict of it, it begins or joins another only under a lease.
"""

from __future__ import annotations

import zlib

import msgspec

from tenax._core.coordinator import Opened
from tenax._core.etcd.errors import EtcdRefused, EtcdRejected, EtcdUnavailable
from tenax._core.etcd.operations import Delete, KeyValue, Put, Range, Transaction
from tenax._core.leadership.calls import Calls, Cancel, Request
from tenax._core.leadership.candidacy import Candidacy, Elected
from tenax._core.leadership.held_lease import HeldLease, KeepAlives
from tenax._core.leadership.keys import NODE_TTL_S, Keys, Leader, read_leader, read_verdict
from tenax._core.leadership.term import Deliver, Probe, StepCoordinator, StopServing, Term
from tenax._core.link import client as links
from tenax._core.link import wire
from tenax._core.link.client import RETRY_LATER_S, RETRY_SOON_S, Print
from tenax._core.model import Verdict
from tenax._core.text import format_seconds

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from tenax._core.authority import AuthorityTerms
    from tenax._core.coordinator import CoordinatorState, Send
    from tenax._core.etcd.errors import EtcdError
    from tenax._core.etcd.operations import Answer, Change, RangeAnswer
    from tenax._core.leadership.calls import Timer
    from tenax._core.leadership.keys import LeaderAddress
    from tenax._core.link.client import LinkClient
    from tenax._core.link.server import LinkServer
    from tenax._core.record import RunRecord

SEED_BYTES = 32
_REPORT_TROUBLE_EVERY_S = 10.0
_PORT_TAKEN_S = 10.0  # how long an earlier agent on this host may still hold the fixed port
_SPREAD_S, _MAX_SPREAD_S = 0.0005, 0.5  # delay per other node, so that not all stand for election at once


class Listen(msgspec.Struct, frozen=True):
    """Open a socket for the links of a leader, and report ``listening`` or ``cannot_listen``."""


class StopListening(msgspec.Struct, frozen=True):
    """Close that socket: this node was not elected."""


class Connect(msgspec.Struct, frozen=True):
    """Connect to the leader, and report ``connected``, ``refused`` or ``unreachable``."""

    leader: Leader


class StopConnecting(msgspec.Struct, frozen=True):
    """End the attempt to connect, without a report."""


class Serve(msgspec.Struct, frozen=True):
    """Open the coordinator with ``opened()``, then report ``served``. Keep the socket open after the term, too (E3)."""

    elected: Elected


class Ended(msgspec.Struct, frozen=True):
    """This node's run has ended. Report ``RunEnded`` to the client; the times in the verdict are wall-clock times."""

    verdict: Verdict


class Troubled(msgspec.Struct, frozen=True):
    """etcd does not answer while this node is linked."""


class Unregistered(msgspec.Struct, frozen=True):
    """This node has deleted its keys, or cannot."""


class QuietLeadership(msgspec.Struct, frozen=True):
    """What keep-alives of leases in etcd change, and what answers to beats are found to count."""

    calls: tuple[float, int]
    leases: list[KeepAlives]
    authority: tuple[float, float, float] | None


Output = (
    links.Output
    | Request
    | Cancel
    | Listen
    | StopListening
    | Connect
    | StopConnecting
    | Serve
    | Deliver
    | StepCoordinator
    | Probe
    | StopServing
    | Ended
    | Troubled
    | Unregistered
)


class Leadership:
    """One node's part in the leadership of a run."""

    make_candidacy = Candidacy
    make_term = Term

    def __init__(
        self,
        client: LinkClient,
        run_id: str,
        terms: AuthorityTerms,
        now: float,
        *,
        lease_id: int,
        fit: str = "",
        has_tls: bool = False,
        join_timeout_s: float = 600.0,
        refusal_hint: str = "",
    ) -> None:
        """``lease_id``: a random one, for this node's own key.

        ``fit``: digest of the settings that all nodes must have in common. ``refusal_hint``: what to do if etcd refuses
        this node's credentials.
        """
        self.client = client
        self.leader: Leader | None = None  # as last read from etcd
        self.term = 0  # of that leader
        self.leading: Term | None = None  # while this node leads
        self.run = 0  # the run that this node is in; 0: none yet
        self._outputs: list[Output] = []
        self._calls = Calls(now, self._outputs.append)
        self._run_id = run_id
        self._keys = Keys(run_id)
        self._terms = terms
        self._lease_id = lease_id
        self._fit = fit
        self._has_tls = has_tls
        self._join_timeout_s = join_timeout_s
        self._refusal_hint = refusal_hint
        self._node_lease: HeldLease | None = None
        self._timers: dict[str, Timer] = {}
        self._is_connecting = self._is_querying = False
        self._connected_to: Leader | None = None  # with the last attempt
        self._is_listening = False  # also while the shell opens the socket
        self._candidacy: Candidacy | None = None
        self._last_candidacy: Candidacy | None = None  # also after the election, and after the term
        self._candidate: Leader | None = None
        self._port_taken_at: float | None = None  # when the fixed port was first found taken
        self._last_record: RunRecord | None = None  # that this node has written
        self._report_refusal_at = 0.0
        self._is_leaving = False

    # --- for the shell ------------------------------------------------------------------------------------------------

    @property
    def what_to_check(self) -> str:
        if self.leader is not None:
            return "check that this host can reach it"
        return "check that etcd is running and reachable"

    def next_deadline(self) -> float | None:
        return self._calls.loop.next_deadline()

    def tick(self, now: float) -> list[Output]:
        return self._at(now, self._calls.loop.fire)

    def answered(self, number: int, answer: Answer, sent_at: float, now: float) -> list[Output]:
        """``sent_at``: when the attempt was sent that etcd answered."""
        return self._at(now, lambda: self._calls.answered(number, answer, sent_at))

    def failed(self, number: int, error: EtcdError, now: float) -> list[Output]:
        return self._at(now, lambda: self._calls.failed(number, error))

    def counts(self, now: float) -> bool:
        return self.leading is not None and self.leading.counts(now)

    def submit(self, send: Send, state: CoordinatorState, now: float, wall_ahead_s: float) -> list[Output]:
        """The coordinator sends an event."""
        term = self.leading
        return self._at(now, lambda: term.submit(send, state, wall_ahead_s) if term is not None else None)

    def stepped(self, state: CoordinatorState, now: float, wall_ahead_s: float) -> list[Output]:
        """The coordinator has made a step."""
        term = self.leading
        return self._at(now, lambda: term.stepped(state, wall_ahead_s) if term is not None else None)

    def probed(self, now: float, *, is_dead: bool) -> list[Output]:
        term = self.leading
        return self._at(now, lambda: term.probed(is_dead=is_dead) if term is not None else None)

    def _at(self, now: float, act: Callable[[], None]) -> list[Output]:
        self._calls.loop.set(now)
        act()
        outputs = self._outputs[:]
        self._outputs.clear()
        return outputs

    def quiet_state(self) -> QuietLeadership:
        """Return what keep-alives have changed, for a journal that does not record each of them."""
        authority = self.leading.authority.quiet_state() if self.leading is not None else None
        return QuietLeadership(
            self._calls.quiet_state(), [lease.quiet_state() for lease in self._held_leases()], authority
        )

    def due(self, now: float) -> int:
        """Return how many timers fire at that time."""
        return self._calls.loop.due(now)

    def set_quiet_state(self, state: QuietLeadership) -> None:
        self._calls.set_quiet_state(*state.calls)
        for lease, alive in zip(self._held_leases(), state.leases, strict=True):
            lease.set_quiet_state(alive)
        if self.leading is not None and state.authority is not None:
            self.leading.authority.set_quiet_state(*state.authority)

    def _held_leases(self) -> list[HeldLease]:
        last = self._last_candidacy
        leases = [self._node_lease] if self._node_lease is not None else []
        return leases if last is None else [*leases, last.lease, last.record_lease]

    @property
    def _now(self) -> float:
        return self._calls.loop.now()

    def _set_timer(self, name: str, after_s: float, call: Callable[[], None]) -> None:
        if name in self._timers:
            self._timers[name].cancel()
        self._timers[name] = self._calls.loop.at(self._now + after_s, call)

    def _print(self, text: str) -> None:
        self._outputs.append(Print(text))

    def _refuse(self, reason: str) -> None:
        self._outputs += self.client.refuse(reason)

    def _may_retry(self, why: str) -> bool:
        self._outputs += self.client.retry(why, self.what_to_check, self._now)
        return not self.client.is_finished

    def _retry(self, why: str, after_s: float, call: Callable[[], None]) -> None:
        if self._may_retry(why):
            self._set_timer("again", after_s, call)

    # --- following the leader key -------------------------------------------------------------------------------------

    def followed(self, answer: RangeAnswer, now: float) -> list[Output]:
        """The leader key was read, for the first time or again because history was lost."""

        def act() -> None:
            if self._node_lease is None:
                self._register_node()
            self._on_leader(answer.kvs[0] if answer.kvs else None, answer.revision)

        return self._at(now, act)

    def changed(self, changes: list[Change], now: float) -> list[Output]:
        last = changes[-1]
        return self._at(now, lambda: self._on_leader(last.kv if last.kind == "put" else None, last.kv.mod_revision))

    def troubled(self, error: EtcdError, now: float) -> list[Output]:
        """The leader key cannot be read."""
        return self._at(now, lambda: self._on_trouble(error))

    def _on_trouble(self, error: EtcdError) -> None:
        if self.client.is_finished:
            return
        if not isinstance(error, EtcdUnavailable) and not self.client.was_ever_linked:
            self._refuse(error.message + (self._refusal_hint if isinstance(error, EtcdRefused) else ""))
        elif not self.client.is_linked:
            self._may_retry(error.message)
        elif isinstance(error, EtcdUnavailable):
            self._outputs.append(Troubled())
        elif self._now >= self._report_refusal_at:
            self._report_refusal_at = self._now + _REPORT_TROUBLE_EVERY_S
            self._print(f"no generation can start: {error.message}")

    def _on_leader(self, kv: KeyValue | None, revision: int) -> None:
        """Handle the leader key as it was at that revision; None: it did not exist."""
        if self.client.is_finished or self._is_leaving:
            return
        try:
            leader = read_leader(kv) if kv is not None else None
        except EtcdRejected as error:
            self._on_trouble(error)
            return
        if leader is not None and leader == self.leader:
            return
        if self.leading is not None:
            if revision < self.leading.elected.term:
                return  # from before this node's term
            self._step_down("another node is the leader" if kv is not None else "its key in etcd is gone")
            self._drop_link()
        if kv is None or leader is None:
            self._stop_connecting()
            self.leader, self.term = None, 0
            self._stand_for_election()
            return
        self._follow(leader, kv.create_revision)

    def replaced(self, frame: wire.Replaced, now: float) -> list[Output]:
        """A node reports to this leader that another one leads."""
        term = self.leading

        def act() -> None:
            try:
                leader = read_leader(KeyValue(self._keys.leader, frame.leader))
            except EtcdRejected:
                return
            if term is not None and term is self.leading and frame.term > term.elected.term and not self._is_leaving:
                self._step_down("another node is the leader, as a node reports")
                self._drop_link()
                self._follow(leader, frame.term)

        return self._at(now, act)

    def _follow(self, leader: Leader, term: int) -> None:
        if self._connected_to == leader and not self.client.is_unlinked:  # a node had reported it before etcd did
            self.leader, self.term = leader, term
            return
        self._stop_connecting()
        self.leader, self.term = None, 0
        self._hand_over(leader, term)
        self.leader, self.term = leader, term
        self._port_taken_at = None
        is_own = self._candidate is not None and leader.secret == self._candidate.secret
        if self._candidacy is None or not is_own:  # else this node has won: _on_won follows
            self._connect()

    def _hand_over(self, leader: Leader, term: int) -> None:
        """Leave the leader that was replaced, after it has been sent the key of the new one (E4)."""
        is_linked = self.client.is_linked
        if is_linked:
            self._outputs.append(links.SendFrame(wire.Replaced(msgspec.json.encode(leader), term)))
        self._drop_link(is_finished=is_linked)

    def _stop_connecting(self) -> None:
        if self._is_connecting:
            self._is_connecting = False
            self._outputs.append(StopConnecting())

    def _drop_link(self, *, is_finished: bool = False) -> None:
        for output in self.client.drop("it is no longer the leader", self._now, is_finished=is_finished):
            if isinstance(output, links.Lost):
                self._on_link_lost(output.reason, retry_s=output.retry_s)
            else:
                self._outputs.append(output)

    def _register_node(self) -> None:
        def held() -> None:
            put = Put(self._keys.node(self.client.node.node_id), msgspec.json.encode(self.client.node), lease.id)
            self._calls.call(put, lambda _: None, self._on_trouble)

        def lost(_: str) -> None:
            self._register_node()

        self._node_lease = lease = HeldLease(
            self._calls, self._lease_id, NODE_TTL_S, held=held, lost=lost, troubled=lambda _: None
        )
        lease.start()

    # --- connecting to the leader -------------------------------------------------------------------------------------

    def _connect(self) -> None:
        leader = self.leader
        if self.client.is_finished or leader is None or not self.client.is_unlinked or self._is_connecting:
            return
        self.client.location = f"on {leader.address.host}"
        if why := self._tls_mismatch(leader):
            if self.client.is_refusal_final:
                self._refuse(why)
            else:
                self._retry(why, RETRY_LATER_S, self._connect_and_query)
            return
        if self.client.was_ever_linked and leader.run != self.run:
            self._query_end(leader)
            return
        self.run = leader.run
        self.client.connecting(self._now)
        self._is_connecting = True
        self._connected_to = leader
        self._outputs.append(Connect(leader))

    def connected(self) -> None:
        """The connection is established; ``opened`` of the client follows."""
        self._is_connecting = False

    def refused(self, jitter: float, now: float) -> list[Output]:
        """The connection was refused: everything at that leader's address is dead (E3)."""

        def act() -> None:
            if self._is_connecting and self.leader is not None:
                self._depose(self.leader, self.term)
                self._on_unreachable("its agent is not running", jitter)

        return self._at(now, act)

    def unreachable(self, why: str, jitter: float, now: float) -> list[Output]:
        """There is no connection. ``jitter``: a random number from 0 to 1."""
        return self._at(now, lambda: self._on_unreachable(why, jitter))

    def _on_unreachable(self, why: str, jitter: float) -> None:
        self._is_connecting = False
        after_s = self.client.backoff_s(jitter)
        self._retry(f"cannot reach {self.client.where}: {why}", after_s, self._connect_and_query)

    def link_lost(self, why: str, now: float, *, retry_s: float) -> list[Output]:
        """The link, or a handshake, has failed (``Lost`` of the client)."""
        return self._at(now, lambda: self._on_link_lost(why, retry_s=retry_s))

    def _on_link_lost(self, why: str, *, retry_s: float) -> None:
        if self.leader is not None:
            self._retry(why, retry_s, self._connect_and_query)

    def _tls_mismatch(self, leader: Leader) -> str:
        """Return why this node's TLS settings do not match the leader's; empty if they do."""
        where = self.client.where
        if bool(leader.certificate) == self._has_tls:
            return ""
        if leader.certificate:
            return (
                f"{where} requires TLS, and this node has no certificate for it; add ssl_cert, ssl_cert_key "
                "and ca_cert to --rdzv-conf on this node"
            )
        return (
            f"{where} does not use TLS, and this node requires it; add ssl_cert, ssl_cert_key and ca_cert to "
            "--rdzv-conf on that node"
        )

    def _connect_and_query(self) -> None:
        self._connect()
        self._query_leader()

    def _query_leader(self) -> None:
        """Read the leader key. A watch does not report it if etcd has lost its data."""
        if self._is_querying or self.client.is_finished:
            return
        self._is_querying = True

        def seen(answer: RangeAnswer) -> None:
            self._is_querying = False
            if self.leading is None:
                self._on_leader(answer.kvs[0] if answer.kvs else None, answer.revision)

        def unseen(_: EtcdError) -> None:
            self._is_querying = False
            if self.leader is None:
                self._set_timer("stand", RETRY_LATER_S, self._query_leader)

        self._calls.call(Range(self._keys.leader), seen, unseen)

    def _query_end(self, leader: Leader) -> None:
        """Read how this node's run has ended, because the leader is of another one (E5)."""
        self._is_connecting = True

        def read(answer: RangeAnswer) -> None:
            if not self._is_connecting or leader != self.leader:
                return
            self._is_connecting = False
            verdict = read_verdict(answer.kvs)
            if verdict is not None or not self.client.holds_lease(self._now):
                self._on_ended(verdict)
                return
            self.run = leader.run  # etcd has lost its data
            self._connect()

        def unread(error: EtcdError) -> None:
            self._is_connecting = False
            self._retry(error.message, RETRY_LATER_S, self._connect_and_query)

        self._calls.call(Range(self._keys.ended(self.run)), read, unread)

    def _on_ended(self, verdict: Verdict | None) -> None:
        """This node's run has ended; None: etcd does not know how."""
        self._withdraw()
        if verdict is not None:
            self._outputs.append(Ended(verdict))
            return
        self._refuse(
            f"etcd has no record of the run {self._run_id!r} that this node was in: it ended, or etcd lost its data, "
            "while this node was disconnected; start this node again to continue the run"
        )

    def _depose(self, leader: Leader, term: int) -> None:
        """Delete the key of a dead leader instead of waiting for its lease to expire."""
        delete = Transaction(self._keys.is_led_by(leader, term), (Delete(self._keys.leader),))
        self._calls.call(delete, lambda _: None, lambda _: None)

    # --- standing for election ----------------------------------------------------------------------------------------

    def _stand_for_election(self) -> None:
        if self._candidacy is None and not self.client.is_finished:
            others = self.client.assignment.group_world_size - 1 if self.client.assignment is not None else 0
            share = zlib.crc32(self.client.node.node_id.encode()) % 256 / 255
            self._set_timer("stand", min(_MAX_SPREAD_S, _SPREAD_S * others) * share, self._stand_for_election_now)

    def _stand_for_election_now(self) -> None:
        is_standing = self._candidacy is not None or self._is_listening
        if is_standing or self.leader is not None or self.client.is_finished or self._is_leaving:
            return
        self._is_listening = True
        self._outputs.append(Listen())

    def listening(self, address: LeaderAddress, certificate: bytes, seed: bytes, now: float) -> list[Output]:
        """The socket for links is open. ``seed``: ``SEED_BYTES`` random bytes."""
        return self._at(now, lambda: self._on_listening(Leader(address, seed[:16], certificate), seed[16:]))

    def _on_listening(self, candidate: Leader, seed: bytes) -> None:
        self._port_taken_at = None
        if self.leader is not None or self.client.is_finished or self._is_leaving:
            self._withdraw()
            return
        lease_id, record_lease_id = (int.from_bytes(part, "big") >> 1 or 1 for part in (seed[:8], seed[8:16]))
        self._candidate = candidate
        self._candidacy = self._last_candidacy = self.make_candidacy(
            self._calls,
            self._keys,
            candidate,
            self._terms,
            (lease_id, record_lease_id),
            fit=self._fit,
            must_fit=not self.client.was_ever_linked,
            known=self._last_record if self.client.holds_lease(self._now) else None,
            run=self.run if self.client.was_ever_linked else 0,
            may_begin=lambda: self.client.holds_lease(self._now),
            won=self._on_won,
            lost=self._on_lost,
            ended=self._on_ended,
            failed=self._on_failed,
            troubled=self._on_trouble,
            deposed=self._on_lease_lost,
        )
        self._candidacy.start()

    def cannot_listen(self, why: str, now: float, *, is_taken: bool) -> list[Output]:
        """``is_taken``: another process, perhaps an earlier agent on this host, has the port."""
        return self._at(now, lambda: self._on_cannot_listen(why, is_taken=is_taken))

    def _on_cannot_listen(self, why: str, *, is_taken: bool) -> None:
        self._is_listening = False
        patience_s = min(_PORT_TAKEN_S, self._join_timeout_s)
        if is_taken and self._port_taken_at is None:
            self._port_taken_at = self._now
            self._print(f"{why}; retrying for {format_seconds(patience_s)}")
        may_wait = is_taken and self._now - (self._port_taken_at or 0.0) < patience_s
        if not self.client.was_ever_linked and not may_wait:
            self._refuse(why)
        elif may_wait or self._may_retry(why):
            self._set_timer("stand", RETRY_LATER_S, self._stand_for_election_now)

    def _on_lost(self) -> None:
        """Withdraw, and query the leader soon, in case the winner has already left again."""
        self._withdraw()
        self._set_timer("stand", RETRY_SOON_S, self._query_leader)

    def _on_failed(self, error: EtcdError) -> None:
        if self.leading is None:
            self._withdraw()
            self._set_timer("stand", RETRY_LATER_S, self._stand_for_election_now)
        self._on_trouble(error)

    def _on_lease_lost(self, why: str) -> None:
        if self.leading is not None:
            self._step_down(why)
            self._drop_link()
        else:
            self._withdraw()
        if self.leader is None:
            self._stand_for_election()

    def _withdraw(self) -> None:
        candidacy, self._candidacy = self._candidacy, None
        if candidacy is not None:
            candidacy.end(lambda: None)
        if self._is_listening:
            self._is_listening = False
            self._outputs.append(StopListening())

    # --- leading ------------------------------------------------------------------------------------------------------

    def _on_won(self, elected: Elected) -> None:
        candidacy = self._candidacy
        assert candidacy is not None
        if self.client.is_finished or self._is_leaving:
            self._withdraw()
            return
        self._candidacy, self._is_listening = None, False
        self.leader, self.term = None, 0
        self._hand_over(elected.leader, elected.term)
        self.leader, self.term, self.run = elected.leader, elected.term, elected.leader.run
        self.leading = self.make_term(
            self._calls,
            self._keys,
            candidacy,
            elected,
            node_id=self.client.node.node_id,
            terms=self._terms,
            output=self._outputs.append,
            deposed=self._step_down,  # the watch on the key reports the new leader
            troubled=self._on_trouble,
        )
        run = f"the coordinator of the run {self._run_id!r}"
        if elected.written.record.is_at_work:
            self._print(f"this node takes over {run} and waits for the nodes of the last generation to reconnect")
        else:
            self._print(f"this node serves {run} (elected through etcd)")
        self._outputs.append(Serve(elected))

    def opened(self, elected: Elected, wall_ahead_s: float) -> Opened:
        """Return what is known of the run: the record, or if etcd has lost it, this node's assignment."""
        record, assignment = elected.written.record.shifted(-wall_ahead_s), self.client.assignment
        terms = elected.written.longest.longest(self._terms)  # of any leader that may still answer nodes
        if record.generation == 0:
            if assignment is not None:
                return Opened(
                    terms.return_s,
                    generation=assignment.generation,
                    restarts_used=assignment.restarts_used,
                    store=assignment.store,
                )
            if self.client.was_ever_linked and not elected.was_recorded:
                return Opened(terms.return_s)
        return Opened(
            terms.lease.lease_s,
            generation=record.generation,
            restarts_used=record.restarts_used,
            store=record.store,
            record=record,
            return_s=terms.return_s,
            alone_s=terms.alone_s,
        )

    def served(self, links: LinkServer, state: Callable[[], CoordinatorState], now: float) -> list[Output]:
        """The coordinator is open."""

        def act() -> None:
            if self.leading is not None:
                self.leading.serve(links, state)
                self._connect()

        return self._at(now, act)

    def _step_down(self, why: str) -> None:
        term, self.leading = self.leading, None
        if term is None:
            return
        self.leader, self.term = None, 0
        self._last_record = term.last_record or self._last_record
        term.close()
        if term.unstored_cancel:  # the operator was answered that the run stops
            self._outputs += self.client.cancel(term.unstored_cancel)
        self._print(f"this node no longer serves the coordinator: {why}")

    # --- leaving ------------------------------------------------------------------------------------------------------

    def leave(self, now: float) -> list[Output]:
        """Delete this node's keys in etcd, so that no node waits for them to expire. ``Unregistered`` follows."""
        return self._at(now, self._resign)

    def _resign(self) -> None:
        self._is_leaving = self.client.is_finished = True
        term, candidacy = self.leading, self._candidacy
        if term is not None:
            if not term.is_over:
                self._print("this node no longer serves the coordinator: it is leaving the run")
                self.leading = None
            term.resign(self._unregister)
        elif candidacy is not None:
            candidacy.end(self._unregister)
        else:
            self._unregister()

    def _unregister(self) -> None:
        if self._node_lease is not None:
            self._node_lease.end(lambda: self._outputs.append(Unregistered()))
        else:
            self._outputs.append(Unregistered())
