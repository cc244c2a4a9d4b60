"""The lane of freezes: a short one is played, with what it prints."""

from __future__ import annotations

import sys

import pytest

from .freezes import main

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at processes through /proc")


def test_freezes_end_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Each freeze is told with the generations before and after it, and the last line counts them."""
    assert main(["--times", "1", "--seconds", "0.1", "--clusters", "1", "--lease", "1"]) == 0
    first, last = capsys.readouterr().out.splitlines()
    assert first == "freeze 1 (quiet): generation 1 -> 1, never two at once"
    assert last.startswith("1 freezes of 0.1 s (quiet: 1), lease 1 s, 0 clusters broken, in ")
