"""Descendants of a process, regardless of their session, their current parent and their name."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.processes import Pipe, gone, leaving_nothing, on_linux, pipe, python, until
from tenax._processes.descendants import descendants, is_zombie, marked_processes, parent_of, wait_for_deaths

pytestmark = on_linux
__all__ = ["pipe"]

# A tree: this process, a thread of it that forked a child, a grandchild in another session; each prints its pid.
TREE = """
import os, signal, threading
def print_pid():
    os.write(1, b"%d\\n" % os.getpid())
def child():
    if os.fork() == 0:
        if os.fork() == 0:
            os.setsid()
            print_pid()
            while True:
                signal.pause()
        print_pid()
        while True:
            signal.pause()
thread = threading.Thread(target=lambda: (child(), threading.Event().wait()), daemon=True)
thread.start()
print_pid()
while True:
    signal.pause()
"""


@pytest.fixture
def tree(pipe: Pipe) -> Iterator[tuple[subprocess.Popen[bytes], list[int]]]:
    with leaving_nothing():
        root = subprocess.Popen(python(TREE), stdout=pipe.writer)
        pids = pipe.numbers(3)
        yield root, [pid for pid in pids if pid != root.pid]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        root.wait()


def test_all_descendants_are_found(tree: tuple[subprocess.Popen[bytes], list[int]]) -> None:
    """Children of all threads and their children, in any session, parents first."""
    root, (child, grandchild) = tree[0], sorted(tree[1], key=lambda pid: parent_of(pid) != tree[0].pid)
    assert descendants(root.pid) == [child, grandchild]
    assert parent_of(grandchild) == child
    assert {child, grandchild} <= set(descendants(os.getpid()))


def test_a_process_that_is_gone_has_no_descendants() -> None:
    """It has no parent either, and is not a zombie."""
    process = subprocess.Popen(["/bin/true"])
    process.wait()
    assert descendants(process.pid) == []
    assert parent_of(process.pid) == 0
    assert not is_zombie(process.pid)


def test_a_zombie_is_recognized() -> None:
    """A process that is dead but not reaped."""
    process = subprocess.Popen(["/bin/true"])
    assert gone([process.pid])
    assert is_zombie(process.pid)
    process.wait()
    assert not is_zombie(os.getpid())


def test_a_process_name_with_parentheses_is_parsed(tmp_path: Path) -> None:
    """A program may name itself ``) R 1 1``."""
    strange = tmp_path / ") R 1 1 ("
    strange.symlink_to("/bin/sleep")
    process = subprocess.Popen([str(strange), "60"])
    try:
        until(lambda: Path(f"/proc/{process.pid}/comm").read_text().startswith(") R 1"), "the new name")
        assert parent_of(process.pid) == os.getpid()
        assert not is_zombie(process.pid)
    finally:
        process.kill()
        process.wait()


def test_marked_processes_are_found() -> None:
    """Exactly those started with the mark in their environment."""
    mark = f"TENAX_TEST_MARK={os.urandom(8).hex()}"
    name, _, value = mark.partition("=")
    process = subprocess.Popen(["/bin/sleep", "60"], env={name: value})
    try:
        until(lambda: marked_processes(mark.encode()) == [process.pid], "the program, when it has its environment")
    finally:
        process.kill()
        process.wait()
    assert marked_processes(mark.encode()) == []


def test_wait_for_deaths_returns_when_all_are_dead_or_none_dies() -> None:
    with leaving_nothing():
        long, short = (subprocess.Popen(["/bin/sleep", "60"]) for _ in range(2))
        began = time.monotonic()
        assert not wait_for_deaths([long.pid, short.pid], 0.01)
        short.kill()
        assert wait_for_deaths([long.pid, short.pid], 0.5)
        short.wait()
        assert wait_for_deaths([short.pid], 30), "who is gone already is dead"
        long.kill()
        assert wait_for_deaths([long.pid], 30)
        assert is_zombie(long.pid)
        long.wait()
        assert wait_for_deaths([], 30) is False
        assert time.monotonic() - began < 20
