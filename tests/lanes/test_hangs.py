"""The lane of hangs: an hour of simulated jobs, and the output. The jobs with torch take minutes."""

from __future__ import annotations

import re

import pytest

from .hangs import main

pytestmark = pytest.mark.unit


def test_simulated_jobs_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--simulated", "1"]) == 0
    assert re.fullmatch(r"0 false alarms in \d+ simulated hours of 1 jobs\n", capsys.readouterr().out)
