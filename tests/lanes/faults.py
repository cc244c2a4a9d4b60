"""The command: many seeds, each a plan of faults that is executed with real processes.

./dev faults --seeds 100              the seeds 1 to 100, one after the other
./dev faults --first 17 --seeds 1     one of them again
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from kit.etcd import find_etcd

from .plan import draw
from .play import Play


def main(argv: list[str] | None = None) -> int:
    """Return 1 if an invariant was broken."""
    options = _parser().parse_args(argv)
    if find_etcd() is None:
        _print("etcd was not found beside python or on PATH; install it, or the extra 'test'")
        return 2
    counts: Counter[str] = Counter()
    failed: list[int] = []
    seeds = range(options.first, options.first + options.seeds)
    began = time.monotonic()
    for seed in seeds:
        play, broken = _run(seed, options.seconds)
        counts.update(play.counts)
        c = play.counts
        figures = f"{c.get('seconds', 0)} s, {c.get('generations', 0)} generations, {c.get('leaders', 0)} leaders"
        _print(f"seed {seed}: {'BROKEN' if broken else 'ok'}, {figures}")
        if broken or options.verbose:
            _print(f"{play.history_text}\n")
        if broken:
            failed.append(seed)
            _print("\n".join(f"BROKEN: {each}" for each in broken))
            _print(f"to repeat: ./dev faults --first {seed} --seeds 1{_seconds(options.seconds)}\n")
    _print(f"{len(seeds)} seeds, {len(failed)} broken{_named(failed)}, in {time.monotonic() - began:.0f} s")
    _print("  " + ", ".join(f"{name}: {count}" for name, count in sorted(counts.items())))
    return 1 if failed else 0


def _run(seed: int, seconds: float) -> tuple[Play, list[str]]:
    with tempfile.TemporaryDirectory(prefix="tenax-lane-", ignore_cleanup_errors=True) as home:
        play = Play(draw(seed, seconds), Path(home))
        return play, play.run()


def _seconds(seconds: float) -> str:
    return f" --seconds {seconds:g}" if seconds else ""


def _named(seeds: list[int]) -> str:
    return f" ({', '.join(map(str, seeds))})" if seeds else ""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="./dev faults",
        description="Run real agents, workers and etcd with random faults, and check the invariants.",
    )
    parser.add_argument("--seeds", type=int, default=10, help="number of seeds (default: 10)")
    parser.add_argument("--first", type=int, default=1, help="the first seed (default: 1)")
    parser.add_argument("--seconds", type=float, default=0.0, help="how long faults begin (default: random, 15 to 25)")
    parser.add_argument("--verbose", action="store_true", help="print the history even if nothing broke")
    return parser


def _print(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
