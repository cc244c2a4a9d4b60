"""The template, the process from which warm workers are forked: how it is started, and its messages to the user.

This is the agent's side. ``warm_pool.py`` is the keeper's; ``warm/`` runs in the template and in the workers.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from tenax._core.text import format_duration, format_seconds
from tenax._io.interfaces import Launch
from tenax._processes.warm import CHANNEL_DESCRIPTOR, FOLDER, VARIABLE

_ELF = b"\x7fELF"


class Template(msgspec.Struct, frozen=True):
    launch: Launch  # a worker's, with the environment that all workers share
    modules: list[str]  # to import; "auto": what the script imports
    late: list[str]  # variables that only a worker has
    standbys: int  # how many to keep ready for the next start
    has_own_arguments: bool = False  # arguments differ between workers


def template_of(
    launch: Launch, others: Sequence[Launch], modules: str, late: Sequence[str], standbys: int
) -> Template | str:
    """Return the template for workers launched like this, or the reason, a clause, why there is none.

    The reason is empty if there is nothing to preload.
    """
    argv = launch.argv or []
    if why := _why_not(argv, [other.argv or [] for other in others]):
        return why
    if "OMP_NUM_THREADS" in late:
        return "each has its own OMP_NUM_THREADS, which libraries read when they are imported"
    names = [name.strip() for name in modules.split(",")]
    if names == ["auto"] and not _imports_third_party(argv, launch.cwd):
        return ""
    path = launch.env.get("PYTHONPATH")
    env = {name: value for name, value in launch.env.items() if name not in late}
    env["PYTHONPATH"] = FOLDER + (os.pathsep + path if path else "")
    env[VARIABLE] = str(CHANNEL_DESCRIPTOR)
    same_cpus = all(other.cpus == launch.cpus for other in others)
    made = msgspec.structs.replace(launch, env=env, cpus=launch.cpus if same_cpus else ())
    return Template(made, names, sorted(late), standbys, any(other.argv != launch.argv for other in others))


def _imports_third_party(argv: Sequence[str], cwd: str) -> bool:
    """Scan the script quickly, so that one with nothing to preload starts at once; the template parses it properly."""
    at = _script_at(argv)
    if argv[at - 1] == "-m":
        return True
    path = os.path.join(cwd or os.curdir, argv[at])
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            lines = file.read().splitlines()
    except OSError:  # a folder, or missing, which the worker will report
        return os.path.isdir(path)
    names: list[str] = []
    for line in lines:
        first, _, rest = line.strip().partition(" ")
        if first == "from":
            names += rest.split()[:1]
        elif first == "import":
            names += rest.replace(",", " ").split()
    return any(name.partition(".")[0] not in sys.stdlib_module_names for name in names)


def _why_not(argv: Sequence[str], others: Sequence[Sequence[str]]) -> str:
    if sys.platform != "linux" or not hasattr(os, "pidfd_open"):
        return "preloading requires Linux 5.3 or later"
    if not _is_python(argv):
        return f"{argv[0] if argv else 'a function'} is not a Python interpreter"
    first = _script_at(argv)
    if first < 0:
        return "their interpreter has flags that --preload does not support"
    if any(list(other[: first + 1]) != list(argv[: first + 1]) for other in others):
        return "they run different scripts"
    return ""


def _is_python(argv: Sequence[str]) -> bool:
    """Return whether this is an interpreter and not a script of that name, which would run as an extra worker."""
    if not argv or not os.path.basename(argv[0]).startswith("python"):
        return False
    for folder in [""] if os.sep in argv[0] else os.get_exec_path():
        try:
            with open(os.path.join(folder, argv[0]), "rb") as file:
                return file.read(len(_ELF)) == _ELF
        except OSError:  # not in this folder
            continue
    return False


def _script_at(argv: Sequence[str]) -> int:
    """Return the index of the script's or module's name; -1 if preceded by flags that may skip ``sitecustomize``."""
    at = 1
    while at < len(argv) and argv[at] == "-u":
        at += 1
    if at < len(argv) and argv[at] == "-m":
        at += 1
    return at if at < len(argv) and not argv[at].startswith("-") else -1


def texts_for_user(message: tuple[Any, ...]) -> list[str]:
    match message:
        case ("warm", seconds, names, left_out):
            shown = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
            took = format_duration(seconds)
            return [f"workers are forked warm: {shown} imported once, in {took}", *_left_out(left_out)]
        case ("cold", left_out):
            whole = left_out.pop("", "")
            return [*_left_out(left_out), *([f"workers start cold: {whole}"] if whole else [])]
        case ("slow", waited, most):
            after = f"have waited {format_duration(waited)} and will start cold after {format_seconds(most)}"
            return [f"preloading is slow: workers {after}"]
        case ("printed", text):
            return [f"while preloading: {line}" for line in text.splitlines() if line.strip()]
    raise AssertionError(f"unknown message from the keeper: {message!r}")


def _left_out(left_out: dict[str, str]) -> list[str]:
    return [f"{name} is not preloaded: {why}; each worker imports it itself" for name, why in left_out.items()]
