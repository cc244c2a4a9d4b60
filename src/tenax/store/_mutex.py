"""Mutex: lets one thread at a time call a function, with a timeout.

An exception that a signal handler raises at any moment does not leave it locked. The handler may run right after the
call that acquires a lock, and a context manager written in Python would then not be entered, and never left.
"""

from __future__ import annotations

import threading
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    T = TypeVar("T")


class Busy(Exception):
    """Another thread, or a call that a signal handler has interrupted, did not return in time."""


class Mutex:
    def __init__(self) -> None:
        self._lock = threading.RLock()  # not to be entered twice, but because it knows its owner
        self._is_in_call = False

    @property
    def is_interrupted(self) -> bool:
        """Whether a call in this thread has not returned: a signal handler or a destructor has interrupted it."""
        return self._is_in_call and self._is_owned()

    def run(self, function: Callable[[], T], deadline: float | None = None) -> T:
        """Call the function, and return its result. Raises Busy at the deadline; None: there is none."""
        timeout_s = -1 if deadline is None else max(0.0, deadline - time.monotonic())
        if self.is_interrupted:
            raise Busy
        try:
            if not self._lock.acquire(timeout=timeout_s):
                raise Busy
            try:
                self._is_in_call = True
                return function()
            finally:
                self._is_in_call = False
                self._lock.release()
        except BaseException:
            if self._is_owned():  # it was raised before the inner block was entered
                self._lock.release()
            raise

    def _is_owned(self) -> bool:
        return bool(self._lock._is_owned())  # type: ignore[attr-defined]  # as threading.Condition does
