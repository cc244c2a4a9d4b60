"""A complete training script: it resumes from its last checkpoint, also within an epoch and with any number of workers.

    tenax run --nnodes 1:4 --rdzv-endpoint host0 --max-restarts 3 examples/train_ddp.py --folder /shared/checkpoints

Needs torch. Runs on CPUs, with gloo; on GPUs use nccl and move model and batches to ``LOCAL_RANK``. It trains a small
network on synthetic data. What it does because nodes join, leave and fail:

1. Progress is counted in samples, and every epoch has one order, so the rest of an epoch can be distributed to any
   number of ranks (``RestOfEpoch``). The global batch always has the same size.
2. A checkpoint has the generation, the fencing token, in its name (``save``, ``latest``).
3. After each step all ranks agree whether any of them has a notice, and save together (``agree``).
4. SIGTERM after a notice means: save, then leave. SIGTERM without one means: leave now (``Request``).
5. The agent's watchdog ends a step that hangs, with TORCHELASTIC_ENABLE_FILE_TIMER=1 (``deadline``).
"""
# ruff: noqa: T201 - a script that prints

from __future__ import annotations

import argparse
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist

# DDP imports this module too, but later, when a group exists. Its functions would keep that group as a default value:
# gloo's threads would outlive the group, and may abort a process that has succeeded.
import torch.distributed.nn.functional
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, TensorDataset

from tenax import preemption, timer
from tenax.utils.data import ElasticDistributedSampler

SAVING_S = 20.0  # maximum time for all ranks to save; less than --shutdown-timeout
KEPT = 3  # checkpoints


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True, help="folder of the checkpoints, shared by all nodes")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=96, help="of all ranks together")
    parser.add_argument("--save-every", type=int, default=10, help="steps between two checkpoints")
    parser.add_argument("--step-seconds", type=float, default=60, help="the watchdog ends a step that takes longer")
    return parser.parse_args()


