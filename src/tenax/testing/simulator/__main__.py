"""The command: many seeds, one seed told, one seed shrunk, or a crowd."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from tenax.testing.simulator.cluster import Outcome, simulate
from tenax.testing.simulator.draw import draw
from tenax.testing.simulator.shrink import shrink


def main(argv: list[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    liveness = {"": None, "safety": False, "liveness": True}[options.mode]
    wanted = {"nodes": options.nodes, "seconds": options.hours * 3600, "liveness": liveness}
    if options.seed is not None:
        outcome = simulate(draw(options.seed, **wanted), tell=options.tell)
        if options.shrink and outcome.broken:
            small = shrink(outcome)
            outcome = simulate(small.setup, tell=True)
        _say(outcome.history + _picture(outcome))
        return 1 if outcome.broken else 0
    return _many(range(options.start, options.start + options.seeds), wanted, most=options.most)


def _many(seeds: range, wanted: dict[str, object], *, most: int) -> int:
    began = time.monotonic()
    counts: Counter[str] = Counter()
    simulated = 0.0
    broken: list[int] = []
    for seed in seeds:
        outcome = simulate(draw(seed, **wanted))  # type: ignore[arg-type]
        counts.update(outcome.counts)
        simulated += outcome.seconds
        if outcome.broken:
            broken.append(seed)
            _say(f"seed {seed}: {outcome.broken}\n")
            if len(broken) >= most:
                break
    took = time.monotonic() - began
    faults = sum(count for name, count in counts.items() if name.startswith("fault "))
    _say(
        f"{len(seeds)} seeds, {len(broken)} broken; {simulated / 3600:.2f} simulated hours, {counts['events']} events, "
        f"{counts['generations']} generations, {counts['verdicts']} verdicts, {faults} faults in {took:.1f} s\n"
    )
    return 1 if broken else 0


def _picture(outcome: Outcome) -> str:
    lines = [f"seed {outcome.setup.seed}: {outcome.broken or 'every property holds'}"]
    lines += [f"  {name}: {count}" for name, count in sorted(outcome.counts.items())]
    if outcome.broken:
        lines.append(f"  {len(outcome.setup.nodes)} nodes, {len(outcome.setup.faults)} faults: {outcome.setup}")
    return "\n".join(lines) + "\n"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tenax.testing.simulator", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="how many seeds to play")
    parser.add_argument("--start", type=int, default=1, help="the first of them")
    parser.add_argument("--most", type=int, default=20, help="stop after so many broken ones")
    parser.add_argument("--seed", type=int, help="play this one only")
    parser.add_argument("--tell", action="store_true", help="print its history")
    parser.add_argument("--shrink", action="store_true", help="look for a smaller setup that breaks the same property")
    parser.add_argument("--nodes", type=int, default=0, help="how many nodes; unsaid: drawn")
    parser.add_argument("--hours", type=float, default=0.0, help="simulated hours with faults; unsaid: drawn")
    parser.add_argument("--mode", choices=("", "safety", "liveness"), default="", help="unsaid: drawn")
    return parser


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
