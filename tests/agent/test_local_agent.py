"""LocalElasticAgent with real workers: results, restarts, policies, cleanup."""

from __future__ import annotations

import os
import shlex
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from local_agent_functions import environment, fail_first, fail_on_rank_1, identify, kill_my_parent, wait_for_a_line

from kit.addresses import own_endpoint
from kit.processes import AT_ONCE_S, TIMEOUT_S, forks_with_threads, gone, leaving_nothing, on_linux
from tenax._core.events import AnyEvent, GenerationFormed, RunEnded
from tenax._core.messages import FromNode, NodeReady, NodeSucceeded, WorkersRunning
from tenax._core.model import Assignment, Evidence, Failure, Outcome, Verdict
from tenax._core.policy import AnyDecision, GiveUp, History, Restart, Wait
from tenax._core.requests import AnyRequest
from tenax._engines.free_port import free_port
from tenax._io.interfaces import Control, ControlledNode, EventLoop
from tenax._logs.specs import DefaultLogsSpecs
from tenax.agent.server import LocalElasticAgent, RunResult, WorkerGroup, WorkerSpec, WorkerState
from tenax.multiprocessing import Std
from tenax.multiprocessing.errors import ProcessFailure
from tenax.rendezvous import RendezvousClosedError, RendezvousInfo, RendezvousParameters
from tenax.rendezvous._engine_handler import EngineRendezvousHandler
from tenax.rendezvous.registry import get_rendezvous_handler

pytestmark = [on_linux, forks_with_threads]


class Maker:
    """Creates agents with logs in the test's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.specs = DefaultLogsSpecs(log_dir=str(folder), redirects=Std.ALL)

    def agent(
        self, entrypoint: Any, *args: Any, workers: int = 1, max_restarts: int = 0, **options: Any
    ) -> LocalElasticAgent:
        keys = ("start_method", "shutdown_timeout", "restart_policy", "signals_to_handle")
        agent_options = {key: options.pop(key) for key in keys if key in options}
        spec = WorkerSpec(
            role="trainer",
            entrypoint=entrypoint,
            args=args,
            local_world_size=workers,
            max_restarts=max_restarts,
            **options,
        )
        return LocalElasticAgent(spec, self.specs, **agent_options)

    def run(self, entrypoint: Any, *args: Any, **options: Any) -> RunResult:
        return self.agent(entrypoint, *args, **options).run()

    def shell(self, script: str, **options: Any) -> RunResult:
        return self.run("/bin/sh", "-c", script, **options)

    def output(self, rank: int, attempt: int = 0) -> str:
        return (Path(self.specs.run_log_dir) / f"attempt_{attempt}" / str(rank) / "stdout.log").read_text()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Maker]:
    with leaving_nothing():
        yield Maker(tmp_path)


# --- results ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_return_values_are_keyed_by_global_rank(make: Maker, method: str) -> None:
    result = make.run(identify, "hello", workers=3, start_method=method)
    assert result == RunResult(WorkerState.SUCCEEDED, {rank: ("hello", str(rank), "0") for rank in range(3)}, {})
    assert not result.is_failed()


def test_return_values_are_those_of_the_last_generation(make: Maker, tmp_path: Path) -> None:
    """Those of earlier generations are dropped."""
    agent = make.agent(fail_first, str(tmp_path), workers=2, max_restarts=2, start_method="fork")
    result = agent.run()
    assert result.return_values == {0: "attempt 2", 1: "attempt 2"}
    assert agent._remaining_restarts == 0


def test_a_program_returns_none_for_each_rank(make: Maker) -> None:
    assert make.shell("exit 0", workers=2).return_values == {0: None, 1: None}


def test_a_failure_contains_its_cause(make: Maker) -> None:
    """Only the failed worker is in it, by global rank, with message and error file, without a decorator."""
    result = make.run(fail_on_rank_1, workers=2, max_restarts=1)
    assert result.state is WorkerState.FAILED
    assert result.is_failed()
    assert result.return_values == {}
    assert list(result.failures) == [1]
    failure = result.failures[1]
    assert isinstance(failure, ProcessFailure)
    assert failure.message["message"] == "ValueError: boom"  # type: ignore[index]
    assert os.path.isfile(failure.error_file)
    assert Path(failure.error_file).parent.parent.name == "attempt_1"


def test_the_worker_group_is_updated_during_the_run(make: Maker) -> None:
    """Ranks, pids and state; afterwards the final state."""
    seen: list[tuple[Any, ...]] = []
    pids: set[int] = set()

    class Observing(LocalElasticAgent):
        def _mirror(self, *step: Any) -> None:
            super()._mirror(*step)
            group: WorkerGroup = self.get_worker_group()
            seen.append((group.state, group.group_rank, [str(worker) for worker in group.workers]))
            pids.update(worker.id for worker in group.workers if worker.id)

    spec = WorkerSpec(role="trainer", entrypoint="/bin/true", local_world_size=2)
    agent = Observing(spec, make.specs)
    assert agent.get_worker_group().state is WorkerState.INIT
    agent.run()
    assert agent.get_worker_group().state is WorkerState.SUCCEEDED
    assert (WorkerState.HEALTHY, 0) in {(state, rank) for state, rank, _ in seen}
    ranks = "local_rank=1,global_rank=1,role_rank=1,world_size=2,role_world_size=2"
    assert ranks in [text for _, _, workers in seen for text in workers]
    assert len(pids) == 2


# --- restarts and policies --------------------------------------------------------------------------------------------


def test_max_restarts_limits_the_restarts(make: Maker) -> None:
    """Each attempt has its own log folder and count; the last failure is the result."""
    result = make.shell("echo $TORCHELASTIC_RESTART_COUNT of $TORCHELASTIC_MAX_RESTARTS; exit 9", max_restarts=2)
    assert result.failures[0].exitcode == 9
    assert [make.output(0, attempt) for attempt in range(3)] == ["0 of 2\n", "1 of 2\n", "2 of 2\n"]


def test_every_generation_gets_a_new_port(make: Maker) -> None:
    """So that keys of an older generation's store cannot be read."""
    make.shell("echo $MASTER_ADDR $MASTER_PORT $TENAX_GENERATION; exit 1", max_restarts=2)
    outputs = [make.output(0, attempt).split() for attempt in range(3)]
    assert {addr for addr, _, _ in outputs} == {"127.0.0.1"}
    assert len({port for _, port, _ in outputs}) == 3
    assert [generation for _, _, generation in outputs] == ["1", "2", "3"]


