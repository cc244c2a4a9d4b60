"""The agent's messages: a line for each event and command, and the live line."""

from __future__ import annotations

import signal

from tenax._core import events
from tenax._core.agent import AgentMachine
from tenax._core.model import AgentSettings, Assignment, Evidence, Outcome, Verdict
from tenax._core.text import format_duration
from tenax._node.messages import Repetitions, lines_for, live_line


class Agent:
    """An agent machine, and the lines that were printed about it."""

    def __init__(self, max_restarts: int = 3) -> None:
        settings = AgentSettings(run_id="night", role="trainer", local_world_size=2, max_restarts=max_restarts)
        self.machine = AgentMachine(settings)
        self.lines: list[tuple[str, bool]] = []

    def step(self, *happened: events.AnyEvent) -> list[str]:
        lines = []
        for event in happened:
            commands = self.machine.step(event, 10.0)
            lines += [(line.text, line.important) for line in lines_for(event, commands, self.machine.state)]
        self.lines += lines
        return [text for text, _ in lines]

    def run(self, nodes: int = 1) -> None:
        assignment = Assignment(1, 0, nodes, first_global_rank=4, world_size=8)
        self.step(events.RunRequested(), events.GenerationFormed(assignment))
        self.step(events.WorkerStarted(1, 0, 100), events.WorkerStarted(1, 1, 101))

    def succeed(self) -> list[str]:
        return self.step(events.WorkerExited(1, 0, 0), events.WorkerExited(1, 1, 0), events.NodeCleared(1))

    @property
    def live(self) -> str:
        return live_line(self.machine.state)[0]


def test_ranks_are_global() -> None:
    agent = Agent()
    agent.run()
    assert ("generation 1: starting 2 workers, ranks 4 to 5 of 8", True) in agent.lines
    assert ("rank 5 started (pid 101)", False) in agent.lines
    failed = agent.step(events.WorkerExited(1, 1, 3, before_stop=True))
    assert failed[0] == "rank 5 (pid 101) exited with code 3; stopping all workers (SIGTERM, 30 s grace)"
    assert not any("stopping" in line for line in failed[1:])


def test_a_failure_and_the_workers_that_are_held_are_one_line() -> None:
    agent = Agent()
    agent.run()
    agent.step(events.WorkerOptedIn(1, 0, 5.0), events.WorkerOptedIn(1, 1, 5.0))
    failed = agent.step(events.WorkerExited(1, 1, -9, before_stop=True))
    assert failed[0] == "rank 5 (pid 101) was killed by SIGKILL; holding rank 4 until the next generation"
    assert not any("holding" in line for line in failed[1:])


def test_no_next_generation_is_announced_without_a_restart() -> None:
    agent = Agent(max_restarts=0)
    agent.run()
    agent.step(events.WorkerOptedIn(1, 0, 5.0))
    failed = agent.step(events.WorkerExited(1, 1, -9, before_stop=True))
    assert failed[0] == "rank 5 (pid 101) was killed by SIGKILL; holding rank 4"


def test_the_kernels_cause_is_preferred_to_the_exception() -> None:
    agent = Agent()
    agent.run()
    agent.step(events.WorkerExited(1, 1, -9, before_stop=True))
    evidence = Evidence(message="ValueError: boom", out_of_memory="the kernel killed it for memory")
    assert agent.step(events.FailureExamined(1, 1, evidence)) == ["rank 5: the kernel killed it for memory"]


def test_the_exit_of_a_stopped_worker_is_not_important() -> None:
    agent = Agent()
    agent.run()
    agent.step(events.SignalReceived(signal.SIGTERM))
    agent.step(events.WorkerExited(1, 0, -15))
    text, is_important = agent.lines[-1]
    assert text.endswith("stopped (SIGTERM)")
    assert not is_important


def test_the_reason_for_waiting_is_important() -> None:
    agent = Agent()
    agent.step(events.RunRequested())
    for why in (
        "1 of 2 nodes ready (a); waiting up to 10 min for 1 more",
        "waiting 1 min 30 s before the restart: hot",
    ):
        assert agent.step(events.Waiting(why)) == [why]
        assert agent.lines[-1] == (why, True)


def test_the_next_generation_is_shown_with_its_reason() -> None:
    """The first one has none. With several nodes the line has the node rank."""
    agent = Agent()
    agent.run()
    assert not any("first generation" in text for text, _ in agent.lines)
    agent.step(events.GenerationEnded(1, "b joined"), events.WorkerExited(1, 0, -15), events.WorkerExited(1, 1, -15))
    agent.step(events.NodeCleared(1))
    part = Assignment(2, 1, 3, first_global_rank=2, world_size=6, why="b joined")
    (line,) = agent.step(events.GenerationFormed(part))
    assert line == "generation 2 (b joined): starting 2 workers, ranks 2 to 3 of 6, node 1 of 3"


def test_a_generation_that_ends_on_another_node_has_one_line() -> None:
    """The stop of the workers, or a line of its own if they have already exited."""
    agent = Agent()
    agent.run(nodes=2)
    assert agent.step(events.GenerationEnded(1, "rank 0 on b failed")) == [
        "stopping all workers because rank 0 on b failed (SIGTERM, 30 s grace)"
    ]
    done = Agent()
    done.run(nodes=2)
    assert "all workers of this node succeeded; waiting for the other nodes" in done.succeed()
    assert done.live == "tenax night: generation 1: done here, waiting for the other nodes, 3 of 3 restarts left"
    lines = done.step(events.GenerationEnded(1, "rank 0 on b failed"))
    assert lines == ["generation 1 ended: rank 0 on b failed", "ready for the next generation"]
    assert done.live == "tenax night: waiting for the next generation, 3 of 3 restarts left"


