"""The story: one plain sentence for what happened and one for what was decided, and the line at the bottom."""

from __future__ import annotations

import signal

from tenax._core import events as fact
from tenax._core.agent import AgentMachine
from tenax._core.model import AgentSettings, Assignment, Evidence, Outcome, Verdict
from tenax._node.messages import lines_for, live_line


class EventRecorder:
    """A machine whose story is written down as it goes."""

    def __init__(self) -> None:
        settings = AgentSettings(run_id="night", role="trainer", local_world_size=2, max_restarts=3)
        self.machine = AgentMachine(settings)
        self.told: list[tuple[str, bool]] = []

    def hear(self, *events: fact.AnyEvent) -> list[str]:
        lines = []
        for event in events:
            commands = self.machine.step(event, 10.0)
            lines += [(line.text, line.important) for line in lines_for(event, commands, self.machine.state)]
        self.told += lines
        return [text for text, _ in lines]

    def run(self, nodes: int = 1) -> None:
        assignment = Assignment(1, 0, nodes, first_global_rank=4, world_size=8)
        self.hear(fact.RunRequested(), fact.GenerationFormed(assignment))
        self.hear(fact.WorkerStarted(1, 0, 100), fact.WorkerStarted(1, 1, 101))

    def succeed(self) -> list[str]:
        return self.hear(fact.WorkerExited(1, 0, 0), fact.WorkerExited(1, 1, 0), fact.NodeCleared(1))

    @property
    def live(self) -> str:
        return live_line(self.machine.state)


def test_ranks_are_global() -> None:
    """A person knows workers by their rank in the job, and processes by their pid."""
    teller = EventRecorder()
    teller.run()
    assert ("generation 1: starting 2 workers, ranks 4 to 5 of 8", True) in teller.told
    assert ("rank 5 started (pid 101)", False) in teller.told
    assert teller.hear(fact.WorkerExited(1, 1, 3, before_stop=True))[0] == "rank 5 (pid 101) exited with code 3"


def test_a_cause_is_told_when_it_is_known() -> None:
    """The kernel's verdict before the program's own words."""
    teller = EventRecorder()
    teller.run()
    teller.hear(fact.WorkerExited(1, 1, -9, before_stop=True))
    evidence = Evidence(message="ValueError: boom", out_of_memory="the kernel killed it for memory")
    assert teller.hear(fact.FailureExamined(1, 1, evidence)) == ["rank 5: the kernel killed it for memory"]


def test_who_was_asked_is_not_blamed() -> None:
    """A worker that ended because we asked it to is a remark, not news."""
    teller = EventRecorder()
    teller.run()
    teller.hear(fact.SignalReceived(signal.SIGTERM))
    teller.hear(fact.WorkerExited(1, 0, -15))
    text, is_important = teller.told[-1]
    assert text.endswith("stopped (SIGTERM)")
    assert not is_important


def test_who_waits_is_told_why() -> None:
    """A pause before the next try, or nodes that are not there yet: else a person wonders why nothing happens."""
    teller = EventRecorder()
    teller.hear(fact.RunRequested())
    for why in ("1 of 2 nodes ready (a); waiting up to 600 s for 1 more", "waiting 90 s before the restart: hot"):
        assert teller.hear(fact.Waiting(why)) == [why]
        assert teller.told[-1] == (why, True)


def test_the_next_generation_is_told_with_its_reason() -> None:
    """The first one needs none; among several nodes it says which of them this is."""
    teller = EventRecorder()
    teller.run()
    assert not any("first generation" in text for text, _ in teller.told)
    teller.hear(fact.GenerationEnded(1, "b joined"), fact.WorkerExited(1, 0, -15), fact.WorkerExited(1, 1, -15))
    teller.hear(fact.NodeCleared(1))
    part = Assignment(2, 1, 3, first_global_rank=2, world_size=6, why="b joined")
    (line,) = teller.hear(fact.GenerationFormed(part))
    assert line == "generation 2 (b joined): starting 2 workers, ranks 2 to 3 of 6, node 1 of 3"


def test_a_generation_that_ends_elsewhere_is_told_once() -> None:
    """By what is asked of the workers; where they are done already, by a line of its own."""
    teller = EventRecorder()
    teller.run(nodes=2)
    assert teller.hear(fact.GenerationEnded(1, "rank 0 on b failed")) == [
        "stopping all workers because rank 0 on b failed (SIGTERM, 30 s grace)"
    ]
    done = EventRecorder()
    done.run(nodes=2)
    assert "all workers of this node succeeded; waiting for the other nodes" in done.succeed()
    assert done.live == "tenax night: generation 1: done here, waiting for the other nodes, 3 of 3 restarts left"
    lines = done.hear(fact.GenerationEnded(1, "rank 0 on b failed"))
    assert lines == ["generation 1 ended: rank 0 on b failed", "ready for the next generation"]
    assert done.live == "tenax night: waiting for the next generation, 3 of 3 restarts left"


