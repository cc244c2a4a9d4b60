"""Finds every descendant of a process, whatever session or group it moved to.

Reads the kernel's list of children, so it needs no privilege and no naming convention. The list can miss a process that
is forked or exits while it is read. To be sure, kill, wait for a death and scan again until ``waitpid`` reports no
child (in a subreaper, to which orphans are re-parented).
"""

from __future__ import annotations

import os
import select
from contextlib import suppress


def descendants(pid: int) -> list[int]:
    """Return the descendants of ``pid``, parents before children."""
    seen = {pid: None}  # in this order
    waiting = [pid]
    while waiting:
        new = [child for child in children(waiting.pop()) if child not in seen]
        seen.update(dict.fromkeys(new))
        waiting += new
    return [*seen][1:]


def children(pid: int) -> list[int]:
    """Return the children of ``pid``. Exact for a single-threaded caller's own: they leave only when it reaps them."""
    found: list[int] = []
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:  # no such process, or no /proc
        return found
    for thread in threads:
        try:
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as listing:
                found += map(int, listing.read().split())
        except FileNotFoundError:
            if os.path.exists(f"/proc/{pid}/task/{thread}"):  # a kernel without CONFIG_PROC_CHILDREN: slow
                return [child for child in _pids() if parent_of(child) == pid]
        except OSError:
            continue  # the thread has exited
    return found


def _pids() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()] if os.path.isdir("/proc") else []


def parent_of(pid: int) -> int:
    """Return the parent's pid, or 0 if there is no such process."""
    return int(_stat(pid)[1])


def is_zombie(pid: int) -> bool:
    return _stat(pid)[0] == b"Z"


def _stat(pid: int) -> list[bytes]:
    with suppress(OSError), open(f"/proc/{pid}/stat", "rb") as stat:
        # The name in parentheses may itself contain parentheses: only what follows the last one is safe to split.
        return stat.read().rpartition(b")")[2].split()
    return [b"", b"0"]


def wait_for_deaths(pids: list[int], timeout_s: float) -> bool:
    """Wait until these processes are dead or none dies for ``timeout_s``. Return whether any died."""
    if not hasattr(os, "pidfd_open"):
        return True
    poll = select.poll()  # select() is limited to descriptors below 1024
    handles = set()
    for pid in pids:
        with suppress(ProcessLookupError):
            handle = os.pidfd_open(pid)
            handles.add(handle)
            poll.register(handle, select.POLLIN)
    alive = len(handles)
    while handles and (dead := poll.poll(timeout_s * 1000)):
        for handle, _ in dead:
            poll.unregister(handle)
            handles.discard(handle)
            os.close(handle)
    for handle in handles:
        os.close(handle)
    return len(handles) < alive or alive < len(pids)


def marked_processes(mark: bytes) -> list[int]:
    """Return every process whose initial environment contains ``mark``: finds a tree whose root is gone."""
    found = []
    for pid in _pids():
        with suppress(OSError), open(f"/proc/{pid}/environ", "rb") as environment:  # gone, or not permitted
            if mark in environment.read():
                found.append(pid)
    return found
