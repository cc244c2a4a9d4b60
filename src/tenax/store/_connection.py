"""Connection: one socket to a store, on which nothing takes longer than the deadline that it is given.

Torch's own client blocks for good on a server that is frozen. Here the socket never blocks: we wait for it with a poll,
which has an end. After any error the stream may be out of step; the owner closes the connection and makes a new one.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import threading
import time
from contextlib import suppress

from tenax.store import _wire as wire
from tenax.store._api import StoreConnectionError, StoreError, StoreTimeoutError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_READ_BYTES = 1 << 16
_MAX_ANSWER_BYTES = 1 << 30  # of one value, whatever the server announces
_FIRST_PAUSE_S = 0.01  # nobody tells us when a server that is not there yet begins to listen
_LONGEST_PAUSE_S = 0.25


class NotAStore(StoreConnectionError):
    """Somebody else listens there."""


class Connection:
    """Not thread-safe. Its errors say what happened; the owner says where and why."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._received = bytearray()
        self._poll = select.poll()
        self._poll.register(sock.fileno(), select.POLLIN)

    @classmethod
    def open(cls, host: str, port: int, deadline: float, *, patiently: bool) -> Connection:
        """Connect and greet. ``patiently``: a server that is not there yet is waited for."""
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                return cls._open_once(host, port, deadline)
            except NotAStore:
                raise
            except (StoreConnectionError, OSError) as error:
                left_s = deadline - time.monotonic()
                if not patiently or left_s <= 0:
                    if isinstance(error, StoreError):
                        raise
                    raise StoreConnectionError(_in_words(error)) from error
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    @classmethod
    def _open_once(cls, host: str, port: int, deadline: float) -> Connection:
        connection = cls(_connect(host, port, deadline))
        try:
            connection._greet(deadline)
        except BaseException:
            connection.close()
            raise
        return connection

    def _greet(self, deadline: float) -> None:
        nonce = wire.U32.pack(os.getpid())
        self.send(wire.GREETING + bytes([wire.PING]) + nonce, deadline)
        if self.receive(len(nonce), deadline) != nonce:
            raise NotAStore("what answers there is not a store")

    def send(self, data: bytes, deadline: float) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[self._sock.send(view) :]
            except BlockingIOError:
                self._wait(select.POLLOUT, deadline)
            except OSError as error:
                raise _lost(error) from error

    def receive(self, size: int, deadline: float) -> bytes:
        """So many bytes of the answer."""
        received = self._received
        while len(received) < size:
            self._wait(select.POLLIN, deadline)
            try:
                data = self._sock.recv(max(_READ_BYTES, size - len(received)))
            except BlockingIOError:
                continue
            except OSError as error:
                raise _lost(error) from error
            if not data:
                raise StoreConnectionError("it closed the connection")
            received += data
        answer = bytes(received[:size])
        del received[:size]
        return answer

    def receive_number(self, deadline: float) -> int:
        number: int = wire.I64.unpack(self.receive(8, deadline))[0]
        return number

    def receive_text(self, deadline: float) -> bytes:
        size = self.receive_number(deadline)
        if not 0 <= size <= _MAX_ANSWER_BYTES:
            raise StoreConnectionError(f"it announced a value of {size} bytes")
        return self.receive(size, deadline)

    def interrupt(self) -> None:
        """End it for the server and for whoever waits here, in any thread."""
        with suppress(OSError):  # it has ended already
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """The server sees it at once, whoever else (a forked process) holds a copy of this socket."""
        self.interrupt()
        self._sock.close()

    def forget(self) -> None:
        """Close our copy; the connection is somebody else's."""
        self._sock.close()

    __del__ = forget

    def _wait(self, events: int, deadline: float) -> None:
        left_s = deadline - time.monotonic()
        if left_s > 0:
            if events != select.POLLIN:
                self._poll.modify(self._sock.fileno(), events)
            try:
                if self._poll.poll(left_s * 1000 + 1):
                    return
            finally:
                if events != select.POLLIN:
                    self._poll.modify(self._sock.fileno(), select.POLLIN)
        raise StoreTimeoutError("it did not answer in time")


def _connect(host: str, port: int, deadline: float) -> socket.socket:
    addresses = _resolve(host, port, deadline)
    for index, (family, address) in enumerate(addresses):
        now = time.monotonic()
        share_s = (deadline - now) / (len(addresses) - index)  # an address that swallows everything must not take all
        try:
            return _connect_to(family, address, now + share_s)
        except (StoreError, OSError):
            if index == len(addresses) - 1:
                raise
    raise StoreConnectionError("it has no address")


def _connect_to(family: int, address: tuple[Any, ...], deadline: float) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        failure = sock.connect_ex(address)
        if failure == errno.EINPROGRESS:
            poll = select.poll()
            poll.register(sock.fileno(), select.POLLOUT)
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000 + 1):
                raise StoreTimeoutError("it does not answer")
            failure = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if not failure and sock.getsockname() == sock.getpeername():
            failure = errno.ECONNREFUSED  # nobody listens, and the kernel connected the socket to itself
        if failure:
            raise OSError(failure, os.strerror(failure))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    except BaseException:
        sock.close()
        raise
    return sock


def _resolve(host: str, port: int, deadline: float) -> list[tuple[int, tuple[Any, ...]]]:
    """The addresses of a host. The resolver knows no deadline, so a name is looked up in a thread that may be left."""
    try:
        return _addresses(host, port, socket.AI_NUMERICHOST)
    except socket.gaierror:  # it is a name
        found: list[list[tuple[int, tuple[Any, ...]]] | OSError] = []

    def look_up() -> None:
        try:
            found.append(_addresses(host, port, 0))
        except OSError as error:
            found.append(error)

    thread = threading.Thread(target=look_up, name="tenax-resolver", daemon=True)
    thread.start()
    thread.join(max(0.0, deadline - time.monotonic()))
    if not found:
        raise StoreTimeoutError("the resolver does not answer")
    if isinstance(found[0], OSError):
        raise found[0]
    return found[0]


def _addresses(host: str, port: int, flags: int) -> list[tuple[int, tuple[Any, ...]]]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return [(family, address) for family, _, _, _, address in found]


def _lost(error: OSError) -> StoreConnectionError:
    return StoreConnectionError(f"the connection was lost ({_in_words(error)})")


def _in_words(error: OSError) -> str:
    return error.strerror or str(error)
