"""The connection pool: idle connections by endpoint, and new ones when none is idle."""

from __future__ import annotations

import msgspec

from tenax._core.etcd.errors import EtcdRefused
from tenax._io.etcd.http_connection import HttpConnection

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ssl

    from tenax._io.etcd.attempt import Exchange
    from tenax._io.etcd.http_connection import EtcdEndpoint
    from tenax._io.interfaces import EventLoop
    from tenax._io.tls import TlsFiles

_MAX_IDLE = 8  # per endpoint
_MAX_IDLE_S = 30.0  # a NAT or firewall may have dropped an older connection


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
        """Return a reusable connection to the pool."""
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
