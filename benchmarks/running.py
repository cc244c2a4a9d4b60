"""Running: one launcher process, from the moment before it is started until it is gone.

What it started is not its own end: whoever holds it asks for the processes below before, and ends them by pid.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from benchmarks import procfs
from benchmarks.procfs import Process

HERE = Path(__file__).parent
# Set by an outer launcher or by a developer's shell, these would change what is measured.
FOREIGN_VARIABLES = (
    "PYTHON",
    "OMP_",
    "RANK",
    "LOCAL_",
    "GROUP_",
    "ROLE_",
    "WORLD_SIZE",
    "MASTER_",
    "TORCHELASTIC_",
    "PET_",
    "TENAX_",
)
# Names are found in the hosts file or not at all: a torch client looks its peer's name up whenever it connects, and how
# long the machine's name server takes for it, or that it never answers, is no part of any figure.
NO_NAME_SERVER = {"RES_OPTIONS": "attempts:0"}


def environment() -> dict[str, str]:
    """Our environment, less what would change what is measured."""
    return {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN_VARIABLES)}


class Running:
    """Started when it is made."""

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        *,
        name: str = "launcher",
        variables: Mapping[str, str] | None = None,
        stdout: IO[bytes] | int = subprocess.DEVNULL,
    ) -> None:
        self.gone_ns = 0
        self._folder = folder
        self._stderr = folder / f"{name}.stderr"
        with self._stderr.open("wb") as stderr:
            self.started_ns = time.monotonic_ns()
            self._popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                cwd=folder,
                # What a launcher leaves in the folder for temporary files goes with ours.
                env=environment() | {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder), **(variables or {})},
            )
        self._pidfd = os.pidfd_open(self._popen.pid)

    @property
    def pid(self) -> int:
        """The launcher's own process: the agent."""
        return self._popen.pid

    @property
    def status(self) -> int | None:
        """What it ended with; None while it runs."""
        return self._popen.returncode

    def fileno(self) -> int:
        """Readable when the process is gone."""
        return self._pidfd

    def below(self) -> set[Process]:
        """Every process that descends from it, while it is there to descend from."""
        return set() if self.gone_ns else procfs.descendants(self.pid)

    def wait_until_gone(self, timeout_s: float) -> bool:
        """Whether it was gone in that time."""
        if not self.gone_ns and select.select([self._pidfd], [], [], timeout_s)[0]:
            self.gone_ns = time.monotonic_ns()
            self._popen.wait()
        return bool(self.gone_ns)

    def send(self, number: signal.Signals) -> None:
        """Signal this process, and it alone."""
        if not self.gone_ns:
            self._popen.send_signal(number)

    def kill(self) -> None:
        """SIGKILL this process, and it alone."""
        self.send(signal.SIGKILL)
        self.wait_until_gone(10)

    def close(self) -> None:
        """Let go of a process that is gone."""
        os.close(self._pidfd)

    def last_words(self) -> str:
        """The last lines it said, in which no path says where this machine keeps things."""
        lines = self._stderr.read_text(errors="replace").splitlines()
        words = " / ".join(lines[-2:]).replace(str(self._folder), "(scratch)").replace(str(HERE.parent), ".")
        words = words.replace(sys.base_prefix, "(python)")
        return words or "none"


def end_all(launchers: Sequence[Running], others: set[Process]) -> None:
    """End these launchers, gently and then not, with everything below them and whoever else is named."""
    below = others.union(*(launcher.below() for launcher in launchers))
    for number in (signal.SIGTERM, signal.SIGKILL):
        for launcher in launchers:
            launcher.send(number)
        deadline = time.monotonic() + 10
        for launcher in launchers:
            launcher.wait_until_gone(max(0.0, deadline - time.monotonic()))
    procfs.end(below)
    for launcher in launchers:
        launcher.close()
