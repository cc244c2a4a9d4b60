"""What agents with hooks say about themselves: the same as TorchElastic's, and without any harm to the run."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from kit.processes import PATIENCE_S
from tenax import events, metrics
from tenax._node.sinks import Sinks
from tenax.agent.server import LocalElasticAgent, RunResult, SimpleElasticAgent, WorkerGroup, WorkerSpec, WorkerState
from tenax.multiprocessing.errors import ProcessFailure
from tenax.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

_TOY = Path(__file__).parent / "toy_agent_main.py"


def heard(root: str, codes: list[list[int]], max_restarts: int) -> dict[str, list[Any]]:
    words = [sys.executable, str(_TOY), root, json.dumps(codes), str(max_restarts)]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=PATIENCE_S * 2)
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("codes", "max_restarts"),
    [
        pytest.param([[0, 0]], 0, id="success"),
        pytest.param([[0, 3], [0, 0]], 2, id="success after a restart"),
        pytest.param([[4, 0]], 0, id="failure"),
        pytest.param([[4, 5]], 0, id="failure of all"),
    ],
)
def test_an_agent_of_others_is_heard_as_under_torch(codes: list[list[int]], max_restarts: int) -> None:
    """Every event with its source, keys and ranks, in the same order; every metric, in the same order.

    Only that ours knows the group already when it assigns ranks in it.
    """
    pytest.importorskip("torch", reason="torch is not installed")
    theirs = heard("torch.distributed.elastic", codes, max_restarts)
    ours = heard("tenax", codes, max_restarts)
    for name, _, _, values in ours["events"] + theirs["events"]:
        if name.endswith("ASSIGN_WORKER_RANKS"):
            del values["group_rank"], values["group_world_size"]
    assert ours["events"] == theirs["events"]
    assert ours["metrics"] == theirs["metrics"]


class Quick(SimpleElasticAgent):
    """Workers that have succeeded before anybody looks."""

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        return {0: "id-0"}

    def _stop_workers(self, worker_group: WorkerGroup) -> None: ...

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        return RunResult(WorkerState.SUCCEEDED, return_values={0: "done"})

    def _shutdown(self, *args: Any, **kwargs: Any) -> None: ...


class Ear(events.EventHandler):
    def __init__(self) -> None:
        self.heard: list[events.Event] = []

    def record(self, event: Any) -> None:
        self.heard.append(event)


def spec(**options: Any) -> WorkerSpec:
    return WorkerSpec(role="quick", entrypoint="/bin/true", monitor_interval=0.01, **options)


def test_the_end_of_the_agent_is_an_event_when_nobody_else_records_it() -> None:
    ear = Ear()
    with events.configure(ear):
        Quick(spec(), records_end=True).run()
        silent = len(ear.heard)
        Quick(spec()).run()
    assert [event.metadata["state"] for event in ear.heard[:silent]][-1] == "SUCCEEDED"
    assert ear.heard[silent - 1].source is events.EventSource.AGENT
    assert all(event.source is events.EventSource.WORKER for event in ear.heard[silent:] if event.name.endswith("DED"))


class Broken(Quick):
    def _initialize_workers(self, worker_group: WorkerGroup) -> None:
        raise RuntimeError("nothing works today")


def test_an_agent_that_cannot_go_on_says_why() -> None:
    ear = Ear()
    with events.configure(ear), pytest.raises(RuntimeError, match="nothing works"):
        Broken(spec(), records_end=True).run()
    (event,) = ear.heard
    assert (event.metadata["state"], event.source) == ("FAILED", events.EventSource.AGENT)
    assert "RuntimeError: nothing works today" in str(event.metadata["raw_error"])


def test_a_launcher_can_record_the_end_itself() -> None:
    """As TorchElastic's launchers do."""
    agent = Quick(spec())
    agent.run()
    event = agent.get_event_succeeded()
    assert (event.name, event.source.name) == ("torchelastic.worker.status.SUCCEEDED", "AGENT")
    try:
        raise ValueError("this one")
    except ValueError:
        assert "ValueError: this one" in str(agent.get_event_failed().metadata["raw_error"])


