"""Counting devices without torch, on driver files in a temporary folder; torch runs in real processes."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest

from tenax._processes import devices
from tenax._processes.devices import Roots, count_cpus, count_with_torch, cpu_quota, gpu_pci_bus_ids, parse_nproc

UUIDS = [f"GPU-{digit * 8}-44b4-5091-6060-ffd3b086b3a1" for digit in "abcd"]
BUS_IDS = ["0000:17:00.0", "0000:65:00.0", "0000:ca:00.0", "0001:03:00.0"]


class Host:
    """/dev, /proc and /sys of a host."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in ("dev", "proc", "sys"):
            (root / name).mkdir()
        self.roots = Roots(str(root / "dev"), str(root / "proc"), str(root / "sys"))

    def write(self, name: str, text: str = "") -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def add_nvidia(self, bus_id: str, minor: int, uuid: str, node: bool = True, excluded: str = "No") -> None:
        self.write(
            f"proc/driver/nvidia/gpus/{bus_id}/information",
            f"Model: \t\t NVIDIA H200\nIRQ:   \t\t 41\nGPU UUID: \t {uuid}\nBus Type: \t PCIe\n"
            f"Bus Location: \t {bus_id}\nDevice Minor: \t {minor}\nGPU Excluded:\t {excluded}\n",
        )
        if node:
            self.write(f"dev/nvidia{minor}")

    def add_amd(self, node: int, render_minor: int, location: int, unique_id: int, opened: bool = True) -> None:
        self.write(
            f"sys/class/kfd/kfd/topology/nodes/{node}/properties",
            f"cpu_cores_count 0\nsimd_count 1216\nlocation_id {location}\ndomain 1\n"
            f"drm_render_minor {render_minor}\nunique_id {unique_id}\n",
        )
        if opened:
            self.write(f"dev/dri/renderD{render_minor}")

    def gpus(self, **environ: str) -> tuple[str | None, ...]:
        return gpu_pci_bus_ids(environ, self.roots)

    def nproc(self, value: str, **environ: str) -> int:
        return parse_nproc(value, environ, self.roots)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


@pytest.fixture
def server(host: Host) -> Host:
    """Four GPUs whose device nodes are numbered against the order of the PCI bus."""
    for bus_id, uuid, minor in zip(BUS_IDS, UUIDS, (3, 2, 1, 0), strict=True):
        host.add_nvidia(bus_id, minor, uuid)
    for other in ("nvidiactl", "nvidia-uvm", "nvidia-caps/nvidia-cap1", "null"):
        host.write(f"dev/{other}")
    return host


def test_a_host_without_gpus_has_none(host: Host) -> None:
    """Whatever the variables contain."""
    assert host.gpus() == ()
    assert host.gpus(CUDA_VISIBLE_DEVICES="0,1") == ()


def test_gpus_are_in_the_order_of_the_pci_bus(server: Host) -> None:
    """Not in the order of the device nodes; other device nodes of the driver are not GPUs."""
    assert server.gpus() == tuple(BUS_IDS)


@pytest.mark.parametrize(
    ("selector", "numbers"),
    [
        ("", []),
        ("-1", []),
        ("none", []),
        ("0,1,2,3", [0, 1, 2, 3]),
        ("2", [2]),
        ("3, 1", [3, 1]),
        ("1,-1,2", [1]),
        ("1,7,2", [1]),
        ("9,0", []),
        ("0,,1", [0]),
        ("1gpu2,2ampere", [1, 2]),
        ("0,0", []),
        (f"{UUIDS[2]},{UUIDS[0]}", [2, 0]),
        ("GPU-bbbb", [1]),
        ("GPU-", []),
        (f"{UUIDS[0]},GPU-eeee,{UUIDS[1]}", [0]),
        (f"{UUIDS[0]},GPU-aaaa", []),
        (f"{UUIDS[3]},0", [3]),
        (f"0,{UUIDS[3]}", [0]),
    ],
)
def test_cuda_visible_devices_is_parsed_as_cuda_does(server: Host, selector: str, numbers: list[int]) -> None:
    """A list stops at the first invalid entry, a GPU named twice empties it, uuids may be shortened."""
    assert server.gpus(CUDA_VISIBLE_DEVICES=selector) == tuple(BUS_IDS[number] for number in numbers)


