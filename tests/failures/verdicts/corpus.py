"""The corpus: seeded failures and the expected verdict of each.

Every line is one run, of one agent or several. ``fault`` is a function of ``seeded.py``, ``root`` the rank that calls
it, ``kind`` the expected cause. If the cause cannot be known (``root`` is None), the report must state that; if all
ranks fail at once, it must list them as one cause.
"""

from __future__ import annotations

import sys
from typing import NamedTuple


class Seed(NamedTuple):
    fault: str
    root: int | str | None  # a rank; "all": every rank, as one cause; None: rank 1, but the cause cannot be known
    kind: str
    victims: str = "receive"  # what the others do when they lose the root
    variant: str = ""  # "slow": its peers fail before it; "second": after one restart
    nodes: int = 1
    workers: int = 2  # per node
    text: str = ""  # text that the report must contain besides the meaning of the kind
    record: bool = True  # False: the interpreter writes no error file; only stderr is left
    command: tuple[str, ...] = ()  # instead of the worker

    @property
    def name(self) -> str:
        parts = (
            self.victims if self.victims != "receive" else "",
            self.variant,
            f"{self.nodes} nodes" if self.nodes != 1 else "",
            f"{self.workers} workers" if self.workers * self.nodes > 3 else "",
            "" if self.record else "unrecorded",
        )
        return " ".join(filter(None, (self.fault, "of", str(self.root), *parts)))


