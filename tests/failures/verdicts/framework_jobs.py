"""A worker of the corpus that fails in a real framework: gloo, DDP, FSDP2, Accelerate, Lightning, HF Trainer or JAX.

    framework_jobs.py JOB ROOT

``JOB`` names a function below; ``ROOT`` is the rank that fails, or -1 if several do. ``VERDICT_FOLDER`` is a folder for
files, ``VERDICT_PORT`` a free port of this host. Everything runs on CPUs.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from datetime import timedelta
from pathlib import Path

import seeded

FOLDER = Path(os.environ.get("VERDICT_FOLDER", "."))
RANK = int(os.environ.get("RANK", "0"))
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
NODE = int(os.environ.get("GROUP_RANK", "0"))
JOB, ROOT = sys.argv[1], int(sys.argv[2])
IS_ROOT = RANK == ROOT
JOIN_S, WAIT_S = 120, 15  # the longer one for forming a group on a busy machine
STEPS, BAD_STEP = 4, 2


# --- gloo -------------------------------------------------------------------------------------------------------------


def join(timeout_s: float = JOIN_S):
    from torch import distributed

    distributed.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    return distributed


def joined_with_short_timeout():
    """Join with a long timeout, and return a group of all ranks with a short one."""
    import torch

    distributed = join()
    group = distributed.new_group(timeout=timedelta(seconds=WAIT_S))
    distributed.all_reduce(torch.ones(1), group=group)
    return distributed, group


def gloo_never_joins() -> None:
    if IS_ROOT:
        print("downloading the tokenizer", flush=True)
        seeded.forever()
    join(WAIT_S)


def gloo_monitored_barrier() -> None:
    distributed = join()
    distributed.barrier()
    if IS_ROOT:
        seeded.forever()
    distributed.monitored_barrier(timeout=timedelta(seconds=WAIT_S), wait_all_ranks=True)


def gloo_collectives() -> None:
    """Rank ROOT calls another collective; torch compares them if TORCH_DISTRIBUTED_DEBUG is DETAIL."""
    import torch

    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    torch.distributed.set_debug_level_from_env()  # torch may have been imported before
    distributed = join()
    x = torch.ones(4)
    if IS_ROOT:
        distributed.broadcast(x, 0)
    else:
        distributed.all_reduce(x)


def gloo_deadlock() -> None:
    """One rank calls another collective, which torch does not notice: all wait for each other."""
    import torch

    distributed, group = joined_with_short_timeout()
    if RANK == 5:
        distributed.broadcast(torch.ones(4), 0, group=group)
    distributed.all_reduce(torch.ones(4), group=group)


def gloo_port_taken() -> None:
    """Without tenax's store, rank 0 listens at a port that its own helper already has."""
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", os.environ["VERDICT_PORT"]
    if RANK == 0:
        taken = socket.create_server(("", int(os.environ["VERDICT_PORT"])))
        assert taken
    join(WAIT_S)


def gloo_unknown_host() -> None:
    if NODE == 1:
        os.environ["MASTER_ADDR"] = "head-node.invalid"
    join(WAIT_S)


def gloo_nccl() -> None:
    from torch import distributed

    distributed.init_process_group("nccl")


def gloo_pickle() -> None:
    distributed = join()
    gathered = [None] * WORLD
    distributed.all_gather_object(gathered, (lambda x: x) if IS_ROOT else "metrics")


def gloo_early() -> None:
    import torch

    distributed = join()
    for step in range(STEPS):
        distributed.all_reduce(torch.ones(4))
        if IS_ROOT and step == BAD_STEP:
            os._exit(0)


def gloo_terminated() -> None:
    import torch

    distributed = join()
    distributed.all_reduce(torch.ones(4))
    if IS_ROOT:
        seeded.by_signal(signal.SIGTERM)
    distributed.all_reduce(torch.ones(4))


def gloo_receive() -> None:
    """Rank 0 waits for a message of the root, the others for rank 0."""
    import torch

    distributed, group = joined_with_short_timeout()
    if IS_ROOT:
        seeded.forever()
    if RANK == 0:
        distributed.recv(torch.zeros(4), src=ROOT, group=group)
    distributed.all_reduce(torch.ones(4), group=group)


# --- DDP --------------------------------------------------------------------------------------------------------------


def network():
    from torch import nn

    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


