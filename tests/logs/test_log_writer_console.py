"""The scribe and consoles that are slow, stuck, gone, or a terminal."""

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

from .conftest import Stage, read, wait_until

pytestmark = pytest.mark.process

NUMBERS = "import sys\nfor i in range(int(sys.argv[1])): sys.stdout.write('%09d %s\\n' % (i, 'y' * 70))"
LINE_BYTES = 81
NOT_SHOWN = re.compile(rb"tenax: (\d+) lines? \((\d+) bytes\) w[a-z]+ not shown: the terminal did not take them\n")


def start_worker(end: int, count: int) -> subprocess.Popen[bytes]:
    worker = subprocess.Popen([sys.executable, "-c", NUMBERS, str(count)], stdout=end)
    os.close(end)
    return worker


def numbers(count: int) -> bytes:
    return b"".join(b"%09d %s\n" % (number, b"y" * 70) for number in range(count))


def pause(seconds: float) -> None:
    select.select([], [], [], seconds)


def open_terminal(columns: int = 80) -> tuple[int, int]:
    """A terminal that changes nothing on the way, and its other side."""
    master, terminal = pty.openpty()
    tty.setraw(terminal)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    return master, terminal


def check_stuck(stage: Stage, read_end: int, console: int, log: Path) -> None:
    """A worker's prints go on into the file; the reader that comes late learns how many lines it missed, and where."""
    count = 30_000
    with stage.scribe(console, console, stuck_after_s=0.05, queue_bytes=1 << 16) as scribe:
        worker = start_worker(scribe.open_stream("w", path=str(log), console=1), count)
        assert worker.wait(30) == 0
        losses = scribe.drain_now(10)
        assert losses.file_bytes == {}
        assert losses.still_open == ()
        assert losses.console_lines > 1000
        assert read(log) == numbers(count)
        reader = stage.reader(read_end)
        reader.wait_for(lambda data: NOT_SHOWN.search(data) is not None)
        scribe.say("it flows again")
        scribe.finish(10)
    expected = missing = 0
    for line in reader.all().removesuffix(b"it flows again\n").splitlines(keepends=True):
        gap = NOT_SHOWN.fullmatch(line)
        if gap is None:
            assert line == b"%09d %s\n" % (expected, b"y" * 70)
            expected += 1
        else:  # a device may take a little, now and then, before it is read
            assert int(gap[2]) == int(gap[1]) * LINE_BYTES
            missing += int(gap[1])
            expected += int(gap[1])
    assert expected == count
    assert missing == losses.console_lines


def test_a_stuck_pipe_never_blocks_a_worker(stage: Stage, tmp_path: Path) -> None:
    """Nobody reads the console: the worker ends all the same, its file is whole, the gap is counted and said."""
    read_end, console = stage.pipe()
    check_stuck(stage, read_end, console, tmp_path / "log")


def test_a_stuck_terminal_never_blocks_a_worker(stage: Stage, tmp_path: Path) -> None:
    """The same with a terminal that takes nothing, as after Ctrl-S."""
    master, terminal = open_terminal()
    check_stuck(stage, master, terminal, tmp_path / "log")


def test_a_slow_console_gets_every_line(stage: Stage) -> None:
    """A reader that takes a page now and then slows the workers down and loses nothing."""
    read_end, console = stage.pipe()
    count = 4000
    with stage.scribe(console, console, stuck_after_s=0.2, queue_bytes=1 << 16) as scribe:
        worker = start_worker(scribe.open_stream("w", console=1), count)
        shown = b""
        while len(shown) < count * LINE_BYTES:
            pause(0.003)
            shown += os.read(read_end, 4096)
        assert worker.wait(10) == 0
        assert scribe.drain_now(10).is_complete
    assert shown == numbers(count)


def test_a_console_that_takes_a_few_bytes_is_not_stuck(stage: Stage) -> None:
    """A reader slower than a page per window, which no write of ours can show, still counts as moving."""
    read_end, console = stage.pipe()
    count = 8000
    with stage.scribe(console, console, stuck_after_s=0.3, queue_bytes=1 << 16) as scribe:
        worker = start_worker(scribe.open_stream("w", console=1), count)
        shown = b""
        for _ in range(12):
            pause(0.06)
            shown += os.read(read_end, 50)
        while len(shown) < count * LINE_BYTES:
            shown += os.read(read_end, 1 << 16)
        assert worker.wait(10) == 0
        assert scribe.drain_now(10).is_complete
    assert shown == numbers(count)


