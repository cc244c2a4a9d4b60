"""The launcher's functions with real workers: values, errors with their cause, policies, and others' rendezvous."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kit.addresses import own_endpoint
from kit.processes import Program, forks_with_threads, leaving_nothing, on_linux, program
from tenax._core.model import Failure
from tenax._core.policy import AnyDecision, GiveUp, History, Wait
from tenax._logs.specs import DefaultLogsSpecs
from tenax.launcher import LaunchConfig, elastic_launch, launch_agent
from tenax.launcher.api import entrypoint_name, launch
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


def identify(word: str) -> tuple[str, str, str]:
    return word, os.environ["RANK"], os.environ["TORCHELASTIC_RUN_ID"]


Make = Callable[..., LaunchConfig]


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_values_by_global_rank(config: Make, method: str) -> None:
    """What the function returned on each rank; the run has a name, also when none was given."""
    made = config(2, start_method=method)
    values = elastic_launch(made, identify)("hello")
    assert made.run_id
    assert values == {rank: ("hello", str(rank), made.run_id) for rank in range(2)}


def reduce_and_leave(times: int) -> float:
    """Keep the process group: nobody destroys it."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.ones(1000)
    for _ in range(times):
        dist.all_reduce(total)
        total /= dist.get_world_size()
    return float(total[0])


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_a_process_group_that_nobody_destroys_does_not_fail_the_run(config: Make, method: str) -> None:
    """No worker aborts at exit because a peer has left or a thread of torch outlives the interpreter."""
    assert elastic_launch(config(3, start_method=method), reduce_and_leave)(20) == dict.fromkeys(range(3), 1.0)


def how_children_are_made() -> str:
    return multiprocessing.get_start_method()


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_what_a_worker_starts_is_started_as_the_worker_was(config: Make, method: str) -> None:
    """As in a ``multiprocessing.Process``: a DataLoader must not fork where the user chose not to."""
    assert elastic_launch(config(start_method=method), how_children_are_made)() == {0: method}


def test_a_program_returns_none_for_each_rank(config: Make) -> None:
    """A path instead of a function, with its arguments; ``${local_rank}`` among them is the worker's."""
    made = config(2, run_id="named")
    assert launch_agent(made, "/bin/echo", ["rank", "${local_rank}", "$HOME", 3]) == {0: None, 1: None}
    files = sorted(Path(made.logs_specs.run_log_dir).glob("attempt_0/*/stdout.log"))
    assert [path.read_text() for path in files] == [f"rank {rank} $HOME 3\n" for rank in range(2)]
    assert os.path.basename(made.logs_specs.run_log_dir).startswith("named_")


def fail(text: str) -> None:
    if os.environ["RANK"] == "0":
        raise ValueError(text)
    signal.pause()


def test_a_failure_raises_with_the_real_cause(config: Make) -> None:
    """ChildFailedError names the function, the first rank that failed and its exception: nothing was decorated."""
    with pytest.raises(ChildFailedError) as caught:
        elastic_launch(config(2), fail)("the real cause")
    error = caught.value
    assert error.name == "fail"
    assert list(error.failures) == [0]
    rank, failure = error.get_first_failure()
    assert (rank, failure.exitcode) == (0, 1)
    assert failure.message["message"] == "ValueError: the real cause"  # type: ignore[index]
    assert "raise ValueError(text)\n  ValueError: the real cause" in str(error)


def test_a_traceback_of_a_plain_script_is_found(config: Make, tmp_path: Path) -> None:
    """A script that knows nothing of us: its last words on stderr are the message."""
    import sys

    script = tmp_path / "train.py"
    script.write_text("def main():\n    raise KeyError('lost')\nmain()\n")
    with pytest.raises(ChildFailedError) as caught:
        elastic_launch(config(), sys.executable)(str(script))
    assert caught.value.name == str(script)
    assert "KeyError: 'lost'" in str(caught.value)


class Choosy:
    """Waits a moment, then gives up on the exit code 3."""

    def __init__(self) -> None:
        self.codes: list[int] = []

    def decide(self, failure: Failure, history: History) -> AnyDecision:
        self.codes.append(failure.exit_code)
        return GiveUp("3 is final") if failure.exit_code == 3 else Wait("a moment", seconds=0.01)


@pytest.mark.parametrize("backend", ["local", "theirs"])
def test_a_restart_policy_in_the_config(config: Make, theirs: list[Theirs], backend: str) -> None:
    """It decides, whoever arranges the rendezvous."""
    policy = Choosy()
    made = config(rdzv_backend=backend, restart_policy=policy, monitor_interval=0.005)
    with pytest.raises(ChildFailedError) as caught:
        launch_agent(made, "/bin/sh", ["-c", "exit $((TORCHELASTIC_RESTART_COUNT + 1))"])
    assert caught.value.failures[0].exitcode == 3
    assert policy.codes == [1, 2, 3]


def test_two_launches_with_one_config(config: Make) -> None:
    """A config can be used again; neither launch disturbs the other's files."""
    made = config(start_method="fork")
    assert elastic_launch(made, identify)("a") == {0: ("a", "0", made.run_id)}
    assert elastic_launch(made, identify)("b") == {0: ("b", "0", made.run_id)}
    names = sorted(os.listdir(made.logs_specs.run_log_dir))
    assert names == [
        *("attempt_0", "attempt_0.1"),
        *("coordinator.1.jsonl", "coordinator.jsonl", "journal.1.jsonl", "journal.jsonl"),
    ]