def train_with_ddp(before_step=lambda step: None, *, model=None, group=None, loader=None, optimizer_step=True) -> None:
    """Train with DDP; ``before_step`` fails in the root."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    if group is None:
        join()
    model = DistributedDataParallel(model or network(), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batches = loader or [torch.randn(2, 8) for _ in range(STEPS)]
    for step, batch in enumerate(batches):
        replaced = before_step(step)
        loss = model(batch if replaced is None else replaced).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        if optimizer_step:
            optimizer.step()
    torch.distributed.barrier(group)


def at_bad_step(fail):
    """Return a function for ``train_with_ddp`` that calls this in the root."""

    def before_step(step: int):
        return fail() if IS_ROOT and step == BAD_STEP else None

    return before_step


def ddp_raises() -> None:
    train_with_ddp(at_bad_step(lambda: {}["learning_rate"]))


def ddp_unused() -> None:
    import torch

    class Branches(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = torch.nn.Linear(8, 4), torch.nn.Linear(8, 4)

        def forward(self, x):
            return self.used(x)

    train_with_ddp(model=Branches())


def ddp_other_model() -> None:
    from torch import nn

    train_with_ddp(model=nn.Linear(8, 5 if IS_ROOT else 4))


def ddp_uneven() -> None:
    import torch

    train_with_ddp(loader=[torch.randn(2, 8) for _ in range(STEPS - 2 if IS_ROOT else STEPS)], before_step=leave_early)


def leave_early(step: int) -> None:
    if IS_ROOT and step == STEPS - 3:
        sys.stdout.flush()
        os._exit(0)


def ddp_nan_loss() -> None:
    import math

    def fail() -> None:
        loss = math.nan
        if not math.isfinite(loss):
            raise ValueError(f"loss is {loss} at step {BAD_STEP}, stopping training")

    train_with_ddp(at_bad_step(fail))


def ddp_anomaly() -> None:
    """Autograd's anomaly detection finds the NaN in one rank's backward."""
    import torch

    class Root(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 4)

        def forward(self, x):
            return (self.layer(x) * 0).sqrt() if IS_ROOT else self.layer(x)

    with torch.autograd.detect_anomaly():
        train_with_ddp(model=Root())


def ddp_no_checkpoint() -> None:
    """Only the first node has the checkpoint."""
    import torch

    join()
    path = FOLDER / f"node{NODE}" / "step-500.pt"
    if NODE == 0:
        path.parent.mkdir(exist_ok=True)
        if RANK == 0:
            torch.save(network().state_dict(), path)
        torch.distributed.barrier(torch.distributed.new_group([0, 1, 2, 3]))
    torch.load(path)
    torch.distributed.barrier()


def ddp_state_dict() -> None:
    import torch

    model = network()
    model.load_state_dict(torch.nn.Sequential(torch.nn.Linear(8, 8)).state_dict())


def ddp_damaged_checkpoint() -> None:
    import torch

    def fail() -> None:
        path = FOLDER / "step-500.pt"
        torch.save(network().state_dict(), path)
        path.write_bytes(path.read_bytes()[:-300])
        torch.load(path)

    train_with_ddp(at_bad_step(fail))


class Batches:
    """A dataset that fails in a process of the data loader."""

    def __init__(self, fail=lambda: None) -> None:
        self.fail = fail

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int):
        import torch

        if IS_ROOT and index == BAD_STEP:
            self.fail()
        return torch.randn(8)


def train_with_loader(fail, **options) -> None:
    import torch

    options = {"num_workers": 1, **options} if IS_ROOT else {}
    train_with_ddp(loader=torch.utils.data.DataLoader(Batches(fail), **options))


def ddp_loader_killed() -> None:
    train_with_loader(lambda: os.kill(os.getpid(), signal.SIGKILL))


def ddp_loader_raises() -> None:
    train_with_loader(lambda: {}["image"])


def ddp_loader_segfault() -> None:
    train_with_loader(seeded.segmentation_fault)


def ddp_loader_not_picklable() -> None:
    train_with_loader(lambda: None, multiprocessing_context="spawn")


def ddp_no_gpu() -> None:
    train_with_ddp(model=network().to("cuda"))


def ddp_stops() -> None:
    _, group = joined_with_short_timeout()
    train_with_ddp(at_bad_step(seeded.forever), group=group)


def ddp_disk_full() -> None:
    import torch

    def fail() -> None:
        folder = seeded.mount_tmpfs("size=64k")
        torch.save(torch.ones(1 << 20), (folder or Path("/dev")) / ("step-500.pt" if folder else "full"))

    train_with_ddp(at_bad_step(fail))


def ddp_too_many_files() -> None:
    import resource

    import torch

    def fail() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (60, 60))
        list(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(200, 4)), num_workers=1))

    train_with_ddp(at_bad_step(fail))


def ddp_shared_memory() -> None:
    """The processes of the data loader share batches of 4 MiB through a /dev/shm of 64 KiB."""
    import torch

    def fail() -> None:
        import ctypes

        libc = ctypes.CDLL(None, use_errno=True)
        assert seeded.mount_tmpfs("size=64k") is not None, "needs root"
        assert not libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=64k")
        list(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 1 << 20)), num_workers=1))

    train_with_ddp(at_bad_step(fail))


def ddp_memory() -> None:
    import torch

    train_with_ddp(at_bad_step(lambda: torch.ones(1 << 44)))


def ddp_memory_of_numpy() -> None:
    import resource

    import numpy as np

    def fail() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))
        np.ones(1 << 32)

    train_with_ddp(at_bad_step(fail))


def ddp_out_of_memory() -> None:
    train_with_ddp(at_bad_step(seeded.out_of_memory))


def ddp_interrupted() -> None:
    train_with_ddp(at_bad_step(seeded.interrupted))


def ddp_shapes() -> None:
    import torch

    train_with_ddp(at_bad_step(lambda: torch.randn(2, 9)))


def ddp_missing_module() -> None:
    if NODE == 1:
        import flash_attention_of_another_image  # type: ignore[import-not-found]  # noqa: F401
    train_with_ddp()


def ddp_label() -> None:
    import torch

    train_with_ddp(at_bad_step(lambda: torch.nn.functional.cross_entropy(torch.randn(2, 4), torch.tensor([1, 9]))))


def ddp_killed() -> None:
    train_with_ddp(at_bad_step(lambda: os.kill(os.getpid(), signal.SIGKILL)))


def ddp_segfault() -> None:
    train_with_ddp(at_bad_step(seeded.segmentation_fault))


def ddp_assert() -> None:
    train_with_ddp(at_bad_step(seeded.assertion))


# --- FSDP2 ------------------------------------------------------------------------------------------------------------


def train_with_fsdp(before_step=lambda step: None, timeout_s: float = JOIN_S) -> None:
    import torch

    model = sharded(timeout_s)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(STEPS):
        before_step(step)
        model(torch.randn(2, 8)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.distributed.barrier()


def sharded(timeout_s: float = JOIN_S):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    join(timeout_s)
    mesh = init_device_mesh("cpu", (WORLD,))
    model = network()
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fsdp_killed() -> None:
    train_with_fsdp(at_bad_step(lambda: os.kill(os.getpid(), signal.SIGKILL)))


def fsdp_raises() -> None:
    train_with_fsdp(at_bad_step(lambda: [].pop()))


def fsdp_stops() -> None:
    train_with_fsdp(at_bad_step(seeded.forever), timeout_s=2 * WAIT_S)


def fsdp_uneven() -> None:
    train_with_fsdp(leave_early)


def fsdp_no_checkpoint() -> None:
    from torch.distributed import checkpoint

    model = sharded()
    checkpoint.load({"model": model.state_dict()}, checkpoint_id=FOLDER / "step-500")


def fsdp_missing_key() -> None:
    """The model has a parameter that the checkpoint does not have."""
    import torch
    from torch.distributed import checkpoint

    model = sharded()
    checkpoint.save({"model": model.state_dict()}, checkpoint_id=FOLDER / "step-500")
    checkpoint.load({"model": {**model.state_dict(), "head.weight": torch.ones(4)}}, checkpoint_id=FOLDER / "step-500")


def fsdp_disk_full() -> None:
    """The disk of one rank is full when all save a checkpoint."""
    import torch
    from torch.distributed import checkpoint

    (FOLDER / "mounted").mkdir(exist_ok=True)
    model = sharded()
    if IS_ROOT:
        assert seeded.mount_tmpfs("size=4k") is not None, "needs root"
        (FOLDER / "mounted" / "step-500").mkdir()
    torch.distributed.barrier()
    checkpoint.save({"model": model.state_dict()}, checkpoint_id=FOLDER / "mounted" / "step-500")


def fsdp_no_gpu() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    fully_shard(network(), mesh=init_device_mesh("cuda", (WORLD,)))


# --- Accelerate -------------------------------------------------------------------------------------------------------


def train_with_accelerate(before_step=lambda step: None, **options) -> None:
    import torch
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, **options)
    model = network()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(2 * STEPS * WORLD, 8)), 2)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
    for step, (batch,) in enumerate(loader):
        replaced = before_step(step)
        loss = model(batch if replaced is None else replaced).pow(2).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.wait_for_everyone()


def accelerate_raises() -> None:
    train_with_accelerate(at_bad_step(lambda: int("eight")))


def accelerate_deepspeed() -> None:
    from accelerate import DeepSpeedPlugin

    train_with_accelerate(deepspeed_plugin=DeepSpeedPlugin(zero_stage=2))


def accelerate_config() -> None:
    train_with_accelerate(mixed_precision="half")


def accelerate_gather() -> None:
    """Gather tensors of different shapes, with Accelerate's own check."""
    import torch

    os.environ["ACCELERATE_DEBUG_MODE"] = "1"
    from accelerate import Accelerator

    Accelerator(cpu=True).gather(torch.ones(3 if RANK == 0 else 2))


