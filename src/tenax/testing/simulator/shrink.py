"""Shrinking: finds a smaller setup that breaks the same property.

It removes faults after the failure, then other faults (halves first, then single ones), nodes, and kinds of worker
failures. A smaller setup counts only if it breaks the same property.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from tenax.testing.simulator.cluster import Outcome, Parts, simulate

if TYPE_CHECKING:
    from tenax.testing.simulator.setup import Setup


def shrink(broken: Outcome, parts: Parts | None = None, *, max_tries: int = 400) -> Outcome:
    """Return the smallest broken outcome found in ``max_tries`` tries."""
    best = broken
    tries = 0
    is_better = True
    while is_better and tries < max_tries:
        is_better = False
        for setup in _smaller(best):
            tries += 1
            outcome = simulate(setup, parts)
            if outcome.property == broken.property:
                best, is_better = outcome, True
                break
            if tries >= max_tries:
                break
    return best


def _smaller(outcome: Outcome) -> Iterator[Setup]:
    setup = outcome.setup
    replace = msgspec.structs.replace
    faults = setup.faults
    if not setup.calm_at:
        done = tuple(fault for fault in faults if fault.at <= outcome.seconds)
        if len(done) < len(faults):
            yield replace(setup, faults=done)
    size = len(faults) // 2
    while size:
        for start in range(0, len(faults), size):
            yield replace(setup, faults=faults[:start] + faults[start + size :])
        size //= 2
    for index in range(len(setup.nodes) - 1, 0, -1):
        nodes = setup.nodes[:index] + setup.nodes[index + 1 :]
        if len(nodes) >= setup.min_nodes:
            yield replace(setup, nodes=nodes)
    if setup.disturbance:
        yield replace(setup, disturbance="")
    behaviour = setup.behaviour
    for name in ("fails", "collateral", "ignores_term", "leaves_behind", "stuck"):
        if getattr(behaviour, name):
            yield replace(setup, behaviour=replace(behaviour, **{name: 0.0}))
