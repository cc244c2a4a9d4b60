"""The status of a run: one value, made of the coordinator's state, in every phase and at every size."""

from __future__ import annotations

import msgspec
import pytest

from tenax._core import coordinator as run
from tenax._core import messages
from tenax._core.coordinator import AnyCoordinatorEvent, CoordinatorMachine, RunSettings, Send, Suspicion
from tenax._core.ledger import Spent
from tenax._core.model import Evidence, Failure, Outcome, Verdict
from tenax._core.policy import AnyDecision, BudgetPolicy, History, RestartPolicy, Wait
from tenax._view.status import NodeStatus, RunStatus, status_of

EPOCH = 1_700_000_000.0  # when the coordinator's clock was 0
BOOM = Failure(1, 1, 3, 101, 1, 70.0, evidence=Evidence("RuntimeError", "RuntimeError: boom", cause="raised"))
CRASH = Failure(1, 0, 2, 100, -11, 69.0)


class Pausing:
    """Waits ten seconds before each try."""

    def decide(self, failure: Failure, history: History) -> AnyDecision:
        return Wait("it needs a rest", seconds=10.0)


class Told:
    """A coordinator, and the steps that it has taken."""

    def __init__(self, least: int = 2, most: int = 2, policy: RestartPolicy | None = None) -> None:
        self.settings = RunSettings("job", least, most, max_restarts=3, last_call_s=5.0, serving_node="a")
        self.machine = CoordinatorMachine(self.settings, policy or BudgetPolicy())
        self.recent: list[tuple[float, AnyCoordinatorEvent, list[Send]]] = []
        self.now = 0.0

    def take(self, event: AnyCoordinatorEvent, at: float | None = None) -> Told:
        self.now = self.now if at is None else at
        self.recent.append((self.now, event, self.machine.step(event, self.now)))
        return self

    def hear(self, node_id: str, message: messages.FromNode, at: float | None = None) -> Told:
        return self.take(run.Received(node_id, message), at)

    def up(self, *node_ids: str, at: float = 0.0, slots: int = 2) -> Told:
        for node_id in node_ids:
            info = messages.NodeInfo(
                node_id,
                f"host-{node_id}",
                slots=slots,
                min_nodes=self.settings.min_nodes,
                max_nodes=self.settings.max_nodes,
            )
            self.hear(node_id, messages.NodeJoined(info), at)
            self.hear(node_id, messages.NodeReady(0), at)
        return self

    def running(self, *node_ids: str, at: float) -> Told:
        for number, node_id in enumerate(node_ids):
            self.hear(node_id, messages.WorkersRunning(1, (100 + 10 * number, 101 + 10 * number)), at)
        return self

    def status(self, at: float | None = None) -> RunStatus:
        """As it is read by whoever asked for it over a wire."""
        now = self.now if at is None else at
        machine = self.machine
        status = status_of(machine.state, self.recent, machine.describe_activity(now), now, EPOCH)
        written = msgspec.json.encode(status)
        assert msgspec.json.decode(written, type=RunStatus) == status
        return status


def opened() -> Told:
    return Told().take(run.Opened(), 0.0)


def node(status: RunStatus, node_id: str) -> NodeStatus:
    return next(each for each in status.nodes if each.node_id == node_id)


def states(status: RunStatus) -> dict[str, str]:
    return {each.node_id: each.state for each in status.nodes}


# --- phases -----------------------------------------------------------------------------------------------------------


def test_nobody_is_here() -> None:
    """Before the first node: no time has been spent, and somebody is waited for."""
    status = opened().status(30.0)
    assert (status.run_id, status.phase, status.generation) == ("job", "gathering", 0)
    assert (status.nodes, status.generations, status.now) == ((), (), EPOCH + 30.0)
    assert status.goodput.spent.total_s == 0.0
    assert "0 of 2 nodes ready; waiting up to 570 s for 2 more" in status.doing


def test_gathering() -> None:
    """Who is here, since when, and who is missing."""
    told = opened().up("a", at=10.0)
    joined = messages.NodeInfo("b", "host-b", min_nodes=2, max_nodes=2)
    told.hear("b", messages.NodeJoined(joined), 12.0)
    status = told.status(15.0)
    assert status.phase == "gathering"
    assert states(status) == {"a": "waiting", "b": "joined"}
    a = node(status, "a")
    assert (a.name, a.host, a.slots, a.since) == ("host-a", "host-a", 2, EPOCH + 10.0)
    assert (a.rank, a.first_rank, a.pids) == (-1, -1, ())
    assert status.goodput.spent == Spent(waiting_s=5.0)
    assert "host-a" in status.doing


