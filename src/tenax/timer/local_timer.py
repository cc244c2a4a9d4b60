"""Timers for processes started with ``multiprocessing``: requests go through a queue."""

from __future__ import annotations

import logging
import os
import signal
import time
from queue import Empty
from typing import TYPE_CHECKING, Any

from tenax.timer.api import RequestQueue, TimerClient, TimerRequest, TimerServer, TimerTable, signal_worker

if TYPE_CHECKING:
    import multiprocessing as mp

__all__ = ["LocalTimerClient", "LocalTimerServer", "MultiprocessingRequestQueue"]

logger = logging.getLogger(__name__)


class LocalTimerClient(TimerClient):
    """Sends requests through a ``multiprocessing`` queue. The worker id is the pid."""

    def __init__(self, mp_queue: Any) -> None:
        self._mp_queue = mp_queue

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        self._mp_queue.put(TimerRequest(os.getpid(), scope_id, expiration_time))

    def release(self, scope_id: str) -> None:
        self._mp_queue.put(TimerRequest(os.getpid(), scope_id, -1))


class MultiprocessingRequestQueue(RequestQueue):
    """A ``multiprocessing`` queue of requests."""

    def __init__(self, mp_queue: mp.Queue[TimerRequest]) -> None:
        self._mp_queue = mp_queue

    def size(self) -> int:
        return self._mp_queue.qsize()

    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        requests: list[TimerRequest] = []
        deadline = time.monotonic() + timeout
        while len(requests) < size:
            try:
                requests.append(self._mp_queue.get(block=True, timeout=max(0.0, deadline - time.monotonic())))
            except Empty:
                break
        return requests


class LocalTimerServer(TimerTable[TimerRequest], TimerServer):
    """Kills (SIGKILL) the process that does not release its timer in time."""

    def __init__(self, mp_queue: mp.Queue[TimerRequest], max_interval: float = 60, daemon: bool = True) -> None:
        TimerTable.__init__(self)
        TimerServer.__init__(self, MultiprocessingRequestQueue(mp_queue), max_interval, daemon)
        # The queue's pipe, to wait for a request and for the stop together.
        self._reader = getattr(mp_queue, "_reader", None)

    def _wait_for_requests(self) -> list[TimerRequest]:
        if self._reader is None:  # another kind of queue, such as a manager's
            return super()._wait_for_requests()
        from multiprocessing.connection import wait

        ready = wait([self._reader, self._wake_reader], timeout=self._timeout_s())
        if self._reader not in ready or self._stop_signaled:
            return []
        return self._request_queue.get(max(1, self._request_queue.size()), 0)

    def clear_timers(self, worker_ids: set[int]) -> None:
        self._timers = {key: request for key, request in self._timers.items() if key[0] not in worker_ids}
        self._unreaped.difference_update(worker_ids)

    def _reap_worker(self, worker_id: int) -> bool:
        if worker_id <= 0 or worker_id == os.getpid():
            logger.error("process %s is not reaped: it is this server's own process, or not a pid", worker_id)
            return True
        is_done = signal_worker(worker_id, signal.SIGKILL)
        if not is_done:
            self._unreaped.add(worker_id)
        return is_done
