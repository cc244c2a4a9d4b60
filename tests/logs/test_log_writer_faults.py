"""The scribe on bad days: it is killed, the agent dies or stands still, the disk is full or hangs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tenax._logs.writer import LogWriter, LogWriterLost

from .conftest import Stage, is_gone, kill, read, wait_until

pytestmark = pytest.mark.process

# An agent in a process of its own. It prints the scribe's pid and the worker's on descriptor 3 and then only waits.
AGENT = """
import os, subprocess, sys
from tenax._logs.writer import LogWriter
log, worker_code = sys.argv[1:]
scribe = LogWriter()
scribe.start()
end = scribe.open_stream("w", path=log, console=1, prefix="P:")
worker = subprocess.Popen([sys.executable, "-c", worker_code], stdout=end, stdin=0, stderr=subprocess.DEVNULL)
os.close(end)
scribe.tail_now([], 10)
os.write(3, f"{scribe.pid} {worker.pid}\\n".encode())
os.close(3)
scribe.wait_for(lambda: False, 60)
"""
PRINT_WHEN_TOLD = "import sys; sys.stdin.readline(); sys.stdout.write(('x' * 79 + '\\n') * 40000)"
PRINT_AND_WAIT = "import sys; sys.stdin.readline(); print('last', end='', flush=True); sys.stdin.readline()"
PRINT_FOREVER = "while True: print('x' * 79)"


class Agent:
    def __init__(self, stage: Stage, log: Path, console: int, worker_code: str) -> None:
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
            self.scribe_pid, self.worker_pid = map(int, answers.readline().split())

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
        kill(self.scribe_pid)


def test_a_killed_scribe_is_replaced(stage: Stage, tmp_path: Path) -> None:
    """The worker writes on as if nothing had happened, and all that was in its pipe is in the file, once."""
    read_end, console = stage.pipe()
    reader = stage.reader(read_end)
    with stage.scribe(console, console) as scribe:
        end = scribe.open_stream("w", path=str(tmp_path / "log"), console=1, prefix="P:")
        os.write(end, b"before\n")
        assert scribe.tail_now(["w"], 10) == {"w": b"before\n"}
        wait_until(lambda: (tmp_path / "log").exists() and read(tmp_path / "log") == b"before\n")
        reader.wait_for(lambda data: data == b"P:before\n")
        first_pid = scribe.pid
        os.kill(first_pid, signal.SIGKILL)
        assert is_gone(first_pid, 10)
        os.write(end, b"meanwhile\n")  # would be SIGPIPE or EPIPE if nobody kept the pipe
        assert scribe.wait_for(lambda: scribe.pid != first_pid, 10)
        os.write(end, b"after\n")
        assert scribe.tail_now(["w"], 10) == {"w": b"before\nmeanwhile\nafter\n"}
        os.close(end)
        losses = scribe.drain_now(10)
        assert losses.writer_restarts == 1
    assert read(tmp_path / "log") == b"before\nmeanwhile\nafter\n"
    shown = reader.all().decode().splitlines()
    assert [line for line in shown if line.startswith("P:")] == ["P:before", "P:meanwhile", "P:after"]
    assert [line for line in shown if not line.startswith("P:")] == [
        "tenax: the process that writes the logs died and was started again; lines it held in memory are lost"
    ]


def test_a_scribe_killed_under_load_loses_only_what_it_held(stage: Stage, tmp_path: Path) -> None:
    """The worker ends well; the file holds whole stretches of its output in order, up to the very end."""
    _, console = stage.pipe()
    with stage.scribe(console, console) as scribe:
        end = scribe.open_stream("w", path=str(tmp_path / "log"))
        code = "for i in range(300000): print('%09d %s' % (i, 'y' * 30))"
        worker = subprocess.Popen([sys.executable, "-c", code], stdout=end)
        os.close(end)
        wait_until(lambda: (tmp_path / "log").exists() and os.path.getsize(tmp_path / "log") > 100_000)
        first_pid = scribe.pid
        os.kill(first_pid, signal.SIGKILL)
        assert scribe.wait_for(lambda: scribe.pid != first_pid, 10)
        assert worker.wait(30) == 0
        assert scribe.drain_now(10).still_open == ()
    lines = read(tmp_path / "log").split(b"\n")
    assert lines.pop() == b""
    numbers = [int(line[:9]) for line in lines if len(line) == 40 and line[:9].isdigit()]
    assert len(numbers) > len(lines) - 2  # one line at most is torn where the first scribe died
    assert numbers == sorted(set(numbers))
    assert numbers[0] == 0
    assert numbers[-1] == 299_999


def test_a_scribe_killed_while_it_finishes_is_replaced(stage: Stage, tmp_path: Path) -> None:
    """Even then the pipes are read to their end."""
    _, console = stage.pipe()
    with stage.scribe(console, console) as scribe:
        end = scribe.open_stream("w", path=str(tmp_path / "log"))
        scribe.tail_now([], 10)
        os.kill(scribe.pid, signal.SIGSTOP)
        os.write(end, b"the last line\n")
        os.close(end)
        os.kill(scribe.pid, signal.SIGKILL)
        scribe.finish(1)
    assert read(tmp_path / "log") == b"the last line\n"


def test_a_scribe_that_dies_again_and_again_is_given_up(stage: Stage) -> None:
    """After some deaths the agent is told, in words, instead of starting processes for ever."""
    _, console = stage.pipe()

    def kill_every_one(scribe: LogWriter) -> None:
        while True:
            pid = scribe.pid
            os.kill(pid, signal.SIGKILL)
            assert scribe.wait_for(lambda: scribe.pid != pid, 10)  # noqa: B023 - called at once

    with stage.scribe(console, console) as scribe, pytest.raises(LogWriterLost, match="died 9 times"):
        kill_every_one(scribe)


def test_a_stopped_scribe_does_not_block_the_agent(stage: Stage) -> None:
    """The agent's own lines are dropped and counted when nobody takes them, and it is said when somebody does again."""
    read_end, console = stage.pipe()
    reader = stage.reader(read_end)
    with stage.scribe(console, console) as scribe:
        scribe.tail_now([], 10)
        os.kill(scribe.pid, signal.SIGSTOP)
        before = time.monotonic()
        for number in range(7000):
            scribe.say(f"{number:06} " + "z" * 993)
        scribe.live("alive")
        assert time.monotonic() - before < 5
        os.kill(scribe.pid, signal.SIGCONT)
        assert scribe.wait_for(lambda: not scribe.wants_to_write, 10)
        scribe.say("flowing")
        losses = scribe.finish(5)
    shown = reader.all().decode().splitlines()
    numbers = [int(line[:6]) for line in shown if line[:6].isdigit()]
    assert numbers == list(range(len(numbers)))
    assert losses.own_lines == 7000 - len(numbers) > 0
    assert shown[-2:] == [
        f"tenax: {losses.own_lines} of tenax's own lines were not shown: they came too fast",
        "flowing",
    ]