def test_running_and_some_workers_have_not_started() -> None:
    """Ranks are known as soon as the generation is formed; pids when all workers of a node run."""
    told = opened().up("a", "b", at=10.0).running("a", at=11.0)
    status = told.status(12.0)
    assert (status.phase, status.generation, status.world_size) == ("running", 1, 4)
    assert states(status) == {"a": "working", "b": "starting"}
    assert status.doing == "generation 1 is starting; waiting for the workers of host-b"
    a, b = node(status, "a"), node(status, "b")
    assert (a.rank, a.first_rank, a.pids, a.is_coordinator) == (0, 0, (100, 101), True)
    assert (b.rank, b.first_rank, b.pids, b.is_coordinator) == (1, 2, (), False)
    (generation,) = status.generations
    assert (generation.number, generation.why, generation.nodes, generation.workers) == (1, "first generation", 2, 4)
    assert (generation.formed_at, generation.running_at) == (EPOCH + 10.0, None)
    assert generation.spent == Spent(starting_s=2.0)


def test_running() -> None:
    told = opened().up("a", "b", at=10.0).running("a", "b", at=11.0)
    status = told.status(21.0)
    assert states(status) == {"a": "working", "b": "working"}
    assert status.doing == "generation 1 is running, 4 workers on 2 nodes"
    (generation,) = status.generations
    assert generation.running_at == EPOCH + 11.0
    assert status.goodput.spent == Spent(starting_s=1.0, training_s=10.0)
    assert status.goodput.spent.ratio == 10 / 11


def test_one_node_is_done() -> None:
    told = opened().up("a", "b", at=10.0).running("a", "b", at=11.0).hear("b", messages.NodeSucceeded(1), 20.0)
    status = told.status()
    assert states(status) == {"a": "working", "b": "done"}
    assert node(status, "b").since == EPOCH + 20.0
    assert status.doing.endswith("; 1 node of 2 done")


def test_a_spare() -> None:
    """It is here, it is ready, and there is no place for it."""
    status = opened().up("a", "b", "c", at=10.0).status()
    assert states(status) == {"a": "starting", "b": "starting", "c": "spare"}
    assert (node(status, "c").rank, node(status, "c").first_rank) == (-1, -1)


def test_draining() -> None:
    told = opened().up("a", "b", at=10.0).running("a", "b", at=11.0)
    told.hear("b", messages.NodeDraining(1, 30.0, "maintenance"), 20.0)
    assert states(told.status()) == {"a": "working", "b": "draining"}


def test_ending() -> None:
    """Who has failed, what it said, and who still stops."""
    told = opened().up("a", "b", at=10.0).running("a", "b", at=11.0)
    told.hear("b", messages.FailureSeen(1, BOOM, 70.0), 70.0).hear("b", messages.FailureSeen(1, CRASH, 70.5), 70.5)
    status = told.status(71.0)
    assert status.phase == "ending"
    assert states(status) == {"a": "stopping", "b": "stopping"}
    assert node(status, "b").failed == (0, 1)
    assert node(status, "a").failed == ()
    boom, crash = status.failures
    assert (boom.rank, boom.local_rank, boom.host, boom.exit_code) == (3, 1, "host-b", 1)
    assert (boom.what, boom.cause, boom.at) == ("exit code 1: RuntimeError: boom", "raised", EPOCH + 70.0)
    assert (crash.what, crash.cause) == ("SIGSEGV", "")
    (generation,) = status.generations
    assert (generation.ended_by, generation.ended_why) == ("failure", "rank 3 on host-b failed")
    assert (generation.ended_at, generation.settled_at) == (EPOCH + 70.0, None)
    assert generation.spent == Spent(starting_s=1.0, training_s=59.0, stopping_s=1.0)


def test_paused() -> None:
    """The restart is charged, and the cause of the generation that was tried again is kept."""
    told = Told(policy=Pausing()).take(run.Opened(), 0.0).up("a", "b").running("a", "b", at=1.0)
    told.hear("b", messages.FailureSeen(1, BOOM, 70.0), 70.0)
    for node_id in ("a", "b"):
        told.hear(node_id, messages.NodeStopped(1, 71.0), 71.0).hear(node_id, messages.NodeReady(1), 71.0)
    status = told.status(75.0)
    assert status.phase == "paused"
    assert states(status) == {"a": "waiting", "b": "waiting"}
    assert (status.restarts_used, status.max_restarts) == (1, 3)
    assert [(each.rank, each.what) for each in status.earlier] == [(3, "exit code 1: RuntimeError: boom")]
    assert status.goodput.spent == Spent(waiting_s=4.0, starting_s=1.0, training_s=69.0, stopping_s=1.0)
    assert status.doing


