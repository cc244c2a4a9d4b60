"""Classification of failures, from the output of real programs. Real jobs: ``tests/failures/verdicts``."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kit.causes import known_cause

from tenax._core.model import AWAITED, DEADLOCK, Evidence, Failure
from tenax._view.cause import cause_of, classify
from tenax._view.kinds import KINDS

pytestmark = pytest.mark.process

FRAME = (
    'Traceback (most recent call last):\n  File "train.py", line 7, in <module>\n    raise_it("CUDA out of memory")\n'
)


Observed = tuple[int, Evidence]  # the exit code, and what else is known


def raised(text: str, *earlier: str) -> Observed:
    """Observe a process that exited with this exception, raised while handling the earlier ones."""
    joined = "\n\nDuring handling of the above exception, another exception occurred:\n\n"
    chain = joined.join(FRAME + each for each in (*earlier, text))
    first = text.partition("\n")[0]
    return 1, Evidence(error_type=first.partition(":")[0], message=first, traceback=chain)


def printed(*lines: str, exit_code: int = 1) -> Observed:
    return exit_code, Evidence(last_lines=lines)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB", "cuda_out_of_memory"),
        ("RuntimeError: [enforce fail at alloc_cpu.cpp:75] DefaultCPUAllocator: can't allocate memory", "memory"),
        ("numpy.core._exceptions.MemoryError: Unable to allocate 8.00 EiB for an array", "memory"),
        ("OSError: [Errno 12] Cannot allocate memory", "memory"),
        ("RuntimeError: unable to open shared memory object </torch_4> in read-write mode", "shared_memory"),
        ("OSError: [Errno 28] No space left on device: '/dev/shm/x'", "shared_memory"),
        ("RuntimeError: PytorchStreamWriter failed writing file data/12: file write failed", "disk_full"),
        ("RuntimeError: [enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598", "disk_full"),
        ("OSError: [Errno 23] Too many open files in system", "too_many_files"),
        ("RuntimeError: can't start new thread", "no_more_processes"),
        ("RuntimeError: CUDA error: uncorrectable NVLink error detected during the execution", "gpu_memory_error"),
        ("RuntimeError: CUDA error: no kernel image is available for execution on the device", "no_gpu"),
        ("AssertionError: Torch not compiled with CUDA enabled", "no_gpu"),
        ("ImportError: libcuda.so.1: cannot open shared object file: No such file or directory", "no_gpu"),
        ("ImportError: libnccl.so.2: cannot open shared object file: No such file", "missing_library"),
        ("ImportError: /x/_C.so: undefined symbol: _ZN3c105ErrorC2E", "missing_library"),
        ("ModuleNotFoundError: No module named 'flash_attn'", "missing_module"),
        ("  File x\nIndentationError: unexpected indent", "syntax_error"),
        ("OSError: [Errno 98] error while attempting to bind on address ('0.0.0.0', 29500)", "address_in_use"),
        ("socket.gaierror: [Errno -3] Temporary failure in name resolution", "unknown_host"),
        ("requests.exceptions.ConnectionError: ('Connection aborted.', ConnectionResetError(104))", "remote_service"),
        ("ConnectionRefusedError: [Errno 111] Connection refused", "connection_refused"),
        ("torch.distributed.DistNetworkError: The client socket has failed to connect to any network address of "
         "(head, 29500). The IPv4 network addresses of (head, 29500) cannot be retrieved", "unknown_host"),
        ("RuntimeError: Function 'SqrtBackward0' returned nan values in its 0th output.", "not_a_number"),
        ("AttributeError: Can't pickle local object 'main.<locals>.<lambda>'", "not_picklable"),
        ("RuntimeError: Expected to have finished reduction in the prior iteration", "unused_parameters"),
        ("RuntimeError: Missing key in checkpoint state_dict: model.head.weight.", "checkpoint_mismatch"),
        ("ImportError: DeepSpeed is not installed => run `pip install deepspeed` or build it", "missing_module"),
        ("ValueError: Can't find a valid checkpoint at /job/checkpoint-500", "missing_file"),
        ("jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory allocating 70368744177664 bytes.", "memory"),
        ("TypeError: dot_general requires contracting dimensions to have the same shape, got (8,) and (9,).",
         "shape_mismatch"),
        ("RuntimeError: Unknown backend: 'gpu' requested, but no platforms are instances of gpu", "no_gpu"),
        ("ValueError: Tried to find /job/step-500 but folder does not exist", "missing_file"),
        ("lightning.fabric.utilities.exceptions.MisconfigurationException: No supported gpu backend found!", "no_gpu"),
        ("RuntimeError: NCCL error: internal error - please report this issue to the NCCL developers", "nccl_error"),
        ("_pickle.UnpicklingError: invalid load key, '<'.", "bad_file"),
        ("EOFError", "bad_file"),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/data/x'", "missing_file"),
        ("ValueError: Loss is NaN, stopping training", "not_a_number"),
        ("ValueError: the gradient norm is not finite", "not_a_number"),
        ("RuntimeError: The size of tensor a (3) must match the size of tensor b (4)", "shape_mismatch"),
        ("ValueError: unknown nanny: Lossing", "exception"),
        ("concurrent.futures.process.BrokenProcessPool: A process in the process pool was terminated", "child_failed"),
        ("KeyError: 'Connection'", "exception"),
    ],
)  # fmt: skip
def test_an_exception_is_classified_by_its_message(text: str, kind: str) -> None:
    cause = classify(*raised(text.strip()))
    assert (cause.kind, cause.is_consequence) == (kind, False)
    assert cause == known_cause(kind, cause.proof)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("ConnectionResetError: [Errno 104] Connection reset by peer", "peer_lost"),
        ("BrokenPipeError: [Errno 32] Broken pipe", "peer_lost"),
        ("RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:5", "peer_lost"),
        ("RuntimeError: Read error [10.0.0.1]:39711: Connection reset by peer", "peer_lost"),
        ("torch.distributed.DistNetworkError: failed to recv, got 0 bytes", "peer_lost"),
        ("RuntimeError: NCCL communicator was aborted on rank 1.", "peer_lost"),
        ("RuntimeError: x\nncclRemoteError: A call failed possibly due to a network error", "peer_lost"),
        ("asyncio.exceptions.IncompleteReadError: 0 bytes read on a total of 4 expected bytes", "peer_lost"),
        ("RuntimeError: [../gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv "
         "operation to complete", "collective_timeout"),
        ("RuntimeError: [Rank 0]: Ranks 1, 3 failed to pass monitoredBarrier in 5000 ms", "collective_timeout"),
        ("torch.distributed.DistStoreError: Timed out after 61 seconds waiting for clients. 1/2 clients joined.",
         "store_timeout"),
        ("RuntimeError: Socket Timeout", "store_timeout"),
    ],
)  # fmt: skip
def test_an_error_about_a_lost_peer_is_a_consequence(text: str, kind: str) -> None:
    cause = classify(*raised(text))
    assert (cause.kind, cause.is_consequence) == (kind, True)


def test_only_a_lost_peer_or_a_timeout_is_a_consequence() -> None:
    """Invariant 4."""
    assert {id for id, kind in KINDS.items() if kind.is_consequence} == {
        *("peer_lost", "jax_peer_lost", "collective_timeout", "store_timeout")
    }


def test_end_of_file_in_multiprocessing_is_a_lost_peer() -> None:
    file = raised("EOFError")
    pipe = 'Traceback (most recent call last):\n  File "/usr/lib/multiprocessing/connection.py", line 1\nEOFError'
    assert classify(*file).kind == "bad_file"
    assert classify(1, Evidence(error_type="EOFError", message="EOFError", traceback=pipe)).kind == "peer_lost"


def test_an_exhausted_resource_is_found_anywhere_in_the_chain() -> None:
    """Invariant 2: it is never a side effect, even if an error of the network followed."""
    full = "OSError: [Errno 28] No space left on device: '/data/x'"
    for last in ("RuntimeError: could not save", "BrokenPipeError: [Errno 32] Broken pipe"):
        cause = classify(*raised(last, full))
        assert (cause.kind, cause.proof) == ("disk_full", full)
        assert "/data/x" in cause.meaning


def test_the_last_exception_of_a_chain_decides_then_the_earlier() -> None:
    lost, missing = "ConnectionResetError: [Errno 104] reset", "ModuleNotFoundError: No module named 'fast'"
    assert classify(*raised(lost, missing)).kind == "peer_lost"
    assert classify(*raised("RuntimeError: step failed", lost)).kind == "peer_lost"


def test_source_lines_are_not_evidence() -> None:
    """Invariant 5: the frame of every traceback here quotes a line with 'CUDA out of memory' in it."""
    assert classify(*raised("KeyError: 'x'")).kind == "exception"


def test_the_kernels_proof_has_priority() -> None:
    evidence = Evidence(out_of_memory="killed by the kernel: out of memory (cgroup /x, oom_kill 0 → 1)")
    assert classify(-9, evidence).kind == "out_of_memory"
    assert classify(-9, evidence).proof == evidence.out_of_memory


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (signal.SIGKILL, "killed"),
        (signal.SIGTERM, "terminated"),
        (signal.SIGHUP, "hung_up"),
        (signal.SIGINT, "interrupted"),
        (signal.SIGSEGV, "segmentation_fault"),
        (signal.SIGBUS, "bus_error"),
        (signal.SIGILL, "illegal_instruction"),
        (signal.SIGFPE, "arithmetic"),
        (signal.SIGABRT, "aborted"),
        (signal.SIGPIPE, "peer_lost"),
        (signal.SIGUSR2, "signal"),
        (60, "signal"),
    ],
)
def test_a_signal_has_its_own_kind(number: int, kind: str) -> None:
    assert classify(-number, Evidence()).kind == kind
    noise = ("WARNING: Connection reset by peer, retrying", "CUDA error: out of memory, trying a smaller batch")
    if number != signal.SIGABRT:
        assert classify(*printed(*noise, exit_code=-number)).kind == kind, "it survived what it printed before"
    if number != 60:
        assert classify(128 + number, Evidence()).kind == kind, "the exit code of a shell"


def test_an_abort_is_classified_by_the_last_lines() -> None:
    timeout = "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(OpType=ALLREDUCE)"
    cause = classify(*printed("step 5", timeout, "Fatal Python error: Aborted", exit_code=-6))
    assert (cause.kind, cause.is_consequence, cause.proof) == ("collective_timeout", True, timeout)
    gpu = (
        "Process group watchdog thread terminated with exception: CUDA error: an illegal memory access was encountered"
    )
    assert classify(*printed(timeout, gpu, exit_code=-6)).kind == "gpu_illegal_access"


def test_a_python_exception_decides_about_an_abort_while_the_process_exits() -> None:
    """JAX aborts at exit because the others did not come to its last barrier."""
    evidence = Evidence(
        error_type="KeyError",
        message="KeyError: 'lr'",
        last_lines=("DEADLINE_EXCEEDED: Barrier timed out. Id: Shutdown::1", "Fatal Python error: Aborted"),
    )
    cause = classify(-signal.SIGABRT, evidence)
    assert (cause.kind, cause.is_consequence) == ("exception", False)


def test_what_is_printed_directly_before_a_crash_may_be_its_reason() -> None:
    """gRPC cannot listen, and JAX crashes. Nothing else that a crashed worker printed is evidence."""
    line = "E1117 12:39:27.507030   25897 add_port.cc:83] Failed to add port to server: none of 1 for '[::]:26074'"
    crash = ("Fatal Python error: Segmentation fault", "", "Thread 0x00007f42e6bcdb80 (most recent call first):")
    near, far = (
        classify(
            -signal.SIGSEGV,
            Evidence(error_type="Fatal Python error", message=crash[0], last_lines=(line, *more, *crash)),
        )
        for more in ((), ("step 1", "step 2", "step 3"))
    )
    assert near.meaning == "Port 26074 is already in use by another process."
    assert far.kind == "segmentation_fault"


def test_output_long_before_the_exit_is_not_the_cause() -> None:
    old = ("Connection reset by peer, retrying", *(f"step {n}" for n in range(20)))
    assert classify(*printed(*old, exit_code=3)).kind == "exit_code"
    assert classify(*printed("step 1", "send: Connection reset by peer", exit_code=3)).kind == "peer_lost"


@pytest.mark.parametrize(
    ("observed", "kind"),
    [
        (printed(exit_code=3), "exit_code"),
        (printed("error: --data must name a folder"), "exit_code"),
        (printed(exit_code=127), "script_not_found"),
        (printed(exit_code=126), "not_executable"),
        (printed("python3: can't open file '/x/y.py': [Errno 2] No such file or directory", exit_code=2),
         "script_not_found"),
        (printed("./a.out: error while loading shared libraries: libx.so.1: cannot open", exit_code=127),
         "missing_library"),
        (printed("./a.out: /lib/libc.so.6: version `GLIBC_2.38' not found (required by ./a.out)"), "glibc_too_old"),
        (printed("sh: 0: fork: Resource temporarily unavailable", exit_code=2), "no_more_processes"),
        (printed(exit_code=0), "unknown"),
    ],
)  # fmt: skip
def test_without_an_exception_output_and_exit_code_decide(observed: Observed, kind: str) -> None:
    assert classify(*observed).kind == kind


def test_the_kernel_log_is_more_specific_about_a_gpu() -> None:
    observed = raised("RuntimeError: CUDA error: unspecified launch failure")
    line = "NVRM: Xid (PCI:0000:3b:00): 79, pid=12, GPU has fallen off the bus."
    known = classify(*observed, kernel_error=("gpu_lost", line))
    assert (classify(*observed).kind, known.kind, known.proof) == ("gpu_illegal_access", "gpu_lost", line)


def test_the_meaning_contains_details_of_the_proof() -> None:
    port = classify(*raised("RuntimeError: failed to listen. port: 29500, useIpv6: 0, code: -98, name: EADDRINUSE"))
    assert port.meaning == "Port 29500 is already in use by another process."
    plain = classify(*raised("OSError: [Errno 98] Address already in use"))
    assert plain.meaning == "The port to listen on is already in use by another process."
    module = known_cause("missing_module", "No module named 'a.b'")
    assert module.meaning.startswith("The Python module a.b is not installed")


def test_what_the_agent_observed_has_priority_over_the_evidence() -> None:
    evidence = Evidence(cause="killed")
    late = Failure(1, 0, 0, 5, -9, 1.0, "did not leave the scope 'x' within 1 s", evidence, was_late=True)
    unstarted = Failure(1, 0, 0, 0, 127, 1.0, "could not be started: No such file")
    assert (cause_of(late).kind, cause_of(unstarted).kind) == ("scope_expired", "not_started")
    assert cause_of(Failure(1, 0, 0, 5, -9, 1.0, evidence=evidence)).kind == "killed"


def test_a_worker_that_never_joined_may_have_printed_why() -> None:
    lines = ("[W1117 socket.cpp:764] [c10d] The IPv4 network addresses of (head, 29500) cannot be retrieved", "")
    for kind, found in (("never_joined", "unknown_host"), ("stopped_responding", "stopped_responding")):
        failure = Failure(1, 0, 4, 10, -15, 5.0, reason="x", evidence=Evidence(cause=kind, last_lines=lines))
        assert cause_of(failure).kind == found


def test_a_failure_without_a_known_cause_is_classified_from_its_evidence() -> None:
    """From a journal of another version of tenax, or with evidence that came too late."""
    assert cause_of(Failure(1, 0, 0, 5, -11, 1.0)).kind == "segmentation_fault"
    unknown = Evidence(cause="of a newer tenax", error_type="KeyError", message="KeyError: 5")
    assert cause_of(Failure(1, 0, 0, 5, 1, 1.0, evidence=unknown)).kind == "exception"


def test_every_kind_has_a_meaning_and_a_next_step() -> None:
    for id, kind in KINDS.items():
        meaning, step = known_cause(id).meaning, known_cause(id).next_step
        assert (meaning[-1], step[-1]) == (".", "."), id
        assert "{" not in meaning + step, id
        assert kind.patterns or kind.signals or id in {
            *("out_of_memory", "exception", "signal", "scope_expired", "hang", "not_started", "exit_code", "unknown"),
            *AWAITED, DEADLOCK,
        }  # fmt: skip


def test_every_kind_is_in_the_guide() -> None:
    guide = (Path(__file__).parents[2] / "docs/guides/failures.md").read_text()
    for id in KINDS:
        assert f"| `{id}` | {known_cause(id).meaning}" in guide, id


any_text = st.text(st.characters(codec=None, exclude_categories=()), max_size=60)


@given(st.integers(-70, 300), any_text, any_text, any_text, st.lists(any_text, max_size=4), any_text)
def test_any_observation_is_classified_deterministically(
    code: int, error: str, message: str, trace: str, lines: list[str], memory: str
) -> None:
    evidence = Evidence(
        error_type=error, message=message, traceback=trace, last_lines=tuple(lines), out_of_memory=memory
    )
    cause = classify(code, evidence)
    assert cause == classify(code, evidence)
    assert cause.kind in KINDS
    cause.proof.encode()
    assert "\n" not in cause.proof
