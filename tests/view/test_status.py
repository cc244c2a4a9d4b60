"""The status of a run: one value, made from the coordinator's state, in every phase and at every size."""

from __future__ import annotations

import msgspec
import pytest

from tenax._core import coordinator as run
from tenax._core import messages
from tenax._core.coordinator import AnyCoordinatorEvent, CoordinatorMachine, RunSettings, Send, Suspicion
from tenax._core.ledger import Spent
from tenax._core.model import Evidence, Failure, Outcome, Verdict
from tenax._core.policy import AnyDecision, BudgetPolicy, History, RestartPolicy, Wait
from tenax._view.status import NodeStatus, RunStatus, slow_ranks, status_of

EPOCH = 1_700_000_000.0  # when the coordinator's clock was 0
BOOM = Failure(1, 1, 3, 101, 1, 70.0, evidence=Evidence("RuntimeError", "RuntimeError: boom", cause="raised"))
CRASH = Failure(1, 0, 2, 100, -11, 69.0)


class Pausing:
    """Waits ten seconds before each restart."""

    def decide(self, failure: Failure, history: History) -> AnyDecision:
        return Wait("cool down", seconds=10.0)


class Run:
    """A coordinator, and the steps that it has taken."""

    def __init__(self, min_nodes: int = 2, max_nodes: int = 2, policy: RestartPolicy | None = None) -> None:
        self.settings = RunSettings("job", min_nodes, max_nodes, max_restarts=3, last_call_s=5.0, serving_node="a")
        self.machine = CoordinatorMachine(self.settings, policy or BudgetPolicy())
        self.recent: list[tuple[float, AnyCoordinatorEvent, list[Send]]] = []
        self.now = 0.0

    def step(self, event: AnyCoordinatorEvent, at: float | None = None) -> Run:
        self.now = self.now if at is None else at
        self.recent.append((self.now, event, self.machine.step(event, self.now).sends))
        return self

    def receive(self, node_id: str, message: messages.FromNode, at: float | None = None) -> Run:
        return self.step(run.Received(node_id, message), at)

    def up(self, *node_ids: str, at: float = 0.0, slots: int = 2) -> Run:
        for node_id in node_ids:
            info = messages.NodeInfo(
                node_id,
                f"host-{node_id}",
                slots=slots,
                min_nodes=self.settings.min_nodes,
                max_nodes=self.settings.max_nodes,
            )
            self.receive(node_id, messages.NodeJoined(info), at)
            self.receive(node_id, messages.NodeReady(0), at)
        return self

    def running(self, *node_ids: str, at: float) -> Run:
        for number, node_id in enumerate(node_ids):
            self.receive(node_id, messages.WorkersRunning(1, (100 + 10 * number, 101 + 10 * number)), at)
        return self

    def status(self, at: float | None = None) -> RunStatus:
        """Return the status, after encoding and decoding it."""
        now = self.now if at is None else at
        machine = self.machine
        status = status_of(machine.state, self.recent, machine.describe_activity(now), now, EPOCH)
        written = msgspec.json.encode(status)
        assert msgspec.json.decode(written, type=RunStatus) == status
        return status


def opened() -> Run:
    return Run().step(run.Opened(), 0.0)


def node(status: RunStatus, node_id: str) -> NodeStatus:
    return next(each for each in status.nodes if each.node_id == node_id)


def states(status: RunStatus) -> dict[str, str]:
    return {each.node_id: each.state for each in status.nodes}


# --- phases -----------------------------------------------------------------------------------------------------------


def test_without_nodes_the_run_is_gathering() -> None:
    """No time has been spent yet."""
    status = opened().status(30.0)
    assert (status.run_id, status.phase, status.generation) == ("job", "gathering", 0)
    assert (status.nodes, status.generations, status.now) == ((), (), EPOCH + 30.0)
    assert status.goodput.spent.total_s == 0.0
    assert "0 of 2 nodes ready; waiting up to 9 min 30 s for 2 more" in status.doing