def test_a_spec_can_set_the_address(make: Maker) -> None:
    """master_addr and master_port apply to every generation."""
    port = free_port()
    script = "echo $MASTER_ADDR:$MASTER_PORT; exit $((1 - TORCHELASTIC_RESTART_COUNT))"
    make.shell(script, max_restarts=1, master_addr="node0", master_port=port)
    assert [make.output(0, attempt) for attempt in range(2)] == [f"node0:{port}\n"] * 2


class OwnPolicy:
    """Gives up on 42, waits after the first failure, and ignores max_restarts."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, int]] = []

    def decide(self, failure: Failure, history: History) -> AnyDecision:
        self.calls.append((failure.exit_code, history.restarts_used, len(history.earlier)))
        if failure.exit_code == 42:
            return GiveUp("42 is final")
        return Wait("a moment", seconds=0.01) if not history.earlier else Restart("again")


def test_an_own_restart_policy_decides(make: Maker) -> None:
    """It gets the failure and the history, and may wait, exceed max_restarts, and give up."""
    policy = OwnPolicy()
    script = "case $TORCHELASTIC_RESTART_COUNT in 2) exit 42;; *) exit 1;; esac"
    result = make.shell(script, max_restarts=0, restart_policy=policy)
    assert result.failures[0].exitcode == 42
    assert policy.calls == [(1, 0, 0), (1, 1, 1), (42, 2, 2)]


# --- a node of several ------------------------------------------------------------------------------------------------


class ScriptedEngine(EngineRendezvousHandler):
    """A handler that makes this node 1 of 2, with ranks 2 and 3, and then sends a verdict."""

    def __init__(self, verdict: Verdict, ends_at: type = WorkersRunning) -> None:
        super().__init__()
        self.verdict = verdict
        self.ends_at = ends_at  # the message after which the run ends
        self.emit: Callable[[AnyEvent], None]

    def _make_engine(self, master_addr: str | None, master_port: int | None) -> Control:
        return self

    def cancel(self, why: str) -> None: ...

    def open(self, loop: EventLoop, emit: Callable[[AnyEvent], None], node: ControlledNode) -> None:
        self.emit = emit

    def send(self, message: FromNode) -> None:
        if isinstance(message, NodeReady):
            self.emit(GenerationFormed(Assignment(1, 1, 2, 2, 4, 2, 4, "other", 1234, True)))
        if isinstance(message, self.ends_at):
            self.emit(RunEnded(self.verdict, 0.0))

    def submit(self, request: AnyRequest, reply: Callable[[Any, str], None]) -> None:
        reply(None, "not supported")

    where = ""

    def stays_for_others(self) -> bool:
        return False

    def close(self) -> None: ...

    def get_backend(self) -> str:
        return "scripted"

    def next_rendezvous(self) -> RendezvousInfo:
        raise AssertionError("an engine is not polled")

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None: ...

    def num_nodes_waiting(self) -> int:
        raise AssertionError("an engine is not polled")

    def get_run_id(self) -> str:
        return "run"

    def shutdown(self) -> bool:
        return True


def test_a_node_of_several_returns_its_own_values(make: Maker) -> None:
    """By global rank; the workers' environment describes the whole group."""
    handler = ScriptedEngine(Verdict(Outcome.SUCCEEDED, "all 4 workers succeeded"), NodeSucceeded)
    names = ("RANK", "WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE")
    result = make.run(environment, *names, workers=2, rdzv_handler=handler)
    assert result.return_values == {rank: [str(rank), "4", "1", "2", "other", "True"] for rank in (2, 3)}


