"""Waits until a file in a folder watch, appears or is removed, or a process exits. Does not poll."""

from __future__ import annotations

import ctypes
import os
import select
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import pytest

from kit.processes import TIMEOUT_S

T = TypeVar("T")

_MODIFIED, _MOVED_FROM, _MOVED_TO, _CREATED, _DELETED = 0x2, 0x40, 0x80, 0x100, 0x200
_libc = ctypes.CDLL(None, use_errno=True)


class FileWatch:
    def __init__(self, folders: Iterable[Path], pids: Iterable[int] = ()) -> None:
        self._inotify = _libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        if self._inotify < 0:
            raise OSError(ctypes.get_errno(), f"inotify: {os.strerror(ctypes.get_errno())}")
        self._processes: list[int] = []
        for folder in folders:
            mask = _MODIFIED | _MOVED_FROM | _MOVED_TO | _CREATED | _DELETED
            if _libc.inotify_add_watch(self._inotify, os.fsencode(folder), mask) < 0:
                raise OSError(ctypes.get_errno(), f"{folder}: {os.strerror(ctypes.get_errno())}")
        for pid in pids:
            try:
                self._processes.append(os.pidfd_open(pid))
            except ProcessLookupError:
                continue  # it had exited before, so nothing watch

    def wait(self, timeout_s: float) -> bool:
        """Return True if something changed since the last call, False on a timeout."""
        ready, _, _ = select.select([self._inotify, *self._processes], [], [], max(0.0, timeout_s))
        for handle in ready:
            if handle == self._inotify:
                os.read(handle, 1 << 16)
            else:  # a process exits once
                self._processes.remove(handle)
                os.close(handle)
        return bool(ready)

    def __enter__(self) -> FileWatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in (self._inotify, *self._processes):
            os.close(handle)


def until(
    condition: Callable[[], T],
    what: str | Callable[[], str],
    folders: Iterable[Path],
    pids: Iterable[int] = (),
    timeout_s: float = TIMEOUT_S,
) -> T:
    """Wait until the condition is true, and return its value. Fails the test on a timeout.

    It is checked again when a file in these folders watch or one of these processes exits.
    """
    deadline = time.monotonic() + timeout_s
    with FileWatch(folders, pids) as watch:
        while not (found := condition()):
            if not watch.wait(deadline - time.monotonic()):
                pytest.fail(f"timed out after {timeout_s:g} s: {what if isinstance(what, str) else what()}")
    return found