def test_a_slow_console_is_served_to_the_end(stage: Stage) -> None:
    """After the last worker, finish waits for a console that moves, however long it takes, and for no other."""
    read_end, console = stage.pipe()
    count = 8000
    with stage.scribe(console, console, queue_bytes=1 << 22) as scribe:
        worker = start_worker(scribe.open_stream("w", console=1), count)
        assert worker.wait(10) == 0
        assert scribe.drain_now(10).is_complete
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
        reader = stage.reader(os.dup(slow.stdout.fileno()))
        assert scribe.finish(0.3).is_complete
    slow.wait(10)
    slow.stdout.close()
    assert reader.all() == numbers(count)


def test_a_stuck_console_does_not_delay_the_end(stage: Stage) -> None:
    """A console that takes nothing is given up after the time that finish was told, and counted."""
    _, console = stage.pipe()
    with stage.scribe(console, console) as scribe:
        end = scribe.open_stream("w", console=1)
        os.write(end, b"z" * 99 + b"\n")
        os.write(end, (b"z" * 99 + b"\n") * 4000)
        os.close(end)
        assert scribe.drain_now(10).is_complete
        before = os.times().elapsed
        losses = scribe.finish(0.1)
        assert os.times().elapsed - before < 1.0
        assert losses.console_bytes > 100_000


def test_standard_error_tells_what_a_stuck_standard_output_did_not_take(stage: Stage) -> None:
    """When only standard output is stuck, standard error says so when it begins, and how much it was at the end."""
    (out_read, out), (err_read, err) = stage.pipe(), stage.pipe()
    err_reader = stage.reader(err_read)
    count = 30_000
    with stage.scribe(out, err, stuck_after_s=0.05, queue_bytes=1 << 16) as scribe:
        worker = start_worker(scribe.open_stream("w", console=1), count)
        assert worker.wait(30) == 0
        scribe.drain_now(10)
        losses = scribe.finish(0.05)
    os.set_blocking(out_read, False)
    shown = os.read(out_read, 1 << 20)
    assert numbers(count).startswith(shown)
    # On a busy machine standard output may seem stuck before it is: then sentences of ours are not shown either.
    ours = losses.console_bytes - (count * LINE_BYTES - len(shown))
    assert 0 <= ours < 10 * LINE_BYTES
    *began, at_the_end = err_reader.all().decode().splitlines()
    assert set(began) == {"tenax: standard output takes no more: its lines are dropped and counted until it does."}
    assert at_the_end == (
        f"tenax: {losses.console_lines} lines ({losses.console_bytes} bytes) were not shown: "
        "the terminal did not take them"
    )


def test_a_second_request_to_stop_hurries_the_end(stage: Stage) -> None:
    """When the descriptor given to finish becomes readable, nothing is waited for any more."""
    _, console = stage.pipe()
    hurry_read, hurry_write = stage.pipe()
    with stage.scribe(console, console) as scribe:
        end = scribe.open_stream("w", console=1)
        os.write(end, b"z" * 300_000 + b"\n")
        os.close(end)
        scribe.drain_now(10)
        os.write(hurry_write, b"!")
        before = os.times().elapsed
        scribe.finish(20, interrupt_descriptor=hurry_read)
        assert os.times().elapsed - before < 1.0


def test_a_reader_that_went_away(stage: Stage, tmp_path: Path) -> None:
    """As with ``| head -1``: workers go on into their files, and standard error says what was not shown."""
    (out_read, out), (err_read, err) = stage.pipe(), stage.pipe()
    err_reader = stage.reader(err_read)
    with stage.scribe(out, err) as scribe:
        stage.close(out_read)
        worker = start_worker(scribe.open_stream("w", path=str(tmp_path / "log"), console=1), 5000)
        assert worker.wait(30) == 0
        losses = scribe.drain_now(10)
        assert losses.still_open == ()
        scribe.finish(1)
    assert read(tmp_path / "log") == numbers(5000)
    assert err_reader.all() == b"tenax: 5000 lines (405000 bytes) were not shown: Broken pipe\n"


def test_a_console_on_a_full_device(stage: Stage, tmp_path: Path) -> None:
    """Standard output on a full disk costs the lines shown there, not the worker and not the files."""
    err_read, err = stage.pipe()
    full = os.open("/dev/full", os.O_WRONLY)
    err_reader = stage.reader(err_read)
    with stage.scribe(full, err) as scribe:
        worker = start_worker(scribe.open_stream("w", path=str(tmp_path / "log"), console=1), 100)
        assert worker.wait(30) == 0
        scribe.drain_now(10)
        losses = scribe.finish(1)
    assert losses.console_lines == 100
    assert read(tmp_path / "log") == numbers(100)
    assert err_reader.all() == b"tenax: 100 lines (8100 bytes) were not shown: No space left on device\n"


