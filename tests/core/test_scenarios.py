"""The scenario files: what the agent machine answers to each history, word for word."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tenax._core import events
from tenax.testing.scenario import ScenarioError, parse_event, play_scenario, split_scenarios

from .conftest import SCENARIOS

FILES = sorted(SCENARIOS.glob("*.txt"))
CONVERSATIONS = [
    pytest.param(scenario.text, id=f"{path.stem}: {scenario.title}")
    for path in FILES
    for scenario in split_scenarios(path.read_text())
]


@pytest.mark.parametrize("text", CONVERSATIONS)
def test_the_machine_answers_as_written(text: str) -> None:
    """The machine's answers are those that a reviewer accepted (``--rewrite-scenarios`` proposes new ones)."""
    assert play_scenario(text) == text


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_conversation_of_a_file_ends_in_a_verdict(path: Path) -> None:
    """No scenario stops in the middle: each leads to exactly one verdict, so it also shows what was remembered."""
    for scenario in split_scenarios(path.read_text()):
        assert len(re.findall(r"^    finish: ", scenario.text, re.MULTILINE)) == 1, scenario.title


def test_titles_are_unique() -> None:
    """A title names one scenario, so that a failing test names one place."""
    titles = [scenario.title for path in FILES for scenario in split_scenarios(path.read_text())]
    assert sorted(titles) == sorted(set(titles))


def test_splitting_loses_nothing() -> None:
    """The conversations of a file, joined, are the file."""
    for path in FILES:
        text = path.read_text()
        assert "".join(scenario.text for scenario in split_scenarios(text)) == text


def test_playing_writes_the_answers_below_the_facts() -> None:
    """A script without answers comes back with them; what a reader wrote for readers stays."""
    script = "# why\n\nscenario short\nsettings workers=1 grace_s=4\n\nat 0 run requested\nat 1.5 signal SIGINT\n"
    played = play_scenario(script)
    assert played == (
        "# why\n\nscenario short\nsettings workers=1 grace_s=4\n\n"
        "at 0 run requested\n    format_steps ready\n    new -> joining\n"
        "at 1.5 signal SIGINT\n    format_steps left: the agent was asked to stop\n"
        "    finish: cancelled, the agent was asked to stop\n"
        "        generation 0, restarts used 0, by SIGINT\n    joining -> ended\n"
    )
    assert play_scenario(played) == played


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("at 1 worker 0 vanished", "line 2: 'worker 0 vanished' is not an event"),
        ("at noon time passed", "line 2: 'noon' is not a time"),
        ("at 5 time passed\nat 4 time passed", "line 3: time went back from 5 to 4"),
        ("at 1 signal SIGNOSUCH", "line 2: this system has no signal SIGNOSUCH"),
        ("settings workers", "line 2: 'workers' is not a setting"),
        ("settings wokers=2", "line 2: .*wokers.*the settings are workers, "),
        ("settings workers=two", "line 2: .*the settings are workers, "),
        ("policy budget", "line 2: 'policy budget' is not part of a scenario"),
        (
            "at 1 run ended: bravely, why not",
            "line 2: 'bravely' is not an outcome; the outcomes are succeeded, failed, ",
        ),
        ("at 1 time passed\nsettings workers=2", "line 3: settings must come before the first event"),
        ("and then", "line 2: 'and then' is not part of a scenario"),
    ],
)
def test_a_line_that_cannot_be_understood_is_named(line: str, complaint: str) -> None:
    """A mistake in a scenario is reported with its line number, what is wrong and what was expected."""
    with pytest.raises(ScenarioError, match=complaint):
        play_scenario(f"scenario wrong\n{line}\n")


def test_a_file_without_a_scenario_is_refused() -> None:
    """A file that tests nothing does not pass for a test."""
    with pytest.raises(ScenarioError, match="no scenario here"):
        split_scenarios("# nothing yet\n")


def test_facts_mean_the_given_generation_unless_they_say_another() -> None:
    """``of generation N`` makes a late echo; without it a fact is about now."""
    assert parse_event("worker 3 killed by SIGKILL", 7) == events.WorkerExited(7, 3, -9)
    assert parse_event("worker 3 of generation 2 killed by SIGKILL", 7) == events.WorkerExited(2, 3, -9)
    assert parse_event("node cleared of generation 2", 7) == events.NodeCleared(2)
    assert parse_event("fenced of generation 2: cut off", 7) == events.Fenced(2, "cut off")
    assert parse_event("leave noticed from b, in 30 s: x: y", 7) == events.LeaveNoticed(7, "b", "x: y", 30.0)


def test_a_verdict_names_what_this_node_told_of() -> None:
    """``run ended`` means what a coordinator would send that has heard this node only, on its own clock."""
    script = "scenario s\nat 0 generation 1 up\nat 5 worker 0 exited 3\nat 6 run ended, sent at 1006: failed, enough\n"
    played = play_scenario(script + "at 7 worker 0 examined\nat 8 node cleared\n")
    assert "    finish: failed, enough\n        rank 0 (pid 100) failed: exited 3, seen at 5\n" in played
