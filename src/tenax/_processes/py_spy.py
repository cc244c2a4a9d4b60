"""py-spy: reads the stacks of a process from outside, with native frames, if that program is installed.

It needs no help from the process, so it also works for one that was not prepared for stack dumps. It stops the process
while it reads, and needs the right to trace it: root, CAP_SYS_PTRACE, or ``kernel.yama.ptrace_scope`` 0.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping

import msgspec

from tenax._core.bounds import DECODE_ERRORS
from tenax._core.requests import WorkerStacks

MISSING = "py-spy is not installed on this host (pip install py-spy)"
_TIMEOUT_S = 50.0  # it reads the symbols of large libraries
_MAX_STACKS = 64_000  # characters
NO_LINE = "???"  # of a native frame


class _Frame(msgspec.Struct):
    name: str
    filename: str = ""
    line: int = 0
    module: str | None = None  # the library of a native frame


class _Thread(msgspec.Struct):
    thread_id: int
    frames: list[_Frame]
    os_thread_id: int | None = None
    thread_name: str | None = None


def find_py_spy() -> str:
    """Return the path of py-spy: next to this Python or in PATH; empty if there is none."""
    from shutil import which

    beside = os.path.join(os.path.dirname(sys.executable), "py-spy")
    return beside if os.access(beside, os.X_OK) else which("py-spy") or ""


def read_in_background(
    program: str, pids: Mapping[int, int], native: bool, done: Callable[[list[WorkerStacks]], None]
) -> None:
    """Read the stacks of these processes, by rank, in threads; ``done`` is called in one of them."""
    import threading

    found: list[WorkerStacks] = []
    lock = threading.Lock()

    def read(rank: int, pid: int) -> None:
        stacks, why = read_stacks(program, pid, native=native)
        with lock:
            found.append(WorkerStacks(rank, pid, stacks=stacks, why=why))
            is_last = len(found) == len(pids)
        if is_last:
            done(sorted(found, key=lambda each: each.rank))

    for rank, pid in pids.items():
        threading.Thread(target=read, args=(rank, pid), daemon=True).start()


def read_stacks(program: str, pid: int, *, native: bool) -> tuple[str, str]:
    """Return the stacks of a process in faulthandler's format, the main thread last, or why there are none."""
    import subprocess

    command = [program, "dump", "--json", *(["--native"] if native else []), "--pid", str(pid)]
    try:
        run = subprocess.run(command, capture_output=True, timeout=_TIMEOUT_S, stdin=subprocess.DEVNULL, check=False)
        if run.returncode != 0:
            lines = run.stderr.decode("utf-8", "replace").split("\n")
            reason = next((line for line in lines if line.strip()), f"exit code {run.returncode}")
            return "", f"py-spy could not read it: {reason.removeprefix('Error: ')}"
        threads = msgspec.json.decode(run.stdout, type=list[_Thread])
    except (OSError, subprocess.SubprocessError, *DECODE_ERRORS) as error:
        return "", f"py-spy could not read it: {error}"
    threads.sort(key=lambda thread: thread.os_thread_id == pid)
    return "\n".join(line for thread in threads for line in _lines(thread))[-_MAX_STACKS:], ""


def _lines(thread: _Thread) -> list[str]:
    name = f' "{thread.thread_name}"' if thread.thread_name else ""
    lines = [f"Thread 0x{thread.thread_id:016x}{name} (most recent call first):"]
    for frame in thread.frames:
        is_unknown = frame.name.startswith("0x")  # an address without a symbol, which differs between processes
        line = NO_LINE if frame.module else frame.line
        where = f'File "{frame.module or frame.filename}", line {line}'
        lines.append(f"  {where} in {NO_LINE if is_unknown else frame.name}")
    return lines
