"""Failures of two nodes with four workers each, played through the coordinator without any process.

The files named after a framework hold what real jobs printed: ``./dev corpus --capture`` writes them. ``torch.txt``
holds output that torch 2.13 printed. The texts of ``system.txt`` and ``waiting.txt`` (GPUs, NCCL, the kernel) were
written by hand after the messages of the libraries and the kernel; they were not captured.

A file of ``played/`` holds cases. A case begins with its expectation and then lists what each worker left; workers
that are not listed were stopped by tenax::

    == NAME
    expect KIND of RANK             the first cause; "KIND of none": consequences of a change, "of ?": cause unknown
    counts FAILED CONSEQUENCES      workers that failed by themselves, and as a consequence
    -- RANKS exit CODE              what these workers left on stderr follows; earlier failures come first
    -- RANKS raises                 the exception that ended them follows, without its traceback
    -- RANKS silent                 stopped by tenax; its last output follows
    -- RANKS done                   exited with code 0
    -- kernel                       lines of the kernel log on the first worker's host
    -- drained NODE / lost NODE     before the failures

Write the expectation of a new case before you run it.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec

from tenax._core.coordinator import CoordinatorMachine, CoordinatorState, NodeLost, Opened, Received, RunSettings
from tenax._core.messages import (
    FailureSeen,
    NodeDraining,
    NodeInfo,
    NodeJoined,
    NodeLeft,
    NodeReady,
    NodeStopped,
    WorkersRunning,
)
from tenax._core.model import Evidence, Failure, Stopped
from tenax._failures.evidence import gather, gpu_error
from tenax._node.journal import RunHeader, RunStep
from tenax._view.cause import classify
from tenax.testing.run_invariants import RunChecker

NODES, SLOTS = 2, 4
WALL = 1_700_000_000.0
_TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 9, in <module>\n'


class Left(NamedTuple):
    """What some workers left."""

    ranks: tuple[int, ...]
    how: str  # "exit 1", "raises", "silent", "done"
    text: str


class Case(NamedTuple):
    name: str
    kind: str
    rank: int | None  # None: unknown, or no worker failed by itself
    is_known: bool
    counts: tuple[int, int]
    left: tuple[Left, ...]
    kernel: tuple[str, ...] = ()
    change: str = ""  # "drained 1", "lost 1"


def cases() -> list[Case]:
    files = sorted((Path(__file__).parent / "played").glob("*.txt"))
    return [_case(f"{file.stem}: {text}") for file in files for text in _split("\n" + file.read_text(), "\n== ")]


def _split(text: str, mark: str) -> list[str]:
    return text.split(mark)[1:]


def _case(text: str) -> Case:
    head, *blocks = text.split("\n-- ")
    name, expected, counted, *_ = head.split("\n")
    _, kind, _, who = expected.split()
    _, failed, consequences = counted.split()
    left, kernel, change = [], (), ""
    for block in blocks:
        title, _, body = block.partition("\n")
        ranks, _, how = title.partition(" ")
        if ranks == "kernel":
            kernel = tuple(body.strip("\n").split("\n"))
        elif ranks in ("drained", "lost"):
            change = title
        else:
            left.append(Left(ranks_in(ranks), how, body))
    rank = int(who) if who.isdecimal() else None
    return Case(name, kind, rank, who != "?", (int(failed), int(consequences)), tuple(left), kernel, change)


def ranks_in(text: str) -> tuple[int, ...]:
    found: list[int] = []
    for part in text.split(","):
        low, _, high = part.partition("-")
        found += range(int(low), int(high or low) + 1)
    return tuple(found)


class Played(NamedTuple):
    state: CoordinatorState
    header: RunHeader
    steps: list[RunStep]
    at: float


def play(case: Case) -> Played:
    """Send the coordinator what two agents report about this failure."""
    settings = RunSettings("job", 1 if case.change else NODES, NODES, last_call_s=0.0)
    machine, checker, steps, at = CoordinatorMachine(settings), RunChecker(settings), [], 0.0

    def step(event, after_s: float = 0.1) -> None:
        nonlocal at
        at += after_s
        checker.expect(machine.state, event)
        done = machine.step(event, at)
        checker.check(machine.state, event, done, at)
        steps.append(RunStep(at, event, done.sends, done.decision))

    step(Opened())
    for node in range(NODES):
        info = NodeInfo(f"n{node}", f"host{node}", SLOTS, min_nodes=settings.min_nodes, max_nodes=NODES)
        step(Received(f"n{node}", NodeJoined(info)))
        step(Received(f"n{node}", NodeReady(0, f"host{node}", 1000)))
    for node in range(NODES):
        step(Received(f"n{node}", WorkersRunning(1, tuple(range(100, 100 + SLOTS)))))
    failures, stopped, done = _reports(case, 60.0)
    nodes = range(NODES)
    if case.change:
        how, number = case.change.split()
        nodes = [node for node in nodes if node != int(number)]
        if how == "drained":
            step(Received(f"n{number}", NodeDraining(1, 30.0, "its agent received SIGTERM")), 50.0)
            step(Received(f"n{number}", NodeStopped(1, at)))
            step(Received(f"n{number}", NodeLeft("its agent received SIGTERM")))
        else:
            step(NodeLost(f"n{number}", "connection closed"), 50.0)
    own = [each for each in failures if each.global_rank // SLOTS in nodes]
    for first in own[:1]:
        step(Received(f"n{first.global_rank // SLOTS}", FailureSeen(1, first.brief(), at)), 60.0 - at)
    for node in nodes:
        of_node = tuple(each for each in own if each.global_rank // SLOTS == node)
        stopped_here = tuple(each for each in stopped if each.global_rank // SLOTS == node)
        step(Received(f"n{node}", NodeStopped(1, at + 0.1, of_node, stopped_here)))
        if not case.change:  # otherwise the next generation begins
            step(Received(f"n{node}", NodeReady(1)))
    assert not done & {each.global_rank for each in (*failures, *stopped)}
    header = RunHeader(1, "0", settings, "host0", WALL, 0.0)
    return Played(machine.state, header, steps, at)


def _reports(case: Case, at: float) -> tuple[list[Failure], list[Stopped], set[int]]:
    failures, done = [], set()
    stopped = {
        rank: Stopped(rank % SLOTS, rank, 100 + rank, -15, last_lines=(f"step 7 of rank {rank}",))
        for rank in range(NODES * SLOTS)
    }
    for order, (ranks, how, text) in enumerate(case.left):
        for number, rank in enumerate(ranks):
            if how == "silent":
                lines = tuple(text.strip("\n").split("\n"))
                stopped[rank] = Stopped(rank % SLOTS, rank, 100 + rank, -15, last_lines=lines, log_file="/logs/x.log")
                continue
            del stopped[rank]
            if how == "done":
                done.add(rank)
                continue
            code = 1 if how == "raises" else int(how.removeprefix("exit "))
            output = _TRACEBACK + text if how == "raises" else text
            evidence = _evidence(output, code, 100 + rank, case.kernel if order == 0 else ())
            seen_at = at + 0.01 * order + 0.001 * number
            failures.append(Failure(1, rank % SLOTS, rank, 100 + rank, code, seen_at, evidence=evidence))
    return failures, list(stopped.values()), done


def _evidence(text: str, exit_code: int, pid: int, kernel: tuple[str, ...]) -> Evidence:
    evidence = gather(pid=pid, exit_code=exit_code, stderr_tail=text.encode())
    if not kernel:
        return evidence
    cause = classify(exit_code, evidence, kernel_error=gpu_error(kernel, pid, has_gpu_symptom=True))
    return msgspec.structs.replace(evidence, cause=cause.kind, is_consequence=cause.is_consequence, proof=cause.proof)
