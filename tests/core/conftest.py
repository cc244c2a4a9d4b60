"""Shared by the tests of the core: where the scenarios lie, and how their answers are accepted.

``pytest tests/core --rewrite-scenarios`` writes the machine's present answers into the files; the diff is for review.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tenax.core.invariants import InvariantBroken
from tenax.testing.scenario import ScenarioError, play_scenario

from .policies import POLICIES

SCENARIOS = Path(__file__).parent / "scenarios"

# The same examples on every machine: a test run is a fact, not a lottery. The random driver explores.
settings.register_profile(
    "core", derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite-scenarios", action="store_true", help="accept what the agent machine answers now")


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("--rewrite-scenarios", default=False):
        return
    for path in sorted(SCENARIOS.glob("*.txt")):
        text = path.read_text()
        try:
            played = play_scenario(text, POLICIES)
        except (ScenarioError, InvariantBroken) as error:
            raise pytest.UsageError(f"{path.name}, {error}") from error
        if played != text:
            path.write_text(played)