def test_recovering() -> None:
    """A new coordinator waits for the nodes of an earlier one."""
    told = Told().take(run.Opened(30.0, generation=3), 0.0)
    info = messages.NodeInfo("a", "host-a", slots=2, min_nodes=2, max_nodes=2)
    told.hear("a", messages.NodeJoined(info, 3, is_running=True, group_rank=0, group_world_size=2), 5.0)
    status = told.status(6.0)
    assert (status.phase, status.generation) == ("recovering", 3)
    assert states(status) == {"a": "working"}
    assert "the coordinator was replaced" in status.doing
    assert status.goodput.spent == Spent(waiting_s=6.0)


def test_over() -> None:
    """The verdict, and the same goodput for ever."""
    told = opened().up("a", "b", at=10.0).running("a", "b", at=11.0)
    for node_id in ("a", "b"):
        told.hear(node_id, messages.NodeSucceeded(1), 20.0)
    status = told.status(500.0)
    assert (status.phase, status.outcome, status.why) == ("over", "succeeded", "all 4 workers succeeded")
    assert status.doing == "the run is over: all 4 workers succeeded"
    assert status.goodput.spent == Spent(starting_s=1.0, training_s=9.0)
    verdict = told.machine.state.verdict
    assert verdict is not None
    assert status.goodput == verdict.goodput
    (generation,) = status.generations
    assert (generation.ended_by, generation.settled_at) == ("succeeded", EPOCH + 20.0)


def test_over_before_this_coordinator_began() -> None:
    """It only tells those who have not heard it."""
    told = Told().take(run.Opened(generation=3, verdict=Verdict(Outcome.CANCELLED, "enough")), 0.0)
    status = told.status(1.0)
    assert (status.phase, status.outcome, status.why, status.nodes) == ("over", "cancelled", "enough", ())


# --- details ----------------------------------------------------------------------------------------------------------


def test_progress() -> None:
    """Of each worker the last step, on the coordinator's clock; of a node the time of the last."""
    told = opened().up("a", "b", at=10.0).running("a", "b", at=11.0)
    ahead = 1000.0  # of b's clock
    steps = (
        messages.WorkerProgress(0, 5, 17, ahead + 12.0, ahead + 30.0, "checkpoint"),
        messages.WorkerProgress(1, 5, 18, ahead + 12.0, ahead + 31.0),
    )
    told.hear("b", messages.NodeProgress(1, ahead + 32.0, steps), 32.0)
    status = told.status()
    a, b = node(status, "a"), node(status, "b")
    assert (a.steps, a.phases, a.step_at) == ((), (), None)
    assert (b.steps, b.phases) == ((17, 18), ("checkpoint", ""))
    assert b.step_at == pytest.approx(EPOCH + 31.0)
    (generation,) = status.generations
    assert (generation.first_step, generation.last_step) == (5, 18)
    assert generation.spent == Spent(starting_s=2.0, training_s=20.0)


def test_a_worker_that_has_said_only_what_it_does() -> None:
    """It has done no step, and the ledger hears of none."""
    told = opened().up("a", "b", at=10.0).running("a", "b", at=11.0)
    told.hear("a", messages.NodeProgress(1, 12.0, (messages.WorkerProgress(1, -1, -1, 0.0, 0.0, "loading"),)), 12.0)
    status = told.status()
    a = node(status, "a")
    assert (a.steps, a.phases) == ((-1, -1), ("", "loading"))
    (generation,) = status.generations
    assert (generation.first_step, generation.last_step) == (-1, -1)
    assert generation.spent == Spent(starting_s=1.0, training_s=1.0)


def test_what_is_known_of_a_node_is_of_this_generation() -> None:
    """Pids and steps of the one before are gone when the next is formed."""
    told = opened().up("a", "b").running("a", "b", at=1.0)
    told.hear("a", messages.NodeProgress(1, 5.0, (messages.WorkerProgress(0, 0, 4, 1.0, 5.0),)), 5.0)
    told.take(run.RestartRequested("new data"), 10.0)
    for node_id in ("a", "b"):
        told.hear(node_id, messages.NodeReady(1), 11.0)
    status = told.status()
    assert (status.generation, status.requests, status.restarts_used) == (2, 1, 0)
    assert [(each.pids, each.steps) for each in status.nodes] == [((), ()), ((), ())]
    assert [each.ended_by for each in status.generations] == ["request", ""]


