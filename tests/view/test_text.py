"""Goodput and durations as text."""

from __future__ import annotations

import pytest

from tenax._core.ledger import Goodput, Mean, Spent
from tenax._view.text import cause_text, end_text, format_goodput, kind_of, outcome_label, outcome_text, percent


def test_a_long_run_with_failures_shows_all_parts() -> None:
    """Each part has its share, lost time its steps, and failures their times."""
    spent = Spent(waiting_s=369, starting_s=886, training_s=5756, stopping_s=74, lost_s=295)
    line = format_goodput(Goodput(spent, Mean(2, 0.006), Mean(2, 0.28), 1200))
    assert line == (
        "78 % of 2 h 3 min was training; starting 12 %, waiting 5 %, stopping 1 %, lost 4 % "
        "(1,200 steps repeated); failures detected in 3 ms and recovered in 140 ms on average"
    )


def test_a_short_run_shows_only_the_share_of_training() -> None:
    assert format_goodput(Goodput(Spent(starting_s=0.1, training_s=0.3))) == "75 % of 400 ms was training"


def test_a_short_run_with_a_failure_shows_its_cost() -> None:
    """A single failure has no average, and parts of 0 % are omitted."""
    line = format_goodput(Goodput(Spent(starting_s=1, training_s=3), Mean(1, 0.003), Mean(1, 0.5)))
    assert line == "75 % of 4 s was training; starting 25 %; the failure detected in 3 ms and recovered in 500 ms"


def test_a_failure_that_ended_the_run_has_no_recovery_time() -> None:
    line = format_goodput(Goodput(Spent(training_s=60), Mean(1, 0.01)))
    assert line == "100 % of 1 min was training; the failure detected in 10 ms"


def test_a_detection_time_below_a_millisecond_is_shown_as_such() -> None:
    line = format_goodput(Goodput(Spent(training_s=60), Mean(1, 0.0), Mean(1, 2.0)))
    assert line == "100 % of 1 min was training; the failure detected in < 1 ms and recovered in 2 s"


def test_without_elapsed_time_there_is_no_line() -> None:
    assert format_goodput(Goodput()) == ""


def test_a_run_that_never_trained_shows_zero_percent() -> None:
    assert format_goodput(Goodput(Spent(waiting_s=600))) == "0 % of 10 min was training; waiting 100 %"


def test_repeated_steps_are_shown_even_if_they_took_no_time() -> None:
    line = format_goodput(Goodput(Spent(training_s=100), lost_steps=1))
    assert line == "100 % of 1 min 40 s was training; lost under 1 % (1 step repeated)"


@pytest.mark.parametrize(
    ("part", "text"),
    [(0, "0 %"), (0.1, "under 1 %"), (0.6, "1 %"), (50, "50 %"), (99.97, "99.9 %"), (100, "100 %")],
)
def test_percentages_are_rounded_but_never_to_zero_or_all(part: float, text: str) -> None:
    assert percent(part, 100) == text


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("cuda_out_of_memory", "CUDA out of memory"),
        ("io_error", "I/O error"),
        ("peer_lost", "peer lost"),
        ("not_a_number", "NaN or infinite value"),
        ("RuntimeError", "RuntimeError"),
    ],
)
def test_a_cause_is_shown_as_text(kind: str, text: str) -> None:
    """Ids are for programs."""
    assert cause_text(kind) == text


@pytest.mark.parametrize(
    ("cause", "error_type", "exit_code", "kind"),
    [
        ("exit_code", "", 5, "exit code 5"),
        ("signal", "", -10, "SIGUSR1"),
        ("exception", "ValueError", 1, "ValueError"),
        ("disk_full", "OSError", 1, "disk_full"),
    ],
)
def test_the_kind_of_a_failure_is_specific(cause: str, error_type: str, exit_code: int, kind: str) -> None:
    assert kind_of(cause, error_type, exit_code) == kind


def test_the_end_of_a_generation_is_shown_as_text() -> None:
    assert end_text("loss") == "a node was lost"
    assert end_text("broken") == outcome_text("broken") == outcome_label("broken") == "could not continue"
    assert (outcome_text("cancelled"), outcome_label("cancelled")) == ("was cancelled", "cancelled")
