"""The command line down to real workers: each way to start a script, and its arguments as they were written."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

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
