"""The etcd engine: whoever is elected leads, and the others are linked to it.

    follow the leader's key -> none: stand for election -> won: serve the coordinator, from the record in etcd
                            -> one: link to it                 lost: link to whoever won

Laws:

- Words and beats go over links; etcd is asked only who leads, and told what was decided (``decisions.py``). So agents
  must reach each other, and a run does not slow down with etcd.
- A leader that was deposed can write nothing (``keys.py``), and its answers keep nobody's workers alive for longer than
  its successor waits (``_core/authority.py``). Losing etcd stops nobody who is together.
- A refused connection at a leader's address is a proof: its agent is dead, and all that it had started. The listening
  socket is held by the agent, also when it leads no more, and by its keeper, which outlives its last worker.
- A leader that leaves gives its key back, and another goes on at once.
- With TLS, a node links only to a leader that shows the certificate which it announced in etcd (``link_tls.py``).
- With a fixed port, the agent opens its listening socket once and uses it in every term.
"""

from __future__ import annotations

import errno
import os
import socket

import msgspec

from tenax._core.authority import AuthorityTerms
from tenax._core.coordinator import Opened
from tenax._core.events import Fenced, Tick
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
from tenax._engines.tcp.linked import RETRY_LATER_S, RETRY_SOON_S, LinkedEngine, LinkedSettings
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

    from tenax._core.lease import LeaseTerms
    from tenax._core.record import RunRecord
    from tenax._engines.etcd.candidacy import Elected
    from tenax._io.endpoint import Address
    from tenax._io.etcd.errors import EtcdError
    from tenax._io.etcd.managed import ManagedMember, ManagedSettings
    from tenax._io.etcd.operations import Change, KeyValue, RangeAnswer

_GOODBYE_S = 4.0
_HANDOVER_S = 5.0  # how long a leader that leaves sees to the end of the generation that it leaves
_TROUBLE_S, _SAY_TROUBLE_EVERY_S = 3.0, 10.0
_PORT_TAKEN_S = 10.0  # how long an earlier agent on this host may still hold the fixed port
_SPREAD_S, _MAX_SPREAD_S = 0.0005, 0.5  # for each other node: not all stand for election at the same moment


class EtcdEngineSettings(LinkedSettings, frozen=True):
    """``endpoint`` is etcd's, as the user wrote it. ``link_port`` 0: the system chooses the leader's port.

    ``tls`` secures the links: the same files as those of ``etcd``, or none.
    """

    etcd: EtcdSettings = EtcdSettings(())
    outage_s: float = AuthorityTerms().outage_s
    managed: ManagedSettings | None = None
    link_port: int = 0
    link_tls: bool = True  # False: the user wants links without TLS
    unused: tuple[str, ...] = ()  # options that were given and mean nothing to this engine

    @property
    def authority(self) -> AuthorityTerms:
        return AuthorityTerms(self.terms, self.outage_s)