class Rude(metrics.MetricHandler):
    def emit(self, metric_data: metrics.MetricData) -> None:
        raise OSError("the sink is full")


class Stuck(metrics.MetricHandler):
    def __init__(self) -> None:
        self.may_end = threading.Event()

    def emit(self, metric_data: metrics.MetricData) -> None:
        self.may_end.wait(PATIENCE_S)


@pytest.fixture
def usual_metrics() -> Any:
    yield
    metrics.configure(metrics.NullMetricHandler())


@pytest.mark.usefixtures("usual_metrics")
def test_a_metric_handler_that_raises_is_told_on_stderr_and_costs_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    metrics.configure(Rude())
    assert Quick(spec()).run().return_values == {0: "done"}
    said = capfd.readouterr().err
    assert "the metric handler 'Rude' failed" in said
    assert "OSError: the sink is full" in said


@pytest.mark.usefixtures("usual_metrics")
@pytest.mark.parametrize("kind", ["hooks", "events"])
def test_a_metric_handler_that_never_returns_holds_up_nothing(
    kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    stuck = Stuck()
    metrics.configure(stuck)
    if kind == "hooks":
        agent: SimpleElasticAgent = Quick(spec())
    else:
        agent = LocalElasticAgent(spec(), log_dir=str(tmp_path))
    assert not agent.run().is_failed()
    stuck.may_end.set()
    assert "the metric handler 'Stuck' was too slow (" in capfd.readouterr().err


class Meter(metrics.MetricHandler):
    def __init__(self) -> None:
        self.names: set[str] = set()

    def emit(self, metric_data: metrics.MetricData) -> None:
        self.names.add(metric_data.name)


class Alone(RendezvousHandler):
    """A handler of others: asked, so that the local agent's own hooks run."""

    def get_backend(self) -> str:
        return "alone"

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(None, 0, 1, RendezvousStoreInfo("localhost", 1))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None: ...

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return "run"

    def shutdown(self) -> bool:
        return True


@pytest.mark.usefixtures("usual_metrics")
def test_every_hook_of_the_local_agent_is_measured(tmp_path: Path) -> None:
    """Under torch's names, and nothing else is."""
    meter = Meter()
    metrics.configure(meter)
    again = WorkerSpec(
        role="quick",
        entrypoint="/bin/sh",
        args=("-c", "exit $((1 - TORCHELASTIC_RESTART_COUNT))"),
        monitor_interval=0.01,
        max_restarts=1,
        rdzv_handler=Alone(),
    )
    assert not LocalElasticAgent(again, log_dir=str(tmp_path)).run().is_failed()
    simple = ("run", "_rendezvous", "_assign_worker_ranks", "_initialize_workers", "_restart_workers")
    hooks = [f"SimpleElasticAgent.{name}" for name in simple]
    hooks += [f"LocalElasticAgent.{name}" for name in ("_start_workers", "_stop_workers", "_monitor_workers")]
    measured = {name for name in meter.names if "Agent" in name}
    assert measured == {f"{hook}.{what}" for hook in hooks for what in ("success", "duration.ms")}


def test_an_event_handler_that_nobody_knows_is_refused_before_anything_starts() -> None:
    with pytest.raises(ValueError, match="unknown event handler 'nobody'"):
        Quick(spec(event_log_handler="nobody")).run()


def test_without_listeners_there_is_nothing_to_close() -> None:
    outlets = Sinks()
    assert not outlets.has_events
    assert not outlets.has_metrics
    assert outlets.close() == []


def test_a_handler_that_was_named_is_closed_at_the_end(tmp_path: Path) -> None:
    """And what it was told is in its file by then."""
    path = tmp_path / "events.jsonl"
    Quick(spec(event_log_handler=f"jsonl:{path}")).run()
    names = [json.loads(line)["name"].rpartition(".")[2] for line in path.read_text().splitlines()]
    assert names == ["RENDEZVOUS", "ASSIGN_WORKER_RANKS", "START", "SUCCEEDED"]


class OwnRun(Quick):
    """Downstream agents bring a main loop of their own."""

    def run(self, role: str = "default") -> RunResult:
        self._initialize_workers(self._worker_group)
        return self._monitor_workers(self._worker_group)


@pytest.mark.usefixtures("usual_metrics")
def test_an_agent_with_a_run_of_its_own_is_heard_too(tmp_path: Path) -> None:
    """The hooks of ours that it calls say what they always say; what is left is delivered when the agent is gone."""
    path = tmp_path / "events.jsonl"
    agent = OwnRun(spec(event_log_handler=f"jsonl:{path}"))
    agent.run()
    assert agent._total_execution_time >= 0
    del agent
    gc.collect()
    names = [json.loads(line)["name"].rpartition(".")[2] for line in path.read_text().splitlines()]
    assert names == ["RENDEZVOUS", "ASSIGN_WORKER_RANKS", "START"]


class Failing(Quick):
    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        return RunResult(WorkerState.FAILED, failures={0: ProcessFailure(0, 77, 5, "")})


def test_the_end_of_a_run_that_failed_is_a_failure() -> None:
    ear = Ear()
    with events.configure(ear):
        assert Failing(spec(max_restarts=0), records_end=True).run().is_failed()
    assert (ear.heard[-1].metadata["state"], ear.heard[-1].source) == ("FAILED", events.EventSource.AGENT)


def test_a_second_run_of_one_agent_is_heard_as_the_first(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ear = Ear()
    agent = LocalElasticAgent(spec(), log_dir=str(tmp_path))
    with events.configure(ear):
        agent.run()
        first = len(ear.heard)
        agent.run()
    assert (first > 0, len(ear.heard)) == (True, 2 * first)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("way", ["in the object", "in a mixin", "only the metrics"])
def test_a_hook_is_heeded_however_it_was_overridden(tmp_path: Path, way: str) -> None:
    called = []

    class Mixin:
        def _stop_workers(self, worker_group: WorkerGroup) -> None:
            called.append("stop")

        def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
            called.append("start")
            return super()._start_workers(worker_group)  # type: ignore[misc]

    class Mixed(Mixin, LocalElasticAgent): ...

    class Measured(LocalElasticAgent):
        def _record_metrics(self, result: RunResult) -> None:
            called.append("metrics")

    kind = {"in the object": LocalElasticAgent, "in a mixin": Mixed, "only the metrics": Measured}[way]
    agent = kind(spec(), log_dir=str(tmp_path))
    if way == "in the object":
        ours = agent._start_workers
        agent._start_workers = lambda group: (called.append("start"), ours(group))[1]  # type: ignore[method-assign]
    assert not agent.run().is_failed()
    assert called[:1] == [{"only the metrics": "metrics"}.get(way, "start")]


def test_stopping_workers_is_a_shutdown(tmp_path: Path) -> None:
    """As there: a subclass that overrides only ``_shutdown`` also sees restarts."""
    called = []

    class Counting(LocalElasticAgent):
        def _shutdown(self, death_sig: Any = 15, timeout: int = 30) -> None:
            called.append(self._remaining_restarts)
            super()._shutdown(death_sig, timeout)

    once = WorkerSpec(
        role="quick",
        entrypoint="/bin/sh",
        args=("-c", "exit $((1 - TORCHELASTIC_RESTART_COUNT))"),
        monitor_interval=0.01,
        max_restarts=1,
    )
    assert not Counting(once, log_dir=str(tmp_path)).run().is_failed()
    assert called == [0, 0]  # the restart, and the end


class Odd(Quick):
    def _handler(self, spec: WorkerSpec) -> Any:
        return self

    def next_rendezvous(self) -> Any:
        return 5


def test_an_answer_of_a_rendezvous_that_makes_no_sense_is_named() -> None:
    with pytest.raises(TypeError, match=r"returned 5; expected a RendezvousInfo or \(store, rank, world_size\)"):
        Odd(spec()).run()