def test_nvidia_visible_devices_is_ignored(server: Host) -> None:
    """The container runtime has applied it already."""
    assert len(server.gpus(NVIDIA_VISIBLE_DEVICES="void")) == 4


def test_gpus_without_a_device_node_do_not_count(host: Host) -> None:
    """In a container the driver lists every GPU of the host."""
    host.add_nvidia(BUS_IDS[0], 0, UUIDS[0], node=False)
    host.add_nvidia(BUS_IDS[1], 1, UUIDS[1])
    assert host.gpus() == (BUS_IDS[1],)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may open everything")
def test_a_device_node_without_permission_does_not_count(server: Host) -> None:
    (server.root / "dev/nvidia3").chmod(0)
    assert server.gpus() == tuple(BUS_IDS[1:])


def test_device_nodes_alone_are_enough(host: Host) -> None:
    """Without the driver's list GPUs are counted without bus ids, and any uuid is accepted."""
    for minor in range(2):
        host.write(f"dev/nvidia{minor}")
    assert host.gpus() == (None, None)
    assert host.gpus(CUDA_VISIBLE_DEVICES="1") == (None,)
    assert host.gpus(CUDA_VISIBLE_DEVICES=f"{UUIDS[0]},{UUIDS[1]}") == (None, None)


def test_a_gpu_without_a_known_uuid_can_still_be_selected(host: Host) -> None:
    """The driver writes question marks for a GPU that is not initialized; a single GPU is unambiguous."""
    host.add_nvidia(BUS_IDS[0], 0, "GPU-????????-????-????-????-????????????")
    assert host.gpus(CUDA_VISIBLE_DEVICES=UUIDS[0]) == (BUS_IDS[0],)


def test_an_excluded_gpu_does_not_count(host: Host) -> None:
    """CUDA does not show it."""
    host.add_nvidia(BUS_IDS[0], 0, UUIDS[0], excluded="Yes")
    host.add_nvidia(BUS_IDS[1], 1, UUIDS[1])
    assert host.gpus() == (BUS_IDS[1],)


def test_each_mig_slice_counts_as_a_device(server: Host) -> None:
    """Only its older name contains its GPU."""
    new = ["MIG-1f0e1a2b-0000-1111-2222-333344445555", "MIG-9c9c9c9c-0000-1111-2222-333344445555"]
    assert server.gpus(CUDA_VISIBLE_DEVICES=",".join(new)) == (None, None)
    assert server.gpus(CUDA_VISIBLE_DEVICES=f"{new[0]},{new[0]}") == ()
    old = f"MIG-{UUIDS[2]}/1/0,MIG-{UUIDS[2]}/2/0"
    assert server.gpus(CUDA_VISIBLE_DEVICES=old) == (BUS_IDS[2],) * 2


def test_a_mig_slice_belongs_to_the_only_gpu(host: Host) -> None:
    host.add_nvidia(BUS_IDS[0], 0, UUIDS[0])
    assert host.gpus(CUDA_VISIBLE_DEVICES="MIG-1f0e1a2b-0000-1111-2222-333344445555") == (BUS_IDS[0],)


@pytest.fixture
def amd_server(host: Host) -> Host:
    host.write("sys/class/kfd/kfd/topology/nodes/0/properties", "cpu_cores_count 96\nsimd_count 0\nlocation_id 0\n")
    host.add_amd(2, 129, 0x2600, 0xB)
    host.add_amd(10, 130, 0x43_08, 0xC)
    host.add_amd(1, 128, 0x0500, 0xA)
    host.add_amd(11, 131, 0x6300, 0xD, opened=False)
    return host