def test_a_non_blocking_console(stage: Stage) -> None:
    """A console that someone else made non-blocking loses nothing either."""
    read_end, console = stage.pipe()
    os.set_blocking(console, False)
    with stage.scribe(console, console) as scribe:
        worker = start_worker(scribe.open_stream("w", console=1), 5000)
        worker.wait(30)
        reader = stage.reader(read_end)
        assert scribe.finish(5).is_complete
    assert reader.all() == numbers(5000)


def test_progress_bars_are_alive_on_a_terminal(stage: Stage) -> None:
    """On a terminal a bar is shown before its line ends; another worker's line erases it instead of joining it."""
    master, terminal = open_terminal()
    reader = stage.reader(master)
    with stage.scribe(terminal, terminal) as scribe:
        bar, other = (scribe.open_stream(key, console=1, prefix=f"{key}:") for key in ("a", "b"))
        os.write(bar, b"\r10%")
        os.write(bar, b"\r20%")
        reader.wait_for(lambda data: b"10%" in data)
        os.write(other, b"line\n")
        reader.wait_for(lambda data: b"line" in data)
        os.write(bar, b"\r30%\n")
        os.close(bar)
        os.close(other)
        scribe.drain_now(10)
    assert reader.all().endswith(b"a:10%\r\x1b[Kb:line\na:20%\ra:30%\n") or reader.all().endswith(
        b"a:10%\r\r\x1b[Kb:line\na:20%\ra:30%\n"
    )


def test_progress_bars_do_not_tear_lines_in_a_pipe(stage: Stage) -> None:
    """Where two workers share a pipe, a bar waits for its line's end; alone it is shown as it goes."""
    read_end, console = stage.pipe()
    reader = stage.reader(read_end)
    with stage.scribe(console, console) as scribe:
        bar, other = (scribe.open_stream(key, console=1, prefix=f"{key}:") for key in ("a", "b"))
        os.write(bar, b"10%\r20%\r30%")
        scribe.tail_now(["a"], 10)
        os.write(other, b"line\r\n")
        os.close(other)
        reader.wait_for(lambda data: data == b"b:line\r\n")
        scribe.drain_now(10, keys=["b"])
        os.write(bar, b"\r40%")
        reader.wait_for(lambda data: b"30%\r" in data)
        os.write(bar, b"\n")
        os.close(bar)
        scribe.drain_now(10)
    assert reader.all() == b"b:line\r\na:10%\ra:20%\ra:30%\ra:40%\n"


def test_the_live_line_stays_below_everything(stage: Stage) -> None:
    """The live line is drawn on a terminal, erased before other output, drawn again after it, and gone at the end."""
    master, terminal = open_terminal(columns=21)
    reader = stage.reader(master)
    with stage.scribe(terminal, terminal) as scribe:
        end = scribe.open_stream("w", console=1)
        scribe.live("waiting for 2 of 4 nodes to join")
        reader.wait_for(lambda data: data == b"waiting for 2 of 4 n")
        os.write(end, b"hello\n")
        reader.wait_for(lambda data: data.endswith(b"\r\x1b[Khello\nwaiting for 2 of 4 n"))
        scribe.live("running")
        reader.wait_for(lambda data: data.endswith(b"\r\x1b[Krunning"))
        scribe.say("one worker failed")
        reader.wait_for(lambda data: data.endswith(b"\r\x1b[Kone worker failed\nrunning"))
        scribe.live("")
        reader.wait_for(lambda data: data.endswith(b"\r\x1b[K"))
        scribe.live("ending")
        reader.wait_for(lambda data: data.endswith(b"ending"))
        os.close(end)
        scribe.finish(1)
    assert reader.all().endswith(b"ending\r\x1b[K")


def test_no_live_line_in_a_file(stage: Stage, tmp_path: Path) -> None:
    """Where standard error is no terminal there is no live line."""
    out = os.open(tmp_path / "console", os.O_WRONLY | os.O_CREAT)
    with stage.scribe(out, out) as scribe:
        scribe.live("never seen")
        scribe.say("seen")
    assert read(tmp_path / "console") == b"seen\n"


