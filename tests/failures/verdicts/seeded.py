"""A worker of the corpus: one rank fails, the others wait for it and lose their connection to it.

    seeded.py FAULT ROOT VICTIMS VARIANT

``FAULT`` names a function below; ``ROOT`` is the rank that calls it, or ``all``. ``VICTIMS`` names what the others do
when they lose the root: see ``VICTIMS`` below. ``VARIANT``: ``slow``, the root closes the connections to its peers and
runs until it is stopped; ``second``, everything happens after one restart; empty: neither.

The root sends its port and pid to the victims through FIFOs in ``VERDICT_FOLDER``; then they hold TCP connections.
No sleeps.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import socket
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path

FOLDER = os.environ.get("VERDICT_FOLDER", ".")
RANK = int(os.environ.get("RANK", "0"))
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
UNPRIVILEGED_UID = 65534
peers: list[socket.socket] = []
roots: list[int] = []  # the pidfd of the root, in a victim


def in_folder(name: str) -> Path:
    """Return a path in the folder of the run. Few workers need the module, which takes 10 ms to import."""
    from pathlib import Path

    return Path(FOLDER, name)


# --- connecting -------------------------------------------------------------------------------------------------------


def accept_victims() -> None:
    """Wait until every victim is connected. Their data stays unread, so that closing resets the connection."""
    if WORLD == 1:
        return
    listener = socket.create_server(("127.0.0.1", 0))
    for rank in range(WORLD):
        if rank != RANK:
            with open(f"{FOLDER}/port.{rank}", "w") as fifo:
                fifo.write(f"{listener.getsockname()[1]} {os.getpid()}\n")
    for _ in range(WORLD - 1):
        peer, _ = listener.accept()
        peer.recv(1, socket.MSG_PEEK)
        if sys.flags.no_site:  # nothing records the exception: only an exit before that of the victims proves the cause
            peer.detach()  # the kernel closes it when the process exits, not the interpreter some time before
        else:
            peers.append(peer)
    listener.close()


def connect_to_root() -> socket.socket:
    with open(f"{FOLDER}/port.{RANK}") as fifo:  # blocks until the root has opened it too
        port, pid = map(int, fifo.read().split())
    roots.append(os.pidfd_open(pid))
    peer = socket.create_connection(("127.0.0.1", port))
    peer.sendall(b"hello")
    return peer


def wait_until_lost(peer: socket.socket) -> None:
    """Wait until the root is gone: NCCL and stores fail long after that, unless the root exits slowly."""
    with contextlib.suppress(ConnectionResetError):
        peer.recv(1)
    if sys.argv[4] != "slow":  # the kernel closes the connection before the process has ended
        select.select(roots, [], [])


# --- victims: what they do when they lose the root --------------------------------------------------------------------


def receive(peer: socket.socket) -> None:
    peer.recv(1)
    raise ConnectionResetError(errno.ECONNRESET, "closed by the root")


def send(peer: socket.socket) -> None:
    wait_until_lost(peer)
    peer.sendall(b"x")
    while True:
        peer.sendall(b"x" * 4096)


def multiprocessing_receive(peer: socket.socket) -> None:
    from multiprocessing.connection import Connection

    wait_until_lost(peer)
    own, other = socket.socketpair()
    other.close()
    Connection(own.detach()).recv()


def wrap(peer: socket.socket) -> None:
    try:
        receive(peer)
    except ConnectionResetError as error:
        raise RuntimeError("step 17 failed") from error


def nccl_remote(peer: socket.socket) -> None:
    wait_until_lost(peer)

    class DistBackendError(RuntimeError):
        __module__ = "torch.distributed"

    raise DistBackendError(
        "NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1691, remote process exited or there was a "
        "network error, NCCL version 2.19.3\nncclRemoteError: A call failed possibly due to a network error or a "
        "remote process exiting prematurely.\nLast error:\nsocketProgress: Connection closed by remote peer node1<412>"
    )


NCCL_TIMEOUT = (
    f"[rank{RANK}]:[E ProcessGroupNCCL.cpp:523] [Rank {RANK}] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=29, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600029 milliseconds "
    "before timing out."
)


def nccl_watchdog(peer: socket.socket) -> None:
    wait_until_lost(peer)
    print(NCCL_TIMEOUT, file=sys.stderr)
    print(
        f"[rank{RANK}]:[E ProcessGroupNCCL.cpp:537] Some NCCL operations have failed or timed out. Due to the "
        "asynchronous nature of CUDA kernels, subsequent GPU operations might run on corrupted/incomplete data.\n"
        f"[rank{RANK}]:[E ProcessGroupNCCL.cpp:543] To avoid data inconsistency, we are taking the entire process "
        "down.\n"
        "terminate called after throwing an instance of 'std::runtime_error'\n"
        f"  what():  [Rank {RANK}] NCCL watchdog thread terminated with exception: {NCCL_TIMEOUT}",
        file=sys.stderr,
        flush=True,
    )
    os.abort()


def store_timeout(peer: socket.socket) -> None:
    wait_until_lost(peer)
    raise RuntimeError("wait timeout after 300000ms, keys: /default_pg/0//cuda//timeout_dump")


def barrier(peer: socket.socket) -> None:
    raise RuntimeError(f"[Rank {RANK}]: Rank 1 failed to pass monitoredBarrier in 1000 ms")


def wait(peer: socket.socket) -> None:
    signal.pause()


VICTIMS = {
    "receive": receive,
    "send": send,
    "eof": multiprocessing_receive,
    "wrap": wrap,
    "nccl_remote": nccl_remote,
    "nccl_watchdog": nccl_watchdog,
    "store_timeout": store_timeout,
    "barrier": barrier,
    "wait": wait,
}


# --- faults: the system's ---------------------------------------------------------------------------------------------


def forever() -> None:
    """Loop, because a signal handler ends a pause."""
    while True:
        signal.pause()


def drop_privileges() -> None:
    """Drop the privileges of root, for which no limit holds."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(UNPRIVILEGED_UID)
        os.setuid(UNPRIVILEGED_UID)


