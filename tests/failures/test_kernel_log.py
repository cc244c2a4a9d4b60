"""GPU errors and crashes in the kernel log."""

from __future__ import annotations

from pathlib import Path

from tenax._failures.evidence import crash_line, gather, gpu_error

from .test_out_of_memory import Kernel

LOST = "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
FAULT = "NVRM: Xid (PCI:0000:3b:00): 31, pid=77, name=python3, Ch 00000008, MMU Fault"
ECC = "NVRM: Xid (PCI:0000:3b:00): 48, pid=77, An uncorrectable double bit error (DBE) has been detected"
CLEANED = "NVRM: Xid (PCI:0000:3b:00): 45, pid=77, name=python3, Ch 00000010"
CRASH = "python3[77]: segfault at 0 ip 00007f0 sp 00007ff error 4 in libfoo.so.1[7f0+1000]"
CUDA = b"Traceback (most recent call last):\n  File x\nRuntimeError: CUDA error: unspecified launch failure\n"


def test_a_gpu_error_counts_for_the_process_it_names() -> None:
    assert gpu_error([FAULT], 77, has_gpu_symptom=False) == ("gpu_illegal_access", FAULT)
    assert gpu_error([FAULT], 78, has_gpu_symptom=True) == ("", "")
    assert gpu_error([FAULT, ECC], 77, has_gpu_symptom=False) == ("gpu_memory_error", ECC)
    assert gpu_error([CLEANED], 77, has_gpu_symptom=True) == ("", ""), "cleanup after any exit of a process"


def test_a_lost_gpu_counts_for_a_worker_with_a_gpu_symptom() -> None:
    assert gpu_error([LOST], 77, has_gpu_symptom=True) == ("gpu_lost", LOST)
    assert gpu_error([LOST], 77, has_gpu_symptom=False) == ("", "")


def test_the_library_of_a_crash_is_named() -> None:
    assert crash_line([LOST, CRASH], 77) == CRASH
    assert crash_line([CRASH], 7) == ""


def record(line: str, priority: int = 3) -> str:
    return f"{priority},1,1,-;{line}\n"


def test_evidence_uses_the_kernel_log(tmp_path: Path) -> None:
    """Only lines of this generation that the kernel itself wrote."""
    kernel = Kernel(tmp_path)
    kernel.membership.write_text("")
    with kernel.watch() as watch:
        kernel.log_text(record(LOST))
        watch.rebase()
        assert gather(pid=77, exit_code=1, stderr_tail=CUDA, out_of_memory=watch).cause == "gpu_illegal_access"
        kernel.log_text(record(LOST, priority=12))
        assert gather(pid=77, exit_code=1, stderr_tail=CUDA, out_of_memory=watch).cause == "gpu_illegal_access"
        kernel.log_text(record(LOST))
        found = gather(pid=77, exit_code=1, stderr_tail=CUDA, out_of_memory=watch)
        assert (found.cause, found.proof) == ("gpu_lost", LOST)
        lost_peer = b"Traceback (most recent call last):\n  File x\nBrokenPipeError: [Errno 32] Broken pipe\n"
        assert gather(pid=78, exit_code=1, stderr_tail=lost_peer, out_of_memory=watch).cause == "peer_lost"
    with kernel.watch() as watch:
        kernel.log_text(record(CRASH, priority=6))
        found = gather(pid=77, exit_code=-11, out_of_memory=watch)
        assert (found.cause, found.proof) == ("segmentation_fault", CRASH)


def test_in_another_pid_namespace_only_lines_without_a_pid_count(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path)
    kernel.membership.write_text("")
    kernel.namespace.unlink()
    kernel.namespace.symlink_to("pid:[4026532999]")
    with kernel.watch() as watch:
        kernel.log_text(record(ECC) + record(CRASH))
        assert gather(pid=77, exit_code=-11, out_of_memory=watch).proof == ""
        kernel.log_text(record(LOST))
        assert gather(pid=77, exit_code=-11, out_of_memory=watch).cause == "gpu_lost"