def test_amd_gpus_are_in_the_order_of_the_kernel(amd_server: Host) -> None:
    """Nodes with SIMD units and a render node that can be opened; the CPU's node is not a GPU."""
    assert amd_server.gpus() == ("0001:05:00.0", "0001:26:00.0", "0001:43:01.0")


@pytest.mark.parametrize(
    ("environ", "buses"),
    [
        ({"HIP_VISIBLE_DEVICES": "2,0"}, ["43", "05"]),
        ({"ROCR_VISIBLE_DEVICES": "1,2"}, ["26", "43"]),
        ({"ROCR_VISIBLE_DEVICES": "1,2", "HIP_VISIBLE_DEVICES": "1"}, ["43"]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-000000000000000b"}, ["26"]),
        ({"CUDA_VISIBLE_DEVICES": "1"}, ["26"]),
        ({"CUDA_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "0"}, ["05"]),
        ({"HIP_VISIBLE_DEVICES": ""}, []),
    ],
)
def test_rocr_and_hip_variables_are_applied_in_order(
    amd_server: Host, environ: dict[str, str], buses: list[str]
) -> None:
    """ROCr's list first, then HIP's within it; CUDA's variable replaces HIP's."""
    assert [str(bus_id)[5:7] for bus_id in amd_server.gpus(**environ)] == buses


def test_a_positive_number_is_accepted(host: Host) -> None:
    assert host.nproc("8") == 8
    assert host.nproc(" 1 ") == 1


@pytest.mark.parametrize("value", ["0", "-2"])
def test_fewer_than_one_worker_is_rejected(host: Host, value: str) -> None:
    with pytest.raises(ValueError, match=f"^--nproc-per-node={value}: must be at least 1.$"):
        host.nproc(value)


@pytest.mark.parametrize("value", ["2x", "1.5", "", "gpu,cpu", "--help"])
def test_an_invalid_backend_name_is_rejected_without_torch(host: Host, value: str) -> None:
    with pytest.raises(ValueError, match="must be a number, auto, cpu, gpu, xpu or the name of a torch backend"):
        host.nproc(value)


def test_gpu_and_auto_count_the_visible_gpus(server: Host) -> None:
    """One worker per visible GPU."""
    assert server.nproc("gpu") == 4
    assert server.nproc("auto") == 4
    assert server.nproc("gpu", CUDA_VISIBLE_DEVICES="1,2") == 2


def test_auto_without_gpus_counts_cpus(host: Host) -> None:
    assert host.nproc("auto") == host.nproc("cpu") == len(devices.allowed_cpus())


def test_the_message_without_gpus_names_the_searched_paths(host: Host) -> None:
    with pytest.raises(ValueError, match="no GPU found") as raised:
        host.nproc("gpu")
    assert f"{host.roots[0]}/nvidia0" in str(raised.value)
    assert f"{host.roots[2]}/class/kfd" in str(raised.value)


def test_the_message_for_hidden_gpus_names_the_variable(server: Host) -> None:
    """Hidden GPUs are distinguished from missing ones."""
    with pytest.raises(ValueError, match="found 4 GPUs, but CUDA_VISIBLE_DEVICES='' hides all of them"):
        server.nproc("gpu", CUDA_VISIBLE_DEVICES="")


@pytest.mark.skipif(sys.platform != "linux", reason="Linux lets a process be bound to CPUs")
def test_only_cpus_of_this_process_are_counted(host: Host) -> None:
    """A process bound to some CPUs counts only these."""
    assert count_cpus(host.roots) == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/\n"}, None),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000"}, None),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "250000 100000"}, 2.5),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/cpu.max": "800000 100000",
                "sys/fs/cgroup/a/cpu.max": "150000 100000",
            },
            1.5,
        ),
        ({"proc/self/cgroup": "0::/../x\n", "sys/fs/cgroup/cpu.max": "50000 100000"}, 0.5),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/docker/ab\n3:memory:/docker/ab\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "300000",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
            },
            3.0,
        ),
        (
            {
                "proc/self/cgroup": "1:cpu:/\n0::/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            None,
        ),
    ],
)
def test_the_quota_is_the_tightest_of_the_cgroup_and_its_ancestors(
    host: Host, files: dict[str, str], quota: float | None
) -> None:
    """For both cgroup versions, from the process's cgroup up to the root visible in the container."""
    for name, text in files.items():
        host.write(name, text)
    assert cpu_quota(host.roots) == quota
    assert 1 <= count_cpus(host.roots) <= max(1, quota or 10_000)


