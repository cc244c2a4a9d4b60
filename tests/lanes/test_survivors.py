"""The lane of survivors: three faults, and the output."""

from __future__ import annotations

import re
import sys

import pytest

from .survivors import main

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def test_the_faults_and_the_steps_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--faults", "2", "--framework", "none", "--seed", "3"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.match(r"2 faults \(seed 3\): \d+ generations, \d+ steps, each applied exactly once on every rank", last)