def accelerate_no_state() -> None:
    from accelerate import Accelerator

    Accelerator(cpu=True).load_state(str(FOLDER / "step-500"))


def accelerate_early() -> None:
    train_with_accelerate(leave_early)


def accelerate_killed() -> None:
    train_with_accelerate(at_bad_step(lambda: os.kill(os.getpid(), signal.SIGKILL)))


# --- Lightning --------------------------------------------------------------------------------------------------------


def train_with_lightning(before_step=lambda step: None, *, trainer=None, weight=1.0, timeout_s=JOIN_S, **fit) -> None:
    import lightning.pytorch as pl
    import torch
    from lightning.pytorch.strategies import DDPStrategy

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 4)

        def training_step(self, batch, index: int):
            replaced = before_step(index)
            result = self.layer(batch[0] if replaced is None else replaced)
            return (result * weight).sqrt().sum() if weight == 0 else result.pow(2).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    data = torch.utils.data.TensorDataset(torch.randn(2 * STEPS * WORLD, 8))
    settings = {
        "accelerator": "cpu",
        "devices": WORLD // 2,
        "num_nodes": 2,
        "strategy": DDPStrategy(process_group_backend="gloo", timeout=timedelta(seconds=timeout_s)),
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": FOLDER,
        **(trainer or {}),
    }
    pl.Trainer(**settings).fit(Module(), torch.utils.data.DataLoader(data, 2), **fit)


