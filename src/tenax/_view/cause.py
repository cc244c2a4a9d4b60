"""Classifies failures: what ended a worker, whether it follows from another worker's failure, and what to do.

Pure: observations in, a cause out, the same on every host and at every time. ``KINDS`` holds all rules: what each kind
means, what to do next, and how to recognize it.

Invariants:

1. **Evidence is checked in this order**: the kernel's proof of an out-of-memory kill; a signal from outside; the
   exception; the kernel log; the last output; the signal of a crash; the exit code.
2. In a chain of exceptions (``During handling of ...``), every exception is searched for exhausted or broken resources
   (memory, disk, descriptors, a GPU), which are never a side effect. Then the last exception decides, then the earlier.
3. Within one text, rules are tried in the order of the table: the specific before the general.
4. **Only a lost peer or a timeout of a collective is a consequence.** Any other error is a cause of its own, and the
   earliest cause is the first.
5. Source lines quoted in a traceback are not evidence: only the lines of the exceptions themselves are.
"""

from __future__ import annotations

import functools
import re
import signal
from typing import NamedTuple

import msgspec

from tenax._core.model import AWAITED, DEADLOCK, NEVER_JOINED, Diagnosis, Failure
from tenax._core.text import shortened, storable
from tenax._view.exit_text import describe_exit

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "KINDS",
    "Cause",
    "Kind",
    "Observations",
    "Related",
    "cause_of",
    "classify",
    "meaning_of",
    "next_step_of",
    "related",
    "what_happened",
]

_MAX_PROOF = 300
_MAX_SEARCHED = 2000  # characters of a line: some patterns are quadratic in its length
_MAX_LINES_BEFORE_CRASH = 2
_MAX_CONSEQUENCE_LINES = 8  # of output: the worker survived what it printed earlier
_EXTERNAL_SIGNALS = frozenset(
    {signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
)
_CRASHES = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE})
_SHELL_BASE = 128
_CONNECTING = ("unknown_host", "unreachable", "connection_refused", "connect_timeout")
_FAULTS = ("Fatal Python error", "Timeout")  # of the fault handler
_AT_EXIT = "thread_at_exit"  # says nothing about an exception before it
_VAGUE = frozenset({"exception", "assertion", "exit_code", "signal", "unknown"})  # the same only with the same message


