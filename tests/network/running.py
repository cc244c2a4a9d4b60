"""A program on a host, with its output in two files, so that it never blocks on an unread pipe."""

from __future__ import annotations

import signal
import struct
import subprocess
import time
from pathlib import Path

import pytest

from kit.jobs import Done, ended

from .file_watch import TIMEOUT_S, FileWatch


class Running:
    def __init__(self, process: subprocess.Popen[bytes], name: str, out: Path, err: Path, clock: Path | None) -> None:
        self.process = process
        self.pid = process.pid  # the program's: the wrapper commands use exec
        self.name = name
        self._out = out
        self._err = err
        self._clock = clock
        self._lines_read = 0

    @property
    def out(self) -> str:
        return self._out.read_text(errors="backslashreplace")

    @property
    def err(self) -> str:
        return self._err.read_text(errors="backslashreplace")

    @property
    def is_over(self) -> bool:
        return self.process.poll() is not None

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def line(self, timeout_s: float = TIMEOUT_S) -> str:
        """Wait for the next complete line of stdout and return it."""
        deadline = time.monotonic() + timeout_s
        with FileWatch([self._out.parent], [self.pid]) as watch:
            while True:
                is_over = self.is_over
                lines = self.out.split("\n")[:-1]
                if len(lines) > self._lines_read:
                    self._lines_read += 1
                    return lines[self._lines_read - 1]
                if is_over or not watch.wait(deadline - time.monotonic()):
                    pytest.fail(f"did not print line {self._lines_read + 1}\n{self!r}")

    def until_printed(self, text: str, timeout_s: float = TIMEOUT_S) -> None:
        """Wait until stdout or stderr contains ``text``."""
        deadline = time.monotonic() + timeout_s
        with FileWatch({self._out.parent, self._err.parent}, [self.pid]) as watch:
            while True:
                is_over = self.is_over
                if text in self.err or text in self.out:
                    return
                if is_over or not watch.wait(deadline - time.monotonic()):
                    pytest.fail(f"did not print {text!r}\n{self!r}")

    def wait(self, timeout_s: float = TIMEOUT_S) -> Done:
        """Wait until it exits."""
        if not ended(self.process, timeout_s):
            pytest.fail(f"still running after {timeout_s:g} s\n{self!r}")
        return Done(self.process.wait(), self.out, self.err)

    def set_skew(self, seconds: float) -> None:
        """Shift the wall clock of the program and its children. It must have been started with ``skew_s``."""
        if self._clock is None:
            raise RuntimeError("this program uses the machine's clock; start it with skew_s")
        with self._clock.open("r+b") as file:  # mapped by the programs, so do not replace it
            file.write(struct.pack("=q", round(seconds * 1e9)))

    def __repr__(self) -> str:
        state = f"ended with {self.process.returncode}" if self.is_over else "running"
        return f"{self.name} (pid {self.pid}, {state})\n--- stdout\n{self.out}\n--- stderr\n{self.err}"
