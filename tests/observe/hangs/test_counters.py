"""The kernel's counters of a real process and its children."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from kit.processes import TIMEOUT_S, until
from tenax._core.hang import HangDetector, ProcessCounters, Sample
from tenax._observe.hangs.counters import CounterReader, state_of

pytestmark = pytest.mark.process

CHILD = """
import os, signal, sys
child = os.fork()
if child == 0:
    signal.pause()
    os._exit(0)
print(child, flush=True)
for line in sys.stdin:
    os.write(1, b"x" * int(line) + b"\\n")
"""
SPINS = "print(flush=True)\nwhile True: pass"


def test_counters_cover_a_worker_and_its_children() -> None:
    """They stay equal while both wait, and increase when one writes; a stopped or exited process is detected."""
    with subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        child = int(process.stdout.readline())
        reader = CounterReader(process.pid)
        first = reader.read()
        assert first is not None
        assert first.processes == 2
        again = reader.read(closely=True)
        assert again is not None
        assert again.threads is not None
        assert {process.pid, child} <= again.threads.keys()
        for count in (b"5000\n", b"0\n"):  # a line can be read before the kernel has counted its bytes, two cannot
            process.stdin.write(count)
            process.stdin.flush()
            process.stdout.readline()
        after = reader.read()
        assert after is not None
        assert after.written_bytes - first.written_bytes in (5001, 5002)
        assert after.calls > first.calls
        assert after.threads is None, "threads are not read after activity"
        os.kill(child, signal.SIGKILL)
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        stopped = reader.read()
        assert stopped is not None
        assert stopped.is_stopped
        assert state_of(process.pid) == "T"
        os.kill(process.pid, signal.SIGKILL)
    assert CounterReader(process.pid).read() is None
    assert state_of(process.pid) == ""


def test_workers_that_spin_are_quiet_after_a_rhythm() -> None:
    """As in a collective that polls: each uses a full CPU, or waits for one on a busy machine, without progress."""
    interval_s = 1.0  # the kernel counts the time of a queued thread late
    detector = HangDetector(0.3, interval_s)
    spinning = [subprocess.Popen([sys.executable, "-c", SPINS], stdout=subprocess.PIPE) for _ in range(2)]
    try:
        for process in spinning:
            assert process.stdout is not None
            assert process.stdout.readline()
        readers = [CounterReader(process.pid) for process in spinning]
        began = time.monotonic() - 10 * interval_s
        detector.begin(len(readers), began)
        for number in range(10):  # the rhythm
            active = ProcessCounters(calls=number, main_calls=number)
            detector.look([Sample(rank, active) for rank in range(len(readers))], began + number * interval_s)

        def why() -> str:
            samples = [Sample(rank, reader.read()) for rank, reader in enumerate(readers)]
            return detector.look(samples, time.monotonic()).why

        found = until(why, "the workers to be quiet", 2 * TIMEOUT_S, every_s=interval_s)
        assert found == "all workers are spinning, and nothing is read, written or computed"
    finally:
        for process in spinning:
            process.kill()
            process.communicate()