def lightning_raises() -> None:
    train_with_lightning(at_bad_step(lambda: {}["image"]))


def lightning_no_gpu() -> None:
    train_with_lightning(trainer={"accelerator": "gpu"})


def lightning_devices() -> None:
    """The script asks for two workers per node, the command line started four."""
    train_with_lightning(trainer={"devices": 2})


def lightning_nan() -> None:
    train_with_lightning(trainer={"detect_anomaly": True}, weight=0 if IS_ROOT else 1.0)


def lightning_no_checkpoint() -> None:
    train_with_lightning(ckpt_path=str(FOLDER / "step-500.ckpt"))


def lightning_killed() -> None:
    train_with_lightning(at_bad_step(lambda: os.kill(os.getpid(), signal.SIGKILL)))


def lightning_stops() -> None:
    train_with_lightning(at_bad_step(seeded.forever), timeout_s=2 * WAIT_S)


# --- HF Trainer -------------------------------------------------------------------------------------------------------


def train_with_trainer(before_step=lambda step: None, resume=None, **options) -> None:
    import torch
    from transformers import Trainer, TrainingArguments

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 4)
            self.step = -1

        def forward(self, x):
            self.step += 1
            before_step(self.step)
            return {"loss": self.layer(x).pow(2).mean()}

    arguments = TrainingArguments(
        **{
            "output_dir": str(FOLDER / "out"),
            "use_cpu": True,
            "ddp_backend": "gloo",
            "report_to": [],
            "max_steps": STEPS,
            "per_device_train_batch_size": 2,
            "save_strategy": "no",
            "disable_tqdm": True,
            **options,
        }
    )
    data = [{"x": torch.randn(8)} for _ in range(2 * STEPS * WORLD)]
    Trainer(Model(), arguments, train_dataset=data).train(resume_from_checkpoint=resume)


def trainer_raises() -> None:
    train_with_trainer(at_bad_step(lambda: {}["labels"]))


def trainer_config() -> None:
    train_with_trainer(load_best_model_at_end=True, eval_strategy="steps", eval_steps=2, save_strategy="epoch")


def trainer_no_checkpoint() -> None:
    train_with_trainer(resume=str(FOLDER / "checkpoint-500"))


def trainer_no_hub() -> None:
    """The model is on the hub, which cannot be reached."""
    os.environ["HF_ENDPOINT"] = f"http://127.0.0.1:{os.environ['VERDICT_PORT']}"
    from transformers import AutoModel

    AutoModel.from_pretrained("an-organization/a-model")


