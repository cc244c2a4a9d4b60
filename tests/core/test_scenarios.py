"""The scenario files of the agent machine: the exact answers to each list of events."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tenax._core import events
from tenax.testing.scenario import ScenarioError, parse_event, play_scenario, split_scenarios

from .conftest import SCENARIOS

FILES = sorted(SCENARIOS.glob("*.txt"))
ALL_SCENARIOS = [
    pytest.param(scenario.text, id=f"{path.stem}: {scenario.title}")
    for path in FILES
    for scenario in split_scenarios(path.read_text())
]


@pytest.mark.parametrize("text", ALL_SCENARIOS)
def test_the_machine_answers_as_written(text: str) -> None:
    """``--rewrite-scenarios`` writes the current answers, for review."""
    assert play_scenario(text) == text


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_scenario_ends_with_a_verdict(path: Path) -> None:
    """Each has exactly one, which shows the failures and counts that were kept."""
    for scenario in split_scenarios(path.read_text()):
        assert len(re.findall(r"^    finish: ", scenario.text, re.MULTILINE)) == 1, scenario.title


def test_titles_are_unique() -> None:
    """A failing test names one scenario."""
    titles = [scenario.title for path in FILES for scenario in split_scenarios(path.read_text())]
    assert sorted(titles) == sorted(set(titles))


def test_splitting_keeps_all_text() -> None:
    """The scenarios of a file, joined, are the file."""
    for path in FILES:
        text = path.read_text()
        assert "".join(scenario.text for scenario in split_scenarios(text)) == text


def test_playing_writes_the_answers_below_the_events() -> None:
    """A scenario without answers is returned with them; comments are kept."""
    script = "# why\n\nscenario short\nsettings workers=1 grace_s=4\n\nat 0 run requested\nat 1.5 signal SIGINT\n"
    played = play_scenario(script)
    assert played == (
        "# why\n\nscenario short\nsettings workers=1 grace_s=4\n\n"
        "at 0 run requested\n    send ready\n    new -> joining\n"
        "at 1.5 signal SIGINT\n    send left: its agent received SIGINT\n"
        "    finish: cancelled, the agent received SIGINT\n"
        "        generation 0, restarts used 0, by SIGINT\n    joining -> ended\n"
    )
    assert play_scenario(played) == played


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("at 1 worker 0 vanished", "line 2: 'worker 0 vanished' is not an event"),
        ("at noon tick", "line 2: 'noon' is not a time"),
        ("at 5 tick\nat 4 tick", "line 3: time went back from 5 to 4"),
        ("at 1 signal SIGNOSUCH", "line 2: this system has no signal SIGNOSUCH"),
        ("settings workers", "line 2: 'workers' is not a setting"),
        ("settings wokers=2", "line 2: .*wokers.*the settings are workers, "),
        ("settings workers=two", "line 2: .*the settings are workers, "),
        ("policy budget", "line 2: 'policy budget' is not part of a scenario"),
        (
            "at 1 run ended: bravely, why not",
            "line 2: 'bravely' is not an outcome; the outcomes are succeeded, failed, ",
        ),
        ("at 1 tick\nsettings workers=2", "line 3: settings must come before the first event"),
        ("and then", "line 2: 'and then' is not part of a scenario"),
    ],
)
def test_an_invalid_line_is_an_error_with_its_number(line: str, message: str) -> None:
    """The message has the line number, what is wrong and what was expected."""
    with pytest.raises(ScenarioError, match=message):
        play_scenario(f"scenario wrong\n{line}\n")


def test_a_file_without_a_scenario_is_an_error() -> None:
    """Otherwise it would pass without testing anything."""
    with pytest.raises(ScenarioError, match="no scenario here"):
        split_scenarios("# nothing yet\n")


def test_events_are_of_the_current_generation_unless_they_name_another() -> None:
    """``of generation N`` makes an event stale."""
    assert parse_event("worker 3 killed by SIGKILL", 7) == events.WorkerExited(7, 3, -9)
    assert parse_event("worker 3 of generation 2 killed by SIGKILL", 7) == events.WorkerExited(2, 3, -9)
    assert parse_event("node cleared of generation 2", 7) == events.NodeCleared(2)
    assert parse_event("fenced of generation 2: cut off", 7) == events.Fenced(2, "cut off")
    assert parse_event("leave noticed from b, in 30 s: x: y", 7) == events.LeaveNoticed(7, "b", "x: y", 30.0)


def test_a_verdict_has_the_failures_that_the_node_reported() -> None:
    """``run ended`` is the verdict of a coordinator that has only this node, with its own clock."""
    script = "scenario s\nat 0 generation 1 up\nat 5 worker 0 exited 3\nat 6 run ended, sent at 1006: failed, enough\n"
    played = play_scenario(script + "at 7 worker 0 examined\nat 8 node cleared\n")
    assert "    finish: failed, enough\n        rank 0 (pid 100) failed: exited 3, seen at 5\n" in played
