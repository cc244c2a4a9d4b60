"""Connection: one socket to a store server, with a deadline for every operation.

torch's client blocks forever if the server is frozen. Here the socket is non-blocking, and every wait is a poll with a
timeout. After an error the stream may be out of sync; the owner closes the connection and opens a new one.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from contextlib import suppress

from tenax._io.endpoint import Endpoint, Lookup
from tenax.store import _wire as wire
from tenax.store._api import StoreConnectionError, StoreError, StoreTimeoutError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from tenax._io.endpoint import Address

_READ_BYTES = 1 << 16
_MAX_ANSWER_BYTES = 1 << 30  # for one value, whatever the server announces
_FIRST_PAUSE_S = 0.01  # no event announces that a server starts to listen
_LONGEST_PAUSE_S = 0.25


class NotAStore(StoreConnectionError):
    """The process that listens there is not a store server."""


class Connection:
    """A connection to a store server. Not thread-safe. The owner adds the context to its errors.

    Every operation ends at the ``deadline``, which the owner sets before each request.
    """

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self.deadline = deadline
        self._sock = sock
        self._received = bytearray()
        self._poll = select.poll()

    @classmethod
    def open(cls, host: str, port: int, deadline: float, *, retries: bool) -> Connection:
        """Connect and shake hands. With ``retries``, wait until the server accepts connections."""
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                return cls._open_once(host, port, deadline)
            except (StoreConnectionError, OSError) as error:
                left_s = deadline - time.monotonic()
                if isinstance(error, NotAStore) or not retries or left_s <= 0:
                    if isinstance(error, StoreError):
                        raise
                    raise StoreConnectionError(_describe(error)) from error
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    @classmethod
    def _open_once(cls, host: str, port: int, deadline: float) -> Connection:
        connection = cls(_connect(host, port, deadline), deadline)
        nonce = wire.U32.pack(os.getpid())
        try:
            connection.send(wire.GREETING + bytes([wire.PING]) + nonce)
            if connection.receive(len(nonce)) != nonce:
                raise NotAStore("the process listening there is not a store server")
        except BaseException:
            connection.close()
            raise
        return connection

    def send(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[self._sock.send(view) :]
            except BlockingIOError:
                self._wait(select.POLLOUT)
            except OSError as error:
                raise _lost(error) from error

    def receive(self, size: int) -> bytes:
        """Return the next ``size`` bytes of the answer."""
        received = self._received
        while len(received) < size:
            self._wait(select.POLLIN)
            try:
                data = self._sock.recv(max(_READ_BYTES, size - len(received)))
            except BlockingIOError:
                continue
            except OSError as error:
                raise _lost(error) from error
            if not data:
                raise StoreConnectionError("the server closed the connection")
            received += data
        answer = bytes(received[:size])
        del received[:size]
        return answer

    def receive_byte(self) -> bytes:
        return self.receive(1)

    def receive_number(self) -> int:
        return int(wire.I64.unpack(self.receive(8))[0])

    def receive_text(self) -> bytes:
        size = self.receive_number()
        if not 0 <= size <= _MAX_ANSWER_BYTES:
            raise StoreConnectionError(f"the server announced a value of {size} bytes")
        return self.receive(size)

    def interrupt(self) -> None:
        """Shut the connection down for the server and for all threads that wait on it."""
        with suppress(OSError):  # already shut down
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection. The server sees it at once, even if a forked process holds a copy of the socket."""
        self.interrupt()
        self._sock.close()

    def release(self) -> None:
        """Close this process's copy of the socket without a shutdown: the parent may still use the connection."""
        self._sock.close()

    __del__ = release

    def _wait(self, events: int) -> None:
        left_s = self.deadline - time.monotonic()
        self._poll.register(self._sock, events)
        if left_s <= 0 or not self._poll.poll(left_s * 1000 + 1):
            raise StoreTimeoutError("no answer in time")


def _connect(host: str, port: int, deadline: float) -> socket.socket:
    *others, last = _resolve(host, port, deadline)
    for index, (family, address) in enumerate(others):
        now = time.monotonic()
        share_s = (deadline - now) / (len(others) - index + 1)  # an address that drops packets must not use up all
        with suppress(StoreError, OSError):  # try the next one
            return _connect_to(family, address, now + share_s)
    return _connect_to(*last, deadline)


def _connect_to(family: int, address: tuple[Any, ...], deadline: float) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        failure = sock.connect_ex(address)
        if failure == errno.EINPROGRESS:
            poll = select.poll()
            poll.register(sock.fileno(), select.POLLOUT)
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000 + 1):
                raise StoreTimeoutError("no answer")
            failure = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if not failure and sock.getsockname() == sock.getpeername():
            failure = errno.ECONNREFUSED  # no listener: the kernel connected the socket to itself
        if failure:
            raise OSError(failure, os.strerror(failure))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    except BaseException:
        sock.close()
        raise
    return sock


def _resolve(host: str, port: int, deadline: float) -> list[Address]:
    """Return the addresses of a host. A name is resolved in a thread, because the resolver has no timeout."""
    from tenax._io.loop import Loop

    answers: list[list[Address] | str] = []
    loop = Loop()
    lookup = Lookup(loop, Endpoint(host, port), answers.append, answers.append)
    try:
        lookup.start()
        loop.next_event(lambda: 0.0 if answers else deadline)
    finally:
        lookup.close()
        loop.close()
    if not answers:
        raise StoreTimeoutError("the host name was not resolved in time")
    (answer,) = answers
    if isinstance(answer, str):
        raise StoreConnectionError(answer)
    return answer


def _lost(error: OSError) -> StoreConnectionError:
    return StoreConnectionError(f"the connection was lost ({_describe(error)})")


def _describe(error: OSError) -> str:
    return error.strerror or str(error)
