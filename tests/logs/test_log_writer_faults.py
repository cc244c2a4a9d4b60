"""The log writer under faults: it is killed, the agent dies or is stopped, the disk is full or hangs."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tenax._logs.writer import LogWriter, LogWriterLost

from .conftest import Harness, is_gone, kill, read, tail_now, wait_until

pytestmark = pytest.mark.process

# An agent in its own process. It writes the pids of log writer and worker to descriptor 3, then waits.
AGENT = """
import os, subprocess, sys
from tenax._logs.writer import LogWriter
log, worker_code = sys.argv[1:]
writer = LogWriter()
writer.start()
end = writer.open_stream("w", path=log, console=1, prefix="P:")
worker = subprocess.Popen([sys.executable, "-c", worker_code], stdout=end, stdin=0, stderr=subprocess.DEVNULL)
os.close(end)
answers = []
writer.tail([], answers.append)
writer.wait_for(lambda: answers, 10)
os.write(3, f"{writer.pid} {worker.pid}\\n".encode())
os.close(3)
writer.wait_for(lambda: False, 60)
"""
PRINT_ON_REQUEST = "import sys; sys.stdin.readline(); sys.stdout.write(('x' * 79 + '\\n') * 40000)"
PRINT_AND_WAIT = "import sys; sys.stdin.readline(); print('last', end='', flush=True); sys.stdin.readline()"
PRINT_FOREVER = "while True: print('x' * 79)"


class Agent:
    def __init__(self, harness: Harness, log: Path, console: int, worker_code: str) -> None:
        answer_read, answer_write = os.pipe()
        stdin_read, self.stdin = os.pipe()
        saved = os.dup(3) if os.path.exists("/proc/self/fd/3") else -1
        os.dup2(answer_write, 3)
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", AGENT, str(log), worker_code],
                stdin=stdin_read,
                stdout=console,
                stderr=console,
                pass_fds=[3],
            )
        finally:
            if saved >= 0:
                os.dup2(saved, 3)
                os.close(saved)
            else:
                os.close(3)
        os.close(answer_write)
        os.close(stdin_read)
        with open(answer_read) as answers:
            self.writer_pid, self.worker_pid = map(int, answers.readline().split())

    def close_stdin(self) -> None:
        if self.stdin >= 0:
            os.close(self.stdin)
            self.stdin = -1

    def close(self) -> None:
        self.close_stdin()
        kill(self.process.pid, signal.SIGCONT)
        self.process.kill()
        self.process.wait(10)
        kill(self.worker_pid)
        kill(self.writer_pid)


def test_a_killed_log_writer_is_replaced(harness: Harness, tmp_path: Path) -> None:
    """The worker does not notice, and everything in its pipe is in the file, once."""
    read_end, console = harness.pipe()
    reader = harness.reader(read_end)
    with harness.log_writer(console, console) as writer:
        end = writer.open_stream("w", path=str(tmp_path / "log"), console=1, prefix="P:")
        os.write(end, b"before\n")
        assert tail_now(writer, ["w"]) == {"w": b"before\n"}
        wait_until(lambda: (tmp_path / "log").exists() and read(tmp_path / "log") == b"before\n")
        reader.wait_for(lambda data: data == b"P:before\n")
        first_pid = writer.pid
        os.kill(first_pid, signal.SIGKILL)
        assert is_gone(first_pid, 10)
        os.write(end, b"meanwhile\n")  # SIGPIPE or EPIPE if the pipe had no read end
        assert writer.wait_for(lambda: writer.pid != first_pid, 10)
        os.write(end, b"after\n")
        assert tail_now(writer, ["w"]) == {"w": b"before\nmeanwhile\nafter\n"}
        os.close(end)
        assert writer.drain_now(10) == []
    assert read(tmp_path / "log") == b"before\nmeanwhile\nafter\n"
    shown = reader.all().decode().splitlines()
    assert [line for line in shown if line.startswith("P:")] == ["P:before", "P:meanwhile", "P:after"]
    assert [line for line in shown if not line.startswith("P:")] == [
        "tenax: the log writer died and was restarted; lines that it held in memory are lost"
    ]


def test_a_log_writer_killed_under_load_loses_only_what_it_held(harness: Harness, tmp_path: Path) -> None:
    """The worker succeeds; the file has contiguous parts of its output, in order, up to the end."""
    _, console = harness.pipe()
    with harness.log_writer(console, console) as writer:
        end = writer.open_stream("w", path=str(tmp_path / "log"))
        code = "for i in range(300000): print('%09d %s' % (i, 'y' * 30))"
        worker = subprocess.Popen([sys.executable, "-c", code], stdout=end)
        os.close(end)
        wait_until(lambda: (tmp_path / "log").exists() and os.path.getsize(tmp_path / "log") > 100_000)
        first_pid = writer.pid
        os.kill(first_pid, signal.SIGKILL)
        assert writer.wait_for(lambda: writer.pid != first_pid, 10)
        assert worker.wait(30) == 0
        assert writer.drain_now(10) == []
    lines = read(tmp_path / "log").split(b"\n")
    assert lines.pop() == b""
    numbers = [int(line[:9]) for line in lines if len(line) == 40 and line[:9].isdigit()]
    assert len(numbers) > len(lines) - 2  # at most one line is cut where the first log writer died
    assert numbers == sorted(set(numbers))
    assert numbers[0] == 0
    assert numbers[-1] == 299_999


def test_a_log_writer_killed_during_finish_is_replaced(harness: Harness, tmp_path: Path) -> None:
    """The pipes are still read to their end."""
    _, console = harness.pipe()
    with harness.log_writer(console, console) as writer:
        end = writer.open_stream("w", path=str(tmp_path / "log"))
        tail_now(writer, [])
        os.kill(writer.pid, signal.SIGSTOP)
        os.write(end, b"the last line\n")
        os.close(end)
        os.kill(writer.pid, signal.SIGKILL)
        writer.finish(1)
    assert read(tmp_path / "log") == b"the last line\n"


class DiesAtTheSecondStart(LogWriter):
    """Its second process dies before it gets all that the first one had."""

    starts = 0

    def start(self) -> None:
        super().start()
        self.starts += 1
        if self.starts == 2:
            os.kill(self.pid, signal.SIGKILL)
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)


def test_a_log_writer_that_dies_while_it_is_restarted_gets_each_stream_once(harness: Harness, tmp_path: Path) -> None:
    """Two streams with one pipe would each get a part of the output."""
    _, console = harness.pipe()
    with harness.log_writer(console, console, kind=DiesAtTheSecondStart) as writer:
        ends = [writer.open_stream(key, path=str(tmp_path / str(key))) for key in range(2)]
        tail_now(writer, [])
        os.kill(writer.pid, signal.SIGKILL)
        assert writer.wait_for(lambda: writer.starts == 3, 10)  # type: ignore[attr-defined]
        for key, end in enumerate(ends):
            os.write(end, b"line\n")
            log = tmp_path / str(key)
            wait_until(lambda: log.exists() and read(log) == b"line\n")  # noqa: B023 - called at once
            assert tail_now(writer, [key]) == {key: b"line\n"}
            os.close(end)


def test_a_log_writer_that_dies_repeatedly_is_given_up(harness: Harness) -> None:
    """The agent gets an error instead of an endless series of processes."""
    _, console = harness.pipe()

    def kill_each(writer: LogWriter) -> None:
        while True:
            pid = writer.pid
            os.kill(pid, signal.SIGKILL)
            assert writer.wait_for(lambda: writer.pid != pid, 10)  # noqa: B023 - called at once

    with harness.log_writer(console, console) as writer, pytest.raises(LogWriterLost, match="died 9 times"):
        kill_each(writer)


def test_a_stopped_log_writer_does_not_block_the_agent(harness: Harness) -> None:
    """The agent's own lines are dropped and counted, which is reported once the log writer continues."""
    read_end, console = harness.pipe()
    reader = harness.reader(read_end)
    with harness.log_writer(console, console) as writer:
        tail_now(writer, [])
        os.kill(writer.pid, signal.SIGSTOP)
        before = time.monotonic()
        for number in range(7000):
            writer.print(f"{number:06} " + "z" * 993)
        writer.live("alive")
        assert time.monotonic() - before < 5
        os.kill(writer.pid, signal.SIGCONT)
        assert writer.wait_for(lambda: not writer.wants_to_write, 10)
        writer.print("flowing")
        writer.finish(5)
    shown = reader.all().decode().splitlines()
    numbers = [int(line[:6]) for line in shown if line[:6].isdigit()]
    assert numbers == list(range(len(numbers)))
    assert len(numbers) < 7000
    assert shown[-2:] == [
        f"tenax: {7000 - len(numbers)} of tenax's own lines were not shown: too many at once",
        "flowing",
    ]


