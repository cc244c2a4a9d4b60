"""Accelerate, with its own checkpoints. `tenax run` replaces `accelerate launch`.

tenax run --nnodes 2 --nproc-per-node 2 --max-restarts 3 with_accelerate.py /shared/folder
"""

import sys
from pathlib import Path

import torch
import torch.distributed.nn.functional  # before there is a group: its functions would keep that group alive
from accelerate import Accelerator
from accelerate.utils import set_seed
from task import Samples, fingerprint
from torch import nn
from torch.utils.data import DataLoader

from tenax import preemption, progress

EPOCHS, BATCH, SAVE_EVERY = 2, 12, 4  # BATCH: the samples of one step of one rank


def main(folder: Path) -> None:
    accelerator = Accelerator(cpu=True)  # with GPUs: Accelerator()
    set_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loader = DataLoader(Samples(), batch_size=BATCH, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    position = Position()
    accelerator.register_for_checkpointing(position)
    load(folder, accelerator)
    while position.epoch < EPOCHS:
        loader.set_epoch(position.epoch)
        for inputs, targets in accelerator.skip_first_batches(loader, position.step):
            optimizer.zero_grad()
            accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
            position.step += 1
            progress.step(position.epoch * len(loader) + position.step)
            if position.step % SAVE_EVERY == 0:
                save(folder, accelerator, position)
        position.epoch, position.step = position.epoch + 1, 0
    if accelerator.is_main_process:
        weights = accelerator.unwrap_model(model).state_dict().values()
        print("trained:", fingerprint(weight.numpy() for weight in weights))
    model, optimizer, loader = accelerator.free_memory(model, optimizer, loader)  # DDP before the process group
    accelerator.end_training()


class Position:
    """Where the training is. Accelerate saves it with the rest."""

    epoch = step = 0  # completed steps of this epoch

    def state_dict(self) -> dict:
        return {"epoch": self.epoch, "step": self.step}

    def load_state_dict(self, state: dict) -> None:
        self.epoch, self.step = state["epoch"], state["step"]


def save(folder: Path, accelerator: Accelerator, position: Position) -> None:
    """Save under another name and rename it when all ranks have written: a name without .new is complete."""
    path = folder / f"{preemption.generation():012d}-{position.epoch:06d}-{position.step:09d}"
    accelerator.save_state(str(path.with_suffix(".new")))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        path.with_suffix(".new").rename(path)


def load(folder: Path, accelerator: Accelerator) -> None:
    """Load the last complete checkpoint. All ranks find the same: none is written before all have passed this."""
    path = max((path for path in folder.glob("0*") if path.suffix != ".new"), default=None)
    accelerator.wait_for_everyone()
    if path is not None:
        accelerator.load_state(str(path))
        print(f"resumed from {path.name}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
