"""How many workers this host has devices for: GPUs and CPUs, counted from the kernel's files.

Asking torch costs seconds and gigabytes; the kernel's files cost a millisecond. Only what no file tells (an ``xpu``, a
backend of torch's own, a GPU behind WSL or in a Jetson) is asked of torch, in a process of its own.

A GPU counts when its device node may be opened, because a container shows the driver's list of *all* GPUs of the host.
What is hidden from CUDA or HIP by their variables is hidden here too, by their rules: a list stops at its first
invalid entry, and an entry that is named twice empties it. ``NVIDIA_VISIBLE_DEVICES`` is a word between a user and
the container runtime; inside, the device nodes tell.
"""

from __future__ import annotations

import os
import re
import sys
from typing import NamedTuple

from tenax.numa import _sysfs as sysfs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

TORCH_ANSWERS_WITHIN_S = 60.0
# Device nodes of GPUs that have no file per GPU: WSL and Jetson.
_ONLY_THE_DRIVER_KNOWS = ("dxg", "nvhost-gpu")


class Gpu(NamedTuple):
    """One GPU. Either name may be unknown: a container may show the device node and nothing else."""

    pci_bus_id: str | None  # as in /sys/bus/pci/devices
    uuid: str | None  # GPU-…


def visible_gpus(
    environ: Mapping[str, str], dev_root: str = "/dev", proc_root: str = "/proc", sys_root: str = "/sys"
) -> tuple[Gpu, ...]:
    """The GPUs a worker started with ``environ`` would see, in the order of its device numbers as far as files tell.

    CUDA numbers the fastest GPU first, unless CUDA_DEVICE_ORDER=PCI_BUS_ID, and the kernel knows nothing of speed.
    GPUs of one model, the rule in training, are numbered by PCI bus id, as here. HIP numbers them as the kernel does.
    """
    nvidia = _select(environ.get("CUDA_VISIBLE_DEVICES"), _nvidia_gpus(dev_root, proc_root))
    if nvidia:
        return nvidia
    amd = _select(environ.get("ROCR_VISIBLE_DEVICES"), _amd_gpus(dev_root, sys_root))
    return _select(environ.get("HIP_VISIBLE_DEVICES", environ.get("CUDA_VISIBLE_DEVICES")), amd)


def count_gpus(
    environ: Mapping[str, str], dev_root: str = "/dev", proc_root: str = "/proc", sys_root: str = "/sys"
) -> int:
    return len(visible_gpus(environ, dev_root, proc_root, sys_root))


def gpu_pci_bus_ids(
    environ: Mapping[str, str], dev_root: str = "/dev", proc_root: str = "/proc", sys_root: str = "/sys"
) -> tuple[str | None, ...]:
    """The PCI bus id of each visible GPU, by device number; None where it cannot be known (a MIG slice)."""
    return tuple(gpu.pci_bus_id for gpu in visible_gpus(environ, dev_root, proc_root, sys_root))


