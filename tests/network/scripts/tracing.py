"""Writes the trace of a worker: one line per event, in a file of its rank and generation.

First it searches for workers of earlier generations that are still alive: all hosts of a lab share the machine's
processes.
"""

from __future__ import annotations

import os
import time

_BEGAN_AT = time.monotonic()  # not the start of the process: a warm worker was a standby before
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))
GENERATION = int(os.environ.get("TENAX_GENERATION", "0"))

_STATE, _STARTED_AT = 0, 19  # fields after the name in /proc/PID/stat


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()


def _stat(pid: int | str) -> list[str]:
    """Return the fields; empty if there is no such process or it is a zombie."""
    try:
        fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    except OSError:
        return []
    return [] if fields[_STATE] in "ZX" else fields


def _alive_before(folder: str) -> list[int]:
    """Return the workers of earlier generations that are alive now."""
    alive = []
    for name in os.listdir(folder):
        if name.startswith("trace-") and int(name.removesuffix(".jsonl").rpartition("-")[2]) < GENERATION:
            for line in _read(f"{folder}/{name}").split("\n")[:-1]:
                if '"start"' in line:
                    pid, mark = _field(line, "pid"), _field(line, "birth_mark").strip('"')
                    stat = _stat(pid)
                    if stat and stat[_STARTED_AT] == mark:  # not another process with its pid
                        alive.append(int(pid))
    return alive


def _field(line: str, name: str) -> str:
    return line.partition(f'"{name}": ')[2].partition(",")[0].strip("}")


def _json(value: object) -> str:
    """Return JSON for numbers, plain text and lists of numbers. The module json takes longer to import than to run."""
    return f'"{value}"' if isinstance(value, str) else str(value)


class Trace:
    def __init__(self, folder: str) -> None:
        self._alive_before = _alive_before(folder)
        path = f"{folder}/trace-{RANK}-{GENERATION}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._fields = {
            "rank": RANK,
            "local_rank": int(os.environ.get("LOCAL_RANK", "0")),
            "world_size": WORLD_SIZE,
            "generation": GENERATION,
            "restart_count": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            "pid": os.getpid(),
            "host": os.uname().nodename,
            "master_addr": os.environ.get("MASTER_ADDR", ""),
            "master_port": os.environ.get("MASTER_PORT", ""),
        }

    def start(self) -> None:
        """Write the first line."""
        self._write(
            event="start",
            step=0,
            born_at=_BEGAN_AT,
            birth_mark=_stat("self")[_STARTED_AT],
            alive_before=self._alive_before,
        )

    def step(self, step: int) -> None:
        self._write(event="step", step=step)

    def end(self, step: int) -> None:
        self._write(event="end", step=step)

    def _write(self, **event_fields: object) -> None:
        fields = {**event_fields, "at": time.monotonic(), **self._fields}
        line = ", ".join(f'"{name}": {_json(value)}' for name, value in fields.items())
        os.write(self._file, f"{{{line}}}\n".encode())
