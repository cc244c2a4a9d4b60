"""LocalElasticAgent with real workers: results by global rank, restarts, policies, and nothing left of a run."""

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

from kit.addresses import own_endpoint
from kit.processes import AT_ONCE_S, PATIENCE_S, forks_with_threads, gone, leaving_nothing, on_linux
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
    """Makes agents whose logs lie below the test's folder."""

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


def who_am_i(word: str) -> tuple[str, str, str]:
    return word, os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_return_values_by_global_rank(make: Maker, method: str) -> None:
    """Every worker's value, and a result that says so."""
    result = make.run(who_am_i, "hello", workers=3, start_method=method)
    assert result == RunResult(WorkerState.SUCCEEDED, {rank: ("hello", str(rank), "0") for rank in range(3)}, {})
    assert not result.is_failed()


def fail_first(folder: str) -> str:
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if attempt < 2 and os.environ["RANK"] == "1":
        raise ValueError(f"attempt {attempt}")
    return f"attempt {attempt}"


def test_return_values_after_a_restart_are_the_last_generations(make: Maker, tmp_path: Path) -> None:
    """What an earlier generation returned before a sibling failed is forgotten."""
    agent = make.agent(fail_first, str(tmp_path), workers=2, max_restarts=2, start_method="fork")
    result = agent.run()
    assert result.return_values == {0: "attempt 2", 1: "attempt 2"}
    assert agent._remaining_restarts == 0


def test_a_program_returns_none(make: Maker) -> None:
    """By rank, as a function that returns nothing."""
    assert make.shell("exit 0", workers=2).return_values == {0: None, 1: None}


def boom() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("boom")
    signal.pause()


def test_a_failure_carries_its_cause(make: Maker) -> None:
    """Only who failed is in it, by global rank, with message, traceback and error file; nothing was decorated."""
    result = make.run(boom, workers=2, max_restarts=1)
    assert result.state is WorkerState.FAILED
    assert result.is_failed()
    assert result.return_values == {}
    assert list(result.failures) == [1]
    failure = result.failures[1]
    assert isinstance(failure, ProcessFailure)
    assert failure.message["message"] == "ValueError: boom"  # type: ignore[index]
    assert os.path.isfile(failure.error_file)
    assert Path(failure.error_file).parent.parent.name == "attempt_1"


def test_the_worker_group_follows(make: Maker) -> None:
    """Whoever looks at the group during a run sees ranks, pids and state; afterwards, how it ended."""
    seen: list[tuple[Any, ...]] = []
    pids: set[int] = set()

    class Looking(LocalElasticAgent):
        def _mirror(self, *step: Any) -> None:
            super()._mirror(*step)
            group: WorkerGroup = self.get_worker_group()
            seen.append((group.state, group.group_rank, [str(worker) for worker in group.workers]))
            pids.update(worker.id for worker in group.workers if worker.id)

    spec = WorkerSpec(role="trainer", entrypoint="/bin/true", local_world_size=2)
    agent = Looking(spec, make.specs)
    assert agent.get_worker_group().state is WorkerState.INIT
    agent.run()
    assert agent.get_worker_group().state is WorkerState.SUCCEEDED
    assert (WorkerState.HEALTHY, 0) in {(state, rank) for state, rank, _ in seen}
    ranks = "local_rank=1,global_rank=1,role_rank=1,world_size=2,role_world_size=2"
    assert ranks in [words for _, _, workers in seen for words in workers]
    assert len(pids) == 2


# --- restarts and policies --------------------------------------------------------------------------------------------


def test_restarts_end_with_the_budget(make: Maker) -> None:
    """Each try has its own log folder and its own count; the last one's failure is the result."""
    result = make.shell("echo $TORCHELASTIC_RESTART_COUNT of $TORCHELASTIC_MAX_RESTARTS; exit 9", max_restarts=2)
    assert result.failures[0].exitcode == 9
    assert [make.output(0, attempt) for attempt in range(3)] == ["0 of 2\n", "1 of 2\n", "2 of 2\n"]


