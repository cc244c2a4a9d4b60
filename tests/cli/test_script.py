"""The script is found before anything starts, and becomes the command of each worker."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tenax.cli.arguments import parse
from tenax.cli.flags import UsageError
from tenax.cli.script import check_script, entrypoint_of, run_script_path


def check(words: list[str], cwd: object, environ: dict[str, str] | None = None) -> None:
    environ = {"PATH": "/usr/bin:/bin"} if environ is None else environ
    check_script(parse(words, environ), str(cwd), environ)


def refusal(words: list[str], cwd: object, environ: dict[str, str] | None = None) -> str:
    with pytest.raises(UsageError) as error:
        check(words, cwd, environ)
    return str(error.value)


def test_commands() -> None:
    """A script runs unbuffered in our interpreter, a module behind -m, a program by itself, --run-path a function."""
    assert entrypoint_of(parse(["train.py", "-x"], {}), "/py") == ("/py", ["-u", "train.py", "-x"])
    assert entrypoint_of(parse(["-m", "pkg.train", "-x"], {}), "/py") == ("/py", ["-u", "-m", "pkg.train", "-x"])
    assert entrypoint_of(parse(["--no-python", "prog", "-x"], {}), "/py") == ("prog", ["-x"])
    assert entrypoint_of(parse(["--run-path", "train.py", "-x"], {}), "/py") == (run_script_path, ["train.py", "-x"])
    assert entrypoint_of(parse(["train.py"], {"PYTHON_EXEC": "/other"}), "/py") == ("/other", ["-u", "train.py"])


def test_scripts_that_are_there(tmp_path) -> None:
    """A file, a folder with a __main__.py, an absolute path; a module is not looked for."""
    (tmp_path / "train.py").touch()
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__main__.py").touch()
    check(["train.py"], tmp_path)
    check(["./train.py"], tmp_path)
    check([str(tmp_path / "train.py")], "/")
    check(["app"], tmp_path)
    check(["--run-path", "train.py"], tmp_path)
    check(["-m", "no.such.module"], tmp_path)


def test_scripts_that_are_not_there(tmp_path) -> None:
    """One sentence, with what was probably meant."""
    (tmp_path / "train.py").touch()
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "eval.py").touch()
    os.mkfifo(tmp_path / "pipe")
    assert refusal(["trian.py"], tmp_path) == f"there is no file 'trian.py' in {tmp_path}; did you mean 'train.py'?"
    assert (
        refusal(["sub/evl.py"], tmp_path) == f"there is no file 'evl.py' in {tmp_path}/sub; did you mean 'sub/eval.py'?"
    )
    assert refusal(["x/y.py"], tmp_path) == f"there is no file 'x/y.py', nor a folder '{tmp_path}/x'; check the path"
    assert refusal(["pkg.run"], tmp_path) == (
        f"there is no file 'pkg.run' in {tmp_path}; if it is a module, write '-m pkg.run', "
        "and '--no-python pkg.run' if it is a program"
    )
    assert refusal(["4"], tmp_path) == f"there is no file '4' in {tmp_path}; check the path, or change the folder"
    assert refusal(["sub"], tmp_path) == "'sub' is a folder without a __main__.py, so there is nothing to run in it"
    assert (
        refusal(["pipe"], tmp_path) == "'pipe' is not a file that several workers can read; save the script in a file"
    )
    assert refusal(["--run-path", "trian.py"], tmp_path).endswith("did you mean 'train.py'?")


def test_programs(tmp_path) -> None:
    """A program is looked for on the path that the workers get, or where its own path says."""
    program = tmp_path / "prog"
    program.write_text("#!/bin/sh\n")
    check(["--no-python", "sh"], tmp_path)
    assert refusal(["--no-python", "prog"], tmp_path) == (
        "--no-python prog: there is no such program on PATH; for the file in this folder write './prog'"
    )
    assert refusal(["--no-python", "./prog"], tmp_path) == (
        "--no-python ./prog: the file is not executable; allow it with 'chmod +x ./prog'"
    )
    assert refusal(["--no-python", "./gone"], tmp_path) == "--no-python ./gone: there is no such file"
    program.chmod(0o755)
    check(["--no-python", "./prog"], tmp_path)
    check(["--no-python", "prog"], "/", {"PATH": str(tmp_path)})
    (tmp_path / "train.py").touch()
    assert refusal(["train.py"], tmp_path, {"PATH": "/bin", "PYTHON_EXEC": "python99"}) == (
        "PYTHON_EXEC=python99: there is no such program on PATH"
    )


@pytest.mark.process
def test_run_script_path_is_like_the_interpreter(tmp_path) -> None:
    """--run-path's function gives the script its name, its arguments and its folder's modules."""
    (tmp_path / "helper.py").write_text("word = 'helped'\n")
    (tmp_path / "train.py").write_text("import sys, helper; print(__name__, sys.argv, helper.word)\n")
    code = "import sys; from tenax.cli.script import run_script_path; run_script_path(*sys.argv[1:])"
    script = str(tmp_path / "train.py")
    done = subprocess.run(
        [sys.executable, "-c", code, script, "--x", "1"], capture_output=True, text=True, cwd="/", check=True
    )
    assert done.stdout == f"__main__ {[script, '--x', '1']} helped\n"
