"""The Trainer of transformers, which saves and resumes by itself.

tenax run --nnodes 2 --nproc-per-node 2 --max-restarts 3 hf_trainer.py /shared/folder
"""

import sys
from pathlib import Path

import torch
import torch.distributed.nn.functional  # before there is a group: its functions would keep that group alive
from task import Samples, fingerprint
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from tenax import progress


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict:
        outputs = self.layers(inputs)
        return {"loss": nn.functional.mse_loss(outputs, labels), "logits": outputs}


def collate(samples: list) -> dict:
    inputs, labels = torch.utils.data.default_collate(samples)
    return {"inputs": inputs, "labels": labels}


class ReportSteps(TrainerCallback):
    def on_step_end(self, _args, state, _control, **_) -> None:
        progress.step(state.global_step)


def main(folder: Path) -> None:
    torch.manual_seed(0)
    arguments = TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=2,
        per_device_train_batch_size=12,  # the samples of one step of one rank
        save_steps=4,
        learning_rate=0.01,
        use_cpu=True,  # with GPUs: leave these two out
        ddp_backend="gloo",
        disable_tqdm=True,
        report_to="none",
    )
    trainer = Trainer(Model(), arguments, data_collator=collate, train_dataset=Samples(), callbacks=[ReportSteps()])
    last = get_last_checkpoint(str(folder)) if folder.exists() else None
    trainer.train(resume_from_checkpoint=last)
    if trainer.is_world_process_zero():
        print("trained:", fingerprint(weight.numpy() for weight in trainer.model.state_dict().values()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    torch.distributed.destroy_process_group()
