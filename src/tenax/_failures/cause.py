"""The cause of a failure: what kind of trouble ended a worker, whether it follows from another's end, what to do.

Pure: facts in, a judgement out. The same facts give the same judgement, on every host and at every time; nothing is
asked, nothing is learned. ``KINDS`` is the whole knowledge: what each kind means, what to do next, how it is known.

Laws:

1. **The witnesses are asked in this order**: the kernel's proof of an out-of-memory kill; a signal that came from
   outside; the exception that ended it; the kernel's log; what it printed last; the signal of a crash; the exit code.
2. Of an exception with a history (``During handling of ...``) the whole chain is searched for what is scarce or broken
   (memory, disk, descriptors, a GPU): that is never a side effect. Then the last exception decides, then the earlier.
3. Of one text the rules are tried in the order of the table: the special before the general.
4. **A consequence is only what says that a peer went away or that a collective timed out.** Whatever else a worker
   says is a cause of its own; time decides between causes.
5. Source lines that a traceback quotes are not evidence: only what exceptions say of themselves.
"""

from __future__ import annotations

import functools
import re
import signal

import msgspec

from tenax._failures.exit_text import ended_in_words
from tenax._failures.plain_text import shortened, storable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tenax._core.model import Failure

__all__ = ["KINDS", "Cause", "Facts", "Kind", "cause_of", "judge", "missing_ranks", "next_step_of", "sentence_of"]

