"""A blocking etcd client, for stores and tools.

It has its own loop and no thread: one of the waiting threads runs the loop for all of them, and the next takes over
when that thread has its result. So a thread that waits for a change never delays another thread's call. A forked child
gets its own loop and connections.
"""

from __future__ import annotations

import os
from threading import Condition
from typing import Generic, TypeVar

import msgspec

from tenax._core.etcd.errors import EtcdError, EtcdUnavailable
from tenax._io.etcd.client import PATIENCE_S, EtcdClient
from tenax._io.etcd.subscription import Subscription
from tenax._io.loop import NO_TIMER, Loop

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

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
        self._pid = os.getpid()
        self._loop = Loop()
        self._client = EtcdClient(self._loop, self._settings)
        self._condition = Condition()
        self._is_loop_running = False
        self._is_closed = False

    def call(self, operation: Operation[A], patience_s: float | None = None) -> A:
        """Return the answer. Raises EtcdError."""
        result: _Result[A] = _Result(self._condition_in_this_process())
        patience = self._patience_s if patience_s is None else patience_s
        client = self._client

        def start() -> None:
            result.on_cancel = client.call(operation, result.succeed, result.fail, patience_s=patience).cancel

        return self._wait(start, result)

    def wait_for_change(self, key: bytes, end: bytes, from_revision: int, timeout_s: float) -> list[Change]:
        """Return the next changes from that revision on, or none after ``timeout_s``. Raises EtcdError."""
        result: _Result[list[Change]] = _Result(self._condition_in_this_process())
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
        condition = self._condition_in_this_process()
        with condition:
            if self._is_closed:
                return
            self._is_closed = True
            self._loop.wake()
            condition.notify_all()
            condition.wait_for(lambda: not self._is_loop_running)
            self._client.close()
            self._loop.close()

    # --- the loop -----------------------------------------------------------------------------------------------------

    def _condition_in_this_process(self) -> Condition:
        if self._pid != os.getpid():
            self._open()
        return self._condition

    def _wait(self, start: Callable[[], None], result: _Result[A]) -> A:
        condition = self._condition
        with condition:
            if self._is_closed:
                raise EtcdError("this etcd client is closed")
            self._loop.soon(start)
            try:
                while not result.is_done and not self._is_closed:
                    if self._is_loop_running:
                        condition.wait()
                    else:
                        self._run_until(result, condition)
            except BaseException:  # such as KeyboardInterrupt
                self._loop.soon(result.cancel)
                raise
        return result.get()

    def _run_until(self, result: _Result[A], condition: Condition) -> None:
        """Run the loop with the lock released."""
        self._is_loop_running = True
        condition.release()
        try:
            self._loop.next_event(lambda: 0.0 if result.is_done or self._is_closed else None)
        finally:
            condition.acquire()
            self._is_loop_running = False
            condition.notify_all()


class _Result(msgspec.Struct, Generic[A], eq=False):
    """The result of one operation of a waiting thread."""

    _condition: Condition
    _answer: A | None = None
    _error: EtcdError | None = None
    is_done: bool = False
    on_cancel: Callable[[], None] | None = None

    def succeed(self, answer: A) -> None:
        self._answer = answer
        self._finish()

    def fail(self, error: EtcdError) -> None:
        self._error = error
        self._finish()

    def _finish(self) -> None:
        with self._condition:
            self.is_done = True
            self._condition.notify_all()

    def get(self) -> A:
        if self._error is not None:
            raise self._error
        if not self.is_done:
            raise EtcdError("this etcd client was closed during the call")
        return self._answer  # type: ignore[return-value]

    def cancel(self) -> None:
        if self.on_cancel is not None and not self.is_done:
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
