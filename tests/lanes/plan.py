"""A plan: everything that will go wrong in one run, and when. A pure function of its seed.

What is meant by a target ("the leader", "another") is found when the time has come: the same plan meets another
cluster each time. So a seed repeats what is done, not what follows from it.
"""

from __future__ import annotations

import random
from typing import Literal

import msgspec

Kind = Literal["kill", "stop", "start", "fail"]
Target = Literal["etcd leader", "etcd member", "all of etcd", "leader", "agent", "worker"]

LEAST_NODES, MAX_NODES = 2, 4
MAX_AGENTS = 5  # alive at a time: one more than there are places
SHORTEST_S, LONGEST_S = 0.5, 9.0
_FIRST_S = 0.3
_BURST_S = 0.4  # two faults so near to each other that nobody has got over the first
# What is drawn, and how often.
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
    lasts_s: float = 0.0  # until it is continued or started again; 0: not before everything is made well
    which: int = 0  # of several that could be meant

    def __str__(self) -> str:
        lasts = f" for {self.lasts_s:.1f} s" if self.lasts_s else ""
        return f"{self.at_s:6.2f}  {self.kind} {self.target}{lasts}"


class Plan(msgspec.Struct, frozen=True):
    seed: int
    agents: int
    faults: tuple[Fault, ...]
    max_restarts: int
    is_deaf: bool  # workers do not hear SIGTERM

    def __str__(self) -> str:
        workers = "deaf workers" if self.is_deaf else "workers"
        head = f"seed {self.seed}: {self.agents} agents, {workers}, max_restarts {self.max_restarts}"
        return "\n".join([head, *(f"  {fault}" for fault in self.faults)])


def draw(seed: int, seconds: float = 0.0) -> Plan:
    """``seconds``: how long faults begin; 0: that is drawn, too."""
    chance = random.Random(seed)
    length_s = chance.uniform(15.0, 25.0)
    length_s = seconds or length_s
    pairs, weights = list(_FAULTS), list(_FAULTS.values())
    faults: list[Fault] = []
    at_s = chance.uniform(_FIRST_S, 5.0) if length_s > 10 else chance.uniform(_FIRST_S, 3.0)
    while at_s < length_s:
        kind, target = chance.choices(pairs, weights)[0]
        lasts_s = 0.0
        if kind == "stop" or (kind == "kill" and "etcd" in target):
            lasts_s = round(chance.uniform(SHORTEST_S, LONGEST_S), 1)
            if kind == "kill" and chance.random() < 0.2:
                lasts_s = 0.0
        faults.append(Fault(round(at_s, 2), kind, target, lasts_s, chance.randrange(60)))
        at_s += chance.uniform(0.0, _BURST_S) if chance.random() < 0.35 else chance.uniform(1.0, 6.0)
    hurts = sum(fault.target == "worker" for fault in faults)
    return Plan(
        seed,
        agents=chance.choice((3, 4)),
        faults=tuple(faults),
        max_restarts=hurts + chance.choice((0, 2)),
        is_deaf=chance.random() < 0.25,
    )
