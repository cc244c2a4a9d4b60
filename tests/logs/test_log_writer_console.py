"""The log writer with consoles that are slow, stuck, closed, or a terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from .conftest import Harness, read, tail_now, wait_until

pytestmark = pytest.mark.process

NUMBERS = "import sys\nfor i in range(int(sys.argv[1])): sys.stdout.write('%09d %s\\n' % (i, 'y' * 70))"
LINE_BYTES = 81
NOT_SHOWN = re.compile(rb"tenax: (\d+) lines? \((\d+) bytes\) w[a-z]+ not shown: the terminal did not accept them\n")


def start_worker(end: int, count: int) -> subprocess.Popen[bytes]:
    worker = subprocess.Popen([sys.executable, "-c", NUMBERS, str(count)], stdout=end)
    os.close(end)
    return worker


def numbers(count: int) -> bytes:
    return b"".join(b"%09d %s\n" % (number, b"y" * 70) for number in range(count))


def pause(seconds: float) -> None:
    select.select([], [], [], seconds)


def open_terminal(columns: int = 80) -> tuple[int, int]:
    """Return a raw pseudo-terminal: its master and its slave."""
    master, terminal = pty.openpty()
    tty.setraw(terminal)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    return master, terminal


def check_stuck(harness: Harness, read_end: int, console: int, log: Path) -> None:
    """Check that the worker's output is in its file, and that a late reader gets the number of lost lines."""
    count = 30_000
    with harness.log_writer(console, console, stuck_after_s=0.05, queue_bytes=1 << 16) as writer:
        worker = start_worker(writer.open_stream("w", path=str(log), console=1), count)
        assert worker.wait(30) == 0
        assert writer.drain_now(60) == []
        assert read(log) == numbers(count)
        reader = harness.reader(read_end)
        reader.wait_for(lambda data: NOT_SHOWN.search(data) is not None)
        writer.print("it flows again")
        writer.finish(10)
    expected = missing = 0
    for line in reader.all().removesuffix(b"it flows again\n").splitlines(keepends=True):
        gap = NOT_SHOWN.fullmatch(line)
        if gap is None:
            assert line == b"%09d %s\n" % (expected, b"y" * 70)
            expected += 1
        else:  # a device may accept a little now and then before it is read
            assert int(gap[2]) == int(gap[1]) * LINE_BYTES
            missing += int(gap[1])
            expected += int(gap[1])
    assert expected == count
    assert missing > 1000


def test_a_stuck_pipe_never_blocks_a_worker(harness: Harness, tmp_path: Path) -> None:
    """No process reads the console: the worker exits, its file is complete, the gap is counted and reported."""
    read_end, console = harness.pipe()
    check_stuck(harness, read_end, console, tmp_path / "log")


def test_a_stuck_terminal_never_blocks_a_worker(harness: Harness, tmp_path: Path) -> None:
    """The same with a terminal that accepts nothing, as after Ctrl-S."""
    master, terminal = open_terminal()
    check_stuck(harness, master, terminal, tmp_path / "log")


def test_a_slow_console_gets_every_line(harness: Harness) -> None:
    """A reader that reads a page now and then slows the workers down, and nothing is lost."""
    read_end, console = harness.pipe()
    count = 4000
    with harness.log_writer(console, console, stuck_after_s=0.2, queue_bytes=1 << 16) as writer:
        worker = start_worker(writer.open_stream("w", console=1), count)
        shown = b""
        while len(shown) < count * LINE_BYTES:
            pause(0.003)
            shown += os.read(read_end, 4096)
        assert worker.wait(10) == 0
        assert writer.drain_now(10) == []
    assert shown == numbers(count)


def test_a_console_that_accepts_a_few_bytes_is_not_stuck(harness: Harness) -> None:
    """A reader slower than a page per window, for which no write returns, still counts as progress."""
    read_end, console = harness.pipe()
    count = 8000
    with harness.log_writer(console, console, stuck_after_s=0.3, queue_bytes=1 << 16) as writer:
        worker = start_worker(writer.open_stream("w", console=1), count)
        shown = b""
        for _ in range(12):
            pause(0.06)
            shown += os.read(read_end, 50)
        while len(shown) < count * LINE_BYTES:
            shown += os.read(read_end, 1 << 16)
        assert worker.wait(10) == 0
        assert writer.drain_now(10) == []
    assert shown == numbers(count)


