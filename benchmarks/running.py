"""One launcher process, from before its start until its exit.

Its exit does not end its descendants: the caller lists them before, and ends them by pid.
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
# If an outer launcher or a shell sets these, the measurement changes.
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
# Names are resolved by the hosts file only: a torch client resolves its peer's name at every connection, and the time
# that the machine's name server takes, or a timeout of it, is not part of any figure.
NO_NAME_SERVER = {"RES_OPTIONS": "attempts:0"}


def environment() -> dict[str, str]:
    """Return this environment without the variables that would change the measurement."""
    return {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN_VARIABLES)}


class Running:
    """A process that is started by the constructor."""

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
                # Temporary files that a launcher leaves are removed with this folder.
                env=environment() | {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder), **(variables or {})},
            )
        self._pidfd = os.pidfd_open(self._popen.pid)

    @property
    def pid(self) -> int:
        """The launcher's own process: the agent."""
        return self._popen.pid

    @property
    def status(self) -> int | None:
        """The exit code; None while it runs."""
        return self._popen.returncode

    def fileno(self) -> int:
        """The pidfd: readable when the process has exited."""
        return self._pidfd

    def below(self) -> set[Process]:
        """Return all its descendants, while it is alive."""
        return set() if self.gone_ns else procfs.descendants(self.pid)

    def wait_until_gone(self, timeout_s: float) -> bool:
        """Return whether it exited in that time."""
        if not self.gone_ns and select.select([self._pidfd], [], [], timeout_s)[0]:
            self.gone_ns = time.monotonic_ns()
            self._popen.wait()
        return bool(self.gone_ns)

    def send(self, number: signal.Signals) -> None:
        """Signal this process only."""
        if not self.gone_ns:
            self._popen.send_signal(number)

    def kill(self) -> None:
        """Send SIGKILL to this process only."""
        self.send(signal.SIGKILL)
        self.wait_until_gone(10)

    def close(self) -> None:
        """Release a process that has exited."""
        os.close(self._pidfd)

    def last_output(self) -> str:
        """Return its last lines, without paths of this machine."""
        lines = self._stderr.read_text(errors="replace").splitlines()
        output = " / ".join(lines[-2:]).replace(str(self._folder), "(scratch)").replace(str(HERE.parent), ".")
        output = output.replace(sys.base_prefix, "(python)")
        return output or "none"


def end_all(launchers: Sequence[Running], others: set[Process]) -> None:
    """End these launchers with SIGTERM, then SIGKILL, with all their descendants and the other given processes."""
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
