"""The kinds of failures: what each means, what to do next, and how ``cause.py`` recognizes it.

Invariants:

1. Kinds are tried in the order of the table: the specific before the general.
2. Only a lost peer or a timeout of a collective is a consequence.
"""

from __future__ import annotations

import signal
from typing import Any, NamedTuple

import msgspec

from tenax._core.model import DEADLOCK


class Detail(NamedTuple):
    """What ``{what}`` in a meaning is, if the pattern finds something in the proof (``{0}``), and otherwise."""

    pattern: str  # with groups, of which one matches
    named: str = "{0}"
    otherwise: str = ""


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    meaning: str
    next_step: str
    patterns: tuple[str, ...]  # of the exception's lines
    within: tuple[str, str] | None = None  # of the traceback, and of a line that counts only then
    is_consequence: bool = False
    trust_output: bool = True  # also matches printed lines
    signals: tuple[int, ...] = ()
    detail: Detail | None = None


def _kind(meaning: str, next_step: str, *patterns: str, **more: Any) -> Kind:
    return Kind(meaning=meaning, next_step=next_step, patterns=patterns, **more)


PORT = r"(?:port: |port |:|, )(\d{2,5})\b(?!\])"
_PATH = Detail(r"['\"<]((?:/|\./|\w:)[^'\">]+)['\">]", " at {0}")
_QUOTED = Detail(r"['\"]([^'\"]+)['\"]", ": {0}")

