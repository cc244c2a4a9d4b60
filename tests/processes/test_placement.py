"""Placement of workers, on /sys trees in a temporary folder. Numbers in brackets cite the invariants."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tenax._processes.devices import allowed_cpus, gpu_pci_bus_ids
from tenax._processes.placement import (
    Binding,
    Placement,
    PlacementError,
    devices_of_ranks,
    plan_placement,
    share_threads,
)
from tenax.numa._sysfs import format_list, parse_list
from tenax.numa._topology import Topology
from tenax.numa.binding import AffinityMode, NumaOptions

NODE, SOCKET, EXCLUSIVE, COMPLEX = AffinityMode


@dataclass(frozen=True)
class Machine:
    """A host with CPUs numbered as on x86 Linux: first one thread of every core, then the other threads."""

    sockets: int = 2
    nodes_per_socket: int = 2
    cores_per_node: int = 4
    threads: int = 2
    cores_per_complex: int = 2
    offline: frozenset[int] = frozenset()
    gpu_nodes: tuple[int, ...] = ()  # the NUMA node of each GPU in PCI order
    hide: frozenset[str] = field(default=frozenset())  # "cache", "socket", "memory"

    @property
    def cores(self) -> int:
        return self.sockets * self.nodes_per_socket * self.cores_per_node

    @property
    def cpus(self) -> frozenset[int]:
        return frozenset(range(self.cores * self.threads)) - self.offline

    @property
    def gpus(self) -> tuple[str, ...]:
        return tuple(f"0000:{0x10 + 0x11 * index:02x}:00.0" for index in range(len(self.gpu_nodes)))

    def siblings(self, core: int) -> frozenset[int]:
        return frozenset(core + self.cores * thread for thread in range(self.threads)) - self.offline

    def files(self) -> dict[str, str]:
        cpu, node = "devices/system/cpu", "devices/system/node"
        files = {f"{cpu}/online": format_list(self.cpus), f"{cpu}/possible": f"0-{self.cores * self.threads - 1}"}
        cores_of: dict[str, list[int]] = {}
        for core in range(self.cores):
            cores_of.setdefault(f"node{core // self.cores_per_node}", []).append(core)
            cores_of.setdefault(f"complex{core // self.cores_per_complex}", []).append(core)
        shared = {name: frozenset().union(*map(self.siblings, cores)) for name, cores in cores_of.items()}
        for number in range(self.sockets * self.nodes_per_socket):
            files[f"{node}/node{number}/cpulist"] = format_list(shared[f"node{number}"])
        for number in self.cpus:
            core = number % self.cores
            here = f"{cpu}/cpu{number}"
            files[f"{here}/topology/thread_siblings_list"] = format_list(self.siblings(core))
            if "socket" not in self.hide:
                socket = core // (self.cores_per_node * self.nodes_per_socket)
                files[f"{here}/topology/physical_package_id"] = str(socket)
            if "cache" not in self.hide:
                own = format_list(self.siblings(core))
                together = format_list(shared[f"complex{core // self.cores_per_complex}"])
                levels = (
                    ("1", "Data", own),
                    ("1", "Instruction", own),
                    ("2", "Unified", own),
                    ("3", "Unified", together),
                )
                for index, (level, kind, cpus) in enumerate(levels):
                    files[f"{here}/cache/index{index}/level"] = level
                    files[f"{here}/cache/index{index}/type"] = kind
                    files[f"{here}/cache/index{index}/shared_cpu_list"] = cpus
        for bus_id, number in zip(self.gpus, self.gpu_nodes, strict=True):
            files[f"bus/pci/devices/{bus_id}/numa_node"] = str(number)
        return files

    def build(self, root: Path, order: random.Random | None = None) -> Topology:
        files = list(self.files().items())
        if order is not None:
            order.shuffle(files)
        for name, text in files:
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")
        return Topology(str(root))


# 2 sockets × 2 nodes × 4 cores × 2 threads.
# Node 0: CPUs 0-3,16-19; node 1: 4-7,20-23; node 2: 8-11,24-27; node 3: 12-15,28-31.
SERVER = Machine(gpu_nodes=(0, 0, 1, 1, 2, 2, 3, 3))
LAPTOP = Machine(sockets=1, nodes_per_socket=1, cores_per_node=8, cores_per_complex=8)


def plan(
    machine: Machine,
    root: Path,
    mode: AffinityMode,
    devices: tuple[str | None, ...],
    allowed: frozenset[int] | None = None,
    fall_back: bool = False,
) -> Placement:
    topology = Topology(str(root)) if root.joinpath("devices").exists() else machine.build(root)
    return plan_placement(NumaOptions(mode, fall_back), devices, machine.cpus if allowed is None else allowed, topology)


def sets(placement: Placement) -> list[str]:
    return [format_list(binding.cpus) for binding in placement.bindings]


def node_of(binding: Binding) -> str:
    return binding.why.partition(",")[0].partition(" of ")[0]


def test_node_gives_all_cpus_of_the_node_of_the_ranks_gpu(tmp_path: Path) -> None:
    """Two GPUs on each of four nodes: each pair of workers gets its node; the reason names the GPU."""
    placement = plan(SERVER, tmp_path, NODE, SERVER.gpus)
    nodes = ["0-3,16-19", "4-7,20-23", "8-11,24-27", "12-15,28-31"]
    assert sets(placement) == [node for node in nodes for _ in range(2)]
    assert placement.bindings[2].why == f"NUMA node 1 of GPU {SERVER.gpus[2]}, CPUs 4-7,20-23"
    assert placement.why == (
        "workers are bound to CPUs (NUMA binding 'node'): local ranks 0-1 to CPUs 0-3,16-19, local ranks 2-3 to "
        "CPUs 4-7,20-23, local ranks 4-5 to CPUs 8-11,24-27, local ranks 6-7 to CPUs 12-15,28-31"
    )


def test_socket_gives_all_nodes_of_the_socket(tmp_path: Path) -> None:
    """The CPUs of both nodes of a socket."""
    placement = plan(SERVER, tmp_path, SOCKET, SERVER.gpus)
    assert sets(placement) == ["0-7,16-23"] * 4 + ["8-15,24-31"] * 4
    assert placement.bindings[7].why.startswith("NUMA nodes 2-3 of GPU ")


def test_exclusive_divides_whole_cores(tmp_path: Path) -> None:
    """[4] Both hardware threads of a core go to the same worker, and no core to two."""
    assert sets(plan(SERVER, tmp_path, EXCLUSIVE, SERVER.gpus)) == [
        *("0-1,16-17", "2-3,18-19", "4-5,20-21", "6-7,22-23"),
        *("8-9,24-25", "10-11,26-27", "12-13,28-29", "14-15,30-31"),
    ]


def test_exclusive_gives_remaining_cores_to_the_first_workers(tmp_path: Path) -> None:
    """Four cores for three workers: two, one, one."""
    assert sets(plan(SERVER, tmp_path, EXCLUSIVE, SERVER.gpus[:1] * 3)) == ["0-1,16-17", "2,18", "3,19"]


def test_exclusive_needs_a_core_for_each_worker(tmp_path: Path) -> None:
    """Hardware threads are not cores: five workers do not fit on four cores with eight threads."""
    with pytest.raises(PlacementError) as raised:
        plan(SERVER, tmp_path, EXCLUSIVE, SERVER.gpus[:1] * 5)
    assert str(raised.value) == (
        "NUMA binding 'exclusive' is not possible here: NUMA node 0 has 4 usable cores (CPUs 0-3,16-19) for 5 workers; "
        "choose another binding, or none."
    )


def test_core_complexes_are_assigned_in_turn_the_largest_first(tmp_path: Path) -> None:
    """Of two caches the one with more usable cores is first; a third worker gets the first again."""
    placement = plan(SERVER, tmp_path, COMPLEX, SERVER.gpus[:1] * 3, allowed=SERVER.cpus - {1, 17})
    assert sets(placement) == ["2-3,18-19", "0,16", "2-3,18-19"]


def test_equal_core_complexes_are_assigned_in_order_of_cpus(tmp_path: Path) -> None:
    assert sets(plan(SERVER, tmp_path, COMPLEX, SERVER.gpus[:2])) == ["0-1,16-17", "2-3,18-19"]


def test_gpus_in_another_order_than_the_nodes(tmp_path: Path) -> None:
    """Only the node of the GPU counts."""
    machine = Machine(gpu_nodes=(3, 1, 1, 0))
    placement = plan(machine, tmp_path, EXCLUSIVE, machine.gpus)
    assert sets(placement) == ["12-15,28-31", "4-5,20-21", "6-7,22-23", "0-3,16-19"]


def test_a_gpu_without_a_node_is_on_node_0(tmp_path: Path) -> None:
    """Virtual machines report -1."""
    machine = Machine(sockets=1, nodes_per_socket=1, gpu_nodes=(-1,))
    assert sets(plan(machine, tmp_path, NODE, machine.gpus)) == ["0-7"]


def test_virtual_local_rank_does_not_change_the_placement(tmp_path: Path) -> None:
    """[1] With --virtual-local-rank every worker sees local rank 0 and one GPU; the plan does not.

    The plan takes the agent's view of the GPUs, and what a worker sees afterwards does not enter into it.
    """
    bus_ids = devices_of_ranks(4, SERVER.gpus[4:])
    placement = plan(SERVER, tmp_path, NODE, bus_ids)
    assert sets(placement) == ["8-11,24-27"] * 2 + ["12-15,28-31"] * 2


def test_more_workers_than_gpus_share_them_in_turn() -> None:
    """With two GPUs worker 2 gets GPU 0 again; without GPUs no worker has one."""
    assert devices_of_ranks(3, ["a", "b"]) == ("a", "b", "a")
    assert devices_of_ranks(1, ["a", "b"]) == ("a",)
    assert devices_of_ranks(2, []) == (None, None)


@pytest.mark.parametrize(
    ("workers", "nodes"),
    [(1, [0]), (2, [0, 2]), (4, [0, 1, 2, 3]), (6, [0, 0, 1, 2, 2, 3]), (8, [0, 0, 1, 1, 2, 2, 3, 3])],
)
def test_without_gpus_workers_are_spread_over_the_nodes(tmp_path: Path, workers: int, nodes: list[int]) -> None:
    """Equal nodes get equal numbers of workers, in order of rank."""
    placement = plan(SERVER, tmp_path, NODE, (None,) * workers)
    assert [node_of(binding) for binding in placement.bindings] == [f"NUMA node {node}" for node in nodes]


def test_without_gpus_a_node_with_few_cores_gets_few_workers(tmp_path: Path) -> None:
    """A node with one usable core gets one of five workers, so an exclusive binding stays possible."""
    allowed = parse_list("0-3,16-19,4,20")
    placement = plan(SERVER, tmp_path, EXCLUSIVE, (None,) * 5, allowed=allowed)
    assert sets(placement) == ["0,16", "1,17", "2,18", "3,19", "4,20"]


def test_a_machine_with_one_node(tmp_path: Path) -> None:
    """NODE, SOCKET and CORE_COMPLEX are the whole machine; EXCLUSIVE divides its cores."""
    devices = (None,) * 4
    assert sets(plan(LAPTOP, tmp_path, NODE, devices)) == ["0-15"] * 4
    assert sets(plan(LAPTOP, tmp_path, SOCKET, devices)) == ["0-15"] * 4
    assert sets(plan(LAPTOP, tmp_path, COMPLEX, devices)) == ["0-15"] * 4
    assert sets(plan(LAPTOP, tmp_path, EXCLUSIVE, devices)) == ["0-1,8-9", "2-3,10-11", "4-5,12-13", "6-7,14-15"]


def test_offline_cpus_are_not_assigned(tmp_path: Path) -> None:
    """A core with one online thread counts as a core."""
    machine = Machine(offline=frozenset({0, 16, 17}), gpu_nodes=(0, 0))
    assert sets(plan(machine, tmp_path, EXCLUSIVE, machine.gpus)) == ["1-2,18", "3,19"]


def test_only_cpus_of_this_process_are_assigned(tmp_path: Path) -> None:
    """[2] With a cpuset of one thread per core."""
    placement = plan(SERVER, tmp_path, NODE, SERVER.gpus, allowed=frozenset(range(16)))
    assert sets(placement)[0] == "0-3"


def test_a_gpu_on_a_node_outside_the_cpuset_is_an_error(tmp_path: Path) -> None:
    """The message has the CPUs of the node and the allowed CPUs."""
    with pytest.raises(PlacementError) as raised:
        plan(SERVER, tmp_path, NODE, SERVER.gpus, allowed=parse_list("0-7"))
    assert str(raised.value) == (
        "NUMA binding 'node' is not possible here: local ranks 4-5 would go to NUMA node 2 (CPUs 8-11,24-27), but this "
        "process may use only CPUs 0-7; choose another binding, or none."
    )


def test_the_fallback_binds_no_worker_and_gives_the_reason(tmp_path: Path) -> None:
    """[3] If one worker cannot be bound, none is: it would run on the cores of the others."""
    placement = plan(SERVER, tmp_path, NODE, SERVER.gpus, allowed=parse_list("0-7"), fall_back=True)
    assert placement.bindings == ()
    assert placement.why.startswith("workers are not bound to CPUs: local ranks 4-5 would go to NUMA node 2 ")
    assert placement.why.endswith("may use only CPUs 0-7")


@pytest.mark.parametrize(
    ("mode", "device", "machine", "message"),
    [
        (NODE, "0000:99:00.0", LAPTOP, "/bus/pci/devices has no NUMA node for GPU 0000:99:00.0 of local rank 0"),
        (NODE, "0000:10:00.0", Machine(gpu_nodes=(9,)), "local rank 0 would go to NUMA node 9 (which has no CPU)"),
        (SOCKET, None, Machine(hide=frozenset({"socket"})), "the kernel does not report the socket of NUMA node 0"),
        (COMPLEX, None, Machine(hide=frozenset({"cache"})), "does not report which CPUs of NUMA node 0 share a cache"),
    ],
)
def test_information_missing_in_sysfs_is_an_error(
    tmp_path: Path, mode: AffinityMode, device: str | None, machine: Machine, message: str
) -> None:
    """A binding is never guessed; the message names the missing information."""
    with pytest.raises(PlacementError) as raised:
        plan(machine, tmp_path, mode, (device,))
    assert message in str(raised.value)


def test_without_sysfs_a_binding_is_an_error(tmp_path: Path) -> None:
    """As on macOS."""
    with pytest.raises(PlacementError, match="does not describe CPUs 0-1 that this process may use"):
        plan_placement(NumaOptions(NODE), (None,), {0, 1}, Topology(str(tmp_path)))


MACHINES = [
    SERVER,
    LAPTOP,
    Machine(threads=1, gpu_nodes=(1, 0, 3, 2)),
    Machine(sockets=1, nodes_per_socket=3, cores_per_node=3, cores_per_complex=2, gpu_nodes=(-1, 2)),
    Machine(offline=frozenset({0, 3, 5, 16, 31}), gpu_nodes=(0, 3)),
]


@pytest.fixture(scope="module")
def topologies(tmp_path_factory: pytest.TempPathFactory) -> list[Topology]:
    return [machine.build(tmp_path_factory.mktemp("sys")) for machine in MACHINES]


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(data=st.data())
def test_every_plan_satisfies_the_invariants(topologies: list[Topology], data: st.DataObject) -> None:
    """[2, 4] On any machine and cpuset: non-empty, allowed, equal or disjoint, whole cores if exclusive."""
    number = data.draw(st.integers(0, len(MACHINES) - 1), label="machine")
    machine, topology = MACHINES[number], topologies[number]
    allowed = data.draw(st.frozensets(st.sampled_from(sorted(machine.cpus)), min_size=1), label="allowed")
    mode = data.draw(st.sampled_from(AffinityMode), label="mode")
    device = st.sampled_from([None, *machine.gpus])
    devices = tuple(data.draw(st.lists(device, min_size=1, max_size=12), label="devices"))
    try:
        placement = plan_placement(NumaOptions(mode), devices, allowed, topology)
    except PlacementError:
        fallen_back = plan_placement(NumaOptions(mode, True), devices, allowed, topology)
        assert fallen_back.bindings == ()
        if set(devices) == {None}:  # workers without a GPU can only fail for want of cores
            assert mode is EXCLUSIVE
            assert len(devices) > len(topology.cores(allowed))
        return
    assert len(placement.bindings) == len(devices)
    cores = [frozenset(machine.siblings(cpu % machine.cores)) for cpu in sorted(machine.cpus)]
    for rank, binding in enumerate(placement.bindings):
        mine = set(binding.cpus)
        assert mine
        assert mine <= allowed
        assert list(binding.cpus) == sorted(mine)
        for other in placement.bindings[:rank]:
            assert mine == set(other.cpus) or mine.isdisjoint(other.cpus)
            if mode is EXCLUSIVE:
                assert not any(core & mine and core & set(other.cpus) for core in cores)
    if mode is EXCLUSIVE:
        sizes: dict[str, list[int]] = {}
        for binding in placement.bindings:
            sizes.setdefault(node_of(binding), []).append(len(topology.cores(binding.cpus)))
        assert all(max(each) - min(each) <= 1 and each == sorted(each, reverse=True) for each in sizes.values())
    shares = share_threads({}, len(devices), allowed, topology, placement)
    assert (shares is None) == (len(devices) == 1)
    if shares is not None:
        assert all(
            1 <= share <= len(binding.cpus) for share, binding in zip(shares.per_rank, placement.bindings, strict=True)
        )


@pytest.mark.parametrize("mode", list(AffinityMode))
def test_the_order_of_folders_does_not_matter(tmp_path: Path, mode: AffinityMode) -> None:
    """[5] The same machine, written in five random orders, gives the same plan."""
    plans = []
    for seed in range(5):
        topology = SERVER.build(tmp_path / str(seed), random.Random(seed))
        plans.append(plan_placement(NumaOptions(mode), SERVER.gpus, SERVER.cpus, topology))
    assert all(other == plans[0] for other in plans)


def test_threads_are_an_equal_share_of_the_physical_cores(tmp_path: Path) -> None:
    """16 cores for four workers are four threads each, reported in one line."""
    shares = share_threads({}, 4, SERVER.cpus, SERVER.build(tmp_path))
    assert shares is not None
    assert shares.per_rank == (4, 4, 4, 4)
    assert shares.why == (
        "OMP_NUM_THREADS=4 for each worker: 4 workers share 16 cores; set OMP_NUM_THREADS to override"
    )


@pytest.mark.parametrize(("environ", "workers"), [({"OMP_NUM_THREADS": "7"}, 4), ({"OMP_NUM_THREADS": ""}, 4), ({}, 1)])
def test_a_set_variable_or_a_single_worker_gets_no_share(tmp_path: Path, environ: dict[str, str], workers: int) -> None:
    assert share_threads(environ, workers, SERVER.cpus, SERVER.build(tmp_path)) is None


def test_threads_are_at_least_one(tmp_path: Path) -> None:
    """Also with more workers than cores."""
    shares = share_threads({}, 40, SERVER.cpus, SERVER.build(tmp_path))
    assert shares is not None
    assert set(shares.per_rank) == {1}


@pytest.mark.parametrize(("mode", "each"), [(NODE, 2), (SOCKET, 2), (EXCLUSIVE, 2), (COMPLEX, 2)])
def test_bound_workers_share_the_cores_of_their_binding(tmp_path: Path, mode: AffinityMode, each: int) -> None:
    """Two workers on one node of four cores have two threads each, in every mode."""
    placement = plan(SERVER, tmp_path, mode, SERVER.gpus)
    shares = share_threads({}, 8, SERVER.cpus, Topology(str(tmp_path)), placement)
    assert shares is not None
    assert shares.per_rank == (each,) * 8


def test_unequal_shares_are_listed_by_rank(tmp_path: Path) -> None:
    """Three workers on four cores."""
    placement = plan(SERVER, tmp_path, EXCLUSIVE, SERVER.gpus[:1] * 3)
    shares = share_threads({}, 3, SERVER.cpus, Topology(str(tmp_path)), placement)
    assert shares is not None
    assert shares.per_rank == (2, 1, 1)
    assert shares.why.startswith(
        "OMP_NUM_THREADS=2 for local rank 0, OMP_NUM_THREADS=1 for local ranks 1-2: 3 workers share 4 cores;"
    )


def test_threads_stay_within_the_quota_of_the_container(tmp_path: Path) -> None:
    """4.5 CPUs for two workers are two threads each; a larger quota has no effect."""
    topology = SERVER.build(tmp_path)
    tight = share_threads({}, 2, SERVER.cpus, topology, cpu_quota=4.5)
    assert tight is not None
    assert tight.per_rank == (2, 2)
    assert "2 workers share the 4.5 CPUs of this container's quota" in tight.why
    generous = share_threads({}, 2, SERVER.cpus, topology, cpu_quota=64.0)
    assert generous == share_threads({}, 2, SERVER.cpus, topology)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux binds processes to CPUs")
@pytest.mark.parametrize("mode", [NODE, SOCKET])
def test_a_real_process_runs_on_its_planned_cpus(mode: AffinityMode) -> None:
    allowed = allowed_cpus()
    gpus = devices_of_ranks(2, gpu_pci_bus_ids(os.environ))
    placement = plan_placement(NumaOptions(mode, True), gpus, allowed, Topology())
    for binding in placement.bindings:
        ask = "import os, sys; os.sched_setaffinity(0, map(int, sys.argv[1:])); print(*sorted(os.sched_getaffinity(0)))"
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", ask, *map(str, binding.cpus)], capture_output=True, text=True, check=True
        )
        assert tuple(map(int, done.stdout.split())) == binding.cpus
