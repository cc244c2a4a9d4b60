"""Traces: what the workers of a run wrote down about themselves (see ``scripts/``), read back for a test.

Every line has ``event`` (start, step or end), ``at`` (the monotonic clock, which all hosts of a lab share), ``rank``,
``local_rank``, ``world_size``, ``step``, ``generation``, ``restart_count``, ``pid``, ``host``, ``master_addr`` and
``master_port``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read(folder: Path, **fields: object) -> list[dict[str, Any]]:
    """All whole lines of all traces in the folder that have these values, in the order in which they were written."""
    found = []
    for path in folder.glob("trace-*.jsonl"):
        *lines, _unfinished = path.read_text().split("\n")
        found += [json.loads(line) for line in lines]
    matching = [line for line in found if all(line[name] == value for name, value in fields.items())]
    return sorted(matching, key=lambda line: line["at"])
