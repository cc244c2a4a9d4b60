"""Fixtures of the log tests: real pipes and terminals as standard output and standard error."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tenax._logs.writer import LogWriter


def tail_now(writer: LogWriter, keys: list[Any]) -> dict[Any, bytes]:
    """Wait for the last bytes of these streams."""
    answers: list[dict[Any, bytes]] = []
    writer.tail(keys, answers.append)
    writer.wait_for(lambda: bool(answers), 10)
    return answers[0] if answers else {}


@contextmanager
def standard_streams(out: int, err: int) -> Iterator[None]:
    """Make these descriptors 1 and 2 of this process; a log writer that is started meanwhile inherits them."""
    saved = os.dup(1), os.dup(2)
    os.dup2(out, 1)
    os.dup2(err, 2)
    try:
        yield
    finally:
        os.dup2(saved[0], 1)
        os.dup2(saved[1], 2)
        os.close(saved[0])
        os.close(saved[1])


class Reader:
    """Reads a descriptor to its end in a thread."""

    def __init__(self, descriptor: int) -> None:
        self.data = bytearray()
        self._descriptor = descriptor
        self._grew = threading.Condition()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._descriptor, 1 << 16)
            except OSError:  # a terminal whose other side is closed
                data = b""
            with self._grew:
                self.data += data
                self._grew.notify_all()
            if not data:
                break
        os.close(self._descriptor)

    def wait_for(self, condition: Callable[[bytes], bool], timeout_s: float = 10.0) -> bytes:
        with self._grew:
            assert self._grew.wait_for(lambda: condition(bytes(self.data)), timeout_s), bytes(self.data[-2000:])
            return bytes(self.data)

    def all(self) -> bytes:
        """Return everything, once all writers have closed."""
        self._thread.join(10)
        assert not self._thread.is_alive(), "another process still holds the console open"
        return bytes(self.data)


class Harness:
    """Log writers between worker pipes and consoles that the test holds."""

    def __init__(self) -> None:
        self._writers: list[LogWriter] = []
        self._descriptors: list[int] = []

    def pipe(self) -> tuple[int, int]:
        ends = os.pipe()
        self._descriptors.extend(ends)
        return ends

    @contextmanager
    def log_writer(
        self, out: int, err: int, kind: type[LogWriter] = LogWriter, **settings: float
    ) -> Iterator[LogWriter]:
        """Start a log writer with this console; close both descriptors at the end, so that a reader sees the end."""
        writer = kind(**settings)  # type: ignore[arg-type]
        self._writers.append(writer)
        with standard_streams(out, err):
            writer.start()
            try:
                yield writer
            finally:
                writer.finish(0.1)
        for descriptor in {out, err}:
            self.close(descriptor)

    def close(self, descriptor: int) -> None:
        if descriptor in self._descriptors:
            self._descriptors.remove(descriptor)
        os.close(descriptor)

    def reader(self, descriptor: int) -> Reader:
        if descriptor in self._descriptors:
            self._descriptors.remove(descriptor)
        return Reader(descriptor)

    def clean_up(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        for writer in self._writers:
            assert is_gone(writer.pid, 0.0), "a log writer still runs"


@pytest.fixture
def harness() -> Iterator[Harness]:
    harness = Harness()
    yield harness
    harness.clean_up()


def is_gone(pid: int, timeout_s: float) -> bool:
    """Return whether this process exits within the timeout."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([pidfd], [], [], timeout_s)[0])
    finally:
        os.close(pidfd)


def kill(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Poll for a condition that nothing announces: the content of a file, the state of a process."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition was not true in time"
        select.select([], [], [], 0.002)


def read(path: object) -> bytes:
    with open(str(path), "rb") as file:
        return file.read()
