"""Events of workers and the process table of the kernel."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from benchmarks.events import Event, parse_event, whole_group
from benchmarks.harness import Launcher, Settings
from benchmarks.idle import parse_strace
from benchmarks.procfs import Process, descendants
from benchmarks.restart import Restart, restarts

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def event(at_ms: int, name: str, rank: int, attempt: int) -> Event:
    """Return an event of some worker."""
    return Event(at_ms * 1_000_000, name, Process(1, 1), rank, attempt)


def test_a_line_of_the_worker_is_parsed() -> None:
    """Time, name, process, rank and attempt."""
    assert parse_event("12 die 34 56 7 8 9 10 11") == Event(12, "die", Process(34, 56), 7, 8, 9, 10, 11)


def test_a_restart_is_timed_from_the_death_that_caused_it() -> None:
    """To the first SIGTERM, and to the first and last start of the next attempt; other attempts do not count."""
    events = [
        event(0, "start", 0, 0),
        event(0, "start", 1, 0),
        event(100, "die", 0, 0),
        event(104, "term", 1, 0),
        event(150, "start", 1, 1),
        event(160, "start", 0, 1),
        event(300, "die", 0, 1),
    ]
    assert list(restarts(events, size=2)) == [Restart(0.004, 0.05, 0.06)]


def test_an_incomplete_restart_does_not_count() -> None:
    """A part of a generation must not count as a fast one."""
    events = [event(100, "die", 0, 0), event(104, "term", 1, 0), event(150, "start", 0, 1)]
    assert list(restarts(events, size=2)) == []


def started(at_ms: int, rank: int, world: int, generation: int = 0) -> Event:
    """Return the start event of a worker of a group."""
    return Event(at_ms * 1_000_000, "start", Process(1, 1), rank, 0, world, generation)


def test_a_group_is_complete_when_every_rank_of_that_size_has_started() -> None:
    """Earlier starts, groups of another size and other events do not count."""
    events = [started(1, 0, 2), started(1, 1, 2), started(5, 0, 3), event(6, "term", 1, 0), started(7, 1, 2)]
    assert whole_group(events, after_ns=2_000_000, workers=2) == []
    last = started(9, 0, 2)
    assert whole_group([*events, last], after_ns=2_000_000, workers=2) == [events[-1], last]


def test_a_group_has_one_generation() -> None:
    """Workers of two generations are no group."""
    halves = [started(3, 0, 2, generation=4), started(5, 1, 2, generation=5)]
    assert whole_group(halves, after_ns=0, workers=2) == []
    rest = started(6, 0, 2, generation=5)
    assert whole_group([*halves, rest], after_ns=0, workers=2) == [halves[1], rest]


def test_launchers_take_turns() -> None:
    """A B A B, so that the machine's drift affects both alike; a smoke run does it once."""
    a, b = Launcher("a", ()), Launcher("b", ())
    assert list(Settings((a, b)).interleaved(2)) == [(0, a), (0, b), (1, a), (1, b)]
    assert list(Settings((a, b), quick=True).interleaved(15)) == [(0, a), (0, b)]
    assert Settings((a, b), reps=5).repetitions(15) == 5


def test_strace_is_parsed_by_its_last_line() -> None:
    """Also when it recorded nothing."""
    calls = " 83.05    0.000049          49         1           futex"
    total = "100.00    0.000059          19         3           total"
    assert parse_strace(f"{calls}\n{total}\n") == 3
    assert parse_strace("") == 0


@pytest.mark.process
@linux
def test_a_process_is_identified_by_pid_and_start_time() -> None:
    """Another process with the same pid is a different one, and a zombie is dead."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        (process,) = (one for one in descendants(os.getpid()) if one.pid == child.pid)
        assert process.alive()
        assert not Process(process.pid, process.started_ticks + 1).alive()
    finally:
        child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not process.alive()
    child.communicate()
    assert not process.alive()
