"""A non-blocking HTTP connection to one endpoint, and the pool of idle ones.

It resolves, connects, does the TLS handshake, then one exchange after the other. It has one user at a time. It calls
the user when it is open, for each part of the response, and once when it breaks; never within a call of the user.
"""

from __future__ import annotations

import os
import socket
import sys
from contextlib import suppress

import msgspec

from tenax._core.etcd.errors import EtcdRefused
from tenax._io.connect import ConnectAttempt
from tenax._io.endpoint import Endpoint, Lookup
from tenax._io.etcd.http_response import End, HttpError, Part, ResponseReader
from tenax._io.tls import StreamSocket

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ssl

    from tenax._io.endpoint import Address
    from tenax._io.etcd.attempt import Exchange
    from tenax._io.interfaces import EventLoop
    from tenax._io.tls import TlsFailure, TlsFiles

# A host that vanished sends nothing: TCP keep-alive and the user timeout end such connections.
_KEEP_ALIVE_IDLE_S, _KEEP_ALIVE_EVERY_S, _KEEP_ALIVE_COUNT = 2, 1, 3
_USER_TIMEOUT_MS = 5000
_MAX_IDLE = 8  # per endpoint
_MAX_IDLE_S = 30.0  # a NAT or firewall may have dropped an older connection


class EtcdEndpoint(msgspec.Struct, eq=False):
    """One of the endpoints that the user gave. A host name may resolve to several addresses; they take turns."""

    index: int
    name: str
    failures: int = 0

    @property
    def target(self) -> Endpoint:
        return Endpoint.parse(self.name)

    def in_order(self, addresses: list[Address]) -> list[Address]:
        """Return the addresses, starting with one that did not fail last."""
        first = self.failures % len(addresses)
        return addresses[first:] + addresses[:first]


class HttpConnection(StreamSocket, eq=False):
    _loop: EventLoop
    endpoint: EtcdEndpoint
    user: Exchange | None  # None while it is idle
    _context: ssl.SSLContext | None
    is_open: bool = False
    answered: int = 0  # completed exchanges
    idle_since: float = 0.0
    _opening: Lookup | ConnectAttempt | None = None
    _reader: ResponseReader | None = None

    # --- opening ------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        def failed(why: str) -> None:
            self._break_off(f"host name lookup failed: {why}")

        self._opening = Lookup(self._loop, self.endpoint.target, self._connect, failed)
        self._opening.start()

    def _connect(self, addresses: list[Address]) -> None:
        addresses = self.endpoint.in_order(addresses)
        self._opening = ConnectAttempt(self._loop, addresses, self._connected, self._not_connected)
        self._opening.start()

    def _not_connected(self, errors: list[int]) -> None:
        self._break_off(os.strerror(errors[-1]).lower())

    def _connected(self, sock: socket.socket) -> None:
        self._opening = None
        self._sock = sock
        _tune(sock)
        self._loop.watch(self)
        if self._context is None:
            self._opened()
        else:
            self._start_tls(self._context, server_hostname=self.endpoint.target.host.partition("%")[0])

    def _opened(self) -> None:
        self.is_open = True
        if self.user is not None:
            self.user.on_open()

    # --- one exchange -------------------------------------------------------------------------------------------------

    def request(self, data: bytes) -> None:
        """Send a request. The user gets the parts of the response. One request at a time."""
        assert self.is_open
        self._reader = ResponseReader()
        self.send(data)

    def has_ended(self) -> bool:
        """Return True if the peer has closed the connection and the loop has not noticed yet."""
        if self._sock is None:
            return True
        try:
            return not self._sock.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            return True

    def _on_data(self, data: bytes) -> None:
        plain = self._decrypt(data)
        if self._tls is None:
            self._parse(plain)
            return
        if self._tls.is_open and not self.is_open and not self.is_closed:
            self._opened()
        if plain and not self.is_closed:
            self._parse(plain)
        if self._tls.failure is not None:
            self._fail_tls(self._tls.failure)
        elif self._tls.is_ended and not self.is_closed:
            self._on_end()

    def _parse(self, data: bytes) -> None:
        if self._reader is None:
            self._break_off("unexpected data")
            return
        try:
            parts = self._reader.feed(data)
        except HttpError as error:
            self._break_off(f"invalid response: {error}")
            return
        self._deliver(parts)

    def _deliver(self, parts: list[Part]) -> None:
        for part in parts:
            if self.is_closed:
                return
            if isinstance(part, End):
                self._reader = None
                self.answered += 1
            if self.user is not None:
                self.user.on_part(part)

    # --- the end ------------------------------------------------------------------------------------------------------

    def _fail_tls(self, failure: TlsFailure) -> None:
        if failure.is_rejection:
            message = f"it rejected this client's certificate, or requires one ({failure.reason})"
        elif failure.is_not_tls:
            message = "it does not use TLS"
        else:
            message = f"untrusted certificate: {failure.reason}"
        self._break_off(message, is_about_tls=True)

    def _on_end(self) -> None:
        if self._reader is not None and self._reader.has_begun:
            try:
                self._deliver(self._reader.feed_end())
            except HttpError as error:
                self._break_off(f"invalid response: {error}")
                return
        self._break_off("connection closed")

    def _on_broken(self, why: str, by_peer: bool) -> None:  # noqa: ARG002 - a retry follows either way
        self._break_off(why.lower())

    def _break_off(self, message: str, is_about_tls: bool = False) -> None:
        if not self.is_closed:
            self.close()
            if self.user is not None:
                self.user.on_broken(message, is_about_tls=is_about_tls)

    def close(self) -> None:
        """Close without a callback."""
        if self.is_closed:
            return
        self.is_closed = True
        self.is_open = False
        if self._opening is not None:
            self.endpoint.failures += isinstance(self._opening, ConnectAttempt)
            self._opening.close()
        if self._sock is not None:
            self._loop.unwatch(self)
            self._sock.close()  # no shutdown: a forked child closes its copy while the parent uses the connection
            self._sock = None


