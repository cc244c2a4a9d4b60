"""A blocking etcd client, for stores and tools.

Its loop runs in a thread, where no signal handler runs: an exception that a handler raises ends the call that it
interrupts, and never cuts off the answer to another one. A thread that waits for a change does not delay another
thread's call. A forked child gets its own thread, loop and connections.
"""

from __future__ import annotations

import os
import threading
from typing import Generic, TypeVar

import msgspec

from tenax._core.etcd.errors import EtcdError, EtcdUnavailable
from tenax._io.etcd.client import PATIENCE_S, EtcdClient
from tenax._io.etcd.subscription import Subscription
from tenax._io.latch import Latch
from tenax._io.loop import NO_TIMER, Loop

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from tenax._core.etcd.operations import Change, Operation
    from tenax._io.etcd.gateway import Fault
    from tenax._io.etcd.settings import EtcdSettings
    from tenax._io.interfaces import Cancellable

A = TypeVar("A")


class BlockingEtcd:
    """A thread-safe, blocking etcd client."""

    def __init__(self, settings: EtcdSettings, patience_s: float = PATIENCE_S) -> None:
        self._settings = settings
        self._patience_s = patience_s
        self._open()

    def _open(self) -> None:
        self._loop = Loop()
        self._client = EtcdClient(self._loop, self._settings)
        self._results: set[_Result[Any]] = set()  # of the calls in progress
        self._is_closed = False
        self._ended = Latch()
        threading.Thread(target=self._run, name="tenax etcd client", daemon=True).start()
        self._pid = os.getpid()

    def call(self, operation: Operation[A], patience_s: float | None = None) -> A:
        """Return the answer. Raises EtcdError."""
        self._open_after_fork()
        result: _Result[A] = _Result()
        patience = self._patience_s if patience_s is None else patience_s
        client = self._client

        def start() -> None:
            result.on_cancel = client.call(operation, result.succeed, result.fail, patience_s=patience).cancel

        return self._wait(start, result)

    def wait_for_change(self, key: bytes, end: bytes, from_revision: int, timeout_s: float) -> list[Change]:
        """Return the next changes from that revision on, or none after ``timeout_s``. Raises EtcdError."""
        self._open_after_fork()
        result: _Result[list[Change]] = _Result()
        done, failed = result.succeed, result.fail
        waiting = _ChangeWait(
            self._client, key, end, lambda _: None, done, failed, next_revision=from_revision, timeout_s=timeout_s
        )

        def start() -> None:
            result.on_cancel = waiting.close
            waiting.start()

        return self._wait(start, result)

    @property
    def trouble(self) -> str:
        """The latest failures, as text; empty if the last call succeeded."""
        return self._client.trouble

    def local_address(self) -> str:
        """Return this host's address on the last connection that worked, or ""."""
        return self._client.local_address()

    def close(self) -> None:
        """Close the client. Calls of other threads fail."""
        self._open_after_fork()
        self._is_closed = True
        self._loop.soon(lambda: None)  # wakes it
        self._ended.wait()

    def _open_after_fork(self) -> None:
        if self._pid != os.getpid():
            self._open()

    def _wait(self, start: Callable[[], None], result: _Result[A]) -> A:
        self._results.add(result)
        try:
            if self._is_closed:  # checked last: from now on, the thread ends this call too
                raise EtcdError("this etcd client is closed")
            self._loop.soon(lambda: result.run(start))
            result.done.wait()
        except BaseException:  # such as KeyboardInterrupt
            self._loop.soon(result.cancel)
            raise
        finally:
            self._results.discard(result)
        return result.get()

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop.next_event(lambda: 0.0 if self._is_closed else None)
        finally:
            self._is_closed = True
            self._client.close()
            self._loop.close()
            for result in list(self._results):
                result.fail(EtcdError("this etcd client was closed during the call"))
            self._ended.open()


class _Result(msgspec.Struct, Generic[A], eq=False):
    """The result of one operation of a waiting thread."""

    done: Latch = msgspec.field(default_factory=Latch)
    on_cancel: Callable[[], None] | None = None
    _answer: A | None = None
    _error: Exception | None = None

    def run(self, start: Callable[[], None]) -> None:
        try:
            start()
        except Exception as error:  # the caller's: an argument of the wrong type
            self.fail(error)

    def succeed(self, answer: A) -> None:
        self._answer = answer
        self.done.open()

    def fail(self, error: Exception) -> None:
        if not self.done.is_open:
            self._error = error
            self.done.open()

    def get(self) -> A:
        if self._error is not None:
            raise self._error
        return self._answer  # type: ignore[return-value]

    def cancel(self) -> None:
        if self.on_cancel is not None and not self.done.is_open:
            self.on_cancel()


class _ChangeWait(Subscription, eq=False):
    """A watch that ends with the first change, a final error, or after ``timeout_s``."""

    timeout_s: float = 0.0
    _limit: Cancellable = NO_TIMER
    _trouble: EtcdError | None = None  # why there is no open stream

    def start(self) -> None:
        loop = self._client.loop
        self._limit = loop.at(loop.now() + self.timeout_s, self._timed_out)
        self._watch()

    def _resume(self) -> None:
        self._watch()

    def _stream_opened(self) -> None:
        super()._stream_opened()
        self._trouble = None

    def _take(self, changes: list[Change]) -> None:
        self.close()
        self._changed(changes)

    def _stream_ended(self, fault: Fault) -> None:
        assert self._stream is not None
        self._trouble = fault.error(self._stream.endpoint.name)
        super()._stream_ended(fault)

    def _fail(self, error: EtcdError) -> None:
        if isinstance(error, EtcdUnavailable):
            self._resume_later()
        else:
            self.close()
            self._troubled(error)

    def _timed_out(self) -> None:
        self.close()
        if self._trouble is None:
            self._changed([])
        else:
            self._troubled(self._trouble)

    def close(self) -> None:
        super().close()
        self._limit.cancel()