def test_gathering_shows_nodes_and_waiting_time() -> None:
    job = opened().up("a", at=10.0)
    joined = messages.NodeInfo("b", "host-b", min_nodes=2, max_nodes=2)
    job.receive("b", messages.NodeJoined(joined), 12.0)
    status = job.status(15.0)
    assert status.phase == "gathering"
    assert states(status) == {"a": "waiting", "b": "joined"}
    a = node(status, "a")
    assert (a.name, a.host, a.slots, a.since) == ("host-a", "host-a", 2, EPOCH + 10.0)
    assert (a.rank, a.first_rank, a.pids) == (-1, -1, ())
    assert status.goodput.spent == Spent(waiting_s=5.0)
    assert "host-a" in status.doing


def test_ranks_are_known_before_all_workers_have_started() -> None:
    """Pids are known when all workers of a node run."""
    job = opened().up("a", "b", at=10.0).running("a", at=11.0)
    status = job.status(12.0)
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


def test_a_running_generation() -> None:
    job = opened().up("a", "b", at=10.0).running("a", "b", at=11.0)
    status = job.status(21.0)
    assert states(status) == {"a": "working", "b": "working"}
    assert status.doing == "generation 1 is running, 4 workers on 2 nodes"
    (generation,) = status.generations
    assert generation.running_at == EPOCH + 11.0
    assert status.goodput.spent == Spent(starting_s=1.0, training_s=10.0)
    assert status.goodput.spent.ratio == 10 / 11


def test_a_node_whose_workers_succeeded_is_done() -> None:
    job = opened().up("a", "b", at=10.0).running("a", "b", at=11.0).receive("b", messages.NodeSucceeded(1), 20.0)
    status = job.status()
    assert states(status) == {"a": "working", "b": "done"}
    assert node(status, "b").since == EPOCH + 20.0
    assert status.doing.endswith("; 1 node of 2 done")


def test_a_spare_has_no_rank() -> None:
    status = opened().up("a", "b", "c", at=10.0).status()
    assert states(status) == {"a": "starting", "b": "starting", "c": "spare"}
    assert (node(status, "c").rank, node(status, "c").first_rank) == (-1, -1)


def test_a_draining_node() -> None:
    job = opened().up("a", "b", at=10.0).running("a", "b", at=11.0)
    job.receive("b", messages.NodeDraining(1, 30.0, "maintenance"), 20.0)
    assert states(job.status()) == {"a": "working", "b": "draining"}


def test_a_failed_generation_shows_failures_and_stopping_nodes() -> None:
    job = opened().up("a", "b", at=10.0).running("a", "b", at=11.0)
    job.receive("b", messages.FailureSeen(1, BOOM, 70.0), 70.0).receive("b", messages.FailureSeen(1, CRASH, 70.5), 70.5)
    status = job.status(71.0)
    assert status.phase == "ending"
    assert states(status) == {"a": "stopping", "b": "stopping"}
    assert node(status, "b").failed == (0, 1)
    assert node(status, "a").failed == ()
    crash, boom = status.failures  # the crash began earlier
    assert (crash.role, boom.role) == ("first", "independent")
    assert (boom.rank, boom.local_rank, boom.host, boom.exit_code) == (3, 1, "host-b", 1)
    assert (boom.what, boom.cause, boom.at) == ("raised RuntimeError: boom", "exception", EPOCH + 70.0)
    assert (crash.what, crash.cause) == ("was killed by SIGSEGV (invalid memory access)", "segmentation_fault")
    (generation,) = status.generations
    assert (generation.ended_by, generation.ended_why) == ("failure", "rank 3 on host-b failed")
    assert (generation.ended_at, generation.settled_at) == (EPOCH + 70.0, None)
    assert generation.spent == Spent(starting_s=1.0, training_s=59.0, stopping_s=1.0)