class Pool(msgspec.Struct, eq=False):
    """Owns the idle connections, and tracks those in use to close them at the end."""

    _loop: EventLoop
    _files: TlsFiles | None
    _context: ssl.SSLContext | None = None
    _idle: dict[int, list[HttpConnection]] = {}
    _used: set[HttpConnection] = set()

    def take(self, endpoint: EtcdEndpoint, user: Exchange, *, is_new: bool = False) -> HttpConnection:
        """Return an idle connection, or a new one that calls ``on_open`` later. Raises EtcdRefused (bad TLS files)."""
        idle = [] if is_new else self._idle.get(endpoint.index, [])
        oldest = self._loop.now() - _MAX_IDLE_S
        while idle:
            connection = idle.pop()
            if connection.idle_since >= oldest and not connection.has_ended():
                connection.user = user
                break
            connection.close()
        else:
            connection = HttpConnection(self._loop, endpoint, user, self._tls())
            connection.open()
        self._used.add(connection)
        return connection

    @property
    def is_encrypted(self) -> bool:
        return self._files is not None

    def _tls(self) -> ssl.SSLContext | None:
        if self._files is not None and self._context is None:
            try:
                self._context = self._files.for_client()
            except ValueError as error:
                raise EtcdRefused(str(error)) from error
        return self._context

    def read_files_again(self) -> None:
        """Reload the TLS files for the next connection: they may have been renewed since a handshake failed."""
        self._context = None

    def give_back(self, connection: HttpConnection) -> None:
        self._used.discard(connection)
        idle = self._idle.setdefault(connection.endpoint.index, [])
        if len(idle) >= _MAX_IDLE:
            connection.close()
            return
        connection.user = None
        connection.idle_since = self._loop.now()
        idle.append(connection)

    def drop(self, connection: HttpConnection) -> None:
        """Close a connection that was in use."""
        self._used.discard(connection)
        connection.close()

    def forget(self, endpoint: EtcdEndpoint) -> None:
        """Close the idle connections of an endpoint that does not answer."""
        for connection in self._idle.pop(endpoint.index, []):
            connection.close()

    def close(self) -> None:
        for connections in (*self._idle.values(), list(self._used)):
            for connection in connections:
                connection.close()
        self._idle.clear()
        self._used.clear()


def _tune(sock: socket.socket) -> None:
    options = [(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1), (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    if sys.platform == "linux":
        options += [
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEP_ALIVE_IDLE_S),
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEP_ALIVE_EVERY_S),
            (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEP_ALIVE_COUNT),
            (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS),
        ]
    for level, option, value in options:
        with suppress(OSError):  # not supported by this system
            sock.setsockopt(level, option, value)
