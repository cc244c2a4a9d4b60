"""Delivery: whatever a receiver does, the sender goes on, and what was lost is counted and said."""

from __future__ import annotations

import threading

import pytest

from kit.processes import PATIENCE_S
from tenax._io.delivery import Delivery


def test_everything_arrives_in_order_before_close_returns() -> None:
    got: list[object] = []
    delivery = Delivery("the list", got.append)
    for number in range(1000):
        delivery.put(number)
    assert delivery.close(PATIENCE_S) == ""
    assert got == list(range(1000))


def test_nothing_to_deliver_starts_no_thread() -> None:
    before = threading.active_count()
    delivery = Delivery("nobody", print)
    assert threading.active_count() == before
    assert delivery.close() == ""


def test_a_receiver_that_raises_gets_the_next_one_all_the_same() -> None:
    got = []

    def take(thing: int) -> None:
        got.append(thing)
        if thing % 2:
            raise ValueError(f"no odd numbers, not {thing}")

    delivery = Delivery("the metric handler 'even'", take)
    for number in range(4):
        delivery.put(number)
    assert delivery.close(PATIENCE_S) == (
        "the metric handler 'even' failed 2 times (last with ValueError: no odd numbers, not 3)"
    )
    assert got == [0, 1, 2, 3]


def test_a_receiver_that_never_returns_holds_up_nobody() -> None:
    """The sender neither waits nor grows: what does not fit is dropped."""
    entered, may_end = threading.Event(), threading.Event()

    def take(_: object) -> None:
        entered.set()
        may_end.wait(PATIENCE_S)

    delivery = Delivery("the stuck one", take, max_waiting=10)
    delivery.put("first")
    assert entered.wait(PATIENCE_S)
    for number in range(15):
        delivery.put(number)
    assert delivery.dropped == 5
    assert delivery.close(patience_s=0) == "the stuck one was too slow and missed 16"  # with the one in hand
    may_end.set()


def test_after_the_end_nothing_is_taken() -> None:
    delivery = Delivery("the late one", print)
    delivery.close()
    delivery.put("late")
    assert delivery.dropped == 1


def test_the_first_trouble_is_told_once() -> None:
    """When it happens, so that a person can act while the job runs; the count comes at the end."""
    failed = threading.Event()

    def take(_: object) -> None:
        try:
            raise OSError("no route to host")
        finally:
            failed.set()

    delivery = Delivery("the event handler 'far'", take)
    assert delivery.first_trouble() == ""
    delivery.put(1)
    assert failed.wait(PATIENCE_S)
    delivery.close(PATIENCE_S)
    assert delivery.first_trouble() == (
        "the event handler 'far' failed once (last with OSError: no route to host); the job is not affected"
    )
    assert delivery.first_trouble() == ""


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_a_receiver_that_wants_to_leave_is_counted_too(kind: type[BaseException]) -> None:
    """It runs in a thread that is not its own."""

    def take(_: object) -> None:
        raise kind

    delivery = Delivery("the impatient one", take)
    delivery.put(1)
    delivery.put(2)
    assert "failed 2 times" in delivery.close(PATIENCE_S)


def test_the_end_is_told_after_everything_else_and_even_when_there_was_nothing() -> None:
    for things in ([], [1, 2]):
        got: list[object] = []
        delivery = Delivery("the list", got.append, end=lambda got=got: got.append("end"))  # type: ignore[misc]
        for thing in things:
            delivery.put(thing)
        assert delivery.close(PATIENCE_S) == ""
        assert got == [*things, "end"]


def test_a_receiver_that_does_not_end_holds_up_nobody() -> None:
    may_end = threading.Event()
    delivery = Delivery("the slow one", print, end=lambda: may_end.wait(PATIENCE_S))
    assert delivery.close(patience_s=0) == "the slow one did not end in time"
    may_end.set()


def test_a_receiver_that_does_not_return_is_told_while_others_wait() -> None:
    """A person hears of it long before the queue is full; one that is merely slow is nobody's concern."""
    entered, may_end, now = threading.Event(), threading.Event(), [100.0]

    def take(_: object) -> None:
        entered.set()
        may_end.wait(PATIENCE_S)

    delivery = Delivery("the stuck one", take, now=lambda: now[0])
    delivery.put("in hand")
    assert entered.wait(PATIENCE_S)
    now[0] += 60
    assert delivery.first_trouble() == ""  # nobody waits for it
    delivery.put("waits")
    assert delivery.first_trouble() == (
        "the stuck one has not returned from one call for 60 s while 1 more waits; the job is not affected"
    )
    assert delivery.first_trouble() == ""
    may_end.set()
    assert delivery.close(PATIENCE_S) == ""


def test_a_receiver_that_takes_a_moment_is_not_told() -> None:
    """The time counts from the beginning of the present call, not of the first."""
    taken, may_go, now = threading.Semaphore(0), threading.Semaphore(0), [100.0]

    def take(_: object) -> None:
        taken.release()
        may_go.acquire(timeout=PATIENCE_S)

    delivery = Delivery("the slow one", take, now=lambda: now[0])
    for number in range(3):
        delivery.put(number)
    for _ in range(2):
        assert taken.acquire(timeout=PATIENCE_S)
        now[0] += 9
        assert delivery.first_trouble() == ""
        may_go.release()
    may_go.release()
    assert delivery.close(PATIENCE_S) == ""


def test_what_was_said_at_the_end_is_not_counted_twice() -> None:
    entered, may_end = threading.Event(), threading.Event()

    def take(_: object) -> None:
        entered.set()
        may_end.wait(PATIENCE_S)

    delivery = Delivery("the stuck one", take)
    delivery.put("in hand")
    assert entered.wait(PATIENCE_S)
    assert delivery.close(patience_s=0) == delivery.close(patience_s=0) == "the stuck one was too slow and missed 1"
    may_end.set()


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("no\nserver\r\n  there"), "RuntimeError: no server there"),
        (KeyError(), "KeyError"),
    ],
    ids=["several lines", "no words"],
)
def test_what_went_wrong_is_one_line(error: Exception, words: str) -> None:
    """It stands among the lines of the job."""

    def take(_: object) -> None:
        raise error

    delivery = Delivery("the wordy one", take)
    delivery.put(1)
    assert delivery.close(PATIENCE_S) == f"the wordy one failed once (last with {words})"


def test_an_error_that_has_no_words_is_counted_too() -> None:
    """Its text is code of others as well."""

    class Broken(Exception):
        def __str__(self) -> str:
            raise ValueError

    def take(_: object) -> None:
        raise Broken

    delivery = Delivery("the broken one", take)
    delivery.put(1)
    delivery.put(2)
    assert delivery.close(PATIENCE_S) == "the broken one failed 2 times (last with Broken)"
