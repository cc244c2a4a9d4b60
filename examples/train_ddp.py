"""A complete training script: it resumes where it was, in the middle of an epoch and with any number of workers.

    tenax run --nnodes 1:4 --rdzv-endpoint host0 --max-restarts 3 examples/train_ddp.py --folder /shared/checkpoints

Needs torch. Runs on CPUs, with gloo; on GPUs take nccl and put model and batches on ``LOCAL_RANK``. It trains a small
network on made-up data. What is in it because nodes come, go and fail:

1. Progress is counted in samples, and every epoch has one order, so what is left of an epoch can be dealt out anew to
   however many ranks there are now (``RestOfEpoch``). The batch of all ranks together always has the same size.
2. A checkpoint carries the generation, the fencing token, in its name (``save``, ``latest``).
3. After each step all ranks agree whether somebody has a notice, and save together (``wishes``).
4. SIGTERM after a notice means: leave when that is done. SIGTERM without one means: leave now (``Request``).
5. A step that hangs is ended by the agent, if it watches: TORCHELASTIC_ENABLE_FILE_TIMER=1 (``deadline``).
"""
# ruff: noqa: T201 - what it prints is what it is for

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

# DDP imports this one too, but later, when there is a group. Its functions have the group of that moment as a default
# value and would keep it: gloo's threads would outlive the group, and may abort a process that has ended well.
import torch.distributed.nn.functional
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, TensorDataset

from tenax import preemption, timer
from tenax.utils.data import ElasticDistributedSampler

SAVING_S = 20.0  # how long it may take until all have saved; less than --shutdown-timeout
KEPT = 3  # checkpoints


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True, help="where checkpoints go; all nodes see it")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=96, help="of all ranks together")
    parser.add_argument("--save-every", type=int, default=10, help="steps between two checkpoints")
    parser.add_argument("--step-seconds", type=float, default=60, help="a step that takes longer hangs")
    return parser.parse_args()


def make_dataset(samples: int, seed: int = 0) -> Dataset:
    """The same on every rank, whenever it is made."""
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
    dist.destroy_process_group()  # after the model is gone: the last one to let go of a group must not be DDP


# --- training ---------------------------------------------------------------------------------------------------------


class Training:
    """Everything that a checkpoint holds: the weights, the optimizer's memory, and how far we are."""

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
        """One step further. Whether that was the end of an epoch."""
        self.step += 1
        self.seen += batch
        if self.seen < size:
            return False
        self.epoch, self.seen = self.epoch + 1, 0
        return True


class RestOfEpoch(ElasticDistributedSampler):
    """This rank's share of what is left of an epoch after ``start_index`` samples.

    The order is that of the whole epoch, wherever we begin: what others have seen before us does not come again. Its
    base means another thing by ``start_index``: leave out the first indices of the dataset, and shuffle the others.
    """

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(len(self.dataset), generator=torch.Generator().manual_seed(self.epoch))
        rest = order[self.start_index :]
        rest = rest.repeat(-(-self.total_size // len(rest)))[: self.total_size]  # the same number for every rank
        return iter(rest[self.rank :: self.num_replicas].tolist())


def batches_left(dataset: Dataset, training: Training, batch: int) -> DataLoader:
    ranks = dist.get_world_size()
    if batch % ranks:
        raise SystemExit(f"a batch of {batch} cannot be dealt out to {ranks} ranks; choose --batch accordingly")
    sampler = RestOfEpoch(dataset, start_index=training.seen)
    sampler.set_epoch(training.epoch)
    return DataLoader(dataset, batch_size=batch // ranks, sampler=sampler)


def train(dataset: Dataset, held_out: Dataset, args: argparse.Namespace, request: Request) -> None:
    rank, generation = dist.get_rank(), preemption.generation()
    training = Training()
    load(args.folder, training)
    print(f"rank {rank} of {dist.get_world_size()}: generation {generation} goes on after step {training.step}")

    has_saved_for_notice = must_leave = False
    while training.epoch < args.epochs and not must_leave:
        batches = batches_left(dataset, training, args.batch)
        ahead = iter(batches)
        for _ in range(len(batches)):
            with deadline(args.step_seconds):  # loading included: a disk can hang as well
                training.learn(*next(ahead))
                has_notice, must_leave = wishes(request)
            has_ended_epoch = training.advance(args.batch, len(dataset))
            is_new_notice = has_notice and not has_saved_for_notice
            is_last = training.epoch == args.epochs
            if training.step % args.save_every == 0 or is_last or is_new_notice or must_leave:
                if rank == 0:
                    save(args.folder, training)
                dist.barrier()  # no rank leaves before it is saved
                has_saved_for_notice = has_notice
            if has_ended_epoch and rank == 0:
                tell(training, held_out, args.epochs)
            if must_leave:
                print(f"rank {rank} leaves after step {training.step}")
                break


def tell(training: Training, held_out: Dataset, epochs: int) -> None:
    """The line at the end of an epoch."""
    (inputs, targets), *_ = DataLoader(held_out, batch_size=len(held_out))
    with torch.no_grad():
        loss = mse_loss(training.model.module(inputs), targets)
    print(f"epoch {training.epoch} of {epochs} is done at step {training.step}: loss {loss:.4f}")


# --- nodes come and go ------------------------------------------------------------------------------------------------


def wishes(request: Request) -> tuple[bool, bool]:
    """Whether any rank has a notice, and whether any was asked to leave: the same answer on every rank."""
    wish = torch.tensor([preemption.notice() is not None, request.is_made], dtype=torch.int32)
    dist.all_reduce(wish, dist.ReduceOp.MAX)
    return bool(wish[0]), bool(wish[1])


class Request:
    """A request to end (SIGTERM), seen also while the main thread hangs in a collective with somebody who is gone.

    Python runs signal handlers in the main thread, and only between two of its own instructions. So a thread waits for
    the signal. Without a notice there is nothing to save together: the process ends at once, as it would by default.
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
    """If the agent watches, it ends this process should it not leave the block in time, and says where it hung."""
    if "TORCHELASTIC_TIMER_FILE" not in os.environ:
        return nullcontext()
    return timer.expires(seconds, "a step", timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))


# --- checkpoints ------------------------------------------------------------------------------------------------------


def save(folder: Path, training: Training) -> None:
    """Under a name that no other generation uses, in one move. For rank 0."""
    path = folder / f"generation-{preemption.generation():06d}-step-{training.step:09d}.pt"
    new = path.with_suffix(".new")
    with new.open("wb") as file:
        torch.save(training.state(), file)
        file.flush()
        os.fsync(file.fileno())  # the name must not outlive the content when the power fails
    new.replace(path)
    for old in checkpoints(folder)[:-KEPT]:
        old.unlink(missing_ok=True)
    print(f"saved {path.name}")


def checkpoints(folder: Path) -> list[Path]:
    return sorted(folder.glob("generation-*.pt"))


def latest(folder: Path) -> Path | None:
    """The last one of the greatest generation: what a stale rank 0 wrote since then is not looked at."""
    return max(checkpoints(folder), default=None)


def load(folder: Path, training: Training) -> None:
    """Rank 0 chooses, so that all load the same."""
    chosen = [latest(folder)] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(chosen)
    if chosen[0] is not None:
        training.load(torch.load(chosen[0], weights_only=True))


if __name__ == "__main__":
    asked = parse()
    main(make_dataset(asked.samples), make_dataset(512, seed=1), asked)
