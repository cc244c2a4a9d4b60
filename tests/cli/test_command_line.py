"""The parser of ``tenax run``: spellings, where tenax's flags end, defaults from the environment."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenax.cli.arguments import HelpRequested, parse, read
from tenax.cli.flags import FLAGS, UsageError
from tenax.cli.options import Options
from tenax.numa.binding import AffinityMode, NumaOptions

# Values that each kind of flag accepts, for tests that go through the whole table.
GOOD = {
    "nproc_per_node": "3",
    "nnodes": "1",
    "max_restarts": "2",
    "shutdown_timeout": "7",
    "fatal_exit_codes": "3",
    "fatal_errors": "ValueError",
    "signals_to_handle": "SIGTERM",
    "notice_signals": "SIGUSR1",
    "notice_seconds": "60",
    "monitor_interval": "0.5",
    "start_method": "fork",
    "redirects": "1",
    "tee": "2",
    "local_ranks_filter": "0",
    "numa_binding": "node",
    "master_port": "29501",
    "node_rank": "0",
    "rdzv_conf": "join_timeout=9",
    "rdzv_backend": "c10d",
    "duplicate_stdout_filters": "a,b",
    "duplicate_stderr_filters": "a,b",
    "dashboard": "8080",
    "on_hang": "restart",
    "hang_after": "60",
    "trace": "otel",
}
WITH_VALUE = [flag for flag in FLAGS if flag.kind != "switch"]
SWITCHES = [flag for flag in FLAGS if flag.kind == "switch"]


def good_value(dest: str) -> str:
    return GOOD.get(dest, "text")


@pytest.mark.parametrize("flag", WITH_VALUE, ids=lambda flag: flag.dest)
def test_every_spelling_with_a_value_means_the_same(flag) -> None:
    """Dashes, underscores, the short form, two arguments or one with '='."""
    value = good_value(flag.dest)
    readings = []
    for spelling in flag.spellings:
        readings.append(read([spelling, value, "train.py"], {}))
        readings.append(read([f"{spelling}={value}", "train.py"], {}))
        if not spelling.startswith("--"):
            readings.append(read([spelling + value, "train.py"], {}))
    assert all(reading.values == readings[0].values for reading in readings)
    assert readings[0].values[flag.dest] != flag.default or flag.dest == "node_rank"
    assert all(reading.script == "train.py" for reading in readings)


@pytest.mark.parametrize("flag", SWITCHES, ids=lambda flag: flag.dest)
def test_every_spelling_of_a_switch_sets_it(flag) -> None:
    for spelling in flag.spellings:
        assert read([spelling, "train.py"], {}).values[flag.dest] is True
    assert read(["train.py"], {}).values[flag.dest] is False


@pytest.mark.parametrize("flag", [flag for flag in WITH_VALUE if flag.from_environment], ids=lambda flag: flag.dest)
def test_every_variable_sets_a_default(flag) -> None:
    """The command line overrides it, and an empty variable is ignored."""
    value = good_value(flag.dest)
    from_variable = read(["train.py"], {flag.variable: value})
    written = read([flag.name, value, "train.py"], {})
    assert from_variable.values == written.values
    assert from_variable.sources == {flag.dest: flag.variable}
    both = read([flag.name, value, "train.py"], {flag.variable: "not parsed"})
    assert both.values == written.values
    assert read(["train.py"], {flag.variable: ""}).values[flag.dest] == flag.default


@pytest.mark.parametrize("flag", [flag for flag in SWITCHES if flag.from_environment], ids=lambda flag: flag.dest)
def test_the_variable_of_a_switch_is_a_boolean(flag) -> None:
    """0 and 1, true and false, yes and no, in any case."""
    for text in ("1", "true", "True", "YES"):
        assert read(["train.py"], {flag.variable: text}).values[flag.dest] is True
    for text in ("0", "false", "No", ""):
        assert read(["train.py"], {flag.variable: text}).values[flag.dest] is False


def test_flags_without_a_variable_ignore_the_environment() -> None:
    """--logs-specs and --numa-binding have no PET_ variable in torchrun; flags for a single call have none in tenax."""
    environ = {"PET_LOGS_SPECS": "x", "PET_NUMA_BINDING": "node", "PET_DRY_RUN": "1", "PET_REPORT": "x"}
    assert read(["train.py"], environ).values == read(["train.py"], {}).values


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0"))))
def test_arguments_after_the_script_are_passed_unchanged(script_args) -> None:
    options = parse(["--tee", "3", "train.py", *script_args], {})
    assert options.script == "train.py"
    assert options.script_args == tuple(script_args)
    assert options.tee == 3


LIKE_TENAX_FLAGS = st.sampled_from(
    [spelling for flag in FLAGS for spelling in flag.spellings] + ["--", "-h", "--help", "-", "--tee=9", "--r=16", "-m"]
)


@given(st.lists(LIKE_TENAX_FLAGS))
def test_flags_after_the_script_belong_to_the_script(script_args) -> None:
    """Even if they are named like tenax's flags, '--' or '--help'."""
    for args in (["train.py"], ["-m", "package.train"], ["--", "train.py"], ["--no-python", "program"]):
        options = parse([*args, *script_args], {})
        assert options.script_args == tuple(script_args)
        assert options.tee == 0


