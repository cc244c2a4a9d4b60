"""BackgroundQueue: no handler can block the sender, and every loss is counted and reported."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from kit.processes import INTERRUPTS, TIMEOUT_S
from tenax._io.background_queue import BackgroundQueue


def test_close_waits_until_all_items_were_handled_in_order() -> None:
    received: list[object] = []
    queue = BackgroundQueue("the list", received.append)
    for number in range(1000):
        queue.put(number)
    assert queue.close(TIMEOUT_S) == ""
    assert received == list(range(1000))


def test_no_thread_starts_before_the_first_item() -> None:
    before = threading.active_count()
    queue = BackgroundQueue("unused", print)
    assert threading.active_count() == before
    assert queue.close() == ""


def test_a_handler_that_raises_gets_the_next_item() -> None:
    received = []

    def take(item: int) -> None:
        received.append(item)
        if item % 2:
            raise ValueError(f"no odd numbers, not {item}")

    queue = BackgroundQueue("the metric handler 'even'", take)
    for number in range(4):
        queue.put(number)
    assert queue.close(TIMEOUT_S) == (
        "the metric handler 'even' failed 2 times (last error: ValueError: no odd numbers, not 3)"
    )
    assert received == [0, 1, 2, 3]


def test_a_handler_that_never_returns_does_not_block_the_sender() -> None:
    """Items that do not fit into the queue are dropped."""
    entered, may_end = threading.Event(), threading.Event()

    def take(_: object) -> None:
        entered.set()
        may_end.wait(TIMEOUT_S)

    queue = BackgroundQueue("the stuck handler", take, max_waiting=10)
    queue.put("first")
    assert entered.wait(TIMEOUT_S)
    for number in range(15):
        queue.put(number)
    assert queue.dropped == 5
    assert queue.close(timeout_s=0) == "the stuck handler was too slow (16 dropped)"  # including the current one
    may_end.set()


def test_items_after_close_are_dropped() -> None:
    queue = BackgroundQueue("the closed handler", print)
    queue.close()
    queue.put("late")
    assert queue.dropped == 1


def test_the_first_problem_is_reported_once() -> None:
    """While the job runs; the total is reported at the end."""
    failed = threading.Event()

    def take(_: object) -> None:
        try:
            raise OSError("no route to host")
        finally:
            failed.set()

    queue = BackgroundQueue("the event handler 'far'", take)
    assert queue.first_problem() == ""
    queue.put(1)
    assert failed.wait(TIMEOUT_S)
    queue.close(TIMEOUT_S)
    assert queue.first_problem() == (
        "the event handler 'far' failed once (last error: OSError: no route to host); the job is not affected"
    )
    assert queue.first_problem() == ""


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_exit_requests_of_a_handler_count_as_failures(kind: type[BaseException]) -> None:
    def take(_: object) -> None:
        raise kind

    queue = BackgroundQueue("the exiting handler", take)
    queue.put(1)
    queue.put(2)
    assert "failed 2 times" in queue.close(TIMEOUT_S)


def test_the_end_function_is_called_last_even_without_items() -> None:
    for items in ([], [1, 2]):
        received: list[object] = []
        queue = BackgroundQueue("the list", received.append, end=lambda received=received: received.append("end"))  # type: ignore[misc]
        for item in items:
            queue.put(item)
        assert queue.close(TIMEOUT_S) == ""
        assert received == [*items, "end"]


def test_a_handler_that_does_not_close_is_not_waited_for() -> None:
    may_end = threading.Event()
    queue = BackgroundQueue("the slow handler", print, end=lambda: may_end.wait(TIMEOUT_S))
    assert queue.close(timeout_s=0) == "the slow handler did not close in time"
    may_end.set()


def test_a_hanging_call_is_reported_while_items_wait() -> None:
    """Long before the queue is full."""
    entered, may_end, now = threading.Event(), threading.Event(), [100.0]

    def take(_: object) -> None:
        entered.set()
        may_end.wait(TIMEOUT_S)

    queue = BackgroundQueue("the stuck handler", take, now=lambda: now[0])
    queue.put("current")
    assert entered.wait(TIMEOUT_S)
    now[0] += 60
    assert queue.first_problem() == ""  # the queue is empty
    queue.put("next")
    assert queue.first_problem() == (
        "the stuck handler has not returned from a call for 1 min (1 waiting); the job is not affected"
    )
    assert queue.first_problem() == ""
    may_end.set()
    assert queue.close(TIMEOUT_S) == ""


def test_a_slow_handler_is_not_reported_as_hanging() -> None:
    """The time counts from the start of the current call, not of the first."""
    taken, may_go, now = threading.Semaphore(0), threading.Semaphore(0), [100.0]

    def take(_: object) -> None:
        taken.release()
        may_go.acquire(timeout=TIMEOUT_S)

    queue = BackgroundQueue("the slow handler", take, now=lambda: now[0])
    for number in range(3):
        queue.put(number)
    for _ in range(2):
        assert taken.acquire(timeout=TIMEOUT_S)
        now[0] += 9
        assert queue.first_problem() == ""
        may_go.release()
    may_go.release()
    assert queue.close(TIMEOUT_S) == ""


def test_closing_twice_counts_losses_once() -> None:
    entered, may_end = threading.Event(), threading.Event()

    def take(_: object) -> None:
        entered.set()
        may_end.wait(TIMEOUT_S)

    queue = BackgroundQueue("the stuck handler", take)
    queue.put("current")
    assert entered.wait(TIMEOUT_S)
    assert queue.close(timeout_s=0) == queue.close(timeout_s=0) == "the stuck handler was too slow (1 dropped)"
    may_end.set()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("no\nserver\r\n  there"), "RuntimeError: no server there"),
        (KeyError(), "KeyError"),
    ],
    ids=["several lines", "no text"],
)
def test_an_error_is_reported_on_one_line(error: Exception, expected: str) -> None:
    def take(_: object) -> None:
        raise error

    queue = BackgroundQueue("the raising handler", take)
    queue.put(1)
    assert queue.close(TIMEOUT_S) == f"the raising handler failed once (last error: {expected})"


def test_an_error_whose_str_raises_is_counted() -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise ValueError

    def take(_: object) -> None:
        raise Broken

    queue = BackgroundQueue("the broken handler", take)
    queue.put(1)
    queue.put(2)
    assert queue.close(TIMEOUT_S) == "the broken handler failed 2 times (last error: Broken)"


_INTERRUPTED = """
from tenax._io.background_queue import BackgroundQueue

put, received = 0, []
queue = BackgroundQueue("the list", received.append, max_waiting=10**9)
queue.put(0)

def put_next():
    global put
    queue.put(put)
    put += 1

interrupt_often(500, 0.0002, put_next)
print(repr(queue.close(60)), set(range(put)) <= set(received))
"""


@pytest.mark.process
def test_a_signal_handler_may_raise_at_any_moment_of_a_put() -> None:
    """Every item whose ``put`` returned is handled."""
    command = [sys.executable, "-c", INTERRUPTS + _INTERRUPTED]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=False)
    assert done.stdout == "'' True\n"