def test_a_pause_shows_the_earlier_failure_and_the_used_restart() -> None:
    job = Run(policy=Pausing()).step(run.Opened(), 0.0).up("a", "b").running("a", "b", at=1.0)
    job.receive("b", messages.FailureSeen(1, BOOM, 70.0), 70.0)
    for node_id in ("a", "b"):
        job.receive(node_id, messages.NodeStopped(1, 71.0), 71.0).receive(node_id, messages.NodeReady(1), 71.0)
    status = job.status(75.0)
    assert status.phase == "paused"
    assert states(status) == {"a": "waiting", "b": "waiting"}
    assert (status.restarts_used, status.max_restarts) == (1, 3)
    assert [(each.rank, each.what) for each in status.earlier] == [(3, "raised RuntimeError: boom")]
    assert status.goodput.spent == Spent(waiting_s=4.0, starting_s=1.0, training_s=69.0, stopping_s=1.0)
    assert status.doing


def test_a_new_coordinator_waits_for_the_nodes_of_an_earlier_one() -> None:
    job = Run().step(run.Opened(30.0, generation=3), 0.0)
    info = messages.NodeInfo("a", "host-a", slots=2, min_nodes=2, max_nodes=2)
    job.receive("a", messages.NodeJoined(info, 3, is_running=True, group_rank=0, group_world_size=2), 5.0)
    status = job.status(6.0)
    assert (status.phase, status.generation) == ("recovering", 3)
    assert states(status) == {"a": "working"}
    assert "the coordinator was replaced" in status.doing
    assert status.goodput.spent == Spent(waiting_s=6.0)


def test_an_ended_run_shows_its_verdict_and_a_constant_goodput() -> None:
    job = opened().up("a", "b", at=10.0).running("a", "b", at=11.0)
    for node_id in ("a", "b"):
        job.receive(node_id, messages.NodeSucceeded(1), 20.0)
    status = job.status(500.0)
    assert (status.phase, status.outcome, status.why) == ("over", "succeeded", "all 4 workers succeeded")
    assert status.doing == "the run is over: all 4 workers succeeded"
    assert status.goodput.spent == Spent(starting_s=1.0, training_s=9.0)
    verdict = job.machine.state.verdict
    assert verdict is not None
    assert status.goodput == verdict.goodput
    (generation,) = status.generations
    assert (generation.ended_by, generation.settled_at) == ("succeeded", EPOCH + 20.0)


def test_a_coordinator_opened_with_a_verdict_shows_it() -> None:
    job = Run().step(run.Opened(generation=3, verdict=Verdict(Outcome.CANCELLED, "enough")), 0.0)
    status = job.status(1.0)
    assert (status.phase, status.outcome, status.why, status.nodes) == ("over", "cancelled", "enough", ())


# --- details ----------------------------------------------------------------------------------------------------------


def test_progress_is_converted_to_the_coordinators_clock() -> None:
    """The last step of each worker, and the time of the last step of a node."""
    job = opened().up("a", "b", at=10.0).running("a", "b", at=11.0)
    ahead = 1000.0  # of b's clock
    steps = (
        messages.WorkerProgress(0, 5, 17, ahead + 12.0, ahead + 30.0, "checkpoint"),
        messages.WorkerProgress(1, 5, 18, ahead + 12.0, ahead + 31.0),
    )
    job.receive("b", messages.NodeProgress(1, ahead + 32.0, steps), 32.0)
    status = job.status()
    a, b = node(status, "a"), node(status, "b")
    assert (a.steps, a.phases, a.step_at) == ((), (), None)
    assert (b.steps, b.phases) == ((17, 18), ("checkpoint", ""))
    assert b.step_at == pytest.approx(EPOCH + 31.0)
    (generation,) = status.generations
    assert (generation.first_step, generation.last_step) == (5, 18)
    assert generation.spent == Spent(starting_s=2.0, training_s=20.0)


