"""The log writer in normal operation: files get bytes, consoles get lines, reports get tails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import Harness, read, tail_now

pytestmark = pytest.mark.process

PRINT_LINES = """
import os, sys
name, count = sys.argv[1], int(sys.argv[2])
lines = [f"{name} {number} {'x' * (number * 7919 % 150)}\\n" for number in range(count)]
position = 0
while position < count:  # in writes that end anywhere in a line
    step = 1 + position * 31 % 97
    text = "".join(lines[position : position + step]).encode()
    while text:
        text = text[os.write(1, text[: 1 + len(text) * 2 // 3]) :]
    position += step
"""


def expected_lines(name: str, count: int) -> list[bytes]:
    return [f"{name} {number} {'x' * (number * 7919 % 150)}".encode() for number in range(count)]


def test_files_get_the_bytes_and_consoles_get_lines(harness: Harness, tmp_path: Path) -> None:
    """A file holds exactly what was written; its console shows the same in whole lines, each with the prefix."""
    (out_read, out), (err_read, err) = harness.pipe(), harness.pipe()
    out_reader, err_reader = harness.reader(out_read), harness.reader(err_read)
    with harness.log_writer(out, err) as writer:
        first = writer.open_stream("out", path=str(tmp_path / "out"), console=1, prefix="[w0]:")
        second = writer.open_stream("err", path=str(tmp_path / "err"), console=2, prefix="[w0]:")
        third = writer.open_stream("quiet", path=str(tmp_path / "quiet"))
        os.write(first, b"one\n\ntw")
        os.write(second, b"\xff\xfe bad \xf0\n")
        os.write(third, b"not shown\n")
        os.write(first, b"o\nunfinished")
        for end in (first, second, third):
            os.close(end)
        assert writer.drain_now(10) == []
        assert read(tmp_path / "out") == b"one\n\ntwo\nunfinished"
        assert read(tmp_path / "err") == b"\xff\xfe bad \xf0\n"
        assert read(tmp_path / "quiet") == b"not shown\n"
    assert out_reader.all() == b"[w0]:one\n[w0]:\n[w0]:two\n[w0]:unfinished\n"
    assert err_reader.all() == b"[w0]:\xff\xfe bad \xf0\n"


def test_lines_of_many_streams_arrive_whole_on_one_console(harness: Harness, tmp_path: Path) -> None:
    """Every line of four workers arrives once, whole, in its worker's order, with and without a prefix."""
    read_end, console = harness.pipe()
    reader = harness.reader(read_end)
    count, names = 20_000, ["a", "b", "c", "d"]
    with harness.log_writer(console, console) as writer:
        workers = []
        for index, name in enumerate(names):
            # Two to stdout and two to stderr, which is the same pipe here.
            end = writer.open_stream(
                name, path=str(tmp_path / name), console=1 + index % 2, prefix="" if index < 2 else "P:"
            )
            workers.append(subprocess.Popen([sys.executable, "-c", PRINT_LINES, name, str(count)], stdout=end))
            os.close(end)
        assert [worker.wait(60) for worker in workers] == [0, 0, 0, 0]
        assert writer.drain_now(30) == []
        writer.finish(10)
    shown = reader.all().split(b"\n")
    assert shown.pop() == b""
    for index, name in enumerate(names):
        expected = expected_lines(name, count)
        prefix = b"" if index < 2 else b"P:"
        assert [line for line in shown if line.startswith(prefix + name.encode())] == [prefix + e for e in expected]
        assert read(tmp_path / name) == b"".join(line + b"\n" for line in expected)
    assert len(shown) == count * len(names)


def test_filtered_lines_are_collected(harness: Harness, tmp_path: Path) -> None:
    """Lines with a needle go, prefixed, to one file shared by all ranks, also from a stream that is shown nowhere."""
    read_end, console = harness.pipe()
    reader = harness.reader(read_end)
    shared = str(tmp_path / "filtered")
    with harness.log_writer(console, console) as writer:
        ends = [
            writer.open_stream(rank, console=rank, prefix=f"[{rank}]:", filters=["loss", "größe"], filter_path=shared)
            for rank in range(2)
        ]
        os.write(ends[0], "loss 1\nnothing\ngröße 2\nlo".encode())
        assert len(tail_now(writer, [0])[0]) > 0
        os.write(ends[1], b"loss 3\n")
        tail_now(writer, [1])
        os.write(ends[0], b"ss 4")
        for end in ends:
            os.close(end)
        assert writer.drain_now(10) == []
        assert read(shared).decode() == "[0]:loss 1\n[0]:größe 2\n[1]:loss 3\n[0]:loss 4\n"
    assert reader.all() == b"[1]:loss 3\n"


def test_a_tail_contains_everything_that_was_readable(harness: Harness) -> None:
    """A tail is the end of the stream, including what was in the pipe at the request; at most 64 KiB."""
    _, console = harness.pipe()
    with harness.log_writer(console, console) as writer:
        end = writer.open_stream((1, 0, "stderr"))
        os.write(end, b"a" * 200_000)
        os.write(end, b"the cause\nno newline")
        tail = tail_now(writer, [(1, 0, "stderr"), "unknown"])
        assert list(tail) == [(1, 0, "stderr")]
        assert len(tail[(1, 0, "stderr")]) == 1 << 16
        assert tail[(1, 0, "stderr")].endswith(b"aaathe cause\nno newline")
        os.close(end)
        assert writer.drain_now(10) == []
        assert tail_now(writer, [(1, 0, "stderr")]) == tail
        writer.close_stream_duplicates([(1, 0, "stderr")])
        assert tail_now(writer, [(1, 0, "stderr")]) == {}


def test_a_drain_ends_in_time(harness: Harness, tmp_path: Path) -> None:
    """A drain waits for the streams in its request, and reports those that had not ended at its timeout."""
    _, console = harness.pipe()
    with harness.log_writer(console, console) as writer:
        first = writer.open_stream("first", path=str(tmp_path / "first"))
        second = writer.open_stream("second")
        os.write(first, b"kept\n")
        assert writer.drain_now(0.02) == ["first", "second"]
        assert read(tmp_path / "first") == b"kept\n"
        os.close(first)
        assert writer.drain_now(10, keys=["first"]) == []
        os.close(second)


def test_output_in_the_pipe_of_a_closed_stream_reaches_the_file(harness: Harness, tmp_path: Path) -> None:
    """Even though a process still holds the write end open."""
    _, console = harness.pipe()
    with harness.log_writer(console, console) as writer:
        end = writer.open_stream("w", path=str(tmp_path / "log"))
        os.write(end, b"last line\n")
        writer.close_stream_duplicates(["w"])
        writer.drain_now(10)
        assert read(tmp_path / "log") == b"last line\n"
        os.close(end)
        os.close(writer.open_stream("w", path=str(tmp_path / "log")))  # the key and the file can be used again


def test_an_existing_file_is_appended_to(harness: Harness, tmp_path: Path) -> None:
    """A log file is never truncated."""
    (tmp_path / "log").write_bytes(b"before\n")
    _, console = harness.pipe()
    with harness.log_writer(console, console) as writer:
        end = writer.open_stream("w", path=str(tmp_path / "log"))
        os.write(end, b"after\n")
        os.close(end)
        writer.drain_now(10)
    assert read(tmp_path / "log") == b"before\nafter\n"


def test_the_file_exists_before_the_first_line(harness: Harness, tmp_path: Path) -> None:
    """A worker that prints nothing has an empty log, not a missing one."""
    _, console = harness.pipe()
    with harness.log_writer(console, console) as writer:
        os.close(writer.open_stream("w", path=str(tmp_path / "log")))
        writer.drain_now(10)
        assert read(tmp_path / "log") == b""


def test_lines_of_the_agent_after_a_drain_come_after_all_output(harness: Harness) -> None:
    read_end, console = harness.pipe()
    reader = harness.reader(read_end)
    with harness.log_writer(console, console) as writer:
        end = writer.open_stream("w", console=1)
        writer.print("starting")
        os.write(end, b"worker\n" * 1000 + b"unfinished")
        os.close(end)
        writer.drain_now(10)
        writer.print("report line 1\nreport line 2 – ü")
    shown = reader.all().decode().split("\n")
    assert sorted(shown[:-4]) == ["starting"] + ["worker"] * 1000
    assert shown[-4:] == ["unfinished", "report line 1", "report line 2 – ü", ""]


def test_a_very_long_line_is_not_mixed_with_others(harness: Harness) -> None:
    """A line over the maximum comes in pieces; another worker's line in between gets its own line."""
    read_end, console = harness.pipe()
    reader = harness.reader(read_end)
    with harness.log_writer(console, console) as writer:
        long, short = (writer.open_stream(key, console=1, prefix=f"{key}:") for key in ("L", "S"))
        piece = b"x" * 700_000
        os.write(long, piece)
        tail_now(writer, ["L"])
        os.write(long, piece)
        tail_now(writer, ["L"])
        os.write(short, b"hello\n")
        tail_now(writer, ["S"])
        os.write(long, b"rest\n")
        os.close(long)
        os.close(short)
        writer.drain_now(10)
    first, second, third, end = reader.all().split(b"\n")
    assert (first[:2], second, third[:2], third[-4:], end) == (b"L:", b"S:hello", b"L:", b"rest", b"")
    assert first[2:] + third[2:-4] == piece + piece


def test_the_log_writer_ignores_stop_signals(harness: Harness) -> None:
    """And it leads its own session."""
    read_end, console = harness.pipe()
    reader = harness.reader(read_end)
    with harness.log_writer(console, console) as writer:
        tail_now(writer, [])
        assert os.getsid(writer.pid) == writer.pid
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            os.kill(writer.pid, number)
        writer.print("still here")
    assert reader.all() == b"still here\n"


def test_output_is_captured_without_standard_streams(tmp_path: Path) -> None:
    """With stdout and stderr closed, no log file gets their descriptors."""
    code = (
        "import os, sys\n"
        "from tenax._logs.writer import LogWriter\n"
        "writer = LogWriter()\n"
        "writer.start()\n"
        "end = writer.open_stream('w', path=sys.argv[1], console=1)\n"
        "writer.print('not visible')\n"
        "os.write(end, b'kept\\n')\n"
        "os.close(end)\n"
        "writer.drain_now(10)\n"
        "writer.finish(1.0)\n"
    )
    command = ["sh", "-c", 'exec "$0" -c "$1" "$2" >&- 2>&-', sys.executable, code, str(tmp_path / "log")]
    assert subprocess.run(command, timeout=30, check=False).returncode == 0
    assert read(tmp_path / "log") == b"kept\n"