def test_a_single_node_does_not_wait_for_other_nodes() -> None:
    """The success of its workers is the end of the run."""
    agent = Agent()
    agent.run()
    assert not any("other nodes" in line or "all nodes" in line for line in agent.succeed())
    verdict = Verdict(Outcome.SUCCEEDED, "all 2 workers succeeded")
    assert agent.step(events.RunEnded(verdict, 10.0)) == ["the run succeeded: all 2 workers succeeded"]
    assert agent.lines[-1][1], "success is printed; the report shows every other outcome"


def test_a_leaving_node_is_shown_with_time_and_reason() -> None:
    """This node or another."""
    agent = Agent()
    agent.run(nodes=2)
    assert agent.step(events.LeaveNoticed(1, "b", "its agent received SIGTERM", 30.0)) == [
        "b is leaving (up to 30 s): its agent received SIGTERM"
    ]
    assert agent.step(events.NoticeReceived("maintenance")) == ["this node is leaving: maintenance"]


def test_a_fenced_node_shows_the_kill_with_its_reason() -> None:
    agent = Agent()
    agent.run(nodes=2)
    assert agent.step(events.Fenced(1, "cut off")) == ["killing all remaining processes: cut off"]


def test_events_of_other_generations_print_nothing() -> None:
    agent = Agent()
    agent.run()
    assert agent.step(events.WorkerExited(7, 0, 3), events.NodeCleared(7), events.WorkerStarted(7, 0, 5)) == []
    assert agent.step(events.GenerationEnded(7, "x"), events.Fenced(7, "x"), events.LeaveNoticed(7, "b", "x")) == []


def test_the_live_line_shows_phase_pending_workers_and_restarts() -> None:
    agent = Agent()
    assert agent.live == "tenax night: waiting for the first generation, 3 of 3 restarts left"
    agent.run()
    assert agent.live == "tenax night: generation 1 running, 2 of 2 workers, 3 of 3 restarts left"
    agent.step(events.WorkerExited(1, 0, 0))
    assert agent.live == "tenax night: generation 1 running, 1 of 2 workers, 3 of 3 restarts left"
    agent.step(events.SignalReceived(signal.SIGTERM))
    assert agent.live == "tenax night: generation 1 stopping, waiting for local rank 1"
    _, since, until = live_line(agent.machine.state)
    assert (since, until) == (agent.machine.state.last.formed_at, agent.machine.state.last.stop.until)
    agent.step(events.WorkerExited(1, 1, -15))
    assert "ending leftover processes" in agent.live
    agent.step(events.NodeCleared(1))
    assert agent.live == ""


def test_another_limit_of_restarts_on_the_coordinators_node_is_shown() -> None:
    agent = Agent()
    part = Assignment(1, 1, 2, first_global_rank=4, world_size=8, max_restarts=1)
    lines = agent.step(events.RunRequested(), events.GenerationFormed(part))
    assert "--max-restarts 3 of this node has no effect: the coordinator's node has 1" in lines
    assert agent.live.endswith(", 1 of 1 restarts left")


def test_an_expired_scope_is_shown_when_it_expires_and_when_the_worker_is_stopped() -> None:
    """The reason is shown once; the second signal has its own."""
    agent = Agent()
    agent.run()
    late = events.ScopeExpired(1, 1, 101, "step", 60.0, 1e9, signal.SIGTERM)
    assert agent.step(late) == [
        "rank 5 (pid 101) did not leave the scope 'step' within 1 min",
        "requesting the stacks of rank 5",
        "requesting the stacks of rank 4",
    ]
    refused = events.StacksRefused(1, 0, "it is not a Python program")
    (line,) = lines_for(refused, agent.machine.step(refused, 1.0), agent.machine.state)
    assert not line.important, "its scope has not expired"
    assert agent.step(events.StacksRefused(1, 1, "it is not a Python program")) == [
        "no stacks of rank 5: it is not a Python program",
        "stopping rank 5 (SIGTERM)",
    ]
    commands = agent.machine.step(events.Tick(), 1e6)
    (line,) = lines_for(events.Tick(), commands, agent.machine.state)
    assert line.text == "stopping rank 5 because the grace period is over (SIGKILL)"
    assert agent.step(events.WorkerExited(1, 1, -9))[0].startswith("rank 5 (pid 101) was killed by SIGKILL")


def test_an_expired_scope_without_a_signal_is_only_shown() -> None:
    agent = Agent()
    agent.run()
    assert agent.step(events.ScopeExpired(1, 0, 100, "load", 10.0, 1e9)) == [
        "rank 4 (pid 100) did not leave the scope 'load' within 10 s"
    ]


def waiting(at: float, ready: int = 1) -> events.Waiting:
    missing, left = 4 - ready, format_duration(600.0 - at)
    return events.Waiting(f"{ready} of 4 nodes ready (a); waiting up to {left} for {missing} more")


def test_a_long_wait_is_shown_less_and_less_often() -> None:
    repetitions = Repetitions()
    shown = [at for at in range(0, 600, 10) if repetitions.is_shown(waiting(at), at + 0.01 * (at % 3))]
    assert shown == [0, 10, 20, 40, 80, 150, 270, 490]


def test_a_change_during_a_wait_is_shown_at_once() -> None:
    repetitions = Repetitions()
    times = range(0, 100, 10)
    shown = [at for at in times if repetitions.is_shown(waiting(at, ready=1 if at < 60 else 2), at)]
    assert shown == [0, 10, 20, 40, 60, 70, 80]
    assert repetitions.is_shown(events.GenerationEnded(1, "rank 0 failed"), 90)
    assert repetitions.is_shown(waiting(90, ready=2), 90)
