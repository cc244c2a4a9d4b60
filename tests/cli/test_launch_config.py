"""LaunchConfig has TorchElastic's fields in TorchElastic's order, and behaves like a dataclass."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import pickle

import pytest

from kit.processes import needs_torch
from kit.torch_python import TorchPython
from tenax.launcher.api import LaunchConfig

FIELDS = [
    *("min_nodes", "max_nodes", "nproc_per_node", "logs_specs", "run_id", "role", "rdzv_endpoint", "rdzv_backend"),
    *("rdzv_configs", "rdzv_timeout", "max_restarts", "monitor_interval", "start_method", "log_line_prefix_template"),
    *("metrics_cfg", "local_addr", "event_log_handler", "numa_options", "signals_to_handle"),
    *("duplicate_stdout_filters", "duplicate_stderr_filters", "virtual_local_rank", "shutdown_timeout"),
    *("restart_policy", "notice_signals", "notice_s", "preload"),
    *("dashboard", "on_hang", "hang_after", "trace"),
]


@pytest.fixture(autouse=True)
def _no_timeout_in_the_environment(monkeypatch) -> None:
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)


def test_the_defaults_are_torchelastics() -> None:
    """The rendezvous timeout is filled in."""
    assert vars(LaunchConfig(1, 1, 2)) == {
        "min_nodes": 1,
        "max_nodes": 1,
        "nproc_per_node": 2,
        "logs_specs": None,
        "run_id": "",
        "role": "default_role",
        "rdzv_endpoint": "",
        "rdzv_backend": "etcd",
        "rdzv_configs": {"timeout": 900},
        "rdzv_timeout": -1,
        "max_restarts": 3,
        "monitor_interval": 0.1,
        "start_method": "spawn",
        "log_line_prefix_template": None,
        "metrics_cfg": {},
        "local_addr": None,
        "event_log_handler": "null",
        "numa_options": None,
        "signals_to_handle": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "duplicate_stdout_filters": None,
        "duplicate_stderr_filters": None,
        "virtual_local_rank": False,
        "shutdown_timeout": 30,
        "restart_policy": None,
        "notice_signals": "",
        "notice_s": None,
        "preload": "none",
        "dashboard": "",
        "on_hang": "report",
        "hang_after": 300.0,
        "trace": "",
    }


@pytest.mark.process
@needs_torch
def test_the_fields_are_torchelastics(torch_python: TorchPython) -> None:
    """With the same order and defaults; tenax's own come after them."""
    dump = (
        "import dataclasses, json; from torch.distributed.launcher.api import LaunchConfig;"
        "none = dataclasses.MISSING;"
        "print(json.dumps([(f.name, None if f.default is none else f.default, f.default is none,"
        " f.default_factory is not none) for f in dataclasses.fields(LaunchConfig)]))"
    )
    done = torch_python.run("-c", dump)
    assert done.returncode == 0, done.stderr
    torchs = json.loads(done.stdout.splitlines()[-1])
    none = dataclasses.MISSING
    tenaxs = [
        [
            field.name,
            None if field.default is none else field.default,
            field.default is none,
            field.default_factory is not none,
        ]
        for field in dataclasses.fields(LaunchConfig)
    ]
    assert tenaxs[: len(torchs)] == torchs
    assert [field[0] for field in tenaxs[len(torchs) :]] == [
        "restart_policy",
        "notice_signals",
        "notice_s",
        "preload",
        "dashboard",
        "on_hang",
        "hang_after",
        "trace",
    ]


def test_the_functions_of_dataclasses_accept_it() -> None:
    """fields, asdict, astuple, replace and is_dataclass work on the class and on its instances."""
    config = LaunchConfig(1, 1, 2, rdzv_configs={"read_timeout": "3"})
    assert dataclasses.is_dataclass(LaunchConfig)
    assert dataclasses.is_dataclass(config)
    assert [field.name for field in dataclasses.fields(LaunchConfig)] == FIELDS == list(vars(config))
    assert dataclasses.asdict(config) == vars(config)
    assert dataclasses.astuple(config) == tuple(vars(config).values())
    changed = dataclasses.replace(config, max_restarts=7)
    assert changed.max_restarts == 7
    assert dataclasses.replace(changed, max_restarts=3) == config
    if hasattr(copy, "replace"):
        assert copy.replace(config, max_restarts=7) == changed


def test_it_can_be_the_base_of_a_dataclass() -> None:
    """A subclass of a user gets all fields and the same checks."""

    @dataclasses.dataclass
    class Mine(LaunchConfig):
        queue: str = "short"

    mine = Mine(1, 1, 2, queue="long")
    assert (mine.nproc_per_node, mine.queue, mine.shutdown_timeout) == (2, "long", 30)
    assert mine.rdzv_configs == {"timeout": 900}
    assert mine.rdzv_configs is not Mine(1, 1, 2).rdzv_configs
    with pytest.raises(ValueError, match="nproc_per_node"):
        Mine(1, 1, 0)