def test_an_abbreviated_flag_after_the_script_belongs_to_the_script() -> None:
    """torchrun rejects 'train.py --r=16' as ambiguous."""
    assert parse(["main.py", "--r=16"], {}).script_args == ("--r=16",)
    assert parse(["train.py", "--tee", "3", "--", "--x"], {}).script_args == ("--tee", "3", "--", "--x")


def test_two_dashes_end_the_flags_of_tenax() -> None:
    """Before the script, whose name may then look like a flag."""
    assert parse(["--tee", "3", "--", "train.py", "--", "--x"], {}).script_args == ("--", "--x")
    assert parse(["--", "--odd.py"], {}).script == "--odd.py"


def test_flags_may_be_between_m_and_the_module() -> None:
    options = parse(["-m", "--tee", "3", "package.train", "-m", "--tee", "1"], {})
    assert (options.module, options.script, options.tee) == (True, "package.train", 3)
    assert options.script_args == ("-m", "--tee", "1")


def test_the_last_of_repeated_flags_counts() -> None:
    assert parse(["--max-restarts", "1", "--max_restarts=5", "train.py"], {}).max_restarts == 5


@pytest.mark.parametrize("args", ["--help", "-h", "--tee 3 --help train.py", "--nnodes 7 -h"])
def test_help_is_shown_even_if_other_flags_are_invalid(args) -> None:
    with pytest.raises(HelpRequested):
        parse(args.split(), {"PET_TEE": "nonsense"})


def test_a_script_alone_gets_the_defaults() -> None:
    """One worker, one node, no restarts."""
    assert parse(["train.py"], {}) == Options(
        script="train.py",
        script_args=(),
        preload="auto",
        signals_to_handle="SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        colours=True,
    )


def test_flags_of_every_group_are_parsed() -> None:
    line = (
        "--nproc-per-node=12 --max-restarts 3 --shutdown-timeout 5 --log-dir logs -r 0:1,11:3 -t3 "
        "--local-ranks-filter 0,11 --duplicate-stdout-filters loss,,acc,step --numa-binding core-complex "
        "--virtual-local-rank --role trainer --rdzv-id job7 --report r.json --dry-run train.py"
    )
    options = parse(line.split(), {"PYTHON_EXEC": "/py", "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[${rank}] "})
    assert options == Options(
        script="train.py",
        script_args=(),
        preload="auto",
        python="/py",
        nproc_per_node=12,
        nproc_as_written="12",
        max_restarts=3,
        shutdown_timeout=5,
        signals_to_handle="SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        colours=True,
        log_dir="logs",
        redirects={0: 1, 11: 3},
        tee=3,
        local_ranks_filter=frozenset({0, 11}),
        duplicate_stdout_filters=("loss,acc", "step"),
        log_line_prefix_template="[${rank}] ",
        numa_options=NumaOptions(AffinityMode("core-complex")),
        virtual_local_rank=True,
        role="trainer",
        run_id="job7",
        report="r.json",
        dry_run=True,
    )


def test_options_are_frozen() -> None:
    with pytest.raises(AttributeError):
        parse(["train.py"], {}).max_restarts = 3


def test_only_the_given_environment_is_read(monkeypatch) -> None:
    """Not that of the process."""
    monkeypatch.setenv("PET_MAX_RESTARTS", "9")
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "1")
    assert parse(["train.py"], {}) == parse(["train.py"], {"PATH": ""})


def test_the_number_of_workers_can_be_counted() -> None:
    assert parse(["--nproc-per-node", "cpu", "train.py"], {}).nproc_per_node >= 1
    assert parse(["--nproc-per-node", "007", "train.py"], {}).nproc_per_node == 7
    with pytest.raises(UsageError, match=r"^--nproc-per-node"):
        parse(["--nproc-per-node", "gpu", "train.py"], {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""})


def test_the_shutdown_timeout_has_a_second_variable() -> None:
    """--shutdown-timeout, then PET_SHUTDOWN_TIMEOUT, then TORCH_ELASTIC_SHUTDOWN_TIMEOUT, then 30."""
    environ = {"PET_SHUTDOWN_TIMEOUT": "2", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "3"}
    assert parse(["--shutdown-timeout", "1", "x"], environ).shutdown_timeout == 1
    assert parse(["x"], environ).shutdown_timeout == 2
    del environ["PET_SHUTDOWN_TIMEOUT"]
    assert parse(["x"], environ).shutdown_timeout == 3
    assert parse(["x"], {}).shutdown_timeout == 30