def test_a_stopped_agent_does_not_block_a_worker(harness: Harness, tmp_path: Path) -> None:
    """With the agent stopped, 3 MB of output reach the file and the console, and the worker exits."""
    read_end, console = harness.pipe()
    reader = harness.reader(read_end)
    agent = Agent(harness, tmp_path / "log", console, PRINT_ON_REQUEST)
    try:
        os.kill(agent.process.pid, signal.SIGSTOP)
        os.write(agent.stdin, b"go\n")
        shown = reader.wait_for(lambda data: data.count(b"\n") == 40_000)
        assert shown == (b"P:" + b"x" * 79 + b"\n") * 40_000
        wait_until(lambda: read(tmp_path / "log") == shown.replace(b"P:", b""))
        wait_until(lambda: b"\nState:\tZ" in read(f"/proc/{agent.worker_pid}/status"))
    finally:
        agent.close()


@pytest.mark.parametrize("console_is_read", [True, False])
def test_the_log_writer_exits_with_the_agent(harness: Harness, tmp_path: Path, console_is_read: bool) -> None:
    """Within 0.8 s of the agent's SIGKILL, even if a worker still writes and the console is stuck."""
    read_end, console = harness.pipe()
    reader = harness.reader(read_end) if console_is_read else None
    agent = Agent(harness, tmp_path / "log", console, PRINT_FOREVER)
    try:
        wait_until(lambda: (tmp_path / "log").exists() and os.path.getsize(tmp_path / "log") > 20_000)
        agent.process.kill()
        before = time.monotonic()
        assert is_gone(agent.writer_pid, 0.8), "the log writer outlived its agent"
        assert time.monotonic() - before < 0.8
    finally:
        agent.close()
        harness.close(console)
    if reader is not None:
        assert set(reader.all().split(b"\n")[:-1]) == {b"P:" + b"x" * 79}


