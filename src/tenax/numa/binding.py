"""What a user may ask for when workers are to be bound to processors. Values only: nothing here reads the machine."""

from __future__ import annotations

import enum

import msgspec

__all__ = ["AffinityMode", "NumaOptions"]


class AffinityMode(str, enum.Enum):
    """How close to its device a worker's CPUs must be. The device of a worker is the GPU of its local rank."""

    NODE = "node"  # all CPUs of the device's NUMA node
    SOCKET = "socket"  # all CPUs of every NUMA node of the device's socket
    EXCLUSIVE = "exclusive"  # whole cores of the device's NUMA node that no other worker of this host gets
    CORE_COMPLEX = "core-complex"  # the CPUs of the device's NUMA node that share one last-level cache


class NumaOptions(msgspec.Struct, frozen=True):
    """The binding asked for, and whether a job may start unbound when this machine cannot give it."""

    affinity_mode: AffinityMode
    should_fall_back_if_binding_fails: bool = False
