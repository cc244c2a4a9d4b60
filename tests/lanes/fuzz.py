"""The command: untrusted input for every parser and both machines, drawn from seeds.

./dev fuzz                             fresh seeds, for 60 s
./dev fuzz --seconds 600 --target agent --target store
./dev fuzz --target journals --seed 17 --cases 1     one case again
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback
from collections import Counter

from .targets import TARGETS
from .values import Draw


def main(argv: list[str] | None = None) -> int:
    """Return 1 if a case broke something."""
    options = _parser().parse_args(argv)
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1 << 48)
    names = options.target or list(TARGETS)
    _print(f"first seed: {seed}")
    counts: Counter[str] = Counter()
    broken = 0
    began = time.monotonic()
    for number, name in enumerate(names, 1):
        until = began + options.seconds * number / len(names)
        cases, failed = _run(name, seed, options.cases, until)
        counts[name] += cases
        broken += failed
    took_s = time.monotonic() - began
    _print(f"{sum(counts.values())} cases, {broken} broken, in {took_s:.0f} s")
    _print("  " + ", ".join(f"{name}: {count}" for name, count in counts.items()))
    return 1 if broken else 0


def _run(name: str, seed: int, cases: int, until: float) -> tuple[int, int]:
    """Return how many cases were run, and how many of them broke something."""
    make, absurdity = TARGETS[name]
    target = make()
    played = failed = 0
    try:
        while (played < cases) if cases else time.monotonic() < until:
            number = seed + played
            played += 1
            try:
                target.case(Draw(random.Random(f"{name} {number}"), absurdity))
            except Exception:
                failed += 1
                _print(f"BROKEN: {name}, seed {number}\n{traceback.format_exc(limit=-12)}")
                _print(f"to repeat: ./dev fuzz --target {name} --seed {number} --cases 1\n")
                if failed >= 5:
                    break
    finally:
        target.close()
    return played, failed


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="./dev fuzz",
        description="Foreign input, drawn from seeds: valid messages with absurd values, valid sequences in any order.",
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="for how long, all targets together (default: 60)")
    parser.add_argument("--cases", type=int, default=0, help="so many of each target instead")
    parser.add_argument("--seed", type=int, help="the first seed (default: a fresh one, which is printed)")
    parser.add_argument("--target", action="append", choices=list(TARGETS), help="only this one; may be repeated")
    return parser


def _print(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
