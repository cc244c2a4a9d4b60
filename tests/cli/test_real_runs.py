"""The command line down to real workers: each way to start a script, its arguments as they were written, and several
nodes, each an agent of its own on this host."""

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

NASTY = ["", " ", "--", "--tee", "3", "-m", "$$", "${HOME}", "%s", "a\nb", "ü", "'quoted'", "*", "--r=16", "-"]
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


def tenax_run(words: list[str], cwd, code: str = "") -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PET_")}
    environ = {**clean, "SEEN": str(cwd / "seen"), "TMPDIR": str(cwd)}
    how = ["-c", code] if code else ["-m", "tenax", "run"]
    return subprocess.run(
        [sys.executable, *how, *words], cwd=str(cwd), env=environ, capture_output=True, text=True, timeout=60
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
def test_every_worker_gets_the_words_as_they_were_written(way, project) -> None:
    """Whichever way a script is started, its arguments arrive untouched, in all workers."""
    done = tenax_run(["--nproc-per-node", "2", *way, *NASTY], project)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        seen = json.loads((project / f"seen{rank}").read_text())
        assert (seen["argv"], seen["world"]) == (NASTY, "2")
        if way[0] != "-m":
            assert seen["path0"] == str(project)


def test_the_first_failures_exit_code_comes_back(project) -> None:
    """A worker's own exit code is the program's, and there is no stack trace of ours."""
    (project / "fail.py").write_text("import sys; sys.exit(43)\n")
    done = tenax_run(["fail.py"], project)
    assert done.returncode == 43
    assert "tenax/cli" not in done.stderr


def test_main_as_a_function(project) -> None:
    """tenax.run.main returns None for a job that succeeds and raises ChildFailedError for one that fails."""
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

TELL_RANKS = """
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
def place() -> str:
    return own_endpoint()


@contextmanager
def agents(lines: list[list[str]], cwd, **environ: str) -> Iterator[list[subprocess.Popen[str]]]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PET_", "TENAX_"))}
    environ = {**clean, "SEEN": str(cwd / "seen"), "TMPDIR": str(cwd), **environ}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tenax", "run", *words],
            cwd=str(cwd),
            env=environ,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for words in lines
    ]
    try:
        yield started
    finally:
        for agent in started:
            agent.kill()
            agent.communicate(timeout=60)


def ends(started: list[subprocess.Popen[str]]) -> tuple[list[int], list[str]]:
    """Exit codes, and what was said on stderr."""
    said = [agent.communicate(timeout=60)[1] for agent in started]
    return [agent.returncode for agent in started], said


def test_torchruns_line_for_two_nodes(project, place) -> None:
    """Each node has the rank that it was given, whoever came first; global ranks follow, also of uneven nodes."""
    (project / "train.py").write_text(TELL_RANKS)
    host, _, port = place.partition(":")
    meet = ["--nnodes=2", "--master-addr", host, "--master-port", port]
    lines = [
        ["--nproc-per-node=2", *meet, "--node-rank=1", "train.py"],
        ["--nproc-per-node=1", *meet, "--node-rank=0", "train.py"],
    ]
    with agents(lines, project) as started:
        codes, said = ends(started)
    assert codes == [0, 0], said
    seen = [json.loads((project / f"seen{rank}").read_text()) for rank in range(3)]
    assert [(each["GROUP_RANK"], each["LOCAL_RANK"]) for each in seen] == [("0", "0"), ("1", "0"), ("1", "1")]
    assert {(each["WORLD_SIZE"], each["GROUP_WORLD_SIZE"]) for each in seen} == {("3", "2")}
    assert {each["TORCHELASTIC_RUN_ID"] for each in seen} == {"none"}
    assert len({each["MASTER_PORT"] for each in seen}) == 1
    # Said once, by the agent that serves: it is the one to whom others would come.
    assert sum(text.count("a loopback address, so only agents on this host can join") for text in said) == 1


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
    words = ["--restart-policy", "my_policies:Twice", "train.py"]
    done = tenax_run(["run", *words] if code else words, project, code)
    assert done.returncode == 3
    assert "generation 2 (once more)" in done.stderr
    assert "exit code 3 twice within an hour" in done.stderr


def test_what_is_fatal_ends_the_job_on_every_node(project, place) -> None:
    """One worker's exit code decides for all: no restart, although three are left, and the same end everywhere."""
    (project / "secret").write_text("a secret of tests")
    (project / "secret").chmod(0o600)
    (project / "train.py").write_text(
        "import os, signal\nif os.environ['RANK'] == '1':\n    os._exit(64)\nsignal.pause()\n"
    )
    words = ["--nnodes=2:3", "--rdzv-endpoint", place, "--rdzv-conf=token_file=secret,last_call_timeout=0"]
    line = [*words, "--max-restarts=3", "--fatal-exit-codes=3,64", "train.py"]
    with agents([line, line], project) as started:
        codes, said = ends(started)
    assert codes == [64, 64], said
    assert all("exit code 64 is marked as fatal (--fatal-exit-codes)" in text for text in said)
    assert not any("generation 2" in text for text in said)


def test_a_notice_to_one_node_reaches_the_workers_of_all(project, place) -> None:
    """A scheduler's signal to one agent stops nobody; the workers of both nodes can ask for it and end as they like."""
    (project / "train.py").write_text(WAIT_FOR_NOTICE)
    line = ["--nnodes=2", "--rdzv-endpoint", place, "--notice-signals=SIGUSR1", "--notice-seconds=600", "train.py"]
    with agents([line, line], project) as started:
        for rank in range(2):
            until((project / f"seen{rank}").exists, f"the worker with rank {rank}")
        os.kill(started[0].pid, signal.SIGUSR1)
        codes, said = ends(started)
    assert codes == [0, 0], said
    seen = sorted((project / f"seen{rank}").read_text() for rank in range(2))
    assert seen == ["False got SIGUSR1 True", "True got SIGUSR1 True"]
    assert "this node is going to leave in 600 s: got SIGUSR1" in said[0]