# --- a rendezvous of others -------------------------------------------------------------------------------------------


class Theirs(RendezvousHandler):
    def __init__(self, run_id: str, config: dict[str, Any]) -> None:
        self.run_id = run_id
        self.config = config
        self.shutdowns = 0
        self.cannot_shut_down = bool(config.get("stubborn"))

    def get_backend(self) -> str:
        return "theirs"

    def next_rendezvous(self) -> RendezvousInfo:
        if self.config.get("is_full"):
            raise RendezvousGracefulExitError("there are enough of you")
        return RendezvousInfo(None, 0, 1, RendezvousStoreInfo("their-host", 29))

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
            raise ConnectionError("the meeting place is gone")
        return True


_made: list[Theirs] = []


def _create(params: Any) -> Theirs:
    _made.append(Theirs(params.run_id, params.config))
    return _made[-1]


@pytest.fixture
def theirs() -> list[Theirs]:
    """The handlers that were made."""
    rendezvous_handler_registry.register("theirs", _create)
    _made.clear()
    return _made


def test_a_registered_handler_is_used(config: Make, theirs: list[Theirs]) -> None:
    """Made from the config's parameters, asked for ranks and address, shut down once at the end."""
    made = config(rdzv_backend="theirs", rdzv_configs={"colour": "red"}, run_id="named", monitor_interval=0.005)
    launch_agent(made, "/bin/sh", ["-c", "echo $MASTER_ADDR:$MASTER_PORT"])
    (handler,) = theirs
    assert (handler.run_id, handler.config["colour"], handler.shutdowns) == ("named", "red", 1)
    assert (Path(made.logs_specs.run_log_dir) / "attempt_0/0/stdout.log").read_text() == "their-host:29\n"


def test_a_node_that_is_not_needed_succeeds_without_values(
    config: Make, theirs: list[Theirs], capfd: pytest.CaptureFixture[str]
) -> None:
    """A handler that sends it away in peace is no failure; TorchElastic's launcher dies of it (W6)."""
    made = config(rdzv_backend="theirs", rdzv_configs={"is_full": True}, monitor_interval=0.005)
    assert launch_agent(made, "/bin/false", []) == {}
    assert launch(made, "/bin/false", []) == 0
    assert "Traceback" not in capfd.readouterr().err


def test_a_rendezvous_that_cannot_shut_down_hides_nothing(config: Make, theirs: list[Theirs]) -> None:
    """The cause of the failure comes out; that the shutdown failed too is a warning."""
    made = config(rdzv_backend="theirs", rdzv_configs={"stubborn": True}, monitor_interval=0.005)
    with (
        pytest.warns(RuntimeWarning, match="the meeting place is gone"),
        pytest.raises(ChildFailedError, match="exitcode  : 7"),
    ):
        launch_agent(made, "/bin/sh", ["-c", "exit 7"])


@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 137)])
def test_the_command_line_with_a_handler_of_others(
    config: Make, theirs: list[Theirs], capfd: pytest.CaptureFixture[str], script: str, code: int
) -> None:
    """The exit code is the same as with ours, and a failure is told."""
    made = config(rdzv_backend="theirs", monitor_interval=0.005)
    assert launch(made, "/bin/sh", ["-c", script]) == code
    assert ("Root Cause" in capfd.readouterr().err) == (code != 0)
    assert len(theirs) == 1


def test_a_signal_does_not_close_the_others_rendezvous(program: Callable[..., Program]) -> None:
    """The node that was told to stop leaves; the run of the others goes on."""
    code = """
    import os, sys
    sys.path.append(sys.argv[1])
    from test_launch import Theirs, _create, _made
    from tenax.launcher import LaunchConfig, launch_agent
    from tenax.multiprocessing import SignalException
    from tenax.rendezvous import rendezvous_handler_registry
    rendezvous_handler_registry.register("theirs", _create)
    os.dup2(1, 2)
    config = LaunchConfig(1, 1, 1, rdzv_backend="theirs", monitor_interval=0.005)
    try:
        launch_agent(config, "/bin/sh", ["-c", "echo ready >&2; exec sleep 60"])
    except SignalException as error:
        print(error.sigval.name, _made[0].shutdowns)
    """
    host = program(code, Path(__file__).parent)
    assert host.pipe.line() == "ready"
    host.send(signal.SIGTERM)
    assert host.pipe.rest() == "SIGTERM 0\n", host.errors


# --- small things -----------------------------------------------------------------------------------------------------


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
def test_what_people_call_it(entrypoint: Any, args: list[str], name: str) -> None:
    """The script rather than the interpreter."""
    assert entrypoint_name(entrypoint, args) == name


def test_an_unknown_backend_is_refused_with_the_known_ones(config: Make) -> None:
    """In one sentence, before anything starts."""
    with pytest.raises(ValueError, match="unknown rendezvous backend 'pigeon'; known backends: c10d, etcd"):
        launch_agent(config(rdzv_backend="pigeon"), "/bin/true", [])


def test_a_launch_that_does_not_come_to_a_run_leaves_no_handler_open(tmp_path: Path) -> None:
    """A page that nobody closes would keep its port from the next launch."""
    handlers = {"handlers": f"prometheus:{own_endpoint()}"}
    config = LaunchConfig(1, 1, 1, metrics_cfg=handlers)
    with leaving_nothing():
        for _ in range(2):
            with pytest.raises(AssertionError, match="needs an entrypoint"):
                launch_agent(config, None, [])
