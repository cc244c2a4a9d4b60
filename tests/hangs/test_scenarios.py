"""Conversations with both machines about hangs, repeated word for word.

``pytest tests/hangs --rewrite-hangs`` accepts what the machines answer now.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tenax.testing.run_scenario import play_run_scenario
from tenax.testing.scenario import play_scenario, split_scenarios

HERE = Path(__file__).parent
FILES: list[tuple[Path, Callable[[str], str]]] = [
    (HERE / "scenarios" / "quiet.txt", play_scenario),
    (HERE / "runs" / "hangs.txt", play_run_scenario),
]
CASES = [
    pytest.param(play, scenario.text, id=scenario.title)
    for path, play in FILES
    for scenario in split_scenarios(path.read_text())
]


@pytest.mark.parametrize(("play", "text"), CASES)
def test_the_machines_answer_as_written(play: Callable[[str], str], text: str) -> None:
    """A change of behaviour is a diff of a file that people can read."""
    assert play(text) == text
