"""Timers: requests, the clients that send them, the queues that carry them and the servers that act on them.

A client acquires a timer for a scope and releases it; a server ends the worker that does not release it in time. The
meaning of ``worker_id`` is defined by the client and its server.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Generic, TypeVar

__all__ = ["RequestQueue", "TimerClient", "TimerRequest", "TimerServer", "configure", "expires"]

logger = logging.getLogger(__name__)

# A third-party queue can only be polled. A server that stops waits at most this long for the poll to return.
_MAX_POLL_S = 0.25
_MAX_WAIT_S = 86_400.0  # some systems do not support longer timeouts
_RETRY_S = 1.0  # until the next attempt to kill a process that cannot be signalled


class TimerRequest:
    """Acquires the timer of a scope, or releases it if ``expiration_time`` is negative."""

    def __init__(self, worker_id: Any, scope_id: str, expiration_time: float) -> None:
        self.worker_id = worker_id
        self.scope_id = scope_id
        self.expiration_time = expiration_time

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TimerRequest) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.worker_id!r}, {self.scope_id!r}, {self.expiration_time!r})"


AnyRequest = TypeVar("AnyRequest", bound=TimerRequest)


class TimerClient(ABC):
    """Acquires and releases timers for its own process."""

    @abstractmethod
    def acquire(self, scope_id: str, expiration_time: float) -> None:
        """Start a timer: this process must leave the scope before ``expiration_time`` (epoch seconds)."""

    @abstractmethod
    def release(self, scope_id: str) -> None:
        """End the timer: this process has left the scope."""


class RequestQueue(ABC):
    """The source of a server's requests."""

    @abstractmethod
    def size(self) -> int:
        """Return a lower bound of the number of requests. Only ``get`` decreases it."""

    @abstractmethod
    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        """Return up to ``size`` requests, waiting for at most ``timeout`` seconds."""


class TimerTable(Generic[AnyRequest]):
    """The timers of a server, by worker and scope."""

    _max_interval: float

    def __init__(self) -> None:
        self._timers: dict[tuple[Any, str], AnyRequest] = {}
        self._unreaped: set[Any] = set()  # workers that could not be signalled in the last round

    def register_timers(self, timer_requests: list[AnyRequest]) -> None:
        for request in timer_requests:
            key = (request.worker_id, request.scope_id)
            if request.expiration_time < 0:
                self._timers.pop(key, None)
            else:
                self._timers[key] = request

    def get_expired_timers(self, deadline: float) -> dict[Any, list[AnyRequest]]:
        """Return by worker the timers that expire at the deadline or earlier."""
        expired: dict[Any, list[AnyRequest]] = {}
        for request in self._timers.values():
            if request.expiration_time <= deadline:
                expired.setdefault(request.worker_id, []).append(request)
        return expired

    def _timeout_s(self) -> float:
        """Return the time until the first timer expires, within the limits."""
        first = min(
            (each.expiration_time for each in self._timers.values() if each.worker_id not in self._unreaped),
            default=float("inf"),
        )
        longest = min(self._max_interval, _RETRY_S if self._unreaped else _MAX_WAIT_S)
        return max(0.0, min(longest, first - time.time()))


