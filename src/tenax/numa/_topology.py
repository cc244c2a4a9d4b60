"""What the kernel says this machine's processors are: NUMA nodes, sockets, cores, shared caches.

Reads a ``/sys`` tree and decides nothing. Every answer is sorted, never in the order in which folders happen to be
listed. Each question reads only the files it needs: a server with 256 CPUs has thousands of them.
"""

from __future__ import annotations

from tenax.numa import _sysfs as sysfs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class Topology:
    def __init__(self, sysfs_root: str = "/sys") -> None:
        self.sysfs_root = sysfs_root
        self._cpu = f"{sysfs_root}/devices/system/cpu"
        self._node = f"{sysfs_root}/devices/system/node"

    def online_cpus(self) -> frozenset[int]:
        return sysfs.parse_list(sysfs.read(self._cpu, "online") or "")

    def nodes(self) -> dict[int, frozenset[int]]:
        """The online CPUs of each NUMA node, by node number. A node may have memory only.

        A kernel built without NUMA has no such folder: all its CPUs are node 0.
        """
        numbers = sorted(int(name[4:]) for name in sysfs.names(self._node) if _is_numbered(name, "node"))
        if not numbers:
            online = self.online_cpus()
            return {0: online} if online else {}
        return {n: sysfs.parse_list(sysfs.read(self._node, f"node{n}", "cpulist") or "") for n in numbers}

    def memory_nodes(self) -> frozenset[int]:
        """The NUMA nodes that have memory of their own."""
        return sysfs.parse_list(sysfs.read(self._node, "has_memory") or "")

    def socket_of(self, cpu: int) -> int | None:
        return sysfs.read_int(self._cpu, f"cpu{cpu}", "topology", "physical_package_id")

    def cores(self, cpus: Iterable[int]) -> list[frozenset[int]]:
        """The physical cores behind ``cpus``, each as those of its hardware threads that are in ``cpus``.

        In order of their lowest CPU. A CPU whose siblings are not told is a core of its own.
        """
        folder = self._cpu
        return _group(cpus, lambda cpu: sysfs.read(folder, f"cpu{cpu}", "topology", "thread_siblings_list") or str(cpu))

    def core_complexes(self, cpus: Iterable[int]) -> list[frozenset[int]]:
        """``cpus`` grouped by the last-level cache they share, in order of the lowest CPU.

        Empty where the kernel does not tell: a virtual machine may hide its caches.
        """
        return _group(cpus, self._last_level_cache)

    def node_of_device(self, pci_bus_id: str) -> int | None:
        """The NUMA node of a PCI device. None: there is no such device. A device tied to no node counts as node 0."""
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
    """Split ``cpus`` by what each shares with its companions; no groups at all when one CPU has no answer."""
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
