"""The pool: open connections that nobody uses at the moment, by place, and new ones where there are none."""

from __future__ import annotations

from tenax._io.etcd.errors import EtcdRefused
from tenax._io.etcd.http_connection import HttpConnection

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ssl

    from tenax._io.etcd.address import Place
    from tenax._io.etcd.http_connection import Breakage, ConnectionUser
    from tenax._io.etcd.http_response import Part
    from tenax._io.ports import EventLoop
    from tenax._io.tls import TlsFiles

_MAX_IDLE = 8  # per place
_MAX_IDLE_S = 30.0  # somebody between us and etcd may have forgotten an older one


class Pool:
    """Owns every connection that is not in use, and knows all others, to close them at the end."""

    def __init__(self, loop: EventLoop, tls: TlsFiles | None) -> None:
        self._loop = loop
        self._files = tls
        self._context: ssl.SSLContext | None = None
        self._idle: dict[int, list[HttpConnection]] = {}
        self._used: set[HttpConnection] = set()

    def take(self, place: Place, user: ConnectionUser, *, is_new: bool = False) -> HttpConnection:
        """An open one, or one that opens now and tells so. Raises EtcdRefused for TLS files that cannot be used."""
        idle = [] if is_new else self._idle.get(place.index, [])
        oldest = self._loop.now() - _MAX_IDLE_S
        while idle:
            connection = idle.pop()
            if connection.idle_since >= oldest and not connection.has_ended():
                connection.user = user
                self._used.add(connection)
                return connection
            connection.close()
        connection = HttpConnection(self._loop, place, user, self._tls())
        self._used.add(connection)
        connection.open()
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
        """Somebody did not like what they say: they may have been renewed."""
        self._context = None

    def give_back(self, connection: HttpConnection) -> None:
        """It has carried an exchange and can carry another."""
        self._used.discard(connection)
        idle = self._idle.setdefault(connection.place.index, [])
        if len(idle) >= _MAX_IDLE:
            connection.close()
            return
        connection.user = self
        connection.idle_since = self._loop.now()
        idle.append(connection)

    def drop(self, connection: HttpConnection) -> None:
        """Nobody wants it any more."""
        self._used.discard(connection)
        connection.close()

    def forget(self, place: Place) -> None:
        """This place did not answer; what idles there would not either."""
        for connection in self._idle.pop(place.index, []):
            connection.close()

    def close(self) -> None:
        for connections in (*self._idle.values(), list(self._used)):
            for connection in connections:
                connection.close()
        self._idle.clear()
        self._used.clear()

    # --- as the user of those that idle -------------------------------------------------------------------------------

    def on_open(self, connection: HttpConnection) -> None:
        """They were open before."""

    def on_part(self, connection: HttpConnection, part: Part) -> None:
        """They were not asked; the connection itself objects."""

    def on_broken(self, connection: HttpConnection, breakage: Breakage) -> None:  # noqa: ARG002
        idle = self._idle.get(connection.place.index, [])
        if connection in idle:
            idle.remove(connection)
