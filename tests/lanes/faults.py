"""The command: many seeds, each a plan of faults that is played with real processes.

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
    """Returns 1 if something broke."""
    options = _parser().parse_args(argv)
    if find_etcd() is None:
        _say("there is no etcd, neither beside python nor on PATH; install it, or the extra 'test'")
        return 2
    counts: Counter[str] = Counter()
    failed: list[int] = []
    seeds = range(options.first, options.first + options.seeds)
    began = time.monotonic()
    for seed in seeds:
        played, broken = _play(seed, options.seconds)
        counts.update(played.counts)
        c = played.counts
        figures = f"{c.get('seconds', 0)} s, {c.get('generations', 0)} generations, {c.get('leaders', 0)} leaders"
        _say(f"seed {seed}: {'BROKEN' if broken else 'well'}, {figures}")
        if broken or options.tell:
            _say(f"{played.story}\n")
        if broken:
            failed.append(seed)
            _say("\n".join(f"BROKEN: {each}" for each in broken))
            _say(f"again: ./dev faults --first {seed} --seeds 1{_seconds(options.seconds)}\n")
    _say(f"{len(seeds)} seeds, {len(failed)} broken{_named(failed)}, in {time.monotonic() - began:.0f} s")
    _say("  " + ", ".join(f"{name}: {count}" for name, count in sorted(counts.items())))
    return 1 if failed else 0


def _play(seed: int, seconds: float) -> tuple[Play, list[str]]:
    with tempfile.TemporaryDirectory(prefix="tenax-lane-", ignore_cleanup_errors=True) as home:
        played = Play(draw(seed, seconds), Path(home))
        return played, played.run()


def _seconds(seconds: float) -> str:
    return f" --seconds {seconds:g}" if seconds else ""


def _named(seeds: list[int]) -> str:
    return f" ({', '.join(map(str, seeds))})" if seeds else ""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="./dev faults",
        description="Real agents, workers and a real etcd, with drawn faults; what must always hold is checked.",
    )
    parser.add_argument("--seeds", type=int, default=10, help="how many to play (default: 10)")
    parser.add_argument("--first", type=int, default=1, help="the first of them (default: 1)")
    parser.add_argument("--seconds", type=float, default=0.0, help="how long there are faults (default: drawn, 15..25)")
    parser.add_argument("--tell", action="store_true", help="print what happened also if nothing broke")
    return parser


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
