"""``tenax.run`` and ``tenax.argparse_util``: torchrun's names for launchers written in Python."""

from __future__ import annotations

import argparse
import os
import sys

import pytest

import tenax.run as torchrun
from tenax._logs.specs import Std
from tenax.argparse_util import check_env, env


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch) -> None:
    for name in list(os.environ):
        if name.startswith(("PET_", "TORCHELASTIC_")) or name in ("PYTHON_EXEC", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"):
            monkeypatch.delenv(name)


def test_parse_args_gives_torchruns_namespace() -> None:
    """With raw values; the script's arguments are unchanged."""
    args = torchrun.parse_args(["--nproc_per_node=2", "-t", "3", "--standalone", "train.py", "--", "--tee", "1"])
    assert (args.nproc_per_node, args.tee, args.standalone) == ("2", "3", True)
    assert (args.training_script, args.training_script_args) == ("train.py", ["--", "--tee", "1"])
    assert (args.nnodes, args.duplicate_stdout_filters, args.master_port) == ("1:1", [], None)


def test_parse_args_exits_with_a_message(capsys) -> None:
    """As argparse does: with code 2, or 0 for --help."""
    with pytest.raises(SystemExit) as end:
        torchrun.parse_args(["--nproc", "2", "train.py"])
    assert end.value.code == 2
    assert capsys.readouterr().err.splitlines() == [
        "tenax run: unknown flag '--nproc' (flags cannot be abbreviated); did you mean '--nproc-per-node'?",
        "try: tenax run --help",
    ]
    with pytest.raises(SystemExit) as end:
        torchrun.parse_args(["--help"])
    assert end.value.code == 0
    assert "usage: tenax run" in capsys.readouterr().out


def test_config_from_args_returns_config_command_and_arguments() -> None:
    line = "--nproc-per-node 2 --max-restarts 1 -r 1 -t 0:3 --local-ranks-filter 1 --rdzv-id j --master-port 3 t.py -x"
    config, command, args = torchrun.config_from_args(torchrun.parse_args(line.split()))
    assert (command, args) == (sys.executable, ["-u", "t.py", "-x"])
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (1, 1, 2)
    assert (config.max_restarts, config.run_id, config.role) == (1, "j", "default")
    assert (config.rdzv_backend, config.rdzv_endpoint) == ("static", "127.0.0.1:3")
    assert config.rdzv_configs == {"rank": 0, "timeout": 900}
    assert config.shutdown_timeout == 30
    specs = config.logs_specs
    assert (specs._redirects, specs._tee, specs._local_ranks_filter) == (Std.OUT, {0: Std.ALL}, {1})


def test_config_from_args_accepts_the_namespace_of_an_extended_parser() -> None:
    parser = torchrun.get_args_parser()
    parser.add_argument("--queue")
    args = parser.parse_args(["--queue", "short", "--numa-binding=node", "--run-path", "train.py", "-x"])
    config, function, arguments = torchrun.config_from_args(args)
    assert args.queue == "short"
    assert config.numa_options.affinity_mode.value == "node"
    assert (function, arguments) == (torchrun.run_script_path, ["train.py", "-x"])


def test_config_from_args_raises_value_error() -> None:
    """It does not exit the program."""
    with pytest.raises(ValueError, match="--nnodes 2 needs an endpoint"):
        torchrun.config_from_args(torchrun.parse_args(["--nnodes=2", "t.py"]))


@pytest.mark.parametrize(("rank", "expected"), [("1", {"rank": 1}), ("0", {})])
def test_config_from_args_takes_node_rank_0_for_no_rank(rank, expected) -> None:
    """A namespace cannot distinguish rank 0 from the default; that node gets the rank that is left."""
    line = ["--nnodes=2", "--master-addr=h0", "--node-rank", rank, "--max-restarts=1", "--fatal-exit-codes=3", "t.py"]
    config, _, _ = torchrun.config_from_args(torchrun.parse_args(line))
    assert (config.min_nodes, config.max_nodes, config.run_id, config.rdzv_endpoint) == (2, 2, "none", "h0:29500")
    assert config.rdzv_configs == {**expected, "timeout": 900}
    assert config.restart_policy is not None


def test_use_env_false_passes_the_local_rank_as_an_argument() -> None:
    """Before the script's own arguments, as very old launchers did."""
    args = torchrun.parse_args(["t.py", "-x"])
    assert torchrun.get_use_env(args) is True
    args.use_env = False
    assert torchrun.get_use_env(args) is False
    assert torchrun.config_from_args(args)[2] == ["-u", "t.py", "--local-rank=${local_rank}", "-x"]
    args.no_python = True
    with pytest.raises(ValueError, match="--no-python needs --use-env"):
        torchrun.config_from_args(args)


def test_helper_functions(monkeypatch) -> None:
    """Numbers of nodes and workers, and the endpoint."""
    assert torchrun.parse_min_max_nnodes("2") == (2, 2)
    assert torchrun.parse_min_max_nnodes("1:4") == (1, 4)
    with pytest.raises(RuntimeError, match="must be N or MIN:MAX, not '1:2:3'"):
        torchrun.parse_min_max_nnodes("1:2:3")
    with pytest.raises(ValueError, match="in whole numbers, not 'many'"):
        torchrun.parse_min_max_nnodes("many")
    assert torchrun.determine_local_world_size("3") == 3
    assert torchrun.determine_local_world_size("cpu") >= 1
    args = torchrun.parse_args(["t.py"])
    assert torchrun.get_rdzv_endpoint(args) == "127.0.0.1:29500"
    args.master_port = 7
    assert torchrun.get_rdzv_endpoint(args) == "127.0.0.1:7"
    args.rdzv_endpoint = "h:1"
    assert torchrun.get_rdzv_endpoint(args) == "h:1"


def test_main_raises_value_error_before_the_start(tmp_path, monkeypatch) -> None:
    """As torch does, with the message of the command line."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.py").touch()
    for args, message in (
        (["gone.py"], "no file 'gone.py'"),
        (["--node-rank=1", "t.py"], "--node-rank 1 is out of range"),
        (["--report=r.json", "t.py"], "catch ChildFailedError"),
        (["--shutdown-timeout=-1", "t.py"], "--shutdown-timeout takes"),
    ):
        with pytest.raises(ValueError, match=message):
            torchrun.main(args)


def test_main_prints_the_dry_run(capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.py").touch()
    assert torchrun.main(["--dry-run", "t.py"]) is None
    assert capsys.readouterr().out.startswith("Dry run, nothing is started.")


def test_argparse_actions_read_defaults_from_the_environment(monkeypatch) -> None:
    """env takes a default from PET_<DEST>, check_env a boolean; the command line overrides them."""
    monkeypatch.setenv("PET_NAME", "from-environment")
    monkeypatch.setenv("PET_FAST", "yes")
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", action=env, required=True, type=str)
    parser.add_argument("--other", action=env, default="x", type=str)
    parser.add_argument("--fast", action=check_env)
    parser.add_argument("--slow", action=check_env)
    assert vars(parser.parse_args([])) == {"name": "from-environment", "other": "x", "fast": True, "slow": False}
    assert vars(parser.parse_args(["--name", "typed", "--slow"]))["name"] == "typed"
    monkeypatch.setenv("PET_FAST", "maybe")
    with pytest.raises(ValueError, match="PET_FAST takes 0, 1, true, false, yes or no, not 'maybe'"):
        argparse.ArgumentParser().add_argument("--fast", action=check_env)
    monkeypatch.delenv("PET_NAME")
    parser = argparse.ArgumentParser(exit_on_error=False)
    action = parser.add_argument("--name", action=env, required=True)
    assert action.required