def test_a_failure_on_another_node_fails_this_node_with_its_cause(make: Maker) -> None:
    """With the rank and host of the other node."""
    evidence = Evidence(error_type="ValueError", message="ValueError: boom")
    elsewhere = Failure(1, 0, 0, 77, 1, 1.0, evidence=evidence, host="gpu-08")
    verdict = Verdict(Outcome.FAILED, "no restarts are allowed", failures=(elsewhere,), generation=1)
    agent = make.agent("/bin/sleep", "600", workers=2, rdzv_handler=ScriptedEngine(verdict))
    result = agent.run()
    assert result.state is WorkerState.FAILED
    assert list(result.failures) == [0]
    assert (result.failures[0].host, result.failures[0].exitcode) == ("gpu-08", 1)
    assert result.failures[0].message["message"] == "ValueError: boom"  # type: ignore[index]
    assert [worker.global_rank for worker in agent.get_worker_group().workers] == [2, 3]


def test_a_run_that_ends_with_the_generation_starts_no_worker(make: Maker, tmp_path: Path) -> None:
    """The node receives the generation and the end of the run together."""
    elsewhere = Failure(1, 0, 0, 77, 1, 1.0, host="gpu-08")
    verdict = Verdict(Outcome.FAILED, "no restarts are allowed", failures=(elsewhere,), generation=1)
    agent = make.agent("/bin/touch", str(tmp_path / "started"), rdzv_handler=ScriptedEngine(verdict, NodeReady))
    assert list(agent.run().failures) == [0]
    assert agent.get_worker_group().workers[0].id is None
    assert not (tmp_path / "started").exists()


def test_a_run_cancelled_by_an_operator_raises_rendezvous_closed_error(make: Maker) -> None:
    """Not SignalException, because this node received no signal."""
    agent = make.agent("/bin/sleep", "600", rdzv_handler=ScriptedEngine(Verdict(Outcome.CANCELLED, "enough")))
    with pytest.raises(RendezvousClosedError, match="the run was cancelled: enough"):
        agent.run()
    assert agent.get_worker_group().state is WorkerState.STOPPED


