"""A non-blocking attempt to connect a socket."""

from __future__ import annotations

import errno
import socket

import msgspec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from tenax._io.endpoint import Address
    from tenax._io.interfaces import Cancellable, EventLoop

_CONNECT_S = 2.0  # for each address
_IN_PROGRESS = (errno.EINPROGRESS, errno.EAGAIN, errno.EINTR)


class ConnectAttempt(msgspec.Struct, eq=False):
    """Tries one address after the other. Watched by the loop.

    Calls ``connected``, or ``failed`` with the error number of each address, once, never within ``start``.
    """

    _loop: EventLoop
    _addresses: list[Address]
    _connected: Callable[[socket.socket], None]
    _failed: Callable[[list[int]], None]
    _errors: list[int] = []
    _sock: socket.socket | None = None
    _timer: Cancellable | None = None  # None: it has ended, or not begun

    def start(self) -> None:
        self._loop.watch(self)
        self._try_next()

    def _try_next(self) -> None:
        number = self._begin(*self._addresses[len(self._errors)])
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
        if number:
            self._close_socket()
            self._errors.append(number)
            if len(self._errors) < len(self._addresses):
                self._try_next()
                return
        self._timer = None
        self._loop.unwatch(self)
        if self._sock is not None:
            self._connected(self._sock)
        else:
            self._failed(self._errors)

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
