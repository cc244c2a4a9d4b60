"""Fan-out: a worker fails on one of 64 nodes; until all 64 have decided to stop, and until the next group is formed.

tenax: 64 real agent machines with their tcp engines (`nodes.py`) in four processes; the one that serves the endpoint
has a process of its own. A node has decided when its machine has returned the command to signal its workers; the group
is formed when the last node returns the command to start them. The time of a keeper to signal and start processes is
not included.

torchrun: 64 of TorchElastic's dynamic rendezvous handlers over its own TCPStore, in four processes, driven as its agent
drives them (`elastic.py`): a node polls every 0.1 s whether a node waits to rejoin, which is how it detects the
failure. A whole agent for each would need 64 times the memory and the import of torch.

All nodes share this machine's cores, on both sides.
"""

from __future__ import annotations

import random
import tempfile
import time

from benchmarks import elastic, nodes
from benchmarks.crew import Crew, CrewFailed, shares
from benchmarks.harness import Settings
from benchmarks.job import free_port
from benchmarks.report import BASELINE, OURS, Row, compared, limited, seconds
from benchmarks.samples import Samples
from tenax._engines.tcp.engine import TcpSettings

SIZES = (16, 64)  # in a smoke run, and in a full one
PROCESSES = 4
BOUND_S = 30.0


def measure(settings: Settings, samples: Samples) -> None:
    """Take all samples: tenax, torchrun, tenax again. Each has the machine to itself: its nodes are never idle."""
    names = [launcher.name for launcher in settings.launchers]
    number = SIZES[0] if settings.quick else SIZES[1]
    failures = {BASELINE: 1 if settings.quick else 3, OURS: 3 if settings.quick else 10}
    takers = {BASELINE: _elastic, OURS: _ours}
    for name in (OURS, BASELINE, OURS):
        if name in names:
            settings.settle(samples)
            try:
                takers[name](number, settings.reps or failures[name], samples)
            except CrewFailed as failure:
                samples.miss(name, _decided(number), str(failure))
                samples.miss(name, _formed(number), str(failure))


def _ours(number: int, failures: int, samples: Samples) -> None:
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        _fail_ours(number, failures, folder, samples)


def _fail_ours(number: int, failures: int, folder: str, samples: Samples) -> None:
    run = TcpSettings(f"127.0.0.1:{free_port()}", "fanout", number, number, secret=b"bench")
    with Crew(nodes.work, [(run, size, folder) for size in (1, *shares(number - 1, PROCESSES - 1))]) as crew:
        crew.send("open", only=[0])
        crew.receive(BOUND_S, only=[0])
        rest = range(1, PROCESSES)
        crew.send("open", only=rest)
        crew.receive(BOUND_S, only=rest)
        crew.receive(BOUND_S)  # formed
        for _ in range(failures):
            time.sleep(0.2 + random.random() * 0.1)
            crew.send("fail", only=[PROCESSES - 1])
            ((_, _, failed_at),) = crew.receive(BOUND_S, only=[PROCESSES - 1])
            for what, expected in ((_decided(number), "stopped"), (_formed(number), "formed")):
                answers = crew.receive(BOUND_S)
                assert {answer[0] for answer in answers} == {expected}, answers
                samples.add(OURS, what, max(at for _, _, at in answers) - failed_at)


def _elastic(number: int, failures: int, samples: Samples) -> None:
    with elastic.Elastic(PROCESSES) as handlers:
        handlers.join("fanout", number, BOUND_S)
        for _ in range(failures):
            time.sleep(0.5 + random.random() * 0.1)
            failed_at, decided_at, formed_at = handlers.fail(BOUND_S)
            samples.add(BASELINE, _decided(number), decided_at - failed_at)
            samples.add(BASELINE, _formed(number), formed_at - failed_at)


def _decided(number: int) -> str:
    return f"worker failure on one of {number} nodes → all {number} have decided to stop"


def _formed(number: int) -> str:
    return f"worker failure on one of {number} nodes → next generation formed on all {number}"


def rows(samples: Samples) -> list[Row]:
    """Return the rows that compare the launchers."""
    sizes = [number for number in SIZES if any(samples.has(who, _decided(number)) for who in (BASELINE, OURS))]
    return [
        row
        for number in sizes
        for row in (
            limited(samples, _decided(number), seconds, below=0.1, with_ratio=True),
            compared(samples, _formed(number), seconds),
        )
    ]


def notes(_: Samples) -> list[str]:
    """Return the notes on the rows."""
    return [
        "Fan-out: tenax's nodes are its real agent machines and tcp engines, torchrun's are TorchElastic's real "
        f"rendezvous handlers, polled every 0.1 s as by its agent; each in {PROCESSES} processes that share this "
        "machine's cores, without workers."
    ]
