"""The failures of real frameworks, and the verdict that each must have: two nodes with four workers, on CPUs.

The expectation is written before a job is run. ``framework_jobs.py`` has the jobs; ``./dev corpus`` runs them.
"""

from __future__ import annotations

from typing import NamedTuple


class Job(NamedTuple):
    name: str  # a function of framework_jobs.py
    ranks: str  # that are the first cause: "3", "4-7" or "0-7". Several: any of them is first, the others have the same
    kind: str
    next_step: str  # a part of it

    @property
    def framework(self) -> str:
        return self.name.partition("_")[0]


PRELOAD = {
    "gloo": "torch.distributed",
    "ddp": "torch.distributed,torch.nn.parallel",
    "fsdp": "torch.distributed.fsdp,torch.distributed.checkpoint",
    "accelerate": "accelerate",
    "lightning": "torch.distributed,torchmetrics",
    "trainer": "transformers.trainer",
    "jax": "jax",
}

JOBS = (
    Job("gloo_never_joins", "6", "never_joined", "before init_process_group"),
    Job("gloo_monitored_barrier", "3", "stopped_responding", "its last lines"),
    Job("gloo_collectives", "5", "collective_mismatch", "Find where the ranks diverge"),
    Job("gloo_deadlock", "0-7", "deadlock", "TORCH_DISTRIBUTED_DEBUG=DETAIL"),
    Job("gloo_port_taken", "0", "address_in_use", "ss -ltnp"),
    Job("gloo_unknown_host", "4-7", "unknown_host", "getent hosts"),
    Job("gloo_nccl", "0-7", "no_gpu", "nvidia-smi"),
    Job("gloo_pickle", "2", "not_picklable", "top level of a module"),
    Job("gloo_early", "3", "exited_early", "drop_last or join()"),
    Job("gloo_terminated", "1", "terminated", "a scheduler"),
    Job("gloo_receive", "7", "stopped_responding", "its last lines"),
    Job("ddp_raises", "5", "exception", "Read the traceback"),
    Job("ddp_unused", "0-7", "unused_parameters", "find_unused_parameters=True"),
    Job("ddp_other_model", "1", "size_mismatch", "Compare the shapes"),
    Job("ddp_uneven", "7", "exited_early", "drop_last or join()"),
    Job("ddp_nan_loss", "4", "not_a_number", "lower the learning rate"),
    Job("ddp_anomaly", "6", "not_a_number", "lower the learning rate"),
    Job("ddp_no_checkpoint", "4-7", "missing_file", "every host needs the file"),
    Job("ddp_state_dict", "0-7", "checkpoint_mismatch", "the model that wrote it"),
    Job("ddp_damaged_checkpoint", "2", "bad_file", "older checkpoint"),
    Job("ddp_loader_killed", "3", "child_failed", "that process's output"),
    Job("ddp_loader_raises", "6", "exception", "Read the traceback"),
    Job("ddp_loader_segfault", "1", "child_failed", "that process's output"),
    Job("ddp_loader_not_picklable", "0", "not_picklable", "top level of a module"),
    Job("ddp_no_gpu", "0-7", "no_gpu", "nvidia-smi"),
    Job("ddp_stops", "2", "stopped_responding", "its last lines"),
    Job("ddp_disk_full", "0", "disk_full", "df -h"),
    Job("ddp_too_many_files", "1", "too_many_files", "ulimit -n"),
    Job("ddp_shared_memory", "5", "shared_memory", "--shm-size"),
    Job("ddp_memory", "3", "memory", "Use less memory"),
    Job("ddp_memory_of_numpy", "6", "memory", "Use less memory"),
    Job("ddp_out_of_memory", "6", "out_of_memory", "more memory"),
    Job("ddp_interrupted", "2", "interrupted", "person or script"),
    Job("ddp_shapes", "3", "shape_mismatch", "Compare the shapes"),
    Job("ddp_missing_module", "4-7", "missing_module", "Install it"),
    Job("ddp_label", "5", "exception", "Read the traceback"),
    Job("ddp_killed", "0", "killed", "dmesg"),
    Job("ddp_segfault", "7", "segmentation_fault", "innermost frame"),
    Job("ddp_assert", "4", "assertion", "Read the traceback"),
    Job("fsdp_killed", "3", "killed", "dmesg"),
    Job("fsdp_raises", "6", "exception", "Read the traceback"),
    Job("fsdp_stops", "5", "stopped_responding", "its last lines"),
    Job("fsdp_uneven", "1", "exited_early", "drop_last or join()"),
    Job("fsdp_no_checkpoint", "0-7", "missing_file", "shared file system"),
    Job("fsdp_missing_key", "0-7", "checkpoint_mismatch", "the model that wrote it"),
    Job("fsdp_disk_full", "2", "disk_full", "df -h"),
    Job("fsdp_no_gpu", "0-7", "no_gpu", "nvidia-smi"),
    Job("accelerate_raises", "2", "exception", "Read the traceback"),
    Job("accelerate_deepspeed", "0-7", "missing_module", "Install it"),
    Job("accelerate_config", "0-7", "exception", "Read the traceback"),
    Job("accelerate_gather", "0-7", "size_mismatch", "Compare the shapes"),
    Job("accelerate_no_state", "0-7", "missing_file", "shared file system"),
    Job("accelerate_early", "3", "exited_early", "drop_last or join()"),
    Job("accelerate_killed", "4", "killed", "dmesg"),
    Job("lightning_raises", "6", "exception", "Read the traceback"),
    Job("lightning_no_gpu", "0-7", "no_gpu", "nvidia-smi"),
    Job("lightning_devices", "0-7", "exception", "Read the traceback"),
    Job("lightning_nan", "1", "not_a_number", "lower the learning rate"),
    Job("lightning_no_checkpoint", "0-7", "missing_file", "shared file system"),
    Job("lightning_killed", "7", "killed", "dmesg"),
    Job("lightning_stops", "0", "stopped_responding", "its last lines"),
    Job("trainer_raises", "1", "exception", "Read the traceback"),
    Job("trainer_config", "0-7", "exception", "Read the traceback"),
    Job("trainer_no_checkpoint", "0-7", "missing_file", "shared file system"),
    Job("trainer_no_hub", "0-7", "remote_service", "reachable from that host"),
    Job("trainer_no_config", "4-7", "missing_file", "every host needs the file"),
    Job("trainer_killed", "5", "killed", "dmesg"),
    Job("trainer_disk_full", "0", "disk_full", "df -h"),
    Job("trainer_damaged", "3", "bad_file", "older checkpoint"),
    Job("jax_raises", "1", "exception", "Read the traceback"),
    Job("jax_killed", "6", "killed", "dmesg"),
    Job("jax_stops", "6", "stopped_responding", "its last lines"),
    Job("jax_never_joins", "7", "never_joined", "its last lines"),
    Job("jax_no_coordinator", "0", "never_joined", "its last lines"),
    Job("jax_early", "3", "exited_early", "same number of steps"),
    Job("jax_coordinator_exits", "0", "exited_early", "same number of steps"),
    Job("jax_no_gpu", "0-7", "no_gpu", "nvidia-smi"),
    Job("jax_platform", "0-7", "no_gpu", "nvidia-smi"),
    Job("jax_nan", "4", "not_a_number", "lower the learning rate"),
    Job("jax_shapes", "2", "shape_mismatch", "Compare the shapes"),
    Job("jax_memory", "2", "memory", "Use less memory"),
    Job("jax_port_taken", "0", "address_in_use", "ss -ltnp"),
    Job("jax_barrier", "2", "stopped_responding", "its last lines"),
)
