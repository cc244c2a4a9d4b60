"""A plan: the faults of one run and their times. A pure function of its seed.

Targets ("the leader", "another agent") are resolved at the time of the fault, so the same plan meets a different
cluster each time. A seed repeats the faults, not their consequences.
"""

from __future__ import annotations

import random
from typing import Literal

import msgspec

Kind = Literal["kill", "stop", "start", "fail"]
Target = Literal["etcd leader", "etcd member", "all of etcd", "leader", "agent", "worker"]

MIN_NODES, MAX_NODES = 2, 4
MAX_AGENTS = 5  # alive at a time: one more than MAX_NODES
MIN_FAULT_S, MAX_FAULT_S = 0.5, 9.0
_FIRST_S = 0.3
_BURST_S = 0.4  # maximum interval of faults in a burst
# Weights of the faults.
_FAULTS: dict[tuple[Kind, Target], int] = {
    ("kill", "etcd leader"): 2,
    ("stop", "etcd leader"): 2,
    ("kill", "etcd member"): 1,
    ("stop", "etcd member"): 1,
    ("kill", "all of etcd"): 2,
    ("stop", "all of etcd"): 2,
    ("kill", "leader"): 4,
    ("stop", "leader"): 4,
    ("kill", "agent"): 2,
    ("stop", "agent"): 3,
    ("start", "agent"): 3,
    ("fail", "worker"): 2,
    ("kill", "worker"): 2,
}


class Fault(msgspec.Struct, frozen=True):
    at_s: float  # since the agents were started
    kind: Kind
    target: Target
    lasts_s: float = 0.0  # until it is continued or restarted; 0: only at the end of the plan
    which: int = 0  # index among several possible targets

    def __str__(self) -> str:
        lasts = f" for {self.lasts_s:.1f} s" if self.lasts_s else ""
        return f"{self.at_s:6.2f}  {self.kind} {self.target}{lasts}"


class Plan(msgspec.Struct, frozen=True):
    seed: int
    agents: int
    faults: tuple[Fault, ...]
    max_restarts: int
    ignores_sigterm: bool

    def __str__(self) -> str:
        workers = "workers that ignore SIGTERM" if self.ignores_sigterm else "workers"
        head = f"seed {self.seed}: {self.agents} agents, {workers}, max_restarts {self.max_restarts}"
        return "\n".join([head, *(f"  {fault}" for fault in self.faults)])


def draw(seed: int, seconds: float = 0.0) -> Plan:
    """Return the plan of this seed. ``seconds``: how long faults begin; 0: random."""
    random_ = random.Random(seed)
    length_s = random_.uniform(15.0, 25.0)
    length_s = seconds or length_s
    pairs, weights = list(_FAULTS), list(_FAULTS.values())
    faults: list[Fault] = []
    at_s = random_.uniform(_FIRST_S, 5.0) if length_s > 10 else random_.uniform(_FIRST_S, 3.0)
    while at_s < length_s:
        kind, target = random_.choices(pairs, weights)[0]
        lasts_s = 0.0
        if kind == "stop" or (kind == "kill" and "etcd" in target):
            lasts_s = round(random_.uniform(MIN_FAULT_S, MAX_FAULT_S), 1)
            if kind == "kill" and random_.random() < 0.2:
                lasts_s = 0.0
        faults.append(Fault(round(at_s, 2), kind, target, lasts_s, random_.randrange(60)))
        at_s += random_.uniform(0.0, _BURST_S) if random_.random() < 0.35 else random_.uniform(1.0, 6.0)
    failures = sum(fault.target == "worker" for fault in faults)
    return Plan(
        seed,
        agents=random_.choice((3, 4)),
        faults=tuple(faults),
        max_restarts=failures + random_.choice((0, 2)),
        ignores_sigterm=random_.random() < 0.25,
    )
