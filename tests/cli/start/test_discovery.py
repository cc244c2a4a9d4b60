"""``tenax start --discover``, with a program in place of ssh that runs the command on this host."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kit.addresses import own_endpoint
from kit.processes import TIMEOUT_S

SSH = 'for last; do :; done; exec sh -c "$last"\n'


@pytest.fixture
def start(tmp_path: Path):
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "train.py").write_text("import os; print('rank', os.environ['RANK'])")

    def run(hosts: str, *run_flags: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "hosts.sh").write_text(hosts)
        flags = ["--discover", "sh hosts.sh", "--ssh", "sh ssh", "--", *run_flags]
        return subprocess.run(
            [sys.executable, "-m", "tenax", "start", *flags, "--rdzv-endpoint", own_endpoint(), "train.py"],
            cwd=tmp_path,
            env={**os.environ, "TMPDIR": str(tmp_path)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )

    return run


def test_the_hosts_are_those_that_the_program_prints(start) -> None:
    done = start("echo '# two'; echo h0; echo h1 slots=1", "--nnodes", "2:4", "--rdzv-conf", "last_call_timeout=0.1")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[h0] rank 0", "[h1] rank 1"]


def test_a_program_that_does_not_exist_is_wrong_usage(start, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tenax", "start", "--discover", "./no", "--", "--nnodes", "2:4", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 2
    assert "--discover: cannot run './no': No such file or directory" in done.stderr
