"""Tail log: follow files that others write and copy their lines, with a header, to one text stream.

tenax does not follow files itself: worker output reaches the console through pipes (``tenax._logs.writer``). This
module
is for launchers that use TorchElastic's ``TailLog`` directly. It looks at the files every ``interval_sec``, because
that is what its users ask for by name.

1. Only whole lines are copied, except for an unfinished last one when the following ends; it then gets its newline.
2. Lines of several files never mix: a destination is written by one follower at a time.
3. All that a file holds when ``stop`` is called has been copied when ``stop`` returns.
"""

from __future__ import annotations

import os
import threading
from weakref import WeakKeyDictionary

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import BinaryIO, TextIO

_READ_BYTES = 1 << 20
_locks: WeakKeyDictionary[TextIO, threading.Lock] = WeakKeyDictionary()
_lock_for_others = threading.Lock()  # makes the locks above, and stands in where a destination cannot have its own


def tail_logfile(
    header: str,
    file: str,
    dst: TextIO,
    finished: threading.Event,
    interval_sec: float,
    log_line_filter: Callable[[str], bool] | None = None,
) -> None:
    """Copy the file's lines to ``dst`` until ``finished`` is set and the file is read to its end.

    The file may appear later; if it never does, nothing is copied. Without a filter every line is copied.
    """
    while not os.path.exists(file):
        if finished.wait(interval_sec):
            break
    if not os.path.exists(file):
        return
    with open(file, "rb") as source:
        rest = b""
        is_last_look = False
        while not is_last_look:
            is_last_look = finished.is_set()  # before reading: what was written before it was set is read
            rest = _copy_whole_lines(source, rest, header, dst, log_line_filter)
            if not is_last_look:
                finished.wait(interval_sec)
        if rest:
            _write_lines([rest], header, dst, log_line_filter)


def _copy_whole_lines(
    source: BinaryIO, rest: bytes, header: str, dst: TextIO, log_line_filter: Callable[[str], bool] | None
) -> bytes:
    """Copy what is there now; returns the unfinished end."""
    while data := source.read(_READ_BYTES):
        *lines, rest = (rest + data).split(b"\n")
        if lines:
            _write_lines(lines, header, dst, log_line_filter)
    return rest


def _write_lines(lines: list[bytes], header: str, dst: TextIO, log_line_filter: Callable[[str], bool] | None) -> None:
    decoded = (line.decode("utf-8", "backslashreplace") + "\n" for line in lines)
    text = "".join(header + line for line in decoded if log_line_filter is None or log_line_filter(line))
    if text:
        with _lock_of(dst):
            dst.write(text)
            dst.flush()


def _lock_of(dst: TextIO) -> threading.Lock:
    try:
        with _lock_for_others:
            return _locks.setdefault(dst, threading.Lock())
    except TypeError:  # a destination that cannot be referred to weakly, or not hashed
        return _lock_for_others


class TailLog:
    """Follows one file per local rank, each in a thread of its own, until it is stopped."""

    def __init__(
        self,
        name: str,
        log_files: dict[int, str],
        dst: TextIO,
        log_line_prefixes: dict[int, str] | None = None,
        interval_sec: float = 0.1,
        log_line_filter: Callable[[str], bool] = lambda _: True,
    ) -> None:
        self._name = name
        self._finished = threading.Event()
        self._is_stopped = False
        prefixes = log_line_prefixes or {}
        self._threads = [
            threading.Thread(
                target=tail_logfile,
                name=f"tail-{name}-{local_rank}",
                args=(
                    prefixes.get(local_rank, f"[{name}{local_rank}]:"),
                    file,
                    dst,
                    self._finished,
                    interval_sec,
                    log_line_filter,
                ),
                daemon=True,
            )
            for local_rank, file in log_files.items()
        ]

    def start(self) -> TailLog:
        for thread in self._threads:
            thread.start()
        return self

    def stop(self) -> None:
        """Copy what is left and end the threads."""
        self._finished.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        self._is_stopped = True

    def stopped(self) -> bool:
        return self._is_stopped
