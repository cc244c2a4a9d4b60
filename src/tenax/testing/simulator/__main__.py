"""The command line: run many seeds, print or shrink one seed, or run a crowd."""

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
from tenax.testing.simulator.crowd import CrowdSetup, play_crowd
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
    return draw(seed, nodes=options.nodes, seconds=options.hours * 3600, liveness=liveness)


def _one(options: argparse.Namespace) -> int:
    outcome = simulate(_draw(options.seed, options), tell=options.tell)
    if options.shrink and outcome.broken:
        outcome = simulate(shrink(outcome).setup, tell=True)
    _print(outcome.history + _summary(outcome))
    return 1 if outcome.broken else 0


def _play(options: argparse.Namespace, seed: int) -> tuple[int, str, dict[str, int], float]:
    outcome = simulate(_draw(seed, options))
    return seed, outcome.broken, outcome.counts, outcome.seconds


def _play_all(options: argparse.Namespace, seeds: range) -> Iterator[tuple[int, str, dict[str, int], float]]:
    """Run seeds in several processes, in batches, so that the caller can stop early."""
    play = partial(_play, options)
    if options.jobs == 1:
        yield from map(play, seeds)
        return
    batch = _BATCH * options.jobs
    with ProcessPoolExecutor(options.jobs, initializer=_collect_seldom) as pool:
        for first in range(0, len(seeds), batch):
            yield from pool.map(play, seeds[first : first + batch], chunksize=_BATCH // 8)


def _collect_seldom() -> None:
    """Run the garbage collector rarely: its default threshold costs a tenth of the time."""
    gc.freeze()
    gc.set_threshold(100_000)


def _many(options: argparse.Namespace) -> int:
    began = time.monotonic()
    counts: Counter[str] = Counter()
    simulated_s = 0.0
    broken = played = 0
    start = options.start
    if start is None:
        start = random.SystemRandom().randrange(_FRESH)
        _print(f"first seed: {start} (--start {start} repeats this)\n")
    for seed, what_broke, counted, seconds in _play_all(options, range(start, start + options.seeds)):
        counts.update(counted)
        simulated_s += seconds
        played += 1
        if what_broke:
            broken += 1
            _print(f"seed {seed}: {what_broke}\n")
            if broken >= options.most:
                break
        if played % _REPORT_EVERY == 0:
            _print(f"{played} seeds, {broken} broken so far\n")
    faults = sum(count for name, count in counts.items() if name.startswith("fault "))
    _print(
        f"{played} seeds, {broken} broken: {simulated_s / 3600:.1f} simulated hours, {counts['events']} events, "
        f"{counts['generations']} generations, {counts['verdicts']} verdicts, {faults} faults "
        f"in {time.monotonic() - began:.1f} s\n"
    )
    if broken:
        _print("look at one with --seed SEED --tell, or --seed SEED --shrink\n")
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
    outcome = play_crowd(setup)
    most_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    _print(
        f"{setup.nodes} nodes and {setup.spares} spares, {setup.hours:g} h, {outcome.deaths} deaths, "
        f"{outcome.generations} generations: {outcome.broken or 'every property holds'}\n"
        f"{outcome.events} events, {outcome.sent} messages sent in {time.monotonic() - began:.1f} s, "
        f"{most_mib} MiB at most, the coordinator's state is {outcome.state_bytes / 1e6:.1f} MB as JSON\n"
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
        description="Simulated clusters with everything going wrong, each out of one seed.",
    )
    parser.add_argument("--seeds", type=int, default=100, help="how many seeds to play (default: 100)")
    parser.add_argument("--start", type=int, help="the first of them (default: drawn afresh, and printed)")
    parser.add_argument("--jobs", type=int, default=1, help="how many processes play them (default: 1)")
    parser.add_argument("--most", type=int, default=20, help="stop after this many broken seeds (default: 20)")
    parser.add_argument("--seed", type=int, help="play this one only")
    parser.add_argument("--tell", action="store_true", help="print its history")
    parser.add_argument("--shrink", action="store_true", help="if it is broken, look for a smaller setup that is, too")
    parser.add_argument("--nodes", type=int, default=0, help="how many nodes (default: drawn from the seed)")
    parser.add_argument("--hours", type=float, default=0.0, help="simulated hours with faults (default: drawn)")
    parser.add_argument("--mode", choices=("", "safety", "liveness"), default="", help="(default: drawn)")
    parser.add_argument(
        "--deaths-per-minute",
        type=float,
        default=0.0,
        help="play a crowd: the coordinator and many minimal nodes, of which this many die and are replaced per minute",
    )
    parser.add_argument("--spares", type=int, default=0, help="of a crowd, beyond its nodes")
    return parser


def _print(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    _collect_seldom()
    sys.exit(main())