@pytest.mark.parametrize("backend", ["tcp", "etcd"])
def test_a_node_whose_settings_are_invalid_is_refused_with_the_cause(make: Maker, backend: str) -> None:
    """Before it looks for the coordinator."""
    handler = get_rendezvous_handler(RendezvousParameters(backend, own_endpoint(), "run", 1, 2))
    agent = make.agent("/bin/true", rdzv_handler=handler)
    agent.get_worker_group().spec.role = "r" * 256
    with pytest.raises(RuntimeError, match=r"invalid node settings: .*role"):
        agent.run()


def test_a_run_with_too_few_nodes_raises_runtime_error(make: Maker) -> None:
    """With the coordinator's reason."""
    verdict = Verdict(Outcome.BROKEN, "only 1 of at least 2 nodes joined")
    with pytest.raises(RuntimeError, match="only 1 of at least 2 nodes joined"):
        make.run("/bin/sleep", "600", rdzv_handler=ScriptedEngine(verdict))


# --- stopping ---------------------------------------------------------------------------------------------------------


def test_the_grace_period_is_the_shutdown_timeout(make: Maker, tmp_path: Path) -> None:
    """A worker that ignores SIGTERM is killed after it, not after 30 s."""
    ready = tmp_path / "ready"
    os.mkfifo(ready)
    script = f"""
    if [ $RANK = 0 ]; then trap '' TERM; echo > {shlex.quote(str(ready))}; while :; do sleep 60 & wait; done; fi
    read line < {shlex.quote(str(ready))}
    exit 5
    """
    began = time.monotonic()
    result = make.shell(script, workers=2, shutdown_timeout=0)
    assert time.monotonic() - began < 20
    assert list(result.failures) == [1]


def test_leftover_processes_of_workers_are_killed(make: Maker) -> None:
    """Also after a success."""
    make.shell("setsid sleep 60 & echo $!; sleep 60 & echo $!", workers=2)
    pids = [int(pid) for rank in range(2) for pid in make.output(rank).split()]
    assert len(pids) == 4
    assert gone(pids, 0)


def test_a_lost_keeper_is_not_a_failure_of_a_worker(make: Maker) -> None:
    """The run cannot continue, and the error contains the reason."""
    with pytest.raises(RuntimeError, match="keeper was lost: it was killed by SIGKILL"):
        make.shell("kill -9 $PPID; sleep 60", max_restarts=3)


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_a_lost_keeper_leaves_no_worker_behind(make: Maker, tmp_path: Path, method: str) -> None:
    """With every start method the worker dies with the keeper."""
    notes = tmp_path / "pids"
    with pytest.raises(RuntimeError, match="was lost"):
        make.run(kill_my_parent, str(notes), method != "fork", start_method=method)
    pids = [int(line) for line in notes.read_text().split()]
    assert len(pids) == (1 if method == "fork" else 2)
    # A forked worker has no marker in its environment. If its start was not yet reported, only the kernel knows of it.
    assert gone(pids, AT_ONCE_S if method == "fork" else 0)


# --- threads and reuse -----------------------------------------------------------------------------------------------


def test_an_agent_runs_in_another_thread(make: Maker) -> None:
    """The host's signal handlers are not changed."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    results: list[RunResult] = []
    thread = threading.Thread(target=lambda: results.append(make.run(identify, "x", start_method="fork")))
    thread.start()
    thread.join()
    assert results[0].return_values == {0: ("x", "0", "0")}
    assert {number: signal.getsignal(number) for number in before} == before


def test_two_agents_run_in_parallel(tmp_path: Path) -> None:
    """In two threads of one process; neither waits for the other."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    a, b = Maker(tmp_path / "a"), Maker(tmp_path / "b")
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    results: dict[str, RunResult] = {}

    def run(name: str, maker: Maker, entrypoint: Any, *args: Any, **options: Any) -> None:
        results[name] = maker.run(entrypoint, *args, **options)

    with leaving_nothing():
        long = threading.Thread(target=run, args=("long", a, "/bin/sh", "-c", f"read line < {shlex.quote(str(fifo))}"))
        long.start()
        for method in ("fork", "spawn"):
            short = threading.Thread(target=run, args=(method, b, identify, method), kwargs={"start_method": method})
            short.start()
            short.join()
            assert results[method].return_values == {0: (method, "0", "0")}
        assert "long" not in results
        fifo.write_text("go\n")
        long.join()
        assert results["long"].state is WorkerState.SUCCEEDED


