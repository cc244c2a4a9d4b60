"""DDP, with a checkpoint in one file.

tenax run --nnodes 2 --nproc-per-node 2 --max-restarts 3 ddp.py /shared/folder
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before there is a group: its functions would keep that group alive
from task import Samples, fingerprint
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from tenax import progress
from tenax.data import ResumableBatches

EPOCHS, BATCH, SAVE_EVERY = 2, 48, 4  # BATCH: the samples of one step of all ranks


def main(checkpoint: Path) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    dataset = Samples()
    batches = ResumableBatches(len(dataset), BATCH)
    epoch = step = 0
    if checkpoint.exists():  # all ranks see the same file: it is replaced only after a step that all have made
        state = torch.load(checkpoint, weights_only=True)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        epoch, step = state["epoch"], state["step"]
        print(f"resumed at epoch {epoch}, step {step}")
    while epoch < EPOCHS:
        batches.resume(epoch, step)
        for inputs, targets in DataLoader(dataset, batch_sampler=batches):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            step += 1
            progress.step(epoch * batches.steps + step)
            if step % SAVE_EVERY == 0 and dist.get_rank() == 0:
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
                save({**state, "epoch": epoch, "step": step}, checkpoint)
        epoch, step = epoch + 1, 0
    if dist.get_rank() == 0:
        print("trained:", fingerprint(weight.numpy() for weight in model.module.state_dict().values()))


def save(state: dict, path: Path) -> None:
    """Replace the checkpoint atomically: a worker that is killed while it writes leaves the previous one."""
    new = path.with_suffix(".new")
    torch.save(state, new)
    os.replace(new, path)


if __name__ == "__main__":
    dist.init_process_group("gloo")  # with GPUs: "nccl", and torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    main(Path(sys.argv[1]) / "checkpoint.pt")
    dist.destroy_process_group()