def make_dataset(samples: int, seed: int = 0) -> Dataset:
    """Return the same data on every rank and in every generation."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 8, generator=generator)
    return TensorDataset(inputs, inputs.pow(2).sum(dim=1, keepdim=True) / 8)


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))


def main(dataset: Dataset, held_out: Dataset, args: argparse.Namespace) -> None:
    request = Request()
    args.folder.mkdir(parents=True, exist_ok=True)
    dist.init_process_group("gloo")
    train(dataset, held_out, args, request)
    dist.destroy_process_group()  # after the model is gone: DDP must not hold the last reference to the group


# --- training ---------------------------------------------------------------------------------------------------------


class Training:
    """Everything that a checkpoint holds: weights, optimizer state and progress."""

    def __init__(self) -> None:
        self.model = DistributedDataParallel(make_model())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.9)
        self.step = 0
        self.epoch = 0  # from 0
        self.seen = 0  # samples of this epoch, by all ranks

    def state(self) -> dict:
        return {
            "model": self.model.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "epoch": self.epoch,
            "seen": self.seen,
        }

    def load(self, state: dict) -> None:
        self.model.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.epoch, self.seen = state["step"], state["epoch"], state["seen"]

    def learn(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        mse_loss(self.model(inputs), targets).backward()  # gradients are averaged over all ranks
        self.optimizer.step()

    def advance(self, batch: int, size: int) -> bool:
        """Count one step. Return whether it ended an epoch."""
        self.step += 1
        self.seen += batch
        if self.seen < size:
            return False
        self.epoch, self.seen = self.epoch + 1, 0
        return True


class RestOfEpoch(ElasticDistributedSampler):
    """This rank's share of the rest of an epoch, after ``start_index`` samples.

    The order is that of the whole epoch, wherever it starts: samples that any rank has seen are not repeated. In the
    base class ``start_index`` has another meaning: skip the first indices of the dataset, and shuffle the others.
    """

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(len(self.dataset), generator=torch.Generator().manual_seed(self.epoch))
        rest = order[self.start_index :]
        rest = rest.repeat(-(-self.total_size // len(rest)))[: self.total_size]  # the same number for every rank
        return iter(rest[self.rank :: self.num_replicas].tolist())


def batches_left(dataset: Dataset, training: Training, batch: int) -> DataLoader:
    ranks = dist.get_world_size()
    if batch % ranks:
        raise SystemExit(f"--batch {batch} is not a multiple of the {ranks} ranks; choose another --batch")
    sampler = RestOfEpoch(dataset, start_index=training.seen)
    sampler.set_epoch(training.epoch)
    return DataLoader(dataset, batch_size=batch // ranks, sampler=sampler)


def train(dataset: Dataset, held_out: Dataset, args: argparse.Namespace, request: Request) -> None:
    rank, generation = dist.get_rank(), preemption.generation()
    training = Training()
    load(args.folder, training)
    print(f"rank {rank} of {dist.get_world_size()}: generation {generation} continues after step {training.step}")

    has_saved_for_notice = must_leave = False
    while training.epoch < args.epochs and not must_leave:
        batches = batches_left(dataset, training, args.batch)
        samples = iter(batches)
        for _ in range(len(batches)):
            with deadline(args.step_seconds):  # loading included: a disk can hang as well
                training.learn(*next(samples))
                has_notice, must_leave = agree(request)
            has_ended_epoch = training.advance(args.batch, len(dataset))
            is_new_notice = has_notice and not has_saved_for_notice
            is_last = training.epoch == args.epochs
            if training.step % args.save_every == 0 or is_last or is_new_notice or must_leave:
                if rank == 0:
                    save(args.folder, training)
                dist.barrier()  # no rank leaves before it is saved
                has_saved_for_notice = has_notice
            if has_ended_epoch and rank == 0:
                print_epoch(training, held_out, args.epochs)
            if must_leave:
                print(f"rank {rank} leaves after step {training.step}")
                break


def print_epoch(training: Training, held_out: Dataset, epochs: int) -> None:
    (inputs, targets), *_ = DataLoader(held_out, batch_size=len(held_out))
    with torch.no_grad():
        loss = mse_loss(training.model.module(inputs), targets)
    print(f"epoch {training.epoch} of {epochs} is done at step {training.step}: loss {loss:.4f}")


# --- nodes join and leave ---------------------------------------------------------------------------------------------


def agree(request: Request) -> tuple[bool, bool]:
    """Return whether any rank has a notice, and whether any received SIGTERM: the same on every rank."""
    found = torch.tensor([preemption.notice() is not None, request.is_made], dtype=torch.int32)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return bool(found[0]), bool(found[1])


class Request:
    """A stop request (SIGTERM), received also while the main thread hangs in a collective with a lost peer.

    Python runs signal handlers in the main thread, and only between two bytecode instructions. So a thread waits for
    the signal. Without a notice there is nothing to save together: the process exits at once, as it would by default.
    """

    def __init__(self) -> None:
        self.is_made = False
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        signal.set_wakeup_fd(self._writer.fileno())
        signal.signal(signal.SIGTERM, lambda *_: None)
        threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        while signal.SIGTERM not in self._reader.recv(16):
            pass  # another signal that Python handles
        if preemption.notice() is not None:
            self.is_made = True
            time.sleep(SAVING_S)
        os._exit(128 + signal.SIGTERM)


def deadline(seconds: float) -> AbstractContextManager[None]:
    """Have the agent's watchdog, if it is on, end this process and report its stacks if the block takes too long."""
    if "TORCHELASTIC_TIMER_FILE" not in os.environ:
        return nullcontext()
    return timer.expires(seconds, "a step", timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))


# --- checkpoints ------------------------------------------------------------------------------------------------------


def save(folder: Path, training: Training) -> None:
    """Save atomically, under a name that no other generation uses. Call it on rank 0."""
    path = folder / f"generation-{preemption.generation():012d}-step-{training.step:09d}.pt"
    new = path.with_suffix(".new")
    with new.open("wb") as file:
        torch.save(training.state(), file)
        file.flush()
        os.fsync(file.fileno())  # a power failure must not leave a name without its content
    new.replace(path)
    for old in checkpoints(folder)[:-KEPT]:
        old.unlink(missing_ok=True)
    print(f"saved {path.name}")


def checkpoints(folder: Path) -> list[Path]:
    return sorted(folder.glob("generation-*.pt"))


def latest(folder: Path) -> Path | None:
    """Return the last checkpoint of the greatest generation: what a stale rank 0 wrote since then is ignored."""
    return max(checkpoints(folder), default=None)


def load(folder: Path, training: Training) -> None:
    """Load the checkpoint that rank 0 chooses, the same on all ranks."""
    chosen = [latest(folder)] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(chosen)
    if chosen[0] is not None:
        training.load(torch.load(chosen[0], weights_only=True))


if __name__ == "__main__":
    arguments = parse()
    main(make_dataset(arguments.samples), make_dataset(512, seed=1), arguments)
