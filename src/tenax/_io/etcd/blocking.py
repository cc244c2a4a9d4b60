"""A blocking etcd client, for stores and tools.

It has its own loop and no thread: one of the waiting threads runs the loop for all of them, and the next takes over
when that thread has its result. So a thread that waits for a change never delays another thread's call. A forked child
gets its own loop and connections.
"""

from __future__ import annotations

import os
from threading import Condition
from typing import Generic, TypeVar

from tenax._core.etcd.errors import EtcdError
from tenax._core.etcd.operations import Change
from tenax._io.etcd.client import PATIENCE_S, EtcdClient
from tenax._io.etcd.watch_stream import WatchStream
from tenax._io.loop import NO_TIMER, Loop

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from tenax._core.etcd.operations import Operation
    from tenax._io.etcd.gateway import Fault
    from tenax._io.etcd.settings import EtcdSettings
    from tenax._io.interfaces import Cancellable

A = TypeVar("A")
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 1.0


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
        waiting = _ChangeWait(self._client, key, end, from_revision, timeout_s, result)

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


class _Result(Generic[A]):
    """The result of one operation of a waiting thread."""

    def __init__(self, condition: Condition) -> None:
        self._condition = condition
        self._answer: A | None = None
        self._error: EtcdError | None = None
        self.is_done = False
        self.on_cancel: Callable[[], None] | None = None

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


class _ChangeWait:
    """A watch that ends with the first change."""

    def __init__(
        self,
        client: EtcdClient,
        key: bytes,
        end: bytes,
        from_revision: int,
        timeout_s: float,
        result: _Result[list[Change]],
    ) -> None:
        self._client = client
        self._range = (key, end, from_revision)
        self._timeout_s = timeout_s
        self._result = result
        self._stream: WatchStream | None = None
        self._limit: Cancellable = NO_TIMER
        self._pause: Cancellable = NO_TIMER
        self._pause_s = _FIRST_PAUSE_S
        self._refusals = 0
        self._trouble: EtcdError | None = None

    def start(self) -> None:
        loop = self._client.loop
        self._limit = loop.at(loop.now() + self._timeout_s, self._timed_out)
        self._watch()

    def _watch(self) -> None:
        self._stream = WatchStream(
            self._client, self._client.preferred_endpoint, *self._range, self._changed, self._ended, self._opened
        )
        self._stream.start()

    def _opened(self) -> None:
        self._trouble = None
        self._pause_s = _FIRST_PAUSE_S
        self._refusals = 0

    def _changed(self, changes: list[Change]) -> None:
        self.close()
        self._result.succeed(changes)

    def _ended(self, fault: Fault) -> None:
        assert self._stream is not None
        endpoint, self._stream = self._stream.endpoint, None
        self._trouble = fault.error(endpoint.name)
        self._client.endpoint_after(endpoint)
        if fault.kind in ("token", "refused", "tls"):
            self._refusals += 1
        if fault.kind in ("again", "token", "refused", "tls") and self._refusals <= self._client.endpoint_count:
            self._pause = self._client.loop.at(self._client.loop.now() + self._pause_s, self._watch)
            self._pause_s = min(_LONGEST_PAUSE_S, self._pause_s * 2)
        else:
            self.close()
            self._result.fail(self._trouble)

    def _timed_out(self) -> None:
        self.close()
        if self._trouble is None:
            self._result.succeed([])
        else:
            self._result.fail(self._trouble)

    def close(self) -> None:
        self._limit.cancel()
        self._pause.cancel()
        if self._stream is not None:
            self._stream.close()
            self._stream = None
