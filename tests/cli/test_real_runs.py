"""Command lines with real workers: each way to start a script, its arguments, and several nodes, each with an agent on
this host."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kit.addresses import own_endpoint
from kit.processes import until

pytestmark = pytest.mark.process

UNUSUAL = ["", " ", "--", "--tee", "3", "-m", "$$", "${HOME}", "%s", "a\nb", "ü", "'quoted'", "*", "--r=16", "-"]
SCRIPT = """
import json, os, sys
with open(os.environ["SEEN"] + os.environ["RANK"], "w") as file:
    json.dump({"argv": sys.argv[1:], "world": os.environ["WORLD_SIZE"], "path0": sys.path[0]}, file)
"""


@pytest.fixture
def project(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "train.py").write_text(SCRIPT)
    program = tmp_path / "program"
    program.write_text(f"#!{sys.executable}\n{SCRIPT}")
    program.chmod(0o755)
    return tmp_path


def tenax_run(args: list[str], cwd, code: str = "") -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PET_")}
    environ = {**clean, "SEEN": str(cwd / "seen"), "TMPDIR": str(cwd)}
    how = ["-c", code] if code else ["-m", "tenax", "run"]
    return subprocess.run(
        [sys.executable, *how, *args], cwd=str(cwd), env=environ, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(
    "way",
    [
        ["train.py"],
        ["--", "train.py"],
        ["-m", "package.train"],
        ["--no-python", "./program"],
        ["--run-path", "train.py"],
        ["--run-path", "--start-method=fork", "train.py"],
    ],
    ids=" ".join,
)
def test_every_worker_gets_the_arguments_unchanged(way, project) -> None:
    done = tenax_run(["--nproc-per-node", "2", *way, *UNUSUAL], project)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        seen = json.loads((project / f"seen{rank}").read_text())
        assert (seen["argv"], seen["world"]) == (UNUSUAL, "2")
        if way[0] != "-m":
            assert seen["path0"] == str(project)


def test_the_exit_code_is_that_of_the_first_failure(project) -> None:
    """And tenax prints no stack trace of its own."""
    (project / "fail.py").write_text("import sys; sys.exit(43)\n")
    done = tenax_run(["fail.py"], project)
    assert done.returncode == 43
    assert "tenax/cli" not in done.stderr


def test_main_returns_none_or_raises_child_failed_error(project) -> None:
    (project / "fail.py").write_text("import sys; sys.exit(43)\n")
    code = """
import sys
from tenax.multiprocessing.errors import ChildFailedError
from tenax.run import main
assert main(["train.py", "x"]) is None
try:
    main(["--nproc-per-node=2", "fail.py"])
except ChildFailedError as error:
    print(error.name, error.get_first_failure()[1].exitcode)
"""
    done = tenax_run([], project, code)
    assert done.stdout == "fail.py 43\n", done.stderr
    assert json.loads((project / "seen0").read_text())["argv"] == ["x"]


# --- several nodes ----------------------------------------------------------------------------------------------------

WRITE_RANKS = """
import json, os
names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "GROUP_WORLD_SIZE", "TORCHELASTIC_RUN_ID", "MASTER_PORT")
with open(os.environ["SEEN"] + os.environ["RANK"], "w") as file:
    json.dump({name: os.environ[name] for name in names}, file)
"""
WAIT_FOR_NOTICE = """
import os, select
from tenax import preemption
seen = os.environ["SEEN"] + os.environ["RANK"]
open(seen, "w").close()
while not (notice := preemption.notice()):
    select.select([], [], [], 0.01)
with open(seen, "w") as file:
    file.write(f"{notice.is_this_host} {notice.why} {notice.seconds_left > 0}")