def test_finish_waits_for_a_slow_console(harness: Harness) -> None:
    """As long as it makes progress, however long that takes."""
    read_end, console = harness.pipe()
    count = 8000
    with harness.log_writer(console, console, queue_bytes=1 << 22) as writer:
        worker = start_worker(writer.open_stream("w", console=1), count)
        assert worker.wait(10) == 0
        assert writer.drain_now(10) == []
        slow = subprocess.Popen(
            [
                sys.executable,
                "-c",
                "import os,select,sys\nwhile d := os.read(0, 8192):\n os.write(1, d); select.select([],[],[],0.01)",
            ],
            stdin=read_end,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # not the console, which it reads
        )
        assert slow.stdout is not None
        assert select.select([slow.stdout], [], [], 30)[0], "it has started"
        reader = harness.reader(os.dup(slow.stdout.fileno()))
        writer.finish(0.3)
    slow.wait(10)
    slow.stdout.close()
    assert reader.all() == numbers(count)


def test_a_stuck_console_does_not_delay_the_end(harness: Harness) -> None:
    """finish() gives it up after its timeout."""
    read_end, console = harness.pipe()
    with harness.log_writer(console, console) as writer:
        end = writer.open_stream("w", console=1)
        os.write(end, b"z" * 99 + b"\n")
        os.write(end, (b"z" * 99 + b"\n") * 4000)
        os.close(end)
        assert writer.drain_now(10) == []
        before = os.times().elapsed
        writer.finish(0.1)
        assert os.times().elapsed - before < 1.0
    os.set_blocking(read_end, False)
    assert len(os.read(read_end, 1 << 20)) < 300_000


def test_stderr_reports_what_a_stuck_stdout_lost(harness: Harness) -> None:
    """A line when stdout becomes stuck, and the amount at the end."""
    (out_read, out), (err_read, err) = harness.pipe(), harness.pipe()
    err_reader = harness.reader(err_read)
    count = 30_000
    with harness.log_writer(out, err, stuck_after_s=0.05, queue_bytes=1 << 16) as writer:
        worker = start_worker(writer.open_stream("w", console=1), count)
        assert worker.wait(30) == 0
        writer.drain_now(10)
        writer.finish(0.05)
    os.set_blocking(out_read, False)
    shown = os.read(out_read, 1 << 20)
    assert numbers(count).startswith(shown)
    *began, at_the_end = err_reader.all().splitlines(keepends=True)
    assert set(began) == {
        b"tenax: stdout is blocked: its lines are dropped and counted until it accepts output again\n"
    }
    lost = NOT_SHOWN.fullmatch(at_the_end)
    assert lost is not None
    # On a busy machine stdout may count as stuck too early: then lines of tenax are not shown either.
    assert 0 <= int(lost[1]) - (count - shown.count(b"\n")) < 10
    assert 0 <= int(lost[2]) - (count * LINE_BYTES - len(shown)) < 10 * LINE_BYTES


def test_a_second_stop_request_ends_the_wait(harness: Harness) -> None:
    """finish() returns soon after its interrupt descriptor becomes readable."""
    _, console = harness.pipe()
    interrupt_read, interrupt_write = harness.pipe()
    with harness.log_writer(console, console) as writer:
        end = writer.open_stream("w", console=1)
        os.write(end, b"z" * 300_000 + b"\n")
        os.close(end)
        writer.drain_now(10)
        os.write(interrupt_write, b"!")
        before = os.times().elapsed
        writer.finish(20, interrupt_descriptor=interrupt_read)
        assert os.times().elapsed - before < 1.0


def test_a_closed_reader_does_not_affect_workers(harness: Harness, tmp_path: Path) -> None:
    """As with ``| head -1``: the files are complete, and stderr reports what was not shown."""
    (out_read, out), (err_read, err) = harness.pipe(), harness.pipe()
    err_reader = harness.reader(err_read)
    with harness.log_writer(out, err) as writer:
        harness.close(out_read)
        worker = start_worker(writer.open_stream("w", path=str(tmp_path / "log"), console=1), 5000)
        assert worker.wait(30) == 0
        assert writer.drain_now(10) == []
        writer.finish(1)
    assert read(tmp_path / "log") == numbers(5000)
    assert err_reader.all() == b"tenax: 5000 lines (405000 bytes) were not shown: Broken pipe\n"


def test_a_lost_line_counts_once_although_it_arrives_in_pieces(harness: Harness, tmp_path: Path) -> None:
    """As ``python -u`` writes the arguments of ``print``: a piece at a time."""
    err_read, err = harness.pipe()
    full = os.open("/dev/full", os.O_WRONLY)
    err_reader = harness.reader(err_read)
    log = tmp_path / "log"
    with harness.log_writer(full, err) as writer:
        end = writer.open_stream("w", path=str(log), console=1, whole_lines=False)
        written = 0
        for piece in (b"loss", b" ", b"0.1", b"\n", b"loss ", b"0.2\n"):
            written += os.write(end, piece)
            wait_until(lambda size=written: log.exists() and log.stat().st_size == size)  # type: ignore[misc]
        os.close(end)
        writer.drain_now(10)
        writer.finish(1)
    assert err_reader.all() == b"tenax: 2 lines (18 bytes) were not shown: No space left on device\n"


