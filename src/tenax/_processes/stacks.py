"""The stacks of a worker that hangs: the signal at which it writes them down, and how a function prepares for it.

The dump is ``faulthandler``'s: written by C code inside the signal handler, so that it needs neither the interpreter
lock nor a thread that can still run Python. It tells the newest hundred threads; at the next signal number a worker
writes down its main thread alone, which is the oldest. For programs the interpreter hook does the same
(``_failures/hook/sitecustomize.py``), which must not import anything of ours.
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
_OFFSET = 13  # any; low ones are used by C libraries and debuggers

_kept: list[TextIO] = []  # faulthandler writes to the descriptor: it must stay open


def stacks_signal() -> int:
    """A real-time signal: nobody sends it by chance. 0 where there are none."""
    first, last = getattr(signal, "SIGRTMIN", 0), getattr(signal, "SIGRTMAX", 0)
    return first + _OFFSET if first + _OFFSET + 1 < last else 0


def stacks_file(error_file: str) -> str:
    """Where the stacks of the worker with this error file are; without one they go to its stderr."""
    return os.path.join(os.path.dirname(error_file), NAME)


def stacks_env() -> Mapping[str, str]:
    """What a worker must have in its environment to prepare itself."""
    number = stacks_signal()
    return {MARK: str(number)} if number else {}


def prepare(environ: MutableMapping[str, str]) -> None:
    """In a worker that is a function: write all stacks at the signal. Leaves no trace for what the worker starts."""
    mark = environ.pop(MARK, "")
    if not mark:
        return
    import faulthandler
    import sys

    path = environ.get("TORCHELASTIC_ERROR_FILE", "")
    try:
        if path:
            # What the worker starts does not get it: it is closed when a child becomes another program.
            _kept.append(open(stacks_file(path), "w", encoding="utf-8"))  # noqa: SIM115
        faulthandler.register(int(mark), _kept[-1] if path else 2, all_threads=True)
        faulthandler.register(int(mark) + 1, _kept[-1] if path else 2, all_threads=False)
    except (OSError, ValueError, RuntimeError) as error:
        # A worker is worth more than its stacks; without them it is said that there are none.
        sys.stderr.write(f"tenax: the stacks of this worker could not be prepared: {error}\n")