def signal_worker(pid: int, number: int) -> bool:
    """Return whether the process was signalled or has already exited."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        logger.info("process %s has already exited", pid)
    except OSError:
        logger.exception("could not kill process %s with signal %s", pid, number)
        return False
    return True


class WatchdogThread:
    """Checks timers in a thread until it is stopped. For its arguments see ``TimerServer``."""

    def __init__(self, max_interval: float, daemon: bool) -> None:
        self._max_interval = max_interval
        self._daemon = daemon
        self._watchdog_thread: threading.Thread | None = None
        self._stop_signaled = False
        self._wake_reader = self._wake_writer = -1  # a pipe that becomes readable when the server is stopped

    def start(self) -> None:
        if self._watchdog_thread is not None:
            raise RuntimeError(f"this {type(self).__name__} is already started; stop it first")
        self._stop_signaled = False
        self._wake_reader, self._wake_writer = os.pipe()
        self._watchdog_thread = threading.Thread(
            target=self._watchdog_loop, name=f"tenax {type(self).__name__}", daemon=self._daemon
        )
        self._watchdog_thread.start()

    def stop(self) -> None:
        """Stop the thread and wait for its end."""
        self._stop_signaled = True
        thread, self._watchdog_thread = self._watchdog_thread, None
        if thread is not None:
            os.write(self._wake_writer, b"\0")
            thread.join()
            os.close(self._wake_reader)
            os.close(self._wake_writer)

    def _watchdog_loop(self) -> None:
        while not self._stop_signaled:
            try:
                self._run_watchdog()
            except Exception:
                # One bad request must not end the watching of all processes.
                logger.exception("%s could not check its timers", type(self).__name__)

    def _run_watchdog(self) -> None:
        """Wait for requests until the next timer expires, and reap the workers whose timers have."""
        raise NotImplementedError


class TimerServer(WatchdogThread, ABC):
    """Watches timers in a thread and reaps the workers whose timers expire.

    ``max_interval``: the maximum wait for a request between two checks of the timers. ``daemon``: whether the program
    may exit while the thread runs.
    """

    def __init__(self, request_queue: RequestQueue, max_interval: float, daemon: bool = True) -> None:
        super().__init__(max_interval, daemon)
        self._request_queue = request_queue

    @abstractmethod
    def register_timers(self, timer_requests: list[TimerRequest]) -> None:
        """Register these requests: acquisitions, and releases (a negative expiration time)."""

    @abstractmethod
    def clear_timers(self, worker_ids: set[Any]) -> None:
        """Remove the timers of these workers."""

    @abstractmethod
    def get_expired_timers(self, deadline: float) -> dict[str, list[TimerRequest]]:
        """Return by worker the timers that expire at the deadline or earlier."""

    @abstractmethod
    def _reap_worker(self, worker_id: Any) -> bool:
        """End this worker. Return False to retry later. An exception counts as done."""

    def _run_watchdog(self) -> None:
        self.register_timers(self._wait_for_requests())
        reaped = set()
        for worker_id, expired in self.get_expired_timers(time.time()).items():
            scopes = [request.scope_id for request in expired]
            logger.info("reaping worker %s: it did not leave %s in time", worker_id, scopes)
            if self._reap_worker_no_throw(worker_id):
                reaped.add(worker_id)
            else:
                logger.error("could not reap worker %s; retrying", worker_id)
        self.clear_timers(reaped)

    def _wait_for_requests(self) -> list[TimerRequest]:
        batch = max(1, self._request_queue.size())
        return self._request_queue.get(batch, min(self._max_interval, _MAX_POLL_S))

    def _reap_worker_no_throw(self, worker_id: Any) -> bool:
        try:
            return self._reap_worker(worker_id)
        except Exception:
            logger.exception("could not reap worker %s; giving up", worker_id)
            return True


_timer_client: TimerClient | None = None


def configure(timer_client: TimerClient) -> None:
    """Set the client that ``expires`` uses in this process."""
    global _timer_client  # noqa: PLW0603 - one per process, as in TorchElastic
    _timer_client = timer_client


def expires(after: float, scope: str | None = None, client: TimerClient | None = None) -> AbstractContextManager[None]:
    """``with expires(after=60): ...``: end this process unless it leaves the block within this number of seconds.

    ``scope``: name of the block; None: file and line of the call. ``client``: None: the configured one.
    """
    if scope is None:
        caller = sys._getframe(1)
        scope = f"{caller.f_code.co_filename}#{caller.f_lineno}"
    return _held(after, scope, client)


# Deadlines of the open blocks, by process, client and scope: blocks of one name share one timer. An open block holds
# its client, so no other client has the same id().
_open: dict[tuple[int, int, str], list[float]] = {}
# Held while a request is sent, so that requests are sent in order. Reentrant: a signal handler may enter a block while
# its thread is entering one.
_lock = threading.RLock()


def _new_lock() -> None:
    """In a forked child, the thread that held the old lock does not exist."""
    global _lock  # noqa: PLW0603
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_new_lock)


@contextmanager
def _held(after: float, scope: str, client: TimerClient | None) -> Iterator[None]:
    used = client if client is not None else _timer_client
    if used is None:
        raise RuntimeError("no timer client is configured; call tenax.timer.configure(client) first, or pass client=")
    deadline = time.time() + after
    try:
        _enter(used, scope, deadline)
        yield
    finally:
        try:
            _leave(used, scope, deadline)
        except BaseException:  # a signal handler may have raised it before the release was sent
            _leave(used, scope, deadline)
            raise


def _enter(client: TimerClient, scope: str, deadline: float) -> None:
    """Acquire the timer if this deadline is the earliest of its name."""
    with _lock:
        deadlines = _open.setdefault((os.getpid(), id(client), scope), [])
        is_earliest = not deadlines or deadline < min(deadlines)
        deadlines.append(deadline)
        if is_earliest:
            client.acquire(scope, deadline)


def _leave(client: TimerClient, scope: str, deadline: float) -> None:
    """Release the timer, or acquire it for the next deadline. May be repeated."""
    key = (os.getpid(), id(client), scope)
    with _lock:
        left = _open.get(key, [])
        if deadline in left:  # else a forked child leaves a block that only its parent entered
            left.remove(deadline)
        if not left:
            _open.pop(key, None)
            client.release(scope)
        elif deadline < min(left):
            client.acquire(scope, min(left))
