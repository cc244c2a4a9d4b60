"""A non-blocking attempt to connect a socket."""

from __future__ import annotations

import errno
import socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from tenax._io.endpoint import Address
    from tenax._io.interfaces import Cancellable, EventLoop

_CONNECT_S = 2.0  # for each address
_IN_PROGRESS = (errno.EINPROGRESS, errno.EAGAIN, errno.EINTR)


class ConnectAttempt:
    """Tries one address after the other. Watched by the loop.

    Calls ``connected``, or ``failed`` with the error number of each address, once, never within ``start``.
    """

    def __init__(
        self,
        loop: EventLoop,
        addresses: list[Address],
        connected: Callable[[socket.socket], None],
        failed: Callable[[list[int]], None],
    ) -> None:
        self._loop = loop
        self._addresses = list(addresses)
        self._connected = connected
        self._failed = failed
        self._errors: list[int] = []
        self._sock: socket.socket | None = None
        self._timer: Cancellable | None = None

    def start(self) -> None:
        self._loop.watch(self)
        self._try_next()

    def _try_next(self) -> None:
        number = self._begin(*self._addresses.pop(0))
        is_decided = number not in _IN_PROGRESS
        self._timer = self._loop.at(
            self._loop.now() + (0.0 if is_decided else _CONNECT_S),
            lambda: self._end(number if is_decided else errno.ETIMEDOUT),
        )

    def _begin(self, family: socket.AddressFamily, address: tuple[object, ...]) -> int:
        """Start the attempt and return its error number."""
        try:
            self._sock = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:  # the address family is not supported, or no descriptor is left
            return error.errno or errno.EINVAL
        self._sock.setblocking(False)
        number = self._sock.connect_ex(address)
        if number not in (0, *_IN_PROGRESS):
            self._close_socket()  # the loop would find it writable, without an error
        return number

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
        self._timer.cancel()
        if number and self._addresses:
            self._close_socket()
            self._errors.append(number)
            self._try_next()
            return
        self._timer = None
        self._loop.unwatch(self)
        if number == 0 and self._sock is not None:
            self._connected(self._sock)
        else:
            self._close_socket()
            self._failed([*self._errors, number])

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._loop.unwatch(self)
            self._close_socket()

    def _close_socket(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None
