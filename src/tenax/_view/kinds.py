"""The kinds of failures: what each means, what to do next, and how ``cause.py`` recognizes it.

Invariants:

1. Rules are tried in the order of the table: the specific before the general.
2. A kind may have several rules; the first of them has the texts.
3. Only a lost peer or a timeout of a collective is a consequence.
"""

from __future__ import annotations

import signal
from typing import NamedTuple

import msgspec

from tenax._core.model import DEADLOCK


class Detail(NamedTuple):
    """What ``{what}`` in a meaning is, if the pattern finds something in the proof (``{0}``), and otherwise."""

    pattern: str  # with groups, of which one matches
    named: str = "{0}"
    otherwise: str = ""


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    meaning: str = ""
    next_step: str = ""
    patterns: tuple[str, ...] = ()  # of the exception's lines
    within: str = ""  # must also match somewhere in the traceback
    is_consequence: bool = False
    trust_output: bool = True  # also matches printed lines
    signals: tuple[int, ...] = ()
    detail: Detail | None = None


PORT = r"(?:port: |port |:|, )(\d{2,5})\b(?!\])"
_PATH = Detail(r"['\"<]((?:/|\./|\w:)[^'\">]+)['\">]", " at {0}")
_QUOTED = Detail(r"['\"]([^'\"]+)['\"]", ": {0}")

# Resources that ran out or broke: they are never a side effect of another exception.
RESOURCES: tuple[Kind, ...] = (
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
            r"(?:CUDA|HIP|MPS|XPU) (?:error: )?out of memory|cuda\.OutOfMemoryError|cudaErrorMemoryAllocation",
            r"CUBLAS_STATUS_ALLOC_FAILED|RESOURCE_EXHAUSTED: Out of memory while trying to allocate",
        ),
    ),
    Kind(
        id="too_many_files",
        meaning="Too many files or sockets are open.",
        next_step="Raise the limit (ulimit -n), or find what is not closed: ls -l /proc/PID/fd of a running worker.",
        patterns=(
            r"Too many open files|\[Errno 2[34]\]|\bEMFILE\b|\bENFILE\b",
            r"received 0 items of ancdata",  # how multiprocessing shows it for tensors of data-loading workers
        ),
    ),
    Kind(
        id="shared_memory",
        meaning="Shared memory (/dev/shm) is full or too small.",
        next_step="Give the container more (docker run --shm-size=8g, or an emptyDir of medium Memory), or use fewer "
        "data-loading workers.",
        patterns=(
            r"out of shared memory|insufficient shared memory",
            r"(?:open|mmap|allocate|resize|extend) (?:a )?shared memory",
            r"/dev/shm.*(?:No space left|Cannot allocate|Bus error)|No space left.*/dev/shm",
            r"killed by signal: Bus error|unable to (?:mmap|write to file) .*</torch_",
        ),
    ),
    Kind(
        id="memory",
        meaning="A memory allocation failed.",
        next_step="Use less memory, or raise the limits: ulimit -v, the control group, vm.overcommit_memory.",
        patterns=(
            r"\bMemoryError\b|std::bad_alloc|Cannot allocate memory|\[Errno 12\]",
            r"DefaultCPUAllocator: (?:can't allocate|not enough) memory|Unable to allocate .* for an array",
            r"RESOURCE_EXHAUSTED: Out of memory allocating",  # of JAX on CPUs
        ),
    ),
    Kind(
        id="no_more_processes",
        meaning="The limit of threads or processes is reached.",
        next_step="Raise the limit (ulimit -u, pids.max of the control group), or start fewer data-loading workers and "
        "threads (OMP_NUM_THREADS).",
        patterns=(
            r"can't start new thread|fork: (?:retry: )?Resource temporarily unavailable",
            r"pthread_create(?:\(\))? failed|Thread creation failed: Resource",
            r"std::system_error: Resource temporarily unavailable",
        ),
    ),
    Kind(
        id="no_more_processes",
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
    ),
    Kind(
        id="disk_full",
        meaning="The disk is full{what}.",
        next_step="Free some space or write elsewhere; df -h and df -i on that host show what is full.",
        patterns=(
            r"No space left on device|\[Errno 28\]|\bENOSPC\b|PytorchStreamWriter failed writing file",
            r"inline_container\.cc.*(?:file write failed|unexpected pos \d+ vs \d+)",
        ),
        detail=_PATH,
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
    ),
    Kind(
        id="io_error",
        meaning="Reading or writing failed on a disk or network file system{what}.",
        next_step="Check dmesg and the mounts of that host; keep jobs off it until the cause is found.",
        patterns=(r"\[Errno 5\]", r"Input/output error", r"\[Errno 116\]", r"Stale (?:NFS )?file handle"),
        detail=_PATH,
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
            r"illegal memory access|cudaErrorIllegalAddress|CUDA error: misaligned address",
            r"CUDA error: an illegal instruction|unspecified launch failure",
        ),
    ),
    Kind(
        id="no_gpu",
        meaning="No usable GPU: none is present, none is visible, or driver and CUDA versions do not match.",
        next_step="Compare nvidia-smi, CUDA_VISIBLE_DEVICES and --nproc-per-node on that host with a working host.",
        patterns=(
            r"No CUDA GPUs are available|no CUDA-capable device|Found no NVIDIA driver",
            r"NVIDIA driver on your system is too old|driver version is insufficient",
            r"Driver/library version mismatch|not compiled with CUDA enabled|invalid device ordinal",
            r"no kernel image is available|forward compatibility was attempted|libcuda\.so[\w.]*: cannot open",
            r"has no attribute '_cuda_\w+'",  # torch without CUDA
            r"ProcessGroupNCCL is only supported with GPUs|Distributed package doesn't have NCCL",
            r"Unable to initialize backend 'cuda'|Unknown backend: '(?:gpu|cuda|rocm)' requested",
            r"No supported gpu backend found",
        ),
        trust_output=False,  # torch warns of it wherever there is none
    ),
    Kind(
        id="gpu_error",
        meaning="A GPU or its libraries reported an error.",
        next_step="Run it with CUDA_LAUNCH_BLOCKING=1. If it fails on one host only, suspect its GPU (Xid in dmesg).",
        patterns=(r"CUDA error:|CUDNN_STATUS_[A-Z]|cuDNN error|CUBLAS_STATUS_[A-Z]|HIP error:|cudaError",),
    ),
)