def mount_tmpfs(options: str, flags: int = 0) -> Path | None:
    """Mount a small file system that only this process sees. Return None if that is not permitted."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    new_namespace, recursive, private = 0x20000, 0x4000, 1 << 18
    folder = in_folder("mounted")
    folder.mkdir(exist_ok=True)
    if libc.unshare(new_namespace) or libc.mount(b"none", b"/", None, recursive | private, None):
        return None
    return None if libc.mount(b"tmpfs", bytes(folder), b"tmpfs", flags, options.encode()) else folder


def disk_full() -> None:
    with open("/dev/full", "wb", buffering=0) as file:
        file.write(b"x")


def disk_full_of_tmpfs() -> None:
    folder = mount_tmpfs("size=64k")
    path = folder / "checkpoint.pt" if folder is not None else in_folder("/dev/full")
    path.write_bytes(b"x" * (1 << 20))


def disk_full_in_a_chain() -> None:
    try:
        disk_full()
    except OSError as error:
        raise RuntimeError("the checkpoint of step 500 was not saved") from error


def disk_full_of_a_child() -> None:
    import subprocess

    subprocess.run(["sh", "-c", "cat /etc/passwd > /dev/full"], check=True)


def read_only() -> None:
    folder = mount_tmpfs("size=64k", flags=1)
    if folder is None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "/data/x")
    (folder / "x").write_text("x")


def quota() -> None:
    raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), "/home/me/checkpoint.pt")


def io_error() -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO), "/mnt/nfs/shard-7")


def stale_file() -> None:
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), "/mnt/nfs/shard-7")


def file_too_large() -> None:
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    with open(f"{FOLDER}/large", "wb", buffering=0) as file:
        while True:
            file.write(b"x" * (1 << 18))


def too_many_files() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
    held = []
    while True:
        held.append(open("/dev/null"))  # noqa: SIM115


def no_more_threads() -> None:
    import resource
    import threading

    drop_privileges()
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    threading.Thread(target=signal.pause, daemon=True).start()


def no_more_forks() -> None:
    import resource

    drop_privileges()
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    if os.fork() == 0:
        os._exit(0)


def memory() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
    bytearray(4 << 30)


def out_of_memory() -> None:
    """Let the kernel kill this process: its control group has little memory."""
    with open(f"{os.environ['VERDICT_MEMORY_GROUP']}/cgroup.procs", "w") as file:
        file.write("0")
    held = []
    while True:
        held.append(bytearray(b"x") * (1 << 20))


def bad_alloc() -> None:
    aborts("terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc")


def aborts(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
    os.abort()


def segmentation_fault() -> None:
    import ctypes

    ctypes.string_at(0)


def bus_error() -> None:
    import mmap

    path = in_folder(f"mapped.{RANK}")
    path.write_bytes(b"x" * 8192)
    with open(path, "r+b") as file:
        mapped = mmap.mmap(file.fileno(), 8192)
        file.truncate(0)
        mapped[5000]


def by_signal(number: int) -> None:
    os.kill(os.getpid(), number)
    signal.pause()


def interrupted() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    by_signal(signal.SIGINT)


# --- faults: the program's and the network's --------------------------------------------------------------------------


def missing_module() -> None:
    import tenax_has_no_such_module  # type: ignore[import-not-found]  # noqa: F401


def import_error() -> None:
    from os import there_is_no_such_name  # type: ignore[attr-defined]  # noqa: F401


def syntax_error() -> None:
    sys.path.insert(0, FOLDER)
    in_folder("broken_module.py").write_text("def f(:\n    pass\n")
    __import__("broken_module")


def missing_library() -> None:
    import ctypes

    ctypes.CDLL("libnowhere.so.7")


def glibc() -> None:
    raise ImportError(
        "/lib/x86_64-linux-gnu/libc.so.6: version `GLIBC_2.38' not found (required by /opt/venv/lib/_C.so)"
    )


def wrong_build() -> None:
    import subprocess

    path = in_folder(f"tool.{RANK}")
    path.write_bytes(b"\x7fELF of another system")
    path.chmod(0o755)
    subprocess.run([str(path)], check=True)


def address_in_use() -> None:
    first = socket.create_server(("127.0.0.1", 0))
    port = first.getsockname()[1]
    try:
        socket.socket().bind(("127.0.0.1", port))
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror}, port {port}") from None


def address_in_use_in_torch() -> None:
    raise RuntimeError(
        "The server socket has failed to listen on any local network address. port: 29500, useIpv6: false, code: -98, "
        "name: EADDRINUSE, message: address already in use"
    )


def wrong_address() -> None:
    socket.socket().bind(("192.0.2.1", 0))


def unknown_host() -> None:
    socket.getaddrinfo("no-such-host.invalid", 29500)


def unreachable() -> None:
    raise OSError(errno.EHOSTUNREACH, os.strerror(errno.EHOSTUNREACH))


def connection_refused() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    listener.close()
    socket.create_connection(("127.0.0.1", port))


def remote_service() -> None:
    import urllib.request

    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    listener.close()
    urllib.request.urlopen(f"http://127.0.0.1:{port}/dataset")


def connect_timeout() -> None:
    raise RuntimeError("The client socket has timed out after 60s while trying to connect to (head, 29500).")


# --- faults: the script's ---------------------------------------------------------------------------------------------


def missing_file() -> None:
    open("/data/nowhere/train.bin")  # noqa: SIM115


def permission_denied() -> None:
    path = in_folder("secret")
    path.write_text("x")
    path.chmod(0)
    drop_privileges()
    path.read_text()


def cut_pickle() -> None:
    import pickle

    pickle.loads(b"")


def bad_pickle() -> None:
    import pickle

    pickle.loads(b"garbage")


def bad_zip() -> None:
    import zipfile

    path = in_folder(f"checkpoint.{RANK}")
    path.write_bytes(b"garbage")
    zipfile.ZipFile(path)


def bad_json() -> None:
    import json

    json.loads('{"step": 5')


def child_failed() -> None:
    import subprocess

    subprocess.run(["false"], check=True)


def key_error() -> None:
    {}["lr"]


def type_error() -> None:
    len(5)  # type: ignore[arg-type]


def assertion() -> None:
    assert RANK < 0, "the batch has the wrong size"


def shape() -> None:
    raise RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x5 and 6x7)")


def state_dict() -> None:
    raise RuntimeError(
        "Error(s) in loading state_dict for Net:\n\tsize mismatch for fc.weight: copying a param with shape"
    )


def nan() -> None:
    raise ValueError("loss is nan at step 17")


def floating_point() -> None:
    raise FloatingPointError("overflow encountered in exp")


def exit_3() -> None:
    sys.exit(3)


def exit_message() -> None:
    sys.exit("error: --data must name a folder")


def exit_at_once() -> None:
    os._exit(7)


def exit_like_a_shell() -> None:
    os._exit(137)


def success() -> None:
    os._exit(0)


def hang() -> None:
    print("loading the last shard", flush=True)
    forever()


def disconnect() -> None:
    """Lose the peers and go on: nothing shows that this worker is the cause."""
    for peer in peers:
        peer.close()
    forever()


def scope_expired() -> None:
    from tenax import timer

    timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
    with timer.expires(after=0.2, scope="step"):
        forever()


# --- faults: GPU errors, as torch, CUDA and NCCL print them------------------------------------------------------------


def accelerator_error(text: str) -> None:
    class AcceleratorError(RuntimeError):
        __module__ = "torch"

    raise AcceleratorError(
        f"CUDA error: {text}\nCUDA kernel errors might be asynchronously reported at some other API call, so the "
        "stacktrace below might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\nCompile with "
        "`TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
    )


def cuda_out_of_memory() -> None:
    class OutOfMemoryError(RuntimeError):
        __module__ = "torch"

    raise OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB of which 1.02 GiB is "
        "free. Process 4242 has 78.12 GiB memory in use."
    )


def cuda_out_of_memory_in_nccl() -> None:
    raise RuntimeError(
        "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:219, unhandled cuda error, NCCL version 2.18.1\n"
        "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
        "Cuda failure 'CUDA error: out of memory'"
    )


def illegal_access() -> None:
    accelerator_error("an illegal memory access was encountered")


def device_assert() -> None:
    print("../aten/src/ATen/native/cuda/Loss.cu:250: nll_loss: Assertion `t < n_classes` failed.", file=sys.stderr)
    accelerator_error("device-side assert triggered")


def ecc() -> None:
    accelerator_error("uncorrectable ECC error encountered")


def gpu_lost() -> None:
    raise RuntimeError("Unable to determine the device handle for GPU0000:3B:00.0: GPU is lost.  Reboot the system")


def no_gpu() -> None:
    raise RuntimeError("No CUDA GPUs are available")


def old_driver() -> None:
    raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).")


def cudnn() -> None:
    raise RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED")


def watchdog_sees_gpu_error() -> None:
    """NCCL's watchdog detects the GPU error first: this is not a timeout."""
    aborts(
        f"[rank{RANK}]:[E ProcessGroupNCCL.cpp:1414] [PG 0 Rank {RANK}] Process group watchdog thread terminated with "
        "exception: CUDA error: an illegal memory access was encountered\n"
        "terminate called after throwing an instance of 'c10::DistBackendError'\n"
        f"  what():  [PG 0 Rank {RANK}] Process group watchdog thread terminated with exception: CUDA error: an "
        "illegal memory access was encountered\nCUDA kernel errors might be asynchronously reported at some other call"
    )