"""


@pytest.fixture
def endpoint() -> str:
    return own_endpoint()


@contextmanager
def agents(lines: list[list[str]], cwd, **environ: str) -> Iterator[list[subprocess.Popen[str]]]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PET_", "TENAX_"))}
    environ = {**clean, "SEEN": str(cwd / "seen"), "TMPDIR": str(cwd), **environ}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tenax", "run", *args],
            cwd=str(cwd),
            env=environ,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for args in lines
    ]
    try:
        yield started
    finally:
        for agent in started:
            agent.kill()
            agent.communicate(timeout=60)


def wait(started: list[subprocess.Popen[str]]) -> tuple[list[int], list[str]]:
    """Return the exit codes and the texts on stderr."""
    stderrs = [agent.communicate(timeout=60)[1] for agent in started]
    return [agent.returncode for agent in started], stderrs


def test_two_nodes_get_the_ranks_of_torchruns_flags(project, endpoint) -> None:
    """In any order of joining. Global ranks follow, also if nodes have different numbers of workers."""
    (project / "train.py").write_text(WRITE_RANKS)
    host, _, port = endpoint.partition(":")
    rendezvous = ["--nnodes=2", "--master-addr", host, "--master-port", port]
    lines = [
        ["--nproc-per-node=2", *rendezvous, "--node-rank=1", "train.py"],
        ["--nproc-per-node=1", *rendezvous, "--node-rank=0", "train.py"],
    ]
    with agents(lines, project) as started:
        codes, stderrs = wait(started)
    assert codes == [0, 0], stderrs
    seen = [json.loads((project / f"seen{rank}").read_text()) for rank in range(3)]
    assert [(each["GROUP_RANK"], each["LOCAL_RANK"]) for each in seen] == [("0", "0"), ("1", "0"), ("1", "1")]
    assert {(each["WORLD_SIZE"], each["GROUP_WORLD_SIZE"]) for each in seen} == {("3", "2")}
    assert {each["TORCHELASTIC_RUN_ID"] for each in seen} == {"none"}
    assert len({each["MASTER_PORT"] for each in seen}) == 1
    # Printed once, by the agent that serves the endpoint.
    assert sum(text.count("; only agents on this host can join") for text in stderrs) == 1


POLICY = """
from tenax.policy import BudgetPolicy, GiveUp, Restart

class Twice(BudgetPolicy):
    def decide(self, failure, history):
        if history.earlier and failure.seen_at - history.earlier[0].seen_at < 3600:
            return GiveUp(f"exit code {failure.exit_code} twice within an hour")
        return Restart("once more")
"""


@pytest.mark.parametrize("code", ["", "import sys; sys.path.pop(0); from tenax.cli.main import main; sys.exit(main())"])
def test_a_restart_policy_by_name(project, code: str) -> None:
    """MODULE:CLASS of the current folder decides, also where that folder is not on the path."""
    (project / "train.py").write_text("import sys; sys.exit(3)")
    (project / "my_policies.py").write_text(POLICY)
    args = ["--restart-policy", "my_policies:Twice", "train.py"]
    done = tenax_run(["run", *args] if code else args, project, code)
    assert done.returncode == 3
    assert "generation 2 (once more)" in done.stderr
    assert "exit code 3 twice within an hour" in done.stderr


def test_a_fatal_exit_code_ends_the_job_on_every_node(project, endpoint) -> None:
    """Without a restart, although three are left."""
    (project / "secret").write_text("a secret of tests")
    (project / "secret").chmod(0o600)
    (project / "train.py").write_text(
        "import os, signal\nif os.environ['RANK'] == '1':\n    os._exit(64)\nsignal.pause()\n"
    )
    args = ["--nnodes=2:3", "--rdzv-endpoint", endpoint, "--rdzv-conf=token_file=secret,last_call_timeout=0"]
    line = [*args, "--max-restarts=3", "--fatal-exit-codes=3,64", "train.py"]
    with agents([line, line], project) as started:
        codes, stderrs = wait(started)
    assert codes == [64, 64], stderrs
    assert all("exit code 64 is marked as fatal (--fatal-exit-codes)" in text for text in stderrs)
    assert not any("generation 2" in text for text in stderrs)


def test_a_notice_to_one_node_reaches_the_workers_of_all_nodes(project, endpoint) -> None:
    """The signal stops no worker; workers of both nodes can read the notice."""
    (project / "train.py").write_text(WAIT_FOR_NOTICE)
    line = ["--nnodes=2", "--rdzv-endpoint", endpoint, "--notice-signals=SIGUSR1", "--notice-seconds=600", "train.py"]
    with agents([line, line], project) as started:
        for rank in range(2):
            until((project / f"seen{rank}").exists, f"the worker with rank {rank}")
        os.kill(started[0].pid, signal.SIGUSR1)
        codes, stderrs = wait(started)
    assert codes == [0, 0], stderrs
    seen = sorted((project / f"seen{rank}").read_text() for rank in range(2))
    assert seen == ["False its agent received SIGUSR1 True", "True its agent received SIGUSR1 True"]
    assert "this node is leaving (up to 10 min): its agent received SIGUSR1" in stderrs[0]
