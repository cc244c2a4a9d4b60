"""The etcd engine: etcd elects the agent that hosts the coordinator, and the other agents link to it.

What follows from an answer of etcd, a connection or a deadline is decided by ``_core/leadership/machine.py``; here are
the client of etcd, sockets, TLS, timers and the coordinator's server. Invariants:

- Messages and beats go over links. etcd only holds the leader and what was decided. So agents must reach each other,
  and the speed of etcd does not limit a run. Nodes that are linked keep running while etcd is down.
- The agent keeps a leader's listening socket open even after its term, and its keeper, which outlives the last worker,
  holds a copy: a refused connection proves that all of them are dead.
- With TLS, a node links only to a leader that shows the certificate announced in etcd (``link_tls.py``).
- With a fixed port, the agent opens its listening socket once and uses it in every term.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from collections import deque

from tenax._core.authority import AuthorityTerms
from tenax._core.events import RunEnded, Tick
from tenax._core.leadership import machine
from tenax._core.leadership.calls import Cancel, Request
from tenax._core.leadership.keys import Keys, LeaderAddress
from tenax._core.leadership.machine import Leadership
from tenax._core.leadership.term import Deliver, Probe, StepCoordinator, StopServing
from tenax._engines.etcd.leader_address import LeaderProbe, address_outwards, address_towards, listen_at, this_machine
from tenax._engines.tcp.linked import LinkedEngine, LinkedSettings
from tenax._io.endpoint import Endpoint, Lookup, is_loopback
from tenax._io.etcd.client import EtcdClient
from tenax._io.etcd.settings import EtcdSettings
from tenax._io.etcd.subscription import Subscription
from tenax._io.loop import DeadlineTimer

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ssl
    from typing import Any

    from tenax._core.coordinator import Send
    from tenax._core.etcd.errors import EtcdError
    from tenax._core.etcd.operations import Operation, RangeAnswer
    from tenax._core.leadership.candidacy import Elected
    from tenax._core.leadership.keys import Leader
    from tenax._engines.etcd.managed import ManagedMember, ManagedSettings
    from tenax._io.endpoint import Address
    from tenax._io.etcd.call import EtcdCall

_LEAVE_TIMEOUT_S = 4.0
_HANDOVER_S = 5.0  # how long a leaving leader may take to end the current generation
_TROUBLE_S, _REPORT_TROUBLE_EVERY_S = 3.0, 10.0


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
        self._leadership: Leadership
        self._client: EtcdClient
        self._following: Subscription | None = None  # None: the node was refused before
        self._calls: dict[int, EtcdCall] = {}
        self._member: ManagedMember | None = None
        self._local_address = ""  # resolved from --local-addr
        self._is_listen_wanted = False
        self._listener: socket.socket | None = None  # until this node is elected
        self._own_tls: ssl.SSLContext | None = None
        self._kept_listeners: list[socket.socket] = []  # of earlier terms: this agent never refuses a connection
        self._queue: deque[machine.Output] = deque()
        self._is_acting = False
        self._wake: DeadlineTimer
        self._has_followed = False
        self._is_troubled = self._was_trouble_reported = False
        self._is_leaving = False
        self._has_left = False

    # --- overrides of LinkedEngine ------------------------------------------------------------------------------------

    @property
    def _what_to_check(self) -> str:
        return self._leadership.what_to_check

    @property
    def _secret(self) -> bytes:
        """The configured secret plus the leader's, which only readers of etcd have."""
        leader = self._leadership.leader
        return self._settings.secret + (leader.secret if leader is not None else b"")

    def _link_tls(self) -> tuple[ssl.SSLContext | None, str]:
        files, leader = self._settings.tls, self._leadership.leader
        if files is None or leader is None:
            return None, ""
        from tenax._engines.etcd.link_tls import follower_context

        return follower_context(files, leader.certificate), leader.address.addr  # the name is not compared

    def _stays_while_others_run(self) -> bool:
        """Stay while this leader decides what its own departure means: it knows the reason, a successor does not."""
        if self._linger_until is None:
            self._linger_until = self._loop.now() + _HANDOVER_S
            self._set_timer("handover", _HANDOVER_S, lambda: self._emit(Tick()))
        term = self._leadership.leading
        return term is not None and term.is_deciding() and self._loop.now() < self._linger_until

    def stays_for_others(self) -> bool:
        server = self._server
        is_needed = server is not None and not server.links.is_over and self._stays_while_others_run()
        return is_needed or super().stays_for_others() or self._is_leaving_etcd()

    def close(self) -> None:
        super().close()
        if self._following is not None:
            self._wake.cancel()
            self._following.close()
            self._client.close()
        if self._member is not None:
            self._member.close()
        for sock in (*self._kept_listeners, *([self._listener] if self._listener is not None else [])):
            sock.close()

    def _find_coordinator(self) -> None:
        self._print_notes()
        self._wake = DeadlineTimer(self._loop, lambda _: self._act(self._leadership.tick(self._loop.now())))
        hint = "; give every node of the run the same secret (token_file)" if self._etcd.managed is not None else ""
        self._leadership = self._node.create(
            Leadership,
            self._machine,
            self._settings.run_id,
            self._etcd.authority,
            self._loop.now(),
            lease_id=int.from_bytes(os.urandom(8), "big") >> 1 or 1,
            fit=self._settings_digest(),
            has_tls=self._settings.tls is not None,
            join_timeout_s=self._settings.join_timeout_s,
            refusal_hint=hint,
        )
        if self._etcd.managed is not None:
            from tenax._engines.etcd.managed import ManagedMember

            self._member = ManagedMember(self._loop, self._etcd.managed, self._node.print_line, self._refused)
            self._member.start()
        self._client = EtcdClient(self._loop, self._etcd.etcd)
        if self._settings.local_addr:
            self._resolve_local_addr()
        self._following = Subscription(
            self._client,
            Keys(self._settings.run_id).leader,
            b"",
            self._on_followed,
            lambda changes: self._act(self._leadership.changed(changes, self._loop.now())),
            lambda error: self._act(self._leadership.troubled(error, self._loop.now())),
        )
        self._following.start()

    def _print_notes(self) -> None:
        if self._etcd.unused:
            self._node.print_line(f"note: rendezvous options without effect with etcd: {', '.join(self._etcd.unused)}")
        if self._etcd.etcd.tls is not None and self._settings.tls is None and self._etcd.link_tls:
            self._node.print_line(
                "the links between agents are not encrypted, because TLS needs a certificate on every node; add "
                "ssl_cert, ssl_cert_key and ca_cert to --rdzv-conf on every node (link_tls=false hides this "
                "message)"
            )

    def _resolve_local_addr(self) -> None:
        """Resolve --local-addr, which may be a name: a leader announces its address."""

        def found(addresses: list[Address]) -> None:
            del self._attempts["lookup"]
            self._local_address = str(addresses[0][1][0])
            if self._is_listen_wanted:
                self._open_listener()

        def failed(why: str) -> None:
            del self._attempts["lookup"]
            self._refused(f"cannot resolve --local-addr {self._settings.local_addr!r}: {why}")

        self._begin("lookup", Lookup(self._loop, Endpoint(self._settings.local_addr, 1), found, failed))

    def _on_followed(self, answer: RangeAnswer) -> None:
        if not self._has_followed and self._client.token.is_without_users:
            self._node.print_line(
                f"user={self._etcd.etcd.user} has no effect, because authentication is not enabled in etcd: "
                "every client can read and write; enable it with: etcdctl auth enable"
            )
        self._has_followed = True
        self._act(self._leadership.followed(answer, self._loop.now()))

    def _reconnect(self, why: str, *, retry_s: float) -> None:
        self._act(self._leadership.link_lost(why, self._loop.now(), retry_s=retry_s))

    # --- the machine's outputs ----------------------------------------------------------------------------------------

    def _act(self, outputs: list[machine.Output]) -> None:
        """Carry out outputs one at a time. Those that follow from carrying out one of them wait for the others."""
        self._queue.extend(outputs)
        if self._is_acting:
            return
        self._is_acting = True
        try:
            while self._queue:
                self._carry_out(self._queue.popleft())
        finally:
            self._is_acting = False
        self._wake.set(self._leadership.next_deadline())
        self._on_node_gone()

    def _carry_out(self, output: machine.Output) -> None:
        match output:
            case Request():
                self._request(output)
            case Cancel(number):
                if number in self._calls:
                    self._calls.pop(number).cancel()
            case machine.Listen():
                self._is_listen_wanted = True
                if "lookup" not in self._attempts:
                    self._open_listener()
            case machine.StopListening():
                self._is_listen_wanted = False
                if self._listener is not None:
                    self._listener.close()
                    self._listener = None
            case machine.Connect(leader):
                self._connect(leader)
            case machine.StopConnecting():
                self._stop_attempt("connection")
            case machine.Serve(elected):
                self._serve(elected)
            case Deliver(send):
                if self._server is not None:
                    self._server.deliver(send)
            case StepCoordinator(event):
                if self._server is not None:
                    self._server.coordinator.step(event)
            case Probe(address):
                self._probe(address)
            case StopServing():
                self._stop_serving()
            case machine.Ended(verdict):
                self._do(self._machine.ended(RunEnded(verdict, time.time()), self._loop.now()))
            case machine.Troubled():
                if not self._is_troubled:
                    self._is_troubled = True
                    self._set_timer("trouble", _TROUBLE_S, self._report_trouble)
            case machine.Unregistered():
                if self._member is not None and self._member.is_here:
                    self._member.leave(self._left)
                else:
                    self._left()
            case _:
                self._do([output])

    def _request(self, request: Request) -> None:
        number = request.number

        def done(answer: Any) -> None:
            call = self._calls.pop(number)
            self._act(self._leadership.answered(number, answer, call.sent_at, self._loop.now()))

        def failed(error: EtcdError) -> None:
            del self._calls[number]
            self._act(self._leadership.failed(number, error, self._loop.now()))

        operation: Operation[Any] = request.operation
        self._calls[number] = self._client.call(operation, done, failed, patience_s=request.patience_s)

    def _report_trouble(self) -> None:
        """Report that no etcd member answers, and when that is over. One lost member is not reported."""
        trouble, was_reported = self._client.trouble, self._was_trouble_reported
        self._is_troubled = self._was_trouble_reported = bool(trouble)
        if trouble:
            self._set_timer("trouble", _REPORT_TROUBLE_EVERY_S if was_reported else _TROUBLE_S, self._report_trouble)
            is_at_work = self._machine.assignment is not None and self._machine.holds_lease(self._loop.now())
            goes_on = "workers keep running, but " if is_at_work else ""
            self._node.print_line(f"cannot reach etcd ({trouble}); {goes_on}no generation can start until it is back")
        elif was_reported:
            self._node.print_line("etcd can be reached again")

    # --- connections --------------------------------------------------------------------------------------------------

    def _connect(self, leader: Leader) -> None:
        def connected(sock: socket.socket) -> None:
            self._leadership.connected()
            self._start_handshake(sock)

        def dead() -> None:
            self._act(self._leadership.refused(self._jitter(), self._loop.now()))

        def away(why: str) -> None:
            self._act(self._leadership.unreachable(why, self._jitter(), self._loop.now()))

        self._begin("connection", LeaderProbe(self._loop, leader.address, connected, dead, away))

    def _probe(self, address: LeaderAddress) -> None:
        def probed(*, is_dead: bool) -> None:
            self._act(self._leadership.probed(self._loop.now(), is_dead=is_dead))

        def opened(sock: socket.socket) -> None:
            sock.close()
            probed(is_dead=False)

        probe = LeaderProbe(self._loop, address, opened, lambda: probed(is_dead=True), lambda _: probed(is_dead=False))
        self._begin("probe", probe)

    def _stop_attempt(self, name: str) -> None:
        if name in self._attempts:
            self._attempts[name].close()

    # --- standing for election ----------------------------------------------------------------------------------------

    def _open_listener(self) -> None:
        self._is_listen_wanted = False
        addr = self._address_for_others()
        digest = b""
        try:
            if self._settings.tls is not None:
                from tenax._engines.etcd.link_tls import OwnCertificate

                own = OwnCertificate(self._settings.tls)
                self._own_tls, digest = own.context, own.digest
            self._listener = self._listen(addr)
        except (OSError, ValueError) as error:
            self._cannot_listen(addr, error)
            return
        port = self._listener.getsockname()[1]
        address = LeaderAddress(self._info.node_id, self._info.host, addr, port, this_machine())
        self._act(self._leadership.listening(address, digest, os.urandom(machine.SEED_BYTES), self._loop.now()))

    def _listen(self, addr: str) -> socket.socket:
        """Return a listening socket. With a fixed port, reuse the socket of an earlier term, which is still open."""
        port = self._etcd.link_port
        for sock in self._kept_listeners if port else ():
            if sock.getsockname()[:2] == (addr.partition("%")[0], port):
                return sock.dup()
        return listen_at(addr, port)

    def _cannot_listen(self, addr: str, error: OSError | ValueError) -> None:
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
        self._act(self._leadership.cannot_listen(why, self._loop.now(), is_taken=is_taken))

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

    # --- leading ------------------------------------------------------------------------------------------------------

    def _serve(self, elected: Elected) -> None:
        listener, self._listener = self._listener, None
        assert listener is not None
        etcd = self._etcd.etcd

        def hold_back(send: Send) -> None:
            now = self._loop.now()
            self._act(self._leadership.submit(send, server.coordinator.state, now, time.time() - now))

        server = self._server = self._create_server(
            [listener],
            self._own_tls,
            lambda now, _event, _step, state: self._act(self._leadership.stepped(state, now, time.time() - now)),
            counts=self._leadership.counts,
            hold_back=hold_back,
            on_deposed=lambda frame: self._act(self._leadership.replaced(frame, self._loop.now())),
            # Only if reading the leader's secret needs a credential.
            accepts_operators=bool(self._settings.secret or etcd.user or (etcd.tls is not None and etcd.tls.cert)),
        )
        if listener.getsockname() not in [sock.getsockname() for sock in self._kept_listeners]:
            self._kept_listeners.append(listener.dup())
        self._node.keep(f"endpoint {elected.term}", listener.fileno())
        self._node.set_operator_api(lambda: server.operator_api)
        server.open(self._leadership.opened(elected, time.time() - self._loop.now()))
        self._act(self._leadership.served(server.links, lambda: server.coordinator.state, self._loop.now()))

    def _stop_serving(self) -> None:
        self._stop_attempt("probe")
        server, self._server = self._server, None
        if server is not None:
            self._node.set_operator_api(None)
            server.close()

    # --- leaving ------------------------------------------------------------------------------------------------------

    def _is_leaving_etcd(self) -> bool:
        """Start deleting this node's keys in etcd. Return whether that is still in progress; a timeout bounds it."""
        if self._following is None:
            return False
        if not self._is_leaving:
            self._is_leaving = True
            self._set_timer("goodbye", _LEAVE_TIMEOUT_S, self._left)
            self._following.close()
            self._act(self._leadership.leave(self._loop.now()))
        return not self._has_left

    def _left(self) -> None:
        if not self._has_left:
            self._has_left = True
            self._emit(Tick())