def trainer_no_config() -> None:
    """On one node the folder of the model is empty."""
    from transformers import AutoConfig, BertConfig

    join()
    folder = FOLDER / f"model{NODE}"
    if RANK % (WORLD // 2) == 0:
        folder.mkdir()
        if NODE == 0:
            BertConfig().save_pretrained(folder)
    import torch

    torch.distributed.barrier()
    AutoConfig.from_pretrained(folder)
    torch.distributed.barrier()


def trainer_killed() -> None:
    train_with_trainer(at_bad_step(lambda: os.kill(os.getpid(), signal.SIGKILL)))


def trainer_disk_full() -> None:
    """The disk is full when rank 0 saves a checkpoint."""
    if IS_ROOT:
        assert seeded.mount_tmpfs("size=4k") is not None, "needs root"
    train_with_trainer(output_dir=str(FOLDER / "mounted"), save_strategy="steps", save_steps=2)


def trainer_damaged() -> None:
    import torch
    from safetensors.torch import load_file, save_file

    def fail() -> None:
        path = FOLDER / "model.safetensors"
        save_file({"weight": torch.ones(8)}, path)
        path.write_bytes(path.read_bytes()[:-16])
        load_file(path)

    train_with_trainer(at_bad_step(fail))


# --- JAX --------------------------------------------------------------------------------------------------------------


def join_jax(timeout_s: int = JOIN_S, heartbeat_s: int = 100):
    import jax

    jax.distributed.initialize(
        f"127.0.0.1:{os.environ['VERDICT_PORT']}",
        WORLD,
        RANK,
        initialization_timeout=timeout_s,
        heartbeat_timeout_seconds=heartbeat_s,
        shutdown_timeout_seconds=WAIT_S,  # a rank that raises waits for the others before it exits
    )
    return jax


def train_with_jax(fail, heartbeat_s: int = 100) -> None:
    """All ranks add up a gradient; the root fails in between."""
    jax = join_jax(heartbeat_s=heartbeat_s)
    from jax.experimental import multihost_utils

    for step in range(STEPS):
        if IS_ROOT and step == BAD_STEP:
            fail(jax)
        multihost_utils.sync_global_devices(f"step {step}")


def jax_raises() -> None:
    train_with_jax(lambda jax: {}["learning_rate"])


def jax_killed() -> None:
    train_with_jax(lambda jax: os.kill(os.getpid(), signal.SIGKILL))


def jax_stops() -> None:
    """The whole process of the root is stopped, so that it sends no heartbeats."""
    train_with_jax(lambda jax: os.kill(os.getpid(), signal.SIGSTOP), heartbeat_s=WAIT_S)


def jax_never_joins() -> None:
    """JAX does not name the missing task. It is known if all others time out, so they begin at the same time."""
    if IS_ROOT:
        print("downloading the tokenizer", flush=True)
        seeded.forever()
    from tenax.store import PrefixStore, TCPStore

    store = PrefixStore("job", TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
    store.barrier("the others", WORLD - 1, timeout=JOIN_S)
    join_jax(WAIT_S)


def jax_no_coordinator() -> None:
    """Rank 0, which serves the coordinator, does not call initialize."""
    jax_never_joins()


def jax_early() -> None:
    train_with_jax(lambda jax: os._exit(0), heartbeat_s=WAIT_S)


def jax_coordinator_exits() -> None:
    jax_early()


def jax_no_gpu() -> None:
    import jax

    jax.devices("gpu")


def jax_platform() -> None:
    """JAX without its GPU plug-in is asked for a GPU by its configuration: it raises an assertion without a text."""
    import jax

    jax.config.update("jax_platforms", "cuda")
    jax.numpy.ones(4)


def jax_nan() -> None:
    def fail(jax) -> None:
        jax.config.update("jax_debug_nans", True)
        jax.numpy.zeros(4) / 0.0

    train_with_jax(fail)


def jax_shapes() -> None:
    train_with_jax(lambda jax: jax.numpy.ones((2, 8)) @ jax.numpy.ones((9, 4)))


def jax_memory() -> None:
    train_with_jax(lambda jax: jax.numpy.ones(1 << 44).block_until_ready())


def jax_port_taken() -> None:
    if RANK == 0:
        taken = socket.create_server(("", int(os.environ["VERDICT_PORT"])))
        assert taken
    join_jax(WAIT_S)


def jax_barrier() -> None:
    """The root does not come to a barrier of the coordination service."""
    jax = join_jax()
    from jax._src import distributed

    jax.devices()
    if IS_ROOT:
        seeded.forever()
    distributed.global_state.client.wait_at_barrier("checkpoint", timeout_in_ms=WAIT_S * 1000)


if __name__ == "__main__":
    globals()[JOB]()