def test_what_happened_last_is_told_in_sentences() -> None:
    """Oldest first, with the time of each; nodes are called by their hosts."""
    told = opened().up("a", "b", at=10.0).take(run.DrainRequested("b", "maintenance"), 20.0)
    told.hear("b", messages.NodeDraining(1, 30.0, "asked"), 21.0)
    events = told.status().events
    assert [each.at for each in events] == sorted(each.at for each in events)
    texts = [each.text for each in events]
    assert "an operator drained host-b: maintenance" in texts
    assert "to host-b: leave requested: maintenance" in texts
    assert events[-1].at == EPOCH + 21.0


def test_only_the_last_events_and_the_first_failures_are_shown() -> None:
    """A status has bounds, whatever happened."""
    told = opened().up("a", "b")
    for number in range(300):
        told.take(run.DrainRequested("a", f"whim {number}"), 1.0 + number)
    told.hear("a", messages.FailureSeen(1, BOOM, 400.0), 400.0)
    many = tuple(Failure(1, rank, rank, 100 + rank, 1, 401.0) for rank in range(200))
    told.hear("a", messages.NodeStopped(1, 402.0, many), 402.0)
    status = told.status()
    assert len(status.events) == 100
    assert len(status.failures) == 64
    assert status.failures[0].rank == 3


# --- size -------------------------------------------------------------------------------------------------------------


def test_a_thousand_nodes_are_a_short_message() -> None:
    """8,000 workers that say their steps, and three generations before."""
    count = 1000
    told = Told(count, count).take(run.Opened(), 0.0)
    names = [f"{number:032x}" for number in range(count)]
    told.up(*names, slots=8)
    for generation in range(1, 4):
        for node_id in names:
            told.hear(node_id, messages.WorkersRunning(generation, tuple(range(2_000_000, 2_000_008))))
        told.take(run.RestartRequested("new data"), told.now + 60.0)
        for node_id in names:
            told.hear(node_id, messages.NodeReady(generation))
    for node_id in names:
        told.hear(node_id, messages.WorkersRunning(4, tuple(range(2_000_000, 2_000_008))))
        steps = tuple(messages.WorkerProgress(rank, 0, 123_456, told.now, told.now) for rank in range(8))
        told.hear(node_id, messages.NodeProgress(4, told.now, steps))
    told.recent = told.recent[-256:]  # as the seat keeps them
    status = told.status()
    assert (len(status.nodes), status.world_size, status.generation) == (count, 8 * count, 4)
    assert all(len(each.pids) == len(each.steps) == 8 for each in status.nodes)
    assert len(msgspec.json.encode(status)) < 600_000


def _hanging(*locations: messages.StackLocation, is_odd: bool) -> RunStatus:
    told = opened().up("a", "b").running("a", "b", at=10.0)
    report = messages.HangReport(1, 2, 4, 10.0, "no step", locations, is_odd)
    told.machine.state.hang = Suspicion(1, 20.0, "no step", set(), locations, report)
    return told.status(58.0)


def test_since_when_nothing_moves_is_told_as_a_time_and_in_words() -> None:
    """A page counts from the time; a terminal prints the words. The odd one is named alone."""
    odd = messages.StackLocation((3,), ("/job/data.py:8 in load",), host="host-b", local_rank=1)
    others = messages.StackLocation((0, 1, 2), ("/job/train.py:5 in step",), host="host-a", local_rank=0)
    status = _hanging(odd, others, is_odd=True)
    assert (status.hang_since, status.hang_where) == (EPOCH + 20.0, "rank 3 on host-b: at /job/data.py:8 in load")
    still = "generation 1 seems to hang: no activity for 38 s"
    assert status.hang == f"{still}; rank 3 on host-b: at /job/data.py:8 in load"
    assert opened().up("a", "b").status().hang_since is None


def test_if_no_rank_stands_out_all_places_are_named() -> None:
    """The first is not blamed for being the first. Of many locations the first are named, and the rest counted."""
    locations = [
        messages.StackLocation((rank,), (f"/job/train.py:{rank} in step",), host="host-a", local_rank=rank)
        for rank in range(9)
    ]
    assert _hanging(*locations[:2], is_odd=False).hang_where == (
        "no rank stands out: rank 0 on host-a: at /job/train.py:0 in step; rank 1 on host-a: at /job/train.py:1 in step"
    )
    assert _hanging(*locations, is_odd=False).hang_where.endswith(
        "rank 2 on host-a: at /job/train.py:2 in step; 6 more locations"
    )
    assert _hanging(locations[0], is_odd=False).hang_where == "rank 0 on host-a: at /job/train.py:0 in step"
