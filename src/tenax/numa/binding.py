"""Options for binding workers to CPUs. Values only; nothing here reads the topology."""

from __future__ import annotations

import enum

import msgspec

__all__ = ["AffinityMode", "NumaOptions"]


class AffinityMode(str, enum.Enum):
    """Which CPUs a worker gets, relative to its device: the GPU of its local rank."""

    NODE = "node"  # all CPUs of the device's NUMA node
    SOCKET = "socket"  # all CPUs of every NUMA node of the device's socket
    EXCLUSIVE = "exclusive"  # whole cores of the device's NUMA node that no other worker of this host gets
    CORE_COMPLEX = "core-complex"  # the CPUs of the device's NUMA node that share one last-level cache


class NumaOptions(msgspec.Struct, frozen=True):
    """The requested binding, and whether the job may start without it if it is impossible on this host."""

    affinity_mode: AffinityMode
    should_fall_back_if_binding_fails: bool = False