def test_the_activity_of_each_worker_is_shown() -> None:
    """With times of the coordinator's clock; -1 and 0: not known."""
    job = opened().up("a", "b", at=10.0).running("a", "b", at=11.0)
    workers = (messages.WorkerProgress(1, 1, 5, 912.0, 916.0, output_at=915.0, step_s=1.0, cpus=0.5),)
    job.receive("a", messages.NodeProgress(1, 920.0, workers), 20.0)
    a = node(job.status(), "a")
    assert a.outputs == (0.0, pytest.approx(EPOCH + 15.0))
    assert a.stepped == (0.0, pytest.approx(EPOCH + 16.0))
    assert (a.steps, a.step_s, a.cpus) == ((-1, 5), (0.0, 1.0), (-1.0, 0.5))


STEPS_4 = (0.31, 0.30, 0.29, 0.30)


@pytest.mark.parametrize(
    ("step_s", "cpus", "gpus", "slow"),
    [
        (STEPS_4, (), (), ()),
        ((0.31, 0.30, 0.29, 0.60), (), (), ("rank 3 on b takes 600 ms per step, the others 300 ms",)),
        ((0.30, 0.60), (), (), ("rank 1 on a takes 600 ms per step, the others 300 ms",)),
        ((0.003, 0.006), (), (), ()),  # too short to matter
        ((0.3, 0.3, 0.6, 0.6), (), (), ()),  # different work
        (STEPS_4, (0.1, 0.1, 0.1, 1.0), (), ()),  # steps decide
        ((), (0.1, 0.1, 1.0, 0.2), (), ("rank 2 on b uses 100 % of a CPU, the others 10 %",)),
        ((), (1.0, 1.0, 0.05, 1.0), (), ("rank 2 on b uses 5 % of a CPU, the others 100 %",)),
        ((), (0.6, 0.9, 0.7, 0.8), (), ()),
        ((), (0.5,), (), ()),
        ((), (1.0, 1.0), (1.0, 1.0, 0.3, 0.9), ("rank 2 on b uses 30 % of its GPU, the others 100 %",)),
    ],
)
def test_a_rank_that_is_slower_than_its_peers_is_named(
    step_s: tuple[float, ...], cpus: tuple[float, ...], gpus: tuple[float, ...], slow: tuple[str, ...]
) -> None:
    nodes = [
        NodeStatus(name, name, name, "working", 0.0, 2, index, first, step_s=step_s[of], cpus=cpus[of], gpus=gpus[of])
        for index, name in enumerate("ab")
        for first in [2 * index]
        for of in [slice(first, first + 2)]
    ]
    assert slow_ranks(nodes) == slow


def test_a_worker_that_reported_only_a_phase_has_no_step() -> None:
    """The ledger has no step either."""
    job = opened().up("a", "b", at=10.0).running("a", "b", at=11.0)
    job.receive("a", messages.NodeProgress(1, 12.0, (messages.WorkerProgress(1, -1, -1, 0.0, 0.0, "loading"),)), 12.0)
    status = job.status()
    a = node(status, "a")
    assert (a.steps, a.phases) == ((), ("", "loading"))
    (generation,) = status.generations
    assert (generation.first_step, generation.last_step) == (-1, -1)
    assert generation.spent == Spent(starting_s=1.0, training_s=1.0)


def test_pids_and_steps_of_the_last_generation_are_not_shown() -> None:
    job = opened().up("a", "b").running("a", "b", at=1.0)
    job.receive("a", messages.NodeProgress(1, 5.0, (messages.WorkerProgress(0, 0, 4, 1.0, 5.0),)), 5.0)
    job.step(run.RestartRequested("new data"), 10.0)
    for node_id in ("a", "b"):
        job.receive(node_id, messages.NodeReady(1), 11.0)
    status = job.status()
    assert (status.generation, status.requests, status.restarts_used) == (2, 1, 0)
    assert [(each.pids, each.steps) for each in status.nodes] == [((), ()), ((), ())]
    assert [each.ended_by for each in status.generations] == ["request", ""]


