"""``tenax start``: its command line and its lists of hosts."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from tenax import __version__
from tenax._core.start import Host
from tenax._schedulers.started import parse_file, parse_list
from tenax.cli.arguments import parse
from tenax.cli.flags import UsageError
from tenax.cli.main import main
from tenax.cli.start import Plan, make_plan, problem_of

HOST_FILE = """\
# the first rack
h[0-1] slots=4
h2:8       # with more

alice@h3
h4 slots = 2 max_slots=4
"""


def plan(*argv: str, environ: dict[str, str] | None = None) -> Plan:
    return make_plan(argv, environ or {}, "/job", {"hosts.txt": HOST_FILE, "empty": "# no\n"}.__getitem__)


def names(hosts: list[Host] | tuple[Host, ...]) -> list[str]:
    return [f"{host.name} {host.slots}" if host.slots else host.name for host in hosts]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("h0", ["h0"]),
        ("h[0-2,7],gpu1", ["h0", "h1", "h2", "h7", "gpu1"]),
        ("h[08-10]:4", ["h08 4", "h09 4", "h10 4"]),
        ("r[1-2]n[1-2].rack", ["r1n1.rack", "r1n2.rack", "r2n1.rack", "r2n2.rack"]),
        ("alice@10.0.0.7, h1", ["alice@10.0.0.7", "h1"]),
    ],
)
def test_lists_of_hosts(text: str, expected: list[str]) -> None:
    assert names(parse_list(text)) == expected


def test_host_files() -> None:
    assert names(parse_file(HOST_FILE)) == ["h0 4", "h1 4", "h2 8", "alice@h3", "h4 2"]
    assert parse_file("# nothing\n\n") == []


@pytest.mark.parametrize("text", ["h[0-", "h[3-1]", "h[a-b]", "h[]", "h 0", "-oProxyCommand=x", "h0:x", "h0:1:2"])
def test_what_is_not_a_host(text: str) -> None:
    with pytest.raises(ValueError, match="is not a host; expected NAME"):
        parse_list(text)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("-- train.py", "no hosts given"),
        ("--hosts h0", "after '--'"),
        ("--hosts h0 train.py", "after '--'"),
        ("--hosts h0 --hostfile f -- train.py", "--hosts and --hostfile cannot be combined"),
        ("--hosts h0,h0 -- train.py", "--hosts: the host h0 is listed twice"),
        ("--hostfile empty -- train.py", "--hostfile: it has no hosts"),
        ("--hosts h0 --via rsh -- train.py", "--via takes ssh or srun, not 'rsh'"),
        ("--hosts h0 --via srun --ssh ssh -- train.py", "cannot be combined"),
        ("--hosts h0 --env WANDB_KEY -- train.py", "the variable WANDB_KEY is not set"),
        ("--hosts h0 --host-restarts x -- train.py", "--host-restarts takes a whole number, at least 0"),
        ("--hosts h0 -- --nproc 4 train.py", "unknown flag '--nproc'"),
        ("--hosts h[0-2] -- --nnodes 4 train.py", "--nnodes 4 needs 4 hosts, but 3 are given"),
        ("--hosts h0 -- --node-rank 1 train.py", "--node-rank 1 is not for several hosts; remove it"),
        ("--discover ./x -- train.py", "--discover needs the number of nodes"),
    ],
)
def test_what_is_refused(line: str, message: str) -> None:
    with pytest.raises(UsageError, match=message.replace("[", r"\[")):
        plan(*line.split())


def test_the_agents_are_tasks_of_one_run() -> None:
    made = plan("--hosts", "h[0-3]:2", "--", "train.py", "--help")
    agent = made.agent(made.hosts[2], 2, "alice@h0")
    assert agent["folder"] == "/job"
    assert agent["argv"][0] == sys.executable
    assert agent["argv"][-3:] == ["run", "train.py", "--help"]
    options = parse(["train.py"], agent["env"])
    assert (options.min_nodes, options.max_nodes, options.nproc_per_node) == (4, 4, 2)
    assert (options.run_id, options.rdzv_endpoint[:3]) == (made.run_id, "h0:")
    assert options.rdzv_configs == {"node_order": "2"}
    assert options.allocation is not None
    assert (options.allocation.leave_code, options.allocation.is_step) == (143, True)
    assert options.notes == ()


def test_flags_of_the_run_override_what_is_derived() -> None:
    made = plan("--hosts", "h[0-3]", "--", "--nnodes", "2:4", "--rdzv-endpoint", "10.0.0.1:1234", "train.py")
    assert (made.settings.min_nodes, made.nodes, made.resolves) == (2, 4, False)
    env = made.agent(made.hosts[0], 0, "h0")["env"]
    options = parse(made.run_flags, env)
    assert (options.min_nodes, options.max_nodes, options.rdzv_endpoint) == (2, 4, "10.0.0.1:1234")


def test_one_host_is_a_run_of_one_node() -> None:
    made = plan("--hosts", "h0", "--", "train.py")
    agent = made.agent(made.hosts[0], 0, "h0")
    assert parse(["train.py"], agent["env"]).max_nodes == 1
    assert "TENAX_RDZV_TOKEN" not in agent["env"]
    assert not made.resolves


def test_within_slurm_the_run_is_that_of_one_step_per_node() -> None:
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_RESTART_COUNT": "2"}
    made = plan("--via", "srun", "--", "train.py", environ=environ)
    assert names(made.hosts) == ["n1", "n2", "n3"]
    assert made.guard("n2")[:7] == ["srun", "--overlap", "--quiet", "-N1", "-n1", "-w", "n2"]
    step = environ | {"SLURM_STEP_ID": "1", "SLURM_GPUS_ON_NODE": "8", "SLURMD_NODENAME": "n2", "HOME": "/home/a"}
    options = parse(["train.py"], step | made.agent(made.hosts[1], 1, "n1")["env"])
    assert options.allocation is not None
    assert (options.max_nodes, options.nproc_per_node, options.allocation.restarts) == (3, 8, 2)
    assert (options.run_id, options.rdzv_endpoint[:3]) == ("7-r2", "n1:")
    assert options.rdzv_configs == {"node_order": "1", "token_file": "/home/a/.config/tenax/cluster-secret"}


def test_the_environment_is_passed_by_name_and_the_secret_is_not_an_argument() -> None:
    environ = {"HOME": "/home/a", "WANDB_KEY": "k", "TENAX_RDZV_TOKEN": "s" * 32}
    made = plan(
        "--hosts", "h[0-1]", "--env", "WANDB_KEY", "--ssh", "ssh -F 'my config'", "--", "train.py", environ=environ
    )
    agent = made.agent(made.hosts[0], 0, "h0")
    assert agent["env"].keys() == {"WANDB_KEY", "TENAX_RDZV_TOKEN", "TENAX_START"}
    command = made.guard("h1")
    assert command[:3] == ["ssh", "-F", "my config"]
    assert command[-3:-1] == ["--", "h1"]
    assert not any(secret in " ".join([*command, *agent["argv"]]) for secret in ("s" * 32, "WANDB"))
    other = plan("--hosts", "h[0-1]", "--", "--rdzv-conf", "token_file=f", "train.py")
    assert "TENAX_RDZV_TOKEN" not in other.env
    assert len(plan("--hosts", "h[0-1]", "--", "train.py").env["TENAX_RDZV_TOKEN"]) == 64


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, ""),
        ({"tenax": "0.0.1"}, f"it has tenax 0.0.1, and this host {__version__}"),
        ({"python": "3.4.0"}, "is Python 3.4.0, and that of this host 3."),
        ({"has_folder": False}, "it has no folder /job"),
        (
            {"unresolved": "h0"},
            "it cannot resolve the host name 'h0' of the endpoint; add '-- --rdzv-endpoint ADDRESS'",
        ),
    ],
)
def test_problems_of_a_host(changes: dict[str, Any], problem: str) -> None:
    python = ".".join(map(str, sys.version_info[:3]))
    found = {"tenax": __version__, "python": python, "has_folder": True, "unresolved": "", "time": 0.0, **changes}
    assert problem in problem_of(found, plan("--hosts", "h0", "--", "train.py"))
    assert bool(problem) == bool(problem_of(found, plan("--hosts", "h0", "--", "train.py")))


def test_the_help_page_is_not_shown_for_a_flag_of_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["start", "--", "train.py", "--help"]) == 2
    assert "no hosts given" in capsys.readouterr().err
    assert main(["start", "--help"]) == 0