def test_a_new_port_for_every_generation(make: Maker) -> None:
    """So that no key of an older generation's store can be read; unless the spec names one."""
    make.shell("echo $MASTER_ADDR $MASTER_PORT $TENAX_GENERATION; exit 1", max_restarts=2)
    words = [make.output(0, attempt).split() for attempt in range(3)]
    assert {addr for addr, _, _ in words} == {"127.0.0.1"}
    assert len({port for _, port, _ in words}) == 3
    assert [generation for _, _, generation in words] == ["1", "2", "3"]


def test_a_spec_may_name_the_address(make: Maker) -> None:
    """master_addr and master_port of the spec are what the workers see, in every generation."""
    port = free_port()
    script = "echo $MASTER_ADDR:$MASTER_PORT; exit $((1 - TORCHELASTIC_RESTART_COUNT))"
    make.shell(script, max_restarts=1, master_addr="node0", master_port=port)
    assert [make.output(0, attempt) for attempt in range(2)] == [f"node0:{port}\n"] * 2


class Choosy:
    """Gives up on 42, waits a moment after a first failure, and does not count."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int, int]] = []

    def decide(self, failure: Failure, history: History) -> AnyDecision:
        self.asked.append((failure.exit_code, history.restarts_used, len(history.earlier)))
        if failure.exit_code == 42:
            return GiveUp("42 is final")
        return Wait("a moment", seconds=0.01) if not history.earlier else Restart("again")


def test_a_policy_of_ones_own(make: Maker) -> None:
    """It sees the failure and the history, may wait, may go beyond the budget, and may give up on an exit code."""
    policy = Choosy()
    script = "case $TORCHELASTIC_RESTART_COUNT in 2) exit 42;; *) exit 1;; esac"
    result = make.shell(script, max_restarts=0, restart_policy=policy)
    assert result.failures[0].exitcode == 42
    assert policy.asked == [(1, 0, 0), (1, 1, 1), (42, 2, 2)]


# --- a node of several ------------------------------------------------------------------------------------------------


class Said(EngineRendezvousHandler):
    """A handler of ours whose coordinator is elsewhere: node 1 of 2, with ranks 2 and 3, then a verdict."""

    def __init__(self, verdict: Verdict, says_at: type = WorkersRunning) -> None:
        super().__init__()
        self.verdict = verdict
        self.says_at = says_at  # after which word the run is over
        self.emit: Callable[[AnyEvent], None]

    def _make_engine(self, master_addr: str | None, master_port: int | None) -> Control:
        return self

    def cancel(self, why: str) -> None: ...

    def open(self, loop: EventLoop, emit: Callable[[AnyEvent], None], node: ControlledNode) -> None:
        self.emit = emit

    def send(self, message: FromNode) -> None:
        if isinstance(message, NodeReady):
            self.emit(GenerationFormed(Assignment(1, 1, 2, 2, 4, 2, 4, "other", 1234, True)))
        if isinstance(message, self.says_at):
            self.emit(RunEnded(self.verdict, 0.0))

    def ask(self, request: AnyRequest, reply: Callable[[Any, str], None]) -> None:
        reply(None, "nobody asks here")

    where = ""

    def stays_for_others(self) -> bool:
        return False

    def close(self) -> None: ...

    def get_backend(self) -> str:
        return "said"

    def next_rendezvous(self) -> RendezvousInfo:
        raise AssertionError("an engine is told, not asked")

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None: ...

    def num_nodes_waiting(self) -> int:
        raise AssertionError("an engine is told, not asked")

    def get_run_id(self) -> str:
        return "run"

    def shutdown(self) -> bool:
        return True


def environment(*names: str) -> list[str]:
    return [os.environ[name] for name in names]


def test_values_of_a_node_of_several_are_its_own(make: Maker) -> None:
    """By global rank; the workers were told of the whole group, and of the store that another node hosts."""
    handler = Said(Verdict(Outcome.SUCCEEDED, "all 4 workers succeeded"), NodeSucceeded)
    names = ("RANK", "WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE")
    result = make.run(environment, *names, workers=2, rdzv_handler=handler)
    assert result.return_values == {rank: [str(rank), "4", "1", "2", "other", "True"] for rank in (2, 3)}


def test_a_failure_elsewhere_fails_this_node_with_its_cause(make: Maker) -> None:
    """The result names the rank of the other node, its host and what was found out there."""
    evidence = Evidence(error_type="ValueError", message="ValueError: boom")
    elsewhere = Failure(1, 0, 0, 77, 1, 1.0, evidence=evidence, host="gpu-08")
    verdict = Verdict(Outcome.FAILED, "no restarts are allowed", (elsewhere,), generation=1)
    agent = make.agent("/bin/sleep", "600", workers=2, rdzv_handler=Said(verdict))
    result = agent.run()
    assert result.state is WorkerState.FAILED
    assert list(result.failures) == [0]
    assert (result.failures[0].host, result.failures[0].exitcode) == ("gpu-08", 1)
    assert result.failures[0].message["message"] == "ValueError: boom"  # type: ignore[index]
    assert [worker.global_rank for worker in agent.get_worker_group().workers] == [2, 3]


def test_a_run_that_ended_before_the_generation_was_heard_of_starts_no_worker(make: Maker, tmp_path: Path) -> None:
    """The node receives the generation and the end of the run together: the result is the end, and no program runs."""
    elsewhere = Failure(1, 0, 0, 77, 1, 1.0, host="gpu-08")
    verdict = Verdict(Outcome.FAILED, "no restarts are allowed", (elsewhere,), generation=1)
    agent = make.agent("/bin/touch", str(tmp_path / "started"), rdzv_handler=Said(verdict, NodeReady))
    assert list(agent.run().failures) == [0]
    assert agent.get_worker_group().workers[0].id is None
    assert not (tmp_path / "started").exists()


def test_a_run_that_an_operator_cancelled_was_closed(make: Maker) -> None:
    """No signal came to this node: it is no SignalException."""
    agent = make.agent("/bin/sleep", "600", rdzv_handler=Said(Verdict(Outcome.CANCELLED, "enough")))
    with pytest.raises(RendezvousClosedError, match="the run was cancelled: enough"):
        agent.run()
    assert agent.get_worker_group().state is WorkerState.STOPPED


def test_a_run_that_found_too_few_nodes_is_an_error(make: Maker) -> None:
    """With the coordinator's sentence."""
    verdict = Verdict(Outcome.BROKEN, "only 1 of at least 2 nodes joined")
    with pytest.raises(RuntimeError, match="only 1 of at least 2 nodes joined"):
        make.run("/bin/sleep", "600", rdzv_handler=Said(verdict))


