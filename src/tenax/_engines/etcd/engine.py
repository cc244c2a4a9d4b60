"""The etcd engine: etcd elects the agent that hosts the coordinator, and the other agents link to it.

    follow the leader key -> none: stand for election -> won: host the coordinator, from the record in etcd
                          -> one: link to it              lost: link to the winner

Invariants:

- Messages and beats go over links. etcd only holds the leader and what was decided (``decisions.py``). So agents must
  reach each other, and the speed of etcd does not limit a run.
- A deposed leader cannot write (``keys.py``), and its answers do not keep workers alive for longer than its successor
  waits (``_core/authority.py``). Nodes that are linked keep running while etcd is down.
- A refused connection at a leader's address proves that its agent and everything it started are dead: the agent keeps
  the listening socket open even after its term, and its keeper, which outlives the last worker, holds a copy.
- A leader that leaves deletes its key, so that another takes over at once.
- With TLS, a node links only to a leader that shows the certificate announced in etcd (``link_tls.py``).
- With a fixed port, the agent opens its listening socket once and uses it in every term.
"""

from __future__ import annotations

import errno
import os
import socket
import time

import msgspec

from tenax._core.authority import AuthorityTerms
from tenax._core.coordinator import Opened
from tenax._core.events import Tick
from tenax._core.link.client import RETRY_LATER_S, RETRY_SOON_S
from tenax._core.text import format_seconds
from tenax._engines.etcd.candidacy import Candidacy
from tenax._engines.etcd.keys import NODE_TTL_S, VERDICT_TTL_S, Keys, Leader, read_leader
from tenax._engines.etcd.leader_address import (
    LeaderAddress,
    LeaderProbe,
    address_outwards,
    address_towards,
    listen_at,
    this_machine,
)
from tenax._engines.etcd.leadership import Leadership
from tenax._engines.tcp.linked import LinkedEngine, LinkedSettings
from tenax._io.endpoint import Endpoint, Lookup, is_loopback
from tenax._io.etcd.client import EtcdClient
from tenax._io.etcd.errors import EtcdRefused, EtcdRejected, EtcdUnavailable
from tenax._io.etcd.held_lease import HeldLease
from tenax._io.etcd.operations import Delete, Put, Range, Transaction
from tenax._io.etcd.settings import EtcdSettings
from tenax._io.etcd.subscription import Subscription

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ssl

    from tenax._core.record import RunRecord
    from tenax._engines.etcd.candidacy import Elected
    from tenax._engines.etcd.managed import ManagedMember, ManagedSettings
    from tenax._io.endpoint import Address
    from tenax._io.etcd.errors import EtcdError
    from tenax._io.etcd.operations import Change, KeyValue, RangeAnswer

_LEAVE_TIMEOUT_S = 4.0
_HANDOVER_S = 5.0  # how long a leaving leader may take to end the current generation
_TROUBLE_S, _REPORT_TROUBLE_EVERY_S = 3.0, 10.0
_PORT_TAKEN_S = 10.0  # how long an earlier agent on this host may still hold the fixed port
_SPREAD_S, _MAX_SPREAD_S = 0.0005, 0.5  # delay per other node, so that not all stand for election at once


class EtcdEngineSettings(LinkedSettings, frozen=True):
    """``endpoint`` is etcd's, as the user wrote it. With ``link_port`` 0 the system chooses the leader's port.

    ``tls`` is for the links: the same files as for ``etcd``, or none.
    """

    etcd: EtcdSettings = EtcdSettings(())
    outage_s: float = AuthorityTerms().outage_s
    managed: ManagedSettings | None = None
    link_port: int = 0
    link_tls: bool = True  # False: links without TLS on request
    unused: tuple[str, ...] = ()  # given options that have no effect with this engine

    @property
    def authority(self) -> AuthorityTerms:
        return AuthorityTerms(self.terms, self.outage_s)


