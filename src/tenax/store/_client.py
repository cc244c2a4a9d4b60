"""TCPStore: a client of a store server that speaks PyTorch's TCPStore protocol.

It works with tenax's server and with both of torch's (2.5 and later). Guarantees that torch's client does not give:

1. No method takes longer than its timeout, whatever the server does: one deadline covers connecting, sending, waiting
   and receiving. On a timeout the connection is dropped; the next call opens a new one.
2. A change has taken effect at the server when the method returns. The protocol does not acknowledge some changes, so
   the client sends a ping after them.
3. A read is retried once after a lost connection. A change is not, because it may have taken effect.

Thread-safe, but calls are serialized, as in torch: ``clone`` the store for a thread that waits.
"""

from __future__ import annotations

import os
import time

from tenax._core.text import format_seconds
from tenax._io.endpoint import Endpoint
from tenax.store import _wire as wire
from tenax.store._api import (
    DEFAULT_TIMEOUT_S,
    QueueEmptyError,
    Store,
    StoreConnectionError,
    StoreTimeoutError,
    as_amount,
    as_bytes,
    as_text,
    format_keys,
    pairs,
)
from tenax.store._connection import Connection
from tenax.store._mutex import Busy, Mutex

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeVar

    from tenax.store._api import Timeout
    from tenax.store._server_thread import OwnServer

    T = TypeVar("T")

_MAX_LISTED = 1 << 24  # keys, whatever the server announces
_PING = bytes([wire.PING])