class Observations(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a failed worker."""

    exit_code: int  # negative: the signal
    error_type: str = ""
    message: str = ""
    traceback: str = ""
    last_lines: Sequence[str] = ()
    earlier_lines: Sequence[str] = ()  # of its output, as far as they are kept
    out_of_memory: str = ""  # the kernel's proof, as text
    kernel_kind: str = ""  # from the kernel log about this worker or its GPU: the kind ...
    kernel_line: str = ""  # ... and the line


class Cause(msgspec.Struct, frozen=True):
    """The result of the classification."""

    kind: str
    is_consequence: bool
    proof: str  # the line that shows it; empty: only the exit code does
    meaning: str  # the kind's meaning, with details from the proof
    next_step: str  # what to do


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of failure. ``{what}`` in its texts is what ``detail`` finds in the proof, or else ``otherwise``."""

    id: str
    meaning: str
    next_step: str
    patterns: tuple[str, ...] = ()  # of the exception's lines
    within: str = ""  # must also match somewhere in the traceback
    is_consequence: bool = False
    trust_output: bool = True  # also matches printed lines
    signals: tuple[int, ...] = ()
    detail: str = ""  # a pattern with one group
    named: str = "{0}"
    otherwise: str = ""


_PATH = r"['\"<]((?:/|\./|\w:)[^'\">]+)['\">]"

# Resources that ran out or broke: invariant 2.
_RESOURCES: tuple[Kind, ...] = (
    Kind(
        id="out_of_memory",
        meaning="The kernel killed the worker: the host or its control group ran out of memory.",
        next_step="Give the job more memory, or reduce its use: smaller batches, fewer data-loading workers.",
    ),
    Kind(
        id="cuda_out_of_memory",
        meaning="The GPU ran out of memory.",
        next_step="Use a smaller batch, or check with nvidia-smi whether another process uses memory of that GPU.",
        patterns=(
            r"(?:CUDA|HIP|MPS|XPU) (?:error: )?out of memory",
            r"cuda\.OutOfMemoryError",
            r"cudaErrorMemoryAllocation",
            r"CUBLAS_STATUS_ALLOC_FAILED",
            r"RESOURCE_EXHAUSTED: Out of memory while trying to allocate",
        ),
    ),
    Kind(
        id="too_many_files",
        meaning="Too many files or sockets are open.",
        next_step="Raise the limit (ulimit -n), or find what is not closed: ls -l /proc/PID/fd of a running worker.",
        patterns=(
            r"Too many open files",
            r"\[Errno 2[34]\]",
            r"\bEMFILE\b|\bENFILE\b",
            r"received 0 items of ancdata",  # how multiprocessing shows it for tensors of data-loading workers
        ),
    ),
    Kind(
        id="shared_memory",
        meaning="Shared memory (/dev/shm) is full or too small.",
        next_step="Give the container more (docker run --shm-size=8g, or an emptyDir of medium Memory), or use fewer "
        "data-loading workers.",
        patterns=(
            r"out of shared memory",
            r"insufficient shared memory",
            r"(?:open|mmap|allocate|resize|extend) (?:a )?shared memory",
            r"/dev/shm.*(?:No space left|Cannot allocate|Bus error)",
            r"No space left.*/dev/shm",
            r"killed by signal: Bus error",
            r"unable to (?:mmap|write to file) .*</torch_",
        ),
    ),
    Kind(
        id="memory",
        meaning="A memory allocation failed.",
        next_step="Use less memory, or raise the limits: ulimit -v, the control group, vm.overcommit_memory.",
        patterns=(
            r"\bMemoryError\b",
            r"std::bad_alloc",
            r"Cannot allocate memory",
            r"\[Errno 12\]",
            r"DefaultCPUAllocator: (?:can't allocate|not enough) memory",
            r"Unable to allocate .* for an array",
            r"RESOURCE_EXHAUSTED: Out of memory allocating",  # of JAX on CPUs
        ),
    ),
    Kind(
        id="no_more_processes",
        meaning="The limit of threads or processes is reached.",
        next_step="Raise the limit (ulimit -u, pids.max of the control group), or start fewer data-loading workers and "
        "threads (OMP_NUM_THREADS).",
        patterns=(
            r"can't start new thread",
            r"fork: (?:retry: )?Resource temporarily unavailable",
            r"pthread_create(?:\(\))? failed",
            r"Thread creation failed: Resource",
            r"std::system_error: Resource temporarily unavailable",
        ),
    ),
    Kind(
        id="no_more_processes",
        meaning="",
        next_step="",
        patterns=(r"\[Errno 11\] Resource temporarily unavailable",),
        within=r"fork",
        trust_output=False,
    ),
    Kind(
        id="quota",
        meaning="The disk quota is used up{what}.",
        next_step="Delete files or write elsewhere; quota -s shows the usage.",
        patterns=(r"Disk quota exceeded", r"\[Errno 122\]", r"\bEDQUOT\b"),
        detail=_PATH,
        named=" at {0}",
    ),
    Kind(
        id="disk_full",
        meaning="The disk is full{what}.",
        next_step="Free some space or write elsewhere; df -h and df -i on that host show what is full.",
        patterns=(
            r"No space left on device",
            r"\[Errno 28\]",
            r"\bENOSPC\b",
            r"PytorchStreamWriter failed writing file",
            r"inline_container\.cc.*(?:file write failed|unexpected pos \d+ vs \d+)",
        ),
        detail=_PATH,
        named=" at {0}",
    ),
    Kind(
        id="file_too_large",
        meaning="A file exceeded the maximum file size.",
        next_step="Raise the limit (ulimit -f), or check the maximum of the file system.",
        patterns=(r"\[Errno 27\]", r"File too large"),
        signals=(signal.SIGXFSZ,),
    ),
    Kind(
        id="read_only",
        meaning="The file system is read-only{what}.",
        next_step="Write elsewhere. If it was writable before, the kernel may have remounted it after an error: check "
        "dmesg on that host.",
        patterns=(r"Read-only file system", r"\[Errno 30\]", r"\bEROFS\b"),
        detail=_PATH,
        named=" at {0}",
    ),
    Kind(
        id="io_error",
        meaning="Reading or writing failed on a disk or network file system{what}.",
        next_step="Check dmesg and the mounts of that host; keep jobs off it until the cause is found.",
        patterns=(r"\[Errno 5\]", r"Input/output error", r"\[Errno 116\]", r"Stale (?:NFS )?file handle"),
        detail=_PATH,
        named=" at {0}",
    ),
    # --- GPUs ---
    Kind(
        id="gpu_lost",
        meaning="A GPU is no longer available on its host.",
        next_step="Keep jobs off that host, reboot it, and check the GPU and its slot (nvidia-smi, dmesg).",
        patterns=(r"GPU is lost", r"fallen off the bus", r"Unable to determine the device handle"),
    ),
    Kind(
        id="gpu_memory_error",
        meaning="The GPU has an uncorrectable memory error (ECC).",
        next_step="Reset that GPU or reboot the host; replace the GPU if it happens again (nvidia-smi -q -d ECC).",
        patterns=(r"uncorrectable (?:\w+ )?(?:ECC|NVLink) error", r"cudaErrorECCUncorrectable", r"(?i)double bit ecc"),
    ),
    Kind(
        id="gpu_assert",
        meaning="An assertion on the GPU failed, often an index or a label out of range.",
        next_step="Run it with CUDA_LAUNCH_BLOCKING=1 or on the CPU: the traceback then shows the failing line.",
        patterns=(r"device-side assert triggered", r"cudaErrorAssert"),
    ),
    Kind(
        id="gpu_illegal_access",
        meaning="A GPU kernel accessed invalid memory.",
        next_step="Run it with CUDA_LAUNCH_BLOCKING=1 to find the line. If it fails on one host only, suspect its GPU.",
        patterns=(
            r"illegal memory access",
            r"cudaErrorIllegalAddress",
            r"CUDA error: misaligned address",
            r"CUDA error: an illegal instruction",
            r"unspecified launch failure",
        ),
    ),
    Kind(
        id="no_gpu",
        meaning="No usable GPU: none is present, none is visible, or driver and CUDA versions do not match.",
        next_step="Compare nvidia-smi, CUDA_VISIBLE_DEVICES and --nproc-per-node on that host with a working host.",
        patterns=(
            r"No CUDA GPUs are available",
            r"no CUDA-capable device",
            r"Found no NVIDIA driver",
            r"NVIDIA driver on your system is too old",
            r"driver version is insufficient",
            r"Driver/library version mismatch",
            r"not compiled with CUDA enabled",
            r"invalid device ordinal",
            r"no kernel image is available",
            r"forward compatibility was attempted",
            r"libcuda\.so[\w.]*: cannot open",
            r"has no attribute '_cuda_\w+'",  # torch without CUDA
            r"ProcessGroupNCCL is only supported with GPUs",
            r"Distributed package doesn't have NCCL",
            r"Unable to initialize backend 'cuda'",
            r"Unknown backend: '(?:gpu|cuda|rocm)' requested",
            r"No supported gpu backend found",
        ),
        trust_output=False,  # torch warns of it wherever there is none
    ),
    Kind(
        id="gpu_error",
        meaning="A GPU or its libraries reported an error.",
        next_step="Run it with CUDA_LAUNCH_BLOCKING=1. If it fails on one host only, suspect its GPU (Xid in dmesg).",
        patterns=(
            r"CUDA error:",
            r"CUDNN_STATUS_[A-Z]",
            r"cuDNN error",
            r"CUBLAS_STATUS_[A-Z]",
            r"HIP error:",
            r"cudaError",
        ),
    ),
)

KINDS: tuple[Kind, ...] = (
    *_RESOURCES,
    # --- the program and its dependencies ---
    Kind(
        id="glibc_too_old",
        meaning="A library was built for a newer system: this one lacks {what}.",
        next_step="Use an image with a newer system, or a build of the library for this one.",
        patterns=(r"version [`'](?:GLIBC|GLIBCXX|CXXABI)_[\w.]+' not found",),
        detail=r"[`']((?:GLIBC|GLIBCXX|CXXABI)_[\w.]+)'",
        otherwise="the C library version",
    ),
    Kind(
        id="missing_library",
        meaning="{what} could not be loaded.",
        next_step="Install it on that host, or add its folder to LD_LIBRARY_PATH; ldd shows what is missing.",
        patterns=(r"cannot open shared object file", r"undefined symbol: ", r"error while loading shared libraries"),
        detail=r"([\w.+-]+\.so[\w.]*)",
        named="The shared library {0}",
        otherwise="A shared library",
    ),
    Kind(
        id="wrong_build",
        meaning="A file was built for another Python version or CPU architecture.",
        next_step="Compare Python and CPU of that host with the others; reinstall the package there.",
        patterns=(
            r"Exec format error",
            r"\[Errno 8\]",
            r"bad magic number in",
            r"invalid ELF header",
            r"wrong ELF class",
            r"module was compiled for Python",
            r"compiled using NumPy 1\.x cannot be run",
            r"requires a different Python",
        ),
        trust_output=False,
    ),
    Kind(
        id="missing_module",
        meaning="{what} is not installed on that host, or is not on the path.",
        next_step="Install it for the Python that runs on that host, or set PYTHONPATH; every host needs it.",
        patterns=(
            r"ModuleNotFoundError",
            r"No module named ",
            r"\bImportError\b.*\b(?:is not installed|pip install)\b",
        ),
        detail=r"No module named ['\"]?([\w.]+)|(\w+) is not installed",
        named="The Python module {0}",
        otherwise="A Python module",
    ),
    Kind(
        id="import_error",
        meaning="A module was found, but importing from it failed.",
        next_step="Compare the installed versions (pip freeze) with those that the script needs.",
        patterns=(r"\bImportError\b", r"cannot import name "),
        trust_output=False,
    ),
    Kind(
        id="syntax_error",
        meaning="The code is not valid for the Python version that runs it.",
        next_step="Correct the line shown, or run it with the Python version that it was written for.",
        patterns=(r"\b(?:SyntaxError|IndentationError|TabError)\b",),
        trust_output=False,
    ),
    Kind(
        id="script_not_found",
        meaning="The script or program does not exist on that host{what}.",
        next_step="Check the path and the working directory on that host; every host needs the same files.",
        patterns=(r"can't open file ['\"].*\[Errno 2\]", r"can't find '__main__' module", r"command not found"),
        detail=r"can't open file ['\"]([^'\"]+)['\"]",
        named=": {0}",
    ),
    Kind(
        id="not_executable",
        meaning="No permission to execute or read the program on that host.",
        next_step="Give the user of the job access to the file (chmod +x) and to its folder.",
        patterns=(r"can't open file ['\"].*\[Errno 13\]",),
    ),
    # --- the network, as a cause ---
    Kind(
        id="address_in_use",
        meaning="{what} is already in use by another process.",
        next_step="Find that process (ss -ltnp), choose another port, or let tenax choose one.",
        patterns=(
            r"(?i)address already in use",
            r"\bEADDRINUSE\b",
            r"\[Errno 98\]",
            r"Failed to add port to server",  # of gRPC; JAX then crashes
        ),
        detail=r"(?:port: |port |:|, )(\d{2,5})\b(?!\])",
        named="Port {0}",
        otherwise="The port to listen on",
    ),
    Kind(
        id="wrong_address",
        meaning="The worker tried to listen on an address that its host does not have.",
        next_step="Check MASTER_ADDR and --local-addr: use an address of that host (ip addr).",
        patterns=(r"Cannot assign requested address", r"\[Errno 99\]", r"\bEADDRNOTAVAIL\b"),
    ),
    Kind(
        id="unknown_host",
        meaning="A host name could not be resolved{what}.",
        next_step="Check MASTER_ADDR and DNS on that host (getent hosts NAME).",
        patterns=(
            r"\bgaierror\b",
            r"Name or service not known",
            r"Temporary failure in name resolution",
            r"No address associated with hostname",
            r"Name does not resolve",
            r"IPv[46] network addresses of \(.*\) cannot be retrieved",
        ),
        detail=r"(?:host=['\"]|addresses of \()([\w.-]+)",
        named=": {0}",
    ),
    Kind(
        id="unreachable",
        meaning="The network has no route to the other host.",
        next_step="Check routes, firewall and network interface (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME).",
        patterns=(r"No route to host", r"Network is unreachable", r"\[Errno 1(?:13|01)\]"),
    ),
    Kind(
        id="remote_service",
        meaning="A request to a service outside the job failed.",
        next_step="Check that the service is reachable from that host; let the script retry.",
        patterns=(
            r"^(?:requests|urllib3|botocore|boto3|aiohttp|httpx|httpcore|huggingface_hub|google|azure|s3fs|gcsfs)\.",
            r"^(?:urllib\.error|http\.client)\.",
        ),
        trust_output=False,
    ),
    Kind(
        id="collective_mismatch",
        meaning="The workers called different collective operations at the same time.",
        next_step="Find where the ranks diverge in the script; TORCH_DISTRIBUTED_DEBUG=DETAIL names both operations.",
        patterns=(r"Detected mismatch between collectives", r"is running collective: .* but Rank"),
    ),
    Kind(
        id="size_mismatch",
        meaning="A collective operation received data of another size: the ranks called it with different tensors.",
        next_step="Compare the shapes and types of the tensors on all ranks; the rank that aborts is often not the one "
        "that is wrong.",
        patterns=(
            r"Received data size doesn't match expected size",
            r"op\.preamble\.(?:length|nbytes) ?<= ?op\.nbytes",
            r"appears not to match (?:sizes|strides|dtype)",  # DDP compares its parameters
            r"Cannot apply desired operation due to shape mismatches",  # Accelerate in its debug mode
        ),
    ),
    # --- consequences of another worker's failure: invariant 4 ---
    Kind(
        id="collective_timeout",
        meaning="A collective operation timed out: another worker did not take part.",
        next_step="Investigate the worker that did not arrive, not this one.",
        patterns=(
            r"Watchdog caught collective operation timeout",
            r"Timed out waiting \d+ ?ms for (?:recv|send|\w+) operation",
            r"failed to pass monitoredBarrier",
            r"collective operation timeout",
            r"collective timeout from rank",
            r"before timing out\.",
            r"Some NCCL operations have failed or timed out",
            r"NCCL timeout",
            r"Application timeout caused pair closure",
            r"[Hh]eartbeat monitor timed out",
            r"watchdog got stuck",
            r"dump signal .*(?:timeout|watchdog)",
            r"Barrier timed out(?!\. Id: Shutdown)",
            r"Timed out (?:in|waiting) .*(?:barrier|all tasks)",
        ),
        is_consequence=True,
    ),
    Kind(
        id="store_timeout",
        meaning="Waiting for a key in the store timed out: another worker did not write it.",
        next_step="Investigate the worker that did not arrive, not this one.",
        patterns=(
            r"wait timeout after \d+ ?ms",
            r"Timed out after \d+ seconds waiting for clients",
            r"Socket Timeout$",
            r"Socket Timeout\b.*key",
            r"Timeout waiting for key",
            r"StoreTimeoutError",
            r"DistStoreError: .*[Tt]ime",
            r"Timed out .*register_?task",
            r"RPC: \S*CoordinationService/RegisterTask",
            r"waiting for .*tasks? to (?:connect|register)",
        ),
        is_consequence=True,
    ),
    Kind(
        id="jax_peer_lost",
        meaning="JAX's coordination service ended the worker: another worker or the coordinator was lost.",
        next_step="Investigate the worker that ended first, not this one.",
        patterns=(
            r"JAX distributed service detected fatal errors",
            r"[Cc]oordination [Ss]ervice.*(?:[Hh]eartbeat|unhealthy|disconnect|shutting down|in error state)",
            r"(?:[Hh]eartbeat|unhealthy|disconnect|in error state).*[Cc]oordination [Ss]ervice",
            r"tasks? (?:are|is) unhealthy \(stopped sending heartbeats\)",
            r"/job:jax_worker/.*(?:crashed|heartbeat|in error state|disconnected)",
            r"Polled an error from the coordination service",
        ),
        is_consequence=True,
    ),
    Kind(
        id="peer_lost",
        meaning="The connection to another worker was lost: that worker had ended.",
        next_step="Investigate the worker that ended first, not this one.",
        patterns=(
            r"[Cc]onnection (?:was )?reset(?: by peer)?",
            r"[Cc]onnection closed by (?:remote )?peer",
            r"Connection(?:Reset|Aborted)Error",
            r"BrokenPipeError",
            r"[Bb]roken pipe",
            r"\[Errno (?:104|32|103)\]",
            r"remote process exit",
            r"ncclRemoteError",
            r"NCCL communicator was aborted",
            r"Connection was likely closed",
            r"failed to recv, got 0 bytes",
            r"Connection closed by remote",
            r"\bIncompleteReadError\b",
            r"StoreConnectionError: .*(?:closed|lost|went away)",
            r"Failed to (?:recv|send|receive).*remote (?:server|process|peer)",
            r"Please check rank \d+ logs for faulty rank",  # of a monitored barrier
        ),
        is_consequence=True,
        signals=(signal.SIGPIPE,),
    ),
    Kind(
        id="peer_lost",
        meaning="",
        next_step="",
        patterns=(r"^EOFError$",),
        within=r"multiprocessing/(?:connection|managers|queues|resource_sharer)\.py",
        is_consequence=True,
        trust_output=False,
    ),
    # --- the network again: a peer may never have existed ---
    Kind(
        id="connection_refused",
        meaning="The connection was refused: no process listens at {what}.",
        next_step="Check that the process that should listen there is running, and check MASTER_ADDR and MASTER_PORT.",
        patterns=(
            r"Connection refused",
            r"ConnectionRefusedError",
            r"\[Errno 111\]",
            r"[Ff]ailed to connect to all addresses",
        ),
        detail=r"\(([\w.:-]+, \d+)\)|Connect to ([\w.:<>-]+)",
        otherwise="the address",
    ),
    Kind(
        id="connect_timeout",
        meaning="Connecting timed out{what}.",
        next_step="Check that the other host is up, and the firewall and network interface between the two.",
        patterns=(
            r"client socket has timed out",
            r"trying to connect to",
            r"Connection timed out",
            r"\[Errno 110\]",
            r"[Cc]onnect timeout",
            r"timed out connecting",
        ),
        detail=r"\(([\w.:-]+, \d+)\)",
        named=": {0}",
    ),
    Kind(
        id="nccl_error",
        meaning="NCCL reported an error (network, driver or internal).",
        next_step="Run it with NCCL_DEBUG=INFO: the log names the failed call and the network interface.",
        patterns=(
            r"unhandled system error",
            r"ncclSystemError",
            r"ncclInternalError",
            r"unhandled cuda error",
            r"NCCL error",
        ),
    ),
    # --- the script ---
    Kind(
        id="child_failed",
        meaning="A process that the worker started failed.",
        next_step="Read that process's output above the traceback in the worker's log.",
        patterns=(
            r"\bCalledProcessError\b",
            r"DataLoader worker \(pid.*(?:exited unexpectedly|killed by signal)",
            r"BrokenProcessPool",
            r"ProcessExitedException",
            r"ChildFailedError",
        ),
        trust_output=False,
    ),
    Kind(
        id="bad_file",
        meaning="A file is damaged, truncated, or not in the expected format.",
        next_step="Use an older checkpoint or fetch the file again; check that two ranks do not write it at once.",
        patterns=(
            r"\bUnpicklingError\b",
            r"\bBadZipFile\b",
            r"invalid load key",
            r"Ran out of input",
            r"PytorchStreamReader failed",
            r"archive is corrupted",
            r"\bJSONDecodeError\b",
            r"\bSafetensorError\b",
            r"\bBadGzipFile\b",
            r"^EOFError\b",
            r"unexpected end of data",
        ),
        trust_output=False,
    ),
    Kind(
        id="missing_file",
        meaning="A file or folder does not exist{what}.",
        next_step="Check the path on that host: every host needs the file, or a shared file system.",
        patterns=(
            r"\bFileNotFoundError\b",
            r"\bNotADirectoryError\b",
            r"\[Errno 2\]",
            r"[Cc]an't find a valid checkpoint",
            r"\b(?:[Ff]ile|[Ff]older|[Dd]irectory|[Cc]heckpoint)\b.{0,200}\b(?:does not exist|not found)\b",
        ),
        trust_output=False,
        detail=r"['\"]([^'\"]+)['\"]",
        named=": {0}",
    ),
    Kind(
        id="permission_denied",
        meaning="Permission denied{what}.",
        next_step="Check owner and mode of the file and its folders on that host, for the user of the job.",
        patterns=(r"\bPermissionError\b", r"\[Errno 13\]", r"\[Errno 1\]"),
        trust_output=False,
        detail=r"['\"]([^'\"]+)['\"]",
        named=": {0}",
    ),
    Kind(
        id="not_a_number",
        meaning="The loss or another value became NaN or infinite.",
        next_step="Check the last losses; lower the learning rate, clip gradients, or look for a bad batch.",
        patterns=(
            r"(?i)\b(?:loss|grad|gradient|weight|norm)(?:e?s)?\b.*\b(?:nan|infs?|infinity|(?:non-|not )finite)\b",
            r"(?i)\b(?:nan|non-finite)\b.*\b(?:loss|grad|gradient|tensor|norm)(?:e?s)?\b",
            r"\breturned nan values\b",  # autograd's anomaly detection
            r"\bFloatingPointError\b",
        ),
        trust_output=False,
    ),
    Kind(
        id="not_picklable",
        meaning="An object could not be pickled, to send it to another process or to save it.",
        next_step="Define its class or function at the top level of a module; leave out lambdas, locks, files and "
        "sockets.",
        patterns=(r"[Cc]an(?:'t|not) (?:pickle|get local object)", r"\bPicklingError\b"),
        trust_output=False,
    ),
    Kind(
        id="unused_parameters",
        meaning="Parameters of the model took no part in the loss, and DDP waits for their gradients.",
        next_step="Remove them or use their outputs in the loss; otherwise pass find_unused_parameters=True to DDP.",
        patterns=(r"Expected to have finished reduction in the prior iteration",),
        trust_output=False,
    ),
    Kind(
        id="checkpoint_mismatch",
        meaning="The checkpoint does not fit the model: names or shapes of its tensors differ.",
        next_step="Load it into the model that wrote it, or compare the names and shapes in the message with yours.",
        patterns=(r"Error\(s\) in loading state_dict", r"(?:Missing|Unexpected) key.* in .*state_dict"),
        trust_output=False,
    ),
    Kind(
        id="shape_mismatch",
        meaning="The shapes of tensors do not match.",
        next_step="Compare the shapes in the message with the data and the model.",
        patterns=(
            r"shapes cannot be multiplied",
            r"must match the size of tensor",
            r"\bsize mismatch\b",
            r"shapes .* not aligned",
            r"could not be broadcast",
            r"shape '.*' is invalid for input of size",
            r"Sizes of tensors must match",
            r"requires contracting dimensions to have the same shape",
            r"incompatible shapes for broadcasting",
        ),
        trust_output=False,
    ),
    Kind(
        id="assertion",
        meaning="An assertion in the script failed.",
        next_step="Read the traceback below, last line first.",
        patterns=(r"\bAssertionError\b",),
        trust_output=False,
    ),
    Kind(
        id="interrupted",
        meaning="The worker received SIGINT (Ctrl-C), not from tenax.",
        next_step="Find the person or script on that host that sent it.",
        patterns=(r"^KeyboardInterrupt\b",),
        trust_output=False,
        signals=(signal.SIGINT,),
    ),
    Kind(
        id="thread_at_exit",
        meaning="The worker aborted while it exited: a thread of a C++ library still ran, such as gloo's in torch.",
        next_step="Call torch.distributed.destroy_process_group() before the script ends. The training was over.",
        patterns=(r"terminate called without an active exception",),
    ),
    Kind(
        id="exception",
        meaning="The script raised an uncaught exception{what}.",
        next_step="Read the traceback below, last line first.",
        detail=r"^([^\W\d][\w.]*)",
        named=": {0}",
    ),
    # --- signals ---
    Kind(
        id="killed",
        meaning="The worker received SIGKILL, not from tenax.",
        next_step="Look for a scheduler, a person or a resource limit that killed it (dmesg on that host).",
        signals=(signal.SIGKILL,),
    ),
    Kind(
        id="terminated",
        meaning="The worker received SIGTERM, not from tenax.",
        next_step="Look for a scheduler, a preemption or a person. To stop a job, signal the agent or use tenax stop.",
        signals=(signal.SIGTERM, signal.SIGQUIT),
    ),
    Kind(
        id="hung_up",
        meaning="The terminal or session of the worker was closed (SIGHUP).",
        next_step="Start the job so that it survives a logout: in tmux, with nohup, or with a scheduler.",
        signals=(signal.SIGHUP,),
    ),
    Kind(
        id="segmentation_fault",
        meaning="The worker crashed in native code: invalid memory access.",
        next_step="Suspect the library of the innermost frame; compare its version with a working host.",
        signals=(signal.SIGSEGV,),
    ),
    Kind(
        id="bus_error",
        meaning="The worker accessed missing mapped memory: full /dev/shm, a truncated file, or bad memory.",
        next_step="Check /dev/shm (df -h /dev/shm), mapped files that may have been truncated, then dmesg.",
        signals=(signal.SIGBUS,),
    ),
    Kind(
        id="illegal_instruction",
        meaning="The worker used an instruction that this CPU does not support.",
        next_step="Use a build of the library for this CPU; compare /proc/cpuinfo with a working host.",
        signals=(signal.SIGILL,),
    ),
    Kind(
        id="arithmetic",
        meaning="The worker crashed in native code: an arithmetic error, such as a division by zero.",
        next_step="Suspect the library of the innermost frame, or its arguments.",
        signals=(signal.SIGFPE,),
    ),
    Kind(
        id="aborted",
        meaning="The worker aborted: native code detected an error.",
        next_step="Read the last lines of its stderr: they usually name the reason.",
        signals=(signal.SIGABRT,),
    ),
    Kind(
        id="cpu_limit",
        meaning="The worker exceeded its CPU time limit.",
        next_step="Raise the limit (ulimit -t).",
        signals=(signal.SIGXCPU,),
    ),
    Kind(
        id="forbidden_call",
        meaning="The worker made a system call that is not allowed.",
        next_step="Check the seccomp profile of the container.",
        signals=(signal.SIGSYS,),
    ),
    Kind(
        id="signal",
        meaning="The worker was killed by a signal that it does not handle.",
        next_step="Find the sender; some schedulers send a signal before they stop a job.",
    ),
    # --- found by comparing workers: ``_core/diagnosis.py`` ---
    Kind(
        id="stopped_responding",
        meaning="The worker stopped taking part; the others timed out waiting for it.",
        next_step="Read its stacks or its last lines: they show where it was. Run it with --on-hang report for stacks.",
    ),
    Kind(
        id="never_joined",
        meaning="The worker did not join the process group; the others timed out waiting for it.",
        next_step="Read its last lines: find what it did before init_process_group, such as a download or an import.",
    ),
    Kind(
        id="exited_early",
        meaning="The worker exited with code 0 while the others still needed it.",
        next_step="Check that all ranks run the same number of steps: uneven data needs drop_last or join().",
    ),
    Kind(
        id=DEADLOCK,
        meaning="The workers waited for each other: all of them timed out, and none was missing.",
        next_step="Run it with TORCH_DISTRIBUTED_DEBUG=DETAIL, which names ranks that call different operations; "
        "otherwise check the network between the hosts.",
    ),
    # --- known only to tenax or from the exit code ---
    Kind(
        id="scope_expired",
        meaning="The worker did not leave a tenax.timer scope in time.",
        next_step="Read its stacks below. A rank that waits in a collective is not the one that hangs.",
    ),
    Kind(
        id="hang",
        meaning="The run stopped making progress, and this worker was in a different call than the others.",
        next_step="Read its stacks below: the call did not return, or waits for something outside the job.",
    ),
    Kind(
        id="not_started",
        meaning="The worker could not be started.",
        next_step="Check the command on that host: path, permissions, limits.",
    ),
    Kind(
        id="exit_code",
        meaning="The worker exited with an error code, without an exception.",
        next_step="Read the last lines of its output; look for sys.exit or os._exit in the script and its libraries.",
    ),
    Kind(
        id="unknown",
        meaning="Unknown: the worker left no evidence.",
        next_step="Read its log; run it with --tee 3 to keep all output.",
    ),
)

# A kind may have several rules; the first of them has the texts.
_BY_ID: dict[str, Kind] = {kind.id: kind for kind in reversed(KINDS)}
_BY_SIGNAL: dict[int, str] = {number: kind.id for kind in KINDS for number in kind.signals}
_HEADER = "Traceback (most recent call last):"
_NOT_EVIDENCE = re.compile(
    r"During handling of the above exception|The above exception was the direct cause|Extension modules: |\[|$"
)
_LOG_PREFIX = re.compile(r"^[IWEF]\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ [\w./-]+:\d+\] ")  # of absl and glog
_GROUP = re.compile(r"^\s+\| (?! )")


def classify(observed: Observations) -> Cause:
    """Return the cause of a failure. Pure, total and deterministic; see the module's invariants."""
    kind, proof = _recognize(observed)
    proof = storable(shortened(" ".join(_LOG_PREFIX.sub("", proof).split()), _MAX_PROOF))
    return _cause(_BY_ID[kind], proof)


def cause_of(failure: Failure) -> Cause:
    """Return the cause of a failure in a verdict: as classified on its own host, otherwise from its evidence."""
    evidence = failure.evidence
    if failure.was_late:
        return _cause(_BY_ID["scope_expired"], storable(failure.reason))
    if failure.reason.startswith("could not be started"):
        return _cause(_BY_ID["not_started"], storable(failure.reason))
    known = _BY_ID.get(evidence.cause)
    if known is not None:
        if known.id == "hang":
            return _cause(known, storable(failure.reason))
        if known.id in AWAITED:
            return (_why_not_joined(evidence.last_lines) if known.id == NEVER_JOINED else None) or _cause(known, "")
        return msgspec.structs.replace(_cause(known, evidence.proof), is_consequence=evidence.is_consequence)
    return classify(
        Observations(
            exit_code=failure.exit_code,
            error_type=evidence.error_type,
            message=evidence.message,
            traceback=evidence.traceback,
            last_lines=evidence.last_lines,
            out_of_memory=evidence.out_of_memory,
        )
    )


def _why_not_joined(last_lines: Sequence[str]) -> Cause | None:
    """Return the cause that a worker printed while it tried to join: torch retries until the others time out."""
    kinds = tuple(_BY_ID[kind] for kind in _CONNECTING)
    found = _first_match(last_lines[-_MAX_CONSEQUENCE_LINES:][::-1], kinds, "")
    return _cause(_BY_ID[found[0]], storable(shortened(found[1], _MAX_PROOF))) if found is not None else None


class Related(NamedTuple):
    """The failures of a generation by their relation to the first cause."""

    first: Failure | None
    same: list[Failure]  # the same cause
    victims: list[Failure]  # consequences
    others: list[Failure]  # independent


def related(diagnosis: Diagnosis) -> Related:
    """Return which failures are the first cause, have the same cause, follow from it, or are independent."""
    first = diagnosis.first
    found = Related(first, [], [], [])
    cause = cause_of(first) if first is not None else None
    for failure in diagnosis.failures if first is None else diagnosis.failures[1:]:
        its = cause_of(failure)
        if its.is_consequence and (cause is None or not cause.is_consequence):
            found.victims.append(failure)
        elif first is not None and cause is not None and _has_same_cause(cause, first, its, failure):
            found.same.append(failure)
        else:
            found.others.append(failure)
    return found


def _has_same_cause(cause: Cause, first: Failure, its: Cause, failure: Failure) -> bool:
    if its.kind != cause.kind or cause.is_consequence:
        return False
    a, b = first.evidence, failure.evidence
    return cause.kind not in _VAGUE or (bool(a.message) and (a.error_type, a.message) == (b.error_type, b.message))


def what_happened(failure: Failure) -> str:
    """Return what the worker did, as the rest of a sentence that begins with its name."""
    evidence = failure.evidence
    if failure.reason:
        return failure.reason
    if evidence.out_of_memory.startswith("killed") and failure.exit_code < 0:
        return "was " + evidence.out_of_memory
    if failure.was_stopped and evidence.message:
        return f"raised {evidence.message}"
    ended = describe_exit(failure.exit_code)
    if not evidence.message:
        return ended
    # Every uncaught exception ends with exit code 1: it adds nothing to the exception.
    return (
        f"raised {evidence.message}"
        if failure.exit_code == 1 and evidence.error_type
        else f"{ended}: {evidence.message}"
    )


def meaning_of(kind: str, proof: str = "") -> str:
    """Return what this kind means; empty for an unknown kind."""
    known = _BY_ID.get(kind)
    return _fill(known, known.meaning, proof) if known is not None else ""


def next_step_of(kind: str, proof: str = "") -> str:
    """Return what to do about this kind; empty for an unknown kind."""
    known = _BY_ID.get(kind)
    return _fill(known, known.next_step, proof) if known is not None else ""


# --- recognition ------------------------------------------------------------------------------------------------------


def _recognize(observed: Observations) -> tuple[str, str]:
    has_exception = bool(observed.error_type or observed.message)
    number = -observed.exit_code if observed.exit_code < 0 else 0
    if observed.out_of_memory:
        return "out_of_memory", observed.out_of_memory
    if number in _EXTERNAL_SIGNALS and not has_exception:
        return _BY_SIGNAL.get(number, "signal"), ""
    raised = _match_exceptions(observed) if has_exception else None
    if raised is not None and raised[0] == "connect_timeout":  # torch retries, and prints why it has to
        lines = [*observed.earlier_lines, *observed.last_lines]
        return _first_match(lines[::-1], [_BY_ID[kind] for kind in _CONNECTING], "") or raised
    if observed.kernel_kind and (raised is None or _BY_ID[raised[0]] in _RESOURCES):
        return observed.kernel_kind, observed.kernel_line
    is_vague = raised[0] == "child_failed" if raised else not has_exception or _is_crash(observed)
    if is_vague and (printed := _match_output(observed, has_exception)) is not None:
        return printed
    return raised or _from_exit_code(observed, has_exception)


def _is_crash(observed: Observations) -> bool:
    """Return whether native code crashed. After a Python exception, it did so while the process exited."""
    is_native = not observed.error_type or observed.error_type in _FAULTS or "::" in observed.error_type
    return -observed.exit_code in _CRASHES and is_native


def _match_exceptions(observed: Observations) -> tuple[str, str] | None:
    last, earlier = _exception_lines(observed)
    for lines, kinds in (
        ([*last, *earlier], _RESOURCES),
        (last, KINDS),
        (earlier, KINDS),
    ):
        found = _first_match(lines, kinds, observed.traceback)
        if found is not None:
            return found
    return None


def _exception_lines(observed: Observations) -> tuple[list[str], list[str]]:
    """Return the lines of the last exception, and of those before it in its chain, newest first (invariant 5)."""
    blocks: list[list[str]] = [[]]
    for line in observed.traceback.split("\n"):
        if line.rstrip().endswith(_HEADER):
            blocks.append([])
            continue
        text = _GROUP.sub("", line)
        if text.startswith("  what():"):
            text = text.strip()
        if not text.startswith((" ", "\t")) and not _NOT_EVIDENCE.match(text):
            blocks[-1].append(text)
    last = [observed.message, *blocks.pop()]
    earlier = [line for block in reversed(blocks) for line in block]
    return [line for line in last if line.strip()], earlier


def _match_output(observed: Observations, has_exception: bool) -> tuple[str, str] | None:
    """Match the output of a process that exited or aborted by itself and left no better evidence."""
    lines = [line for line in observed.last_lines if line.strip() and not line.startswith("    ")]
    kinds = tuple(kind for kind in KINDS if kind.trust_output and kind.patterns)
    if observed.exit_code < 0 and -observed.exit_code != signal.SIGABRT:
        # It crashed: only what it printed directly before may be the reason.
        crashed_at = next((at for at, line in enumerate(lines) if line.startswith("Fatal Python error")), 0)
        before = lines[max(0, crashed_at - _MAX_LINES_BEFORE_CRASH) : crashed_at]
        return _first_match(before[::-1], tuple(kind for kind in kinds if not kind.is_consequence), "")
    if has_exception and observed.exit_code >= 0:  # output of a child: match resources, not lost peers
        return _first_match(lines[::-1], tuple(kind for kind in kinds if kind in _RESOURCES), "")
    own = tuple(kind for kind in kinds if not kind.is_consequence and not (has_exception and kind.id == _AT_EXIT))
    late = lines if observed.exit_code < 0 else lines[-_MAX_CONSEQUENCE_LINES:]
    before = own[: next((at for at, kind in enumerate(own) if kind.id == "connection_refused"), len(own))]
    return (
        _first_match(lines[::-1], before, "")
        or _first_match(late[::-1], tuple(kind for kind in kinds if kind.is_consequence), "")
        or _first_match(lines[::-1], own, "")
    )


def _from_exit_code(observed: Observations, has_exception: bool) -> tuple[str, str]:
    code = observed.exit_code
    number = -code if code < 0 else code - _SHELL_BASE if _SHELL_BASE < code <= _SHELL_BASE + 64 else 0
    is_python_fault = observed.error_type in _FAULTS
    if has_exception and not is_python_fault and not _is_crash(observed):
        return "exception", observed.message or observed.error_type
    if number:
        kind = _BY_SIGNAL.get(number, "signal")
        return kind, observed.message if has_exception else "" if code < 0 else describe_exit(code)
    if has_exception:
        return "aborted" if is_python_fault else "exception", observed.message or observed.error_type
    last = observed.last_lines[-1] if observed.last_lines else ""
    if code == 127:
        return "script_not_found", last
    if code == 126:
        return "not_executable", last
    return ("exit_code", last) if code else ("unknown", last)


def _first_match(lines: Sequence[str], kinds: Sequence[Kind], traceback: str) -> tuple[str, str] | None:
    for kind in kinds:
        if not kind.patterns or (kind.within and not re.search(kind.within, traceback)):
            continue
        pattern = _pattern(kind.patterns)
        for line in lines:
            if pattern.search(line, 0, _MAX_SEARCHED):
                return kind.id, line
    return None


@functools.cache
def _pattern(patterns: tuple[str, ...]) -> re.Pattern[str]:
    # A flag in the middle of a pattern is an error, so each pattern with one gets its own group.
    return re.compile("|".join(f"(?i:{each[4:]})" if each.startswith("(?i)") else f"(?:{each})" for each in patterns))


# --- texts ------------------------------------------------------------------------------------------------------------


def _cause(kind: Kind, proof: str) -> Cause:
    return Cause(
        kind.id,
        kind.is_consequence,
        proof,
        _fill(kind, kind.meaning, proof),
        _fill(kind, kind.next_step, proof),
    )


def _fill(kind: Kind, template: str, proof: str) -> str:
    if "{what}" not in template:
        return template
    match = re.search(kind.detail, proof) if kind.detail else None
    found = next((group for group in match.groups() if group), "") if match is not None else ""
    return template.replace("{what}", kind.named.replace("{0}", found) if found else kind.otherwise)
