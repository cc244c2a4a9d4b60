"""Store: tenax's store server and torch's own (libuv), with torch's real clients.

Four client processes repeat one operation for a while, on one server and then on the other (`stores.py`); a rate is the
sum of all four. `set` has no answer, so a final round trip is included. Then the load at the start of a job: many real
clients connect at once, each sets a key, counts itself and waits for the last; from the first thread until the last
client is done.
"""

from __future__ import annotations

import contextlib
import math

from benchmarks import stores
from benchmarks.crew import Crew, CrewFailed, shares
from benchmarks.harness import Settings
from benchmarks.report import BASELINE, NOTHING, OURS, Row, better, compared, operations_per_second, seconds, times
from benchmarks.samples import Samples

PROCESSES = 4
STORMS = (256, 1024)
QUICK_STORM = 64
LEAST = 0.6
BOUND_S = 60.0


def measure(settings: Settings, samples: Samples) -> None:
    """Take all samples."""
    whose = [launcher.name for launcher in settings.launchers]
    serve = {BASELINE: stores.serve_theirs, OURS: stores.serve_ours}
    with contextlib.ExitStack() as stack:
        servers = {who: stack.enter_context(Crew(serve[who], [()])) for who in whose}
        ports = {who: server.receive(BOUND_S)[0] for who, server in servers.items()}
        processes = 1 if settings.quick else PROCESSES  # each imports torch
        crew = stack.enter_context(Crew(stores.work, [(number, ports) for number in range(processes)]))
        crew.receive(BOUND_S)
        if _repeat(crew, whose, settings, samples):
            _storm(crew, whose, settings, samples)


def _repeat(crew: Crew, whose: list[str], settings: Settings, samples: Samples) -> bool:
    """Return whether all succeeded."""
    seconds_each = 0.1 if settings.quick else 0.4
    for _ in range(settings.repetitions(5)):
        settings.settle(samples)
        for operation in stores.OPERATIONS:
            for who in whose:
                crew.send("repeat", who, operation, seconds_each)
                try:
                    answers = crew.receive(BOUND_S)
                except CrewFailed as failure:
                    samples.miss(who, _rate(operation), str(failure))
                    return False
                samples.add(who, _rate(operation), sum(number / took_s for number, took_s in answers))
    return True


def _storm(crew: Crew, whose: list[str], settings: Settings, samples: Samples) -> None:
    for clients in [QUICK_STORM] if settings.quick else STORMS:
        for repetition in range(settings.repetitions(3)):
            settings.settle(samples)
            for who in whose:
                name = f"storm{clients}.{repetition}"
                crew.send_each([("storm", who, name, share, clients) for share in shares(clients, len(crew))])
                try:
                    spans = crew.receive(BOUND_S)
                except CrewFailed as failure:
                    samples.miss(who, _stormed(clients), str(failure))
                    return
                samples.add(who, _stormed(clients), max(end for _, end in spans) - min(begin for begin, _ in spans))


def _rate(operation: str) -> str:
    return f"store, {PROCESSES} torch clients: {operation}"


def _stormed(clients: int) -> str:
    return f"store, {clients} torch clients at once: first connects → all have met"


def rows(samples: Samples) -> list[Row]:
    """Return the rows that compare the servers."""
    found = [
        compared(samples, _rate(operation), operations_per_second, more_is_better=True)
        for operation in stores.OPERATIONS
    ]
    found.append(_overall(samples))
    for clients in (QUICK_STORM, *STORMS):
        if samples.has(BASELINE, _stormed(clients)) or samples.has(OURS, _stormed(clients)):
            found.append(compared(samples, _stormed(clients), seconds))
    return found


def _overall(samples: Samples) -> Row:
    ratios = {name: better(samples, _rate(name), more_is_better=True) for name in stores.OPERATIONS}
    known = {name: ratio for name, ratio in ratios.items() if ratio}
    row = Row(f"store: geometric mean of the {len(ratios)} ratios", NOTHING, NOTHING, bar=f"≥ {LEAST:g}×")
    if len(known) < len(ratios):
        return row
    mean = geometric_mean(list(known.values()))
    lowest = min(known, key=lambda name: known[name])
    text = f"lowest: {lowest}, {times(known[lowest])}"
    return Row(row.measure, NOTHING, text, times(mean), row.bar, mean >= LEAST)


def geometric_mean(values: list[float]) -> float:
    """Return the geometric mean of ratios."""
    return math.exp(sum(map(math.log, values)) / len(values))


def notes(_: Samples) -> list[str]:
    """Return the notes on the rows."""
    return [
        "Store: the column torchrun is torch's own TCPStore server with libuv (C++), the column tenax the store "
        "process of a tenax agent (Python, standard library); the clients are torch's in both. A ratio below 1 is a "
        "loss, and expected: the bar is the required share of torch's rate. Client processes and server share this "
        "machine's cores, so both rates are lower than on a host with free ones."
    ]