KINDS: tuple[Kind, ...] = (
    *RESOURCES,
    # --- the program and its dependencies ---
    Kind(
        id="glibc_too_old",
        meaning="A library was built for a newer system: this one lacks {what}.",
        next_step="Use an image with a newer system, or a build of the library for this one.",
        patterns=(r"version [`'](?:GLIBC|GLIBCXX|CXXABI)_[\w.]+' not found",),
        detail=Detail(r"[`']((?:GLIBC|GLIBCXX|CXXABI)_[\w.]+)'", otherwise="the C library version"),
    ),
    Kind(
        id="missing_library",
        meaning="{what} could not be loaded.",
        next_step="Install it on that host, or add its folder to LD_LIBRARY_PATH; ldd shows what is missing.",
        patterns=(r"cannot open shared object file", r"undefined symbol: ", r"error while loading shared libraries"),
        detail=Detail(r"([\w.+-]+\.so[\w.]*)", "The shared library {0}", "A shared library"),
    ),
    Kind(
        id="wrong_build",
        meaning="A file was built for another Python version or CPU architecture.",
        next_step="Compare Python and CPU of that host with the others; reinstall the package there.",
        patterns=(
            r"Exec format error|\[Errno 8\]|bad magic number in|invalid ELF header|wrong ELF class",
            r"module was compiled for Python|compiled using NumPy 1\.x cannot be run|requires a different Python",
        ),
        trust_output=False,
    ),
    Kind(
        id="missing_module",
        meaning="{what} is not installed on that host, or is not on the path.",
        next_step="Install it for the Python that runs on that host, or set PYTHONPATH; every host needs it.",
        patterns=(r"ModuleNotFoundError|No module named |\bImportError\b.*\b(?:is not installed|pip install)\b",),
        detail=Detail(
            r"No module named ['\"]?([\w.]+)|(\w+) is not installed", "The Python module {0}", "A Python module"
        ),
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
        detail=Detail(r"can't open file ['\"]([^'\"]+)['\"]", ": {0}"),
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
            r"\bEADDRINUSE\b|\[Errno 98\]",
            r"Failed to add port to server|Failed to start RPC server",  # of gRPC; JAX then raises this, or crashes
        ),
        detail=Detail(PORT, "Port {0}", "The port to listen on"),
    ),
    Kind(
        id="wrong_address",
        meaning="The worker tried to listen on an address that its host does not have.",
        next_step="Check MASTER_ADDR and --local-addr: use an address of that host (ip addr).",
        patterns=(r"Cannot assign requested address", r"\[Errno 99\]", r"\bEADDRNOTAVAIL\b"),
    ),
    Kind(
        id="remote_service",
        meaning="A request to a service outside the job failed.",
        next_step="Check that the service is reachable from that host; let the script retry.",
        patterns=(
            r"^(?:requests|urllib3|botocore|boto3|aiohttp|httpx2?|httpcore2?|huggingface_hub|google|azure|s3fs|gcsfs)\.",
            r"^(?:urllib\.error|http\.client)\.",
        ),
        trust_output=False,
    ),
    Kind(
        id="unknown_host",
        meaning="A host name could not be resolved{what}.",
        next_step="Check MASTER_ADDR and DNS on that host (getent hosts NAME).",
        patterns=(
            r"\bgaierror\b|Name or service not known|Temporary failure in name resolution",
            r"No address associated with hostname|Name does not resolve",
            r"IPv[46] network addresses of \(.*\) cannot be retrieved",
        ),
        detail=Detail(r"(?:host=['\"]|addresses of \()([\w.-]+)", ": {0}"),
    ),
    Kind(
        id="unreachable",
        meaning="The network has no route to the other host.",
        next_step="Check routes, firewall and network interface (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME).",
        patterns=(r"No route to host", r"Network is unreachable", r"\[Errno 1(?:13|01)\]"),
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
            r"Received data size doesn't match expected size|op\.preamble\.(?:length|nbytes) ?<= ?op\.nbytes",
            r"appears not to match (?:sizes|strides|dtype)",  # DDP compares its parameters
            r"Cannot apply desired operation due to shape mismatches",  # Accelerate in its debug mode
        ),
    ),
    # --- consequences of another worker's failure ---
    Kind(
        id="collective_timeout",
        meaning="A collective operation timed out: another worker did not take part.",
        next_step="Investigate the worker that did not arrive, not this one.",
        patterns=(
            r"Watchdog caught collective operation timeout",
            r"Timed out waiting \d+ ?ms for (?:recv|send|\w+) operation|failed to pass monitoredBarrier",
            r"collective operation timeout|collective timeout from rank|before timing out\.",
            r"Some NCCL operations have failed or timed out|NCCL timeout|Application timeout caused pair closure",
            r"[Hh]eartbeat monitor timed out|watchdog got stuck|dump signal .*(?:timeout|watchdog)",
            r"Barrier timed out(?!\. Id: Shutdown)|Timed out (?:in|waiting) .*(?:barrier|all tasks)",
        ),
        is_consequence=True,
    ),
    Kind(
        id="store_timeout",
        meaning="Waiting for a key in the store timed out: another worker did not write it.",
        next_step="Investigate the worker that did not arrive, not this one.",
        patterns=(
            r"wait timeout after \d+ ?ms|Timed out after \d+ seconds waiting for clients|Socket Timeout$",
            r"Socket Timeout\b.*key|Timeout waiting for key|StoreTimeoutError|DistStoreError: .*[Tt]ime",
            r"Timed out .*register_?task|RPC: \S*CoordinationService/RegisterTask",
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
            r"[Cc]onnection (?:was )?reset(?: by peer)?|[Cc]onnection closed by (?:remote )?peer",
            r"Connection(?:Reset|Aborted)Error|BrokenPipeError|[Bb]roken pipe|\[Errno (?:104|32|103)\]",
            r"remote process exit|ncclRemoteError|NCCL communicator was aborted|Connection was likely closed",
            r"failed to recv, got 0 bytes|Connection closed by remote|\bIncompleteReadError\b",
            r"StoreConnectionError: .*(?:closed|lost|went away)",
            r"Failed to (?:recv|send|receive).*remote (?:server|process|peer)",
            r"Please check rank \d+ logs for faulty rank",  # of a monitored barrier
        ),
        is_consequence=True,
        signals=(signal.SIGPIPE,),
    ),
    Kind(
        id="peer_lost",
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
        patterns=(r"Connection refused|ConnectionRefusedError|\[Errno 111\]|[Ff]ailed to connect to all addresses",),
        detail=Detail(r"\(([\w.:-]+, \d+)\)|Connect to ([\w.:<>-]+)", otherwise="the address"),
    ),
    Kind(
        id="connect_timeout",
        meaning="Connecting timed out{what}.",
        next_step="Check that the other host is up, and the firewall and network interface between the two.",
        patterns=(
            r"client socket has timed out|trying to connect to|Connection timed out|\[Errno 110\]",
            r"[Cc]onnect timeout|timed out connecting",
        ),
        detail=Detail(r"\(([\w.:-]+, \d+)\)", ": {0}"),
    ),
    Kind(
        id="nccl_error",
        meaning="NCCL reported an error (network, driver or internal).",
        next_step="Run it with NCCL_DEBUG=INFO: the log names the failed call and the network interface.",
        patterns=(r"unhandled system error|ncclSystemError|ncclInternalError|unhandled cuda error|NCCL error",),
    ),
    # --- the script ---
    Kind(
        id="child_failed",
        meaning="A process that the worker started failed.",
        next_step="Read that process's output above the traceback in the worker's log.",
        patterns=(
            r"\bCalledProcessError\b|DataLoader worker \(pid.*(?:exited unexpectedly|killed by signal)",
            r"BrokenProcessPool|ProcessExitedException|ChildFailedError",
        ),
        trust_output=False,
    ),
    Kind(
        id="bad_file",
        meaning="A file is damaged, truncated, or not in the expected format.",
        next_step="Use an older checkpoint or fetch the file again; check that two ranks do not write it at once.",
        patterns=(
            r"\bUnpicklingError\b|\bBadZipFile\b|invalid load key|Ran out of input|PytorchStreamReader failed",
            r"archive is corrupted|\bJSONDecodeError\b|\bSafetensorError\b|\bBadGzipFile\b|^EOFError\b",
            r"unexpected end of data",
        ),
        trust_output=False,
    ),
    Kind(
        id="missing_file",
        meaning="A file or folder does not exist{what}.",
        next_step="Check the path on that host: every host needs the file, or a shared file system.",
        patterns=(
            r"\bFileNotFoundError\b|\bNotADirectoryError\b|\[Errno 2\]|[Cc]an't find a valid checkpoint",
            r"\b(?:[Ff]ile|[Ff]older|[Dd]irectory|[Cc]heckpoint)\b.{0,200}\b(?:does not exist|not found)\b",
        ),
        trust_output=False,
        detail=_QUOTED,
    ),
    Kind(
        id="permission_denied",
        meaning="Permission denied{what}.",
        next_step="Check owner and mode of the file and its folders on that host, for the user of the job.",
        patterns=(r"\bPermissionError\b", r"\[Errno 13\]", r"\[Errno 1\]"),
        trust_output=False,
        detail=_QUOTED,
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
            r"shapes cannot be multiplied|must match the size of tensor|\bsize mismatch\b|shapes .* not aligned",
            r"could not be broadcast|shape '.*' is invalid for input of size|Sizes of tensors must match",
            r"requires contracting dimensions to have the same shape|incompatible shapes for broadcasting",
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
        detail=Detail(r"^([^\W\d][\w.]*)", ": {0}"),
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