# Resources that ran out or broke: they are never a side effect of another exception.
RESOURCES = {
    "out_of_memory": _kind(
        "The kernel killed the worker: the host or its control group ran out of memory.",
        "Give the job more memory, or reduce its use: smaller batches, fewer data-loading workers.",
    ),
    "cuda_out_of_memory": _kind(
        "The GPU ran out of memory.",
        "Use a smaller batch, or check with nvidia-smi whether another process uses memory of that GPU.",
        r"(?:CUDA|HIP|MPS|XPU) (?:error: )?out of memory|cuda\.OutOfMemoryError|cudaErrorMemoryAllocation",
        r"CUBLAS_STATUS_ALLOC_FAILED|RESOURCE_EXHAUSTED: Out of memory while trying to allocate",
    ),
    "too_many_files": _kind(
        "Too many files or sockets are open.",
        "Raise the limit (ulimit -n), or find what is not closed: ls -l /proc/PID/fd of a running worker.",
        r"Too many open files|\[Errno 2[34]\]|\bEMFILE\b|\bENFILE\b",
        r"received 0 items of ancdata",  # how multiprocessing shows it for tensors of data-loading workers
    ),
    "shared_memory": _kind(
        "Shared memory (/dev/shm) is full or too small.",
        "Give the container more (docker run --shm-size=8g, or an emptyDir of medium Memory), or use fewer "
        "data-loading workers.",
        r"out of shared memory|insufficient shared memory",
        r"(?:open|mmap|allocate|resize|extend) (?:a )?shared memory",
        r"/dev/shm.*(?:No space left|Cannot allocate|Bus error)|No space left.*/dev/shm",
        r"killed by signal: Bus error|unable to (?:mmap|write to file) .*</torch_",
    ),
    "memory": _kind(
        "A memory allocation failed.",
        "Use less memory, or raise the limits: ulimit -v, the control group, vm.overcommit_memory.",
        r"\bMemoryError\b|std::bad_alloc|Cannot allocate memory|\[Errno 12\]",
        r"DefaultCPUAllocator: (?:can't allocate|not enough) memory|Unable to allocate .* for an array",
        r"RESOURCE_EXHAUSTED: Out of memory allocating",  # of JAX on CPUs
    ),
    "no_more_processes": _kind(
        "The limit of threads or processes is reached.",
        "Raise the limit (ulimit -u, pids.max of the control group), or start fewer data-loading workers and "
        "threads (OMP_NUM_THREADS).",
        r"can't start new thread|fork: (?:retry: )?Resource temporarily unavailable",
        r"pthread_create(?:\(\))? failed|Thread creation failed: Resource",
        r"std::system_error: Resource temporarily unavailable",
        within=("fork", r"\[Errno 11\] Resource temporarily unavailable"),
    ),
    "quota": _kind(
        "The disk quota is used up{what}.",
        "Delete files or write elsewhere; quota -s shows the usage.",
        r"Disk quota exceeded|\[Errno 122\]|\bEDQUOT\b",
        detail=_PATH,
    ),
    "disk_full": _kind(
        "The disk is full{what}.",
        "Free some space or write elsewhere; df -h and df -i on that host show what is full.",
        r"No space left on device|\[Errno 28\]|\bENOSPC\b|PytorchStreamWriter failed writing file",
        r"inline_container\.cc.*(?:file write failed|unexpected pos \d+ vs \d+)",
        detail=_PATH,
    ),
    "file_too_large": _kind(
        "A file exceeded the maximum file size.",
        "Raise the limit (ulimit -f), or check the maximum of the file system.",
        r"\[Errno 27\]|File too large",
        signals=(signal.SIGXFSZ,),
    ),
    "read_only": _kind(
        "The file system is read-only{what}.",
        "Write elsewhere. If it was writable before, the kernel may have remounted it after an error: check "
        "dmesg on that host.",
        r"Read-only file system|\[Errno 30\]|\bEROFS\b",
        detail=_PATH,
    ),
    "io_error": _kind(
        "Reading or writing failed on a disk or network file system{what}.",
        "Check dmesg and the mounts of that host; keep jobs off it until the cause is found.",
        r"\[Errno 5\]|Input/output error|\[Errno 116\]|Stale (?:NFS )?file handle",
        detail=_PATH,
    ),
    # --- GPUs ---
    "gpu_lost": _kind(
        "A GPU is no longer available on its host.",
        "Keep jobs off that host, reboot it, and check the GPU and its slot (nvidia-smi, dmesg).",
        r"GPU is lost|fallen off the bus|Unable to determine the device handle",
    ),
    "gpu_memory_error": _kind(
        "The GPU has an uncorrectable memory error (ECC).",
        "Reset that GPU or reboot the host; replace the GPU if it happens again (nvidia-smi -q -d ECC).",
        r"uncorrectable (?:\w+ )?(?:ECC|NVLink) error|cudaErrorECCUncorrectable|(?i:double bit ecc)",
    ),
    "gpu_assert": _kind(
        "An assertion on the GPU failed, often an index or a label out of range.",
        "Run it with CUDA_LAUNCH_BLOCKING=1 or on the CPU: the traceback then shows the failing line.",
        r"device-side assert triggered|cudaErrorAssert",
    ),
    "gpu_illegal_access": _kind(
        "A GPU kernel accessed invalid memory.",
        "Run it with CUDA_LAUNCH_BLOCKING=1 to find the line. If it fails on one host only, suspect its GPU.",
        r"illegal memory access|cudaErrorIllegalAddress|CUDA error: misaligned address",
        r"CUDA error: an illegal instruction|unspecified launch failure",
    ),
    "no_gpu": _kind(
        "No usable GPU: none is present, none is visible, or driver and CUDA versions do not match.",
        "Compare nvidia-smi, CUDA_VISIBLE_DEVICES and --nproc-per-node on that host with a working host.",
        r"No CUDA GPUs are available|no CUDA-capable device|Found no NVIDIA driver",
        r"NVIDIA driver on your system is too old|driver version is insufficient",
        r"Driver/library version mismatch|not compiled with CUDA enabled|invalid device ordinal",
        r"no kernel image is available|forward compatibility was attempted|libcuda\.so[\w.]*: cannot open",
        r"has no attribute '_cuda_\w+'",  # torch without CUDA
        r"ProcessGroupNCCL is only supported with GPUs|Distributed package doesn't have NCCL",
        r"Unable to initialize backend 'cuda'|Unknown backend: '(?:gpu|cuda|rocm)' requested",
        r"No supported gpu backend found",
        trust_output=False,  # torch warns of it wherever there is none
    ),
    "gpu_error": _kind(
        "A GPU or its libraries reported an error.",
        "Run it with CUDA_LAUNCH_BLOCKING=1. If it fails on one host only, suspect its GPU (Xid in dmesg).",
        r"CUDA error:|CUDNN_STATUS_[A-Z]|cuDNN error|CUBLAS_STATUS_[A-Z]|HIP error:|cudaError",
    ),
}

