"""The topology in /sys is read correctly, whatever is missing in it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenax.numa import _sysfs as sysfs
from tenax.numa._topology import Topology


def write(root: Path, files: dict[str, str]) -> Topology:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return Topology(str(root))


@given(st.sets(st.integers(0, 600)))
def test_a_list_of_cpus_reads_back_as_it_was_written(cpus: set[int]) -> None:
    """Formatting and parsing are each other's inverse."""
    assert sysfs.parse_list(sysfs.format_list(cpus)) == cpus


def test_lists_are_written_as_the_kernel_writes_them() -> None:
    """Runs are ranges, single CPUs stand alone."""
    assert sysfs.format_list([8, 0, 1, 2, 3, 10, 11]) == "0-3,8,10-11"
    assert sysfs.parse_list("0-3,8, 10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert sysfs.parse_list("") == frozenset()


def test_an_empty_tree_gives_defaults(tmp_path: Path) -> None:
    """Without /sys, as on macOS or in a bare container."""
    topology = Topology(str(tmp_path / "nothing"))
    assert topology.nodes() == {}
    assert topology.socket_of(0) is None
    assert topology.cores({1, 0}) == [{0}, {1}]
    assert topology.core_complexes({0, 1}) == []
    assert topology.node_of_device("0000:17:00.0") is None


def test_nodes_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    """Node 10 comes after node 2; other entries of the folder are ignored."""
    files = {f"devices/system/node/node{n}/cpulist": str(n) for n in (10, 2, 0)}
    files["devices/system/node/possible"] = "0-31"
    files["devices/system/node/power/control"] = "auto"
    assert list(write(tmp_path, files).nodes()) == [0, 2, 10]


def test_a_kernel_without_numa_is_one_node(tmp_path: Path) -> None:
    """Without a folder of nodes all online CPUs are on node 0."""
    assert write(tmp_path, {"devices/system/cpu/online": "0-2,5"}).nodes() == {0: {0, 1, 2, 5}}


def test_cores_keep_only_the_cpus_in_question(tmp_path: Path) -> None:
    """A core with one allowed hardware thread is one core with that thread."""
    siblings = {0: "0,4", 4: "0,4", 1: "1,5", 5: "1,5"}
    files = {f"devices/system/cpu/cpu{c}/topology/thread_siblings_list": s for c, s in siblings.items()}
    topology = write(tmp_path, files)
    assert topology.cores([0, 1, 4, 5]) == [{0, 4}, {1, 5}]
    assert topology.cores([5, 4, 0]) == [{0, 4}, {5}]


def test_the_last_level_cache_is_the_highest_that_holds_data(tmp_path: Path) -> None:
    """Instruction caches are ignored."""
    files: dict[str, str] = {}
    for cpu in range(4):
        caches = [("1", "Data", str(cpu)), ("1", "Instruction", "0-3"), ("2", "Unified", str(cpu))]
        caches.append(("3", "Unified", "0-1" if cpu < 2 else "2-3"))
        for index, (level, kind, shared) in enumerate(caches):
            folder = f"devices/system/cpu/cpu{cpu}/cache/index{index}"
            files |= {f"{folder}/level": level, f"{folder}/type": kind, f"{folder}/shared_cpu_list": shared}
    topology = write(tmp_path, files)
    assert topology.core_complexes([3, 2, 1, 0]) == [{0, 1}, {2, 3}]
    assert topology.core_complexes([1, 3]) == [{1}, {3}]


def test_a_device_without_a_node_is_on_node_0(tmp_path: Path) -> None:
    """The kernel reports -1; a missing device has no node."""
    topology = write(
        tmp_path,
        {"bus/pci/devices/0000:00:06.0/numa_node": "-1", "bus/pci/devices/0000:81:00.0/numa_node": "3"},
    )
    assert topology.node_of_device("0000:00:06.0") == 0
    assert topology.node_of_device("0000:81:00.0") == 3


@pytest.mark.skipif(sys.platform != "linux", reason="Linux describes its processors in /sys")
def test_the_topology_of_this_machine_is_read() -> None:
    """Each CPU that this process may use is on one node and in one core."""
    allowed = os.sched_getaffinity(0)
    topology = Topology()
    assert allowed <= set().union(*topology.nodes().values())
    cores = topology.cores(allowed)
    assert sorted(cpu for core in cores for cpu in core) == sorted(allowed)
