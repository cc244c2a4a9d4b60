"""TorchElastic's hooks: a minimal agent, subclasses that override some hooks, third-party handlers."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from kit.processes import gone, leaving_nothing, on_linux
from tenax._core.model import Failure
from tenax._core.policy import AnyDecision, GiveUp, History, Restart, Wait
from tenax._logs.specs import DefaultLogsSpecs
from tenax.agent.server import LocalElasticAgent, RunResult, SimpleElasticAgent, WorkerGroup, WorkerSpec, WorkerState
from tenax.multiprocessing import SignalException, Std
from tenax.multiprocessing.errors import ProcessFailure
from tenax.rendezvous import (
    RendezvousClosedError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)
from tenax.store import MemoryStore

pytestmark = on_linux


@pytest.fixture(autouse=True)
def _leave_nothing() -> Iterator[None]:
    with leaving_nothing():
        yield


class Store:
    """A key-value store with torch's methods, in this process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes | str) -> None:
        with self._changed:
            self._values[key] = value.encode() if isinstance(value, str) else value
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        self.wait([key], timedelta(seconds=30))
        return self._values[key]

    def add(self, key: str, amount: int) -> int:
        with self._changed:
            total = int(self._values.get(key, b"0")) + amount
            self._values[key] = str(total).encode()
            return total

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        with self._changed:
            found = self._changed.wait_for(lambda: all(key in self._values for key in keys), timeout.total_seconds())
        if not found:
            raise TimeoutError(f"timed out waiting for {keys}")


class Handler(RendezvousHandler):
    """A third-party handler."""

    def __init__(self, store: Any = None, rank: int = 0, world_size: int = 1, *, as_tuple: bool = False) -> None:
        self.store = store
        self.rank = rank
        self.world_size = world_size
        self.as_tuple = as_tuple
        self.rounds = 0
        self.waiting: list[int] = []  # results of num_nodes_waiting, in order; then 0
        self.error: Exception | None = None
        self.is_shut_down = False

    def get_backend(self) -> str:
        return "third-party"

    def next_rendezvous(self) -> Any:
        if self.error is not None:
            raise self.error
        self.rounds += 1
        if self.as_tuple:
            return self.store, self.rank, self.world_size
        info = RendezvousStoreInfo("third-host", 4000 + self.rounds)
        return RendezvousInfo(self.store, self.rank, self.world_size, info)

    def is_closed(self) -> bool:
        return self.is_shut_down

    def set_closed(self) -> None: ...

    def num_nodes_waiting(self) -> int:
        return self.waiting.pop(0) if self.waiting else 0

    def get_run_id(self) -> str:
        return "third-run"

    def shutdown(self) -> bool:
        self.is_shut_down = True
        return True


class Minimal(SimpleElasticAgent):
    """Only the required hooks, with plain subprocesses."""

    def __init__(self, spec: WorkerSpec, **options: Any) -> None:
        super().__init__(spec, **options)
        self.calls: list[str] = []
        self.pids: list[int] = []
        self.death_sig: signal.Signals | None = None
        self._children: dict[int, subprocess.Popen[bytes]] = {}

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self.calls.append("start")
        for worker in worker_group.workers:
            env = {**os.environ, "RANK": str(worker.global_rank), "STARTS": str(self.calls.count("start"))}
            command = [str(worker_group.spec.entrypoint), *worker_group.spec.args]
            child = subprocess.Popen(command, env=env)
            self._children[worker.local_rank] = child
            self.pids.append(child.pid)
        return {rank: child.pid for rank, child in self._children.items()}

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self.calls.append("stop")
        self._end(signal.SIGTERM)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        codes = {rank: child.poll() for rank, child in self._children.items()}
        failed = {
            rank: ProcessFailure(rank, self._children[rank].pid, code, "") for rank, code in codes.items() if code
        }
        if failed:
            return RunResult(WorkerState.FAILED, failures=failed)
        if None in codes.values():
            return RunResult(WorkerState.HEALTHY)
        return RunResult(WorkerState.SUCCEEDED, return_values={rank: f"value {rank}" for rank in codes})

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        self.calls.append("shutdown")
        self.death_sig = death_sig
        self._end(death_sig)

    def _end(self, number: signal.Signals) -> None:
        for child in self._children.values():
            child.send_signal(number)
            child.wait()
        self._children.clear()


def spec_of(script: str, handler: RendezvousHandler | None = None, **fields: Any) -> WorkerSpec:
    given = {"local_world_size": 1, "max_restarts": 0, "monitor_interval": 0.005, **fields}
    return WorkerSpec(role="trainer", rdzv_handler=handler, entrypoint="/bin/sh", args=("-c", script), **given)