def test_an_idle_scribe_sleeps(stage: Stage) -> None:
    """With nothing to do the scribe does not wake up at all."""
    _, console = stage.pipe()
    with stage.scribe(console, console) as scribe:
        end = scribe.open_stream("w", console=1)
        os.write(end, b"line\n")
        scribe.tail_now(["w"], 10)

        def switches() -> int:
            return sum(
                int(line.split()[1])
                for task in os.listdir(f"/proc/{scribe.pid}/task")
                for line in read(f"/proc/{scribe.pid}/task/{task}/status").decode().splitlines()
                if line.startswith("voluntary_ctxt")
            )

        wait_until(lambda: (first := switches()) == (pause(0.05), switches())[1] and first > 0)
        before = switches()
        pause(0.3)
        assert switches() == before
        os.close(end)


def test_a_worker_that_has_the_console_to_itself_can_ask(stage: Stage) -> None:
    """Without whole lines, half a line is shown at once (a prompt), and a line of ours does not run into it."""
    read_end, console = stage.pipe()
    reader = stage.reader(read_end)
    with stage.scribe(console, console) as scribe:
        end = scribe.open_stream("w", console=1, whole_lines=False)
        os.write(end, b"(Pdb) ")
        reader.wait_for(lambda data: data == b"(Pdb) ")
        scribe.say("tenax: hello")
        reader.wait_for(lambda data: data == b"(Pdb) \ntenax: hello\n")
        os.write(end, b"42\n")
        os.close(end)
        scribe.drain_now(10)
    assert reader.all() == b"(Pdb) \ntenax: hello\n42\n"


# --- what comes before the line that announces the end ----------------------------------------------------------------


@contextmanager
def _frozen(pid: int) -> Iterator[None]:
    """The process is stopped meanwhile, so that everything that is sent to it arrives together."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_the_last_line_follows_what_workers_wrote_before_it(stage: Stage) -> None:
    """Output that is still in a pipe when the last line arrives is shown above that line."""
    read_end, console = stage.pipe()
    reader = stage.reader(read_end)
    with stage.scribe(console, console) as scribe:
        ends = [scribe.open_stream(number, console=1) for number in range(4)]
        scribe.tail_now([0], 10)  # by now the process has the pipes
        with _frozen(scribe.pid):
            for end in ends:
                os.write(end, b"output\n")
            scribe.say("tenax: a line", after_output=True)
        reader.wait_for(lambda data: b"a line" in data)
        for end in ends:
            os.close(end)
    assert reader.all() == b"output\n" * 4 + b"tenax: a line\n"


def test_the_last_line_waits_for_the_other_console_and_the_files(stage: Stage, tmp_path: Path) -> None:
    """Standard output that is read slowly is delivered before a line after all output appears on standard error."""
    out_end, out = stage.pipe()
    err_end, err = stage.pipe()
    fcntl.fcntl(out, fcntl.F_SETPIPE_SZ, 4096)
    with stage.scribe(out, err, stuck_after_s=20.0) as scribe:
        end = scribe.open_stream("w", path=str(tmp_path / "log"), console=1)
        os.write(end, b"x" * 19_999 + b"\n")
        os.close(end)
        scribe.say("the end", after_output=True)
        scribe.say("and what comes after it")
        assert scribe.drain_now(10).is_complete
        assert not select.select([err_end], [], [], 0.05)[0], "it did not wait for standard output"
        shown = stage.reader(out_end)
        shown.wait_for(lambda data: len(data) == 20_000)
        told = stage.reader(err_end)
        told.wait_for(lambda data: data == b"the end\nand what comes after it\n")
        assert len(read(tmp_path / "log")) == 20_000


def test_a_console_that_takes_nothing_does_not_hold_the_last_line_for_ever(stage: Stage) -> None:
    """Nobody reads standard output: the line on standard error comes once that console counts as stuck."""
    _out_end, out = stage.pipe()
    err_end, err = stage.pipe()
    told = stage.reader(err_end)
    with stage.scribe(out, err, stuck_after_s=0.1) as scribe:
        end = scribe.open_stream("w", console=1)
        worker = start_worker(end, 5000)
        scribe.drain_now(10)
        assert worker.wait(10) == 0
        scribe.say("the end", after_output=True)
        told.wait_for(lambda data: b"the end\n" in data)


def test_half_a_line_is_shown_before_the_last_line_although_its_pipe_is_still_open(stage: Stage) -> None:
    """A process that holds a worker's pipe open does not keep the worker's unfinished last line back."""
    read_end, console = stage.pipe()
    reader = stage.reader(read_end)
    with stage.scribe(console, console) as scribe:
        end = scribe.open_stream("w", console=1)
        os.write(end, b"no newline")
        scribe.close_stream_duplicates(["w"])
        scribe.say("the end", after_output=True)
        reader.wait_for(lambda data: b"the end" in data)
        os.close(end)
    assert reader.all() == b"no newline\nthe end\n"