def test_the_last_lines_of_a_dead_agents_worker_are_kept(harness: Harness, tmp_path: Path) -> None:
    """Output from before the deaths of agent and worker is in the file, and the log writer exits at once."""
    read_end, console = harness.pipe()
    reader = harness.reader(read_end)
    agent = Agent(harness, tmp_path / "log", console, PRINT_AND_WAIT)
    try:
        os.kill(agent.writer_pid, signal.SIGSTOP)
        os.write(agent.stdin, b"go\n")
        agent.process.kill()
        agent.process.wait(10)
        agent.close_stdin()
        assert is_gone(agent.worker_pid, 10)
        os.kill(agent.writer_pid, signal.SIGCONT)
        assert is_gone(agent.writer_pid, 0.3)
    finally:
        agent.close()
        harness.close(console)
    assert read(tmp_path / "log") == b"last"
    assert reader.all() == b"P:last\n"


def test_the_last_lines_are_kept_if_the_agent_dies_before_it_gets_an_answer(harness: Harness, tmp_path: Path) -> None:
    """Then the log writer learns of the death from a failed answer, and not from the end of its channel."""
    _, console = harness.pipe()
    with harness.log_writer(console, console) as writer:
        end = writer.open_stream("w", path=str(tmp_path / "log"))
        tail_now(writer, [])
        os.kill(writer.pid, signal.SIGSTOP)
        os.write(end, b"the last line\n")
        os.close(end)
        writer.tail([], lambda _: None)
        with socket.socket(fileno=os.dup(writer.fileno())) as channel:
            channel.shutdown(socket.SHUT_RD)
        os.kill(writer.pid, signal.SIGCONT)
        assert is_gone(writer.pid, 10)
        assert read(tmp_path / "log") == b"the last line\n"


def test_a_hanging_disk_blocks_no_worker(harness: Harness, tmp_path: Path) -> None:
    """A file that cannot be opened in time (here: a FIFO without a reader) loses only its own bytes."""
    os.mkfifo(tmp_path / "hangs")
    read_end, console = harness.pipe()
    reader = harness.reader(read_end)
    with harness.log_writer(console, console, stuck_after_s=0.05, queue_bytes=1 << 16) as writer:
        end = writer.open_stream("w", path=str(tmp_path / "hangs"), console=1)
        worker = subprocess.Popen([sys.executable, "-c", "for i in range(40000): print('x' * 79)"], stdout=end)
        os.close(end)
        assert worker.wait(30) == 0
        before = time.monotonic()
        writer.drain_now(0.1)
        writer.finish(0.1)
        assert time.monotonic() - before < 2
    assert reader.all().count(b"x" * 79 + b"\n") == 40_000


