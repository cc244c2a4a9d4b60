"""Shared by the tests of the core: the scenario folders, and the option that updates their answers.

``pytest tests/core --rewrite-scenarios`` writes the machines' current answers into the files, for review.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tenax.testing.agent_invariants import InvariantBroken
from tenax.testing.run_scenario import play_run_scenario
from tenax.testing.scenario import ScenarioError, play_scenario

from .policies import POLICIES

SCENARIOS = Path(__file__).parent / "scenarios"  # of the agent machine
RUNS = Path(__file__).parent / "runs"  # of the coordinator machine

# The same examples in every test run. Random search is the task of the simulator and the fuzzer.
settings.register_profile(
    "core", derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite-scenarios", action="store_true", help="write the machines' current answers into the scenario files"
    )


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("--rewrite-scenarios", default=False):
        return
    for folder, play in ((SCENARIOS, play_scenario), (RUNS, partial(play_run_scenario, policies=POLICIES))):
        for path in sorted(folder.glob("*.txt")):
            text = path.read_text()
            try:
                played = play(text)
            except (ScenarioError, InvariantBroken) as error:
                raise pytest.UsageError(f"{path.name}, {error}") from error
            if played != text:
                path.write_text(played)
