"""The lane of freezes: one short freeze, and the output."""

from __future__ import annotations

import sys

import pytest

from .freezes import main

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def test_each_freeze_and_the_total_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """Each freeze with the generations before and after it; the last line has the total."""
    assert main(["--times", "1", "--seconds", "0.1", "--clusters", "1", "--lease", "1"]) == 0
    first, last = capsys.readouterr().out.splitlines()
    assert first == "freeze 1 (quiet): generation 1 -> 1, never two at once"
    assert last.startswith("1 freezes of 0.1 s (quiet: 1), lease 1 s, 0 clusters broken, in ")
