"""The exit code of a run: every row of the table."""

from __future__ import annotations

import pytest

from tenax._core.model import Failure, Outcome, Verdict
from tenax._failures import exit_codes
from tenax._failures.exit_codes import exit_code_for


def failed(*codes: int) -> Verdict:
    failures = tuple(Failure(1, rank, rank, 100 + rank, code, 1.0) for rank, code in enumerate(codes))
    return Verdict(Outcome.FAILED, "why", failures=failures)


@pytest.mark.parametrize(
    ("verdict", "code"),
    [
        (Verdict(Outcome.SUCCEEDED, ""), 0),
        (failed(1), 1),
        (failed(42, 1), 42),
        (failed(125), 125),
        (failed(127), 127),
        (failed(255), 255),
        (failed(-9), 137),
        (failed(-11, 3), 139),
        (failed(0), 1),
        (failed(3221225477), 1),
        (failed(), 1),
        (Verdict(Outcome.CANCELLED, "", signal=2), 130),
        (Verdict(Outcome.CANCELLED, "", signal=15), 143),
        (Verdict(Outcome.CANCELLED, ""), 130),
        (Verdict(Outcome.ABANDONED, "", stuck_pids=(7,)), 72),
        (Verdict(Outcome.BROKEN, ""), 71),
    ],
)
def test_the_table(verdict: Verdict, code: int) -> None:
    """The first failed worker's code is kept; signals become 128 + n, as in a shell."""
    assert exit_code_for(verdict) == code


def test_a_failed_run_never_exits_with_success() -> None:
    """Only a successful run exits with 0, whatever a worker's code was."""
    for code in range(-64, 300):
        assert 0 < exit_code_for(failed(code)) <= 255


def test_the_reserved_codes_differ() -> None:
    """Each of tenax's own codes has one meaning."""
    own = [exit_codes.WRONG_USAGE, exit_codes.INTERNAL_ERROR, exit_codes.BROKEN, exit_codes.ABANDONED]
    assert own == [2, 70, 71, 72]
