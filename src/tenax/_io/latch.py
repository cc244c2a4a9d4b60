"""Latch: is opened once, by one thread; others wait for it.

An exception that a signal handler raises during ``wait`` leaves no lock behind. It may do so in a
``threading.Condition``, which acquires its lock in Python code.
"""

from __future__ import annotations

from _thread import allocate_lock


class Latch:
    """See the module."""

    def __init__(self) -> None:
        self.is_open = False
        self._lock = allocate_lock()
        self._lock.acquire()

    def open(self) -> None:
        if not self.is_open:
            self.is_open = True
            self._lock.release()

    def wait(self, timeout: float = -1) -> None:
        if not self.is_open and self._lock.acquire(timeout=timeout):
            self._lock.release()  # for another thread that waits
