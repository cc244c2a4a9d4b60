"""Timers through a ``multiprocessing`` queue, with real processes, as TorchElastic's documentation uses them."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kit.processes import leaving_nothing, until
from tenax import timer
from tenax.timer import LocalTimerClient, LocalTimerServer, TimerRequest, TimerServer
from tenax.timer.api import RequestQueue
from tenax.timer.local_timer import MultiprocessingRequestQueue

pytestmark = pytest.mark.process

SPAWN = mp.get_context("spawn")
LONG_S = 3600.0


@pytest.fixture
def queue() -> Iterator[Any]:
    queue = SPAWN.Queue()
    yield queue
    queue.close()
    queue.join_thread()


def hangs(queue: Any) -> None:
    timer.configure(LocalTimerClient(queue))
    with timer.expires(after=0.1):
        while True:
            signal.pause()


def leaves(queue: Any, times: int) -> None:
    timer.configure(LocalTimerClient(queue))
    for _ in range(times):
        with timer.expires(after=60, scope="step"):
            pass


def test_a_process_that_hangs_is_killed_and_others_are_not(queue: Any) -> None:
    """As documented; expiry does not depend on the interval."""
    server = LocalTimerServer(queue, max_interval=LONG_S)
    server.start()
    hanging = SPAWN.Process(target=hangs, args=(queue,))
    leaving = SPAWN.Process(target=leaves, args=(queue, 20))
    for process in (hanging, leaving):
        process.start()
    for process in (hanging, leaving):
        process.join(60)
    assert hanging.exitcode == -signal.SIGKILL
    assert leaving.exitcode == 0
    until(lambda: not server._timers, "the timers to be forgotten")
    server.stop()


def test_stop_is_prompt_and_the_server_can_start_again(queue: Any) -> None:
    """No thread is left, whatever the interval."""
    with leaving_nothing():
        server = LocalTimerServer(queue, max_interval=LONG_S)
        for _ in range(2):
            server.start()
            with pytest.raises(RuntimeError, match="is already started"):
                server.start()
            begun = time.monotonic()
            server.stop()
            assert time.monotonic() - begun < 10
        server.stop()


def test_the_servers_own_process_is_never_killed(queue: Any, caplog: pytest.LogCaptureFixture) -> None:
    server = LocalTimerServer(queue)
    server.start()
    queue.put(TimerRequest(os.getpid(), "own", time.time() - 1))
    until(lambda: "not reaped" in caplog.text, "the log line")
    until(lambda: not server._timers, "the timer to be forgotten")
    server.stop()


def test_timers_are_registered_released_and_cleared(queue: Any) -> None:
    """Without a thread."""
    server = LocalTimerServer(queue)
    server.register_timers([TimerRequest(1, "a", 5.0), TimerRequest(1, "b", 9.0), TimerRequest(2, "a", 5.0)])
    server.register_timers([TimerRequest(2, "a", -1), TimerRequest(3, "never", -1)])
    assert server.get_expired_timers(5.0) == {1: [TimerRequest(1, "a", 5.0)]}
    server.clear_timers({1})
    assert server._timers == {}


def test_a_queue_returns_pending_requests_within_its_timeout(queue: Any) -> None:
    """A timeout of 0 does not wait."""
    requests = MultiprocessingRequestQueue(queue)
    assert requests.get(1, timeout=0) == []
    for number in range(3):
        queue.put(TimerRequest(1, f"scope {number}", 5.0))
    until(lambda: requests.size() == 3, "all of them in the queue")
    assert [request.scope_id for request in requests.get(2, timeout=30)] == ["scope 0", "scope 1"]
    assert [request.scope_id for request in requests.get(1, timeout=30)] == ["scope 2"]
    assert requests.get(5, timeout=0.01) == []


class Listed(RequestQueue):
    """A third-party queue with only the documented methods."""

    def __init__(self, requests: list[TimerRequest]) -> None:
        self.requests = requests
        self.timeouts: set[float] = set()

    def size(self) -> int:
        return len(self.requests)

    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        self.timeouts.add(timeout)
        taken, self.requests = self.requests[:size], self.requests[size:]
        if not taken:
            time.sleep(min(timeout, 0.01))
        return taken


class Reaper(TimerServer):
    """A third-party server that the base class runs."""

    def __init__(self, requests: list[TimerRequest], max_interval: float = LONG_S) -> None:
        self.queue = Listed(requests)
        super().__init__(self.queue, max_interval)
        self.timers: list[TimerRequest] = []
        self.tried: list[int] = []

    def register_timers(self, timer_requests: list[TimerRequest]) -> None:
        self.timers += timer_requests

    def clear_timers(self, worker_ids: set[Any]) -> None:
        self.timers = [request for request in self.timers if request.worker_id not in worker_ids]

    def get_expired_timers(self, deadline: float) -> dict[Any, list[TimerRequest]]:
        return {request.worker_id: [request] for request in self.timers if request.expiration_time <= deadline}

    def _reap_worker(self, worker_id: Any) -> bool:
        self.tried.append(worker_id)
        if worker_id == 2:
            raise OSError("not permitted")
        return worker_id != 3 or self.tried.count(3) > 2


def test_the_base_class_runs_a_third_party_server() -> None:
    """Reaped workers are removed, failed ones retried; stop does not wait for the interval."""
    with leaving_nothing():
        server = Reaper([TimerRequest(worker_id, "step", 1.0) for worker_id in (1, 2, 3)])
        server.start()
        until(lambda: server.tried.count(3) == 3 and not server.timers, "the third try")
        server.stop()
    assert (server.tried.count(1), server.tried.count(2)) == (1, 1)
    assert max(server.queue.timeouts) < 1


def test_an_error_in_a_round_does_not_end_the_server(caplog: pytest.LogCaptureFixture) -> None:
    class Stumbles(Reaper):
        def register_timers(self, timer_requests: list[TimerRequest]) -> None:
            if any(request.scope_id == "bad" for request in timer_requests):
                raise ValueError("a bad request")
            super().register_timers(timer_requests)

    with leaving_nothing():
        server = Stumbles([TimerRequest(7, "bad", 1.0)])
        server.start()
        until(lambda: "a bad request" in caplog.text, "the error in the log")
        server.queue.requests.append(TimerRequest(1, "step", 1.0))
        until(lambda: server.tried == [1], "the next one")
        server.stop()
