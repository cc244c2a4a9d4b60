"""Stack dumps of a hung worker: the signal that triggers them, and how a function worker prepares for it.

``faulthandler`` writes the dump in C inside the signal handler, so it needs neither the interpreter lock nor a thread
that can still run Python. It shows the newest hundred threads; the next signal number dumps the main thread alone,
which is the oldest. In programs the interpreter hook does the same (``_failures/hook/sitecustomize.py``), which must
not import tenax.
"""

from __future__ import annotations

import os
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping
    from typing import TextIO

MARK = "TENAX_STACKS_SIGNAL"
NAME = "stacks.txt"  # next to the error file
_OFFSET = 13  # arbitrary; C libraries and debuggers use low ones

_kept: list[TextIO] = []  # faulthandler writes to the descriptor: it must stay open


def stacks_signal() -> int:
    """Return a real-time signal, which is not sent by accident; 0 where there are none."""
    first, last = getattr(signal, "SIGRTMIN", 0), getattr(signal, "SIGRTMAX", 0)
    return first + _OFFSET if first + _OFFSET + 1 < last else 0


def stacks_file(error_file: str) -> str:
    """Return the stacks file of the worker with this error file. Without an error file, stacks go to stderr."""
    return os.path.join(os.path.dirname(error_file), NAME)


def stacks_env() -> Mapping[str, str]:
    number = stacks_signal()
    return {MARK: str(number)} if number else {}


def prepare(environ: MutableMapping[str, str]) -> None:
    """In a function worker, dump all stacks at the signal. Removes the variable, so that children do not inherit it."""
    mark = environ.pop(MARK, "")
    if not mark:
        return
    import faulthandler
    import sys

    path = environ.get("TORCHELASTIC_ERROR_FILE", "")
    try:
        if path:
            # Not inherited: closed on exec.
            _kept.append(open(stacks_file(path), "w", encoding="utf-8"))  # noqa: SIM115
        faulthandler.register(int(mark), _kept[-1] if path else 2, all_threads=True)
        faulthandler.register(int(mark) + 1, _kept[-1] if path else 2, all_threads=False)
    except (OSError, ValueError, RuntimeError) as error:
        # The worker runs without stack dumps; the agent reports that there are none.
        sys.stderr.write(f"tenax: could not prepare this worker for stack dumps: {error}\n")
