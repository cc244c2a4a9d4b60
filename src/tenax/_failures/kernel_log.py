"""Finds a worker's GPU errors and crashes in lines of the kernel log. Pure: lines in, a value out.

NVIDIA's driver logs its errors as ``NVRM: Xid (PCI:...): NUMBER, pid=..., text``; the kernel logs the library in which
a process crashed. The input holds only the kernel's own lines since the start of the generation: ``out_of_memory.py``
reads the log.
"""

from __future__ import annotations

import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_XID = re.compile(r"NVRM: Xid \([^()]*\): (\d{1,9})(?:, pid='?(\d+|<unknown>)'?)?")
_LOST = frozenset({79})
_MEMORY = frozenset({48, 63, 64, 92, 94, 95})
_OF_PROGRAM = frozenset({13, 31, 43, 45})  # 45: cleanup after a process was killed
# After these a GPU is unusable until it is reset, whatever process used it.
_FATAL = _LOST | _MEMORY | frozenset({61, 62, 74, 119, 120})


def gpu_error(lines: Sequence[str], pid: int, *, has_gpu_symptom: bool) -> tuple[str, str]:
    """Return the kind and line of a GPU error of this process, or empty strings.

    ``has_gpu_symptom``: the worker reported a GPU error or crashed, so fatal errors without a pid count too.
    """
    best = ("", "")
    for line in lines:
        match = _XID.search(line)
        if match is None:
            continue
        number, logged_pid = int(match.group(1)), match.group(2)
        is_of_process = logged_pid == str(pid)
        is_unattributed = (logged_pid is None or not logged_pid.isdigit()) and number in _FATAL and has_gpu_symptom
        if number == 45 or not (is_of_process or is_unattributed):
            continue
        kind = _kind(number)
        if not best[0] or kind in ("gpu_lost", "gpu_memory_error"):
            best = (kind, line)
            if kind == "gpu_lost":
                break
    return best


def crash_line(lines: Sequence[str], pid: int) -> str:
    """Return the line about this process's crash: ``python3[4703]: segfault at 0 ip ... in libfoo.so[...]``."""
    pattern = re.compile(rf"\[{pid}\]:? (?:segfault at|general protection|trap )")
    return next((line for line in lines if pattern.search(line)), "")


def _kind(number: int) -> str:
    if number in _LOST:
        return "gpu_lost"
    if number in _MEMORY:
        return "gpu_memory_error"
    return "gpu_illegal_access" if number in _OF_PROGRAM else "gpu_error"