class TCPStore(Store):
    """The constructor's signature is torch's. It waits until the server accepts connections."""

    def __init__(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: Timeout = DEFAULT_TIMEOUT_S,
        wait_for_workers: bool = True,
        multi_tenant: bool = False,
        master_listen_fd: int | None = None,
        use_libuv: bool = True,  # noqa: ARG002 - torch's choice between two servers; there is one here
    ) -> None:
        """``is_master``: serve the store from a thread of this process while this object or a clone of it exists.

        With a ``world_size``, every client registers, and a master with ``wait_for_workers`` waits for all of them.
        ``multi_tenant``: if another process serves that port, a master becomes a client only.
        """
        super().__init__(timeout)
        self.host = host_name
        self.port = port
        self._mutex = Mutex()
        self._connection: Connection | None = None
        self._is_closed = False
        self._process = os.getpid()
        self._server: OwnServer | None = None
        deadline = time.monotonic() + self._timeout_s
        if is_master:
            from tenax.store._server_thread import OwnServer

            self._server = OwnServer.start(host_name, port, world_size or 0, multi_tenant, master_listen_fd)
            if self._server is not None:
                self.port = self._server.port
        try:
            self._connect(deadline)
            if world_size is not None:
                self._register_worker(world_size if wait_for_workers else 0, deadline)
        except BaseException:
            self.close()
            raise

    def __str__(self) -> str:
        return f"the store at {Endpoint(self.host, self.port)}"

    def clone(self) -> TCPStore:
        """Return a store with another connection to the same server."""
        copy = TCPStore(self.host, self.port, timeout=self._timeout_s)
        copy._server = self._server
        return copy

    def close(self) -> None:
        """Close the connection, also for a thread that waits on it. The master's server closes with its last handle."""
        self._detach_after_fork()
        self._is_closed = True
        connection = self._connection
        if connection is not None:
            connection.interrupt()
        if not self._mutex.is_interrupted:  # otherwise that call fails and drops the connection
            self._mutex.run(self._drop)
        self._server = None

    def set(self, key: str, value: str | bytes) -> None:
        self._change(bytes([wire.SET]) + _name(key) + _value(value), f"set {key!r}")

    def get(self, key: str) -> bytes:
        deadline = self._wait([key])
        request = bytes([wire.GET]) + _name(key)
        return self._request(request, f"get {key!r}", Connection.receive_text, deadline=deadline)

    def add(self, key: str, amount: int) -> int:
        request = bytes([wire.ADD]) + _name(key) + wire.I64.pack(as_amount(amount))
        return self._request(request, f"add to {key!r}", Connection.receive_number, is_read=False)

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        request = bytes([wire.COMPARE_SET]) + _name(key) + _value(expected_value) + _value(desired_value)
        return self._request(request, f"compare and set {key!r}", Connection.receive_text, is_read=False)

    def append(self, key: str, value: str | bytes) -> None:
        self._change(bytes([wire.APPEND]) + _name(key) + _value(value), f"append to {key!r}")

    def delete_key(self, key: str) -> bool:
        request = bytes([wire.DELETE_KEY]) + _name(key)
        return bool(self._request(request, f"delete {key!r}", Connection.receive_number, is_read=False))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        deadline = self._wait(keys)
        request = bytes([wire.MULTI_GET]) + _names(keys)
        return self._request(
            request, f"get {format_keys(keys)}", lambda each: [each.receive_text() for _ in keys], deadline=deadline
        )

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        fields = [_name(key) + _value(value) for key, value in pairs(keys, values)]
        request = bytes([wire.MULTI_SET]) + wire.I64.pack(len(fields)) + b"".join(fields)
        self._change(request, f"set {format_keys(keys)}")

    def check(self, keys: Sequence[str]) -> bool:
        request = bytes([wire.CHECK]) + _names(keys)
        return self._request(request, f"check {format_keys(keys)}", Connection.receive_byte) == wire.READY

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        self._wait(keys, timeout)

    def num_keys(self) -> int:
        return self._request(bytes([wire.GETNUMKEYS]), "count the keys", Connection.receive_number)

    def list_keys(self) -> list[str]:
        names = self._request(bytes([wire.LIST_KEYS]), "list the keys", _receive_list)
        return [as_text(name[len(wire.KEY_PREFIX) :]) for name in names if name.startswith(wire.KEY_PREFIX)]

    def queue_push(self, key: str, value: str | bytes) -> None:
        self._change(bytes([wire.QUEUE_PUSH]) + _name(key) + _value(value), f"push into the queue {key!r}")

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        deadline = time.monotonic() + self._timeout_s
        request, what = bytes([wire.QUEUE_POP]) + _name(key), f"pop from the queue {key!r}"

        def receive(answer: Connection) -> bytes | None:
            return answer.receive_text() if answer.receive_number() else None

        while True:
            if block:
                self._wait([key], deadline=deadline)
            value = self._request(request, what, receive, is_read=False, deadline=deadline)
            if value is not None:
                return value
            if not block:
                raise QueueEmptyError(f"the queue {key!r} is empty.")

    def queue_len(self, key: str) -> int:
        request = bytes([wire.QUEUE_LEN]) + _name(key)
        return self._request(request, f"get the length of the queue {key!r}", Connection.receive_number)

    def barrier(self, key: str, world_size: int, timeout: Timeout | None = None) -> None:
        limit_s = self._limit_s(timeout)
        self._request(
            bytes([wire.BARRIER]) + _name(key) + wire.I64.pack(world_size),
            f"wait at {key!r}",
            Connection.receive_byte,
            is_read=False,
            deadline=time.monotonic() + limit_s,
            timed_out=self._callers_missing(key, world_size, limit_s),
        )

    # --- requests -----------------------------------------------------------------------------------------------------

    def _wait(self, keys: Sequence[str], timeout: Timeout | None = None, deadline: float | None = None) -> float:
        """Wait until all keys have been set. Return the deadline: now and the timeout, unless one is given."""
        limit_s = self._limit_s(timeout)
        deadline = time.monotonic() + limit_s if deadline is None else deadline
        request, timed_out = bytes([wire.WAIT]) + _names(keys), self._keys_missing(keys, limit_s)
        what = f"wait for {format_keys(keys)}"
        self._request(request, what, Connection.receive_byte, deadline=deadline, timed_out=timed_out)
        return deadline

    def _change(self, request: bytes, what: str) -> None:
        """Send a request without an answer, and a ping, whose answer shows that the request was executed."""
        self._request(request + _PING + b"done", what, lambda answer: answer.receive(4), is_read=False)

    def _request(
        self,
        request: bytes,
        what: str,
        receive: Callable[[Connection], T],
        *,
        is_read: bool = True,
        deadline: float | None = None,
        timed_out: StoreTimeoutError | None = None,
    ) -> T:
        """Send a request and return its answer. ``timed_out`` is the error to raise at the deadline."""
        if deadline is None:
            deadline = time.monotonic() + self._timeout_s
        self._detach_after_fork()

        def attempt() -> T:
            was_connected = self._connection is not None
            try:
                return self._request_once(request, receive, deadline)
            except StoreConnectionError:
                if not (is_read and was_connected):
                    raise
                return self._request_once(request, receive, deadline)

        try:
            return self._mutex.run(attempt, deadline)
        except Busy:
            raise StoreTimeoutError(
                f"timed out: another thread uses {self}; clone the store for each thread."
            ) from None
        except StoreTimeoutError as error:
            raise timed_out or StoreTimeoutError(f"{self}: could not {what}: no answer in time.") from error
        except StoreConnectionError as error:
            raise StoreConnectionError(f"{self}: could not {what}: {error}.") from error

    def _request_once(self, request: bytes, receive: Callable[[Connection], T], deadline: float) -> T:
        if self._is_closed:
            raise StoreConnectionError("this store object is closed")
        try:
            if self._connection is None:
                self._connection = Connection.open(self.host, self.port, deadline, retries=False)
            self._connection.deadline = deadline
            self._connection.send(request)
            return receive(self._connection)
        except BaseException:  # even KeyboardInterrupt: a late answer would be taken for the next request's
            self._drop()
            raise

    def _detach_after_fork(self) -> None:
        """In a forked process, leave the connection to the parent, and replace the lock that a thread may have held."""
        if self._process != os.getpid():
            self._process = os.getpid()
            self._mutex = Mutex()
            if self._connection is not None:
                self._connection.release()
                self._connection = None

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _connect(self, deadline: float) -> None:
        try:
            self._connection = Connection.open(self.host, self.port, deadline, retries=True)
        except StoreTimeoutError as error:
            raise StoreTimeoutError(
                f"could not connect to {self} within {format_seconds(self._timeout_s)}: {error}."
            ) from error
        except StoreConnectionError as error:
            raise StoreConnectionError(f"could not connect to {self}: {error}.") from error

    def _register_worker(self, world_size: int, deadline: float) -> None:
        request = bytes([wire.ADD]) + wire.text(wire.WORKER_COUNT_KEY) + wire.I64.pack(1)
        self._request(request, "register this worker", Connection.receive_number, is_read=False, deadline=deadline)
        if self._server is not None and world_size and not self._server.wait_for_workers(deadline):
            raise StoreTimeoutError(
                f"not all {world_size} workers connected to {self} within {format_seconds(self._timeout_s)}."
            )


def _receive_list(answer: Connection) -> list[bytes]:
    count = answer.receive_number()
    if not 0 <= count <= _MAX_LISTED:
        raise StoreConnectionError(f"the server announced {count} keys")
    return [answer.receive_text() for _ in range(count)]


def _value(value: str | bytes) -> bytes:
    return wire.text(as_bytes(value))


def _name(key: str) -> bytes:
    return wire.text(wire.KEY_PREFIX + as_bytes(key))


def _names(keys: Sequence[str]) -> bytes:
    return wire.texts([wire.KEY_PREFIX + as_bytes(key) for key in keys])
