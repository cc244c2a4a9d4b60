"""Events and metrics of agents with hooks are TorchElastic's, and handlers cannot harm the run."""

from __future__ import annotations

import gc
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from kit.processes import TIMEOUT_S, needs_torch
from kit.torch_python import TorchPython
from tenax import events, metrics
from tenax._node.sinks import Sinks
from tenax.agent.server import LocalElasticAgent, RunResult, SimpleElasticAgent, WorkerGroup, WorkerSpec, WorkerState
from tenax.multiprocessing.errors import ProcessFailure
from tenax.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

_TOY = Path(__file__).parent / "toy_agent_main.py"


# By name: the exit codes of the workers of each attempt, and --max-restarts.
CASES = {
    "success": ([[0, 0]], 0),
    "success after a restart": ([[0, 3], [0, 0]], 2),
    "failure": ([[4, 0]], 0),
    "failure of all": ([[4, 5]], 0),
}


def record(torch_python: TorchPython, root: str) -> list[dict[str, list[Any]]]:
    """Return the events and metrics of each case, with the modules of this root."""
    done = torch_python.run(str(_TOY), root, json.dumps(list(CASES.values())))
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@needs_torch
def test_a_third_party_agent_emits_the_same_events_and_metrics_as_with_torch(torch_python: TorchPython) -> None:
    """In the same order, with the same source, keys and ranks.

    Except that tenax knows the group when it assigns ranks.
    """
    roots = ("torch.distributed.elastic", "tenax")
    for case, torchs, tenaxs in zip(CASES, *(record(torch_python, root) for root in roots), strict=True):
        for name, _, _, values in tenaxs["events"] + torchs["events"]:
            if name.endswith("ASSIGN_WORKER_RANKS"):
                del values["group_rank"], values["group_world_size"]
        assert tenaxs["events"] == torchs["events"], case
        assert tenaxs["metrics"] == torchs["metrics"], case


class Quick(SimpleElasticAgent):
    """An agent whose workers have succeeded at the first poll."""

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        return {0: "id-0"}

    def _stop_workers(self, worker_group: WorkerGroup) -> None: ...

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        return RunResult(WorkerState.SUCCEEDED, return_values={0: "done"})

    def _shutdown(self, *args: Any, **kwargs: Any) -> None: ...


class EventRecorder(events.EventHandler):
    def __init__(self) -> None:
        self.events: list[events.Event] = []

    def record(self, event: Any) -> None:
        self.events.append(event)


def spec(**options: Any) -> WorkerSpec:
    return WorkerSpec(role="quick", entrypoint="/bin/true", monitor_interval=0.01, **options)


def test_the_end_of_the_agent_is_an_event_if_records_end_is_set() -> None:
    recorder = EventRecorder()
    with events.configure(recorder):
        Quick(spec(), records_end=True).run()
        count = len(recorder.events)
        Quick(spec()).run()
    assert [event.metadata["state"] for event in recorder.events[:count]][-1] == "SUCCEEDED"
    assert recorder.events[count - 1].source is events.EventSource.AGENT
    assert all(
        event.source is events.EventSource.WORKER for event in recorder.events[count:] if event.name.endswith("DED")
    )


class Broken(Quick):
    def _initialize_workers(self, worker_group: WorkerGroup) -> None:
        raise RuntimeError("it is broken")


def test_the_failure_of_an_agent_is_an_event_with_its_exception() -> None:
    recorder = EventRecorder()
    with events.configure(recorder), pytest.raises(RuntimeError, match="it is broken"):
        Broken(spec(), records_end=True).run()
    (event,) = recorder.events
    assert (event.metadata["state"], event.source) == ("FAILED", events.EventSource.AGENT)
    assert "RuntimeError: it is broken" in str(event.metadata["raw_error"])


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


class Raising(metrics.MetricHandler):
    def emit(self, metric_data: metrics.MetricData) -> None:
        raise OSError("the sink is full")


class Stuck(metrics.MetricHandler):
    def __init__(self) -> None:
        self.may_end = threading.Event()

    def emit(self, metric_data: metrics.MetricData) -> None:
        self.may_end.wait(TIMEOUT_S)


@pytest.fixture
def default_metrics() -> Any:
    yield
    metrics.configure(metrics.NullMetricHandler())


@pytest.mark.usefixtures("default_metrics")
def test_a_metric_handler_that_raises_is_reported_and_does_not_affect_the_run(
    capfd: pytest.CaptureFixture[str],
) -> None:
    metrics.configure(Raising())
    assert Quick(spec()).run().return_values == {0: "done"}
    stderr = capfd.readouterr().err
    assert "the metric handler 'Raising' failed" in stderr
    assert "OSError: the sink is full" in stderr


