"""Rendezvous: N nodes join a run at once; from the first connection until the last has its assignment.

tenax: N light clients (`clients.py`) in four processes, and one tcp coordinator in a fifth. Compared with N of
TorchElastic's dynamic rendezvous handlers (`elastic.py`) in four processes, over its own TCPStore in a fifth, from the
first call of `next_rendezvous` until the last has returned. Its number is raised until it fails to finish within the
timeout; the handlers wait up to 0.3 s at random and a second between polls, as always. A first round of each side is
not measured, because it imports modules.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence

from benchmarks import clients
from benchmarks.crew import Crew, CrewFailed, shares
from benchmarks.elastic import Elastic
from benchmarks.growth import exponent
from benchmarks.harness import Settings
from benchmarks.job import free_port
from benchmarks.report import BASELINE, NOTHING, OURS, Row, compared, limited, seconds
from benchmarks.samples import Samples

SIZES = (8, 16, 32, 64, 128, 256, 512, 1000)
QUICK_SIZES = (8, 16)
THEIR_SIZES = (8, 32, 64, 128, 256)
PROCESSES = 4
BOUND_S = 20.0
FIT_FROM = 64  # below that, fixed costs hide the growth
MAX_EXPONENT = 1.25


def measure(settings: Settings, samples: Samples) -> None:
    """Take all samples: tenax, torchrun, tenax again, so that both see the same machine."""
    names = [launcher.name for launcher in settings.launchers]
    sizes = QUICK_SIZES if settings.quick else SIZES
    repetitions = settings.repetitions(3)
    if OURS in names:
        settings.settle(samples)
        _ours(sizes, repetitions, samples)
    if BASELINE in names:
        settings.settle(samples)
        if settings.quick:  # each process imports torch
            _elastic(THEIR_SIZES[:1], 1, samples, processes=1)
        else:
            _elastic(THEIR_SIZES, settings.repetitions(2), samples)
    if OURS in names and not settings.quick:
        settings.settle(samples)
        _ours(sizes, repetitions, samples)


def _ours(sizes: Sequence[int], repetitions: int, samples: Samples) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as folder,
        Crew(clients.serve, [(folder,)]) as server,
        Crew(clients.work, [()] * PROCESSES) as crew,
    ):
        crew.receive(30)
        _join_ours(server, crew, sizes[0])  # not measured: imports modules
        for _ in range(repetitions):
            for nodes in sizes:
                try:
                    samples.add(OURS, _joined(nodes), _join_ours(server, crew, nodes))
                except CrewFailed as failure:
                    samples.miss(OURS, _joined(nodes), str(failure))
                    return


def _join_ours(server: Crew, crew: Crew, nodes: int) -> float:
    """Run one round with that many nodes. Return the time from the first connection to the last assignment."""
    port = free_port()
    server.send("serve", port, nodes)
    server.receive(30)
    crew.send_each([(port, *bounds, nodes) for bounds in ranges(nodes, PROCESSES)])
    spans = crew.receive(BOUND_S)
    return float(max(end for _, end in spans) - min(begin for begin, _ in spans))


def ranges(number: int, processes: int) -> list[tuple[int, int]]:
    """Return the range of nodes of each process: the first, and the one after the last."""
    found, first = [], 0
    for size in shares(number, processes):
        found.append((first, first + size))
        first += size
    return found


def _elastic(sizes: Sequence[int], repetitions: int, samples: Samples, processes: int = PROCESSES) -> None:
    """Return the sizes in order of measurement; the largest, which mostly times out, comes once at the end."""
    *often, largest = sizes
    with Elastic(processes) as handlers:
        handlers.join("warm", sizes[0], BOUND_S)  # not measured, as for tenax
        for number, nodes in enumerate([*often * repetitions, largest]):
            try:
                samples.add(BASELINE, _joined(nodes), handlers.join(f"run{number}", nodes, BOUND_S))
            except CrewFailed as failure:
                samples.miss(BASELINE, _joined(nodes), str(failure))
                return  # handlers that have not joined would disturb the next round


def _joined(nodes: int) -> str:
    return f"{nodes} nodes join: first connection → the last has its assignment"


def rows(samples: Samples) -> list[Row]:
    """Return the rows that compare the launchers."""
    found = []
    for nodes in SIZES:
        what = _joined(nodes)
        if samples.has(BASELINE, what) or samples.has(OURS, what):
            if nodes == SIZES[-1]:
                found.append(limited(samples, what, seconds, below=3.0))
            else:
                found.append(compared(samples, what, seconds, at_least=20 if samples.all(BASELINE, what) else None))
    return [*found, _growth(samples)]


def _growth(samples: Samples) -> Row:
    cells = {}
    powers = {}
    for who in (BASELINE, OURS):
        medians = {nodes: samples.summary(who, _joined(nodes)) for nodes in SIZES if nodes >= FIT_FROM}
        times = {nodes: summary.median for nodes, summary in medians.items() if summary}
        power = powers[who] = exponent(times)
        cells[who] = NOTHING if power is None else f"N^{power:.2f} ({min(times)} to {max(times)})"
    ours = powers[OURS]
    return Row(
        f"growth of that time with the number of nodes, from {FIT_FROM} on",
        cells[BASELINE],
        cells[OURS],
        bar=f"about linear: exponent ≤ {MAX_EXPONENT:g}",
        passed=None if ours is None else ours <= MAX_EXPONENT,
    )


def notes(_: Samples) -> list[str]:
    """Return the notes on the rows."""
    return [
        "Rendezvous: tenax's nodes are light clients with its real protocol (join, ready, assignment), not whole "
        "agents; torchrun's are TorchElastic's own handlers over its own TCPStore, without agents too. Clients and "
        f"server share this machine's cores. torchrun's number of nodes is raised up to {THEIR_SIZES[-1]} as long as "
        f"each finishes within {BOUND_S:g} s."
    ]
