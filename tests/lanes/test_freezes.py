"""The lane of freezes: one short freeze, and the output."""

from __future__ import annotations

import re
import sys

import pytest

from .freezes import main

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def test_each_freeze_and_the_total_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """Each freeze with the generations before and after it; the last line has the total."""
    assert main(["--times", "1", "--seconds", "0.1", "--clusters", "1", "--lease", "1"]) == 0
    first, last = capsys.readouterr().out.splitlines()
    # On a busy machine a node may miss its short lease, and another generation forms.
    assert re.fullmatch(r"freeze 1 \(quiet\): generation \d+ -> \d+, never two at once", first)
    assert last.startswith("1 freezes of 0.1 s (quiet: 1), lease 1 s, 0 clusters broken, in ")
