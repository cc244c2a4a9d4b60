"""Counts the GPUs and CPUs of this host from the kernel's files, to choose the number of workers.

Importing torch costs seconds and gigabytes; the kernel's files cost a millisecond. Only devices that have no such file
(an ``xpu``, another torch backend, a GPU under WSL or in a Jetson) are counted by torch, in a process of its own.

A GPU counts if its device node can be opened, because a container shows the driver's list of *all* GPUs of the host.
``CUDA_VISIBLE_DEVICES`` and HIP's variables apply by the rules of CUDA and HIP: a list ends at its first invalid entry,
and a duplicate entry empties it. ``NVIDIA_VISIBLE_DEVICES`` is read by the container runtime; inside a container, the
device nodes decide.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tenax._core.text import counted, format_seconds
from tenax.numa import _sysfs as sysfs

TORCH_TIMEOUT_S = 60.0
# Device nodes of GPUs that have no file per GPU: WSL and Jetson.
_UNCOUNTED_NODES = ("dxg", "nvhost-gpu")


class Gpu(NamedTuple):
    """One GPU. Both may be unknown: a container may show only the device node."""

    pci_bus_id: str | None  # as in /sys/bus/pci/devices
    uuid: str | None  # GPU-…


class Roots(NamedTuple):
    dev: str = "/dev"
    proc: str = "/proc"
    sys: str = "/sys"


_HOST = Roots()


def visible_gpus(environ: Mapping[str, str], roots: Roots = _HOST) -> tuple[Gpu, ...]:
    """Return the GPUs visible to a worker with ``environ``, by device number as far as the files show it.

    CUDA numbers the fastest GPU first, unless CUDA_DEVICE_ORDER=PCI_BUS_ID, and the kernel does not show speed. GPUs
    of one model, the usual case in training, are numbered by PCI bus id, as here. HIP uses the kernel's order.
    """
    nvidia = _select(environ.get("CUDA_VISIBLE_DEVICES"), _nvidia_gpus(roots))
    if nvidia:
        return nvidia
    amd = _select(environ.get("ROCR_VISIBLE_DEVICES"), _amd_gpus(roots))
    return _select(environ.get("HIP_VISIBLE_DEVICES", environ.get("CUDA_VISIBLE_DEVICES")), amd)


def gpu_pci_bus_ids(environ: Mapping[str, str], roots: Roots = _HOST) -> tuple[str | None, ...]:
    """Return the PCI bus id of each visible GPU, by device number; None where it is unknown (a MIG slice)."""
    return tuple(gpu.pci_bus_id for gpu in visible_gpus(environ, roots))


def allowed_cpus() -> frozenset[int]:
    """Return the CPUs this process may run on; all of them where the system does not report it (macOS)."""
    if sys.platform == "linux":
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def cpu_quota(roots: Roots = _HOST) -> float | None:
    """Return the CPU time this process's cgroups may use, in CPUs: the tightest limit; None if there is none."""
    quotas = []
    cgroups = f"{roots.sys}/fs/cgroup"
    for line in (sysfs.read(roots.proc, "self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            folders, read_quota = [cgroups, f"{cgroups}/unified"], _quota_v2
        elif "cpu" in controllers.split(","):
            folders, read_quota = [f"{cgroups}/{controllers}", f"{cgroups}/cpu"], _quota_v1
        else:
            continue
        # In a container the path may be the host's: missing folders are skipped, and the mount's root has the limit.
        parts = [part for part in path.split("/") if part not in {"", ".."}]
        for depth in range(len(parts) + 1):
            quotas += [read_quota(os.path.join(folder, *parts[:depth])) for folder in folders]
    return min((quota for quota in quotas if quota is not None), default=None)


def count_cpus(roots: Roots = _HOST) -> int:
    """Return how many CPUs this process may use, within its container's quota, at least one."""
    cpus = len(allowed_cpus())
    quota = cpu_quota(roots)
    return cpus if quota is None else max(1, min(cpus, int(quota)))


def parse_nproc(value: str, environ: Mapping[str, str], roots: Roots = _HOST) -> int:
    """Return the number of workers for ``--nproc-per-node``: N, ``auto``, ``cpu``, ``gpu``, ``xpu``, a torch backend.

    Raises ValueError with a message for the user.
    """
    word = value.strip()
    if re.fullmatch(r"[+-]?[0-9]+", word):
        if int(word) < 1:
            raise ValueError(f"--nproc-per-node={word}: must be at least 1.")
        return int(word)
    if word == "cpu":
        return count_cpus(roots)
    if word in {"auto", "gpu"}:
        count = len(visible_gpus(environ, roots))
        if not count and any(os.path.exists(f"{roots.dev}/{node}") for node in _UNCOUNTED_NODES):
            count = count_with_torch("cuda", environ)
        if not count and word == "gpu":
            raise ValueError(_no_gpu(environ, roots))
        return count or count_cpus(roots)
    if not word.isidentifier():
        raise ValueError(
            f"--nproc-per-node={value!r}: must be a number, auto, cpu, gpu, xpu or the name of a torch backend."
        )
    count = count_with_torch(word, environ)
    if not count:
        raise ValueError(f"--nproc-per-node={word}: torch found no {word} device on this host; pass a number or 'cpu'.")
    return count


def count_with_torch(backend: str, environ: Mapping[str, str], timeout_s: float = TORCH_TIMEOUT_S) -> int:
    """Return the device count of ``torch.<backend>``, from the interpreter that the workers will use."""
    import subprocess

    python = environ.get("PYTHON_EXEC") or sys.executable
    try:
        answer = subprocess.run(
            [python, "-c", _COUNT_SCRIPT, backend],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        problem = f"torch did not count the {backend} devices within {format_seconds(timeout_s)}; pass a number."
    except OSError as error:
        problem = f"could not start {python} to count devices with torch ({error}); pass a number."
    else:
        result = re.findall(r"^tenax: (\S+)$", answer.stdout, re.MULTILINE)[-1:]
        if not result:
            last = (answer.stderr.strip() or f"exit code {answer.returncode}").splitlines()[-1]
            problem = f"could not count {backend} devices with torch ({last}); pass a number."
        elif result == ["no-torch"]:
            problem = f"expected a number, auto, cpu or gpu; torch counts other devices, and {python} has no torch."
        elif result == ["no-backend"]:
            problem = "expected a number, auto, cpu, gpu or a device type of torch such as xpu."
        else:
            return int(result[0])
    raise ValueError(f"--nproc-per-node={backend}: {problem}")


# The current folder is removed from the path, so that a folder named torch in it is not imported.
_COUNT_SCRIPT = """
import sys
sys.path[:] = [entry for entry in sys.path if entry]
try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    print("tenax: no-torch")
else:
    count = getattr(getattr(torch, sys.argv[1], None), "device_count", None)
    print("tenax:", count() if callable(count) else "no-backend")
"""


def _no_gpu(environ: Mapping[str, str], roots: Roots) -> str:
    hidden = visible_gpus({}, roots)
    names = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
    settings = ", ".join(f"{name}={environ[name]!r}" for name in names if name in environ)
    if hidden and settings:
        found = counted(len(hidden), "GPU")
        return f"--nproc-per-node=gpu: found {found}, but {settings} hides all of them; change it or pass a number."
    return (
        f"--nproc-per-node=gpu: no GPU found (looked for NVIDIA devices such as {roots.dev}/nvidia0, and for AMD "
        f"GPUs in {roots.sys}/class/kfd); pass a number or 'cpu'."
    )


def _nvidia_gpus(roots: Roots) -> tuple[Gpu, ...]:
    nodes = (name for name in sysfs.names(roots.dev) if re.fullmatch(r"nvidia[0-9]+", name))
    minors = {int(name[6:]) for name in nodes if os.access(f"{roots.dev}/{name}", os.R_OK | os.W_OK)}
    gpus = []
    listed = f"{roots.proc}/driver/nvidia/gpus"
    for bus_id in sorted(sysfs.names(listed) if minors else (), key=_pci_order):
        information = sysfs.read(listed, bus_id, "information") or ""
        minor = re.search(r"^Device Minor:\s*([0-9]+)", information, re.MULTILINE)
        uuid = re.search(r"^GPU UUID:\s*(GPU-[0-9a-fA-F-]+)$", information, re.MULTILINE)
        excluded = re.search(r"^GPU (Excluded|Blacklisted):\s*Yes", information, re.MULTILINE)
        if minor is None or int(minor[1]) not in minors:
            continue
        minors.remove(int(minor[1]))
        if not excluded:  # by the administrator, in the driver's settings
            gpus.append(Gpu(bus_id.lower(), uuid[1] if uuid else None))
    # A device node that is not in the driver's list is a GPU without a name.
    return (*gpus, *(Gpu(None, None) for _ in minors))


def _pci_order(bus_id: str) -> tuple[int, ...]:
    return tuple(int(part, 16) for part in re.findall(r"[0-9a-fA-F]+", bus_id))


def _amd_gpus(roots: Roots) -> tuple[Gpu, ...]:
    gpus = []
    nodes = f"{roots.sys}/class/kfd/kfd/topology/nodes"
    for node in sorted((name for name in sysfs.names(nodes) if name.isdigit()), key=int):
        words = (sysfs.read(nodes, node, "properties") or "").split()
        properties = {name: int(value) for name, value in zip(words[::2], words[1::2], strict=False) if value.isdigit()}
        render_node = f"{roots.dev}/dri/renderD{properties.get('drm_render_minor', 0)}"
        if properties.get("simd_count", 0) > 0 and os.access(render_node, os.R_OK | os.W_OK):
            location = properties.get("location_id", 0) & 0xFFFF
            bus, device, function = location >> 8, location >> 3 & 0x1F, location & 7
            bus_id = f"{properties.get('domain', 0):04x}:{bus:02x}:{device:02x}.{function:x}"
            unique = properties.get("unique_id", 0)
            gpus.append(Gpu(bus_id, f"GPU-{unique:016x}" if unique else None))
    return tuple(gpus)


def _select(selector: str | None, gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """Return the GPUs that a variable such as CUDA_VISIBLE_DEVICES selects, in its order."""
    if selector is None or not gpus:
        return tuple(gpus)
    entries = [entry.strip() for entry in selector.split(",")]
    # The first entry decides the kind of name; other kinds are invalid in the list.
    find = {"GPU-": _find_by_uuid, "MIG-": _find_slice}.get(entries[0][:4], _find_by_number)
    chosen: dict[object, Gpu] = {}
    for entry in entries:
        found = find(entry, gpus)
        if found is None:
            break
        identity, gpu = found
        if identity in chosen:
            return ()
        chosen[identity] = gpu
    return tuple(chosen.values())


def _find_by_number(entry: str, gpus: Sequence[Gpu]) -> tuple[object, Gpu] | None:
    number = re.match(r"\+?([0-9]+)", entry)
    if number is None or int(number[1]) >= len(gpus):
        return None
    return int(number[1]), gpus[int(number[1])]


def _find_by_uuid(entry: str, gpus: Sequence[Gpu]) -> tuple[object, Gpu] | None:
    """Find a GPU by a unique prefix of its uuid. If a GPU's uuid is unknown, the entry is assumed valid."""
    if not entry.startswith("GPU-"):
        return None
    matches = [number for number, gpu in enumerate(gpus) if gpu.uuid and gpu.uuid.lower().startswith(entry.lower())]
    if len(matches) == 1:
        return matches[0], gpus[matches[0]]
    if not matches and any(gpu.uuid is None for gpu in gpus):
        return entry, gpus[0] if len(gpus) == 1 else Gpu(None, entry)
    return None


def _find_slice(entry: str, gpus: Sequence[Gpu]) -> tuple[object, Gpu] | None:
    """Find a MIG slice. Only its older name, MIG-GPU-<uuid>/<instance>/<instance>, contains the GPU."""
    if not entry.startswith("MIG-"):
        return None
    owner = _find_by_uuid(entry[4:].partition("/")[0], gpus)
    if owner is None and len(gpus) == 1:
        owner = 0, gpus[0]
    return entry, Gpu(owner[1].pci_bus_id if owner else None, entry)


def _quota_v2(folder: str) -> float | None:
    words = (sysfs.read(folder, "cpu.max") or "").split()
    return int(words[0]) / int(words[1]) if len(words) == 2 and words[0] != "max" else None


def _quota_v1(folder: str) -> float | None:
    quota, period = sysfs.read_int(folder, "cpu.cfs_quota_us"), sysfs.read_int(folder, "cpu.cfs_period_us")
    return quota / period if quota is not None and quota > 0 and period else None
