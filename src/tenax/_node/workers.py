"""How the workers of a node are started: their entrypoint, and which CPUs and how many threads each may use."""

from __future__ import annotations

import os

import msgspec

from tenax._processes.entrypoint import CommandEntrypoint, FunctionEntrypoint

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from tenax._io.interfaces import Launch
    from tenax._processes.placement import Placement
    from tenax.numa.binding import NumaOptions


class Placements(msgspec.Struct, frozen=True):
    """The decision for all workers of a node, with notes for the user."""

    placement: Placement | None = None
    omp_num_threads: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()

    def bind(self, local_rank: int, launch: Launch) -> Launch:
        if self.placement is None or not self.placement.bindings:
            return launch
        return msgspec.structs.replace(launch, cpus=self.placement.bindings[local_rank].cpus)


def decide_placements(
    options: NumaOptions | None, local_world_size: int, environ: Mapping[str, str] = os.environ
) -> Placements:
    """Bind workers to CPUs if ``options`` are given, and divide the cores among them. Raises PlacementError."""
    if options is None and (local_world_size == 1 or "OMP_NUM_THREADS" in environ):
        return Placements()
    from tenax._processes.devices import allowed_cpus, cpu_quota, gpu_pci_bus_ids
    from tenax._processes.placement import devices_of_ranks, plan_placement, share_threads
    from tenax.numa._topology import Topology

    cpus, topology = allowed_cpus(), Topology()
    placement = None
    if options is not None:
        devices = devices_of_ranks(local_world_size, gpu_pci_bus_ids(environ))
        placement = plan_placement(options, devices, cpus, topology)
    shares = share_threads(environ, local_world_size, cpus, topology, placement, cpu_quota())
    notes = [decision.why for decision in (placement, shares) if decision is not None]
    return Placements(placement, shares.per_rank if shares is not None else (), tuple(notes))


def make_entrypoint(
    entrypoint: Callable[..., Any] | str,
    args_by_rank: Mapping[int, tuple[Any, ...]],
    start_method: str,
    name: str,
) -> CommandEntrypoint | FunctionEntrypoint:
    """Return a command for a string, else a function entrypoint. Exceptions of Python code are recorded for both."""
    if isinstance(entrypoint, str):
        argv = {rank: (entrypoint, *args) for rank, args in args_by_rank.items()}
        if not os.path.basename(entrypoint).startswith("python"):
            return CommandEntrypoint(argv, name)
        from tenax._failures.hook import hooked

        return CommandEntrypoint(argv, name, wrap_env=hooked)
    from tenax._failures.error_handler import record

    return FunctionEntrypoint(entrypoint, args_by_rank, wrap=record, start_method=start_method)
