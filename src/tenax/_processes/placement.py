"""Chooses the CPUs of each worker from the options, the machine's topology and the CPUs this process may use.

Pure planning: the keeper applies the plan with ``sched_setaffinity`` before ``exec``. Needs no ``numactl``.

1. A binding is planned for the *true* local rank in the agent, before ``--virtual-local-rank`` or anything else narrows
   what a worker sees, so the plan does not depend on the worker's environment.
2. A worker's CPUs are never empty and always among those this process may use.
3. All workers of a host are bound, or none: one unbound worker would run on the cores of the bound ones.
4. Two workers either have the same CPUs or none in common; with ``exclusive`` they never share a core, not even as
   two hardware threads.
5. The plan does not depend on the order in which the kernel lists its folders.

A worker with a GPU belongs to the GPU's NUMA node. Workers without one are spread over the nodes in order of rank, in
proportion to each node's usable cores: eight workers on two equal nodes are four and four, two on four nodes are on the
first and the third.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec

from tenax._core.text import counted
from tenax.numa._sysfs import format_list
from tenax.numa._topology import Topology
from tenax.numa.binding import AffinityMode, NumaOptions

_Value = TypeVar("_Value")


class PlacementError(ValueError):
    """The requested binding is not possible on this machine; the message says why and what to do."""


class Binding(msgspec.Struct, frozen=True):
    cpus: tuple[int, ...]  # sorted, never empty
    why: str  # "NUMA node 1 of GPU 0000:81:00.0, CPUs 8-15"


class Placement(msgspec.Struct, frozen=True):
    """The bindings of all local ranks, or of none, and the reason in one line."""

    bindings: tuple[Binding, ...]  # by local rank; empty: no worker is bound
    why: str


class ThreadShares(msgspec.Struct, frozen=True):
    """How many threads each worker's math libraries may start (``OMP_NUM_THREADS``), and the reason in one line."""

    per_rank: tuple[int, ...]
    why: str


def devices_of_ranks(local_world_size: int, pci_bus_ids: Sequence[str | None]) -> tuple[str | None, ...]:
    """Return the GPU of each local rank: ``local_rank % device_count``, as training scripts choose it."""
    return tuple(itertools.islice(itertools.cycle(pci_bus_ids or [None]), local_world_size))


def plan_placement(
    options: NumaOptions,
    devices: Sequence[str | None],
    allowed_cpus: Collection[int],
    topology: Topology,
) -> Placement:
    """Bind one worker per entry of ``devices``: the PCI bus id of each local rank's GPU, or None where it has none.

    Raises PlacementError if the binding is not possible, unless the options allow running unbound.
    """
    mode = AffinityMode(options.affinity_mode.value)
    try:
        bindings = _Planner(mode, devices, allowed_cpus, topology).bindings()
    except _Impossible as reason:
        if options.should_fall_back_if_binding_fails:
            return Placement((), f"workers are not bound to CPUs: {reason}")
        raise PlacementError(
            f"NUMA binding '{mode.value}' is not possible here: {reason}; choose another binding, or none."
        ) from None
    return Placement(bindings, _describe_bindings(mode, bindings))


