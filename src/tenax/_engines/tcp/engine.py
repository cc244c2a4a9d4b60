"""The tcp engine: connects to the coordinator at the endpoint, or serves it if the endpoint is on this host.

    look up -> bind? -> serve
                    -> connect -> handshake -> linked -> lost -> connect ...

The node that can bind the endpoint serves it; host names are not compared. Invariants, besides those of the link:

- A coordinator that is *gone* (connection closed or refused by its host) needs no fencing: no other node can form a
  generation. Workers keep running, and this node reconnects, or takes over if the endpoint is on this host.
- A coordinator that is *silent* does: see the lease in ``_core/link/client.py``.
"""

from __future__ import annotations

import errno
import os

import msgspec

from tenax._core.link.client import RETRY_LATER_S, Note
from tenax._engines.tcp.linked import LinkedEngine, LinkedSettings
from tenax._engines.tcp.marker import Marker
from tenax._io.connect import ConnectAttempt
from tenax._io.endpoint import Endpoint, Lookup, is_loopback
from tenax._io.listen import open_listeners

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ssl

    from tenax._core.coordinator import CoordinatorState
    from tenax._engines.tcp.link import Link
    from tenax._io.endpoint import Address

_LOOK_UP_EVERY_S = 5.0  # while the coordinator cannot be reached
_TOUCH_EVERY_S = 10.0


class TcpSettings(LinkedSettings, frozen=True):
    uses_user_secret: bool = False  # use this user's secret on this host, read or created at the start