# --- ends -------------------------------------------------------------------------------------------------------------


def test_the_grace_period_is_the_shutdown_timeout(make: Maker, tmp_path: Path) -> None:
    """A sibling that does not listen is killed when it is over, not after thirty seconds."""
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


def test_what_workers_leave_behind_is_ended(make: Maker) -> None:
    """Also after a success."""
    make.shell("setsid sleep 60 & echo $!; sleep 60 & echo $!", workers=2)
    pids = [int(word) for rank in range(2) for word in make.output(rank).split()]
    assert len(pids) == 4
    assert gone(pids, 0)


def test_a_lost_keeper_is_an_error_of_ours(make: Maker) -> None:
    """Not a failure of a worker: the run cannot go on, and says why."""
    with pytest.raises(RuntimeError, match="keeper was lost: it was killed by SIGKILL"):
        make.shell("kill -9 $PPID; sleep 60", max_restarts=3)


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_a_lost_keeper_leaves_no_function_behind(make: Maker, tmp_path: Path, method: str) -> None:
    """Whatever way the worker was made, it dies with the keeper, and nothing stays open."""
    notes = tmp_path / "pids"
    with pytest.raises(RuntimeError, match="was lost"):
        make.run(kill_my_parent, str(notes), method != "fork", start_method=method)
    pids = [int(line) for line in notes.read_text().split()]
    assert len(pids) == (1 if method == "fork" else 2)
    # A forked worker bears no mark. If it was faster than the news of its start, only the kernel knows of it.
    assert gone(pids, AT_ONCE_S if method == "fork" else 0)


def kill_my_parent(notes: str, leaves_a_daemon: bool) -> None:
    """A worker, and perhaps a process of it in a session of its own, which the death of the keeper does not reach."""
    keeper = os.getppid()

    def note() -> None:
        with open(notes, "a") as file:
            print(os.getpid(), file=file, flush=True)

    note()
    if leaves_a_daemon and os.fork() == 0:
        os.setsid()
        note()
        leaves_a_daemon = False
    if not leaves_a_daemon:
        os.kill(keeper, signal.SIGKILL)
    while True:
        signal.pause()


