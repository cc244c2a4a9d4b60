"""``tenax start --discover``, with a program in place of ssh that runs the command on this host."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kit.addresses import own_endpoint
from kit.processes import TIMEOUT_S, until

SSH = 'for last; do :; done; exec sh -c "$last"\n'
SCRIPT = """
import os, signal
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "in", os.environ["TENAX_GENERATION"], flush=True)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
if os.environ["TENAX_GENERATION"] != "3":
    signal.pause()
"""
# The program is run again much sooner.
STARTER = """
import os, sys, msgspec
from tenax.cli.start import make_plan, start_all
plan = make_plan(sys.argv[1:], os.environ, os.getcwd(), None)
sys.exit(start_all(msgspec.structs.replace(plan, discover_every_s=0.1)))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "hosts").write_text("# one\nh0\n")
    return tmp_path


@contextmanager
def started(folder: Path, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    conf = "last_call_timeout=0.1,keep_alive_interval=1"
    run_flags = ["--nnodes", "1:2", "--rdzv-conf", conf, "--rdzv-endpoint", own_endpoint(), "--preload", "none"]
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", STARTER, *flags, "--ssh", "sh ssh", "--", *run_flags, "train.py"],
            cwd=folder,
            env={**os.environ, "TMPDIR": str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait(TIMEOUT_S)


def test_hosts_come_and_go(folder: Path) -> None:
    def wait_for(text: str) -> None:
        until(lambda: text in (folder / "output").read_text(), text)

    def change(text: str) -> None:
        (folder / "new").write_text(text)
        (folder / "new").replace(folder / "hosts")

    with started(folder, "--discover", "cat hosts") as process:
        wait_for("[h0] rank 0 of 1 in 1\n")
        change("h0\nh1 slots=1\n")
        wait_for("[h1] rank 1 of 2 in 2\n")
        change("h0\n")
        wait_for("tenax start: h1 is no longer listed; its agent is stopped\n")
        wait_for("[h0] rank 0 of 1 in 3\n")
        assert process.wait(TIMEOUT_S) == 0


def test_a_program_that_fails_changes_nothing(folder: Path) -> None:
    (folder / "hosts.sh").write_text("echo h0; [ ! -e fail ]")
    with started(folder, "--discover", "sh hosts.sh") as process:
        until(lambda: "rank 0" in (folder / "output").read_text(), "the worker")
        (folder / "fail").touch()
        message = "tenax start: --discover: it exited with code 1; the list of hosts is unchanged\n"
        until(lambda: message in (folder / "output").read_text(), message)
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT_S) == 130


def test_a_program_that_does_not_exist_is_wrong_usage(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tenax", "start", "--discover", "./no", "--", "--nnodes", "2:4", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 2
    assert "--discover: cannot run './no': No such file or directory" in done.stderr
