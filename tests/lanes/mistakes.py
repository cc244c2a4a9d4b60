"""The search for mistakes: each deliberate bug in the machines of links, leadership and agents must be found by a
simulation.

The test run uses one known seed for each (``broken_links.py``, ``broken_survivors.py`` and ``broken_leadership.py`` in
``testing/simulator``); this lane finds new ones. ``broken_leadership.py`` also has mistakes that a plan of faults
finds, and those that break nothing, with the reason.
"""

from __future__ import annotations

import argparse
import sys

from tenax.testing.simulator import draw, simulate
from testing.simulator import broken_leadership, broken_links, broken_survivors
from testing.simulator.broken_parts import parts_with


def main(argv: list[str] | None = None) -> int:
    """Returns 1 if a mistake was not found."""
    parser = argparse.ArgumentParser(prog="./dev mistakes", description="Find deliberate bugs by simulation.")
    parser.add_argument("names", nargs="*", help="which mistakes (default: all)")
    parser.add_argument("--seeds", type=int, default=20_000, help="maximum number of seeds for each (default: 20000)")
    parser.add_argument("--start", type=int, default=1, help="first seed (default: 1)")
    options = parser.parse_args(argv)
    missed = 0
    engines: dict[type, str] = {
        **dict.fromkeys(broken_links.MISTAKES, "tcp"),
        **dict.fromkeys(broken_survivors.MISTAKES, "tcp"),
        **dict.fromkeys(broken_leadership.MISTAKES, "etcd"),
    }
    for part, engine in engines.items():
        if not options.names or part.__name__ in options.names:
            found = _find(part, engine, range(options.start, options.start + options.seeds))
            sys.stdout.write(f"{part.__name__}: {found or 'not found'}\n")
            sys.stdout.flush()
            missed += not found
    return 1 if missed else 0


def _find(part: type, engine: str, seeds: range) -> str:
    for seed in seeds:
        setup = draw(seed, engine=engine, survivors=part in broken_survivors.MISTAKES)
        outcome = simulate(setup, parts_with(part))
        if outcome.broken and not simulate(setup).broken:
            return f"seed {seed}, {outcome.broken}"
    return ""


if __name__ == "__main__":
    sys.exit(main())
