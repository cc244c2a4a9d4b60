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

import msgspec

from tenax._failures.exit_text import describe_exit
from tenax._failures.plain_text import shortened, storable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tenax._core.model import Failure

__all__ = [
    "KINDS",
    "Cause",
    "Kind",
    "Observations",
    "cause_of",
    "classify",
    "missing_ranks",
    "next_step_of",
    "sentence_of",
]

_MAX_PROOF = 300
_MAX_SEARCHED = 2000  # characters of a line: some patterns are quadratic in its length
_MAX_CONSEQUENCE_LINES = 8  # of output: the worker survived what it printed earlier
_EXTERNAL_SIGNALS = frozenset(
    {signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
)
_SHELL_BASE = 128


class Observations(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a failed worker."""

    exit_code: int  # negative: the signal
    error_type: str = ""
    message: str = ""
    traceback: str = ""
    last_lines: Sequence[str] = ()
    out_of_memory: str = ""  # the kernel's proof, as a sentence
    kernel_kind: str = ""  # from the kernel log about this worker or its GPU: the kind ...
    kernel_line: str = ""  # ... and the line


class Cause(msgspec.Struct, frozen=True):
    """The result of the classification."""

    kind: str
    is_consequence: bool
    proof: str  # the line that shows it; empty: only the exit code does
    sentence: str  # what it means
    next_step: str  # what to do


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of failure. ``{what}`` in its texts is what ``detail`` finds in the proof, or else ``otherwise``."""

    id: str
    meaning: str
    next_step: str
    patterns: tuple[str, ...] = ()  # of the exception's lines
    within: str = ""  # must also match somewhere in the traceback
    is_consequence: bool = False
    is_resource: bool = False  # invariant 2
    trust_output: bool = True  # also matches printed lines
    signals: tuple[int, ...] = ()
    detail: str = ""  # a pattern with one group
    named: str = "{0}"
    otherwise: str = ""


_PATH = r"['\"<]((?:/|\./|\w:)[^'\">]+)['\">]"

KINDS: tuple[Kind, ...] = (
    # --- resources ---
    Kind(
        id="out_of_memory",
        meaning="The kernel killed it: the machine or its control group had no memory left.",
        next_step="Give the job more memory, or let it use less: smaller batches, fewer data-loading workers.",
    ),
    Kind(
        id="cuda_out_of_memory",
        meaning="The GPU has no memory left.",
        next_step="Use a smaller batch, or see with nvidia-smi whether another process holds memory of that GPU.",
        patterns=(
            r"(?:CUDA|HIP|MPS|XPU) (?:error: )?out of memory",
            r"cuda\.OutOfMemoryError",
            r"cudaErrorMemoryAllocation",
            r"CUBLAS_STATUS_ALLOC_FAILED",
            r"RESOURCE_EXHAUSTED: Out of memory",
        ),
        is_resource=True,
    ),
    Kind(
        id="shared_memory",
        meaning="The shared memory (/dev/shm) is too small or full.",
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
        is_resource=True,
    ),
    Kind(
        id="memory",
        meaning="It asked for more memory than the system gives it.",
        next_step="Let it use less, or raise its limits: ulimit -v, the control group, vm.overcommit_memory.",
        patterns=(
            r"\bMemoryError\b",
            r"std::bad_alloc",
            r"Cannot allocate memory",
            r"\[Errno 12\]",
            r"DefaultCPUAllocator: (?:can't allocate|not enough) memory",
            r"Unable to allocate .* for an array",
        ),
        is_resource=True,
    ),
    Kind(
        id="no_more_processes",
        meaning="The system lets it start no more threads or processes.",
        next_step="Raise the limit (ulimit -u, pids.max of the control group), or start fewer: data-loading workers, "
        "OMP_NUM_THREADS.",
        patterns=(
            r"can't start new thread",
            r"fork: (?:retry: )?Resource temporarily unavailable",
            r"pthread_create(?:\(\))? failed",
            r"Thread creation failed: Resource",
            r"std::system_error: Resource temporarily unavailable",
        ),
        is_resource=True,
    ),
    Kind(
        id="no_more_processes",
        meaning="",
        next_step="",
        patterns=(r"\[Errno 11\] Resource temporarily unavailable",),
        within=r"fork",
        is_resource=True,
        trust_output=False,
    ),
    Kind(
        id="too_many_files",
        meaning="It has too many files or sockets open.",
        next_step="Raise the limit (ulimit -n), or find what it does not close: ls /proc/PID/fd of one that runs.",
        patterns=(r"Too many open files", r"\[Errno 2[34]\]", r"\bEMFILE\b|\bENFILE\b"),
        is_resource=True,
    ),
    Kind(
        id="quota",
        meaning="The disk quota is used up{what}.",
        next_step="Free some of the quota, or write elsewhere; quota -s shows what is used.",
        patterns=(r"Disk quota exceeded", r"\[Errno 122\]", r"\bEDQUOT\b"),
        is_resource=True,
        detail=_PATH,
        named=" where {0} is",
    ),
    Kind(
        id="disk_full",
        meaning="The disk is full{what}.",
        next_step="Free space there or write elsewhere; df -h and df -i on that host show which one is full.",
        patterns=(
            r"No space left on device",
            r"\[Errno 28\]",
            r"\bENOSPC\b",
            r"PytorchStreamWriter failed writing file",
            r"inline_container\.cc.*file write failed",
        ),
        is_resource=True,
        detail=_PATH,
        named=" where {0} is",
    ),
    Kind(
        id="file_too_large",
        meaning="A file grew beyond the limit for one file.",
        next_step="Raise the limit (ulimit -f), or see what the file system allows.",
        patterns=(r"\[Errno 27\]", r"File too large"),
        is_resource=True,
        signals=(signal.SIGXFSZ,),
    ),
    Kind(
        id="read_only",
        meaning="The file system is read-only{what}.",
        next_step="Write elsewhere; if it was writable before, the kernel may have made it read-only after an error: "
        "see dmesg on that host.",
        patterns=(r"Read-only file system", r"\[Errno 30\]", r"\bEROFS\b"),
        is_resource=True,
        detail=_PATH,
        named=" where {0} is",
    ),
    Kind(
        id="io_error",
        meaning="The disk or network file system does not answer as it should{what}.",
        next_step="Look at dmesg and the mounts of that host; keep jobs off it until it is clear.",
        patterns=(r"\[Errno 5\]", r"Input/output error", r"\[Errno 116\]", r"Stale (?:NFS )?file handle"),
        is_resource=True,
        detail=_PATH,
        named=" where {0} is",
    ),
    # --- GPUs ---
    Kind(
        id="gpu_lost",
        meaning="A GPU is gone from its host.",
        next_step="Keep jobs off that host; it needs a restart, and the GPU or its slot a look (nvidia-smi, dmesg).",
        patterns=(r"GPU is lost", r"fallen off the bus", r"Unable to determine the device handle"),
        is_resource=True,
    ),
    Kind(
        id="gpu_memory_error",
        meaning="The memory of a GPU is faulty: an error that its ECC cannot correct.",
        next_step="Reset that GPU or restart the host; have it replaced if it comes again (nvidia-smi -q -d ECC).",
        patterns=(r"uncorrectable (?:\w+ )?(?:ECC|NVLink) error", r"cudaErrorECCUncorrectable", r"(?i)double bit ecc"),
        is_resource=True,
    ),
    Kind(
        id="gpu_assert",
        meaning="A check on the GPU failed, most often an index or a label out of range.",
        next_step="Run it again with CUDA_LAUNCH_BLOCKING=1, or on the CPU: then the traceback shows the true place.",
        patterns=(r"device-side assert triggered", r"cudaErrorAssert"),
        is_resource=True,
    ),
    Kind(
        id="gpu_illegal_access",
        meaning="Code on the GPU used memory that is not its own.",
        next_step="Run it again with CUDA_LAUNCH_BLOCKING=1 to see where; if only one host has it, suspect its GPU.",
        patterns=(
            r"illegal memory access",
            r"cudaErrorIllegalAddress",
            r"CUDA error: misaligned address",
            r"CUDA error: an illegal instruction",
            r"unspecified launch failure",
        ),
        is_resource=True,
    ),
    Kind(
        id="no_gpu",
        meaning="It finds no GPU that it can use: none there, none allowed, or driver and CUDA do not fit together.",
        next_step="Compare nvidia-smi, CUDA_VISIBLE_DEVICES and --nproc-per-node on that host with another one.",
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
        ),
        is_resource=True,
        trust_output=False,  # torch warns of it wherever there is none
    ),
    Kind(
        id="gpu_error",
        meaning="A GPU or its libraries report an error.",
        next_step="Run it again with CUDA_LAUNCH_BLOCKING=1; if only one host has it, suspect its GPU (dmesg: Xid).",
        patterns=(
            r"CUDA error:",
            r"CUDNN_STATUS_[A-Z]",
            r"cuDNN error",
            r"CUBLAS_STATUS_[A-Z]",
            r"HIP error:",
            r"cudaError",
        ),
        is_resource=True,
    ),
    # --- the program and its dependencies ---
    Kind(
        id="glibc_too_old",
        meaning="A library was built for a newer system: this one has no {what}.",
        next_step="Use an image with a newer system there, or a build for this one.",
        patterns=(r"version [`'](?:GLIBC|GLIBCXX|CXXABI)_[\w.]+' not found",),
        detail=r"[`']((?:GLIBC|GLIBCXX|CXXABI)_[\w.]+)'",
        otherwise="such C library",
    ),
    Kind(
        id="missing_library",
        meaning="{what} cannot be loaded.",
        next_step="Install it on that host, or name its folder in LD_LIBRARY_PATH; ldd shows what is missing.",
        patterns=(r"cannot open shared object file", r"undefined symbol: ", r"error while loading shared libraries"),
        detail=r"([\w.+-]+\.so[\w.]*)",
        named="The shared library {0}",
        otherwise="A shared library",
    ),
    Kind(
        id="wrong_build",
        meaning="A file was built for another Python or another processor.",
        next_step="Compare Python and architecture of that host with those of the others; install it there anew.",
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
        meaning="{what} is not installed there, or not on the path.",
        next_step="Install it for the Python of that host, or set PYTHONPATH; every host needs the same.",
        patterns=(r"ModuleNotFoundError", r"No module named "),
        detail=r"No module named ['\"]?([\w.]+)",
        named="The Python module {0}",
        otherwise="A Python module",
    ),
    Kind(
        id="import_error",
        meaning="A module is there, but cannot be imported as the program wants it.",
        next_step="Compare the versions that are installed (pip freeze) with those that the program was written for.",
        patterns=(r"\bImportError\b", r"cannot import name "),
        trust_output=False,
    ),
    Kind(
        id="syntax_error",
        meaning="The program is not valid Python, at least not for the version that runs it.",
        next_step="Correct the line that is shown, or run it with the Python that it was written for.",
        patterns=(r"\b(?:SyntaxError|IndentationError|TabError)\b",),
        trust_output=False,
    ),
    Kind(
        id="script_not_found",
        meaning="The program to run is not on that host{what}.",
        next_step="Check the path and the working directory there; every host needs the same files.",
        patterns=(r"can't open file ['\"].*\[Errno 2\]", r"can't find '__main__' module", r"command not found"),
        detail=r"can't open file ['\"]([^'\"]+)['\"]",
        named=": {0}",
    ),
    Kind(
        id="not_executable",
        meaning="The program to run may not be executed or read on that host.",
        next_step="Let the user of the job run it (chmod +x) and enter its folder.",
        patterns=(r"can't open file ['\"].*\[Errno 13\]",),
    ),
    # --- the network, as a cause ---
    Kind(
        id="address_in_use",
        meaning="{what} is in use by another process.",
        next_step="Find who holds it (ss -ltnp); choose another port, or leave the choice to tenax.",
        patterns=(r"(?i)address already in use", r"\bEADDRINUSE\b", r"\[Errno 98\]"),
        detail=r"(?:port: |port |:|, )(\d{2,5})\b(?!\])",
        named="The port {0}",
        otherwise="The port that it wants to listen at",
    ),
    Kind(
        id="wrong_address",
        meaning="It wants to listen at an address that its host does not have.",
        next_step="Check MASTER_ADDR and --local-addr: the address must be one of that host (ip addr).",
        patterns=(r"Cannot assign requested address", r"\[Errno 99\]", r"\bEADDRNOTAVAIL\b"),
    ),
    Kind(
        id="unknown_host",
        meaning="A host name cannot be resolved{what}.",
        next_step="Check MASTER_ADDR and the name service of that host (getent hosts NAME).",
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
        meaning="There is no way through the network to the other host.",
        next_step="Check the routes, the firewall and the interface (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME).",
        patterns=(r"No route to host", r"Network is unreachable", r"\[Errno 1(?:13|01)\]"),
    ),
    Kind(
        id="remote_service",
        meaning="A service outside of the job did not answer as it should.",
        next_step="See whether it can be reached from that host; let the script try again when it fails.",
        patterns=(
            r"^(?:requests|urllib3|botocore|boto3|aiohttp|httpx|httpcore|huggingface_hub|google|azure|s3fs|gcsfs)\.",
            r"^(?:urllib\.error|http\.client)\.",
        ),
        trust_output=False,
    ),
    Kind(
        id="collective_mismatch",
        meaning="The workers do not do the same collective operation at the same time.",
        next_step="Look where the ranks go different ways in the script (TORCH_DISTRIBUTED_DEBUG=DETAIL names both).",
        patterns=(r"Detected mismatch between collectives", r"is running collective: .* but Rank"),
    ),
    # --- consequences of another worker's failure: invariant 4 ---
    Kind(
        id="collective_timeout",
        meaning="It waited in a collective operation until the time was over: another worker did not take part.",
        next_step="Look at the worker that did not arrive, not at this one.",
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
            r"Heartbeat monitor timed out",
        ),
        is_consequence=True,
    ),
    Kind(
        id="store_timeout",
        meaning="It waited at the store for what another worker did not write in time.",
        next_step="Look at the worker that did not arrive, not at this one.",
        patterns=(
            r"wait timeout after \d+ ?ms",
            r"Timed out after \d+ seconds waiting for clients",
            r"Socket Timeout$",
            r"Socket Timeout\b.*key",
            r"Timeout waiting for key",
            r"StoreTimeoutError",
            r"DistStoreError: .*[Tt]ime",
        ),
        is_consequence=True,
    ),
    Kind(
        id="peer_lost",
        meaning="It lost the connection to another worker, which had ended.",
        next_step="Look at the worker that ended first, not at this one.",
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
        meaning="Nobody listens where it wanted to connect{what}.",
        next_step="See whether the process that should listen there was started, and whether MASTER_ADDR and "
        "MASTER_PORT name it.",
        patterns=(r"Connection refused", r"ConnectionRefusedError", r"\[Errno 111\]"),
        detail=r"\(([\w.:-]+, \d+)\)|Connect to ([\w.:<>-]+)",
        named=": {0}",
    ),
    Kind(
        id="connect_timeout",
        meaning="It got no answer in time where it wanted to connect{what}.",
        next_step="Check that the other host runs, and the firewall and the interface between the two.",
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
        meaning="NCCL reports an error of the network, of a driver or of its own.",
        next_step="Run it again with NCCL_DEBUG=INFO: its lines name the call that failed and the interface.",
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
        meaning="A process that it had started failed.",
        next_step="Look at what that process printed, above the traceback in the worker's log.",
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
        meaning="A file cannot be read: it is damaged, cut off, or something else than expected.",
        next_step="Use an older checkpoint or fetch the file again; see whether two ranks write it at once.",
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
        meaning="A file or folder is not there{what}.",
        next_step="Check the path on that host: every host needs the file, or a file system that all see.",
        patterns=(r"\bFileNotFoundError\b", r"\bNotADirectoryError\b", r"\[Errno 2\]"),
        trust_output=False,
        detail=r"['\"]([^'\"]+)['\"]",
        named=": {0}",
    ),
    Kind(
        id="permission_denied",
        meaning="It may not do that on its host{what}.",
        next_step="Check owner and rights of the file and its folders, for the user of the job on that host.",
        patterns=(r"\bPermissionError\b", r"\[Errno 13\]", r"\[Errno 1\]"),
        trust_output=False,
        detail=r"['\"]([^'\"]+)['\"]",
        named=": {0}",
    ),
    Kind(
        id="not_a_number",
        meaning="The numbers went bad: NaN or infinity.",
        next_step="Look at the last losses; lower the learning rate, clip gradients, or look for a bad batch.",
        patterns=(
            r"(?i)\b(?:loss|grad|gradient|weight|norm)(?:e?s)?\b.*\b(?:nan|infs?|infinity|(?:non-|not )finite)\b",
            r"(?i)\b(?:nan|non-finite)\b.*\b(?:loss|grad|gradient|tensor|norm)(?:e?s)?\b",
            r"\bFloatingPointError\b",
        ),
        trust_output=False,
    ),
    Kind(
        id="shape_mismatch",
        meaning="Tensors do not fit together.",
        next_step="Compare the shapes in the message with the data and, if a checkpoint is loaded, with its model.",
        patterns=(
            r"shapes cannot be multiplied",
            r"must match the size of tensor",
            r"\bsize mismatch\b",
            r"shapes .* not aligned",
            r"could not be broadcast",
            r"Error\(s\) in loading state_dict",
            r"shape '.*' is invalid for input of size",
            r"Sizes of tensors must match",
        ),
        trust_output=False,
    ),
    Kind(
        id="assertion",
        meaning="A check in the script failed.",
        next_step="Read the traceback below from its end.",
        patterns=(r"\bAssertionError\b",),
        trust_output=False,
    ),
    Kind(
        id="interrupted",
        meaning="Somebody interrupted it (SIGINT, as Ctrl-C sends it), and not through tenax.",
        next_step="Ask who is on that host, or look for a script that sends it.",
        patterns=(r"^KeyboardInterrupt\b",),
        trust_output=False,
        signals=(signal.SIGINT,),
    ),
    Kind(
        id="exception",
        meaning="The script raised an exception that nobody caught: {what}.",
        next_step="Read the traceback below from its end.",
        detail=r"^([^\W\d][\w.]*)",
        otherwise="of an unknown type",
    ),
    # --- signals ---
    Kind(
        id="killed",
        meaning="Somebody killed it with SIGKILL, and it was not tenax.",
        next_step="Look for a scheduler, a person, or a limit that kills (dmesg on that host).",
        signals=(signal.SIGKILL,),
    ),
    Kind(
        id="terminated",
        meaning="Somebody asked it to end (SIGTERM), and not through tenax.",
        next_step="Look for a scheduler, a preemption or a person; whoever wants to end the job should ask tenax.",
        signals=(signal.SIGTERM, signal.SIGQUIT),
    ),
    Kind(
        id="hung_up",
        meaning="Its terminal or session went away (SIGHUP).",
        next_step="Start the job so that it survives a logout: in tmux, with nohup, or by a scheduler.",
        signals=(signal.SIGHUP,),
    ),
    Kind(
        id="segmentation_fault",
        meaning="It crashed in native code: an invalid memory access.",
        next_step="Look at the innermost frame: the library there is the suspect; compare its version elsewhere.",
        signals=(signal.SIGSEGV,),
    ),
    Kind(
        id="bus_error",
        meaning="It used memory that is mapped but not there: full shared memory, a cut file, or faulty memory.",
        next_step="Check /dev/shm (df -h /dev/shm), and whether a mapped file was truncated; then dmesg.",
        signals=(signal.SIGBUS,),
    ),
    Kind(
        id="illegal_instruction",
        meaning="It used an instruction that this processor does not know.",
        next_step="Use a build of the library for this processor; compare /proc/cpuinfo with a host where it works.",
        signals=(signal.SIGILL,),
    ),
    Kind(
        id="arithmetic",
        meaning="It crashed in native code: an arithmetic error, such as a division by zero.",
        next_step="Look at the innermost frame: the library there, or what it was given, is the suspect.",
        signals=(signal.SIGFPE,),
    ),
    Kind(
        id="aborted",
        meaning="It aborted itself: native code found something that must not be.",
        next_step="Read the last lines of its stderr: what aborts says why.",
        signals=(signal.SIGABRT,),
    ),
    Kind(
        id="cpu_limit",
        meaning="It used more processor time than it may.",
        next_step="Raise the limit (ulimit -t).",
        signals=(signal.SIGXCPU,),
    ),
    Kind(
        id="forbidden_call",
        meaning="It made a system call that it may not make.",
        next_step="Look at the seccomp profile of the container.",
        signals=(signal.SIGSYS,),
    ),
    Kind(
        id="signal",
        meaning="A signal ended it that it did not expect.",
        next_step="Find who sends that signal; a scheduler that warns before it stops a job does.",
    ),
    # --- known only to tenax or from the exit code ---
    Kind(
        id="scope_expired",
        meaning="It did not leave a block of the script in the time that the script had set for it.",
        next_step="See below where its threads were; a rank that waits in a collective is not the one that hangs.",
    ),
    Kind(
        id="hang",
        meaning="Nothing moved any more on any node, and it is the one that was elsewhere than the others.",
        next_step="See below where its threads were: that call does not return, or waits for something outside.",
    ),
    Kind(
        id="not_started",
        meaning="It could not be started.",
        next_step="Check the command on that host: its path, its rights, its limits.",
    ),
    Kind(
        id="exit_code",
        meaning="It exited with an error code by itself and left no exception.",
        next_step="Read the last lines of its output; look for sys.exit or os._exit in the script and its libraries.",
    ),
    Kind(
        id="unknown",
        meaning="Why it ended is not known.",
        next_step="Read its log; run it again with --tee 3 to keep all of its output.",
    ),
)

