"""TailLog: TorchElastic's class that follows files."""

from __future__ import annotations

import io
import threading
from pathlib import Path

from tenax.multiprocessing.tail_log import TailLog, tail_logfile


def set_event() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


class Text(io.StringIO):
    """A destination that can be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.grew = threading.Condition()

    def write(self, text: str) -> int:
        with self.grew:
            count = super().write(text)
            self.grew.notify_all()
            return count

    def wait_for(self, text: str) -> None:
        with self.grew:
            assert self.grew.wait_for(lambda: text in self.getvalue(), 10), self.getvalue()


def test_lines_are_copied_while_the_file_grows(tmp_path: Path) -> None:
    """Only whole lines, with their rank's prefix; a file may appear late."""
    dst = Text()
    tail = TailLog("trainer", {0: str(tmp_path / "0"), 1: str(tmp_path / "1")}, dst, interval_sec=0.001).start()
    with open(tmp_path / "0", "wb", buffering=0) as file:
        file.write(b"one\ntw")
        dst.wait_for("[trainer0]:one\n")
        file.write(b"o\n")
        dst.wait_for("[trainer0]:two\n")
        (tmp_path / "1").write_bytes(b"late\n")
        dst.wait_for("[trainer1]:late\n")
        assert not tail.stopped()
        file.write(b"three\nunfinished")
        tail.stop()
    assert tail.stopped()
    assert (
        dst.getvalue() == "[trainer0]:one\n[trainer0]:two\n[trainer1]:late\n[trainer0]:three\n[trainer0]:unfinished\n"
    )


def test_stop_copies_everything_that_is_in_the_files(tmp_path: Path) -> None:
    """Each line once, whole, in order."""
    dst = io.StringIO()
    files = {rank: str(tmp_path / str(rank)) for rank in range(4)}
    tail = TailLog("t", files, dst, log_line_prefixes={rank: f"{rank} " for rank in files}, interval_sec=0.001).start()
    for rank, path in files.items():
        Path(path).write_text("".join(f"{rank}-{number}\n" for number in range(2000)))
    tail.stop()
    lines = dst.getvalue().splitlines()
    assert len(lines) == 8000
    for rank in files:
        mine = [line for line in lines if line.startswith(f"{rank} ")]
        assert mine == [f"{rank} {rank}-{number}" for number in range(2000)]


def test_stop_returns_without_files(tmp_path: Path) -> None:
    """Also for a TailLog that was never started."""
    dst = io.StringIO()
    tail = TailLog("t", {0: str(tmp_path / "never")}, dst, interval_sec=60).start()
    tail.stop()
    TailLog("t", {0: str(tmp_path / "never")}, dst).stop()
    assert dst.getvalue() == ""


def test_a_filter_selects_lines(tmp_path: Path) -> None:
    """It gets lines with their newline; without a filter every line is copied."""
    (tmp_path / "log").write_bytes(b"a\nb\n\xff\nlast")
    chosen, everything = io.StringIO(), io.StringIO()
    tail_logfile("", str(tmp_path / "log"), chosen, set_event(), 1.0, lambda line: line in ("b\n", "last\n"))
    tail_logfile("H:", str(tmp_path / "log"), everything, set_event(), 1.0)
    assert chosen.getvalue() == "b\nlast\n"
    assert everything.getvalue() == "H:a\nH:b\nH:\\xff\nH:last\n"
