"""Survivors with torch and gloo: three ranks, a fault in each generation."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]


def test_survivors_continue_at_the_same_step_with_the_same_result() -> None:
    """A killed peer, a stopped peer, and a state that an exception has cut: the result is that without faults."""
    pytest.importorskip("torch")
    command = [sys.executable, str(Path(__file__).with_name("group_main.py"))]
    done = subprocess.run(command, capture_output=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr.decode()
    found = json.loads(done.stdout)
    undisturbed, disturbed = found["undisturbed"], found["disturbed"]
    assert [rank["digest"] for rank in disturbed] == [rank["digest"] for rank in undisturbed]
    assert [rank["losses"] for rank in disturbed] == [12, 12, 12]
    # Ranks 0 and 1 took part in all generations in one process, and restored only in the first.
    for rank in disturbed[:2]:
        assert [number for number, _, _ in rank["generations"]] == [1, 2, 3, 4]
        assert rank["restored"] == 1
    # No step was lost: a step that another rank had completed before the fault was not repeated.
    assert [step for _, step, _ in disturbed[0]["generations"]] == [0, 3, 6, 10]
    # Rank 2 was replaced twice. The last process survived its own exception, with the state of another rank.
    assert [number for number, _, _ in disturbed[2]["generations"]] == [3, 4]
    assert disturbed[2]["restored"] == 0
    assert disturbed[0]["generations"][1][2] == "restart 1"
    # Blocked collectives returned although the stopped process did not end.
    assert max(found["held_s"]) < 5