class EtcdEngine(LinkedEngine):
    """The coordinator is where etcd says that it is; perhaps here."""

    def __init__(self, settings: EtcdEngineSettings, master_addr: str = "", master_port: int = 0) -> None:
        super().__init__(settings, master_addr, master_port)
        self._etcd = settings
        self._keys = Keys(settings.run_id)
        self._client: EtcdClient
        self._following: Subscription
        self._presence: HeldLease | None = None
        self._member: ManagedMember | None = None
        # Who leads, as etcd said last; the term is 0 if nobody does.
        self._leader: Leader | None = None
        self._term = 0
        self._connecting: LeaderProbe | None = None
        self._linked_host = ""  # of the leader that we are linked to, or try to be
        self._lookup: Lookup | None = None
        self._own_addr = ""  # that we were told
        self._was_linked = False  # ever
        self._received_at = 0.0  # on whatever link
        self._fenced_at = 0.0  # the end of the lease that has killed our workers last
        self._looking = False
        # If we stand for election, or lead.
        self._candidacy: Candidacy | None = None
        self._standing_as: Leader | None = None
        self._listener: socket.socket | None = None
        self._own_tls: ssl.SSLContext | None = None
        self._port_taken_at: float | None = None  # when the fixed port was found taken first
        self._leadership: Leadership | None = None
        self._silent: list[socket.socket] = []  # where we led: as long as we live, nobody is refused there
        self._last_record: RunRecord | None = None  # that we have written
        self._is_troubled = self._was_trouble_said = False
        self._say_refusal_at = 0.0
        self._is_leaving = False
        self._has_left = False

    # --- what differs from other engines ------------------------------------------------------------------------------

    @property
    def _where(self) -> str:
        return f"the coordinator on {self._linked_host}" if self._linked_host else "the coordinator"

    @property
    def _what_to_check(self) -> str:
        if self._leader is not None:
            return "check that its host can be reached from here"
        return "check that etcd runs there and can be reached"

    @property
    def _secret(self) -> bytes:
        """The job's own, and that of the leader, which only those know who can read etcd."""
        return self._settings.secret + (self._leader.secret if self._leader is not None else b"")

    def _link_tls(self) -> ssl.SSLContext | None:
        files = self._settings.tls
        if files is None or self._leader is None:
            return None
        from tenax._engines.etcd.link_tls import follower_context

        return follower_context(files, self._leader.certificate)

    @property
    def _host_for_tls(self) -> str:
        """Is not compared with the certificate, but TLS wants one."""
        return self._leader.place.addr if self._leader is not None else "leader"

    @property
    def _trusts_acknowledgements(self) -> bool:
        return False  # a leader that is stopped may have a successor

    def _on_accepted(self, terms: LeaseTerms, *, counts: bool) -> None:
        self._was_linked = True
        super()._on_accepted(terms, counts=counts)

    def _on_body(self, body: bytes) -> None:
        self._received_at = self._loop.now()
        super()._on_body(body)

    def _check_lease(self) -> None:
        """A leader whose answers do not count is not silent: workers end, but another link to it would help nobody."""
        now, terms, ends_at = self._loop.now(), self._lease.terms, self._lease.ends_at()
        if self._is_finished or not self._is_linked or ends_at > now or now >= self._received_at + terms.fence_s:
            super()._check_lease()
            return
        if self._assignment is not None and self._fenced_at != ends_at:
            self._fenced_at = ends_at
            why = f"{self._where} may have a successor, and the others may go on without this node"
            self._emit(Fenced(self._assignment.generation, why))
        self._set_timer("guard", terms.beat_s, self._check_lease)

    @property
    def _is_refusal_final(self) -> bool:
        """Who was let in once is refused only by a stranger in the place of a leader that died."""
        return not self._was_linked

    def _stays_while_others_run(self) -> bool:
        """Another can lead; but what our leave means for the others is best said by who knows why."""
        if self._linger_until is None:
            self._linger_until = self._loop.now() + _HANDOVER_S
            self._set_timer("handover", _HANDOVER_S, lambda: self._emit(Tick()))
        is_deciding = self._leadership is not None and self._leadership.is_deciding()
        return is_deciding and self._loop.now() < self._linger_until

    def stays_for_others(self) -> bool:
        server = self._server
        is_needed = server is not None and not server.is_over and self._stays_while_others_run()
        return is_needed or super().stays_for_others() or self._says_goodbye()

    def close(self) -> None:
        self._end_connecting()
        self._end_lookup()
        super().close()
        if self._leadership is not None:
            self._leadership.close()
        self._following.close()
        self._client.close()
        if self._member is not None:
            self._member.close()
        for sock in (*self._silent, *([self._listener] if self._listener is not None else [])):
            sock.close()

    # --- finding ------------------------------------------------------------------------------------------------------

    def _find_coordinator(self) -> None:
        if self._etcd.unused:
            self._node.say(f"note: these rendezvous options have no effect with etcd: {', '.join(self._etcd.unused)}")
        if self._etcd.etcd.tls is not None and self._settings.tls is None and self._etcd.link_tls:
            self._node.say(
                "the links between agents are not encrypted: TLS there needs this node's certificate as well; add "
                "ssl_cert, ssl_cert_key and ca_cert to --rdzv-conf on every node (link_tls=false hides this message)"
            )
        if self._etcd.managed is not None:
            from tenax._io.etcd.managed import ManagedMember

            self._member = ManagedMember(self._loop, self._etcd.managed, self._node.say, self._refused)
            self._member.start()
        self._client = EtcdClient(self._loop, self._etcd.etcd)
        if self._settings.local_addr:
            self._look_up_own_name()
        self._following = Subscription(
            self._client, self._keys.leader, b"", self._on_begun, self._on_changed, self._on_trouble
        )
        self._following.start()

    def _look_up_own_name(self) -> None:
        """--local-addr may be a name; who comes to lead says by which address it is reached."""

        def found(addresses: list[Address]) -> None:
            self._end_lookup()
            self._own_addr = str(addresses[0][1][0])

        def failed(why: str) -> None:
            self._end_lookup()
            self._refused(f"the name {self._settings.local_addr!r} (--local-addr) cannot be looked up: {why}")

        lookup = Lookup(Endpoint(self._settings.local_addr, 1), found, failed)
        if lookup.start():
            self._lookup = lookup
            self._loop.watch(lookup)

    def _end_lookup(self) -> None:
        if self._lookup is not None:
            self._loop.unwatch(self._lookup)
            self._lookup.close()
            self._lookup = None

    def _reconnect(self, why: str, *, was_linked: bool) -> None:
        if self._leader is not None:
            self._retry(why, 0.0 if was_linked else RETRY_SOON_S, self._connect_or_look)

    def _on_trouble(self, error: EtcdError) -> None:
        if self._is_finished:
            return
        if not isinstance(error, EtcdUnavailable) and not self._was_linked:
            is_secret = isinstance(error, EtcdRefused) and self._etcd.managed is not None
            hint = "; give every node of the run the same secret (token_file)" if is_secret else ""
            self._refused(error.sentence + hint)
        elif not self._is_linked:
            self._may_retry(error.sentence)
        elif not isinstance(error, EtcdUnavailable):
            if self._loop.now() >= self._say_refusal_at:
                self._say_refusal_at = self._loop.now() + _SAY_TROUBLE_EVERY_S
                self._node.say(f"nothing can be decided: {error.sentence}")
        elif not self._is_troubled:
            self._is_troubled = True
            self._set_timer("trouble", _TROUBLE_S, self._say_trouble)

    def _say_trouble(self) -> None:
        """One member of etcd that is lost is no news. That none answers is, and that it is over."""
        trouble, was_said = self._client.trouble, self._was_trouble_said
        self._is_troubled = self._was_trouble_said = bool(trouble)
        if trouble:
            self._set_timer("trouble", _SAY_TROUBLE_EVERY_S if was_said else _TROUBLE_S, self._say_trouble)
            goes_on = "workers go on, and " if self._assignment is not None and self._holds_lease() else ""
            self._node.say(f"etcd cannot be reached ({trouble}); {goes_on}nothing can be decided until it is back")
        elif was_said:
            self._node.say("etcd is back")

    def _on_begun(self, answer: RangeAnswer) -> None:
        if self._presence is None:
            if self._client.token.is_without_users:
                self._node.say(
                    f"etcd has no users, so everyone who reaches it may use it, and user={self._etcd.etcd.user} has no "
                    "effect; to change that: etcdctl auth enable"
                )
            self._show_presence()
        self._on_leader(answer.kvs[0] if answer.kvs else None, answer.revision)

    def _on_changed(self, changes: list[Change]) -> None:
        last = changes[-1]
        self._on_leader(last.kv if last.kind == "put" else None, last.kv.mod_revision)

    def _on_leader(self, kv: KeyValue | None, revision: int) -> None:
        """This is who led at that revision."""
        if self._is_finished or self._is_leaving:
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
                return  # what was before us
            self._step_down("another node leads" if kv is not None else "etcd does not know it any more")
        self._leader, self._term = None, 0
        self._end_connecting()
        self._drop_link("it does not lead any more")
        if kv is None:
            self._stand()
            return
        self._leader, self._term = leader, kv.create_revision
        self._port_taken_at = None
        if self._candidacy is None or self._leader != self._standing_as:  # else we have won, and shall hear of it
            self._connect()

    def _drop_link(self, why: str) -> None:
        if self._link is not None:
            self._link.close(why)

    def _show_presence(self) -> None:
        def held() -> None:
            put = Put(self._keys.node(self._info.node_id), msgspec.json.encode(self._info), lease.id)
            self._client.call(put, lambda _: None, self._on_trouble)

        def lost(_: str) -> None:
            self._show_presence()

        self._presence = lease = HeldLease(self._client, NODE_TTL_S, held=held, lost=lost, troubled=lambda _: None)
        lease.start()

    # --- the leader's address -----------------------------------------------------------------------------------------

    def _connect(self) -> None:
        leader = self._leader
        if self._is_finished or leader is None or self._link is not None or self._connecting is not None:
            return
        term = self._term
        self._linked_host = leader.place.host
        if why := self._tls_mismatch(leader):
            if self._is_refusal_final:
                self._refused(why)
            else:
                self._retry(why, RETRY_LATER_S, self._connect_or_look)
            return
        self._attempted_at = self._loop.now()

        def connected(sock: socket.socket) -> None:
            self._connecting = None
            self._start_handshake(sock)

        def dead() -> None:
            self._depose(leader, term)
            away("its agent is dead")

        def away(why: str) -> None:
            self._connecting = None
            self._retry(f"{self._where} cannot be reached: {why}", self._backoff_s(), self._connect_or_look)

        self._connecting = LeaderProbe(self._loop, leader.place, connected, dead, away)
        self._connecting.start()

    def _tls_mismatch(self, leader: Leader) -> str:
        """Why this node cannot link to that leader although it could reach it; empty if it can."""
        if bool(leader.certificate) == (self._settings.tls is not None):
            return ""
        if leader.certificate:
            return (
                f"{self._where} links with TLS only, and this node was not given all files for that; add ssl_cert, "
                "ssl_cert_key and ca_cert to --rdzv-conf here"
            )
        return (
            f"{self._where} links without TLS, and this node was told to use TLS; add ssl_cert, ssl_cert_key and "
            "ca_cert to --rdzv-conf there"
        )

    def _connect_or_look(self) -> None:
        self._connect()
        self._look()

    def _look(self) -> None:
        """Who leads now? An etcd that has lost its data tells nothing of that to who follows the key since before."""
        if self._looking or self._is_finished:
            return
        self._looking = True

        def seen(answer: RangeAnswer) -> None:
            self._looking = False
            if self._leadership is None:
                self._on_leader(answer.kvs[0] if answer.kvs else None, answer.revision)

        def unseen(_: EtcdError) -> None:
            self._looking = False
            if self._leader is None:
                self._set_timer("stand", RETRY_LATER_S, self._look)

        self._client.call(Range(self._keys.leader), seen, unseen)

    def _end_connecting(self) -> None:
        if self._connecting is not None:
            self._connecting.close()
            self._connecting = None

    def _depose(self, leader: Leader, term: int) -> None:
        """It is dead, and its lease need not be waited for."""
        delete = Transaction(self._keys.is_led_by(leader, term), (Delete(self._keys.leader),))
        self._client.call(delete, lambda _: None, lambda _: None)

    # --- standing for election ----------------------------------------------------------------------------------------

    def _stand(self) -> None:
        if self._candidacy is None and not self._is_finished:
            others = self._assignment.group_world_size - 1 if self._assignment is not None else 0
            spread_s = min(_MAX_SPREAD_S, _SPREAD_S * others)
            self._set_timer("stand", spread_s * os.urandom(1)[0] / 255, self._stand_now)

    def _stand_now(self) -> None:
        if self._candidacy is not None or self._leader is not None or self._is_finished or self._is_leaving:
            return
        if self._lookup is not None:
            self._set_timer("stand", RETRY_SOON_S, self._stand_now)
            return
        addr = self._own_address()
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
        place = LeaderAddress(self._info.node_id, self._info.host, addr, port, this_machine())
        self._standing_as = Leader(place, os.urandom(16), digest)
        self._candidacy = Candidacy(
            self._client,
            self._keys,
            self._standing_as,
            self._etcd.authority,
            self._fit(),
            not self._was_linked,
            self._last_record if self._holds_lease() else None,
            self._on_won,
            self._on_lost,
            self._on_failed,
            self._on_trouble,
            self._on_lease_lost,
        )
        self._candidacy.start()

    def _listen(self, addr: str) -> socket.socket:
        """At a fixed port the socket of an earlier term of ours still listens: it is used again."""
        port = self._etcd.link_port
        for sock in self._silent if port else ():
            if sock.getsockname()[:2] == (addr.partition("%")[0], port):
                return sock.dup()
        return listen_at(addr, port)

    def _cannot_stand(self, addr: str, error: OSError | ValueError) -> None:
        why = str(error)
        is_taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        if isinstance(error, OSError):
            remedy = "name an address of this host with --local-addr"
            if self._etcd.link_port:
                remedy = "choose another port with --rdzv-conf link_port=PORT"
                addr = str(Endpoint(addr, self._etcd.link_port))
            if is_taken:
                remedy = f"end the program or the other run that listens there, or {remedy}"
            why = (
                f"this node cannot listen at {addr} ({error.strerror or error}), where other nodes would reach it; "
                f"{remedy}"
            )
        patience_s = min(_PORT_TAKEN_S, self._settings.join_timeout_s)
        if is_taken and self._port_taken_at is None:
            self._port_taken_at = self._loop.now()
            self._node.say(f"{why}; trying again for {patience_s:g} s")
        may_wait = is_taken and self._loop.now() - (self._port_taken_at or 0.0) < patience_s
        if not self._was_linked and not may_wait:
            self._refused(why)
        elif may_wait or self._may_retry(why):
            self._set_timer("stand", RETRY_LATER_S, self._stand_now)

    def _own_address(self) -> str:
        """One of this host at which the others reach it: that from which it reaches etcd."""
        if self._own_addr:
            return self._own_addr
        address = self._client.local_address()
        endpoints = [Endpoint.parse(text) for text in self._etcd.etcd.endpoints]
        if not is_loopback(address) or all(endpoint.is_loopback for endpoint in endpoints):
            return address
        # etcd is also elsewhere, or known here by a name that means this host to itself.
        others = [*map(address_towards, endpoints), address_outwards()]
        return next((other for other in others if other and not is_loopback(other)), address)

    def _fit(self) -> str:
        """What all nodes of a run must have been told alike, in brief. Who reads it learns nothing of the secret."""
        import hmac

        settings = self._settings
        tls = "\0tls" if settings.tls is not None else ""
        told = f"{settings.run_id}\0{settings.min_nodes}:{settings.max_nodes}{tls}"
        return hmac.digest(settings.secret or b"none", told.encode(), "sha256").hex()[:32]

    def _on_lost(self) -> None:
        """Who leads is known, or will be told soon; unless that one has gone again."""
        self._withdraw()
        self._set_timer("stand", RETRY_SOON_S, self._look)

    def _on_failed(self, error: EtcdError) -> None:
        if self._leadership is None:
            self._withdraw()
            self._set_timer("stand", RETRY_LATER_S, self._stand_now)
        self._on_trouble(error)

    def _on_lease_lost(self, why: str) -> None:
        if self._leadership is not None:
            self._step_down(why)
            self._drop_link("it does not lead any more")
        else:
            self._withdraw()
        if self._leader is None:
            self._stand()

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
        if self._is_finished or self._is_leaving:
            self._withdraw()
            return
        if self._was_linked and not elected.was_recorded and not self._holds_lease():
            candidacy.holds_record = False
            self._withdraw()
            self._refused(
                f"etcd knows nothing of the run {self._settings.run_id!r} any more: it has ended, or was forgotten, "
                "while this node was cut off; start this node again if the run is to go on"
            )
            return
        record = elected.written.record
        if record.verdict is not None and not self._was_linked:
            self._withdraw()
            self._refused(
                f"the run {self._settings.run_id!r} is over: {record.verdict.why}; to start another of that name, "
                f"wait {VERDICT_TTL_S} s"
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
            deposed=self._step_down,  # who leads is told by the key that we follow
            troubled=self._on_trouble,
            on_change=self._on_node_gone,
        )
        self._server = leadership.server
        if listener.getsockname() not in [sock.getsockname() for sock in self._silent]:
            self._silent.append(listener.dup())
        self._node.keep(f"endpoint {elected.term}", listener.fileno())
        self._node.say(self._about_leading(elected))
        leadership.open(self._opened(elected))
        self._connect()

    @property
    def _has_configured_secret(self) -> bool:
        """Whether only those who were given a secret can read the leader's: the job's own, or what etcd checks."""
        etcd = self._etcd.etcd
        return bool(self._settings.secret or etcd.user or (etcd.tls is not None and etcd.tls.cert))

    def _about_leading(self, elected: Elected) -> str:
        run = f"the coordinator of the run {self._settings.run_id!r}"
        if not elected.written.record.is_at_work:
            return f"this node serves {run}; it was elected through etcd"
        return f"this node takes over {run}; the nodes of the last generation have a moment to come back"

    def _opened(self, elected: Elected) -> Opened:
        """What is known of the past: the record; if etcd has lost it, our own part, or only that there was one."""
        record, part = elected.written.record, self._assignment
        terms = elected.written.longest.longest(self._etcd.authority)  # of whoever may still answer somebody
        if record.generation == 0 and record.verdict is None:
            if part is not None:
                return Opened(
                    terms.return_s, generation=part.generation, restarts_used=part.restarts_used, store=part.store
                )
            if self._was_linked and not elected.was_recorded:
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
        self._node.say(f"this node serves the coordinator no longer: {why}")

    # --- leaving ------------------------------------------------------------------------------------------------------

    def _says_goodbye(self) -> bool:
        """Give back what is ours in etcd, so that nobody waits for it to run out. Not for long."""
        if not self._is_leaving:
            self._is_leaving = self._is_finished = True
            self._set_timer("goodbye", _GOODBYE_S, self._left)
            self._resign()
        return not self._has_left

    def _resign(self) -> None:
        self._following.close()
        leadership, candidacy = self._leadership, self._candidacy
        if leadership is not None:
            if not leadership.server.is_over:
                self._node.say("this node serves the coordinator no longer: this node leaves")
                self._leadership, self._server = None, None
            leadership.resign(self._leave_nodes)
        elif candidacy is not None:
            candidacy.end(self._leave_nodes)
        else:
            self._leave_nodes()

    def _leave_nodes(self) -> None:
        if self._presence is not None:
            self._presence.end(self._leave_members)
        else:
            self._leave_members()

    def _leave_members(self) -> None:
        if self._member is not None and self._member.is_here:
            self._member.leave(self._left)
        else:
            self._left()

    def _left(self) -> None:
        if not self._has_left:
            self._has_left = True
            self._emit(Tick())