def allowed_cpus() -> frozenset[int]:
    """The CPUs this process may run on. Where the system does not tell (macOS), all of them."""
    if sys.platform == "linux":
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def cpu_quota(proc_root: str = "/proc", sys_root: str = "/sys") -> float | None:
    """The CPU time this process's cgroup may use, in CPUs; None when nothing limits it. The tightest limit counts."""
    quotas = []
    for line in (sysfs.read(proc_root, "self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            folders, ask = [f"{sys_root}/fs/cgroup", f"{sys_root}/fs/cgroup/unified"], _quota_v2
        elif "cpu" in controllers.split(","):
            folders, ask = [f"{sys_root}/fs/cgroup/{controllers}", f"{sys_root}/fs/cgroup/cpu"], _quota_v1
        else:
            continue
        # A container's path may be the host's: what is not there says nothing, and the mount's own root is the limit.
        parts = [part for part in path.split("/") if part not in {"", ".."}]
        for depth in range(len(parts) + 1):
            quotas += [ask(os.path.join(folder, *parts[:depth])) for folder in folders]
    return min((quota for quota in quotas if quota is not None), default=None)


def count_cpus(proc_root: str = "/proc", sys_root: str = "/sys") -> int:
    """The CPUs that this process may use, no more than its container's quota pays for, at least one."""
    cpus = len(allowed_cpus())
    quota = cpu_quota(proc_root, sys_root)
    return cpus if quota is None else max(1, min(cpus, int(quota)))


def parse_nproc(
    value: str,
    environ: Mapping[str, str],
    dev_root: str = "/dev",
    proc_root: str = "/proc",
    sys_root: str = "/sys",
) -> int:
    """The number of workers that ``--nproc-per-node`` means: N, ``auto``, ``cpu``, ``gpu``, ``xpu``, a torch backend.

    Raises ValueError with one sentence for the user.
    """
    word = value.strip()
    if re.fullmatch(r"[+-]?[0-9]+", word):
        if int(word) < 1:
            raise ValueError(f"--nproc-per-node={word}: at least one worker must run on each node.")
        return int(word)
    if word == "cpu":
        return count_cpus(proc_root, sys_root)
    if word in {"auto", "gpu"}:
        count = count_gpus(environ, dev_root, proc_root, sys_root)
        if not count and any(os.path.exists(f"{dev_root}/{node}") for node in _ONLY_THE_DRIVER_KNOWS):
            count = ask_torch("cuda", environ)
        if not count and word == "auto":
            return count_cpus(proc_root, sys_root)
        if not count:
            raise ValueError(_no_gpu(environ, dev_root, proc_root, sys_root))
        return count
    if not word.isidentifier():
        raise ValueError(
            f"--nproc-per-node={value!r} is neither a number of workers nor one of auto, cpu, gpu, xpu or the name of "
            "a torch backend."
        )
    count = ask_torch(word, environ)
    if not count:
        raise ValueError(
            f"--nproc-per-node={word}: torch finds no {word} device on this host; give a number, or 'cpu'."
        )
    return count


def ask_torch(backend: str, environ: Mapping[str, str], timeout_s: float = TORCH_ANSWERS_WITHIN_S) -> int:
    """How many devices ``torch.<backend>`` counts, asked in the interpreter that the workers will run in."""
    import subprocess

    python = environ.get("PYTHON_EXEC") or sys.executable
    flag = f"--nproc-per-node={backend}"
    try:
        answer = subprocess.run(
            [python, "-c", _QUESTION, backend],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ValueError(
            f"{flag}: torch did not say within {timeout_s:g} s how many {backend} devices there are; give a number."
        ) from None
    except OSError as error:
        raise ValueError(f"{flag}: {python} could not be started to ask torch ({error}); give a number.") from None
    said = re.findall(r"^tenax: (\S+)$", answer.stdout, re.MULTILINE)
    if not said:
        last = (answer.stderr.strip() or f"exit code {answer.returncode}").splitlines()[-1]
        raise ValueError(f"{flag}: torch could not be asked for its {backend} devices ({last}); give a number.")
    if said[-1] == "no-torch":
        raise ValueError(f"{flag}: only torch knows {backend} devices, and {python} has no torch; give a number.")
    if said[-1] == "no-backend":
        raise ValueError(f"{flag}: torch has no backend '{backend}'; use a number, auto, cpu, gpu or xpu.")
    return int(said[-1])


# The current folder is taken from the path, so that a folder called torch in it is not taken for torch.
_QUESTION = """
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


def _no_gpu(environ: Mapping[str, str], dev_root: str, proc_root: str, sys_root: str) -> str:
    hidden = visible_gpus({}, dev_root, proc_root, sys_root)
    names = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
    said = ", ".join(f"{name}={environ[name]!r}" for name in names if name in environ)
    if hidden and said:
        count = "1 GPU is" if len(hidden) == 1 else f"{len(hidden)} GPUs are"
        return f"--nproc-per-node=gpu: {count} here, but {said} leaves none visible; change it, or give a number."
    return (
        f"--nproc-per-node=gpu: no GPU was found (looked for {dev_root}/nvidia0 and the like, and for AMD GPUs in "
        f"{sys_root}/class/kfd); give a number, or 'cpu'."
    )


def _nvidia_gpus(dev_root: str, proc_root: str) -> tuple[Gpu, ...]:
    minors = set()
    for name in sysfs.names(dev_root):
        node = re.fullmatch(r"nvidia([0-9]+)", name)
        if node and os.access(f"{dev_root}/{name}", os.R_OK | os.W_OK):
            minors.add(int(node[1]))
    gpus = []
    listed = f"{proc_root}/driver/nvidia/gpus"
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
    # A device node that the driver's list does not explain is a GPU without a name.
    return (*gpus, *(Gpu(None, None) for _ in minors))


def _pci_order(bus_id: str) -> tuple[int, ...]:
    return tuple(int(part, 16) for part in re.findall(r"[0-9a-fA-F]+", bus_id))


def _amd_gpus(dev_root: str, sys_root: str) -> tuple[Gpu, ...]:
    gpus = []
    nodes = f"{sys_root}/class/kfd/kfd/topology/nodes"
    for node in sorted((name for name in sysfs.names(nodes) if name.isdigit()), key=int):
        words = (sysfs.read(nodes, node, "properties") or "").split()
        properties = {name: int(value) for name, value in zip(words[::2], words[1::2], strict=False) if value.isdigit()}
        render_node = f"{dev_root}/dri/renderD{properties.get('drm_render_minor', 0)}"
        if properties.get("simd_count", 0) > 0 and os.access(render_node, os.R_OK | os.W_OK):
            place = properties.get("location_id", 0) & 0xFFFF
            bus_id = f"{properties.get('domain', 0):04x}:{place >> 8:02x}:{place >> 3 & 0x1F:02x}.{place & 7:x}"
            unique = properties.get("unique_id", 0)
            gpus.append(Gpu(bus_id, f"GPU-{unique:016x}" if unique else None))
    return tuple(gpus)


def _select(selector: str | None, gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """What a variable such as CUDA_VISIBLE_DEVICES leaves of the GPUs, in its order."""
    if selector is None or not gpus:
        return tuple(gpus)
    entries = [entry.strip() for entry in selector.split(",")]
    # The first entry decides which kind of name the list is made of; another kind is invalid in it.
    find = _find_by_number
    for prefix, finder in (("GPU-", _find_by_uuid), ("MIG-", _find_slice)):
        if entries[0].startswith(prefix):
            find = finder
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
    """By the beginning of a uuid that only one GPU has. Where a GPU does not tell its uuid, the entry is believed."""
    if not entry.startswith("GPU-"):
        return None
    matches = [number for number, gpu in enumerate(gpus) if gpu.uuid and gpu.uuid.lower().startswith(entry.lower())]
    if len(matches) == 1:
        return matches[0], gpus[matches[0]]
    if not matches and any(gpu.uuid is None for gpu in gpus):
        return entry, gpus[0] if len(gpus) == 1 else Gpu(None, entry)
    return None


def _find_slice(entry: str, gpus: Sequence[Gpu]) -> tuple[object, Gpu] | None:
    """A MIG slice. Only its older name, MIG-GPU-<uuid>/<instance>/<instance>, tells whose slice it is."""
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
