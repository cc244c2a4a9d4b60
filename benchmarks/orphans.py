"""Orphans: the agent gets SIGKILL while its workers have descendants that are hard to end; who is alive a second later.

Each worker has an ordinary child, a child in a session of its own that ignores SIGTERM, SIGINT and SIGHUP, and the
same again double-forked, with its parent gone and every descriptor closed. Each is known by pid and start time; the
launcher's helpers count too. A zombie counts as dead: only its parent can reap it.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Iterable

from benchmarks import procfs
from benchmarks.harness import Launch, Launcher, LaunchFailed, Settings
from benchmarks.procfs import Process
from benchmarks.report import BASELINE, NOTHING, OURS, Row, compared, seconds
from benchmarks.samples import Samples

SIZE = 2
BOUND_S = 1.0
TRIES = {BASELINE: 3, OURS: 50}
LEFT = "processes alive"
OF = "processes before"
GONE = "agent SIGKILL → last process gone"


def measure(settings: Settings, samples: Samples) -> None:
    """Take all samples. torchrun, only for contrast, is tried a few times; its leftovers are ended."""
    for repetition, launcher in settings.interleaved(max(TRIES.values())):
        if repetition < TRIES[launcher.name]:
            _try(launcher, samples)


def _try(launcher: Launcher, samples: Samples) -> None:
    with Launch(launcher, SIZE, ["brood"]) as launch:
        try:
            launch.wait_for(dict.fromkeys(("start", "child", "escaped", "daemon"), SIZE), 60)
        except LaunchFailed as failure:
            samples.fail(launcher.name, f"workers with descendants: {failure}")
            return
        before = launch.processes()
        watched = watch(before)
        killed_at = time.monotonic()
        launch.kill()
        died = deaths(watched, killed_at + BOUND_S)
        # Processes that started in between are not among those awaited.
        late = (launch.processes() | procfs.mentioning(str(launch.folder))) - before
        died += deaths(watch(late), killed_at + BOUND_S)
        left = {process for process in before | late if process.alive()}
        procfs.end(left)
    samples.add(launcher.name, OF, len(before))
    samples.add(launcher.name, LEFT, len(left))
    if not left:
        samples.add(launcher.name, GONE, max(died, default=killed_at) - killed_at)


def watch(processes: Iterable[Process]) -> list[int]:
    """Return a pidfd for each living process."""
    pidfds = []
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            pidfds.append(os.pidfd_open(process.pid))
    return pidfds


def deaths(pidfds: Iterable[int], deadline: float) -> list[float]:
    """Return when each process died, of those that did before the deadline. Closes the pidfds."""
    died = []
    poll = select.poll()
    waiting = set(pidfds)
    for pidfd in waiting:
        poll.register(pidfd, select.POLLIN)
    while waiting and time.monotonic() < deadline:
        for pidfd, _ in poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            died.append(time.monotonic())
            poll.unregister(pidfd)
            os.close(pidfd)
            waiting.remove(pidfd)
    for pidfd in waiting:
        os.close(pidfd)
    return died


def rows(samples: Samples) -> list[Row]:
    """Return the rows that compare the launchers."""
    left = samples.all(OURS, LEFT)
    what = f"alive {BOUND_S:g} s after SIGKILL of the agent; workers with setsid, double-forked descendants"
    passed = not any(left) if left else None
    return [
        Row(what, _text(samples, BASELINE), _text(samples, OURS), bar="0, every time", passed=passed),
        compared(samples, GONE, seconds),
    ]


def _text(samples: Samples, who: str) -> str:
    left, before = samples.all(who, LEFT), samples.all(who, OF)
    if not left:
        return NOTHING
    clean = sum(number == 0 for number in left)
    rest = f"; in all {sum(left):g} of {sum(before):g} processes" if any(left) else ""
    return f"0 in {clean} of {len(left)} tries{rest}"


def notes(_: Samples) -> list[str]:
    """Return no notes."""
    return []
