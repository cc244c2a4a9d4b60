"""The CPU topology of the host: NUMA nodes, sockets, cores, shared caches.

Reads a ``/sys`` tree and decides nothing. Results are sorted. Each method reads only the files that it needs, because a
server with 256 CPUs has thousands of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tenax.numa import _sysfs as sysfs


class Topology:
    def __init__(self, sysfs_root: str = "/sys") -> None:
        self.sysfs_root = sysfs_root
        self._cpu = f"{sysfs_root}/devices/system/cpu"
        self._node = f"{sysfs_root}/devices/system/node"

    def online_cpus(self) -> frozenset[int]:
        return sysfs.parse_list(sysfs.read(self._cpu, "online") or "")

    def nodes(self) -> dict[int, frozenset[int]]:
        """Return the online CPUs of each NUMA node, by node number. A node may have memory only.

        Without NUMA support in the kernel, all CPUs are in node 0.
        """
        numbers = sorted(int(name[4:]) for name in sysfs.names(self._node) if _is_numbered(name, "node"))
        if not numbers:
            online = self.online_cpus()
            return {0: online} if online else {}
        return {n: sysfs.parse_list(sysfs.read(self._node, f"node{n}", "cpulist") or "") for n in numbers}

    def socket_of(self, cpu: int) -> int | None:
        return sysfs.read_int(self._cpu, f"cpu{cpu}", "topology", "physical_package_id")

    def cores(self, cpus: Iterable[int]) -> list[frozenset[int]]:
        """Group ``cpus`` by physical core, in order of the lowest CPU.

        A CPU whose siblings are unknown is its own group.
        """
        folder = self._cpu
        return _group(cpus, lambda cpu: sysfs.read(folder, f"cpu{cpu}", "topology", "thread_siblings_list") or str(cpu))

    def core_complexes(self, cpus: Iterable[int]) -> list[frozenset[int]]:
        """Group ``cpus`` by shared last-level cache, in order of the lowest CPU.

        Empty if the kernel does not report caches, as in some virtual machines.
        """
        return _group(cpus, self._last_level_cache)

    def node_of_device(self, pci_bus_id: str) -> int | None:
        """Return the NUMA node of a PCI device; None if there is no such device; 0 if it belongs to no node."""
        node = sysfs.read_int(self.sysfs_root, "bus/pci/devices", pci_bus_id, "numa_node")
        return None if node is None else max(node, 0)

    def _last_level_cache(self, cpu: int) -> str | None:
        folder = f"{self._cpu}/cpu{cpu}/cache"
        best: tuple[int, str] | None = None
        for index in sysfs.names(folder):
            level = sysfs.read_int(folder, index, "level") if _is_numbered(index, "index") else None
            if level is None or (best and level <= best[0]) or sysfs.read(folder, index, "type") == "Instruction":
                continue
            shared = sysfs.read(folder, index, "shared_cpu_list")
            if shared:
                best = level, shared
        return best[1] if best else None


def _group(cpus: Iterable[int], companions: Callable[[int], str | None]) -> list[frozenset[int]]:
    """Group ``cpus`` by the list that ``companions`` returns for each; empty if it is None for one of them."""
    rest = set(cpus)
    groups = []
    for cpu in sorted(rest):
        if cpu in rest:
            together = companions(cpu)
            if together is None:
                return []
            groups.append(frozenset(rest & sysfs.parse_list(together) | {cpu}))
            rest -= groups[-1]
    return groups


def _is_numbered(name: str, stem: str) -> bool:
    return name.startswith(stem) and name[len(stem) :].isdigit()
