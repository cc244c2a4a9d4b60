"""Descendants: every process below this one, whatever session or group it moved to.

Reads the kernel's own list of children, so it needs no privilege and no naming convention. The list can miss a process
that is being born or dying while it is read; who must be sure kills, waits for a death and looks again, until
``waitpid`` says that there is no child left (the caller is a subreaper, so an orphan becomes its child).
"""

from __future__ import annotations

import os
import select
from contextlib import suppress


def descendants(pid: int) -> list[int]:
    """The living processes below ``pid``, parents before children."""
    found: list[int] = []
    seen = {pid}
    waiting = [pid]
    while waiting:
        for child in children(waiting.pop()):
            if child not in seen:
                seen.add(child)
                found.append(child)
                waiting.append(child)
    return found


def children(pid: int) -> list[int]:
    """Its children. Exact for who asks about itself, has one thread and reaps them: they leave only by being reaped."""
    found: list[int] = []
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:  # it is gone, or this system has no /proc
        return found
    for thread in threads:
        try:
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as listing:
                found += map(int, listing.read().split())
        except FileNotFoundError:
            if os.path.exists(f"/proc/{pid}/task/{thread}"):
                return _children_by_parent(pid)  # a kernel without CONFIG_PROC_CHILDREN
        except OSError:
            continue  # the thread ended meanwhile
    return found


def _children_by_parent(parent: int) -> list[int]:
    """The slow way: ask every process who its parent is."""
    children = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and parent_of(int(entry)) == parent:
            children.append(int(entry))
    return children


def parent_of(pid: int) -> int:
    """The parent's pid, or 0 if there is no such process."""
    return int(_stat(pid)[1])


def is_zombie(pid: int) -> bool:
    return _stat(pid)[0] == b"Z"


def _stat(pid: int) -> list[bytes]:
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            # The name in brackets may hold anything, also brackets: what follows the last one is safe to split.
            return stat.read().rpartition(b")")[2].split()
    except OSError:
        return [b"", b"0"]


def wait_for_deaths(pids: list[int], patience_s: float) -> bool:
    """Wait until all of these processes are dead, at most so long between two deaths; did any die?"""
    if not hasattr(os, "pidfd_open"):
        return True
    poll = select.poll()  # not select, which knows only the first thousand descriptors
    handles = set()
    for pid in pids:
        with suppress(ProcessLookupError):
            handle = os.pidfd_open(pid)
            handles.add(handle)
            poll.register(handle, select.POLLIN)
    alive = len(handles)
    while handles and (dead := poll.poll(patience_s * 1000)):
        for handle, _ in dead:
            poll.unregister(handle)
            handles.discard(handle)
            os.close(handle)
    for handle in handles:
        os.close(handle)
    return len(handles) < alive or alive < len(pids)


def bearers(mark: bytes) -> list[int]:
    """Every process whose environment at its start held ``mark``: how a tree is found after its root was lost."""
    found = []
    for entry in os.listdir("/proc") if os.path.isdir("/proc") else []:
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/environ", "rb") as environment:
                    if mark in environment.read():
                        found.append(int(entry))
            except OSError:  # gone, or not ours to look at
                continue
    return found