def test_recent_events_are_shown_oldest_first() -> None:
    """Nodes are named by host."""
    job = opened().up("a", "b", at=10.0).step(run.DrainRequested("b", "maintenance"), 20.0)
    job.receive("b", messages.NodeDraining(1, 30.0, "asked"), 21.0)
    events = job.status().events
    assert [each.at for each in events] == sorted(each.at for each in events)
    texts = [each.text for each in events]
    assert "an operator drained host-b: maintenance" in texts
    assert "to host-b: leave requested: maintenance" in texts
    assert events[-1].at == EPOCH + 21.0


def test_the_number_of_events_and_failures_is_bounded() -> None:
    job = opened().up("a", "b")
    for number in range(300):
        job.step(run.DrainRequested("a", f"reason {number}"), 1.0 + number)
    job.receive("a", messages.FailureSeen(1, BOOM, 400.0), 400.0)
    many = tuple(Failure(1, rank, rank, 100 + rank, 1, 401.0) for rank in range(200))
    job.receive("a", messages.NodeStopped(1, 402.0, many), 402.0)
    status = job.status()
    assert len(status.events) == 100
    assert len(status.failures) == 64
    assert status.failures[0].rank == 3


# --- size -------------------------------------------------------------------------------------------------------------


def test_the_status_of_a_thousand_nodes_is_small() -> None:
    """8,000 workers that report steps, after three generations."""
    count = 1000
    job = Run(count, count).step(run.Opened(), 0.0)
    names = [f"{number:032x}" for number in range(count)]
    job.up(*names, slots=8)
    for generation in range(1, 4):
        for node_id in names:
            job.receive(node_id, messages.WorkersRunning(generation, tuple(range(2_000_000, 2_000_008))))
        job.step(run.RestartRequested("new data"), job.now + 60.0)
        for node_id in names:
            job.receive(node_id, messages.NodeReady(generation))
    for node_id in names:
        job.receive(node_id, messages.WorkersRunning(4, tuple(range(2_000_000, 2_000_008))))
        steps = tuple(messages.WorkerProgress(rank, 0, 123_456, job.now, job.now) for rank in range(8))
        job.receive(node_id, messages.NodeProgress(4, job.now, steps))
    job.recent = job.recent[-256:]  # as the coordinator host keeps them
    status = job.status()
    assert (len(status.nodes), status.world_size, status.generation) == (count, 8 * count, 4)
    assert all(len(each.pids) == len(each.steps) == 8 for each in status.nodes)
    assert len(msgspec.json.encode(status)) < 600_000


def _hanging(*locations: messages.StackLocation, is_odd: bool) -> RunStatus:
    job = opened().up("a", "b").running("a", "b", at=10.0)
    report = messages.HangReport(1, 2, 4, 10.0, "no step", locations, is_odd)
    job.machine.state.phase.watch.suspicion = Suspicion(1, 20.0, "no step", set(), locations, report=report)
    return job.status(58.0)


def test_a_hang_has_a_start_time_and_a_text() -> None:
    """The location that stands out is named alone."""
    odd = messages.StackLocation((3,), ("/job/data.py:8 in load",), host="host-b", local_rank=1)
    others = messages.StackLocation((0, 1, 2), ("/job/train.py:5 in step",), host="host-a", local_rank=0)
    status = _hanging(odd, others, is_odd=True)
    assert (status.hang_since, status.hang_where) == (EPOCH + 20.0, "rank 3 on host-b: at /job/data.py:8 in load")
    still = "generation 1 seems to hang: no activity for 38 s"
    assert status.hang == f"{still}; rank 3 on host-b: at /job/data.py:8 in load"
    assert opened().up("a", "b").status().hang_since is None


def test_without_a_rank_that_stands_out_several_locations_are_named() -> None:
    """Of many locations the first are named, and the others counted."""
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
