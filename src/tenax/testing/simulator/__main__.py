"""The command line: simulate many seeds, print or shrink one seed, or simulate a crowd."""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from tenax.testing.simulator.cluster import Outcome, simulate
from tenax.testing.simulator.crowd import CrowdSetup, simulate_crowd
from tenax.testing.simulator.draw import draw
from tenax.testing.simulator.setup import Setup
from tenax.testing.simulator.shrink import shrink

_FRESH = 10**12  # first seeds are drawn below this
_REPORT_EVERY = 100_000  # seeds
_BATCH = 400  # seeds for each process at a time


def main(argv: list[str] | None = None) -> int:
    """Returns 1 if a property broke."""
    options = _parser().parse_args(argv)
    if options.deaths_per_minute:
        return _crowd(options)
    if options.seed is not None:
        return _one(options)
    return _many(options)


def _draw(seed: int, options: argparse.Namespace) -> Setup:
    liveness = {"": None, "safety": False, "liveness": True}[options.mode]
    survivors = {"": None, "yes": True, "no": False}[options.survivors]
    seconds = options.hours * 3600
    return draw(
        seed, nodes=options.nodes, seconds=seconds, liveness=liveness, engine=options.engine, survivors=survivors
    )


def _one(options: argparse.Namespace) -> int:
    outcome = simulate(_draw(options.seed, options), record_history=options.history)
    if options.shrink and outcome.broken:
        outcome = simulate(shrink(outcome).setup, record_history=True)
    _print(outcome.history + _summary(outcome))
    return 1 if outcome.broken else 0


def _simulate_seed(options: argparse.Namespace, seed: int) -> tuple[int, str, dict[str, int], float]:
    outcome = simulate(_draw(seed, options))
    return seed, outcome.broken, outcome.counts, outcome.seconds


def _simulate_all(options: argparse.Namespace, seeds: range) -> Iterator[tuple[int, str, dict[str, int], float]]:
    """Run seeds in several processes, in batches, so that the caller can stop early."""
    simulate_seed = partial(_simulate_seed, options)
    if options.jobs == 1:
        yield from map(simulate_seed, seeds)
        return
    batch = _BATCH * options.jobs
    with ProcessPoolExecutor(options.jobs, initializer=_collect_seldom) as pool:
        for first in range(0, len(seeds), batch):
            yield from pool.map(simulate_seed, seeds[first : first + batch], chunksize=_BATCH // 8)


def _collect_seldom() -> None:
    """Run the garbage collector rarely: its default threshold costs a tenth of the time."""
    gc.freeze()
    gc.set_threshold(100_000)


def _many(options: argparse.Namespace) -> int:
    began = time.monotonic()
    counts: Counter[str] = Counter()
    simulated_s = 0.0
    broken = finished = 0
    start = options.start
    if start is None:
        start = random.SystemRandom().randrange(_FRESH)
        _print(f"first seed: {start} (--start {start} repeats this)\n")
    for seed, what_broke, counted, seconds in _simulate_all(options, range(start, start + options.seeds)):
        counts.update(counted)
        simulated_s += seconds
        finished += 1
        if what_broke:
            broken += 1
            _print(f"seed {seed}: {what_broke}\n")
            if broken >= options.max_broken:
                break
        if finished % _REPORT_EVERY == 0:
            _print(f"{finished} seeds, {broken} broken so far\n")
    faults = sum(count for name, count in counts.items() if name.startswith("fault "))
    _print(
        f"{finished} seeds, {broken} broken: {simulated_s / 3600:.1f} simulated hours, {counts['events']} events, "
        f"{counts['generations']} generations, {counts['verdicts']} verdicts, {faults} faults "
        f"in {time.monotonic() - began:.1f} s\n"
    )
    if broken:
        _print("to examine one: --seed SEED --history, or --seed SEED --shrink\n")
    return 1 if broken else 0


def _crowd(options: argparse.Namespace) -> int:
    import resource

    began = time.monotonic()
    setup = CrowdSetup(
        nodes=options.nodes or CrowdSetup().nodes,
        hours=options.hours or CrowdSetup().hours,
        deaths_per_minute=options.deaths_per_minute,
        spares=options.spares,
        seed=next(seed for seed in (options.seed, options.start, 1) if seed is not None),
    )
    outcome = simulate_crowd(setup)
    max_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    _print(
        f"{setup.nodes} nodes and {setup.spares} spares, {setup.hours:g} h, {outcome.deaths} deaths, "
        f"{outcome.generations} generations: {outcome.broken or 'every property holds'}\n"
        f"{outcome.events} events, {outcome.sent} messages sent in {time.monotonic() - began:.1f} s, "
        f"peak memory {max_mib} MiB, coordinator state {outcome.state_bytes / 1e6:.1f} MB as JSON\n"
    )
    return 1 if outcome.broken else 0


def _summary(outcome: Outcome) -> str:
    lines = [f"seed {outcome.setup.seed}: {outcome.broken or 'every property holds'}"]
    lines += [f"  {name}: {count}" for name, count in sorted(outcome.counts.items())]
    if outcome.broken:
        lines.append(f"  {len(outcome.setup.nodes)} nodes, {len(outcome.setup.faults)} faults: {outcome.setup}")
    return "\n".join(lines) + "\n"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tenax.testing.simulator",
        description="Simulate clusters with faults. A seed determines all that happens in a simulation.",
    )
    parser.add_argument("--seeds", type=int, default=100, help="number of simulations (default: 100)")
    parser.add_argument("--start", type=int, help="first seed (default: random, and printed)")
    parser.add_argument("--jobs", type=int, default=1, help="number of processes (default: 1)")
    parser.add_argument("--max-broken", type=int, default=20, help="stop after this many broken seeds (default: 20)")
    parser.add_argument("--seed", type=int, help="simulate only this seed")
    parser.add_argument(
        "--history", action="store_true", help="print the history of --seed: events, decisions and faults"
    )
    parser.add_argument(
        "--shrink",
        action="store_true",
        help="if --seed breaks a property, find a smaller setup that breaks it and print its history",
    )
    parser.add_argument("--nodes", type=int, default=0, help="number of nodes (default: drawn)")
    parser.add_argument("--hours", type=float, default=0.0, help="simulated hours with faults (default: drawn)")
    parser.add_argument(
        "--engine", choices=("", "tcp", "etcd"), default="", help="which engine the agents use (default: drawn)"
    )
    parser.add_argument(
        "--mode",
        choices=("", "safety", "liveness"),
        default="",
        help="safety: faults never stop; liveness: they stop, and the cluster must recover (default: drawn)",
    )
    parser.add_argument(
        "--survivors", choices=("", "yes", "no"), default="", help="whether workers can be held (default: drawn)"
    )
    parser.add_argument(
        "--deaths-per-minute",
        type=float,
        default=0.0,
        help="simulate the coordinator with many minimal nodes, of which this many die and are replaced per minute",
    )
    parser.add_argument(
        "--spares", type=int, default=0, help="with --deaths-per-minute: number of spare nodes (default: 0)"
    )
    return parser


def _print(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    _collect_seldom()
    sys.exit(main())