CORPUS = (
    # --- memory, disk, limits ---
    Seed("out_of_memory", 1, "out_of_memory", text="out of memory", nodes=2, workers=1),
    Seed("out_of_memory", 0, "out_of_memory", "nccl_remote", nodes=3, workers=1),
    Seed("memory", 1, "memory"),
    Seed("bad_alloc", 0, "memory", "send"),
    Seed("disk_full", 1, "disk_full", text="No space left on device"),
    Seed("disk_full", 0, "disk_full", "nccl_watchdog", nodes=3, workers=1),
    Seed("disk_full", 1, "disk_full", variant="slow", nodes=2, workers=1),
    Seed("disk_full", "all", "disk_full", nodes=2),
    Seed("disk_full_of_tmpfs", 1, "disk_full", "wrap"),
    Seed("disk_full_in_a_chain", 0, "disk_full"),
    Seed("disk_full_of_a_child", 1, "disk_full"),
    Seed("quota", 1, "quota", text="/home/me/checkpoint.pt"),
    Seed("read_only", 1, "read_only"),
    Seed("io_error", 0, "io_error", "store_timeout", text="/mnt/nfs/shard-7"),
    Seed("stale_file", 1, "io_error"),
    Seed("file_too_large", 1, "file_too_large"),
    Seed("too_many_files", 1, "too_many_files", nodes=2),
    Seed("no_more_threads", 0, "no_more_processes"),
    Seed("no_more_forks", 1, "no_more_processes", "eof"),
    Seed("loader_bus_error", 1, "shared_memory", nodes=2, workers=1),
    Seed("nccl_shared_memory", 0, "shared_memory", "nccl_remote"),
    # --- GPUs ---
    Seed("cuda_out_of_memory", 1, "cuda_out_of_memory", "nccl_watchdog"),
    Seed("cuda_out_of_memory", 0, "cuda_out_of_memory", variant="slow", nodes=3, workers=1),
    Seed("cuda_out_of_memory_in_nccl", 1, "cuda_out_of_memory", "nccl_remote"),
    Seed("illegal_access", 1, "gpu_illegal_access", "nccl_watchdog"),
    Seed("watchdog_sees_gpu_error", 0, "gpu_illegal_access", "nccl_watchdog", nodes=2, workers=1),
    Seed("device_assert", 1, "gpu_assert"),
    Seed("ecc", 1, "gpu_memory_error", "nccl_remote", nodes=3, workers=1),
    Seed("gpu_lost", 1, "gpu_lost", "nccl_watchdog"),
    Seed("no_gpu", "all", "no_gpu", nodes=2, workers=1),
    Seed("old_driver", 0, "no_gpu"),
    Seed("cudnn", 1, "gpu_error"),
    Seed("nccl_system_error", 1, "nccl_error"),
    Seed("mismatch", 0, "collective_mismatch"),
    # --- signals ---
    Seed("killed", 1, "killed", nodes=2, workers=1),
    Seed("killed", 0, "killed", "send", nodes=3, workers=1),
    Seed("killed", 3, "killed", "wrap", nodes=2),
    Seed("killed", 1, "killed", variant="second", nodes=2, workers=1),
    Seed("terminated", 1, "terminated", "nccl_remote"),
    Seed("hung_up", 1, "hung_up"),
    Seed("quit", 0, "terminated"),
    Seed("interrupted", 1, "interrupted"),
    Seed("user_signal", 1, "signal"),
    Seed("segmentation_fault", 1, "segmentation_fault"),
    Seed("segmentation_fault", 0, "segmentation_fault", "nccl_watchdog", variant="second", nodes=2, workers=1),
    Seed("bus_error", 1, "bus_error"),
    Seed("illegal_instruction", 1, "illegal_instruction"),
    Seed("arithmetic", 1, "arithmetic"),
    Seed("aborted", 0, "aborted"),
    Seed("cpu_limit", 1, "cpu_limit"),
    # --- the program ---
    Seed("missing_module", 1, "missing_module", text="tenax_has_no_such_module", nodes=2, workers=1),
    Seed("missing_module", "all", "missing_module", nodes=3, workers=1),
    Seed("missing_module", 0, "missing_module", record=False),
    Seed("import_error", 1, "import_error"),
    Seed("syntax_error", 1, "syntax_error"),
    Seed("missing_library", 1, "missing_library", text="libnowhere.so.7"),
    Seed("glibc", 1, "glibc_too_old", text="GLIBC_2.38"),
    Seed("wrong_build", 0, "wrong_build"),
    Seed("no script", "all", "script_not_found", command=(sys.executable, "nowhere.py"), nodes=2, workers=1),
    Seed("no program", "all", "not_started", command=("./without_interpreter",), nodes=2, workers=1),
    # --- the network ---
    Seed("address_in_use", 1, "address_in_use", text="Port ", nodes=2, workers=1),
    Seed("address_in_use_in_torch", 0, "address_in_use", text="Port 29500"),
    Seed("wrong_address", 1, "wrong_address"),
    Seed("unknown_host", 1, "unknown_host", "store_timeout"),
    Seed("unreachable", 1, "unreachable"),
    Seed("connection_refused", 1, "connection_refused"),
    Seed("connect_timeout", 1, "connect_timeout", text="head, 29500"),
    Seed("remote_service", 0, "remote_service"),
    # --- the script ---
    Seed("missing_file", 1, "missing_file", text="/data/nowhere/train.bin"),
    Seed("missing_file", 0, "missing_file", "nccl_remote", record=False),
    Seed("permission_denied", 1, "permission_denied"),
    Seed("cut_pickle", 1, "bad_file"),
    Seed("bad_pickle", 0, "bad_file"),
    Seed("bad_zip", 1, "bad_file", "eof"),
    Seed("bad_json", 1, "bad_file"),
    Seed("child_failed", 1, "child_failed"),
    Seed("key_error", 1, "exception", text="KeyError: 'lr'", nodes=2, workers=1),
    Seed("key_error", 0, "exception", "nccl_watchdog", variant="slow", nodes=2, workers=1),
    Seed("key_error", 1, "exception", "send", variant="slow", nodes=3, workers=1),
    Seed("type_error", 1, "exception", "store_timeout", variant="second", nodes=2, workers=1),
    Seed("assertion", 0, "assertion", "wrap"),
    Seed("shape", 1, "shape_mismatch"),
    Seed("state_dict", 1, "checkpoint_mismatch"),
    Seed("nan", 2, "not_a_number", nodes=3, workers=1),
    Seed("floating_point", 1, "not_a_number"),
    Seed("exit_3", 1, "exit_code", nodes=2, workers=1),
    Seed("exit_message", 0, "exit_code", text="--data must name a folder"),
    Seed("exit_at_once", 1, "exit_code", "nccl_watchdog"),
    Seed("exit_like_a_shell", 1, "killed"),
    Seed("scope_expired", 1, "scope_expired", text="'step'", nodes=2, workers=1),
    # --- the others wait for it ---
    Seed("success", 1, "exited_early", text="1 rank lost the connection to it", nodes=2, workers=1),
    Seed("success", 0, "exited_early", "nccl_remote"),
    Seed("hang", 1, "stopped_responding", "barrier", text="1 rank timed out waiting for it", nodes=2, workers=1),
    # --- the cause cannot be known ---
    Seed("disconnect", None, "peer_lost", text="lost a peer or timed out waiting for one", nodes=2, workers=1),
    # --- torch for real ---
    Seed("gloo_killed", 1, "killed", nodes=2, workers=1),
    Seed("gloo_raises", 0, "exception", text="the batch is empty"),
    Seed("gloo_timeout", 1, "stopped_responding", text="1 rank timed out waiting for it"),
    Seed("gloo_size", 1, "size_mismatch", text="different tensors"),
    Seed("gloo_early", 1, "exited_early"),
)
