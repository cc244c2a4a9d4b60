"""The script is found before anything starts, and becomes the command of each worker."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tenax.cli.arguments import parse
from tenax.cli.flags import UsageError
from tenax.cli.script import check_script, entrypoint_of, run_script_path


def check(args: list[str], cwd: object, environ: dict[str, str] | None = None) -> None:
    environ = {"PATH": "/usr/bin:/bin"} if environ is None else environ
    check_script(parse(args, environ), str(cwd), environ)


def error_of(args: list[str], cwd: object, environ: dict[str, str] | None = None) -> str:
    with pytest.raises(UsageError) as error:
        check(args, cwd, environ)
    return str(error.value)


def test_the_command_of_a_worker() -> None:
    """A script and a module run unbuffered in tenax's interpreter, a program directly, --run-path in a function."""
    assert entrypoint_of(parse(["train.py", "-x"], {}), "/py") == ("/py", ["-u", "train.py", "-x"])
    assert entrypoint_of(parse(["-m", "pkg.train", "-x"], {}), "/py") == ("/py", ["-u", "-m", "pkg.train", "-x"])
    assert entrypoint_of(parse(["--no-python", "prog", "-x"], {}), "/py") == ("prog", ["-x"])
    assert entrypoint_of(parse(["--run-path", "train.py", "-x"], {}), "/py") == (run_script_path, ["train.py", "-x"])
    assert entrypoint_of(parse(["train.py"], {"PYTHON_EXEC": "/other"}), "/py") == ("/other", ["-u", "train.py"])


def test_existing_scripts_are_accepted(tmp_path) -> None:
    """A file, a folder with a __main__.py, an absolute path; a module is not searched."""
    (tmp_path / "train.py").touch()
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__main__.py").touch()
    check(["train.py"], tmp_path)
    check(["./train.py"], tmp_path)
    check([str(tmp_path / "train.py")], "/")
    check(["app"], tmp_path)
    check(["--run-path", "train.py"], tmp_path)
    check(["-m", "no.such.module"], tmp_path)


def test_a_missing_script_is_rejected_with_a_suggestion(tmp_path) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "eval.py").touch()
    os.mkfifo(tmp_path / "pipe")
    assert error_of(["trian.py"], tmp_path) == f"no file 'trian.py' in {tmp_path}; did you mean 'train.py'?"
    assert error_of(["sub/evl.py"], tmp_path) == f"no file 'evl.py' in {tmp_path}/sub; did you mean 'sub/eval.py'?"
    assert error_of(["x/y.py"], tmp_path) == f"no file 'x/y.py': no folder '{tmp_path}/x'; check the path"
    assert error_of(["pkg.run"], tmp_path) == (
        f"no file 'pkg.run' in {tmp_path}; write '-m pkg.run' for a module, or '--no-python pkg.run' for a program"
    )
    assert error_of(["4"], tmp_path) == f"no file '4' in {tmp_path}; check the path"
    assert error_of(["sub"], tmp_path) == "'sub' is a folder without a __main__.py"
    assert error_of(["pipe"], tmp_path) == "'pipe' is not a regular file; save the script in a file"
    assert error_of(["--run-path", "trian.py"], tmp_path).endswith("did you mean 'train.py'?")


def test_a_missing_or_not_executable_program_is_rejected(tmp_path) -> None:
    """A name is searched on the workers' PATH."""
    program = tmp_path / "prog"
    program.write_text("#!/bin/sh\n")
    check(["--no-python", "sh"], tmp_path)
    assert error_of(["--no-python", "prog"], tmp_path) == (
        "--no-python prog: no such program on PATH; for the file in this folder write './prog'"
    )
    assert error_of(["--no-python", "./prog"], tmp_path) == (
        "--no-python ./prog: the file is not executable; run 'chmod +x ./prog'"
    )
    assert error_of(["--no-python", "./gone"], tmp_path) == "--no-python ./gone: no such file"
    program.chmod(0o755)
    check(["--no-python", "./prog"], tmp_path)
    check(["--no-python", "prog"], "/", {"PATH": str(tmp_path)})
    (tmp_path / "train.py").touch()
    assert error_of(["train.py"], tmp_path, {"PATH": "/bin", "PYTHON_EXEC": "python99"}) == (
        "PYTHON_EXEC=python99: no such program on PATH"
    )


@pytest.mark.process
def test_run_script_path_runs_a_script_like_the_interpreter(tmp_path) -> None:
    """With its name, its arguments and the modules of its folder."""
    (tmp_path / "helper.py").write_text("text = 'helped'\n")
    (tmp_path / "train.py").write_text("import sys, helper; print(__name__, sys.argv, helper.text)\n")
    code = "import sys; from tenax.cli.script import run_script_path; run_script_path(*sys.argv[1:])"
    script = str(tmp_path / "train.py")
    done = subprocess.run(
        [sys.executable, "-c", code, script, "--x", "1"], capture_output=True, text=True, cwd="/", check=True
    )
    assert done.stdout == f"__main__ {[script, '--x', '1']} helped\n"
