"""The launcher with real workers: return values, errors and their causes, policies, third-party rendezvous."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from launched_functions import fail, identify, reduce_and_leave, start_method_of_children

from kit.addresses import own_endpoint
from kit.processes import Program, forks_with_threads, leaving_nothing, needs_torch, on_linux, program
from tenax._core.model import Failure
from tenax._core.policy import AnyDecision, GiveUp, History, Wait
from tenax._logs.specs import DefaultLogsSpecs
from tenax.cli.run import launch
from tenax.launcher import LaunchConfig, elastic_launch, launch_agent
from tenax.launcher.api import entrypoint_name, job_of
from tenax.multiprocessing import Std
from tenax.multiprocessing.errors import ChildFailedError
from tenax.rendezvous import (
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

pytestmark = [on_linux, forks_with_threads]
__all__ = ["program"]


@pytest.fixture
def config(tmp_path: Path) -> Iterator[Callable[..., LaunchConfig]]:
    specs = DefaultLogsSpecs(log_dir=str(tmp_path), redirects=Std.ALL)

    def make(workers: int = 1, **fields: Any) -> LaunchConfig:
        return LaunchConfig(1, 1, workers, logs_specs=specs, **{"max_restarts": 0, **fields})

    with leaving_nothing():
        yield make


Make = Callable[..., LaunchConfig]


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_return_values_are_keyed_by_global_rank(config: Make, method: str) -> None:
    """A run without an id gets a random one."""
    launch_config = config(2, start_method=method)
    values = elastic_launch(launch_config, identify)("hello")
    assert launch_config.run_id
    assert values == {rank: ("hello", str(rank), launch_config.run_id) for rank in range(2)}


@pytest.fixture(scope="module")
def torch_for_forks() -> None:
    """Imported before the fork, and not by each worker."""
    import torch.distributed  # noqa: F401


@needs_torch
def test_a_process_group_that_is_not_destroyed_does_not_fail_the_run(config: Make) -> None:
    """No worker aborts at exit because a peer has left or a thread of torch outlives the interpreter."""
    assert elastic_launch(config(2, start_method="spawn"), reduce_and_leave)(20) == dict.fromkeys(range(2), 1.0)


@needs_torch
@pytest.mark.usefixtures("torch_for_forks")
def test_a_process_group_of_forks_that_is_not_destroyed_does_not_fail_the_run(config: Make) -> None:
    assert elastic_launch(config(2, start_method="fork"), reduce_and_leave)(20) == dict.fromkeys(range(2), 1.0)


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_children_of_a_worker_use_the_same_start_method(config: Make, method: str) -> None:
    """As in a ``multiprocessing.Process``: a DataLoader must not fork if the user chose otherwise."""
    assert elastic_launch(config(start_method=method), start_method_of_children)() == {0: method}


def test_a_program_returns_none_for_each_rank(config: Make) -> None:
    """``${local_rank}`` in its arguments is replaced."""
    launch_config = config(2, run_id="named")
    assert launch_agent(launch_config, "/bin/echo", ["rank", "${local_rank}", "$HOME", 3]) == {0: None, 1: None}
    files = sorted(Path(launch_config.logs_specs.run_log_dir).glob("attempt_0/*/stdout.log"))
    assert [path.read_text() for path in files] == [f"rank {rank} $HOME 3\n" for rank in range(2)]
    assert os.path.basename(launch_config.logs_specs.run_log_dir).startswith("named_")


def test_a_failure_raises_child_failed_error_with_the_cause(config: Make) -> None:
    """ChildFailedError names the function, the first failed rank and its exception, without a decorator."""
    with pytest.raises(ChildFailedError) as caught:
        elastic_launch(config(2), fail)("the real cause")
    error = caught.value
    assert error.name == "fail"
    assert list(error.failures) == [0]
    rank, failure = error.get_first_failure()
    assert (rank, failure.exitcode) == (0, 1)
    assert failure.message["message"] == "ValueError: the real cause"  # type: ignore[index]
    assert "raise ValueError(text)\n  ValueError: the real cause" in str(error)


def test_the_traceback_of_a_plain_script_is_the_message(config: Make, tmp_path: Path) -> None:
    """It is taken from stderr; the script does not use tenax."""
    import sys

    script = tmp_path / "train.py"
    script.write_text("def main():\n    raise KeyError('lost')\nmain()\n")
    with pytest.raises(ChildFailedError) as caught:
        elastic_launch(config(), sys.executable)(str(script))
    assert caught.value.name == str(script)
    assert "KeyError: 'lost'" in str(caught.value)


class WaitOrGiveUp:
    """Waits a moment, then gives up on the exit code 3."""

    def __init__(self) -> None:
        self.codes: list[int] = []

    def decide(self, failure: Failure, history: History) -> AnyDecision:
        self.codes.append(failure.exit_code)
        return GiveUp("3 is final") if failure.exit_code == 3 else Wait("a moment", seconds=0.01)


@pytest.mark.parametrize("backend", ["local", "third_party"])
def test_the_restart_policy_of_the_config_decides(config: Make, third_party: list[Polled], backend: str) -> None:
    """Also with a third-party rendezvous."""
    policy = WaitOrGiveUp()
    launch_config = config(rdzv_backend=backend, restart_policy=policy, monitor_interval=0.005)
    with pytest.raises(ChildFailedError) as caught:
        launch_agent(launch_config, "/bin/sh", ["-c", "exit $((TORCHELASTIC_RESTART_COUNT + 1))"])
    assert caught.value.failures[0].exitcode == 3
    assert policy.codes == [1, 2, 3]


def test_a_config_can_be_used_twice(config: Make) -> None:
    """Each launch has its own files."""
    launch_config = config(start_method="fork")
    assert elastic_launch(launch_config, identify)("a") == {0: ("a", "0", launch_config.run_id)}
    assert elastic_launch(launch_config, identify)("b") == {0: ("b", "0", launch_config.run_id)}
    names = sorted(os.listdir(launch_config.logs_specs.run_log_dir))
    assert names == [
        *("attempt_0", "attempt_0.1"),
        *("coordinator.1.jsonl", "coordinator.jsonl", "journal.1.jsonl", "journal.jsonl"),
    ]


# --- third-party rendezvous -------------------------------------------------------------------------------------------


class Polled(RendezvousHandler):
    """A third-party handler, which the agent polls."""

    def __init__(self, run_id: str, config: dict[str, Any]) -> None:
        self.run_id = run_id
        self.config = config
        self.shutdowns = 0
        self.cannot_shut_down = bool(config.get("stubborn"))

    def get_backend(self) -> str:
        return "third_party"

    def next_rendezvous(self) -> RendezvousInfo:
        if self.config.get("is_full"):
            raise RendezvousGracefulExitError("enough nodes")
        return RendezvousInfo(None, 0, 1, RendezvousStoreInfo("third-host", 29))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None: ...

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self.run_id

    def shutdown(self) -> bool:
        self.shutdowns += 1
        if self.cannot_shut_down:
            raise ConnectionError("connection lost")
        return True


_created: list[Polled] = []


def _create(params: Any) -> Polled:
    _created.append(Polled(params.run_id, params.config))
    return _created[-1]


@pytest.fixture
def third_party() -> list[Polled]:
    """The created handlers."""
    rendezvous_handler_registry.register("third_party", _create)
    _created.clear()
    return _created


def test_a_registered_handler_is_used(config: Make, third_party: list[Polled]) -> None:
    """With the config's parameters; it is shut down once at the end."""
    launch_config = config(
        rdzv_backend="third_party", rdzv_configs={"colour": "red"}, run_id="named", monitor_interval=0.005
    )
    launch_agent(launch_config, "/bin/sh", ["-c", "echo $MASTER_ADDR:$MASTER_PORT"])
    (handler,) = third_party
    assert (handler.run_id, handler.config["colour"], handler.shutdowns) == ("named", "red", 1)
    assert (Path(launch_config.logs_specs.run_log_dir) / "attempt_0/0/stdout.log").read_text() == "third-host:29\n"


