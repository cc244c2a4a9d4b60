"""The history of a run, from the traces of its workers, and the invariants of every history.

S1 one group per generation, S2 no process of an earlier generation is alive, S3 ranks are a permutation and all workers
get the same values, S4 each generation has its own master address, S5 the restart budget is counted once for the whole
run, S10 generations only grow.

Times are those of the monotonic clock, which all hosts of a lab share. A worker ran its first line at ``born_at`` and
was alive at its last line in the trace. A worker that finds a worker of an earlier generation alive is a violation,
whatever the times are.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from .traces import TraceReader

_TICK_S = 0.01


class Worker:
    """One process."""

    def __init__(self, start: dict[str, Any]) -> None:
        self.rank: int = start["rank"]
        self.local_rank: int = start["local_rank"]
        self.generation: int = start["generation"]
        self.world_size: int = start["world_size"]
        self.restart_count: int = start["restart_count"]
        self.master: tuple[str, str] = (start["master_addr"], start["master_port"])
        self.host: str = start["host"]
        self.pid: int = start["pid"]
        self.born_at: float = start["born_at"]
        self.alive_before: list[int] = start["alive_before"]
        self.last_at: float = start["at"]
        self.first_step = 0
        self.steps = 0  # the number of the last one
        self.is_finished = False

    def __repr__(self) -> str:
        return f"rank {self.rank} of generation {self.generation} on {self.host} (pid {self.pid})"


class Generation:
    """One generation: those of its workers that have started."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.workers: dict[int, Worker] = {}  # by pid

    def __repr__(self) -> str:
        where = ", ".join(f"{worker.rank} on {worker.host}" for worker in self.by_rank())
        return f"generation {self.number} of {self.world_size}: ranks {where}"

    def by_rank(self) -> list[Worker]:
        return sorted(self.workers.values(), key=lambda worker: (worker.rank, worker.born_at))

    @property
    def world_size(self) -> int:
        return next(iter(self.workers.values())).world_size

    @property
    def restart_count(self) -> int:
        return next(iter(self.workers.values())).restart_count

    @property
    def master(self) -> tuple[str, str]:
        return next(iter(self.workers.values())).master

    @property
    def hosts(self) -> list[str]:
        """The host of each rank."""
        return [worker.host for worker in self.by_rank()]

    @property
    def pids(self) -> set[int]:
        return set(self.workers)

    @property
    def first_born_at(self) -> float:
        return min(worker.born_at for worker in self.workers.values())

    @property
    def last_at(self) -> float:
        """When a worker was last known to be alive."""
        return max(worker.last_at for worker in self.workers.values())

    @property
    def is_at_work(self) -> bool:
        """True once every rank has done a step."""
        working = {worker.rank for worker in self.workers.values() if worker.steps or worker.is_finished}
        return working == set(range(self.world_size))

    @property
    def first_step(self) -> int:
        """The first step of any rank; 0: none."""
        return min((worker.first_step for worker in self.workers.values() if worker.steps), default=0)

    @property
    def last_step(self) -> int:
        return max(worker.steps for worker in self.workers.values())

    def pids_on(self, host: str) -> set[int]:
        return {worker.pid for worker in self.workers.values() if worker.host == host}


class History:
    def __init__(self, folder: Path) -> None:
        self._reader = TraceReader(folder)
        self.generations: dict[int, Generation] = {}

    def update(self) -> None:
        """Read what was written since the last call."""
        for line in self._reader.new():
            generation = self.generations.setdefault(line["generation"], Generation(line["generation"]))
            if line["event"] == "start":
                generation.workers[line["pid"]] = Worker(line)
                continue
            worker = generation.workers[line["pid"]]
            worker.last_at = line["at"]
            worker.steps = line["step"]
            worker.first_step = worker.first_step or line["step"]
            worker.is_finished = line["event"] == "end"

    def latest(self) -> Generation | None:
        return self.generations[max(self.generations)] if self.generations else None

    def in_order(self) -> list[Generation]:
        return [self.generations[number] for number in sorted(self.generations)]

    # --- invariants ---------------------------------------------------------------------------------------------------

    def violations(self, max_restarts: int) -> list[str]:
        generations = self.in_order()
        found = [problem for generation in generations for problem in _check_generation(generation)]
        found += [problem for pair in pairwise(generations) for problem in _check_pair(*pair)]
        found += _check_ports(generations)
        if generations and generations[-1].restart_count > max_restarts:
            found.append(f"S5: {generations[-1].restart_count} restarts; {max_restarts} are allowed")
        return found


def _check_generation(generation: Generation) -> Iterator[str]:
    workers = generation.by_rank()
    ranks = [worker.rank for worker in workers]
    if len(set(ranks)) != len(ranks):
        yield f"S1: a rank was assigned twice in {generation}"
    for name in ("world_size", "restart_count", "master"):
        values = {getattr(worker, name) for worker in workers}
        if len(values) != 1:
            yield f"S3: the workers of {generation} have different values of {name}: {values}"
    if not set(ranks) <= set(range(generation.world_size)):
        yield f"S3: the ranks of {generation} are {ranks}"
    nodes: dict[tuple[str, int], list[int]] = {}
    for worker in workers:
        nodes.setdefault((worker.host, worker.rank - worker.local_rank), []).append(worker.local_rank)
    for (host, first), locals_ in nodes.items():
        if sorted(locals_) != sorted(set(locals_)):
            yield f"S3: the node on {host} with ranks from {first} has local ranks {locals_} in {generation}"
    for worker in workers:
        if worker.alive_before:
            yield f"S2: {worker} found processes {worker.alive_before} of earlier generations alive"


def _check_pair(old: Generation, new: Generation) -> Iterator[str]:
    for worker in old.by_rank():
        if worker.last_at > new.first_born_at + _TICK_S:
            late_s = worker.last_at - new.first_born_at
            yield f"S1, S2: {worker} was alive {late_s:.3f} s after the start of {new}"
        if worker.born_at > new.first_born_at + _TICK_S:
            yield f"S10: {worker} was started after {new}"
    if new.restart_count < old.restart_count:
        yield f"S5: {new} counts fewer restarts than {old}"


def _check_ports(generations: list[Generation]) -> Iterator[str]:
    seen: dict[tuple[str, str], Generation] = {}
    for generation in generations:
        other = seen.setdefault(generation.master, generation)
        if other is not generation:
            yield f"S4: {generation} has the master address of {other}: {generation.master}"