_MAX_PROOF = 300
_MAX_SEARCHED = 2000  # characters of a line: some patterns cost the square of its length
_MAX_LINES_OF_CONSEQUENCE = 8  # of output: what was printed long before the end was survived
_OUTSIDE = frozenset(
    {signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
)
_SHELL_BASE = 128


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a worker that ended badly."""

    exit_code: int  # negative: the signal
    error_type: str = ""
    message: str = ""
    traceback: str = ""
    last_lines: Sequence[str] = ()
    out_of_memory: str = ""  # the kernel's proof, as a sentence
    kernel_kind: str = ""  # what the kernel's log says of this worker or its GPU: the kind ...
    kernel_line: str = ""  # ... and the line


class Cause(msgspec.Struct, frozen=True):
    """The judgement."""

    kind: str
    is_consequence: bool
    proof: str  # the line that shows it; empty: the exit code is all there is
    sentence: str  # what it means
    next_step: str  # what to do


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of failure. ``{what}`` in its sentences is what ``detail`` finds in the proof, or else ``otherwise``."""

    id: str
    meaning: str
    next_step: str
    says: tuple[str, ...] = ()  # patterns of what an exception says
    within: str = ""  # ... and that must stand somewhere in the traceback too
    is_consequence: bool = False
    is_scarcity: bool = False  # law 2
    is_printed: bool = True  # also believed when it was only printed
    signals: tuple[int, ...] = ()
    detail: str = ""  # a pattern with one group
    named: str = "{0}"
    otherwise: str = ""


_PATH = r"['\"<]((?:/|\./|\w:)[^'\">]+)['\">]"

KINDS: tuple[Kind, ...] = (
    # --- what is scarce ---
    Kind(
        id="out_of_memory",
        meaning="The kernel killed it: the machine or its control group had no memory left.",
        next_step="Give the job more memory, or let it use less: smaller batches, fewer data-loading workers.",
    ),
    Kind(
        id="cuda_out_of_memory",
        meaning="The GPU has no memory left.",
        next_step="Use a smaller batch, or see with nvidia-smi whether another process holds memory of that GPU.",
        says=(
            r"(?:CUDA|HIP|MPS|XPU) (?:error: )?out of memory",
            r"cuda\.OutOfMemoryError",
            r"cudaErrorMemoryAllocation",
            r"CUBLAS_STATUS_ALLOC_FAILED",
            r"RESOURCE_EXHAUSTED: Out of memory",
        ),
        is_scarcity=True,
    ),
    Kind(
        id="shared_memory",
        meaning="The shared memory (/dev/shm) is too small or full.",
        next_step="Give the container more (docker run --shm-size=8g, or an emptyDir of medium Memory), or use fewer "
        "data-loading workers.",
        says=(
            r"out of shared memory",
            r"insufficient shared memory",
            r"(?:open|mmap|allocate|resize|extend) (?:a )?shared memory",
            r"/dev/shm.*(?:No space left|Cannot allocate|Bus error)",
            r"No space left.*/dev/shm",
            r"killed by signal: Bus error",
            r"unable to (?:mmap|write to file) .*</torch_",
        ),
        is_scarcity=True,
    ),
    Kind(
        id="memory",
        meaning="It asked for more memory than the system gives it.",
        next_step="Let it use less, or raise its limits: ulimit -v, the control group, vm.overcommit_memory.",
        says=(
            r"\bMemoryError\b",
            r"std::bad_alloc",
            r"Cannot allocate memory",
            r"\[Errno 12\]",
            r"DefaultCPUAllocator: (?:can't allocate|not enough) memory",
            r"Unable to allocate .* for an array",
        ),
        is_scarcity=True,
    ),
    Kind(
        id="no_more_processes",
        meaning="The system lets it start no more threads or processes.",
        next_step="Raise the limit (ulimit -u, pids.max of the control group), or start fewer: data-loading workers, "
        "OMP_NUM_THREADS.",
        says=(
            r"can't start new thread",
            r"fork: (?:retry: )?Resource temporarily unavailable",
            r"pthread_create(?:\(\))? failed",
            r"Thread creation failed: Resource",
            r"std::system_error: Resource temporarily unavailable",
        ),
        is_scarcity=True,
    ),
    Kind(
        id="no_more_processes",
        meaning="",
        next_step="",
        says=(r"\[Errno 11\] Resource temporarily unavailable",),
        within=r"fork",
        is_scarcity=True,
        is_printed=False,
    ),
    Kind(
        id="too_many_files",
        meaning="It has too many files or sockets open.",
        next_step="Raise the limit (ulimit -n), or find what it does not close: ls /proc/PID/fd of one that runs.",
        says=(r"Too many open files", r"\[Errno 2[34]\]", r"\bEMFILE\b|\bENFILE\b"),
        is_scarcity=True,
    ),
    Kind(
        id="quota",
        meaning="The disk quota is used up{what}.",
        next_step="Free some of the quota, or write elsewhere; quota -s shows what is used.",
        says=(r"Disk quota exceeded", r"\[Errno 122\]", r"\bEDQUOT\b"),
        is_scarcity=True,
        detail=_PATH,
        named=" where {0} is",
    ),
    Kind(
        id="disk_full",
        meaning="The disk is full{what}.",
        next_step="Free space there or write elsewhere; df -h and df -i on that host show which one is full.",
        says=(
            r"No space left on device",
            r"\[Errno 28\]",
            r"\bENOSPC\b",
            r"PytorchStreamWriter failed writing file",
            r"inline_container\.cc.*file write failed",
        ),
        is_scarcity=True,
        detail=_PATH,
        named=" where {0} is",
    ),
    Kind(
        id="file_too_large",
        meaning="A file grew beyond the limit for one file.",
        next_step="Raise the limit (ulimit -f), or see what the file system allows.",
        says=(r"\[Errno 27\]", r"File too large"),
        is_scarcity=True,
        signals=(signal.SIGXFSZ,),
    ),
    Kind(
        id="read_only",
        meaning="The file system is read-only{what}.",
        next_step="Write elsewhere; if it was writable before, the kernel may have made it read-only after an error: "
        "see dmesg on that host.",
        says=(r"Read-only file system", r"\[Errno 30\]", r"\bEROFS\b"),
        is_scarcity=True,
        detail=_PATH,
        named=" where {0} is",
    ),
    Kind(
        id="io_error",
        meaning="The disk or network file system does not answer as it should{what}.",
        next_step="Look at dmesg and the mounts of that host; keep jobs off it until it is clear.",
        says=(r"\[Errno 5\]", r"Input/output error", r"\[Errno 116\]", r"Stale (?:NFS )?file handle"),
        is_scarcity=True,
        detail=_PATH,
        named=" where {0} is",
    ),
    # --- GPUs ---
    Kind(
        id="gpu_lost",
        meaning="A GPU is gone from its host.",
        next_step="Keep jobs off that host; it needs a restart, and the GPU or its slot a look (nvidia-smi, dmesg).",
        says=(r"GPU is lost", r"fallen off the bus", r"Unable to determine the device handle"),
        is_scarcity=True,
    ),
    Kind(
        id="gpu_memory_error",
        meaning="The memory of a GPU is faulty: an error that its ECC cannot correct.",
        next_step="Reset that GPU or restart the host; have it replaced if it comes again (nvidia-smi -q -d ECC).",
        says=(r"uncorrectable (?:\w+ )?(?:ECC|NVLink) error", r"cudaErrorECCUncorrectable", r"(?i)double bit ecc"),
        is_scarcity=True,
    ),
    Kind(
        id="gpu_assert",
        meaning="A check on the GPU failed, most often an index or a label out of range.",
        next_step="Run it again with CUDA_LAUNCH_BLOCKING=1, or on the CPU: then the traceback shows the true place.",
        says=(r"device-side assert triggered", r"cudaErrorAssert"),
        is_scarcity=True,
    ),
    Kind(
        id="gpu_illegal_access",
        meaning="Code on the GPU used memory that is not its own.",
        next_step="Run it again with CUDA_LAUNCH_BLOCKING=1 to see where; if only one host has it, suspect its GPU.",
        says=(
            r"illegal memory access",
            r"cudaErrorIllegalAddress",
            r"CUDA error: misaligned address",
            r"CUDA error: an illegal instruction",
            r"unspecified launch failure",
        ),
        is_scarcity=True,
    ),
    Kind(
        id="no_gpu",
        meaning="It finds no GPU that it can use: none there, none allowed, or driver and CUDA do not fit together.",
        next_step="Compare nvidia-smi, CUDA_VISIBLE_DEVICES and --nproc-per-node on that host with another one.",
        says=(
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
        is_scarcity=True,
        is_printed=False,  # torch warns of it wherever there is none
    ),
    Kind(
        id="gpu_error",
        meaning="A GPU or its libraries report an error.",
        next_step="Run it again with CUDA_LAUNCH_BLOCKING=1; if only one host has it, suspect its GPU (dmesg: Xid).",
        says=(
            r"CUDA error:",
            r"CUDNN_STATUS_[A-Z]",
            r"cuDNN error",
            r"CUBLAS_STATUS_[A-Z]",
            r"HIP error:",
            r"cudaError",
        ),
        is_scarcity=True,
    ),
    # --- the program and what it needs ---
    Kind(
        id="glibc_too_old",
        meaning="A library was built for a newer system: this one has no {what}.",
        next_step="Use an image with a newer system there, or a build for this one.",
        says=(r"version [`'](?:GLIBC|GLIBCXX|CXXABI)_[\w.]+' not found",),
        detail=r"[`']((?:GLIBC|GLIBCXX|CXXABI)_[\w.]+)'",
        otherwise="such C library",
    ),
    Kind(
        id="missing_library",
        meaning="{what} cannot be loaded.",
        next_step="Install it on that host, or name its folder in LD_LIBRARY_PATH; ldd shows what is missing.",
        says=(r"cannot open shared object file", r"undefined symbol: ", r"error while loading shared libraries"),
        detail=r"([\w.+-]+\.so[\w.]*)",
        named="The shared library {0}",
        otherwise="A shared library",
    ),
    Kind(
        id="wrong_build",
        meaning="A file was built for another Python or another processor.",
        next_step="Compare Python and architecture of that host with those of the others; install it there anew.",
        says=(
            r"Exec format error",
            r"\[Errno 8\]",
            r"bad magic number in",
            r"invalid ELF header",
            r"wrong ELF class",
            r"module was compiled for Python",
            r"compiled using NumPy 1\.x cannot be run",
            r"requires a different Python",
        ),
        is_printed=False,
    ),
    Kind(
        id="missing_module",
        meaning="{what} is not installed there, or not on the path.",
        next_step="Install it for the Python of that host, or set PYTHONPATH; every host needs the same.",
        says=(r"ModuleNotFoundError", r"No module named "),
        detail=r"No module named ['\"]?([\w.]+)",
        named="The Python module {0}",
        otherwise="A Python module",
    ),
    Kind(
        id="import_error",
        meaning="A module is there, but cannot be imported as the program wants it.",
        next_step="Compare the versions that are installed (pip freeze) with those that the program was written for.",
        says=(r"\bImportError\b", r"cannot import name "),
        is_printed=False,
    ),
    Kind(
        id="syntax_error",
        meaning="The program is not valid Python, at least not for the version that runs it.",
        next_step="Correct the line that is shown, or run it with the Python that it was written for.",
        says=(r"\b(?:SyntaxError|IndentationError|TabError)\b",),
        is_printed=False,
    ),
    Kind(
        id="script_not_found",
        meaning="The program to run is not on that host{what}.",
        next_step="Check the path and the working directory there; every host needs the same files.",
        says=(r"can't open file ['\"].*\[Errno 2\]", r"can't find '__main__' module", r"command not found"),
        detail=r"can't open file ['\"]([^'\"]+)['\"]",
        named=": {0}",
    ),
    Kind(
        id="not_executable",
        meaning="The program to run may not be executed or read on that host.",
        next_step="Let the user of the job run it (chmod +x) and enter its folder.",
        says=(r"can't open file ['\"].*\[Errno 13\]",),
    ),
    # --- the network, as a cause ---
    Kind(
        id="address_in_use",
        meaning="{what} is in use by another process.",
        next_step="Find who holds it (ss -ltnp); choose another port, or leave the choice to tenax.",
        says=(r"(?i)address already in use", r"\bEADDRINUSE\b", r"\[Errno 98\]"),
        detail=r"(?:port: |port |:|, )(\d{2,5})\b(?!\])",
        named="The port {0}",
        otherwise="The port that it wants to listen at",
    ),
    Kind(
        id="wrong_address",
        meaning="It wants to listen at an address that its host does not have.",
        next_step="Check MASTER_ADDR and --local-addr: the address must be one of that host (ip addr).",
        says=(r"Cannot assign requested address", r"\[Errno 99\]", r"\bEADDRNOTAVAIL\b"),
    ),
    Kind(
        id="unknown_host",
        meaning="A host name cannot be resolved{what}.",
        next_step="Check MASTER_ADDR and the name service of that host (getent hosts NAME).",
        says=(
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
        says=(r"No route to host", r"Network is unreachable", r"\[Errno 1(?:13|01)\]"),
    ),
    Kind(
        id="remote_service",
        meaning="A service outside of the job did not answer as it should.",
        next_step="See whether it can be reached from that host; let the script try again when it fails.",
        says=(
            r"^(?:requests|urllib3|botocore|boto3|aiohttp|httpx|httpcore|huggingface_hub|google|azure|s3fs|gcsfs)\.",
            r"^(?:urllib\.error|http\.client)\.",
        ),
        is_printed=False,
    ),
    Kind(
        id="collective_mismatch",
        meaning="The workers do not do the same collective operation at the same time.",
        next_step="Look where the ranks go different ways in the script (TORCH_DISTRIBUTED_DEBUG=DETAIL names both).",
        says=(r"Detected mismatch between collectives", r"is running collective: .* but Rank"),
    ),
    # --- what follows from another's end: law 4 ---
    Kind(
        id="collective_timeout",
        meaning="It waited in a collective operation until the time was over: another worker did not take part.",
        next_step="Look at the worker that did not arrive, not at this one.",
        says=(
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
        says=(
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
        says=(
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
        says=(r"^EOFError$",),
        within=r"multiprocessing/(?:connection|managers|queues|resource_sharer)\.py",
        is_consequence=True,
        is_printed=False,
    ),
    # --- the network again: time tells whether a peer was there before ---
    Kind(
        id="connection_refused",
        meaning="Nobody listens where it wanted to connect{what}.",
        next_step="See whether the process that should listen there was started, and whether MASTER_ADDR and "
        "MASTER_PORT name it.",
        says=(r"Connection refused", r"ConnectionRefusedError", r"\[Errno 111\]"),
        detail=r"\(([\w.:-]+, \d+)\)|Connect to ([\w.:<>-]+)",
        named=": {0}",
    ),
    Kind(
        id="connect_timeout",
        meaning="It got no answer in time where it wanted to connect{what}.",
        next_step="Check that the other host runs, and the firewall and the interface between the two.",
        says=(
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
        says=(
            r"unhandled system error",
            r"ncclSystemError",
            r"ncclInternalError",
            r"unhandled cuda error",
            r"NCCL error",
        ),
    ),
    # --- the script's own ---
    Kind(
        id="child_failed",
        meaning="A process that it had started failed.",
        next_step="Look at what that process printed, above the traceback in the worker's log.",
        says=(
            r"\bCalledProcessError\b",
            r"DataLoader worker \(pid.*(?:exited unexpectedly|killed by signal)",
            r"BrokenProcessPool",
            r"ProcessExitedException",
            r"ChildFailedError",
        ),
        is_printed=False,
    ),
    Kind(
        id="bad_file",
        meaning="A file cannot be read: it is damaged, cut off, or something else than expected.",
        next_step="Use an older checkpoint or fetch the file again; see whether two ranks write it at once.",
        says=(
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
        is_printed=False,
    ),
    Kind(
        id="missing_file",
        meaning="A file or folder is not there{what}.",
        next_step="Check the path on that host: every host needs the file, or a file system that all see.",
        says=(r"\bFileNotFoundError\b", r"\bNotADirectoryError\b", r"\[Errno 2\]"),
        is_printed=False,
        detail=r"['\"]([^'\"]+)['\"]",
        named=": {0}",
    ),
    Kind(
        id="permission_denied",
        meaning="It may not do that on its host{what}.",
        next_step="Check owner and rights of the file and its folders, for the user of the job on that host.",
        says=(r"\bPermissionError\b", r"\[Errno 13\]", r"\[Errno 1\]"),
        is_printed=False,
        detail=r"['\"]([^'\"]+)['\"]",
        named=": {0}",
    ),
    Kind(
        id="not_a_number",
        meaning="The numbers went bad: NaN or infinity.",
        next_step="Look at the last losses; lower the learning rate, clip gradients, or look for a bad batch.",
        says=(
            r"(?i)\b(?:loss|grad|gradient|weight|norm)(?:e?s)?\b.*\b(?:nan|infs?|infinity|(?:non-|not )finite)\b",
            r"(?i)\b(?:nan|non-finite)\b.*\b(?:loss|grad|gradient|tensor|norm)(?:e?s)?\b",
            r"\bFloatingPointError\b",
        ),
        is_printed=False,
    ),
    Kind(
        id="shape_mismatch",
        meaning="Tensors do not fit together.",
        next_step="Compare the shapes in the message with the data and, if a checkpoint is loaded, with its model.",
        says=(
            r"shapes cannot be multiplied",
            r"must match the size of tensor",
            r"\bsize mismatch\b",
            r"shapes .* not aligned",
            r"could not be broadcast",
            r"Error\(s\) in loading state_dict",
            r"shape '.*' is invalid for input of size",
            r"Sizes of tensors must match",
        ),
        is_printed=False,
    ),
    Kind(
        id="assertion",
        meaning="A check in the script failed.",
        next_step="Read the traceback below from its end.",
        says=(r"\bAssertionError\b",),
        is_printed=False,
    ),
    Kind(
        id="interrupted",
        meaning="Somebody interrupted it (SIGINT, as Ctrl-C sends it), and not through tenax.",
        next_step="Ask who is on that host, or look for a script that sends it.",
        says=(r"^KeyboardInterrupt\b",),
        is_printed=False,
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
    # --- what only tenax or the exit code says ---
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

# A kind may have several rules; the first of them has the words.
_BY_ID: dict[str, Kind] = {kind.id: kind for kind in reversed(KINDS)}
_BY_SIGNAL: dict[int, str] = {number: kind.id for kind in KINDS for number in kind.signals}
_HEADER = "Traceback (most recent call last):"
_NOT_SAID = re.compile(
    r"During handling of the above exception|The above exception was the direct cause|Extension modules: |\[|$"
)
_GROUP = re.compile(r"^\s+\| (?! )")


def judge(facts: Facts) -> Cause:
    """The kind of this failure. Pure, total and deterministic; see the laws of this module."""
    kind, proof = _recognised(facts)
    proof = storable(shortened(" ".join(proof.split()), _MAX_PROOF))
    return _cause(_BY_ID[kind], proof)


def cause_of(failure: Failure) -> Cause:
    """The same of a failure in a verdict: as it was judged on its own host, or else as far as one can tell."""
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
    return judge(
        Facts(
            exit_code=failure.exit_code,
            error_type=evidence.error_type,
            message=evidence.message,
            traceback=evidence.traceback,
            last_lines=evidence.last_lines,
            out_of_memory=evidence.out_of_memory,
        )
    )


def sentence_of(kind: str, proof: str = "") -> str:
    """What this kind means; empty for one that is not known here."""
    known = _BY_ID.get(kind)
    return _filled(known, known.meaning, proof) if known is not None else ""


def next_step_of(kind: str, proof: str = "") -> str:
    """What to do about it; empty for one that is not known here."""
    known = _BY_ID.get(kind)
    return _filled(known, known.next_step, proof) if known is not None else ""


def missing_ranks(texts: Iterable[str]) -> list[int]:
    """The ranks that these messages say did not arrive."""
    found: set[int] = set()
    for text in texts:
        for match in re.finditer(r"Ranks? (\d{1,9}(?:, \d{1,9})*) failed to pass monitoredBarrier", text):
            found.update(map(int, match.group(1).split(",")))
        for match in re.finditer(r"\[([\d, ]+)\] (?:finished collective #\d+, but )?didn't join collective", text):
            found.update(int(number) for number in match.group(1).split(",") if 0 < len(number.strip()) < 10)
    return sorted(found)


# --- recognising ------------------------------------------------------------------------------------------------------


def _recognised(facts: Facts) -> tuple[str, str]:
    has_exception = bool(facts.error_type or facts.message)
    number = -facts.exit_code if facts.exit_code < 0 else 0
    if facts.out_of_memory:
        return "out_of_memory", facts.out_of_memory
    if number in _OUTSIDE and not has_exception:
        return _BY_SIGNAL.get(number, "signal"), ""
    said = _in_exceptions(facts) if has_exception else None
    if facts.kernel_kind and (said is None or _BY_ID[said[0]].is_scarcity):
        return facts.kernel_kind, facts.kernel_line
    is_vague = said[0] == "child_failed" if said else not has_exception or number == signal.SIGABRT
    if is_vague and (printed := _in_output(facts, has_exception)) is not None:
        return printed
    return said or _without_words(facts, has_exception)


def _in_exceptions(facts: Facts) -> tuple[str, str] | None:
    last, earlier = _exception_lines(facts)
    for lines, kinds in (
        ([*last, *earlier], tuple(kind for kind in KINDS if kind.is_scarcity)),
        (last, KINDS),
        (earlier, KINDS),
    ):
        found = _first_match(lines, kinds, facts.traceback)
        if found is not None:
            return found
    return None


def _exception_lines(facts: Facts) -> tuple[list[str], list[str]]:
    """What the last exception says, and what those before it in its chain say, the newest first. Law 5."""
    blocks: list[list[str]] = [[]]
    for line in facts.traceback.split("\n"):
        if line.rstrip().endswith(_HEADER):
            blocks.append([])
            continue
        text = _GROUP.sub("", line)
        if text.startswith("  what():"):
            text = text.strip()
        if not text.startswith((" ", "\t")) and not _NOT_SAID.match(text):
            blocks[-1].append(text)
    last = [facts.message, *blocks.pop()]
    earlier = [line for block in reversed(blocks) for line in block]
    return [line for line in last if line.strip()], earlier


def _in_output(facts: Facts, has_exception: bool) -> tuple[str, str] | None:
    """What was printed is believed of a process that says nothing better: one that exits or aborts by itself."""
    lines = [line for line in facts.last_lines if line.strip() and not line.startswith("    ")]
    kinds = tuple(kind for kind in KINDS if kind.is_printed and kind.says)
    if facts.exit_code < 0 and -facts.exit_code != signal.SIGABRT:
        return None  # it was not asked for last words
    if has_exception and facts.exit_code >= 0:  # of a child: what it lacked, not whom it lost
        return _first_match(lines[::-1], tuple(kind for kind in kinds if kind.is_scarcity), "")
    own = tuple(kind for kind in kinds if not kind.is_consequence)
    late = lines if facts.exit_code < 0 else lines[-_MAX_LINES_OF_CONSEQUENCE:]
    before = own[: next((at for at, kind in enumerate(own) if kind.id == "connection_refused"), len(own))]
    return (
        _first_match(lines[::-1], before, "")
        or _first_match(late[::-1], tuple(kind for kind in kinds if kind.is_consequence), "")
        or _first_match(lines[::-1], own, "")
    )


def _without_words(facts: Facts, has_exception: bool) -> tuple[str, str]:
    code = facts.exit_code
    number = -code if code < 0 else code - _SHELL_BASE if _SHELL_BASE < code <= _SHELL_BASE + 64 else 0
    is_python_fault = facts.error_type in ("Fatal Python error", "Timeout")
    if has_exception and not is_python_fault and number != signal.SIGABRT:
        return "exception", facts.message or facts.error_type
    if number:
        kind = _BY_SIGNAL.get(number, "signal")
        return kind, facts.message if has_exception else "" if code < 0 else ended_in_words(code)
    if has_exception:
        return "aborted" if is_python_fault else "exception", facts.message or facts.error_type
    last = facts.last_lines[-1] if facts.last_lines else ""
    if code == 127:
        return "script_not_found", last
    if code == 126:
        return "not_executable", last
    return ("exit_code", last) if code else ("unknown", last)


def _first_match(lines: Sequence[str], kinds: Sequence[Kind], traceback: str) -> tuple[str, str] | None:
    for kind in kinds:
        if not kind.says or (kind.within and not re.search(kind.within, traceback)):
            continue
        pattern = _pattern(kind.says)
        for line in lines:
            if pattern.search(line, 0, _MAX_SEARCHED):
                return kind.id, line
    return None


@functools.cache
def _pattern(says: tuple[str, ...]) -> re.Pattern[str]:
    # A flag in the middle of a pattern is an error, so each that wants one gets a group of its own.
    return re.compile("|".join(f"(?i:{each[4:]})" if each.startswith("(?i)") else f"(?:{each})" for each in says))


# --- words ------------------------------------------------------------------------------------------------------------


def _cause(kind: Kind, proof: str) -> Cause:
    return Cause(
        kind.id,
        kind.is_consequence,
        proof,
        _filled(kind, kind.meaning, proof),
        _filled(kind, kind.next_step, proof),
    )


def _filled(kind: Kind, template: str, proof: str) -> str:
    if "{what}" not in template:
        return template
    match = re.search(kind.detail, proof) if kind.detail else None
    found = next((group for group in match.groups() if group), "") if match is not None else ""
    return template.replace("{what}", kind.named.replace("{0}", found) if found else kind.otherwise)