def test_a_stopped_agent_does_not_block_a_worker(stage: Stage, tmp_path: Path) -> None:
    """With the agent stopped by a signal, 3 MB of output reach the file and the console, and the worker ends."""
    read_end, console = stage.pipe()
    reader = stage.reader(read_end)
    agent = Agent(stage, tmp_path / "log", console, PRINT_WHEN_TOLD)
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
def test_the_scribe_goes_with_the_agent(stage: Stage, tmp_path: Path, console_is_read: bool) -> None:
    """Within 0.8 s of the agent's SIGKILL the scribe is gone, though a worker still writes and the console is stuck."""
    read_end, console = stage.pipe()
    reader = stage.reader(read_end) if console_is_read else None
    agent = Agent(stage, tmp_path / "log", console, PRINT_FOREVER)
    try:
        wait_until(lambda: (tmp_path / "log").exists() and os.path.getsize(tmp_path / "log") > 20_000)
        agent.process.kill()
        before = time.monotonic()
        assert is_gone(agent.scribe_pid, 0.8), "the scribe outlived its agent"
        assert time.monotonic() - before < 0.8
    finally:
        agent.close()
        stage.close(console)
    if reader is not None:
        assert set(reader.all().split(b"\n")[:-1]) == {b"P:" + b"x" * 79}


def test_the_last_lines_of_a_dead_agents_worker_are_kept(stage: Stage, tmp_path: Path) -> None:
    """What a worker had written when agent and worker died is in the file, and the scribe leaves at once."""
    read_end, console = stage.pipe()
    reader = stage.reader(read_end)
    agent = Agent(stage, tmp_path / "log", console, PRINT_AND_WAIT)
    try:
        os.kill(agent.scribe_pid, signal.SIGSTOP)
        os.write(agent.stdin, b"go\n")
        agent.process.kill()
        agent.process.wait(10)
        agent.close_stdin()
        assert is_gone(agent.worker_pid, 10)
        os.kill(agent.scribe_pid, signal.SIGCONT)
        assert is_gone(agent.scribe_pid, 0.3)
    finally:
        agent.close()
        stage.close(console)
    assert read(tmp_path / "log") == b"last"
    assert reader.all() == b"P:last\n"


def test_a_disk_that_hangs_blocks_nobody(stage: Stage, tmp_path: Path) -> None:
    """A file that cannot even be opened in time (here: a FIFO without a reader) costs only its own bytes."""
    os.mkfifo(tmp_path / "hangs")
    read_end, console = stage.pipe()
    reader = stage.reader(read_end)
    with stage.scribe(console, console, stuck_after_s=0.05, queue_bytes=1 << 16) as scribe:
        end = scribe.open_stream("w", path=str(tmp_path / "hangs"), console=1)
        worker = subprocess.Popen([sys.executable, "-c", "for i in range(40000): print('x' * 79)"], stdout=end)
        os.close(end)
        assert worker.wait(30) == 0
        before = time.monotonic()
        scribe.drain_now(0.1)
        scribe.finish(0.1)
        assert time.monotonic() - before < 2
    assert reader.all().count(b"x" * 79 + b"\n") == 40_000


