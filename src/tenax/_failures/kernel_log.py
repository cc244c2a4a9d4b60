"""What the kernel's log says about a worker: its GPU failed, or it crashed in a library. Pure: lines in, a value out.

The driver of NVIDIA writes its errors there as ``NVRM: Xid (PCI:...): NUMBER, pid=..., text``; the kernel names the
library in which a process crashed. Only lines that the kernel itself wrote come here, and only those since the start of
the generation: see ``out_of_memory.py``, which holds the descriptor.
"""

from __future__ import annotations

import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_XID = re.compile(r"NVRM: Xid \([^()]*\): (\d{1,9})(?:, pid='?(\d+|<unknown>)'?)?")
_LOST = frozenset({79})
_MEMORY = frozenset({48, 63, 64, 92, 94, 95})
_OF_THE_PROGRAM = frozenset({13, 31, 43, 45})  # 45: cleaned up after a process that was ended
# Whatever process was at work: after these a GPU is of no use until it was reset.
_FATAL = _LOST | _MEMORY | frozenset({61, 62, 74, 119, 120})


def gpu_trouble(lines: Sequence[str], pid: int, *, says_gpu: bool) -> tuple[str, str]:
    """The kind and the line, or nothing: of this process; or of nobody, if the worker itself blames a GPU.

    ``says_gpu``: the worker has such an error, or crashed without a word.
    """
    best = ("", "")
    for line in lines:
        match = _XID.search(line)
        if match is None:
            continue
        number, whose = int(match.group(1)), match.group(2)
        is_ours = whose == str(pid)
        is_anybodys = (whose is None or not whose.isdigit()) and number in _FATAL and says_gpu
        if number == 45 or not (is_ours or is_anybodys):
            continue
        kind = _kind(number)
        if not best[0] or kind in ("gpu_lost", "gpu_memory_error"):
            best = (kind, line)
            if kind == "gpu_lost":
                break
    return best


def crash_line(lines: Sequence[str], pid: int) -> str:
    """``python3[4703]: segfault at 0 ip ... in libfoo.so[...]``: in which library this process crashed."""
    pattern = re.compile(rf"\[{pid}\]:? (?:segfault at|general protection|trap )")
    return next((line for line in lines if pattern.search(line)), "")


def _kind(number: int) -> str:
    if number in _LOST:
        return "gpu_lost"
    if number in _MEMORY:
        return "gpu_memory_error"
    return "gpu_illegal_access" if number in _OF_THE_PROGRAM else "gpu_error"
