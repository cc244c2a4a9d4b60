"""The kernel's counters of a real process and its children."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

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
