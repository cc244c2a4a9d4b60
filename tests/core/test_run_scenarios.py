"""The scenario files of the coordinator machine: the exact answers to each list of events."""

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
ALL_SCENARIOS = [
    pytest.param(scenario.text, id=f"{path.stem}: {scenario.title}")
    for path in FILES
    for scenario in split_scenarios(path.read_text())
]


@pytest.mark.parametrize("text", ALL_SCENARIOS)
def test_the_coordinator_answers_as_written(text: str) -> None:
    """``--rewrite-scenarios`` writes the current answers, for review. C1-C10 hold after every step, and the state
    survives JSON before every step."""
    assert play_run_scenario(text, POLICIES) == text


@pytest.mark.parametrize("text", ALL_SCENARIOS)
def test_every_scenario_ends_the_run(text: str) -> None:
    """So each shows the restart counts of its verdict."""
    assert len(re.findall(r"-> over$", text, re.MULTILINE)) == 1


def test_titles_are_unique() -> None:
    """A failing test names one scenario."""
    titles = [scenario.title for path in FILES for scenario in split_scenarios(path.read_text())]
    assert sorted(titles) == sorted(set(titles))


def test_playing_writes_the_answers_below_the_events() -> None:
    """A scenario without answers is returned with them; comments are kept."""
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
    ("line", "message"),
    [
        ("at 1 node a vanished", "line 2: 'vanished' is not an event"),
        ("at 1 a ready", "line 2: 'a ready' is not an event"),
        ("at 1 node a joined with two slots", "line 2: 'with two slots' does not describe a node"),
        ("at 1 node a up\nat 2 node a failed: rank one", "line 3: 'rank one' is not a failure"),
        ("at 1 node a up\nat 2 node a failed: rank 0 killed by SIGNOSUCH", "line 3: this system has no signal"),
        ("at noon tick", "line 2: 'noon' is not a time"),
        ("at 5 tick\nat 4 tick", "line 3: time went back from 5 to 4"),
        ("settings nodes", "line 2: 'nodes' is not a setting"),
        ("settings nods=2", "line 2: .*nods.*the settings are nodes, "),
        ("settings nodes=two", "line 2: .*the settings are nodes, "),
        ("policy generous", "line 2: there is no policy 'generous'; there are budget, pausing"),
        ("at 1 tick\npolicy budget", "line 3: policy must come before the first event"),
        ("and then", "line 2: 'and then' is not part of a scenario"),
    ],
)
def test_an_invalid_line_is_an_error_with_its_number(line: str, message: str) -> None:
    """The message has the line number, what is wrong and what was expected."""
    with pytest.raises(ScenarioError, match=message):
        play_run_scenario(f"scenario wrong\n{line}\n", POLICIES)


def test_every_message_of_the_coordinator_has_a_description() -> None:
    """Every type occurs in a scenario."""
    machine = CoordinatorMachine(RunSettings("run"))
    sends = machine.step(run.Opened(), 0.0).sends + machine.step(run.CancelRequested("enough"), 1.0).sends
    assert sends == []
    text = "".join(path.read_text() for path in FILES)
    descriptions = (
        "formed, node",
        "ended: ",
        "run ended: ",
        "refused: ",
        "waiting: ",
        "will leave",
        "leave requested: ",
    )
    for description in descriptions:
        assert re.search(rf"^    send to .*{description}", text, re.MULTILINE), description
    assert describe_send(run.Send(("a", "b"), run.events.Waiting("why")), machine.state) == [
        "send to a, b: waiting: why"
    ]