def test_equality_repr_copy_and_pickle() -> None:
    """Equal fields make equal configs; the repr names every field; copies and pickles are equal; it has no hash."""
    config = LaunchConfig(1, 1, 2, run_id="x")
    assert config == LaunchConfig(1, 1, 2, run_id="x")
    assert config != LaunchConfig(1, 1, 2, run_id="y")
    assert config != 3
    assert repr(config).startswith(
        "LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=2, logs_specs=None, run_id='x'"
    )
    assert copy.deepcopy(config) == config
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(TypeError):
        hash(config)


def test_the_first_three_fields_are_required() -> None:
    """All can be passed by position."""
    assert list(inspect.signature(LaunchConfig).parameters) == FIELDS
    with pytest.raises(TypeError):
        LaunchConfig(1, 1)


def test_rdzv_timeout_overrides_rdzv_configs() -> None:
    """The default is 900, and the caller's dict is not changed."""
    mine = {"timeout": 5}
    assert LaunchConfig(1, 1, 1, rdzv_configs=mine, rdzv_timeout=7).rdzv_configs == {"timeout": 7}
    assert LaunchConfig(1, 1, 1, rdzv_configs=mine).rdzv_configs == {"timeout": 5}
    assert mine == {"timeout": 5}


def test_shutdown_timeout_defaults_to_the_environment_then_30(monkeypatch) -> None:
    assert LaunchConfig(1, 1, 1, shutdown_timeout=0).shutdown_timeout == 0
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "12")
    assert LaunchConfig(1, 1, 1).shutdown_timeout == 12
    assert LaunchConfig(1, 1, 1, shutdown_timeout=4).shutdown_timeout == 4
    for text in ("soon", "-3", "1.5"):
        monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", text)
        with pytest.raises(
            ValueError, match=r"^TORCH_ELASTIC_SHUTDOWN_TIMEOUT must be a whole number of seconds"
        ) as error:
            LaunchConfig(1, 1, 1)
        assert repr(text) in str(error.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"min_nodes": 0}, "min_nodes=0 and max_nodes=1 are invalid; expected 1 <= min_nodes <= max_nodes"),
        ({"min_nodes": 2}, "min_nodes=2 and max_nodes=1 are invalid; expected 1 <= min_nodes <= max_nodes"),
        ({"nproc_per_node": 0}, "nproc_per_node must be at least 1, not 0"),
        ({"max_restarts": -1}, "max_restarts must be at least 0, not -1"),
        ({"monitor_interval": 0}, "monitor_interval must be more than 0 seconds, not 0"),
        ({"start_method": "thread"}, "start_method must be spawn, fork or forkserver, not 'thread'"),
        (
            {"on_hang": "panic"},
            "on_hang must be off, report or restart, not 'panic'",
        ),
        ({"hang_after": 0.0}, "hang_after must be more than 0 seconds, not 0.0"),
        (
            {"preload": "torch;numpy"},
            "preload must be 'auto', 'none' or modules separated by commas, not 'torch;numpy'",
        ),
        ({"notice_s": 0}, "notice_s must be more than 0 seconds, not 0"),
        ({"shutdown_timeout": -1}, "shutdown_timeout must be a whole number of seconds, at least 0, not '-1'"),
    ],
)
def test_an_invalid_field_is_rejected_with_this_message(fields, message) -> None:
    """When the config is created, not when the job runs."""
    with pytest.raises(ValueError, match=r".") as error:
        LaunchConfig(**{"min_nodes": 1, "max_nodes": 1, "nproc_per_node": 1, **fields})
    assert str(error.value) == message


def test_a_restart_policy_by_name() -> None:
    """It is loaded where it is written, and an unknown name is refused there."""
    from tenax.policy import BudgetPolicy

    assert isinstance(LaunchConfig(1, 1, 1, restart_policy="budget").restart_policy, BudgetPolicy)
    made = LaunchConfig(1, 1, 1, restart_policy="tenax.policy:BudgetPolicy")
    assert isinstance(made.restart_policy, BudgetPolicy)
    with pytest.raises(ValueError, match="unknown restart policy 'mine'; known: "):
        LaunchConfig(1, 1, 1, restart_policy="mine")
    with pytest.raises(ValueError, match="'budget:3' takes no argument"):
        LaunchConfig(1, 1, 1, restart_policy="budget:3")
    with pytest.raises(ValueError, match="could not load the restart policy 'nowhere:Own'"):
        LaunchConfig(1, 1, 1, restart_policy="nowhere:Own")
    with pytest.raises(ValueError, match="must return an object with a method 'decide'"):
        LaunchConfig(1, 1, 1, restart_policy="builtins:dict")
