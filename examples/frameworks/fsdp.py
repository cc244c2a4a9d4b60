"""FSDP2 (fully_shard), with a distributed checkpoint that every rank writes a part of.

tenax run --nnodes 2 --nproc-per-node 2 --max-restarts 3 fsdp.py /shared/folder
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.nn.functional  # before there is a group: its functions would keep that group alive
from task import Samples, fingerprint
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from tenax import preemption, progress
from tenax.data import ResumableBatches

EPOCHS, BATCH, SAVE_EVERY = 2, 48, 4  # BATCH: the samples of one step of all ranks


def main(folder: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))  # with GPUs: "cuda"
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    dataset = Samples()
    batches = ResumableBatches(len(dataset), BATCH)
    epoch, step = load(folder, model, optimizer)
    while epoch < EPOCHS:
        batches.resume(epoch, step)
        for inputs, targets in DataLoader(dataset, batch_sampler=batches):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            step += 1
            progress.step(epoch * batches.steps + step)
            if step % SAVE_EVERY == 0:
                save(folder, model, optimizer, epoch, step)
        epoch, step = epoch + 1, 0
    weights = [weight.full_tensor() for weight in get_model_state_dict(model).values()]  # on all ranks together
    if dist.get_rank() == 0:
        print("trained:", fingerprint(weight.numpy() for weight in weights))


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, epoch: int, step: int) -> None:
    """Save under a name that sorts after those of earlier generations. The file .metadata marks it as complete."""
    weights, moments = get_state_dict(model, optimizer)
    name = f"{preemption.generation():012d}-{epoch:06d}-{step:09d}"
    dcp.save({"model": weights, "optimizer": moments, "epoch": epoch, "step": step}, checkpoint_id=folder / name)


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """Load the last complete checkpoint, which rank 0 chooses."""
    chosen = [max((file.parent for file in folder.glob("*/.metadata")), default=None)]
    dist.broadcast_object_list(chosen)
    if chosen[0] is None:
        return 0, 0
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "epoch": 0, "step": 0}
    dcp.load(state, checkpoint_id=chosen[0])
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    print(f"resumed at epoch {state['epoch']}, step {state['step']}")
    return state["epoch"], state["step"]


if __name__ == "__main__":
    dist.init_process_group("gloo")  # with GPUs: "nccl", and torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    main(Path(sys.argv[1]))
    dist.destroy_process_group()
