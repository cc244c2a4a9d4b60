"""Training that survives its workers: a dead one is replaced, the others keep their process, and no step is lost.

    tenax run --nproc-per-node 4 --max-restarts 3 examples/elastic/train.py --folder /tmp/elastic

Kill a worker (``kill -9 PID``; every rank prints its pid) and see the others continue at the same step. Needs torch;
runs on CPUs, with gloo. What is different from a script that starts again from its checkpoint:

1. The loop over ``elastic.generations()`` with ``with generation`` in it. The process group and
   ``DistributedDataParallel`` are made inside, because they belong to one generation; model and optimizer outside.
2. ``generation.agree`` before the first step: a new rank gets the state of a rank that has it.
3. The data of a step depends on the step and the rank only, so that a step can be repeated by another process.

``--chain`` prints a hash over the parameters after every step. It is the same with and without failures: each step was
applied exactly once.
"""
# ruff: noqa: T201 - a script that prints

from __future__ import annotations

import argparse
import hashlib
import os
import time
from pathlib import Path

import torch

# The first optimizer of a process imports this module, which takes a second. Here, the template does it (--preload).
import torch._dynamo
import torch.distributed as dist

# DDP imports this module too, but later, when a group exists. Its functions would keep that group as a default value.
import torch.distributed.nn.functional
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from tenax import elastic


def main() -> None:
    args = parse()
    torch.manual_seed(0)  # all ranks begin with the same weights
    model = torch.nn.Sequential(torch.nn.Linear(8, args.width), torch.nn.ReLU(), torch.nn.Linear(args.width, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    state = elastic.State(model=model, optimizer=optimizer, chain="", step=0)

    for generation in elastic.generations():
        with generation:
            dist.init_process_group("gloo")
            generation.agree(state, restore=lambda state: load(args.folder, state))
            print(f"rank {generation.rank} (pid {os.getpid()}): generation {generation.number}, step {state.step}")
            # find_unused_parameters makes the first step of a replica sum the gradients in the order of all others.
            replica = DistributedDataParallel(model, find_unused_parameters=args.chain)
            while state.step < args.steps:
                inputs = batch(state.step, generation.rank)
                optimizer.zero_grad()
                mse_loss(replica(inputs), inputs.pow(2).sum(dim=1, keepdim=True) / 8).backward()
                optimizer.step()  # from here to completed() the block is not interrupted
                state.step += 1
                if args.chain:
                    state.chain = link(state.chain, model)
                generation.completed(state.step)
                if state.step % args.save_every == 0 and generation.rank == 0:
                    with elastic.critical():
                        save(args.folder, state)
                time.sleep(args.step_seconds)
    print(f"rank {generation.rank} (pid {os.getpid()}) is done after step {state.step} {state.chain}")


def batch(step: int, rank: int) -> torch.Tensor:
    """Return this rank's part of the batch of a step, whichever process asks."""
    return torch.randn(32, 8, generator=torch.Generator().manual_seed(1_000_003 * step + rank))


def link(chain: str, model: torch.nn.Module) -> str:
    digest = hashlib.sha256(chain.encode())
    for value in model.state_dict().values():
        digest.update(value.numpy().tobytes())
    return digest.hexdigest()[:16]


def save(folder: Path, state: elastic.State) -> None:
    """For the case that no process has the state any more. Replaced atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "model": state.model.state_dict(),
        "optimizer": state.optimizer.state_dict(),
        "chain": state.chain,
        "step": state.step,
    }
    torch.save(content, folder / "checkpoint.new")
    (folder / "checkpoint.new").replace(folder / "checkpoint.pt")


def load(folder: Path, state: elastic.State) -> None:
    """Called on every rank if no process has the state."""
    if (folder / "checkpoint.pt").exists():
        content = torch.load(folder / "checkpoint.pt", weights_only=True)
        state.model.load_state_dict(content["model"])
        state.optimizer.load_state_dict(content["optimizer"])
        state.chain, state.step = content["chain"], content["step"]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True, help="folder of the checkpoint, shared by all nodes")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=64, help="of the network")
    parser.add_argument("--save-every", type=int, default=50, help="steps between two checkpoints")
    parser.add_argument("--step-seconds", type=float, default=0.05, help="added to every step")
    parser.add_argument("--chain", action="store_true", help="hash the parameters after every step")
    return parser.parse_args()


if __name__ == "__main__":
    main()
