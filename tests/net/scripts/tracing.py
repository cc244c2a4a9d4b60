"""Trace: one line for everything that a worker does, appended whole, in a file of this rank and generation."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path

RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))
GENERATION = int(os.environ.get("TENAX_GENERATION", "0"))


class Trace:
    def __init__(self, folder: Path) -> None:
        path = folder / f"trace-{RANK}-{GENERATION}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._about_us = {
            "rank": RANK,
            "local_rank": int(os.environ.get("LOCAL_RANK", "0")),
            "world_size": WORLD_SIZE,
            "generation": GENERATION,
            "restart_count": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "master_addr": os.environ.get("MASTER_ADDR", ""),
            "master_port": os.environ.get("MASTER_PORT", ""),
        }

    def write(self, event: str, step: int) -> None:
        """``event`` is start, step or end."""
        line = json.dumps({"event": event, "step": step, "at": time.monotonic(), **self._about_us})
        os.write(self._file, line.encode() + b"\n")
