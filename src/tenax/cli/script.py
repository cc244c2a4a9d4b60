"""The workers' script: turns ``Options`` into an entrypoint and its arguments, and checks that it can be started.

A missing script or program is rejected before N workers all fail on it. A *module* is not checked: only the workers'
interpreter can find it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping

from tenax.cli.flags import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tenax.cli.options import Options


Entrypoint = str | Callable[..., None]
LOCAL_RANK_ARGUMENT = "--local-rank=${local_rank}"  # replaced when each worker is started


def entrypoint_of(options: Options, interpreter: str) -> tuple[Entrypoint, list[str]]:
    """Return what each worker runs and its arguments. ``interpreter`` is the Python that runs tenax."""
    own = [*([LOCAL_RANK_ARGUMENT] if options.local_rank_argument else []), *options.script_args]
    if options.run_path:
        return run_script_path, [options.script, *own]
    if options.no_python:
        return options.script, own
    return options.python or interpreter, ["-u", *(["-m"] if options.module else []), options.script, *own]


def check_script(options: Options, cwd: str, environ: Mapping[str, str]) -> None:
    path = environ.get("PATH", os.defpath)
    if options.no_python:
        _check_program(options.script, cwd, path, f"--no-python {options.script}")
        return
    if options.python and not options.run_path:
        _check_program(options.python, cwd, path, f"PYTHON_EXEC={options.python}")
    if not options.module:
        _check_file(options.script, cwd)


def _check_file(script: str, cwd: str) -> None:
    path = os.path.join(cwd, script)
    if os.path.isfile(path) or os.path.isfile(os.path.join(path, "__main__.py")):
        return
    if os.path.isdir(path):
        raise UsageError(f"{script!r} is a folder without a __main__.py")
    folder, name = os.path.split(path)
    if os.path.exists(path):
        raise UsageError(f"{script!r} is not a regular file; save the script in a file")
    if not os.path.isdir(folder):
        raise UsageError(f"no file {script!r}: no folder {folder!r}; check the path")
    raise UsageError(f"no file {name!r} in {os.path.normpath(folder)}; {_advice(script, name, folder)}")


def _advice(script: str, name: str, folder: str) -> str:
    """Suggest what the user may have meant by a script that does not exist."""
    import difflib

    near = difflib.get_close_matches(name, [entry for entry in os.listdir(folder) if entry.endswith(".py")], n=1)
    if near:
        return f"did you mean {os.path.join(os.path.dirname(script), near[0])!r}?"
    if script.replace(".", "").isidentifier() and not script.endswith(".py"):
        return f"write '-m {script}' for a module, or '--no-python {script}' for a program"
    return "check the path"


def _check_program(program: str, cwd: str, path: str, as_written: str) -> None:
    if os.sep in program:
        file = os.path.join(cwd, program)
        if not os.path.isfile(file):
            raise UsageError(f"{as_written}: no such file")
        if not os.access(file, os.X_OK):
            raise UsageError(f"{as_written}: the file is not executable; run 'chmod +x {program}'")
        return
    found = (os.path.join(cwd, folder, program) for folder in path.split(os.pathsep))
    if not any(os.path.isfile(file) and os.access(file, os.X_OK) for file in found):
        is_here = os.path.isfile(os.path.join(cwd, program))
        advice = f"; for the file in this folder write './{program}'" if is_here else ""
        raise UsageError(f"{as_written}: no such program on PATH{advice}")


def run_script_path(training_script: str, *training_script_args: str) -> None:
    """Run a script in this process as ``python SCRIPT`` does: as ``__main__``, with its folder first on the path.

    The entrypoint of ``--run-path``, for workers that ``multiprocessing`` starts.
    """
    import runpy

    sys.argv = [training_script, *training_script_args]
    sys.path.insert(0, os.path.dirname(os.path.abspath(training_script)))
    runpy.run_path(training_script, run_name="__main__")