def test_a_node_that_is_not_needed_succeeds_without_values(
    config: Make, third_party: list[Polled], capfd: pytest.CaptureFixture[str]
) -> None:
    """RendezvousGracefulExitError is not a failure; TorchElastic's launcher fails with it (W6)."""
    launch_config = config(rdzv_backend="third_party", rdzv_configs={"is_full": True}, monitor_interval=0.005)
    assert launch_agent(launch_config, "/bin/false", []) == {}
    assert launch(job_of(launch_config, "/bin/false", []), os.environ) == 0
    assert "Traceback" not in capfd.readouterr().err


def test_a_failed_shutdown_of_the_rendezvous_does_not_hide_the_cause(config: Make, third_party: list[Polled]) -> None:
    """It is only a warning."""
    launch_config = config(rdzv_backend="third_party", rdzv_configs={"stubborn": True}, monitor_interval=0.005)
    with (
        pytest.warns(RuntimeWarning, match="connection lost"),
        pytest.raises(ChildFailedError, match="exitcode  : 7"),
    ):
        launch_agent(launch_config, "/bin/sh", ["-c", "exit 7"])


@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 137)])
def test_the_command_line_with_a_third_party_handler(
    config: Make, third_party: list[Polled], capfd: pytest.CaptureFixture[str], script: str, code: int
) -> None:
    """The exit code is the same as with tenax's own, and a failure is printed."""
    launch_config = config(rdzv_backend="third_party", monitor_interval=0.005)
    assert launch(job_of(launch_config, "/bin/sh", ["-c", script]), os.environ) == code
    assert ("Root Cause" in capfd.readouterr().err) == (code != 0)
    assert len(third_party) == 1