# --- where it runs ----------------------------------------------------------------------------------------------------


def test_off_the_main_thread(make: Maker) -> None:
    """The same result, and the host's signal handlers are not touched."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    results: list[RunResult] = []
    thread = threading.Thread(target=lambda: results.append(make.run(who_am_i, "x", start_method="fork")))
    thread.start()
    thread.join()
    assert results[0].return_values == {0: ("x", "0", "0")}
    assert {number: signal.getsignal(number) for number in before} == before


def test_two_agents_at_once(tmp_path: Path) -> None:
    """In two threads of one process: each has its own workers and its own end, and neither waits for the other."""
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
            short = threading.Thread(target=run, args=(method, b, who_am_i, method), kwargs={"start_method": method})
            short.start()
            short.join()
            assert results[method].return_values == {0: (method, "0", "0")}
        assert "long" not in results
        fifo.write_text("go\n")
        long.join()
        assert results["long"].state is WorkerState.SUCCEEDED


def test_two_forking_agents_at_once(tmp_path: Path) -> None:
    """The first may end although the second's keeper was forked while it ran, with a copy of all that was open."""
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


def wait_for_a_line(fifo: str) -> None:
    Path(fifo).write_text("here\n")
    Path(fifo).read_text()


def test_an_agent_runs_again(make: Maker) -> None:
    """The same object, a second time."""
    agent = make.agent(who_am_i, "x", start_method="fork")
    assert agent.run().return_values == agent.run().return_values == {0: ("x", "0", "0")}


# --- the spec ---------------------------------------------------------------------------------------------------------


def test_fn_is_the_old_name_of_entrypoint() -> None:
    """It works, with a warning that points at the caller."""
    with pytest.warns(DeprecationWarning, match="use entrypoint") as caught:
        spec = WorkerSpec("trainer", 1, None, fn=who_am_i)
    assert spec.entrypoint is who_am_i
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"local_world_size": 0}, "local_world_size is 0; expected at least 1"),
        ({"monitor_interval": 0}, "monitor_interval is 0; expected a positive number"),
        ({"entrypoint": None}, "needs an entrypoint"),
        ({"entrypoint": ""}, "needs an entrypoint"),
    ],
)
def test_a_spec_that_cannot_work(fields: dict[str, Any], sentence: str) -> None:
    """An AssertionError, as TorchElastic raises, with a sentence."""
    given = {"role": "trainer", "entrypoint": "/bin/true", "local_world_size": 1, **fields}
    with pytest.raises(AssertionError, match=sentence):
        WorkerSpec(**given)


def test_names_of_entrypoints() -> None:
    """The function's own, or the last part of the path."""
    assert WorkerSpec(entrypoint="/usr/bin/env").get_entrypoint_name() == "env"
    assert WorkerSpec(entrypoint=Maker.run).get_entrypoint_name() == "Maker.run"


def test_no_warnings_in_an_ordinary_run(make: Maker) -> None:
    """Nothing is left to the garbage collector, and nothing deprecated is used."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert make.run(who_am_i, "x").state is WorkerState.SUCCEEDED


@pytest.mark.parametrize("nodes", [1, 2], ids=["alone", "with an endpoint"])
def test_set_closed_ends_the_run_for_everybody(make: Any, nodes: int) -> None:
    """An operator's cancel, from another thread, while the workers run: they are ended, and the run was closed."""
    params = RendezvousParameters("c10d", own_endpoint(), "closing", 1, nodes, last_call_timeout=0)
    handler = get_rendezvous_handler(params)
    spec = WorkerSpec(role="trainer", entrypoint="/bin/sleep", args=("60",), rdzv_handler=handler)
    started = threading.Event()

    class Telling(LocalElasticAgent):
        def _mirror(self, *step: Any) -> None:
            super()._mirror(*step)
            if self.get_worker_group().state is WorkerState.HEALTHY:
                started.set()

    def close_when_started() -> None:
        assert started.wait(PATIENCE_S)
        handler.set_closed()

    operator = threading.Thread(target=close_when_started)
    operator.start()
    with pytest.raises(RendezvousClosedError, match=r"set_closed\(\)"):
        Telling(spec, make.specs).run()
    operator.join(PATIENCE_S)
    assert handler.is_closed()