class TcpEngine(LinkedEngine):
    """The coordinator is served at the endpoint given to every node."""

    def __init__(self, settings: TcpSettings, master_addr: str = "", master_port: int = 0) -> None:
        super().__init__(settings, master_addr, master_port)
        self._endpoint = Endpoint.parse(settings.endpoint)
        self._location = f"at {self._endpoint}"
        self._uses_user_secret = settings.uses_user_secret
        if settings.uses_user_secret:
            self._rejection_causes = "it serves another run, has a secret, or belongs to another user"
        self._addresses: list[Address] = []
        self._looked_up_at = 0.0
        self._marker = Marker(settings.run_id, str(self._endpoint))
        self._marked = (0, False)  # generation and whether the run is over, as the marker has them

    def _link_tls(self) -> tuple[ssl.SSLContext | None, str]:
        tls = self._settings.tls
        return tls.for_client() if tls is not None else None, self._endpoint.host

    def _stays_while_others_run(self) -> bool:
        if self._linger_until is None:
            self._linger_until = 0.0
            self._node.print_line(
                "this node has left the run, but it serves the coordinator: it stays until the other nodes are "
                "done; another signal (Ctrl-C) ends it at once and leaves them without a coordinator"
            )
        return True

    def close(self) -> None:
        was_serving = self._server is not None
        super().close()
        if was_serving:
            self._marker.remove()

    def _find_coordinator(self) -> None:
        if self._uses_user_secret:
            from tenax._engines.secret import user_secret

            try:
                self._settings = msgspec.structs.replace(self._settings, secret=user_secret())
            except OSError as error:
                self._refused(str(error))
                return
        self._look_up()

    def _reconnect(self, why: str, *, retry_s: float) -> None:
        self._retry(why, retry_s, self._connect)

    def _reachable_at(self, link: Link) -> tuple[str, str]:
        """Return the endpoint's name if this host resolves it to loopback: other hosts resolve it to this host."""
        address = link.local_address
        if is_loopback(address) and not self._endpoint.is_loopback:
            return self._endpoint.host, ""
        return address, address

    # --- finding the coordinator --------------------------------------------------------------------------------------

    def _look_up(self) -> None:
        def found(addresses: list[Address]) -> None:
            self._end_lookup(addresses)
            self._serve_if_local()
            self._connect()

        def failed(why: str) -> None:
            self._end_lookup([])
            self._retry(f"cannot resolve the host name {self._endpoint.host!r}: {why}", RETRY_LATER_S, self._look_up)

        self._begin("lookup", Lookup(self._loop, self._endpoint, found, failed))

    def _look_up_again(self) -> None:
        """Refresh the endpoint's addresses in the background: a restarted coordinator may have a new one."""
        is_recent = self._loop.now() - self._looked_up_at < _LOOK_UP_EVERY_S
        if "lookup" not in self._attempts and not is_recent and not self._endpoint.is_address:
            lookup = Lookup(self._loop, self._endpoint, self._end_lookup, lambda _: self._end_lookup([]))
            self._begin("lookup", lookup)

    def _end_lookup(self, found: list[Address]) -> None:
        self._addresses = found or self._addresses
        self._looked_up_at = self._loop.now()
        del self._attempts["lookup"]

    def _serve_if_local(self) -> bool:
        """Serve the endpoint if it is an address of this host and its port is free."""
        if self._server is not None:
            return False
        try:
            listeners = open_listeners(self._endpoint, self._addresses)
        except OSError as error:
            self._refused(f"cannot listen at the endpoint {self._endpoint} on this host: {error.strerror}")
            return False
        if not listeners:
            return False
        files = self._settings.tls
        try:
            tls = files.for_server() if files is not None else None
        except ValueError as error:
            for listener in listeners:
                listener.close()
            self._refused(str(error))
            return False
        note = self._marker.read()
        is_successor = self._machine.assignment is not None or note is not None
        server = self._server = self._create_server(
            listeners,
            tls,
            self._write_marker,
            is_unleased=lambda node_id: node_id == self._info.node_id and self._machine.is_unleased,
            print_line=self._node.print_line,
        )
        for index, listener in enumerate(listeners):  # keeps the port taken until everything started here has exited
            self._node.keep(f"endpoint {index}", listener.fileno())
        self._announce_serving(is_successor)
        self._node.set_operator_api(lambda: server.operator_api)
        self._machine.serves()
        self._touch_marker()
        server.open(self._machine.takeover(note, self._settings.terms.lease_s))
        return True

    def _announce_serving(self, is_successor: bool) -> None:
        run = f"the coordinator of the run {self._settings.run_id!r} at {self._endpoint}"
        if is_successor:
            line = f"this node takes over {run} and waits for the nodes of the last generation to reconnect"
        elif self._endpoint.is_loopback:
            line = f"this node serves {run}; only agents on this host can join, because that is a loopback address"
        else:
            line = f"this node serves {run}"
        self._node.print_line(line)
        if not self._secret:
            self._node.print_line(
                f"warning: any process that reaches {self._endpoint} can join this run, because it has no secret; give "
                "every node the same one with --rdzv-conf token_file=FILE or the variable TENAX_RDZV_TOKEN"
            )

    def _connect(self) -> None:
        if self._machine.is_finished:
            return
        self._machine.connecting(self._loop.now())
        attempt = ConnectAttempt(self._loop, self._addresses, self._start_handshake, self._on_unreachable)
        self._begin("connection", attempt)

    def _on_unreachable(self, errors: list[int]) -> None:
        if errno.ECONNREFUSED in errors:
            self._do(self._machine.unserved(self._loop.now()))
            if self._serve_if_local():
                self._connect()
                return
        self._look_up_again()
        why = f"no coordinator at {self._endpoint}: {os.strerror(errors[-1])}"
        self._retry(why, self._machine.backoff_s(self._jitter()), self._connect)

    # --- serving ------------------------------------------------------------------------------------------------------

    def _write_marker(self, _now: float, _event: object, _step: object, state: CoordinatorState) -> None:
        """Write what a successor must know, before any node receives it."""
        verdict = state.verdict
        marked = (state.generation, verdict is not None)
        if marked == self._marked:
            return
        self._marked = marked
        if verdict is not None:  # without the report: a late node only needs the outcome
            verdict = msgspec.structs.replace(verdict, failures=(), stopped=(), members=(), earlier=())
        self._marker.write(Note(state.generation, state.restarts_used, state.store, verdict))

    def _touch_marker(self) -> None:
        self._marker.touch()
        self._set_timer("marker", _TOUCH_EVERY_S, self._touch_marker)
