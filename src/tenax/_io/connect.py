"""One non-blocking attempt to connect a socket."""

from __future__ import annotations

import errno
import socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from tenax._io.interfaces import Cancellable, EventLoop

_CONNECT_S = 2.0


class ConnectAttempt:
    """One attempt to connect. Watched by the loop; calls ``connected`` or ``failed`` once, never within ``start``."""

    def __init__(
        self,
        loop: EventLoop,
        family: socket.AddressFamily,
        address: tuple[object, ...],
        connected: Callable[[socket.socket], None],
        failed: Callable[[int], None],
    ) -> None:
        self._loop = loop
        self._address = address
        self._connected = connected
        self._failed = failed
        self._family = family
        self._sock: socket.socket | None = None
        self._timer: Cancellable | None = None

    def start(self) -> None:
        number = self._begin()
        self._loop.watch(self)
        is_decided = number not in (errno.EINPROGRESS, errno.EAGAIN, errno.EINTR)
        self._timer = self._loop.at(
            self._loop.now() + (0.0 if is_decided else _CONNECT_S),
            lambda: self._end(number if is_decided else errno.ETIMEDOUT),
        )

    def _begin(self) -> int:
        """Start the attempt and return its error number."""
        try:
            self._sock = socket.socket(self._family, socket.SOCK_STREAM)
        except OSError as error:  # the address family is not supported, or no descriptor is left
            return error.errno or errno.EINVAL
        self._sock.setblocking(False)
        return self._sock.connect_ex(self._address)

    def fileno(self) -> int:
        return -1 if self._sock is None else self._sock.fileno()

    @property
    def wants_to_write(self) -> bool:
        return True

    def on_readable(self) -> None:
        """Do nothing: the socket becomes writable when the attempt ends."""

    def on_writable(self) -> None:
        if self._sock is not None:
            self._end(self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))

    def _end(self, number: int) -> None:
        if self._timer is None:
            return
        self._stop()
        if number == 0 and self._sock is not None:
            self._connected(self._sock)
        else:
            self._close_socket()
            self._failed(number)

    def _stop(self) -> None:
        assert self._timer is not None
        self._timer.cancel()
        self._timer = None
        self._loop.unwatch(self)

    def close(self) -> None:
        if self._timer is not None:
            self._stop()
            self._close_socket()

    def _close_socket(self) -> None:
        if self._sock is not None:
            self._sock.close()