def test_the_scribe_goes_with_the_agent_when_a_disk_hangs(stage: Stage, tmp_path: Path) -> None:
    """Within 0.8 s, also when a log file hangs."""
    os.mkfifo(tmp_path / "hangs")
    read_end, console = stage.pipe()
    reader = stage.reader(read_end)
    agent = Agent(stage, tmp_path / "hangs", console, PRINT_FOREVER)
    try:
        reader.wait_for(lambda data: len(data) > 10_000)
        agent.process.kill()
        assert is_gone(agent.scribe_pid, 0.8), "the scribe outlived its agent"
    finally:
        agent.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m,nr_inodes=20", "tmpfs", str(place)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_fails_nobody(stage: Stage, small_disk: Path) -> None:
    """The worker ends well; the file has a marked gap; the loss is counted, said at once and said at the end."""
    read_end, console = stage.pipe()
    reader = stage.reader(read_end)
    log = small_disk / "log"
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"b" * 500_000)
    with stage.scribe(console, console) as scribe:
        end = scribe.open_stream("w", path=str(log))
        worker = subprocess.Popen([sys.executable, "-c", "for i in range(20000): print('%079d' % i)"], stdout=end)
        assert worker.wait(30) == 0
        scribe.tail_now(["w"], 10)
        reader.wait_for(lambda data: b"\n" in data)
        ballast.unlink()
        os.write(end, b"after the flood\n")
        os.close(end)
        losses = scribe.drain_now(10)
        kept = read(log)
        scribe.finish(1)
    (lost,) = losses.file_bytes.values()
    everything = b"".join(b"%079d\n" % number for number in range(20000)) + b"after the flood\n"
    # A full tmpfs may take a little more a moment later, on another core: then there is more than one gap.
    first, *gaps = re.split(rb"\[tenax: (\d+) bytes are missing here: No space left on device\]\n", kept)
    assert sum(map(int, gaps[::2])) == lost > 0
    at = 0
    for piece, missing in zip([first, *gaps[1::2]], [*map(int, gaps[::2]), 0], strict=True):
        text = piece if everything.startswith(piece, at) else piece.removesuffix(b"\n")  # a line that was cut is ended
        assert everything.startswith(text, at), (at, piece[:200], piece[-200:])
        at += len(text) + missing
    assert at == len(everything)
    assert kept.endswith(b"after the flood\n")
    assert list(losses.file_bytes) == [str(log)]
    assert reader.all().decode().splitlines() == [
        f"tenax: cannot write {log}: No space left on device. The workers go on; what cannot be kept is counted.",
        f"tenax: {lost} bytes are missing in {log}: No space left on device.",
    ]


def test_a_disk_without_room_for_another_file(stage: Stage, small_disk: Path) -> None:
    """A log that cannot even be made costs the worker nothing, and appears as soon as it can, with the gap marked."""
    _, console = stage.pipe()
    others = []
    while True:
        try:
            others.append(small_disk / f"other{len(others)}")
            others[-1].touch()
        except OSError:
            break
    log = small_disk / "log"
    with stage.scribe(console, console) as scribe:
        end = scribe.open_stream("w", path=str(log))
        os.write(end, b"lost\n")
        scribe.drain_now(0.02)
        assert not log.exists()
        others[0].unlink()
        os.write(end, b"kept\n")
        os.close(end)
        losses = scribe.drain_now(10)
        assert losses.file_bytes == {str(log): 5}
        assert read(log) == b"[tenax: 5 bytes are missing here: No space left on device]\nkept\n"


def test_a_log_that_may_not_be_written(stage: Stage, tmp_path: Path) -> None:
    """A path that is a directory or whose directory is missing is a loss like any other."""
    read_end, console = stage.pipe()
    reader = stage.reader(read_end)
    with stage.scribe(console, console) as scribe:
        for key, path in (("a", tmp_path), ("b", tmp_path / "missing" / "log")):
            end = scribe.open_stream(key, path=str(path))
            os.write(end, b"lost\n")
            os.close(end)
        losses = scribe.drain_now(10)
        assert losses.file_bytes == {str(tmp_path): 5, str(tmp_path / "missing" / "log"): 5}
        scribe.finish(1)
    shown = reader.all().decode()
    assert f"tenax: cannot write {tmp_path}: Is a directory." in shown
    assert f"tenax: 10 bytes are missing in {tmp_path} and 1 more: Is a directory." in shown