def test_a_full_console_device_loses_only_its_own_lines(harness: Harness, tmp_path: Path) -> None:
    """The worker and the files are not affected."""
    err_read, err = harness.pipe()
    full = os.open("/dev/full", os.O_WRONLY)
    err_reader = harness.reader(err_read)
    with harness.log_writer(full, err) as writer:
        worker = start_worker(writer.open_stream("w", path=str(tmp_path / "log"), console=1), 100)
        assert worker.wait(30) == 0
        writer.drain_now(10)
        writer.finish(1)
    assert read(tmp_path / "log") == numbers(100)
    assert err_reader.all() == b"tenax: 100 lines (8100 bytes) were not shown: No space left on device\n"


def test_a_non_blocking_console_loses_nothing(harness: Harness) -> None:
    """Another process that shares it may have made it non-blocking."""
    read_end, console = harness.pipe()
    os.set_blocking(console, False)
    with harness.log_writer(console, console) as writer:
        worker = start_worker(writer.open_stream("w", console=1), 5000)
        worker.wait(30)
        reader = harness.reader(read_end)
        writer.finish(5)
    assert reader.all() == numbers(5000)


def test_progress_bars_are_shown_live_on_a_terminal(harness: Harness) -> None:
    """A bar is shown before its line ends; another worker's line erases it instead of continuing it."""
    master, terminal = open_terminal()
    reader = harness.reader(master)
    with harness.log_writer(terminal, terminal) as writer:
        bar, other = (writer.open_stream(key, console=1, prefix=f"{key}:") for key in ("a", "b"))
        os.write(bar, b"\r10%")
        os.write(bar, b"\r20%")
        reader.wait_for(lambda data: b"10%" in data)
        os.write(other, b"line\n")
        reader.wait_for(lambda data: b"line" in data)
        os.write(bar, b"\r30%\n")
        os.close(bar)
        os.close(other)
        writer.drain_now(10)
    assert reader.all().endswith(b"a:10%\r\x1b[Kb:line\na:20%\ra:30%\n") or reader.all().endswith(
        b"a:10%\r\r\x1b[Kb:line\na:20%\ra:30%\n"
    )


def test_progress_bars_do_not_mix_with_lines_in_a_pipe(harness: Harness) -> None:
    """With two workers, a bar is shown when its line ends; with one, at once."""
    read_end, console = harness.pipe()
    reader = harness.reader(read_end)
    with harness.log_writer(console, console) as writer:
        bar, other = (writer.open_stream(key, console=1, prefix=f"{key}:") for key in ("a", "b"))
        os.write(bar, b"10%\r20%\r30%")
        tail_now(writer, ["a"])
        os.write(other, b"line\r\n")
        os.close(other)
        reader.wait_for(lambda data: data == b"b:line\r\n")
        writer.drain_now(10, keys=["b"])
        os.write(bar, b"\r40%")
        reader.wait_for(lambda data: b"30%\r" in data)
        os.write(bar, b"\n")
        os.close(bar)
        writer.drain_now(10)
    assert reader.all() == b"b:line\r\na:10%\ra:20%\ra:30%\ra:40%\n"


def test_the_live_line_stays_below_all_output(harness: Harness) -> None:
    """It is erased before other output, drawn again after it, and removed at the end."""
    master, terminal = open_terminal(columns=21)
    reader = harness.reader(master)
    with harness.log_writer(terminal, terminal) as writer:
        end = writer.open_stream("w", console=1)
        writer.live("waiting for 2 of 4 nodes to join")
        reader.wait_for(lambda data: data == b"waiting for 2 of 4 n")
        os.write(end, b"hello\n")
        reader.wait_for(lambda data: data.endswith(b"\r\x1b[Khello\nwaiting for 2 of 4 n"))
        writer.live("running")
        reader.wait_for(lambda data: data.endswith(b"\r\x1b[Krunning"))
        writer.print("one worker failed")
        reader.wait_for(lambda data: data.endswith(b"\r\x1b[Kone worker failed\nrunning"))
        writer.live("")
        reader.wait_for(lambda data: data.endswith(b"\r\x1b[K"))
        writer.live("ending")
        reader.wait_for(lambda data: data.endswith(b"ending"))
        os.close(end)
        writer.finish(1)
    assert reader.all().endswith(b"ending\r\x1b[K")


def test_a_file_gets_no_live_line(harness: Harness, tmp_path: Path) -> None:
    out = os.open(tmp_path / "console", os.O_WRONLY | os.O_CREAT)
    with harness.log_writer(out, out) as writer:
        writer.live("never seen")
        writer.print("seen")
    assert read(tmp_path / "console") == b"seen\n"