def test_a_signal_does_not_close_the_rendezvous(program: Callable[..., Program]) -> None:
    """This node leaves, and the run continues."""
    code = """
    import os, sys
    sys.path.append(sys.argv[1])
    from test_launch import Polled, _create, _created
    from tenax.launcher import LaunchConfig, launch_agent
    from tenax.multiprocessing import SignalException
    from tenax.rendezvous import rendezvous_handler_registry
    rendezvous_handler_registry.register("third_party", _create)
    os.dup2(1, 2)
    config = LaunchConfig(1, 1, 1, rdzv_backend="third_party", monitor_interval=0.005)
    try:
        launch_agent(config, "/bin/sh", ["-c", "echo ready >&2; exec sleep 60"])
    except SignalException as error:
        print(error.sigval.name, _created[0].shutdowns)
    """
    host = program(code, Path(__file__).parent)
    assert host.pipe.line() == "ready"
    host.send(signal.SIGTERM)
    assert host.pipe.rest() == "SIGTERM 0\n", host.errors


# --- names and errors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entrypoint", "args", "name"),
    [
        (identify, [], "identify"),
        ("/usr/bin/python3", ["-u", "train.py", "--epochs", "3"], "train.py"),
        ("python", ["-m", "package.train"], "package.train"),
        ("./program", ["train.py"], "./program"),
        ("/usr/bin/python3", [], "/usr/bin/python3"),
        (threading.Lock(), [], "lock"),
    ],
)
def test_the_name_of_an_entrypoint(entrypoint: Any, args: list[str], name: str) -> None:
    """The script rather than the interpreter."""
    assert entrypoint_name(entrypoint, args) == name


def test_an_unknown_backend_is_rejected_with_the_known_ones(config: Make) -> None:
    with pytest.raises(ValueError, match="unknown rendezvous backend 'pigeon'; known backends: c10d, etcd"):
        launch_agent(config(rdzv_backend="pigeon"), "/bin/true", [])


def test_a_launch_that_fails_early_closes_its_handlers(tmp_path: Path) -> None:
    """An open metrics page would keep its port from the next launch."""
    handlers = {"handlers": f"prometheus:{own_endpoint()}"}
    config = LaunchConfig(1, 1, 1, metrics_cfg=handlers)
    with leaving_nothing():
        for _ in range(2):
            with pytest.raises(AssertionError, match="needs an entrypoint"):
                launch_agent(config, None, [])