def test_alone_nobody_waits_for_other_nodes() -> None:
    """On one node the success of its workers is the end of the run, and is told as that."""
    teller = EventRecorder()
    teller.run()
    assert not any("other nodes" in line or "all nodes" in line for line in teller.succeed())
    verdict = Verdict(Outcome.SUCCEEDED, "all 2 workers succeeded")
    assert teller.hear(fact.RunEnded(verdict, 10.0)) == ["the run succeeded: all 2 workers succeeded"]
    assert teller.told[-1][1], "a success is told; the report speaks for every other end"


def test_who_leaves_is_told_with_what_is_known() -> None:
    """This node or another, how soon, and why."""
    teller = EventRecorder()
    teller.run(nodes=2)
    assert teller.hear(fact.LeaveNoticed(1, "b", "its agent received SIGTERM", 30.0)) == [
        "b is leaving (up to 30 s): its agent received SIGTERM"
    ]
    assert teller.hear(fact.NoticeReceived("maintenance")) == ["this node is leaving: maintenance"]


def test_a_fence_is_told_by_what_is_killed() -> None:
    """With the reason."""
    teller = EventRecorder()
    teller.run(nodes=2)
    assert teller.hear(fact.Fenced(1, "cut off")) == ["killing all remaining processes: cut off"]


def test_late_echoes_are_not_told() -> None:
    """A fact of another generation is nobody's news."""
    teller = EventRecorder()
    teller.run()
    assert teller.hear(fact.WorkerExited(7, 0, 3), fact.NodeCleared(7), fact.WorkerStarted(7, 0, 5)) == []
    assert teller.hear(fact.GenerationEnded(7, "x"), fact.Fenced(7, "x"), fact.LeaveNoticed(7, "b", "x")) == []


def test_the_live_line_says_who_is_waited_for() -> None:
    """Phase, generation, workers, and what is left of the budget."""
    teller = EventRecorder()
    assert teller.live == "tenax night: waiting for the first generation, 3 of 3 restarts left"
    teller.run()
    assert teller.live == "tenax night: generation 1 running, 2 of 2 workers, 3 of 3 restarts left"
    teller.hear(fact.WorkerExited(1, 0, 0))
    assert teller.live == "tenax night: generation 1 running, 1 of 2 workers, 3 of 3 restarts left"
    teller.hear(fact.SignalReceived(signal.SIGTERM))
    assert teller.live == "tenax night: generation 1 stopping, waiting for local rank 1, 3 of 3 restarts left"
    teller.hear(fact.WorkerExited(1, 1, -15))
    assert "ending leftover processes" in teller.live
    teller.hear(fact.NodeCleared(1))
    assert teller.live == ""


def test_a_worker_that_hangs_is_told_when_it_is_late_and_when_it_is_ended() -> None:
    """The reason stands once; a second signal says why there is one."""
    teller = EventRecorder()
    teller.run()
    late = fact.ScopeExpired(1, 1, 101, "step", 60.0, 1e9, signal.SIGTERM)
    assert teller.hear(late) == [
        "rank 5 (pid 101) did not leave the scope 'step' within 60 s",
        "requesting the stacks of rank 5",
        "requesting the stacks of rank 4",
    ]
    refused = fact.StacksRefused(1, 0, "it is not a Python program")
    (line,) = lines_for(refused, teller.machine.step(refused, 1.0), teller.machine.state)
    assert not line.important, "nobody asked for the stacks of one that is not late"
    assert teller.hear(fact.StacksRefused(1, 1, "it is not a Python program")) == [
        "no stacks of rank 5: it is not a Python program",
        "stopping rank 5 (SIGTERM)",
    ]
    commands = teller.machine.step(fact.Tick(), 1e6)
    (line,) = lines_for(fact.Tick(), commands, teller.machine.state)
    assert line.text == "stopping rank 5 because the grace period is over (SIGKILL)"
    assert teller.hear(fact.WorkerExited(1, 1, -9))[0] == "rank 5 (pid 101) was killed by SIGKILL"


def test_a_scope_that_wants_no_signal_is_only_told() -> None:
    teller = EventRecorder()
    teller.run()
    assert teller.hear(fact.ScopeExpired(1, 0, 100, "load", 10.0, 1e9)) == [
        "rank 4 (pid 100) did not leave the scope 'load' within 10 s"
    ]