def test_an_idle_log_writer_does_not_wake_up(harness: Harness) -> None:
    _, console = harness.pipe()
    with harness.log_writer(console, console) as writer:
        end = writer.open_stream("w", console=1)
        os.write(end, b"line\n")
        tail_now(writer, ["w"])

        def switches() -> int:
            return sum(
                int(line.split()[1])
                for task in os.listdir(f"/proc/{writer.pid}/task")
                for line in read(f"/proc/{writer.pid}/task/{task}/status").decode().splitlines()
                if line.startswith("voluntary_ctxt")
            )

        wait_until(lambda: (first := switches()) == (pause(0.05), switches())[1] and first > 0)
        before = switches()
        pause(0.3)
        assert switches() == before
        os.close(end)


def test_a_worker_alone_on_the_console_can_show_a_prompt(harness: Harness) -> None:
    """Without whole_lines, a partial line is shown at once, and a line of tenax does not continue it."""
    read_end, console = harness.pipe()
    reader = harness.reader(read_end)
    with harness.log_writer(console, console) as writer:
        end = writer.open_stream("w", console=1, whole_lines=False)
        os.write(end, b"(Pdb) ")
        reader.wait_for(lambda data: data == b"(Pdb) ")
        writer.print("tenax: hello")
        reader.wait_for(lambda data: data == b"(Pdb) \ntenax: hello\n")
        os.write(end, b"42\n")
        os.close(end)
        writer.drain_now(10)
    assert reader.all() == b"(Pdb) \ntenax: hello\n42\n"


# --- the last line ----------------------------------------------------------------------------------------------------


@contextmanager
def _frozen(pid: int) -> Iterator[None]:
    """Stop the process meanwhile, so that all messages to it arrive together."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_the_last_line_follows_all_earlier_output(harness: Harness) -> None:
    """Output that is still in a pipe when the last line arrives is shown above it."""
    read_end, console = harness.pipe()
    reader = harness.reader(read_end)
    with harness.log_writer(console, console) as writer:
        ends = [writer.open_stream(number, console=1) for number in range(4)]
        tail_now(writer, [0])  # by now the process has the pipes
        with _frozen(writer.pid):
            for end in ends:
                os.write(end, b"output\n")
            writer.print("tenax: a line", after_output=True)
        reader.wait_for(lambda data: b"a line" in data)
        for end in ends:
            os.close(end)
    assert reader.all() == b"output\n" * 4 + b"tenax: a line\n"


def test_the_last_line_waits_for_the_other_console_and_the_files(harness: Harness, tmp_path: Path) -> None:
    """A slowly read stdout gets its output before the last line appears on stderr."""
    out_end, out = harness.pipe()
    err_end, err = harness.pipe()
    fcntl.fcntl(out, fcntl.F_SETPIPE_SZ, 4096)
    with harness.log_writer(out, err, stuck_after_s=20.0) as writer:
        end = writer.open_stream("w", path=str(tmp_path / "log"), console=1)
        os.write(end, b"x" * 19_999 + b"\n")
        os.close(end)
        writer.print("the end", after_output=True)
        writer.print("and the line after it")
        assert writer.drain_now(10) == []
        assert not select.select([err_end], [], [], 0.05)[0], "it did not wait for stdout"
        shown = harness.reader(out_end)
        shown.wait_for(lambda data: len(data) == 20_000)
        messages = harness.reader(err_end)
        messages.wait_for(lambda data: data == b"the end\nand the line after it\n")
        assert len(read(tmp_path / "log")) == 20_000


def test_a_stuck_console_delays_the_last_line_only_until_it_counts_as_stuck(harness: Harness) -> None:
    _out_end, out = harness.pipe()
    err_end, err = harness.pipe()
    messages = harness.reader(err_end)
    with harness.log_writer(out, err, stuck_after_s=0.1) as writer:
        end = writer.open_stream("w", console=1)
        worker = start_worker(end, 5000)
        writer.drain_now(10)
        assert worker.wait(10) == 0
        writer.print("the end", after_output=True)
        messages.wait_for(lambda data: b"the end\n" in data)


def test_a_partial_line_of_an_open_pipe_is_shown_before_the_last_line(harness: Harness) -> None:
    """A process that holds a worker's pipe open does not hold back the worker's partial line."""
    read_end, console = harness.pipe()
    reader = harness.reader(read_end)
    with harness.log_writer(console, console) as writer:
        end = writer.open_stream("w", console=1)
        os.write(end, b"no newline")
        writer.close_stream_duplicates(["w"])
        writer.print("the end", after_output=True)
        reader.wait_for(lambda data: b"the end" in data)
        os.close(end)
    assert reader.all() == b"no newline\nthe end\n"
