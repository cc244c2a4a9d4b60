"""A small training job with torch: collectives over gloo on CPUs, with a checkpoint after every step.

    torch_train.py FOLDER [--steps N] [--step-s 0.05] [--check]

It continues from FOLDER/checkpoint.pt if that exists. Without ``--steps`` it trains until FOLDER/finish exists. Every
rank trains on the same batch, so the averaged gradient and the result do not depend on the number of ranks. ``--check``
trains the same steps again at the end, in one process, and exits with 4 if the parameters differ.

It averages the gradients itself: importing DDP takes as long as importing torch.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from tracing import GENERATION, RANK, WORLD_SIZE, Trace

LEARNING_RATE = 0.05
WRONG_RESULT = 4


def new_model() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Linear(4, 1, dtype=torch.float64)


def train_step(model: torch.nn.Module, step: int, average: Callable[[torch.Tensor], None] | None = None) -> None:
    """Do one step of gradient descent, without torch.optim, whose import is slow."""
    source = torch.Generator().manual_seed(step)
    inputs = torch.randn(8, 4, dtype=torch.float64, generator=source)
    (model(inputs).squeeze(1) - inputs.sum(1)).square().mean().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        if average is not None:
            average(parameter.grad)
        parameter.data -= LEARNING_RATE * parameter.grad
        parameter.grad = None


def average_over_ranks(gradient: torch.Tensor) -> None:
    dist.all_reduce(gradient)
    gradient /= WORLD_SIZE


def is_enough(step: int, wanted: int | None, folder: Path) -> bool:
    """Without a number of steps rank 0 decides: all ranks must stop after the same step."""
    if wanted is not None:
        return step >= wanted
    is_over = torch.tensor([(folder / "finish").exists()], dtype=torch.int64)
    dist.broadcast(is_over, 0)
    return bool(is_over.item())


def save(path: Path, step: int, model: torch.nn.Module) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}.temporary")
    torch.save({"step": step, "model": model.state_dict(), "generation": GENERATION}, temporary)
    os.replace(temporary, path)


def largest_difference(model: torch.nn.Module, steps: int) -> float:
    """Return the largest difference to the parameters of an uninterrupted run in one process."""
    alone = new_model()
    for step in range(1, steps + 1):
        train_step(alone, step)
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    return max(float((ours - theirs).abs().max()) for ours, theirs in pairs)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--step-s", type=float, default=0.05)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    trace = Trace(args.folder)
    trace.start()
    dist.init_process_group("gloo", init_method="env://")
    assert (dist.get_rank(), dist.get_world_size()) == (RANK, WORLD_SIZE)

    # Only rank 0 reads the checkpoint; the others receive the step and the parameters.
    checkpoint = args.folder / "checkpoint.pt"
    model = new_model()
    done = torch.zeros(1, dtype=torch.int64)
    if RANK == 0 and checkpoint.exists():
        state = torch.load(checkpoint)
        model.load_state_dict(state["model"])
        done[0] = state["step"]
    dist.broadcast(done, 0)
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    step = int(done.item())
    while not is_enough(step, args.steps, args.folder):
        step += 1
        train_step(model, step, average_over_ranks)
        if RANK == 0:
            save(checkpoint, step, model)
        trace.step(step)
        time.sleep(args.step_s)
    wanted = step if args.steps is None else args.steps
    if args.check and (difference := largest_difference(model, wanted)) > 1e-9:
        print(f"rank {RANK}: the parameters differ by {difference:g}", file=sys.stderr)
        return WRONG_RESULT
    dist.barrier()
    dist.destroy_process_group()
    trace.end(step)
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # torch 2.13 sometimes aborts in the interpreter's teardown
