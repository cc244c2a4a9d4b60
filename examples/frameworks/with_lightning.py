"""Lightning, which saves after every epoch and resumes from the last checkpoint.

tenax run --nnodes 2 --nproc-per-node 2 --max-restarts 3 with_lightning.py /shared/folder
"""

import os
import sys
from pathlib import Path

import lightning
import torch
import torch.distributed.nn.functional  # before there is a group: its functions would keep that group alive
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from task import Samples, fingerprint
from torch import nn
from torch.utils.data import DataLoader

from tenax import progress


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))

    def training_step(self, batch: list, _: int) -> torch.Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(self.layers(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


class ReportSteps(Callback):
    def on_train_batch_end(self, trainer: lightning.Trainer, *_) -> None:
        progress.step(trainer.global_step)


def main(folder: Path) -> None:
    lightning.seed_everything(0)
    saving = ModelCheckpoint(folder, save_last=True, every_n_epochs=1, save_on_train_epoch_end=True)
    trainer = lightning.Trainer(
        max_epochs=5,
        accelerator="cpu",  # with GPUs: leave it out
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        strategy="ddp",
        callbacks=[saving, ReportSteps()],
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
    )
    loader = DataLoader(Samples(192), batch_size=12, shuffle=True)  # the samples of one step of one rank
    model = Model()
    trainer.fit(model, loader, ckpt_path="last")
    if trainer.is_global_zero:
        print("trained:", fingerprint(weight.numpy() for weight in model.state_dict().values()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    torch.distributed.destroy_process_group()