@pytest.mark.usefixtures("default_metrics")
@pytest.mark.parametrize("kind", ["hooks", "events"])
def test_a_metric_handler_that_blocks_does_not_block_the_run(
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


class MetricRecorder(metrics.MetricHandler):
    def __init__(self) -> None:
        self.names: set[str] = set()

    def emit(self, metric_data: metrics.MetricData) -> None:
        self.names.add(metric_data.name)


class Alone(RendezvousHandler):
    """A third-party handler, so that the hooks of the local agent run."""

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


@pytest.mark.usefixtures("default_metrics")
def test_every_hook_of_the_local_agent_is_measured(tmp_path: Path) -> None:
    """With torch's names, and nothing else is measured."""
    recorder = MetricRecorder()
    metrics.configure(recorder)
    restarting = WorkerSpec(
        role="quick",
        entrypoint="/bin/sh",
        args=("-c", "exit $((1 - TORCHELASTIC_RESTART_COUNT))"),
        monitor_interval=0.01,
        max_restarts=1,
        rdzv_handler=Alone(),
    )
    assert not LocalElasticAgent(restarting, log_dir=str(tmp_path)).run().is_failed()
    simple = ("run", "_rendezvous", "_assign_worker_ranks", "_initialize_workers", "_restart_workers")
    hooks = [f"SimpleElasticAgent.{name}" for name in simple]
    hooks += [f"LocalElasticAgent.{name}" for name in ("_start_workers", "_stop_workers", "_monitor_workers")]
    measured = {name for name in recorder.names if "Agent" in name}
    assert measured == {f"{hook}.{what}" for hook in hooks for what in ("success", "duration.ms")}


def test_an_unknown_event_handler_is_rejected_before_the_start() -> None:
    with pytest.raises(ValueError, match="unknown event handler 'unknown'"):
        Quick(spec(event_log_handler="unknown")).run()


def test_without_handlers_there_is_nothing_to_close() -> None:
    sinks = Sinks()
    assert not sinks.has_events
    assert not sinks.has_metrics
    assert sinks.close() == []


def test_a_handler_of_the_spec_is_closed_at_the_end(tmp_path: Path) -> None:
    """Its file then contains all events."""
    path = tmp_path / "events.jsonl"
    Quick(spec(event_log_handler=f"jsonl:{path}")).run()
    names = [json.loads(line)["name"].rpartition(".")[2] for line in path.read_text().splitlines()]
    assert names == ["RENDEZVOUS", "ASSIGN_WORKER_RANKS", "START", "SUCCEEDED"]


class OwnRun(Quick):
    """A third-party agent with its own main loop."""

    def run(self, role: str = "default") -> RunResult:
        self._initialize_workers(self._worker_group)
        return self._monitor_workers(self._worker_group)


@pytest.mark.usefixtures("default_metrics")
def test_an_agent_with_its_own_run_method_emits_events(tmp_path: Path) -> None:
    """From the inherited hooks; the rest is delivered when the agent is deleted."""
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


def test_the_end_of_a_failed_run_is_a_failed_event() -> None:
    recorder = EventRecorder()
    with events.configure(recorder):
        assert Failing(spec(max_restarts=0), records_end=True).run().is_failed()
    assert (recorder.events[-1].metadata["state"], recorder.events[-1].source) == ("FAILED", events.EventSource.AGENT)


def test_a_second_run_of_one_agent_emits_the_same_number_of_events(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    recorder = EventRecorder()
    agent = LocalElasticAgent(spec(), log_dir=str(tmp_path))
    with events.configure(recorder):
        agent.run()
        first = len(recorder.events)
        agent.run()
    assert (first > 0, len(recorder.events)) == (True, 2 * first)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("way", ["in the object", "in a mixin", "only the metrics"])
def test_an_overridden_hook_is_called_however_it_was_overridden(tmp_path: Path, way: str) -> None:
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
        original = agent._start_workers
        agent._start_workers = lambda group: (called.append("start"), original(group))[1]  # type: ignore[method-assign]
    assert not agent.run().is_failed()
    assert called[:1] == [{"only the metrics": "metrics"}.get(way, "start")]


def test_stopping_workers_calls_shutdown(tmp_path: Path) -> None:
    """As in TorchElastic: a subclass that overrides only ``_shutdown`` also gets restarts."""
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


class InvalidRendezvous(Quick):
    def _handler(self, spec: WorkerSpec) -> Any:
        return self

    def next_rendezvous(self) -> Any:
        return 5


def test_an_invalid_result_of_a_rendezvous_is_reported() -> None:
    with pytest.raises(TypeError, match=r"returned 5; expected a RendezvousInfo or \(store, rank, world_size\)"):
        InvalidRendezvous(spec()).run()