KINDS = {
    **RESOURCES,
    # --- the program and its dependencies ---
    "glibc_too_old": _kind(
        "A library was built for a newer system: this one lacks {what}.",
        "Use an image with a newer system, or a build of the library for this one.",
        r"version [`'](?:GLIBC|GLIBCXX|CXXABI)_[\w.]+' not found",
        detail=Detail(r"[`']((?:GLIBC|GLIBCXX|CXXABI)_[\w.]+)'", otherwise="the C library version"),
    ),
    "missing_library": _kind(
        "{what} could not be loaded.",
        "Install it on that host, or add its folder to LD_LIBRARY_PATH; ldd shows what is missing.",
        r"cannot open shared object file|undefined symbol: |error while loading shared libraries",
        detail=Detail(r"([\w.+-]+\.so[\w.]*)", "The shared library {0}", "A shared library"),
    ),
    "wrong_build": _kind(
        "A file was built for another Python version or CPU architecture.",
        "Compare Python and CPU of that host with the others; reinstall the package there.",
        r"Exec format error|\[Errno 8\]|bad magic number in|invalid ELF header|wrong ELF class",
        r"module was compiled for Python|compiled using NumPy 1\.x cannot be run|requires a different Python",
        trust_output=False,
    ),
    "missing_module": _kind(
        "{what} is not installed on that host, or is not on the path.",
        "Install it for the Python that runs on that host, or set PYTHONPATH; every host needs it.",
        r"ModuleNotFoundError|No module named |\bImportError\b.*\b(?:is not installed|pip install)\b",
        detail=Detail(
            r"No module named ['\"]?([\w.]+)|(\w+) is not installed", "The Python module {0}", "A Python module"
        ),
    ),
    "import_error": _kind(
        "A module was found, but importing from it failed.",
        "Compare the installed versions (pip freeze) with those that the script needs.",
        r"\bImportError\b|cannot import name ",
        trust_output=False,
    ),
    "syntax_error": _kind(
        "The code is not valid for the Python version that runs it.",
        "Correct the line shown, or run it with the Python version that it was written for.",
        r"\b(?:SyntaxError|IndentationError|TabError)\b",
        trust_output=False,
    ),
    "script_not_found": _kind(
        "The script or program does not exist on that host{what}.",
        "Check the path and the working directory on that host; every host needs the same files.",
        r"can't open file ['\"].*\[Errno 2\]|can't find '__main__' module|command not found",
        detail=Detail(r"can't open file ['\"]([^'\"]+)['\"]", ": {0}"),
    ),
    "not_executable": _kind(
        "No permission to execute or read the program on that host.",
        "Give the user of the job access to the file (chmod +x) and to its folder.",
        r"can't open file ['\"].*\[Errno 13\]",
    ),
    # --- the network, as a cause ---
    "address_in_use": _kind(
        "{what} is already in use by another process.",
        "Find that process (ss -ltnp), choose another port, or let tenax choose one.",
        r"(?i:address already in use)",
        r"\bEADDRINUSE\b|\[Errno 98\]",
        r"Failed to add port to server|Failed to start RPC server",  # of gRPC; JAX then raises this, or crashes
        detail=Detail(PORT, "Port {0}", "The port to listen on"),
    ),
    "wrong_address": _kind(
        "The worker tried to listen on an address that its host does not have.",
        "Check MASTER_ADDR and --local-addr: use an address of that host (ip addr).",
        r"Cannot assign requested address|\[Errno 99\]|\bEADDRNOTAVAIL\b",
    ),
    "remote_service": _kind(
        "A request to a service outside the job failed.",
        "Check that the service is reachable from that host; let the script retry.",
        r"^(?:requests|urllib3|botocore|boto3|aiohttp|httpx2?|httpcore2?|huggingface_hub|google|azure|s3fs|gcsfs)\.",
        r"^(?:urllib\.error|http\.client)\.",
        trust_output=False,
    ),
    "unknown_host": _kind(
        "A host name could not be resolved{what}.",
        "Check MASTER_ADDR and DNS on that host (getent hosts NAME).",
        r"\bgaierror\b|Name or service not known|Temporary failure in name resolution",
        r"No address associated with hostname|Name does not resolve",
        r"IPv[46] network addresses of \(.*\) cannot be retrieved",
        detail=Detail(r"(?:host=['\"]|addresses of \()([\w.-]+)", ": {0}"),
    ),
    "unreachable": _kind(
        "The network has no route to the other host.",
        "Check routes, firewall and network interface (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME).",
        r"No route to host|Network is unreachable|\[Errno 1(?:13|01)\]",
    ),
    "collective_mismatch": _kind(
        "The workers called different collective operations at the same time.",
        "Find where the ranks diverge in the script; TORCH_DISTRIBUTED_DEBUG=DETAIL names both operations.",
        r"Detected mismatch between collectives",
        r"is running collective: .* but Rank",
    ),
    "size_mismatch": _kind(
        "A collective operation received data of another size: the ranks called it with different tensors.",
        "Compare the shapes and types of the tensors on all ranks; the rank that aborts is often not the one "
        "that is wrong.",
        r"Received data size doesn't match expected size|op\.preamble\.(?:length|nbytes) ?<= ?op\.nbytes",
        r"appears not to match (?:sizes|strides|dtype)",  # DDP compares its parameters
        r"Cannot apply desired operation due to shape mismatches",  # Accelerate in its debug mode
    ),
    # --- consequences of another worker's failure ---
    "collective_timeout": _kind(
        "A collective operation timed out: another worker did not take part.",
        "Investigate the worker that did not arrive, not this one.",
        r"Watchdog caught collective operation timeout",
        r"Timed out waiting \d+ ?ms for (?:recv|send|\w+) operation|failed to pass monitoredBarrier",
        r"collective operation timeout|collective timeout from rank|before timing out\.",
        r"Some NCCL operations have failed or timed out|NCCL timeout|Application timeout caused pair closure",
        r"[Hh]eartbeat monitor timed out|watchdog got stuck|dump signal .*(?:timeout|watchdog)",
        r"Barrier timed out(?!\. Id: Shutdown)|Timed out (?:in|waiting) .*(?:barrier|all tasks)",
        is_consequence=True,
    ),
    "store_timeout": _kind(
        "Waiting for a key in the store timed out: another worker did not write it.",
        "Investigate the worker that did not arrive, not this one.",
        r"wait timeout after \d+ ?ms|Timed out after \d+ seconds waiting for clients|Socket Timeout$",
        r"Socket Timeout\b.*key|Timeout waiting for key|StoreTimeoutError|DistStoreError: .*[Tt]ime",
        r"Timed out .*register_?task|RPC: \S*CoordinationService/RegisterTask",
        r"waiting for .*tasks? to (?:connect|register)",
        is_consequence=True,
    ),
    "jax_peer_lost": _kind(
        "JAX's coordination service ended the worker: another worker or the coordinator was lost.",
        "Investigate the worker that ended first, not this one.",
        r"JAX distributed service detected fatal errors",
        r"[Cc]oordination [Ss]ervice.*(?:[Hh]eartbeat|unhealthy|disconnect|shutting down|in error state)",
        r"(?:[Hh]eartbeat|unhealthy|disconnect|in error state).*[Cc]oordination [Ss]ervice",
        r"tasks? (?:are|is) unhealthy \(stopped sending heartbeats\)",
        r"/job:jax_worker/.*(?:crashed|heartbeat|in error state|disconnected)",
        r"Polled an error from the coordination service",
        is_consequence=True,
    ),
    "peer_lost": _kind(
        "The connection to another worker was lost: that worker had ended.",
        "Investigate the worker that ended first, not this one.",
        r"[Cc]onnection (?:was )?reset(?: by peer)?|[Cc]onnection closed by (?:remote )?peer",
        r"Connection(?:Reset|Aborted)Error|BrokenPipeError|[Bb]roken pipe|\[Errno (?:104|32|103)\]",
        r"remote process exit|ncclRemoteError|NCCL communicator was aborted|Connection was likely closed",
        r"failed to recv, got 0 bytes|Connection closed by remote|\bIncompleteReadError\b",
        r"StoreConnectionError: .*(?:closed|lost|went away)",
        r"Failed to (?:recv|send|receive).*remote (?:server|process|peer)",
        r"Please check rank \d+ logs for faulty rank",  # of a monitored barrier
        within=(r"multiprocessing/(?:connection|managers|queues|resource_sharer)\.py", r"^EOFError$"),
        is_consequence=True,
        signals=(signal.SIGPIPE,),
    ),
    # --- the network again: a peer may never have existed ---
    "connection_refused": _kind(
        "The connection was refused: no process listens at {what}.",
        "Check that the process that should listen there is running, and check MASTER_ADDR and MASTER_PORT.",
        r"Connection refused|ConnectionRefusedError|\[Errno 111\]|[Ff]ailed to connect to all addresses",
        detail=Detail(r"\(([\w.:-]+, \d+)\)|Connect to ([\w.:<>-]+)", otherwise="the address"),
    ),
    "connect_timeout": _kind(
        "Connecting timed out{what}.",
        "Check that the other host is up, and the firewall and network interface between the two.",
        r"client socket has timed out|trying to connect to|Connection timed out|\[Errno 110\]",
        r"[Cc]onnect timeout|timed out connecting",
        detail=Detail(r"\(([\w.:-]+, \d+)\)", ": {0}"),
    ),
    "nccl_error": _kind(
        "NCCL reported an error (network, driver or internal).",
        "Run it with NCCL_DEBUG=INFO: the log names the failed call and the network interface.",
        r"unhandled system error|ncclSystemError|ncclInternalError|unhandled cuda error|NCCL error",
    ),
    # --- the script ---
    "child_failed": _kind(
        "A process that the worker started failed.",
        "Read that process's output above the traceback in the worker's log.",
        r"\bCalledProcessError\b|DataLoader worker \(pid.*(?:exited unexpectedly|killed by signal)",
        r"BrokenProcessPool|ProcessExitedException|ChildFailedError",
        trust_output=False,
    ),
    "bad_file": _kind(
        "A file is damaged, truncated, or not in the expected format.",
        "Use an older checkpoint or fetch the file again; check that two ranks do not write it at once.",
        r"\bUnpicklingError\b|\bBadZipFile\b|invalid load key|Ran out of input|PytorchStreamReader failed",
        r"archive is corrupted|\bJSONDecodeError\b|\bSafetensorError\b|\bBadGzipFile\b|^EOFError\b",
        r"unexpected end of data",
        trust_output=False,
    ),
    "missing_file": _kind(
        "A file or folder does not exist{what}.",
        "Check the path on that host: every host needs the file, or a shared file system.",
        r"\bFileNotFoundError\b|\bNotADirectoryError\b|\[Errno 2\]|[Cc]an't find a valid checkpoint",
        r"\b(?:[Ff]ile|[Ff]older|[Dd]irectory|[Cc]heckpoint)\b.{0,200}\b(?:does not exist|not found)\b",
        trust_output=False,
        detail=_QUOTED,
    ),
    "permission_denied": _kind(
        "Permission denied{what}.",
        "Check owner and mode of the file and its folders on that host, for the user of the job.",
        r"\bPermissionError\b|\[Errno 13\]|\[Errno 1\]",
        trust_output=False,
        detail=_QUOTED,
    ),
    "not_a_number": _kind(
        "The loss or another value became NaN or infinite.",
        "Check the last losses; lower the learning rate, clip gradients, or look for a bad batch.",
        r"(?i:\b(?:loss|grad|gradient|weight|norm)(?:e?s)?\b.*\b(?:nan|infs?|infinity|(?:non-|not )finite)\b)",
        r"(?i:\b(?:nan|non-finite)\b.*\b(?:loss|grad|gradient|tensor|norm)(?:e?s)?\b)",
        r"\breturned nan values\b",  # autograd's anomaly detection
        r"\bFloatingPointError\b",
        trust_output=False,
    ),
    "not_picklable": _kind(
        "An object could not be pickled, to send it to another process or to save it.",
        "Define its class or function at the top level of a module; leave out lambdas, locks, files and sockets.",
        r"[Cc]an(?:'t|not) (?:pickle|get local object)|\bPicklingError\b",
        trust_output=False,
    ),
    "unused_parameters": _kind(
        "Parameters of the model took no part in the loss, and DDP waits for their gradients.",
        "Remove them or use their outputs in the loss; otherwise pass find_unused_parameters=True to DDP.",
        r"Expected to have finished reduction in the prior iteration",
        trust_output=False,
    ),
    "checkpoint_mismatch": _kind(
        "The checkpoint does not fit the model: names or shapes of its tensors differ.",
        "Load it into the model that wrote it, or compare the names and shapes in the message with yours.",
        r"Error\(s\) in loading state_dict",
        r"(?:Missing|Unexpected) key.* in .*state_dict",
        trust_output=False,
    ),
    "shape_mismatch": _kind(
        "The shapes of tensors do not match.",
        "Compare the shapes in the message with the data and the model.",
        r"shapes cannot be multiplied|must match the size of tensor|\bsize mismatch\b|shapes .* not aligned",
        r"could not be broadcast|shape '.*' is invalid for input of size|Sizes of tensors must match",
        r"requires contracting dimensions to have the same shape|incompatible shapes for broadcasting",
        trust_output=False,
    ),
    "assertion": _kind(
        "An assertion in the script failed.",
        "Read the traceback below, last line first.",
        r"\bAssertionError\b",
        trust_output=False,
    ),
    "interrupted": _kind(
        "The worker received SIGINT (Ctrl-C), not from tenax.",
        "Find the person or script on that host that sent it.",
        r"^KeyboardInterrupt\b",
        trust_output=False,
        signals=(signal.SIGINT,),
    ),
    "thread_at_exit": _kind(
        "The worker aborted while it exited: a thread of a C++ library still ran, such as gloo's in torch.",
        "Call torch.distributed.destroy_process_group() before the script ends. The training was over.",
        r"terminate called without an active exception",
    ),
    "exception": _kind(
        "The script raised an uncaught exception{what}.",
        "Read the traceback below, last line first.",
        detail=Detail(r"^([^\W\d][\w.]*)", ": {0}"),
    ),
    # --- signals ---
    "killed": _kind(
        "The worker received SIGKILL, not from tenax.",
        "Look for a scheduler, a person or a resource limit that killed it (dmesg on that host).",
        signals=(signal.SIGKILL,),
    ),
    "terminated": _kind(
        "The worker received SIGTERM, not from tenax.",
        "Look for a scheduler, a preemption or a person. To stop a job, signal the agent or use tenax stop.",
        signals=(signal.SIGTERM, signal.SIGQUIT),
    ),
    "hung_up": _kind(
        "The terminal or session of the worker was closed (SIGHUP).",
        "Start the job so that it survives a logout: in tmux, with nohup, or with a scheduler.",
        signals=(signal.SIGHUP,),
    ),
    "segmentation_fault": _kind(
        "The worker crashed in native code: invalid memory access.",
        "Suspect the library of the innermost frame; compare its version with a working host.",
        signals=(signal.SIGSEGV,),
    ),
    "bus_error": _kind(
        "The worker accessed missing mapped memory: full /dev/shm, a truncated file, or bad memory.",
        "Check /dev/shm (df -h /dev/shm), mapped files that may have been truncated, then dmesg.",
        signals=(signal.SIGBUS,),
    ),
    "illegal_instruction": _kind(
        "The worker used an instruction that this CPU does not support.",
        "Use a build of the library for this CPU; compare /proc/cpuinfo with a working host.",
        signals=(signal.SIGILL,),
    ),
    "arithmetic": _kind(
        "The worker crashed in native code: an arithmetic error, such as a division by zero.",
        "Suspect the library of the innermost frame, or its arguments.",
        signals=(signal.SIGFPE,),
    ),
    "aborted": _kind(
        "The worker aborted: native code detected an error.",
        "Read the last lines of its stderr: they usually name the reason.",
        signals=(signal.SIGABRT,),
    ),
    "cpu_limit": _kind(
        "The worker exceeded its CPU time limit.",
        "Raise the limit (ulimit -t).",
        signals=(signal.SIGXCPU,),
    ),
    "forbidden_call": _kind(
        "The worker made a system call that is not allowed.",
        "Check the seccomp profile of the container.",
        signals=(signal.SIGSYS,),
    ),
    "signal": _kind(
        "The worker was killed by a signal that it does not handle.",
        "Find the sender; some schedulers send a signal before they stop a job.",
    ),
    # --- found by comparing workers: ``_core/diagnosis.py`` ---
    "stopped_responding": _kind(
        "The worker stopped taking part; the others timed out waiting for it.",
        "Read its stacks or its last lines: they show where it was. Run it with --on-hang report for stacks.",
    ),
    "never_joined": _kind(
        "The worker did not join the process group; the others timed out waiting for it.",
        "Read its last lines: find what it did before init_process_group, such as a download or an import.",
    ),
    "exited_early": _kind(
        "The worker exited with code 0 while the others still needed it.",
        "Check that all ranks run the same number of steps: uneven data needs drop_last or join().",
    ),
    DEADLOCK: _kind(
        "The workers waited for each other: all of them timed out, and none was missing.",
        "Run it with TORCH_DISTRIBUTED_DEBUG=DETAIL, which names ranks that call different operations; "
        "otherwise check the network between the hosts.",
    ),
    # --- known only to tenax or from the exit code ---
    "scope_expired": _kind(
        "The worker did not leave a tenax.timer scope in time.",
        "Read its stacks below. A rank that waits in a collective is not the one that hangs.",
    ),
    "hang": _kind(
        "The run stopped making progress, and this worker was in a different call than the others.",
        "Read its stacks below: the call did not return, or waits for something outside the job.",
    ),
    "not_started": _kind(
        "The worker could not be started.",
        "Check the command on that host: path, permissions, limits.",
    ),
    "exit_code": _kind(
        "The worker exited with an error code, without an exception.",
        "Read the last lines of its output; look for sys.exit or os._exit in the script and its libraries.",
    ),
    "unknown": _kind(
        "Unknown: the worker left no evidence.",
        "Read its log; run it with --tee 3 to keep all output.",
    ),
}
