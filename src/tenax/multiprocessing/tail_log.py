"""TorchElastic's ``TailLog``: follows files and copies their lines, with a header, to one text stream.

For launchers that use it directly; tenax itself shows worker output through pipes (``tenax._logs.writer``). Polls the
files every ``interval_sec``.

1. Copies only whole lines. An unfinished last line is copied at the end, with a newline added.
2. Lines of several files never mix: one follower writes to a destination at a time.
3. Everything in a file when ``stop`` is called has been copied when ``stop`` returns.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TextIO
from weakref import WeakKeyDictionary

_READ_BYTES = 1 << 20
_locks: WeakKeyDictionary[TextIO, threading.Lock] = WeakKeyDictionary()
_shared_lock = threading.Lock()  # guards ``_locks``, and is the lock of destinations that cannot be its keys


def tail_logfile(
    header: str,
    file: str,
    dst: TextIO,
    finished: threading.Event,
    interval_sec: float,
    log_line_filter: Callable[[str], bool] | None = None,
) -> None:
    """Copy the file's lines to ``dst`` until ``finished`` is set and the file is read to its end.

    The file may be created later; if it never is, nothing is copied. Without a filter, every line is copied.
    """
    while not os.path.exists(file) and not finished.wait(interval_sec):
        pass
    if not os.path.exists(file):
        return
    with open(file, "rb") as source:
        rest = b""
        is_last_read = False
        while not is_last_read:
            is_last_read = finished.is_set()  # before reading, so that everything written before it is read
            while data := source.read(_READ_BYTES):
                *lines, rest = (rest + data).split(b"\n")
                _write_lines(lines, header, dst, log_line_filter)
            if not is_last_read:
                finished.wait(interval_sec)
        if rest:
            _write_lines([rest], header, dst, log_line_filter)


def _write_lines(lines: list[bytes], header: str, dst: TextIO, log_line_filter: Callable[[str], bool] | None) -> None:
    decoded = (line.decode("utf-8", "backslashreplace") + "\n" for line in lines)
    text = "".join(header + line for line in decoded if log_line_filter is None or log_line_filter(line))
    if text:
        with _lock_of(dst):
            dst.write(text)
            dst.flush()


def _lock_of(dst: TextIO) -> threading.Lock:
    try:
        with _shared_lock:
            return _locks.setdefault(dst, threading.Lock())
    except TypeError:  # not weakly referenceable, or not hashable
        return _shared_lock


class TailLog:
    """Follows one file per local rank, each in its own thread, until stopped."""

    def __init__(
        self,
        name: str,
        log_files: dict[int, str],
        dst: TextIO,
        log_line_prefixes: dict[int, str] | None = None,
        interval_sec: float = 0.1,
        log_line_filter: Callable[[str], bool] = lambda _: True,
    ) -> None:
        self._finished = threading.Event()
        self._is_stopped = False
        prefixes = {rank: f"[{name}{rank}]:" for rank in log_files} | (log_line_prefixes or {})
        rest = (dst, self._finished, interval_sec, log_line_filter)
        self._threads = [
            threading.Thread(
                target=tail_logfile, name=f"tail-{name}-{rank}", args=(prefixes[rank], file, *rest), daemon=True
            )
            for rank, file in log_files.items()
        ]

    def start(self) -> TailLog:
        for thread in self._threads:
            thread.start()
        return self

    def stop(self) -> None:
        """Copy the remaining lines and join the threads."""
        self._finished.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        self._is_stopped = True

    def stopped(self) -> bool:
        return self._is_stopped