def test_two_forking_agents_run_in_parallel(tmp_path: Path) -> None:
    """The first can end although the keeper of the second was forked meanwhile, with copies of its descriptors."""
    makers = {}
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        makers[name] = Maker(tmp_path / name)
        os.mkfifo(tmp_path / name / "fifo")
    ended: list[str] = []

    def run(name: str) -> None:
        makers[name].run(wait_for_a_line, str(tmp_path / name / "fifo"), start_method="fork")
        ended.append(name)

    with leaving_nothing():
        threads = {}
        for name in ("first", "second"):
            threads[name] = threading.Thread(target=run, args=(name,))
            threads[name].start()
            with open(tmp_path / name / "fifo") as fifo:  # opens when the worker does
                assert fifo.read() == "here\n"
        for name in ("first", "second"):
            (tmp_path / name / "fifo").write_text("go\n")
            threads[name].join(30)
            assert ended[-1] == name


def test_an_agent_can_run_twice(make: Maker) -> None:
    agent = make.agent(identify, "x", start_method="fork")
    assert agent.run().return_values == agent.run().return_values == {0: ("x", "0", "0")}


# --- the spec ---------------------------------------------------------------------------------------------------------


def test_fn_is_the_old_name_of_entrypoint() -> None:
    """It works, with a warning that points at the caller."""
    with pytest.warns(DeprecationWarning, match="use entrypoint") as caught:
        spec = WorkerSpec("trainer", 1, None, fn=identify)
    assert spec.entrypoint is identify
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"local_world_size": 0}, "local_world_size is 0; expected at least 1"),
        ({"monitor_interval": 0}, "monitor_interval is 0; expected a positive number"),
        ({"entrypoint": None}, "needs an entrypoint"),
        ({"entrypoint": ""}, "needs an entrypoint"),
    ],
)
def test_an_invalid_spec_raises_assertion_error(fields: dict[str, Any], message: str) -> None:
    """As TorchElastic does."""
    given = {"role": "trainer", "entrypoint": "/bin/true", "local_world_size": 1, **fields}
    with pytest.raises(AssertionError, match=message):
        WorkerSpec(**given)


def test_the_name_of_an_entrypoint() -> None:
    """The function's name, or the last part of the path."""
    assert WorkerSpec(entrypoint="/usr/bin/env").get_entrypoint_name() == "env"
    assert WorkerSpec(entrypoint=Maker.run).get_entrypoint_name() == "Maker.run"


def test_a_run_emits_no_warnings(make: Maker) -> None:
    """About unclosed resources or deprecations."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert make.run(identify, "x").state is WorkerState.SUCCEEDED


@pytest.mark.parametrize("nodes", [1, 2], ids=["alone", "with an endpoint"])
def test_set_closed_ends_the_run_on_every_node(make: Any, nodes: int) -> None:
    """Called from another thread while the workers run."""
    params = RendezvousParameters("c10d", own_endpoint(), "closing", 1, nodes, last_call_timeout=0)
    handler = get_rendezvous_handler(params)
    spec = WorkerSpec(role="trainer", entrypoint="/bin/sleep", args=("60",), rdzv_handler=handler)
    started = threading.Event()

    class Signalling(LocalElasticAgent):
        def _mirror(self, *step: Any) -> None:
            super()._mirror(*step)
            if self.get_worker_group().state is WorkerState.HEALTHY:
                started.set()

    def close_when_started() -> None:
        assert started.wait(TIMEOUT_S)
        handler.set_closed()

    operator = threading.Thread(target=close_when_started)
    operator.start()
    with pytest.raises(RendezvousClosedError, match=r"set_closed\(\)"):
        Signalling(spec, make.specs).run()
    operator.join(TIMEOUT_S)
    assert handler.is_closed()