# --- the minimal agent ------------------------------------------------------------------------------------------------


def test_an_agent_with_four_hooks_runs_to_the_end() -> None:
    """The result is that of the hook, and _shutdown is called once."""
    agent = Minimal(spec_of("exit 0", local_world_size=2))
    result = agent.run()
    assert result == RunResult(WorkerState.SUCCEEDED, {0: "value 0", 1: "value 1"})
    assert agent.calls == ["start", "shutdown"]
    assert agent.get_worker_group().state is WorkerState.SUCCEEDED
    assert [worker.id for worker in agent.get_worker_group().workers] == agent.pids


def test_max_restarts_limits_the_restarts() -> None:
    """Then the workers are stopped, and the failure is the result."""
    agent = Minimal(spec_of("exit 3", max_restarts=2))
    result = agent.run()
    assert result.is_failed()
    assert result.failures[0].exitcode == 3
    assert agent.calls == ["start", "stop", "start", "stop", "start", "stop", "shutdown"]
    assert agent._remaining_restarts == 0


def test_waiting_nodes_cause_an_uncharged_restart() -> None:
    """Stop, rendezvous, start; max_restarts is not used up."""
    handler = Handler()
    handler.waiting = [0, 1, 0, 1]
    agent = Minimal(spec_of("[ $STARTS = 3 ] || exec sleep 60", handler))
    assert agent.run().state is WorkerState.SUCCEEDED
    assert handler.rounds == 3
    assert agent.calls == ["start", "stop", "start", "stop", "start", "shutdown"]
    assert agent._remaining_restarts == 0 == agent._worker_group.spec.max_restarts


class Unhealthy(Minimal):
    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        return RunResult(WorkerState.UNHEALTHY)


def test_unhealthy_workers_are_a_failure() -> None:
    """The restart is charged, and without restarts left the result is FAILED."""
    agent = Unhealthy(spec_of("exec sleep 60", max_restarts=1))
    result = agent.run()
    assert (result.state, result.is_failed()) == (WorkerState.FAILED, True)
    assert agent.calls.count("start") == 2


class UnknownState(Minimal):
    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        return RunResult(WorkerState.UNKNOWN)


def test_an_unexpected_state_ends_the_run() -> None:
    """_shutdown is called, and the error names the state."""
    agent = UnknownState(spec_of("exec sleep 60"))
    with pytest.raises(RuntimeError, match="unexpected state of the workers: UNKNOWN"):
        agent.run()
    assert agent.calls[-1] == "shutdown"
    assert gone(agent.pids)


class OwnPolicy:
    """Waits after the first failure, restarts after the second, gives up on exit code 3."""

    def decide(self, failure: Failure, history: History) -> AnyDecision:
        if failure.exit_code == 3:
            return GiveUp("3 is final")
        return Restart("again") if history.earlier else Wait("a moment", seconds=0.01)


def test_a_restart_policy_decides() -> None:
    """Wait, restart, give up."""
    agent = Minimal(spec_of("exit $STARTS", max_restarts=0), restart_policy=OwnPolicy())
    assert agent.run().failures[0].exitcode == 3
    assert agent.calls.count("start") == 3


class RecordingPolicy:
    """Restarts twice, and records its arguments."""

    def __init__(self) -> None:
        self.calls: list[tuple[Failure, History]] = []

    def decide(self, failure: Failure, history: History) -> AnyDecision:
        self.calls.append((failure, history))
        return Restart("again") if history.restarts_used < 2 else GiveUp("twice is enough")


class OwnHook(LocalElasticAgent):
    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        return super()._start_workers(worker_group)


