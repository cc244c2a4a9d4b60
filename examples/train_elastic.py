"""A training loop for nodes that come, go and are taken away: it loses no step that it need not lose.

    tenax run --nnodes 1:4 --rdzv-endpoint host0 --max-restarts 3 examples/train_elastic.py --folder /shared/checkpoints

Needs torch. Runs on CPUs, with gloo; on GPUs take nccl and put the model on ``LOCAL_RANK``. Three things in it are for
tenax; the rest is any training loop:

1. After each step all ranks agree whether somebody has a notice, and save together (``wishes``).
2. SIGTERM after a notice means: leave when that is done. SIGTERM without one means: leave now (``Request``).
3. A checkpoint carries the generation, the fencing token, in its name (``save``, ``latest``).
"""
# ruff: noqa: T201 - what it prints is what it is for

from __future__ import annotations

import argparse
import os
import signal
import socket
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tenax import preemption

SAVING_S = 20.0  # how long it may take until all have saved; less than --shutdown-timeout


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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True, help="where checkpoints go; all nodes see it")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--seconds-per-step", type=float, default=0.05)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)

    request = Request()
    dist.init_process_group("gloo")
    rank, generation = dist.get_rank(), preemption.generation()
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    step = load(args.folder, model, optimizer)
    print(f"rank {rank} of {dist.get_world_size()}: generation {generation} goes on after step {step}", flush=True)

    has_saved_for_notice = False
    while step < args.steps:
        loss = model(torch.randn(8, 4)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        time.sleep(args.seconds_per_step)

        has_notice, must_leave = wishes(request)
        is_new_notice = has_notice and not has_saved_for_notice
        if step % args.save_every == 0 or step == args.steps or is_new_notice or must_leave:
            if rank == 0:
                save(args.folder, step, model, optimizer)
            dist.barrier()  # nobody leaves before it is there
            has_saved_for_notice = has_notice
        if must_leave:
            print(f"rank {rank} leaves after step {step}", flush=True)
            break
    dist.destroy_process_group()


def wishes(request: Request) -> tuple[bool, bool]:
    """Whether any rank has a notice, and whether any was asked to leave: the same answer on every rank."""
    wish = torch.tensor([preemption.notice() is not None, request.is_made], dtype=torch.int32)
    dist.all_reduce(wish, dist.ReduceOp.MAX)
    return bool(wish[0]), bool(wish[1])


# --- checkpoints ------------------------------------------------------------------------------------------------------


def save(folder: Path, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Under a name that no other generation uses, in one move."""
    path = folder / f"generation-{preemption.generation():06d}-step-{step:09d}.pt"
    new = path.with_suffix(".new")
    torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, new)
    new.replace(path)
    print(f"saved {path.name}", flush=True)


def latest(folder: Path) -> Path | None:
    """The last one of the greatest generation: what a stale rank 0 wrote since then is not looked at."""
    return max(folder.glob("generation-*.pt"), default=None)


def load(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """The step after which to go on. Rank 0 chooses, so that all load the same."""
    chosen = [latest(folder)] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(chosen)
    if chosen[0] is None:
        return 0
    saved = torch.load(chosen[0], weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return int(saved["step"])


if __name__ == "__main__":
    main()
