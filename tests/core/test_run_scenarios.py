"""The run scenario files: what the coordinator machine sends to its nodes in each history, word for word."""

from __future__ import annotations

import re

import pytest

from tenax._core import coordinator as run
from tenax._core.coordinator import CoordinatorMachine, RunSettings
from tenax.testing.run_scenario import describe_send, play_run_scenario
from tenax.testing.scenario import ScenarioError, split_scenarios

from .conftest import RUNS
from .policies import POLICIES

FILES = sorted(RUNS.glob("*.txt"))
CONVERSATIONS = [
    pytest.param(scenario.text, id=f"{path.stem}: {scenario.title}")
    for path in FILES
    for scenario in split_scenarios(path.read_text())
]


@pytest.mark.parametrize("text", CONVERSATIONS)
def test_the_coordinator_answers_as_written(text: str) -> None:
    """Its answers are those that a reviewer accepted (``--rewrite-scenarios`` proposes new ones); C1-C9 hold after
    every step, and its state survives being written down before every step."""
    assert play_run_scenario(text, POLICIES) == text


@pytest.mark.parametrize("text", CONVERSATIONS)
def test_every_run_comes_to_an_end(text: str) -> None:
    """No scenario stops in the middle: each leads to the end of the run, so it also shows what the ledger sends."""
    assert len(re.findall(r"-> over$", text, re.MULTILINE)) == 1


def test_titles_are_unique() -> None:
    """A title names one scenario, so that a failing test names one place."""
    titles = [scenario.title for path in FILES for scenario in split_scenarios(path.read_text())]
    assert sorted(titles) == sorted(set(titles))


def test_playing_writes_the_answers_below_the_facts() -> None:
    """A script without answers comes back with them; what a reader wrote for readers stays."""
    script = "# why\n\nscenario short\nsettings nodes=1\n\nat 0 node a up with 2 slots\nat 1.5 node a succeeded\n"
    played = play_run_scenario(script)
    assert played == (
        "# why\n\nscenario short\nsettings nodes=1\n\n"
        "at 0 node a up with 2 slots\n"
        "    send to a: generation 1 formed, node 0 of 1, ranks 0-1 of 2: first generation\n"
        "    gathering -> running\n    deadlines: none\n"
        "at 1.5 node a succeeded\n    send to a: run ended: succeeded, all 2 workers succeeded\n"
        "        generation 1, restarts used 0\n    running -> over\n"
    )
    assert play_run_scenario(played) == played


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("at 1 node a vanished", "line 2: 'vanished' is not an event"),
        ("at 1 a ready", "line 2: 'a ready' is not an event"),
        ("at 1 node a joined with two slots", "line 2: 'with two slots' does not describe a node"),
        ("at 1 node a up\nat 2 node a failed: rank one", "line 3: 'rank one' is not a failure"),
        ("at 1 node a up\nat 2 node a failed: rank 0 killed by SIGNOSUCH", "line 3: this system has no signal"),
        ("at noon time passed", "line 2: 'noon' is not a time"),
        ("at 5 time passed\nat 4 time passed", "line 3: time went back from 5 to 4"),
        ("settings nodes", "line 2: 'nodes' is not a setting"),
        ("settings nods=2", "line 2: .*nods.*the settings are nodes, "),
        ("settings nodes=two", "line 2: .*the settings are nodes, "),
        ("policy generous", "line 2: there is no policy 'generous'; there are budget, pausing"),
        ("at 1 time passed\npolicy budget", "line 3: policy must come before the first event"),
        ("and then", "line 2: 'and then' is not part of a scenario"),
    ],
)
def test_a_line_that_cannot_be_understood_is_named(line: str, complaint: str) -> None:
    """A mistake in a scenario is reported with its line number, what is wrong and what was expected."""
    with pytest.raises(ScenarioError, match=complaint):
        play_run_scenario(f"scenario wrong\n{line}\n", POLICIES)


def test_what_is_said_can_be_told_to_a_person() -> None:
    """Every kind of word of the coordinator has a sentence."""
    machine = CoordinatorMachine(RunSettings("run"))
    sends = machine.step(run.Opened(), 0.0) + machine.step(run.CancelRequested("enough"), 1.0)
    assert sends == []
    text = "".join(path.read_text() for path in FILES)
    sentences = ("formed, node", "ended: ", "run ended: ", "refused: ", "waiting: ", "will leave", "asked to leave: ")
    for sentence in sentences:
        assert re.search(rf"^    send to .*{sentence}", text, re.MULTILINE), sentence
    assert describe_send(run.Send(("a", "b"), run.events.Waiting("why")), machine.state) == [
        "send to a, b: waiting: why"
    ]