def fake_torch(root: Path, source: str) -> dict[str, str]:
    """Return an environment whose Python imports this fake torch."""
    (root / "torch.py").write_text(source)
    return {**os.environ, "PYTHONPATH": str(root)}


def test_other_backends_are_counted_with_torch(tmp_path: Path) -> None:
    """In the workers' interpreter, whatever else it prints."""
    environ = fake_torch(tmp_path, "class npu:\n    device_count = staticmethod(lambda: 3)\nprint('hello')\n")
    assert parse_nproc("npu", environ) == 3


def test_gpus_without_device_nodes_are_counted_with_torch(host: Host, tmp_path: Path) -> None:
    """WSL has one device node for all GPUs."""
    host.write("dev/dxg")
    environ = fake_torch(tmp_path, "class cuda:\n    device_count = staticmethod(lambda: 2)\n")
    assert host.nproc("gpu", **environ) == 2
    assert host.nproc("auto", **environ) == 2


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("class xpu:\n    device_count = staticmethod(lambda: 0)", "torch found no xpu device on this host"),
        ("xpu = None", "expected a number, auto, cpu, gpu or a device type of torch such as xpu"),
        (
            "raise OSError('libtorch is broken')",
            r"could not count xpu devices with torch \(OSError: libtorch is broken\)",
        ),
        ("import os; os._exit(7)", r"could not count xpu devices with torch \(exit code 7\)"),
        ("import no_such_module", r"No module named 'no_such_module'"),
    ],
)
def test_a_failure_of_torch_is_one_line(tmp_path: Path, source: str, message: str) -> None:
    """No device, no backend, a broken torch."""
    with pytest.raises(ValueError, match=f"^--nproc-per-node=xpu: .*{message}"):
        parse_nproc("xpu", fake_torch(tmp_path, source))


def test_the_message_without_torch_says_so(tmp_path: Path) -> None:
    """The workers' interpreter may have no torch."""
    bare = tmp_path / "bare-python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    bare.chmod(bare.stat().st_mode | stat.S_IXUSR)
    with pytest.raises(
        ValueError, match=f"expected a number, auto, cpu or gpu; torch counts other devices, and {bare} has no torch"
    ):
        parse_nproc("xpu", {**os.environ, "PYTHON_EXEC": str(bare)})


def test_a_missing_interpreter_is_reported(tmp_path: Path) -> None:
    """PYTHON_EXEC may name a missing file."""
    with pytest.raises(ValueError, match="to count devices with torch"):
        parse_nproc("xpu", {**os.environ, "PYTHON_EXEC": str(tmp_path / "no-python")})


def test_the_wait_for_torch_is_bounded(tmp_path: Path) -> None:
    """Importing torch may hang on a stuck driver."""
    environ = fake_torch(tmp_path, "import signal; signal.pause()")
    with pytest.raises(ValueError, match=r"torch did not count the xpu devices within 0\.2 s"):
        count_with_torch("xpu", environ, timeout_s=0.2)


def test_a_folder_named_torch_is_not_imported(tmp_path: Path) -> None:
    """The current folder is not searched, as for a script in another folder."""
    here = tmp_path / "here"
    here.mkdir()
    (here / "torch.py").write_text("raise RuntimeError('the wrong torch')")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    environ = fake_torch(elsewhere, "class xpu:\n    device_count = staticmethod(lambda: 1)")
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\ncd "{here}" && exec "{sys.executable}" "$@"\n')
    wrapper.chmod(wrapper.stat().st_mode | stat.S_IXUSR)
    assert count_with_torch("xpu", {**environ, "PYTHON_EXEC": str(wrapper)}) == 1
