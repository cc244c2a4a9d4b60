"""The story: one plain sentence for what happened and one for what was decided, and the line at the bottom."""

from __future__ import annotations

import signal

from tenax.core import events as fact
from tenax.core.agent import AgentMachine
from tenax.core.model import AgentSettings, Assignment, Evidence, Failure
from tenax.core.policy import AnyDecision, History, Wait
from tenax.runtime.story import live_line, tell


class Patient:
    def decide(self, failure: Failure, history: History) -> AnyDecision:
        return Wait("the disk is slow", seconds=90)


class Teller:
    """A machine whose story is written down as it goes."""

    def __init__(self, policy: Patient | None = None) -> None:
        settings = AgentSettings(run_id="night", role="trainer", local_world_size=2, max_restarts=3)
        self.machine = AgentMachine(settings, policy)
        self.told: list[tuple[str, bool]] = []

    def hear(self, *events: fact.AnyEvent) -> list[str]:
        lines = []
        for event in events:
            commands = self.machine.step(event, 10.0)
            lines += [(line.text, line.important) for line in tell(event, commands, self.machine.state)]
        self.told += lines
        return [text for text, _ in lines]

    def run(self) -> None:
        assignment = Assignment(1, first_global_rank=4, world_size=8)
        self.hear(fact.RunRequested(), fact.GenerationFormed(assignment))
        self.hear(fact.WorkerStarted(1, 0, 100), fact.WorkerStarted(1, 1, 101))

    @property
    def live(self) -> str:
        return live_line(self.machine.state)


def test_ranks_are_global() -> None:
    """A person knows workers by their rank in the job, and processes by their pid."""
    teller = Teller()
    teller.run()
    assert ("generation 1: starting 2 workers, ranks 4 to 5 of 8", True) in teller.told
    assert ("rank 5 started (pid 101)", False) in teller.told
    assert teller.hear(fact.WorkerExited(1, 1, 3, unasked=True))[0] == "rank 5 (pid 101) exited with code 3"


def test_a_cause_is_told_when_it_is_known() -> None:
    """The kernel's verdict before the program's own words."""
    teller = Teller()
    teller.run()
    teller.hear(fact.WorkerExited(1, 1, -9, unasked=True))
    evidence = Evidence(message="ValueError: boom", out_of_memory="the kernel killed it for memory")
    assert teller.hear(fact.FailureExamined(1, 1, evidence)) == ["rank 5: the kernel killed it for memory"]


def test_who_was_asked_is_not_blamed() -> None:
    """A worker that ended because we asked it to is a remark, not news."""
    teller = Teller()
    teller.run()
    teller.hear(fact.SignalReceived(signal.SIGTERM))
    teller.hear(fact.WorkerExited(1, 0, -15))
    text, is_important = teller.told[-1]
    assert text.endswith("after being asked to end")
    assert not is_important


def test_a_pause_is_told_with_its_reason() -> None:
    """Else a person wonders why nothing happens."""
    teller = Teller(Patient())
    teller.run()
    teller.hear(fact.WorkerExited(1, 0, 3, unasked=True), fact.FailureExamined(1, 0, Evidence()))
    teller.hear(fact.WorkerExited(1, 1, -15))
    assert "waiting 90 s before the next try: the disk is slow" in teller.hear(fact.NodeCleared(1))
    assert teller.live.startswith("tenax night: waiting before the next try")


def test_late_echoes_are_not_told() -> None:
    """A fact of another generation is nobody's news."""
    teller = Teller()
    teller.run()
    assert teller.hear(fact.WorkerExited(7, 0, 3), fact.NodeCleared(7), fact.WorkerStarted(7, 0, 5)) == []


def test_the_live_line_says_who_is_waited_for() -> None:
    """Phase, generation, workers, and what is left of the budget."""
    teller = Teller()
    assert teller.live == "tenax night: joining generation 1, 3 of 3 restarts left"
    teller.run()
    assert teller.live == "tenax night: generation 1 running, 2 of 2 workers, 3 of 3 restarts left"
    teller.hear(fact.WorkerExited(1, 0, 0))
    assert teller.live == "tenax night: generation 1 running, 1 of 2 workers, 3 of 3 restarts left"
    teller.hear(fact.SignalReceived(signal.SIGTERM))
    assert teller.live == "tenax night: generation 1 ending, waiting for local rank 1, 3 of 3 restarts left"
    teller.hear(fact.WorkerExited(1, 1, -15))
    assert "clearing what is left" in teller.live
    teller.hear(fact.NodeCleared(1))
    assert teller.live == ""
