"""A real Slurm for tests: a login host and three nodes, made of namespaces (``slurm_lab/up.sh``)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from network.file_watch import until

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PACKAGES = ("slurmctld", "slurmd", "srun", "munged", "ip", "nsenter", "unshare", "setpriv")
TIMEOUT_S = 120.0
ENDED = "the script has ended"


def why_not() -> str:
    """Return why there can be no Slurm here; empty if there can."""
    if not sys.platform.startswith("linux"):
        return "namespaces need Linux"
    if os.getuid() != 0:
        return "creating namespaces needs root"
    if missing := [name for name in PACKAGES if shutil.which(name) is None]:
        return f"the program {missing[0]} is missing (Debian: apt-get install slurmctld slurmd slurm-client munge)"
    return ""


class SlurmCluster:
    """The cluster. Commands run in the home folder of the user alice, which all hosts share."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.home = folder / "home"
        self.tenax = str(Path(sys.prefix) / "bin" / "tenax")

    def start(self) -> None:
        environ = {**os.environ, "PYTHON": sys.base_prefix}
        subprocess.run([HERE / "slurm_lab" / "up.sh", self._folder, ROOT], env=environ, timeout=TIMEOUT_S, check=True)
        shutil.copy(HERE / "slurm_lab" / "train.py", self.home)

    def stop(self) -> None:
        subprocess.run([HERE / "slurm_lab" / "down.sh", self._folder], timeout=TIMEOUT_S, check=True)

    def popen(self, *command: str, host: str = "login") -> subprocess.Popen[str]:
        return subprocess.Popen(
            [self._folder / "in.sh", host, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def run(self, *command: str, host: str = "login") -> subprocess.CompletedProcess[str]:
        """Run a command on the host. Its stdout and stderr are one text."""
        process = self.popen(*command, host=host)
        output, _ = process.communicate(timeout=TIMEOUT_S)
        return subprocess.CompletedProcess(command, process.returncode, output)

    def out(self, *command: str) -> str:
        """Return the output of a command that must succeed."""
        done = self.run(*command)
        assert done.returncode == 0, done.stdout
        return str(done.stdout).strip()

    def submit(self, script: str, *options: str) -> tuple[str, Path]:
        """Submit a batch script; return the job's id and the file with its output."""
        path = self.home / f"script-{len(list(self.home.glob('script-*')))}"
        path.write_text(f"#!/bin/bash\n{script}\necho {ENDED}\n")
        output = Path(f"{path}.out")
        output.touch()
        shutil.chown(output, 1500, 1500)
        flags = ("--parsable", "--open-mode=append", "-o", str(output))
        return self.out("sbatch", *flags, *options, str(path)).partition(";")[0], output

    @contextmanager
    def power_failure(self, host: str) -> Iterator[None]:
        """The host has no power in the block; after it, the host boots."""
        subprocess.run([self._folder / "crash.sh", host], timeout=TIMEOUT_S, check=True)
        try:
            yield
        finally:
            subprocess.run([self._folder / "boot.sh", host], timeout=TIMEOUT_S, check=True)


def wait_for(path: Path, *texts: str, count: int = 1, timeout_s: float = TIMEOUT_S) -> str:
    """Wait until the file contains each of the texts this often; return its content."""

    def found() -> str | None:
        content = path.read_text(errors="replace") if path.exists() else ""
        return content if all(content.count(text) >= count for text in texts) else None

    return until(found, lambda: f"{texts} in {path.read_text()}", [path.parent], timeout_s=timeout_s) or ""