def test_the_log_writer_exits_with_the_agent_although_a_disk_hangs(harness: Harness, tmp_path: Path) -> None:
    """Within 0.8 s."""
    os.mkfifo(tmp_path / "hangs")
    read_end, console = harness.pipe()
    reader = harness.reader(read_end)
    agent = Agent(harness, tmp_path / "hangs", console, PRINT_FOREVER)
    try:
        reader.wait_for(lambda data: len(data) > 10_000)
        agent.process.kill()
        assert is_gone(agent.writer_pid, 0.8), "the log writer outlived its agent"
    finally:
        agent.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m,nr_inodes=20", "tmpfs", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"could not mount a small disk: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_fails_no_worker(harness: Harness, small_disk: Path) -> None:
    """The worker succeeds; the file has a marked gap; the loss is reported at once and at the end."""
    read_end, console = harness.pipe()
    reader = harness.reader(read_end)
    log = small_disk / "log"
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"b" * 500_000)
    with harness.log_writer(console, console) as writer:
        end = writer.open_stream("w", path=str(log))
        worker = subprocess.Popen([sys.executable, "-c", "for i in range(20000): print('%079d' % i)"], stdout=end)
        assert worker.wait(30) == 0
        tail_now(writer, ["w"])
        reader.wait_for(lambda data: b"\n" in data)
        ballast.unlink()
        os.write(end, b"after the flood\n")
        os.close(end)
        assert writer.drain_now(10) == []
        kept = read(log)
        writer.finish(1)
    everything = b"".join(b"%079d\n" % number for number in range(20000)) + b"after the flood\n"
    # A full tmpfs may accept a little more a moment later, on another core: then there are several gaps.
    first, *gaps = re.split(rb"\[tenax: (\d+) bytes are missing here: No space left on device\]\n", kept)
    lost = sum(map(int, gaps[::2]))
    assert lost > 0
    at = 0
    for piece, missing in zip([first, *gaps[1::2]], [*map(int, gaps[::2]), 0], strict=True):
        text = piece if everything.startswith(piece, at) else piece.removesuffix(b"\n")  # a cut line gets a newline
        assert everything.startswith(text, at), (at, piece[:200], piece[-200:])
        at += len(text) + missing
    assert at == len(everything)
    assert kept.endswith(b"after the flood\n")
    assert reader.all().decode().splitlines() == [
        f"tenax: could not write {log}: No space left on device; the workers continue, and lost bytes are counted",
        f"tenax: {lost} bytes are missing in {log}: No space left on device",
    ]


def test_a_log_file_is_created_once_the_disk_has_space(harness: Harness, small_disk: Path) -> None:
    """Until then the worker is not affected, and the file begins with a mark of the gap."""
    _, console = harness.pipe()
    others = []
    while True:
        try:
            others.append(small_disk / f"other{len(others)}")
            others[-1].touch()
        except OSError:
            break
    log = small_disk / "log"
    with harness.log_writer(console, console) as writer:
        end = writer.open_stream("w", path=str(log))
        os.write(end, b"lost\n")
        writer.drain_now(0.02)
        assert not log.exists()
        others[0].unlink()
        os.write(end, b"kept\n")
        os.close(end)
        assert writer.drain_now(10) == []
        assert read(log) == b"[tenax: 5 bytes are missing here: No space left on device]\nkept\n"


def test_a_log_file_that_cannot_be_opened_is_reported_as_a_loss(harness: Harness, tmp_path: Path) -> None:
    """A directory, or a path in a missing directory."""
    read_end, console = harness.pipe()
    reader = harness.reader(read_end)
    with harness.log_writer(console, console) as writer:
        for key, path in (("a", tmp_path), ("b", tmp_path / "missing" / "log")):
            end = writer.open_stream(key, path=str(path))
            os.write(end, b"lost\n")
            os.close(end)
        assert writer.drain_now(10) == []
        writer.finish(1)
    shown = reader.all().decode()
    assert f"tenax: could not write {tmp_path}: Is a directory;" in shown
    assert f"tenax: 10 bytes are missing in {tmp_path} and 1 more: Is a directory" in shown