def nccl_system_error() -> None:
    raise RuntimeError(
        "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:317, unhandled system error (run with "
        "NCCL_DEBUG=INFO for details), NCCL version 2.21.5\nncclSystemError: System call (e.g. socket, malloc) or "
        "external library call failed or device error.\nLast error:\nCall to ibv_create_qp failed with error"
    )


def nccl_shared_memory() -> None:
    raise RuntimeError(
        "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:219, unhandled system error, NCCL version 2.18.1\n"
        "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.\n"
        "Last error:\nError while creating shared memory segment /dev/shm/nccl-iV0LTx (size 9637888): No space left"
    )


def loader_bus_error() -> None:
    raise RuntimeError(
        "DataLoader worker (pid 4711) is killed by signal: Bus error. It is possible that dataloader's workers are out "
        "of shared memory. Please try to raise your shared memory limit."
    )


def mismatch() -> None:
    raise RuntimeError(
        "Detected mismatch between collectives on ranks. Rank 1 is running collective: CollectiveFingerPrint("
        "SequenceNumber=4, OpType=BROADCAST), but Rank 0 is running collective: CollectiveFingerPrint(OpType=BARRIER)"
    )


# --- torch, for real --------------------------------------------------------------------------------------------------


def gloo(fault: str) -> None:
    """All ranks are in one process group; after a first collective the root fails."""
    from datetime import timedelta

    import torch
    from torch import distributed

    is_timeout = fault == "gloo_timeout"
    distributed.init_process_group("gloo", timeout=timedelta(seconds=20))
    ones = torch.ones(4)
    distributed.all_reduce(ones)
    group = distributed.new_group(timeout=timedelta(seconds=1)) if is_timeout else None
    if int(sys.argv[2]) == RANK:
        match fault:
            case "gloo_killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "gloo_raises":
                raise ValueError("the batch is empty")
            case "gloo_timeout":
                signal.pause()
            case "gloo_early":
                os._exit(0)
    elif fault == "gloo_size":
        ones = torch.ones(4000)  # more than the root expects
    distributed.all_reduce(ones, group=group)
    raise AssertionError("no peer was lost")


