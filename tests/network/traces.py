"""Reads the traces that the workers of a run write (see ``scripts/tracing.py``).

Every line has ``event`` (start, step or end), ``at`` (the monotonic clock, which all hosts of a lab share), ``rank``,
``local_rank``, ``world_size``, ``step``, ``generation``, ``restart_count``, ``pid``, ``host``, ``master_addr`` and
``master_port``. A start also has ``born_at``, ``birth_mark`` and ``alive_before``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class TraceReader:
    """Reads the traces in a folder as they grow."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}  # bytes of complete lines

    def new(self) -> list[dict[str, Any]]:
        """Return the complete lines that were written since the last call."""
        found = []
        for path in sorted(self._folder.glob("trace-*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                complete, newline, _incomplete = file.read().rpartition(b"\n")
            self._read[path] = self._read.get(path, 0) + len(complete) + len(newline)
            found += [json.loads(line) for line in complete.split(b"\n") if line]
        return found


def read(folder: Path, **fields: object) -> list[dict[str, Any]]:
    """Return the complete lines of all traces in the folder that have these values, ordered by time."""
    matching = [
        line for line in TraceReader(folder).new() if all(line[name] == value for name, value in fields.items())
    ]
    return sorted(matching, key=lambda line: line["at"])