def share_threads(
    environ: Mapping[str, str],
    local_world_size: int,
    allowed_cpus: Collection[int],
    topology: Topology,
    placement: Placement | None = None,
    cpu_quota: float | None = None,
) -> ThreadShares | None:
    """Return each worker's share of the physical cores; None with one worker, or if OMP_NUM_THREADS is set.

    By default every worker's math library starts a thread for every core of the machine. One thread each, as
    TorchElastic sets it, leaves most cores idle. ``cpu_quota`` is the CPU time this container may use, in CPUs.
    """
    if local_world_size <= 1 or "OMP_NUM_THREADS" in environ:
        return None
    if placement is not None and placement.bindings:
        cpu_sets = [binding.cpus for binding in placement.bindings]
    else:
        cpu_sets = [tuple(sorted(allowed_cpus))] * local_world_size
    cores = {cpus: len(topology.cores(cpus)) for cpus in set(cpu_sets)}
    shares = [cores[cpus] // cpu_sets.count(cpus) for cpus in cpu_sets]
    available = counted(sum(cores.values()), "core")
    if cpu_quota is not None and cpu_quota < sum(cores.values()):
        shares = [min(share, int(cpu_quota // local_world_size)) for share in shares]
        available = f"the {cpu_quota:g} CPUs of this container's quota"
    per_rank = tuple(max(share, 1) for share in shares)
    return ThreadShares(per_rank, _describe_threads(per_rank, available))


class _Impossible(Exception):
    """Why a binding is not possible, as a clause."""


class _Planner:
    def __init__(
        self,
        mode: AffinityMode,
        devices: Sequence[str | None],
        allowed_cpus: Collection[int],
        topology: Topology,
    ) -> None:
        self.mode = mode
        self.devices = devices
        self.allowed = frozenset(allowed_cpus)
        self.topology = topology
        self.nodes = topology.nodes()
        self.usable = {node: cpus & self.allowed for node, cpus in self.nodes.items()}

    def bindings(self) -> tuple[Binding, ...]:
        if not any(self.usable.values()):
            raise _Impossible(
                f"{self.topology.sysfs_root}/devices/system does not describe {_cpus(self.allowed)} "
                "that this process may use"
            )
        bound: dict[int, Binding] = {}
        for home, ranks in _ranks_by(self._homes()).items():
            nodes = self._nodes_of_socket(home) if self.mode is AffinityMode.SOCKET else (home,)
            for rank, cpus in zip(ranks, self._cpu_sets(home, nodes, ranks), strict=True):
                gpu = f" of GPU {self.devices[rank]}" if self.devices[rank] else ""
                bound[rank] = Binding(tuple(sorted(cpus)), f"{_numbered('NUMA node', nodes)}{gpu}, {_cpus(cpus)}")
        return tuple(bound[rank] for rank in sorted(bound))

    def _homes(self) -> list[int]:
        spread = self._spread() if None in self.devices else []
        homes = []
        for rank, device in enumerate(self.devices):
            node = spread[rank] if device is None else self.topology.node_of_device(device)
            if node is None:
                raise _Impossible(
                    f"{self.topology.sysfs_root}/bus/pci/devices has no NUMA node for GPU {device} of local rank {rank}"
                )
            homes.append(node)
        return homes

    def _spread(self) -> list[int]:
        """Divide the row of all cores into equal stretches, one per rank; a rank's node is where its stretch begins.

        So a node never gets more ranks than it has cores, unless the whole host has too few.
        """
        row = [node for node, cpus in self.usable.items() for _ in self.topology.cores(cpus)]
        return [row[rank * len(row) // len(self.devices)] for rank in range(len(self.devices))]

    def _nodes_of_socket(self, home: int) -> tuple[int, ...]:
        sockets = {node: self.topology.socket_of(min(cpus)) for node, cpus in self.nodes.items() if cpus}
        socket = sockets.get(home)
        if socket is None:
            raise _Impossible(f"the kernel does not report the socket of NUMA node {home}")
        return tuple(node for node, other in sockets.items() if other == socket)

    def _cpu_sets(self, home: int, nodes: Sequence[int], ranks: Sequence[int]) -> Sequence[frozenset[int]]:
        """Return the CPUs of each of the ranks whose node is ``home``."""
        usable = _union(self.usable[node] for node in nodes if node in self.usable)
        if not usable:
            there = _union(self.nodes[node] for node in nodes if node in self.nodes)
            where = f"{_numbered('NUMA node', nodes)} ({_cpus(there) if there else 'which has no CPU'})"
            raise _Impossible(
                f"{_ranks(ranks)} would go to {where}, but this process may use only {_cpus(self.allowed)}"
            )
        if self.mode is AffinityMode.EXCLUSIVE:
            return self._divided_cores(usable, home, len(ranks))
        if self.mode is AffinityMode.CORE_COMPLEX:
            complexes = self._complexes(usable, home)
            return [complexes[index % len(complexes)] for index in range(len(ranks))]
        return [usable] * len(ranks)

    def _divided_cores(self, cpus: frozenset[int], home: int, parts: int) -> list[frozenset[int]]:
        """Divide whole cores into equal parts; the first parts get one more each if there is a remainder."""
        cores = self.topology.cores(cpus)
        each, extra = divmod(len(cores), parts)
        if each == 0:
            raise _Impossible(
                f"NUMA node {home} has {counted(len(cores), 'usable core')} ({_cpus(cpus)}) for {parts} workers"
            )
        ends = [index * each + min(index, extra) for index in range(parts + 1)]
        return [_union(cores[first:last]) for first, last in itertools.pairwise(ends)]

    def _complexes(self, cpus: frozenset[int], home: int) -> list[frozenset[int]]:
        """Return the groups of CPUs that share a last-level cache, those with the most cores first."""
        complexes = self.topology.core_complexes(cpus)
        if not complexes:
            raise _Impossible(f"the kernel does not report which CPUs of NUMA node {home} share a cache")
        return sorted(complexes, key=lambda group: (-len(self.topology.cores(group)), -len(group), min(group)))


def _union(sets: Iterable[frozenset[int]]) -> frozenset[int]:
    return frozenset[int]().union(*sets)


def _numbered(noun: str, numbers: Collection[int]) -> str:
    return f"{noun}{'s' if len(numbers) > 1 else ''} {format_list(numbers)}"


def _cpus(cpus: Collection[int]) -> str:
    return _numbered("CPU", cpus)


def _ranks(ranks: Collection[int]) -> str:
    return _numbered("local rank", ranks)


def _ranks_by(values: Iterable[_Value]) -> dict[_Value, list[int]]:
    """Return the ranks with each value; ``values`` are in the order of ranks."""
    found: dict[_Value, list[int]] = {}
    for rank, value in enumerate(values):
        found.setdefault(value, []).append(rank)
    return found


def _describe_bindings(mode: AffinityMode, bindings: Iterable[Binding]) -> str:
    together = _ranks_by(binding.cpus for binding in bindings)
    parts = [f"{_ranks(ranks)} to {_cpus(cpus)}" for cpus, ranks in together.items()]
    return f"workers are bound to CPUs (NUMA binding '{mode.value}'): {', '.join(parts)}"


def _describe_threads(per_rank: tuple[int, ...], available: str) -> str:
    together = _ranks_by(per_rank)
    names = {n: "each worker" if len(together) == 1 else _ranks(ranks) for n, ranks in together.items()}
    value = ", ".join(f"OMP_NUM_THREADS={n} for {name}" for n, name in names.items())
    return f"{value}: {len(per_rank)} workers share {available}; set OMP_NUM_THREADS to override"