# --- the worker -------------------------------------------------------------------------------------------------------

SIGNALS = {
    "killed": signal.SIGKILL,
    "terminated": signal.SIGTERM,
    "hung_up": signal.SIGHUP,
    "quit": signal.SIGQUIT,
    "illegal_instruction": signal.SIGILL,
    "arithmetic": signal.SIGFPE,
    "cpu_limit": signal.SIGXCPU,
    "user_signal": signal.SIGUSR1,
}


def fail(fault: str) -> None:
    if fault in SIGNALS:
        by_signal(SIGNALS[fault])
    elif fault == "aborted":
        os.abort()
    else:
        globals()[fault]()


def disconnect_and_wait() -> None:
    """Runs when the interpreter exits, after the exception was recorded: the peers fail before this process ends."""
    for peer in peers:
        peer.close()
    signal.pause()


def main() -> None:
    fault, root, victims, variant = sys.argv[1:5]
    if variant == "second" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        sys.exit(9 if RANK == 0 else signal.pause())
    if fault.startswith("gloo_"):
        gloo(fault)
    elif root == "all":
        fail(fault)
    elif int(root) == RANK:
        accept_victims()
        if variant == "slow":
            import atexit

            atexit.register(disconnect_and_wait)
        fail(fault)
    else:
        VICTIMS[victims](connect_to_root())


if __name__ == "__main__":
    main()
