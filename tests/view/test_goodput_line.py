"""Goodput in words: one line for people, whatever the run was like."""

from __future__ import annotations

import pytest

from tenax._core.ledger import Goodput, Mean, Spent
from tenax._view.goodput_text import duration_in_words, goodput_in_words, percent


def test_a_long_run_with_failures() -> None:
    """Every part has its share, what was lost has its steps, and failures have their times."""
    spent = Spent(waiting_s=369, starting_s=886, training_s=5756, stopping_s=74, lost_s=295)
    line = goodput_in_words(Goodput(spent, Mean(2, 0.006), Mean(2, 0.28), 1200))
    assert line == (
        "78 % of 2 h 3 min was training; starting 12 %, waiting 5 %, stopping 1 %, lost 4 % "
        "(1,200 steps repeated); failures detected in 3 ms and recovered in 140 ms on average"
    )


def test_a_short_run_is_short() -> None:
    """Nobody wants to read percentages of a second."""
    assert goodput_in_words(Goodput(Spent(starting_s=0.1, training_s=0.3))) == "75 % of 400 ms was training"


def test_a_short_run_with_a_failure_says_what_it_cost() -> None:
    """One failure has no average, and a part of nothing is not named."""
    line = goodput_in_words(Goodput(Spent(starting_s=1, training_s=3), Mean(1, 0.003), Mean(1, 0.5)))
    assert line == "75 % of 4.0 s was training; starting 25 %; the failure detected in 3 ms and recovered in 500 ms"


def test_a_failure_that_ended_the_run() -> None:
    """It was detected, and nothing was recovered."""
    line = goodput_in_words(Goodput(Spent(training_s=60), Mean(1, 0.01)))
    assert line == "100 % of 1 min was training; the failure detected in 10 ms"


def test_a_failure_that_was_seen_at_once() -> None:
    """Zero milliseconds are a figure of no use."""
    line = goodput_in_words(Goodput(Spent(training_s=60), Mean(1, 0.0), Mean(1, 2.0)))
    assert line == "100 % of 1 min was training; the failure detected in < 1 ms and recovered in 2.0 s"


def test_no_time_is_no_line() -> None:
    """Nothing odd is said of nothing."""
    assert goodput_in_words(Goodput()) == ""


def test_a_run_that_never_trained() -> None:
    """Zero percent is a fact, and where the time went is another."""
    assert goodput_in_words(Goodput(Spent(waiting_s=600))) == "0 % of 10 min was training; waiting 100 %"


def test_steps_that_cost_no_time_are_named() -> None:
    """One step that was done again."""
    line = goodput_in_words(Goodput(Spent(training_s=100), lost_steps=1))
    assert line == "100 % of 1 min 40 s was training; lost under 1 % (1 step repeated)"


@pytest.mark.parametrize(
    ("part", "said"),
    [(0, "0 %"), (0.1, "under 1 %"), (0.6, "1 %"), (50, "50 %"), (99.97, "99.9 %"), (100, "100 %")],
)
def test_shares(part: float, said: str) -> None:
    """Nearly nothing is not nothing, and nearly all is not all."""
    assert percent(part, 100) == said


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (-1, "0 ms"),
        (0, "0 ms"),
        (0.003, "3 ms"),
        (0.0999, "100 ms"),
        (0.9996, "1.0 s"),
        (9.96, "10 s"),
        (59.7, "1 min"),
        (123, "2 min 3 s"),
        (3599.6, "1 h"),
        (7380, "2 h 3 min"),
        (86399, "1 d"),
        (3 * 86400 + 4 * 3600, "3 d 4 h"),
    ],
)
def test_durations(seconds: float, said: str) -> None:
    """Two units at most, and rounding never makes sixty seconds."""
    assert duration_in_words(seconds) == said