class EtcdEngine(LinkedEngine):
    """The coordinator is hosted by the leader in etcd, which may be this node."""

    _is_elected = True

    def __init__(self, settings: EtcdEngineSettings, master_addr: str = "", master_port: int = 0) -> None:
        super().__init__(settings, master_addr, master_port)
        self._etcd = settings
        self._keys = Keys(settings.run_id)
        self._client: EtcdClient
        self._following: Subscription
        self._node_lease: HeldLease | None = None
        self._member: ManagedMember | None = None
        # The leader as last read from etcd; the term is 0 without a leader.
        self._leader: Leader | None = None
        self._term = 0
        self._connecting: LeaderProbe | None = None
        self._lookup: Lookup | None = None
        self._local_address = ""  # resolved from --local-addr
        self._is_querying = False
        # While this node stands for election or leads.
        self._candidacy: Candidacy | None = None
        self._candidate: Leader | None = None
        self._listener: socket.socket | None = None
        self._own_tls: ssl.SSLContext | None = None
        self._port_taken_at: float | None = None  # when the fixed port was first found taken
        self._leadership: Leadership | None = None
        self._kept_listeners: list[socket.socket] = []  # of earlier terms: this agent never refuses a connection
        self._last_record: RunRecord | None = None  # that this node has written
        self._is_troubled = self._was_trouble_reported = False
        self._report_refusal_at = 0.0
        self._is_leaving = False
        self._has_left = False

    # --- overrides of LinkedEngine ------------------------------------------------------------------------------------

    @property
    def _what_to_check(self) -> str:
        if self._leader is not None:
            return "check that this host can reach it"
        return "check that etcd is running and reachable"

    @property
    def _secret(self) -> bytes:
        """The configured secret plus the leader's, which only readers of etcd have."""
        return self._settings.secret + (self._leader.secret if self._leader is not None else b"")

    def _link_tls(self) -> ssl.SSLContext | None:
        files = self._settings.tls
        if files is None or self._leader is None:
            return None
        from tenax._engines.etcd.link_tls import follower_context

        return follower_context(files, self._leader.certificate)

    @property
    def _host_for_tls(self) -> str:
        """Required by TLS, but not compared with the certificate."""
        return self._leader.address.addr if self._leader is not None else "leader"

    def _holds_lease(self) -> bool:
        return self._machine.holds_lease(self._loop.now())

    def _stays_while_others_run(self) -> bool:
        """Stay while this leader decides what its own departure means: it knows the reason, a successor does not."""
        if self._linger_until is None:
            self._linger_until = self._loop.now() + _HANDOVER_S
            self._set_timer("handover", _HANDOVER_S, lambda: self._emit(Tick()))
        is_deciding = self._leadership is not None and self._leadership.is_deciding()
        return is_deciding and self._loop.now() < self._linger_until

    def stays_for_others(self) -> bool:
        server = self._server
        is_needed = server is not None and not server.is_over and self._stays_while_others_run()
        return is_needed or super().stays_for_others() or self._is_leaving_etcd()

    def close(self) -> None:
        self._end_connecting()
        if self._lookup is not None:
            self._lookup.close()
        super().close()
        if self._leadership is not None:
            self._leadership.close()
        self._following.close()
        self._client.close()
        if self._member is not None:
            self._member.close()
        for sock in (*self._kept_listeners, *([self._listener] if self._listener is not None else [])):
            sock.close()

    # --- following the leader key -------------------------------------------------------------------------------------

    def _find_coordinator(self) -> None:
        if self._etcd.unused:
            self._node.print_line(f"note: rendezvous options without effect with etcd: {', '.join(self._etcd.unused)}")
        if self._etcd.etcd.tls is not None and self._settings.tls is None and self._etcd.link_tls:
            self._node.print_line(
                "the links between agents are not encrypted, because TLS needs a certificate on every node; add "
                "ssl_cert, ssl_cert_key and ca_cert to --rdzv-conf on every node (link_tls=false hides this "
                "message)"
            )
        if self._etcd.managed is not None:
            from tenax._engines.etcd.managed import ManagedMember

            self._member = ManagedMember(self._loop, self._etcd.managed, self._node.print_line, self._refused)
            self._member.start()
        self._client = EtcdClient(self._loop, self._etcd.etcd)
        if self._settings.local_addr:
            self._resolve_local_addr()
        self._following = Subscription(
            self._client, self._keys.leader, b"", self._on_followed, self._on_changed, self._on_trouble
        )
        self._following.start()

    def _resolve_local_addr(self) -> None:
        """Resolve --local-addr, which may be a name: a leader announces its address."""

        def found(addresses: list[Address]) -> None:
            self._lookup = None
            self._local_address = str(addresses[0][1][0])

        def failed(why: str) -> None:
            self._lookup = None
            self._refused(f"cannot resolve --local-addr {self._settings.local_addr!r}: {why}")

        self._lookup = Lookup(self._loop, Endpoint(self._settings.local_addr, 1), found, failed)
        self._lookup.start()

    def _reconnect(self, why: str, *, was_linked: bool) -> None:
        if self._leader is not None:
            self._retry(why, 0.0 if was_linked else RETRY_SOON_S, self._connect_and_query)

    def _on_trouble(self, error: EtcdError) -> None:
        if self._machine.is_finished:
            return
        if not isinstance(error, EtcdUnavailable) and not self._machine.was_ever_linked:
            is_secret = isinstance(error, EtcdRefused) and self._etcd.managed is not None
            hint = "; give every node of the run the same secret (token_file)" if is_secret else ""
            self._refused(error.message + hint)
        elif not self._machine.is_linked:
            self._may_retry(error.message)
        elif not isinstance(error, EtcdUnavailable):
            if self._loop.now() >= self._report_refusal_at:
                self._report_refusal_at = self._loop.now() + _REPORT_TROUBLE_EVERY_S
                self._node.print_line(f"no generation can start: {error.message}")
        elif not self._is_troubled:
            self._is_troubled = True
            self._set_timer("trouble", _TROUBLE_S, self._report_trouble)

    def _report_trouble(self) -> None:
        """Report that no etcd member answers, and when that is over. One lost member is not reported."""
        trouble, was_reported = self._client.trouble, self._was_trouble_reported
        self._is_troubled = self._was_trouble_reported = bool(trouble)
        if trouble:
            self._set_timer("trouble", _REPORT_TROUBLE_EVERY_S if was_reported else _TROUBLE_S, self._report_trouble)
            goes_on = (
                "workers keep running, but " if self._machine.assignment is not None and self._holds_lease() else ""
            )
            self._node.print_line(f"cannot reach etcd ({trouble}); {goes_on}no generation can start until it is back")
        elif was_reported:
            self._node.print_line("etcd can be reached again")

    def _on_followed(self, answer: RangeAnswer) -> None:
        if self._node_lease is None:
            if self._client.token.is_without_users:
                self._node.print_line(
                    f"user={self._etcd.etcd.user} has no effect, because authentication is not enabled in etcd: "
                    "every client can read and write; enable it with: etcdctl auth enable"
                )
            self._register_node()
        self._on_leader(answer.kvs[0] if answer.kvs else None, answer.revision)

    def _on_changed(self, changes: list[Change]) -> None:
        last = changes[-1]
        self._on_leader(last.kv if last.kind == "put" else None, last.kv.mod_revision)

    def _on_leader(self, kv: KeyValue | None, revision: int) -> None:
        """Handle the leader key as it was at that revision; None: it did not exist."""
        if self._machine.is_finished or self._is_leaving:
            return
        try:
            leader = read_leader(kv) if kv is not None else None
        except EtcdRejected as error:
            self._on_trouble(error)
            return
        if leader is not None and leader == self._leader:
            return
        if self._leadership is not None:
            if revision < self._leadership.elected.term:
                return  # from before this node's term
            self._step_down("another node is the leader" if kv is not None else "its key in etcd is gone")
        self._leader, self._term = None, 0
        self._end_connecting()
        self._drop_link("it is no longer the leader")
        if kv is None:
            self._stand_for_election()
            return
        self._leader, self._term = leader, kv.create_revision
        self._port_taken_at = None
        if self._candidacy is None or self._leader != self._candidate:  # else this node has won: _on_won follows
            self._connect()

    def _drop_link(self, why: str) -> None:
        if self._link is not None:
            self._link.close(why)

    def _register_node(self) -> None:
        def held() -> None:
            put = Put(self._keys.node(self._info.node_id), msgspec.json.encode(self._info), lease.id)
            self._client.call(put, lambda _: None, self._on_trouble)

        def lost(_: str) -> None:
            self._register_node()

        self._node_lease = lease = HeldLease(self._client, NODE_TTL_S, held=held, lost=lost, troubled=lambda _: None)
        lease.start()

    # --- connecting to the leader -------------------------------------------------------------------------------------

    def _connect(self) -> None:
        leader = self._leader
        if self._machine.is_finished or leader is None or self._link is not None or self._connecting is not None:
            return
        term = self._term
        self._machine.location = f"on {leader.address.host}"
        if why := self._tls_mismatch(leader):
            if self._machine.is_refusal_final:
                self._refused(why)
            else:
                self._retry(why, RETRY_LATER_S, self._connect_and_query)
            return
        self._machine.connecting(self._loop.now())

        def connected(sock: socket.socket) -> None:
            self._connecting = None
            self._start_handshake(sock)

        def dead() -> None:
            self._depose(leader, term)
            away("its agent is not running")

        def away(why: str) -> None:
            self._connecting = None
            self._retry(f"cannot reach {self._machine.where}: {why}", self._backoff_s(), self._connect_and_query)

        self._connecting = LeaderProbe(self._loop, leader.address, connected, dead, away)
        self._connecting.start()

    def _tls_mismatch(self, leader: Leader) -> str:
        """Return why this node's TLS settings do not match the leader's; empty if they do."""
        where = self._machine.where
        if bool(leader.certificate) == (self._settings.tls is not None):
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
        if self._is_querying or self._machine.is_finished:
            return
        self._is_querying = True

        def seen(answer: RangeAnswer) -> None:
            self._is_querying = False
            if self._leadership is None:
                self._on_leader(answer.kvs[0] if answer.kvs else None, answer.revision)

        def unseen(_: EtcdError) -> None:
            self._is_querying = False
            if self._leader is None:
                self._set_timer("stand", RETRY_LATER_S, self._query_leader)

        self._client.call(Range(self._keys.leader), seen, unseen)

    def _end_connecting(self) -> None:
        if self._connecting is not None:
            self._connecting.close()
            self._connecting = None

    def _depose(self, leader: Leader, term: int) -> None:
        """Delete the key of a dead leader instead of waiting for its lease to expire."""
        delete = Transaction(self._keys.is_led_by(leader, term), (Delete(self._keys.leader),))
        self._client.call(delete, lambda _: None, lambda _: None)

    # --- standing for election ----------------------------------------------------------------------------------------

    def _stand_for_election(self) -> None:
        if self._candidacy is None and not self._machine.is_finished:
            others = self._machine.assignment.group_world_size - 1 if self._machine.assignment is not None else 0
            spread_s = min(_MAX_SPREAD_S, _SPREAD_S * others)
            self._set_timer("stand", spread_s * os.urandom(1)[0] / 255, self._stand_for_election_now)

    def _stand_for_election_now(self) -> None:
        if self._candidacy is not None or self._leader is not None or self._machine.is_finished or self._is_leaving:
            return
        if self._lookup is not None:
            self._set_timer("stand", RETRY_SOON_S, self._stand_for_election_now)
            return
        addr = self._address_for_others()
        digest = b""
        try:
            if self._settings.tls is not None:
                from tenax._engines.etcd.link_tls import OwnCertificate

                own = OwnCertificate(self._settings.tls)
                self._own_tls, digest = own.context, own.digest
            self._listener = self._listen(addr)
        except (OSError, ValueError) as error:
            self._cannot_stand(addr, error)
            return
        self._port_taken_at = None
        port = self._listener.getsockname()[1]
        address = LeaderAddress(self._info.node_id, self._info.host, addr, port, this_machine())
        self._candidate = Leader(address, os.urandom(16), digest)
        self._candidacy = Candidacy(
            self._client,
            self._keys,
            self._candidate,
            self._etcd.authority,
            fit=self._settings_digest(),
            must_fit=not self._machine.was_ever_linked,
            known=self._last_record if self._holds_lease() else None,
            won=self._on_won,
            lost=self._on_lost,
            failed=self._on_failed,
            troubled=self._on_trouble,
            deposed=self._on_lease_lost,
        )
        self._candidacy.start()

    def _listen(self, addr: str) -> socket.socket:
        """Return a listening socket. With a fixed port, reuse the socket of an earlier term, which is still open."""
        port = self._etcd.link_port
        for sock in self._kept_listeners if port else ():
            if sock.getsockname()[:2] == (addr.partition("%")[0], port):
                return sock.dup()
        return listen_at(addr, port)

    def _cannot_stand(self, addr: str, error: OSError | ValueError) -> None:
        why = str(error)
        is_taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        if isinstance(error, OSError):
            remedy = "set --local-addr to an address of this host"
            if self._etcd.link_port:
                remedy = "choose another port with --rdzv-conf link_port=PORT"
                addr = str(Endpoint(addr, self._etcd.link_port))
            if is_taken:
                remedy = f"stop the process that listens there, or {remedy}"
            why = f"cannot listen at {addr} for connections from other nodes: {error.strerror or error}; {remedy}"
        patience_s = min(_PORT_TAKEN_S, self._settings.join_timeout_s)
        if is_taken and self._port_taken_at is None:
            self._port_taken_at = self._loop.now()
            self._node.print_line(f"{why}; retrying for {format_seconds(patience_s)}")
        may_wait = is_taken and self._loop.now() - (self._port_taken_at or 0.0) < patience_s
        if not self._machine.was_ever_linked and not may_wait:
            self._refused(why)
        elif may_wait or self._may_retry(why):
            self._set_timer("stand", RETRY_LATER_S, self._stand_for_election_now)

    def _address_for_others(self) -> str:
        """Return the address at which other nodes reach this one: the local address of the connection to etcd."""
        if self._local_address:
            return self._local_address
        address = self._client.local_address()
        endpoints = [Endpoint.parse(text) for text in self._etcd.etcd.endpoints]
        if not is_loopback(address) or all(endpoint.is_loopback for endpoint in endpoints):
            return address
        # etcd also runs elsewhere, or its name resolves to loopback on this host.
        others = [*map(address_towards, endpoints), address_outwards()]
        return next((other for other in others if other and not is_loopback(other)), address)

    def _settings_digest(self) -> str:
        """Return a digest of the settings that must be equal on all nodes. It does not reveal the secret."""
        import hmac

        settings = self._settings
        tls = "\0tls" if settings.tls is not None else ""
        text = f"{settings.run_id}\0{settings.min_nodes}:{settings.max_nodes}{tls}"
        return hmac.digest(settings.secret or b"none", text.encode(), "sha256").hex()[:32]

    def _on_lost(self) -> None:
        """Withdraw, and query the leader soon, in case the winner has already left again."""
        self._withdraw()
        self._set_timer("stand", RETRY_SOON_S, self._query_leader)

    def _on_failed(self, error: EtcdError) -> None:
        if self._leadership is None:
            self._withdraw()
            self._set_timer("stand", RETRY_LATER_S, self._stand_for_election_now)
        self._on_trouble(error)

    def _on_lease_lost(self, why: str) -> None:
        if self._leadership is not None:
            self._step_down(why)
            self._drop_link("it is no longer the leader")
        else:
            self._withdraw()
        if self._leader is None:
            self._stand_for_election()

    def _withdraw(self) -> None:
        candidacy, self._candidacy = self._candidacy, None
        if candidacy is not None:
            candidacy.end(lambda: None)
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    # --- leading ------------------------------------------------------------------------------------------------------

    def _on_won(self, elected: Elected) -> None:
        candidacy, listener = self._candidacy, self._listener
        assert candidacy is not None
        assert listener is not None
        if self._machine.is_finished or self._is_leaving:
            self._withdraw()
            return
        if self._machine.was_ever_linked and not elected.was_recorded and not self._holds_lease():
            candidacy.holds_record = False
            self._withdraw()
            self._refused(
                f"etcd has no record of the run {self._settings.run_id!r}: it ended, or etcd lost its data, while "
                "this node was disconnected; start this node again to continue the run"
            )
            return
        record = elected.written.record
        if record.verdict is not None and not self._machine.was_ever_linked:
            self._withdraw()
            self._refused(
                f"the run {self._settings.run_id!r} is over: {record.verdict.why}; to use its --rdzv-id again, "
                f"wait {format_seconds(VERDICT_TTL_S)}"
            )
            return
        self._listener, self._candidacy = None, None
        self._leader, self._term = elected.leader, elected.term
        leadership = self._leadership = Leadership(
            self._loop,
            self._client,
            self._keys,
            candidacy,
            elected,
            node_id=self._info.node_id,
            node=self._node,
            listener=listener,
            secret=self._secret,
            tls=self._own_tls,
            accepts_operators=self._has_configured_secret,
            run=self._run_settings(),
            terms=self._etcd.authority,
            deposed=self._step_down,  # the watch on the key reports the new leader
            troubled=self._on_trouble,
            on_change=self._on_node_gone,
        )
        self._server = leadership.server
        if listener.getsockname() not in [sock.getsockname() for sock in self._kept_listeners]:
            self._kept_listeners.append(listener.dup())
        self._node.keep(f"endpoint {elected.term}", listener.fileno())
        self._node.print_line(self._leading_message(elected))
        leadership.open(self._opened(elected))
        self._connect()

    @property
    def _has_configured_secret(self) -> bool:
        """Whether reading the leader's secret needs a credential: the run's secret, an etcd user or a certificate."""
        etcd = self._etcd.etcd
        return bool(self._settings.secret or etcd.user or (etcd.tls is not None and etcd.tls.cert))

    def _leading_message(self, elected: Elected) -> str:
        run = f"the coordinator of the run {self._settings.run_id!r}"
        if not elected.written.record.is_at_work:
            return f"this node serves {run} (elected through etcd)"
        return f"this node takes over {run} and waits for the nodes of the last generation to reconnect"

    def _opened(self, elected: Elected) -> Opened:
        """Return what is known of the run: the record, or if etcd has lost it, this node's assignment."""
        record, assignment = elected.written.record.shifted(self._loop.now() - time.time()), self._machine.assignment
        terms = elected.written.longest.longest(self._etcd.authority)  # of any leader that may still answer nodes
        if record.generation == 0 and record.verdict is None:
            if assignment is not None:
                return Opened(
                    terms.return_s,
                    generation=assignment.generation,
                    restarts_used=assignment.restarts_used,
                    store=assignment.store,
                )
            if self._machine.was_ever_linked and not elected.was_recorded:
                return Opened(terms.return_s)
        return Opened(
            terms.lease.lease_s,
            generation=record.generation,
            restarts_used=record.restarts_used,
            store=record.store,
            verdict=record.verdict,
            record=record,
            return_s=terms.return_s,
            alone_s=terms.alone_s,
        )

    def _step_down(self, why: str) -> None:
        leadership, self._leadership, self._server = self._leadership, None, None
        if leadership is None:
            return
        self._leader, self._term = None, 0
        self._last_record = leadership.last_record or self._last_record
        leadership.close()
        self._node.print_line(f"this node no longer serves the coordinator: {why}")

    # --- leaving ------------------------------------------------------------------------------------------------------

    def _is_leaving_etcd(self) -> bool:
        """Start deleting this node's keys in etcd, so that no node waits for them to expire.

        Return whether that is still in progress; a timeout bounds it.
        """
        if not self._is_leaving:
            self._is_leaving = self._machine.is_finished = True
            self._set_timer("goodbye", _LEAVE_TIMEOUT_S, self._left)
            self._resign()
        return not self._has_left

    def _resign(self) -> None:
        self._following.close()
        leadership, candidacy = self._leadership, self._candidacy
        if leadership is not None:
            if not leadership.server.is_over:
                self._node.print_line("this node no longer serves the coordinator: it is leaving the run")
                self._leadership, self._server = None, None
            leadership.resign(self._unregister_node)
        elif candidacy is not None:
            candidacy.end(self._unregister_node)
        else:
            self._unregister_node()

    def _unregister_node(self) -> None:
        if self._node_lease is not None:
            self._node_lease.end(self._leave_etcd_cluster)
        else:
            self._leave_etcd_cluster()

    def _leave_etcd_cluster(self) -> None:
        if self._member is not None and self._member.is_here:
            self._member.leave(self._left)
        else:
            self._left()

    def _left(self) -> None:
        if not self._has_left:
            self._has_left = True
            self._emit(Tick())
