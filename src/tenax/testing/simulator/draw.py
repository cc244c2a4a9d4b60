"""Draws a setup from a seed.

Each seed omits most kinds of faults, so that combinations of a few occur often and none always masks another.
"""

from __future__ import annotations

import random

import msgspec

from tenax._core.authority import AuthorityTerms
from tenax._core.lease import LeaseTerms
from tenax.testing.simulator.liveness import DISTURBANCES
from tenax.testing.simulator.setup import ENDPOINT, Delays, Engine, Fault, NodePlan, Setup, WorkerBehaviour

# For each kind of fault: how often per minute it happens if it is not omitted, and its minimum and maximum duration.
KINDS: dict[str, tuple[float, float, float]] = {
    "slow": (1.0, 1.0, 10.0),
    "stall": (3.0, 0.1, 8.0),
    "break": (4.0, 0.0, 0.0),
    "partition": (2.0, 0.5, 15.0),
    "split": (1.0, 0.5, 15.0),
    "flap": (1.0, 2.0, 15.0),
    "pause": (3.0, 1.0, 120.0),
    "freeze": (1.5, 1.0, 120.0),
    "crash": (2.0, 0.05, 8.0),
    "kill_coordinator": (2.0, 0.05, 6.0),
    "power": (1.0, 0.5, 15.0),
    "fail": (2.0, 0.0, 0.0),
    "drain": (1.0, 0.0, 2.0),
    "notice": (1.0, 1.0, 30.0),
    "join": (1.5, 0.0, 0.0),
    "replace": (1.5, 0.0, 0.0),
    "cancel": (0.3, 0.0, 0.0),
    "restart_request": (0.5, 0.0, 0.0),
    "drain_request": (0.5, 0.0, 0.0),
}


# Only with etcd.
ETCD_KINDS: dict[str, tuple[float, float, float]] = {"etcd_cut": (2.0, 0.5, 40.0), "etcd_down": (0.7, 0.5, 40.0)}
# Drawn apart, so that the others stay as they were.
ISOLATION: dict[str, tuple[float, float, float]] = {"isolate": (1.0, 2.0, 90.0)}


def draw(
    seed: int,
    *,
    nodes: int = 0,
    seconds: float = 0.0,
    liveness: bool | None = None,
    engine: str = "tcp",
    survivors: bool | None = None,
) -> Setup:
    """Return the setup of a seed. Parameters that are not given are drawn; ``engine`` is "tcp", "etcd" or "".

    ``survivors``: whether workers can be held. Without them, a seed has the history that it had before there were any.
    """
    rng = random.Random(seed)  # noqa: S311 - a simulation must repeat itself
    rare = random.Random(f"rare {seed}")  # noqa: S311 - what it draws leaves the other draws as they are
    has_long_grace = rare.random() < 0.15
    count = nodes or rng.choice((2, 3, 3, 4, 4, 5, 6))
    is_calm = rng.random() < 0.5 if liveness is None else liveness
    faults_s = seconds or rng.choice((20.0, 60.0, 60.0, 180.0))
    plans = _nodes(rng, count)
    min_nodes = rng.choice((1, 1, 2, count, max(1, count - 1)))
    are_ranked = any(plan.rank >= 0 for plan in plans)
    max_nodes = count if are_ranked else max(min_nodes, rng.choice((count, count, count - 1, 2)))
    setup = Setup(
        seed=seed,
        nodes=plans,
        seconds=faults_s + ((120.0, 400.0)[has_long_grace] if is_calm else 0.0),
        min_nodes=min(min_nodes, max_nodes),
        max_nodes=max_nodes,
        max_restarts=rng.choice((0, 2, 10, 100, 100)),
        pause_s=rng.choice((0.0, 0.0, 0.0, 1.5)),
        join_timeout_s=rng.choice((15.0, 40.0, 60.0)),
        last_call_s=rng.choice((0.2, 1.0, 3.0)),
        scale_up=rng.random() < 0.8,
        grace_s=(rng.choice((0.5, 2.0, 3.0)), 40.0)[has_long_grace],  # 40 s: a new coordinator recovers sooner
        abandon_s=rng.choice((2.0, 5.0)),
        terms=LeaseTerms(),
        delays=Delays(jitter_s=rng.choice((0.0005, 0.002, 0.02)), slow_s=rng.choice((0.02, 0.1, 0.4))),
        behaviour=_with_survivors(_behaviour(rng), random.Random(f"survivors {seed}"), survivors),  # noqa: S311
        engine=Engine(give_up_s=60.0),
        faults=_faults(rng, faults_s, KINDS, any(plan.name for plan in plans)),
        calm_at=faults_s if is_calm else 0.0,
        disturbance=rng.choice(DISTURBANCES) if is_calm else "",
    )
    rng = random.Random(f"etcd {seed}")  # noqa: S311 - as above
    if engine == "tcp" or (not engine and rng.random() < 0.5):
        return setup
    faults = (*setup.faults, *_faults(rng, faults_s, ETCD_KINDS, has_names=False))
    rng = random.Random(f"isolate {seed}")  # noqa: S311 - as above
    faults += _faults(rng, faults_s, ISOLATION, has_names=False)
    return msgspec.structs.replace(
        setup,
        has_etcd=True,
        terms=AuthorityTerms().lease,
        faults=tuple(sorted(faults, key=lambda fault: fault.at)),
        seconds=setup.seconds + (60.0 if is_calm else 0.0),
        record_s=60 if random.Random(f"record {seed}").random() < 0.1 else setup.record_s,  # noqa: S311 - as above
    )