# A kind may have several rules; the first of them has the texts.
_BY_ID: dict[str, Kind] = {kind.id: kind for kind in reversed(KINDS)}
_BY_SIGNAL: dict[int, str] = {number: kind.id for kind in KINDS for number in kind.signals}
_HEADER = "Traceback (most recent call last):"
_NOT_EVIDENCE = re.compile(
    r"During handling of the above exception|The above exception was the direct cause|Extension modules: |\[|$"
)
_GROUP = re.compile(r"^\s+\| (?! )")


def classify(observed: Observations) -> Cause:
    """Return the cause of a failure. Pure, total and deterministic; see the module's invariants."""
    kind, proof = _recognize(observed)
    proof = storable(shortened(" ".join(proof.split()), _MAX_PROOF))
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


def sentence_of(kind: str, proof: str = "") -> str:
    """Return what this kind means; empty for an unknown kind."""
    known = _BY_ID.get(kind)
    return _fill(known, known.meaning, proof) if known is not None else ""


def next_step_of(kind: str, proof: str = "") -> str:
    """Return what to do about this kind; empty for an unknown kind."""
    known = _BY_ID.get(kind)
    return _fill(known, known.next_step, proof) if known is not None else ""


def missing_ranks(texts: Iterable[str]) -> list[int]:
    """Return the ranks that these messages report as missing."""
    found: set[int] = set()
    for text in texts:
        for match in re.finditer(r"Ranks? (\d{1,9}(?:, \d{1,9})*) failed to pass monitoredBarrier", text):
            found.update(map(int, match.group(1).split(",")))
        for match in re.finditer(r"\[([\d, ]+)\] (?:finished collective #\d+, but )?didn't join collective", text):
            found.update(int(number) for number in match.group(1).split(",") if 0 < len(number.strip()) < 10)
    return sorted(found)


