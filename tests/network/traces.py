"""Traces: what the workers of a run wrote down about themselves (see ``scripts/``), read back for a test.

Every line has ``event`` (start, step or end), ``at`` (the monotonic clock, which all hosts of a lab share), ``rank``,
``local_rank``, ``world_size``, ``step``, ``generation``, ``restart_count``, ``pid``, ``host``, ``master_addr`` and
``master_port``. A start has ``born_at``, ``birth_mark`` and ``alive_before`` besides.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Follower:
    """Reads the traces in a folder as they grow."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}  # bytes of whole lines

    def new(self) -> list[dict[str, Any]]:
        """The whole lines that were written since the last time."""
        found = []
        for path in sorted(self._folder.glob("trace-*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                whole, newline, _unfinished = file.read().rpartition(b"\n")
            self._read[path] = self._read.get(path, 0) + len(whole) + len(newline)
            found += [json.loads(line) for line in whole.split(b"\n") if line]
        return found


def read(folder: Path, **fields: object) -> list[dict[str, Any]]:
    """All whole lines of all traces in the folder that have these values, in the order in which they were written."""
    matching = [line for line in Follower(folder).new() if all(line[name] == value for name, value in fields.items())]
    return sorted(matching, key=lambda line: line["at"])