def test_a_policy_gets_the_arguments_of_the_coordinator(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Evidence, host, all failures, durations of generations, and comparable times."""
    policy = RecordingPolicy()
    script = "import os, time; time.sleep(0.1 * int(os.environ['RANK'])); raise KeyError('lost')"
    spec = WorkerSpec(
        role="trainer",
        entrypoint=sys.executable,
        args=("-c", script),
        local_world_size=2,
        max_restarts=7,
        monitor_interval=0.005,
    )
    OwnHook(spec, DefaultLogsSpecs(log_dir=str(tmp_path)), restart_policy=policy).run()
    (first, _), (second, _), (third, history) = policy.calls
    for number, failure in enumerate((first, second, third), 1):
        assert (failure.generation, failure.global_rank, failure.exit_code) == (number, 0, 1)
        assert (failure.evidence.error_type, failure.host) == ("KeyError", os.uname().nodename)
        assert failure.evidence.traceback
    assert history.earlier == (first.brief(), second.brief())
    assert history.failures[0] == third
    assert (history.restarts_used, history.max_restarts, history.world_size) == (2, 7, 2)
    assert history.lived_s == third.lived_s < history.longest_s + 60
    assert history.longest_s > 0
    assert first.seen_at < second.seen_at < third.seen_at
    assert "tenax: giving up: twice is enough" in capfd.readouterr().err


def test_an_error_file_is_read_as_evidence(tmp_path: Path) -> None:
    """For a hook that returns TorchElastic's ProcessFailure."""
    path = tmp_path / "error.json"
    path.write_text('{"message": {"message": "ValueError: bad", "extraInfo": {"py_callstack": "", "timestamp": "9"}}}')

    class WithFile(Minimal):
        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
            return RunResult(WorkerState.FAILED, failures={3: ProcessFailure(0, 77, 1, str(path))})

    policy = RecordingPolicy()
    WithFile(spec_of("exec sleep 60"), restart_policy=policy).run()
    failure, _ = policy.calls[0]
    assert (failure.global_rank, failure.pid, failure.evidence.error_type) == (3, 77, "ValueError")


class Raising:
    def decide(self, failure: Failure, history: History) -> AnyDecision:
        raise ZeroDivisionError("oh")


def test_a_policy_that_raises_gives_up(capfd: pytest.CaptureFixture[str]) -> None:
    """The failure of the worker is the result, and one line names the policy and its exception."""
    assert Minimal(spec_of("exit 3", max_restarts=2), restart_policy=Raising()).run().failures[0].exitcode == 3
    line = "tenax: giving up: the restart policy Raising raised ZeroDivisionError: oh\n"
    assert capfd.readouterr().err == line


class SignalsItself:
    def decide(self, failure: Failure, history: History) -> AnyDecision:
        os.kill(os.getpid(), signal.SIGUSR1)
        raise AssertionError("the signal came too late")


def test_a_signal_during_the_decision_of_the_policy_stops_the_run() -> None:
    agent = Minimal(spec_of("exit 3"), restart_policy=SignalsItself(), signals_to_handle="SIGUSR1")
    with pytest.raises(SignalException):
        agent.run()


class Interrupted(Minimal):
    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        os.kill(os.getpid(), signal.SIGUSR1)
        raise AssertionError("the signal came too late")


def test_a_signal_shuts_down_with_that_signal() -> None:
    """The blocking hook is interrupted, _shutdown gets the signal, and the handlers are restored."""
    before = signal.getsignal(signal.SIGUSR1)
    agent = Interrupted(spec_of("exec sleep 60"), signals_to_handle="SIGUSR1")
    with pytest.raises(SignalException) as caught:
        agent.run()
    assert caught.value.sigval is signal.SIGUSR1
    assert agent.death_sig is signal.SIGUSR1
    assert agent.calls == ["start", "shutdown"]
    assert signal.getsignal(signal.SIGUSR1) is before


def test_a_rendezvous_may_return_a_tuple() -> None:
    """The older form: (store, rank, world size); the address is then exchanged through the store."""
    store = Store()
    group = _group_after_run(Handler(store, as_tuple=True))
    assert (group.group_rank, group.group_world_size, group.store) == (0, 1, store)
    assert group.master_addr == "127.0.0.1"
    assert group.master_port
    assert _group_after_run(Handler(None, as_tuple=True)).master_port, "one node needs no store"


def _group_after_run(handler: Handler, **fields: Any) -> WorkerGroup:
    agent = Minimal(spec_of("exit 0", handler, **fields))
    agent.run()
    return agent.get_worker_group()


def test_two_nodes_exchange_ranks_and_address_through_the_store() -> None:
    """Ranks in the order of the nodes, one address; both wait at the exit barrier."""
    store = Store()
    agents = [
        Minimal(spec_of("exit 0", Handler(store, rank, 2, as_tuple=True), local_world_size=rank + 1, local_addr="here"))
        for rank in (0, 1)
    ]
    threads = [threading.Thread(target=agent.run) for agent in agents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    groups = [agent.get_worker_group() for agent in agents]
    assert [[worker.global_rank for worker in group.workers] for group in groups] == [[0], [1, 2]]
    assert {worker.world_size for group in groups for worker in group.workers} == {3}
    assert {(group.master_addr, group.master_port) for group in groups} == {("here", groups[0].master_port)}
    assert store.get("torchelastic/agent/terminal_state/num_members") == b"2"


def test_a_missing_peer_at_the_exit_barrier_is_not_a_failure() -> None:
    """The barrier times out with a warning; the result is a success."""
    store = Store()
    store.set("torchelastic/role_info/1", '{"role": "trainer", "rank": 1, "local_world_size": 1}')
    agent = Minimal(spec_of("exit 0", Handler(store, 0, 2), local_addr="here"), exit_barrier_timeout=0.01)
    with pytest.warns(RuntimeWarning, match="did not reach the exit barrier"):
        assert agent.run().state is WorkerState.SUCCEEDED


class Lost(Store):
    """A store whose server is lost before the exit barrier."""

    def add(self, key: str, amount: int) -> int:
        raise ConnectionError("connection reset by peer")


def test_a_lost_store_at_the_end_is_not_a_failure() -> None:
    """All workers have succeeded; the node that served the store has left first."""
    store = Lost()
    store.set("torchelastic/role_info/1", '{"role": "trainer", "rank": 1, "local_world_size": 1}')
    agent = Minimal(spec_of("exit 0", Handler(store, 0, 2), local_addr="here"))
    with pytest.warns(RuntimeWarning, match="connection reset by peer"):
        assert agent.run().state is WorkerState.SUCCEEDED


class Interrupting(Store):
    def wait(self, keys: list[str], timeout: timedelta) -> None:
        if keys == ["torchelastic/agent/terminal_state/last_member"]:
            os.kill(os.getpid(), signal.SIGUSR1)
        super().wait(keys, timeout)


def test_a_signal_interrupts_the_exit_barrier() -> None:
    store = Interrupting()
    store.set("torchelastic/role_info/1", '{"role": "trainer", "rank": 1, "local_world_size": 1}')
    agent = Minimal(spec_of("exit 0", Handler(store, 0, 2), local_addr="here"), signals_to_handle="SIGUSR1")
    with pytest.raises(SignalException):
        agent.run()
    assert agent.death_sig is signal.SIGUSR1


def test_an_exception_of_the_rendezvous_is_raised() -> None:
    """After _shutdown."""
    handler = Handler()
    handler.error = RendezvousClosedError("over")
    agent = Minimal(spec_of("exit 0", handler))
    with pytest.raises(RendezvousClosedError, match="over"):
        agent.run()
    assert agent.calls == ["shutdown"]


def test_a_node_that_is_not_needed_succeeds_without_values() -> None:
    """RendezvousGracefulExitError is not a failure."""
    handler = Handler()
    handler.error = RendezvousGracefulExitError("enough nodes")
    assert Minimal(spec_of("exit 0", handler)).run() == RunResult(WorkerState.SUCCEEDED)


# --- subclasses of the local agent, third-party handlers --------------------------------------------------------------


@pytest.fixture
def specs(tmp_path: Path) -> DefaultLogsSpecs:
    return DefaultLogsSpecs(log_dir=str(tmp_path), redirects=Std.ALL)


def output(specs: DefaultLogsSpecs, attempt: str = "0", rank: int = 0) -> str:
    return (Path(specs.run_log_dir) / f"attempt_{attempt}" / str(rank) / "stdout.log").read_text()


class Counting(LocalElasticAgent):
    """Overrides one hook and calls the inherited one."""

    starts = 0

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self.starts += 1
        return super()._start_workers(worker_group)


def value() -> str:
    return os.environ["RANK"]


def test_a_subclass_can_call_the_inherited_hook(specs: DefaultLogsSpecs) -> None:
    """Return values are keyed by global rank, as without it."""
    agent = Counting(WorkerSpec(entrypoint=value, local_world_size=2, monitor_interval=0.005), specs)
    assert agent.run() == RunResult(WorkerState.SUCCEEDED, {0: "0", 1: "1"})
    assert agent.starts == 1


def test_a_subclass_restarts_with_the_right_environment(specs: DefaultLogsSpecs) -> None:
    """Count and generation increase, the folder is new, and the failure is the last one."""
    script = "echo $TORCHELASTIC_RESTART_COUNT $TENAX_GENERATION $TORCHELASTIC_RUN_ID; exit 4"
    agent = Counting(spec_of(script, Handler(), max_restarts=1), specs)
    result = agent.run()
    assert result.failures[0].exitcode == 4
    assert [output(specs, "0"), output(specs, "1")] == ["0 1 third-run\n", "1 2 third-run\n"]


def test_a_subclass_honours_the_shutdown_timeout(specs: DefaultLogsSpecs, tmp_path: Path) -> None:
    """When a worker fails, the others get this grace period."""
    ready = tmp_path / "ready"
    os.mkfifo(ready)
    script = f"""
    if [ $RANK = 0 ]; then trap '' TERM; echo > {shlex.quote(str(ready))}; while :; do sleep 60 & wait; done; fi
    read line < {shlex.quote(str(ready))}
    exit 5
    """
    began = time.monotonic()
    result = Counting(spec_of(script, local_world_size=2), specs, shutdown_timeout=0).run()
    assert time.monotonic() - began < 20
    assert list(result.failures) == [1]


def test_a_third_party_handler_sets_ranks_address_and_run_id(specs: DefaultLogsSpecs) -> None:
    """It is called again for every generation."""
    handler = Handler(Store(), rank=0, world_size=1)
    script = "echo $RANK of $WORLD_SIZE at $MASTER_ADDR:$MASTER_PORT in $TORCHELASTIC_RUN_ID; [ $TENAX_GENERATION = 2 ]"
    agent = LocalElasticAgent(spec_of(script, handler, max_restarts=1), specs)
    assert agent.run().state is WorkerState.SUCCEEDED
    assert output(specs, "0") == "0 of 1 at third-host:4001 in third-run\n"
    assert output(specs, "1") == "0 of 1 at third-host:4002 in third-run\n"
    assert not handler.is_shut_down, "the owner of the handler shuts it down"


def test_a_third_party_handler_with_a_waiting_node_restarts_the_workers(
    specs: DefaultLogsSpecs, tmp_path: Path
) -> None:
    """The restart is uncharged, and the logs of both generations are kept."""
    handler = Handler()
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    notify = f"echo > {shlex.quote(str(fifo))}"
    script = f"echo generation $TENAX_GENERATION; [ $TENAX_GENERATION = 2 ] || {{ {notify}; exec sleep 60; }}"
    agent = LocalElasticAgent(spec_of(script, handler), specs)
    results: list[RunResult] = []
    thread = threading.Thread(target=lambda: results.append(agent.run()))
    thread.start()
    fifo.read_text()
    handler.waiting = [1]
    thread.join(30)
    assert results[0].state is WorkerState.SUCCEEDED
    assert [output(specs, "0"), output(specs, "0.1")] == ["generation 1\n", "generation 2\n"]


class Mock:
    """A mock, as tests of third-party launchers pass it: every attribute exists and does nothing."""

    def __getattr__(self, name: str) -> Any:
        results = {"next_rendezvous": (None, 0, 1), "num_nodes_waiting": 0, "get_run_id": "any"}
        return lambda *_, **__: results.get(name)


def test_a_mock_handler_is_not_taken_for_one_of_tenax(specs: DefaultLogsSpecs) -> None:
    """Only tenax's own handlers are driven by events; others are called through the documented methods."""
    agent = LocalElasticAgent(spec_of("exit 0", Mock()), specs)  # type: ignore[arg-type]
    assert agent.run().state is WorkerState.SUCCEEDED


class Server:
    """The methods of a health check server that the agent calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def start(self) -> None:
        self.calls.append("start")

    def stop(self) -> None:
        self.calls.append("stop")


@pytest.mark.parametrize("handler", [None, Handler()], ids=["tenax", "third-party"])
def test_the_health_check_server_runs_with_the_workers(specs: DefaultLogsSpecs, handler: Handler | None) -> None:
    """Started before and stopped after them."""
    server = Server()
    LocalElasticAgent(spec_of("exit 0", handler), specs, health_check_server=server).run()
    assert server.calls == ["start", "stop"]


class TwoRounds(RendezvousHandler):
    """In the first round a second node is in the group and sends nothing; in the second round this node is alone."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.rounds = 0

    def get_backend(self) -> str:
        return "two-rounds"

    def next_rendezvous(self) -> RendezvousInfo:
        self.rounds += 1
        return RendezvousInfo(self.store, 0, 3 - self.rounds, RendezvousStoreInfo("127.0.0.1", 1))

    def num_nodes_waiting(self) -> int:
        return 1 if self.rounds == 1 else 0

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None: ...

    def get_run_id(self) -> str:
        return "run"

    def shutdown(self) -> bool:
        return True


def test_a_node_that_dies_before_it_sends_its_role_is_not_awaited() -> None:
    """TorchElastic waits for its key until the store's timeout, and then its agent fails."""
    handler = TwoRounds()
    spec = WorkerSpec("trainer", 1, entrypoint=sys.executable, args=("-c", "pass"), rdzv_handler=handler)
    agent = LocalElasticAgent(spec)
    assert not agent.run().is_failed()
    assert (handler.rounds, agent.get_worker_group().group_world_size) == (2, 1)