# --- recognition ------------------------------------------------------------------------------------------------------


def _recognize(observed: Observations) -> tuple[str, str]:
    has_exception = bool(observed.error_type or observed.message)
    number = -observed.exit_code if observed.exit_code < 0 else 0
    if observed.out_of_memory:
        return "out_of_memory", observed.out_of_memory
    if number in _EXTERNAL_SIGNALS and not has_exception:
        return _BY_SIGNAL.get(number, "signal"), ""
    raised = _match_exceptions(observed) if has_exception else None
    if observed.kernel_kind and (raised is None or _BY_ID[raised[0]].is_resource):
        return observed.kernel_kind, observed.kernel_line
    is_vague = raised[0] == "child_failed" if raised else not has_exception or number == signal.SIGABRT
    if is_vague and (printed := _match_output(observed, has_exception)) is not None:
        return printed
    return raised or _from_exit_code(observed, has_exception)


def _match_exceptions(observed: Observations) -> tuple[str, str] | None:
    last, earlier = _exception_lines(observed)
    for lines, kinds in (
        ([*last, *earlier], tuple(kind for kind in KINDS if kind.is_resource)),
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
        return None  # a signal ended it, whatever it printed
    if has_exception and observed.exit_code >= 0:  # output of a child: match resources, not lost peers
        return _first_match(lines[::-1], tuple(kind for kind in kinds if kind.is_resource), "")
    own = tuple(kind for kind in kinds if not kind.is_consequence)
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
    is_python_fault = observed.error_type in ("Fatal Python error", "Timeout")
    if has_exception and not is_python_fault and number != signal.SIGABRT:
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
