"""A blocking etcd client, for stores and tools.

Its loop runs in a thread of its own. So a thread that waits for a change never delays another thread's call, and an
exception that a signal handler raises in a waiting thread never interrupts the loop. A forked child gets its own loop,
thread and connections.
"""

from __future__ import annotations

import os
from _thread import allocate_lock, start_new_thread  # ``Thread.start`` waits for a lock, which a signal may interrupt
from contextlib import suppress
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
    from tenax._io.etcd.client import Failed
    from tenax._io.etcd.gateway import Fault
    from tenax._io.etcd.settings import EtcdSettings
    from tenax._io.interfaces import Cancellable

    Start = Callable[[Callable[["A"], None], Failed], Callable[[], None]]

A = TypeVar("A")


class BlockingEtcd:
    """A thread-safe, blocking etcd client. Its thread and its connections end when it is closed or no longer used."""

    def __init__(self, settings: EtcdSettings, patience_s: float = PATIENCE_S) -> None:
        self._settings = settings
        self._patience_s = patience_s
        self._reopening = allocate_lock()
        self._own_session = _Session(settings)

    def call(self, operation: Operation[A], patience_s: float | None = None) -> A:
        """Return the answer. Raises EtcdError."""
        patience = self._patience_s if patience_s is None else patience_s
        session = self._session

        def start(done: Callable[[A], None], failed: Failed) -> Callable[[], None]:
            return session.client.call(operation, done, failed, patience_s=patience).cancel

        return session.wait(start)

    def wait_for_change(self, key: bytes, end: bytes, from_revision: int, timeout_s: float) -> list[Change]:
        """Return the next changes from that revision on, or none after ``timeout_s``. Raises EtcdError."""
        session = self._session

        def start(done: Callable[[list[Change]], None], failed: Failed) -> Callable[[], None]:
            waiting = _ChangeWait(
                session.client, key, end, lambda _: None, done, failed, next_revision=from_revision, timeout_s=timeout_s
            )
            waiting.start()
            return waiting.close

        return session.wait(start)

    @property
    def trouble(self) -> str:
        """The latest failures, as text; empty if the last call succeeded."""
        return self._own_session.client.trouble

    def local_address(self) -> str:
        """Return this host's address on the last connection that worked, or ""."""
        return self._own_session.client.local_address()

    def close(self) -> None:
        """Close the client. Calls of other threads fail."""
        session = self._session
        session.stop()
        session.ended.wait()

    def __del__(self) -> None:
        if hasattr(self, "_own_session"):
            self._own_session.stop()

    @property
    def _session(self) -> _Session:
        """The session of this process: a forked process gets its own."""
        session = self._own_session
        if session.pid == os.getpid():
            return session
        with self._reopening:
            if self._own_session is session:
                self._own_session = _Session(self._settings)
                with suppress(Exception):  # the parent's thread may have been changing it
                    session.client.close()
        return self._own_session


class _Session:
    """The loop and the connections of one process, and the thread that runs them until ``stop``."""

    def __init__(self, settings: EtcdSettings) -> None:
        self.pid = os.getpid()
        self._loop = Loop()
        self.client = EtcdClient(self._loop, settings)
        self.ended = Latch()
        self._is_stopping = False
        self._waiting: set[_Result[Any]] = set()
        start_new_thread(self._run, ())

    def wait(self, start: Start[A]) -> A:
        """Call ``start`` in the loop, and wait for the result. ``start`` returns the function that cancels."""
        result: _Result[A] = _Result()
        soon = self._loop.soon
        self._waiting.add(result)  # before the check: ``_run`` does the two in the other order
        try:
            if not self._is_stopping:
                soon(lambda: result.begin(start))
                result.ended.wait()
        except BaseException:  # such as KeyboardInterrupt
            soon(result.cancel)
            raise
        finally:
            self._waiting.discard(result)
        return result.get()

    def stop(self) -> None:
        """Let the thread end, and with it all calls. Does not wait."""
        if not self._is_stopping and self.pid == os.getpid():
            self._is_stopping = True
            self._loop.soon(lambda: None)  # wakes the thread up

    def _run(self) -> None:
        try:
            self._loop.next_event(lambda: 0.0 if self._is_stopping else None)
        finally:
            self._is_stopping = True
            self.client.close()
            self._loop.close()
            for result in list(self._waiting):
                result.ended.open()
            self.ended.open()


class _Result(msgspec.Struct, Generic[A], eq=False):
    ended: Latch = msgspec.field(default_factory=Latch)
    _answer: A | None = None
    _error: Exception | None = None
    is_done: bool = False
    on_cancel: Callable[[], None] | None = None

    def succeed(self, answer: A) -> None:
        self._answer = answer
        self._finish()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._finish()

    def _finish(self) -> None:
        self.is_done = True
        self.ended.open()

    def get(self) -> A:
        if self._error is not None:
            raise self._error
        if not self.is_done:
            raise EtcdError("this etcd client is closed")
        return self._answer  # type: ignore[return-value]

    def begin(self, start: Start[A]) -> None:
        try:
            self.on_cancel = start(self.succeed, self.fail)
        except Exception as error:  # the caller's: an argument of the wrong type
            self.fail(error)

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
