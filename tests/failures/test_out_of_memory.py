"""The kernel's proof of an out-of-memory kill: from files as the kernel shows them, and once for real."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tenax._failures.out_of_memory import OutOfMemoryWatch

KILLED = "3,{n},1234567,-;Memory cgroup out of memory: Killed process {pid} (python3) total-vm:9kB, anon-rss:8kB\n"


class Kernel:
    """Files as the kernel shows them, which a test can change."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = folder / "cgroup"
        self.log = folder / "kmsg"
        self.log.write_text("")
        self.namespace = folder / "pid_namespace"
        self.namespace.symlink_to("pid:[4026531836]")
        self.membership = folder / "membership"
        self.counter_file = self.root

    def version_2(self, group: str = "/job", file: str = "memory.events") -> Kernel:
        self.membership.write_text(f"0::{group}\n")
        self.counter_file = self.root / group.lstrip("/") / file
        self.counter_file.parent.mkdir(parents=True)
        return self.count(0)

    def version_1(self, group: str = "/job", mounted: str = "memory/job") -> Kernel:
        self.membership.write_text(f"3:cpu,cpuacct:/elsewhere\n2:memory:{group}\n0::/\n")
        self.counter_file = self.root / mounted / "memory.oom_control"
        self.counter_file.parent.mkdir(parents=True)
        return self.count(0)

    def count(self, kills: int) -> Kernel:
        if self.counter_file.name == "memory.oom_control":
            self.counter_file.write_text(f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n")
        else:
            self.counter_file.write_text(f"low 0\nhigh 0\nmax 9\noom 3\noom_kill {kills}\noom_group_kill 5\n")
        return self

    def log_text(self, text: str) -> None:
        with open(self.log, "a") as log:
            log.write(text)

    def watch(self) -> closing[OutOfMemoryWatch]:
        return closing(
            OutOfMemoryWatch(
                cgroup_file=str(self.membership),
                cgroup_root=str(self.root),
                kernel_log=str(self.log),
                pid_namespace_file=str(self.namespace),
            )
        )


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    return Kernel(tmp_path)


def test_an_increased_counter_is_proof(kernel: Kernel) -> None:
    """Version 2: the text contains the group and the counter before and after."""
    kernel.version_2().count(4)
    with kernel.watch() as watch:
        assert watch.proof(10) == ""
        kernel.count(5)
        assert watch.proof(10) == "killed by the kernel: out of memory (cgroup /job, oom_kill 4 → 5)"
        assert watch.proof(11) == ""  # one kill is the proof for one process


def test_two_kills_are_proof_for_two_processes(kernel: Kernel) -> None:
    """The kernel may have counted both before the first is examined."""
    kernel.version_2()
    with kernel.watch() as watch:
        kernel.count(2)
        assert "oom_kill 0 → 2" in watch.proof(10)
        assert "oom_kill 1 → 2" in watch.proof(11)
        assert watch.proof(12) == ""


@pytest.mark.parametrize("mounted", ["memory/job", "memory"], ids=["as on a host", "as in a container"])
def test_counters_of_version_1_are_read(kernel: Kernel, mounted: str) -> None:
    """Also if the root of the mount is the container's own group."""
    kernel.version_1(mounted=mounted)
    with kernel.watch() as watch:
        kernel.count(1)
        assert watch.proof(10).startswith("killed by the kernel: out of memory (cgroup /")


def test_the_local_counter_is_used_if_it_is_the_only_one(kernel: Kernel) -> None:
    """``memory.events.local`` counts the group alone."""
    kernel.version_2(file="memory.events.local")
    with kernel.watch() as watch:
        kernel.count(1)
        assert "oom_kill 0 → 1" in watch.proof(10)


def test_a_log_line_about_the_process_is_proof(kernel: Kernel) -> None:
    """The counter is added if there is one."""
    kernel.membership.write_text("")
    with kernel.watch() as watch:
        kernel.log_text("6,1,1,-;usb 1-1: new device\n KEY=value\n" + KILLED.format(n=2, pid=77))
        assert watch.proof(76) == ""
        assert watch.proof(77) == (
            "killed by the kernel: out of memory (kernel log: Memory cgroup out of memory: Killed process 77 (python3))"
        )
    kernel.version_2()
    with kernel.watch() as watch:
        kernel.count(1).log_text("3,3,1,-;Out of memory: Killed process 78 (a) b) total-vm:1kB\n")
        assert watch.proof(78) == (
            "killed by the kernel: out of memory (cgroup /job, oom_kill 0 → 1;"
            " kernel log: Out of memory: Killed process 78 (a))"
        )


def test_a_kill_of_another_process_is_not_proof(kernel: Kernel) -> None:
    """The counter increased, but the log names the other process."""
    kernel.version_2()
    with kernel.watch() as watch:
        kernel.count(1).log_text(KILLED.format(n=1, pid=500))
        assert watch.proof(10) == ""
        assert watch.proof(500) != ""


def test_the_proof_for_a_child_is_marked(kernel: Kernel) -> None:
    """The log names the child."""
    kernel.version_2()
    with kernel.watch() as watch:
        kernel.count(1).log_text(KILLED.format(n=1, pid=500))
        assert watch.proof(10, child=True) == (
            "child process killed by the kernel: out of memory (cgroup /job, oom_kill 0 → 1;"
            " kernel log: Memory cgroup out of memory: Killed process 500 (python3))"
        )
        assert watch.proof(11, child=True) == ""


def test_earlier_kills_are_not_proof(kernel: Kernel) -> None:
    """Kills before the watch was created or before the last rebase do not count."""
    kernel.version_2().count(7).log_text(KILLED.format(n=1, pid=10))
    with kernel.watch() as watch:
        assert watch.proof(10) == ""
        kernel.count(9).log_text(KILLED.format(n=2, pid=11))
        watch.rebase()
        assert watch.proof(11) == ""
        kernel.count(10)
        assert "oom_kill 9 → 10" in watch.proof(12)


def test_a_log_line_of_a_process_is_not_proof(kernel: Kernel) -> None:
    """Privileged processes can write to the log; their lines have another priority."""
    kernel.membership.write_text("")
    with kernel.watch() as watch:
        kernel.log_text("12,1,1,-;Out of memory: Killed process 10 (python3)\n")
        assert watch.proof(10) == ""


def test_in_another_pid_namespace_the_log_is_ignored(kernel: Kernel) -> None:
    """In a container, pid 10 of the log is another process."""
    kernel.namespace.unlink()
    kernel.namespace.symlink_to("pid:[4026532999]")
    kernel.membership.write_text("")
    with kernel.watch() as watch:
        kernel.log_text(KILLED.format(n=1, pid=10))
        assert watch.proof(10) == ""


@pytest.mark.parametrize("membership", ["", "\n\n", "garbage", "0::/../..", "::::", "2:memory:", "\udcff"])
def test_a_system_without_counters_and_log_has_no_proof(kernel: Kernel, membership: str) -> None:
    """Missing or malformed files: an empty text, no error."""
    kernel.membership.write_bytes(membership.encode("utf-8", "surrogateescape"))
    kernel.log.unlink()
    with kernel.watch() as watch:
        watch.rebase()
        assert watch.proof(10) == ""
    absent = str(kernel.folder / "absent")
    nothing = OutOfMemoryWatch(cgroup_file=absent, cgroup_root=absent, kernel_log=absent, pid_namespace_file=absent)
    assert nothing.proof(10) == ""
    nothing.close()


def test_the_real_system_can_be_watched() -> None:
    """The defaults work on any machine, and no descriptor stays open."""
    before = set(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else set()
    with closing(OutOfMemoryWatch()) as watch:
        assert watch.proof(os.getpid()) == ""
    after = set(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else set()
    assert after == before


_ALLOCATE = """
import sys
open(sys.argv[1] + "/cgroup.procs", "w").write("0")
print("in", flush=True)
sys.stdin.readline()
hold = []
while True:
    hold.append(bytearray(b"x") * (1 << 20))
"""


@pytest.fixture
def memory_group() -> Iterator[Path]:
    """A real control group of version 1 or 2 with little memory."""
    limits = {
        Path("/sys/fs/cgroup/memory"): {"memory.limit_in_bytes": 48 << 20},
        Path("/sys/fs/cgroup"): {"memory.max": 48 << 20, "memory.swap.max": 0},
    }
    for root, files in limits.items():
        group = root / f"tenax-test-{os.getpid()}"
        if not (root / "cgroup.procs").exists():
            continue
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            for name, value in files.items():
                if (group / name).exists():
                    (group / name).write_text(str(value))
            if (group / next(iter(files))).exists():
                yield group
                return
        finally:
            group.rmdir()
    pytest.skip("no memory control group may be made here (needs root)")


@pytest.mark.process
def test_a_real_out_of_memory_kill_is_proven(memory_group: Path) -> None:
    """A process uses more memory than its control group allows."""
    process = subprocess.Popen(
        [sys.executable, "-c", _ALLOCATE, str(memory_group)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # In case the limit of the group does not work.
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30)),
    )
    with process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == b"in\n"
        with closing(OutOfMemoryWatch(cgroup_file=f"/proc/{process.pid}/cgroup")) as watch:
            process.stdin.write(b"\n")
            process.stdin.flush()
            assert process.wait(60) == -9
            proof = watch.proof(process.pid)
    expected = f"killed by the kernel: out of memory (cgroup /{memory_group.name}, oom_kill 0 → 1"
    assert proof.startswith(expected)
    if "kernel log" in proof:
        assert f"Killed process {process.pid} (" in proof
