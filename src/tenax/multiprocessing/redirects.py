"""Redirects: temporarily redirect this process's stdout or stderr to a file, including the output of C code.

The stream is flushed before and after, in Python and in C, so that every byte goes to the right destination. It is
always restored, also after an exception.
"""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ctypes
    from collections.abc import Iterator
    from contextlib import AbstractContextManager


def get_libc() -> ctypes.CDLL:
    """Return the C library of this process."""
    import ctypes

    return ctypes.CDLL(None)


@contextmanager
def redirect(std: str, to_file: str) -> Iterator[None]:
    """Redirect ``std`` ("stdout" or "stderr") to the file, which is created or truncated."""
    if std not in ("stdout", "stderr"):
        raise ValueError(f"unknown stream {std!r}; expected 'stdout' or 'stderr'")
    number = 1 if std == "stdout" else 2
    with open(to_file, "wb") as file:
        _flush(std)
        original = os.dup(number)
        try:
            os.dup2(file.fileno(), number)
            try:
                yield
            finally:
                _flush(std)
        finally:
            os.dup2(original, number)
            os.close(original)


def redirect_stdout(to_file: str) -> AbstractContextManager[None]:
    return redirect("stdout", to_file)


def redirect_stderr(to_file: str) -> AbstractContextManager[None]:
    return redirect("stderr", to_file)


def _flush(std: str) -> None:
    get_libc().fflush(None)
    stream = getattr(sys, std)
    if stream is not None:
        stream.flush()
