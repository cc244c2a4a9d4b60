"""The metric handler for JSON lines."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kit.processes import leaving_nothing, on_linux
from tenax.metrics import JsonLinesMetricHandler, MetricData


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_value_is_a_line(tmp_path: Path) -> None:
    """With its time, group, name and value, and labels if there are any. Existing lines are kept."""
    path = tmp_path / "m.jsonl"
    for labels in (None, {"run_id": "r1"}):
        with leaving_nothing():
            handler = JsonLinesMetricHandler(str(path), labels)
            handler.emit(MetricData(1.5, "g", 'a "name"\n', 2))
            handler.close()
            handler.close()
    assert lines(path) == [
        {"timestamp": 1.5, "group": "g", "name": 'a "name"\n', "value": 2},
        {"timestamp": 1.5, "group": "g", "name": 'a "name"\n', "value": 2, "labels": {"run_id": "r1"}},
    ]


def test_nan_and_infinity_are_null(tmp_path: Path) -> None:
    """JSON has neither."""
    path = tmp_path / "m.jsonl"
    handler = JsonLinesMetricHandler(str(path))
    handler.emit(MetricData(1.0, "g", "n", float("nan")))
    handler.close()
    assert lines(path)[0]["value"] is None


def test_several_writers_share_a_file(tmp_path: Path) -> None:
    """Lines stay whole."""
    path = tmp_path / "m.jsonl"

    def write(number: int) -> None:
        handler = JsonLinesMetricHandler(str(path))
        for value in range(200):
            handler.emit(MetricData(1.0, f"writer {number}", "n" * 500, value))
        handler.close()

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = [(line["group"], line["value"]) for line in lines(path)]
    assert sorted(found) == sorted((f"writer {number}", value) for number in range(4) for value in range(200))


def test_the_file_has_the_permissions_of_the_umask(tmp_path: Path) -> None:
    """A collector of metrics is often another user."""
    path = tmp_path / "m.jsonl"
    before = os.umask(0o022)
    try:
        JsonLinesMetricHandler(str(path)).close()
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_a_closed_handler_raises(tmp_path: Path) -> None:
    """It must not write to a descriptor that has been reused."""
    handler = JsonLinesMetricHandler(str(tmp_path / "m.jsonl"))
    handler.close()
    with pytest.raises(ValueError, match="was closed"):
        handler.emit(MetricData(1.0, "g", "n", 1))


_INTERRUPTED = """
import array, fcntl, json, os, select, signal, sys, termios, threading
from tenax.metrics import JsonLinesMetricHandler, MetricData

path, main = sys.argv[1], threading.main_thread().ident
os.mkfifo(path)
reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
os.set_blocking(reader, True)
size = fcntl.fcntl(reader, 1032)  # F_GETPIPE_SZ
interrupted = threading.Event()
signal.signal(signal.SIGUSR1, lambda *_: interrupted.set())
lines = []

def read():
    waiting = array.array("i", [0])
    while waiting[0] < size:  # no event announces a full pipe
        select.select([], [], [], 0.001)
        fcntl.ioctl(reader, termios.FIONREAD, waiting)
    signal.pthread_kill(main, signal.SIGUSR1)
    interrupted.wait(30)
    lines.append(open(reader).readline())

thread = threading.Thread(target=read)
thread.start()
JsonLinesMetricHandler(path).emit(MetricData(1.0, "g", "n" * 2 * size, 1))
thread.join()
assert json.loads(lines[0])["name"] == "n" * 2 * size
"""


@pytest.mark.process
@on_linux
def test_a_write_interrupted_by_a_signal_is_continued(tmp_path: Path) -> None:
    """A part of a line was written, and the rest follows: that is no failure."""
    command = [sys.executable, "-c", _INTERRUPTED, str(tmp_path / "pipe")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


_FULL = """
import os, resource, signal, sys
from tenax.metrics import JsonLinesMetricHandler, MetricData

path = sys.argv[1]
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
handler = JsonLinesMetricHandler(path)
handler.emit(MetricData(1.0, "g", "first", 1))
resource.setrlimit(resource.RLIMIT_FSIZE, (os.path.getsize(path) + 10, resource.RLIM_INFINITY))
try:
    handler.emit(MetricData(1.0, "g", "torn", 2))
except OSError as error:
    print(error.strerror)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
handler.emit(MetricData(1.0, "g", "last", 3))
"""


@pytest.mark.process
def test_a_partial_line_damages_no_other_line(tmp_path: Path) -> None:
    """The disk becomes full within a line: the call raises, and the next line begins on a new line."""
    path = tmp_path / "m.jsonl"
    done = subprocess.run([sys.executable, "-c", _FULL, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "File too large"
    first, torn, last = path.read_text().splitlines()
    assert json.loads(first)["name"] == "first"
    assert json.loads(last)["name"] == "last"
    with pytest.raises(json.JSONDecodeError):
        json.loads(torn)
