"""The command: agents that serve a coordinator are stopped with SIGSTOP, repeatedly, in several parallel clusters.

./dev freezes                       20 freezes of 30 s in 4 clusters, with the default lease
./dev freezes --times 4 --seconds 10 --clusters 2
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cluster.freezes import Freezes
from kit.cluster import Cluster
from kit.jobs import Runner
from lanes import print_line
from tenax._core.lease import LeaseTerms


def main(argv: list[str] | None = None) -> int:
    """Return 1 if two generations were ever alive at once, or a run did not continue."""
    options = _parser().parse_args(argv)
    began = time.monotonic()
    plans = [range(first, options.times, options.clusters) for first in range(options.clusters)]
    with ThreadPoolExecutor(options.clusters) as pool:
        results = list(pool.map(lambda numbers: _run(numbers, options), plans))
    done = sum((counts for counts, _ in results), Counter[str]())
    broken = [error_text for _, error_text in results if error_text]
    kinds = ", ".join(f"{kind}: {count}" for kind, count in sorted(done.items()))
    for error_text in broken:
        print_line(f"BROKEN: {error_text}")
    print_line(
        f"{done.total()} freezes of {options.seconds:g} s ({kinds}), lease {options.lease:g} s, "
        f"{len(broken)} clusters broken, in {time.monotonic() - began:.0f} s"
    )
    return 1 if broken else 0


def _run(numbers: range, options: argparse.Namespace) -> tuple[Counter[str], str]:
    """Run one cluster with its share of the freezes; return the error, or an empty text."""
    done: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="tenax-lane-", ignore_cleanup_errors=True) as home:
        cluster = Cluster(Runner(Path(home), f"freezes-{numbers.start}"))
        try:
            freezes = Freezes(cluster, options.lease, options.seconds)
            for number in numbers:
                kind = Freezes.KINDS[number % len(Freezes.KINDS)]
                before = freezes.generation
                freezes.freeze(kind)
                done[kind] += 1
                print_line(
                    f"freeze {number + 1} ({kind}): generation {before} -> {freezes.generation}, never two at once"
                )
            freezes.finish()
            cluster.close()
        except BaseException as error:  # an assertion, or pytest's own failure
            for agent in cluster.agents:
                agent.close()
            return done, f"{error}\n{cluster}"
    return done, ""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="./dev freezes", description="Stop the agents that serve a coordinator, repeatedly."
    )
    parser.add_argument("--times", type=int, default=20, help="total number of freezes (default: 20)")
    parser.add_argument("--seconds", type=float, default=30.0, help="duration of each (default: 30)")
    parser.add_argument("--clusters", type=int, default=4, help="number of parallel clusters (default: 4)")
    parser.add_argument("--lease", type=float, default=LeaseTerms().lease_s, help="in seconds (default: as in a run)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