def _nodes(rng: random.Random, count: int) -> tuple[NodePlan, ...]:
    are_named, are_ranked = rng.random() < 0.4, rng.random() < 0.1
    are_ordered = rng.random() < 0.1
    at_endpoint = rng.choice((1, 1, 2))
    spread_s = rng.choice((0.0, 0.5, 6.0))
    return tuple(
        NodePlan(
            host=ENDPOINT if number < at_endpoint else number - at_endpoint + 1,
            start_at=spread_s * rng.random(),
            slots=rng.choice((1, 1, 2)),
            name=f"node-{number}" if are_named else "",
            rank=number if are_ranked else -1,
            order=f"rack-{number}" if are_ordered else "",
        )
        for number in range(count)
    )


def _behaviour(rng: random.Random) -> WorkerBehaviour:
    return WorkerBehaviour(
        start_s=rng.choice((0.005, 0.05, 0.3)),
        generation_s=rng.choice((6.0, 30.0, 1e6, 1e6)),
        fails=rng.choice((0.0, 0.0, 0.1, 0.3)),
        fails_within_s=rng.choice((1.0, 20.0)),
        collateral=rng.choice((0.0, 0.6, 1.0)),
        collateral_s=rng.choice((0.1, 1.0)),
        ignores_term=rng.choice((0.0, 0.1, 0.5)),
        ends_within_s=rng.choice((0.002, 0.3)),
        leaves_behind=rng.choice((0.0, 0.2)),
        stuck=rng.choice((0.0, 0.0, 0.0, 0.01)),
        kill_s=rng.choice((0.02, 0.4)),
    )


def _with_survivors(behaviour: WorkerBehaviour, rng: random.Random, survivors: bool | None) -> WorkerBehaviour:
    if not (rng.random() < 0.5 if survivors is None else survivors):
        return behaviour
    return msgspec.structs.replace(
        behaviour,
        opts_in=rng.choice((0.5, 1.0, 1.0)),
        opts_in_within_s=rng.choice((0.01, 0.1, 2.0)),
        acknowledges_within_s=rng.choice((0.01, 0.3, 1.5)),
        hold_timeout_s=rng.choice((0.2, 1.0, 5.0)),
        deaf=rng.choice((0.0, 0.1, 0.4)),
        dies_held=rng.choice((0.0, 0.1, 0.5)),
        closes_channel=rng.choice((0.0, 0.0, 0.1)),
        clears_within_s=rng.choice((0.002, 0.3, 3.0)),
    )


def _faults(
    rng: random.Random, seconds: float, rates: dict[str, tuple[float, float, float]], has_names: bool
) -> tuple[Fault, ...]:
    kinds = [kind for kind in rates if rng.random() < 0.3 and (has_names or kind != "replace")]
    often = rng.choice((0.5, 1.0, 1.0, 3.0))
    faults: list[Fault] = []
    for kind in kinds:
        per_minute, min_s, max_s = rates[kind]
        per_minute *= often if kind != "cancel" else 1.0
        at = rng.expovariate(per_minute / 60)
        while at < seconds:
            lasts = min_s + (max_s - min_s) * rng.random() ** 2
            b = rng.choice((0, 0, 1, 2, 3)) if kind == "kill_coordinator" else rng.randrange(6)
            faults.append(Fault(at, kind, rng.randrange(64), b, lasts))
            at += rng.expovariate(per_minute / 60)
    return tuple(sorted(faults, key=lambda fault: fault.at))
