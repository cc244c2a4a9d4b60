"""A data-parallel training loop that can survive its peers; the same script for every launcher.

usage: survivor_worker.py EVENTS DEVICE CHECKPOINT MODE

DEVICE
  cpu   gloo on the CPU
  cuda  gloo, with model, optimizer and gradients on the GPU
MODE
  elastic  survive, if the launcher supports it
  restart  start again from the checkpoint, as a script without `tenax.elastic` does
  cost     measure what `tenax.elastic` adds to a step, then go on as elastic

Events are written as in `torch_worker.py`: "start" after the first completed step of each generation, with the step in
place of the node; "lost" after each agreement, with the number of steps that this process had and lost; "cost" with
nanoseconds.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.nn.functional
from torch.nn.parallel import DistributedDataParallel

from tenax import elastic

sys.path.insert(0, str(Path(__file__).parent))
from torch_worker import stamp

LIFE_S = 300
STEP_S = 0.02  # pause after each step, for a machine with fewer cores than workers
SAVE_EVERY = 10
CALLS = 20_000


def main() -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(LIFE_S)
    path, device, checkpoint, mode = sys.argv[1:]
    events = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if mode == "restart":
        os.environ.pop("TENAX_ELASTIC_FD", None)
    torch.manual_seed(0)
    width = 64 if device == "cpu" else 1024
    model = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.ReLU(), torch.nn.Linear(width, 1)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    state = elastic.State(model=model, optimizer=optimizer, step=0)
    is_survivor = False

    def restore(state: elastic.State) -> None:
        if Path(checkpoint).exists():
            found = torch.load(checkpoint, weights_only=True)
            model.load_state_dict(found["model"])
            optimizer.load_state_dict(found["optimizer"])
            state.step = found["step"]

    def note(name: str, number: int, at_ns: int = 0) -> None:
        os.environ["BENCH_NODE"] = str(number)
        stamp(events, at_ns or time.monotonic_ns(), name)

    for generation in elastic.generations():
        with generation:
            dist.init_process_group("gloo")
            had = state.step
            generation.agree(state, restore=restore)
            if is_survivor:
                note("lost", max(0, had - state.step))
            is_survivor = True
            replica = DistributedDataParallel(model)
            is_first = True
            if mode == "cost" and generation.number == 1:
                note("cost", cost_ns(generation, state))
            while True:
                optimizer.zero_grad()
                replica(torch.randn(32, 8, device=device)).square().mean().backward()
                optimizer.step()
                if device == "cuda":
                    torch.cuda.synchronize()
                state.step += 1
                generation.completed(state.step)
                if is_first:
                    note("start", state.step)
                    is_first = False
                if generation.rank == 0 and state.step % SAVE_EVERY == 0:
                    with elastic.critical():
                        save(checkpoint, state)
                time.sleep(STEP_S)


def save(checkpoint: str, state: elastic.State) -> None:
    content = {"model": state.model.state_dict(), "optimizer": state.optimizer.state_dict(), "step": state.step}
    torch.save(content, checkpoint + ".new")
    Path(checkpoint + ".new").replace(checkpoint)


def cost_ns(generation: elastic.Generation, state: elastic.State) -> int:
    """Return what the hook of an optimizer step and `completed` take, in nanoseconds of CPU time."""
    worker = generation._worker
    began = time.thread_time_ns()
    for _ in range(CALLS):
        if worker is not None:
            worker.begin_update()
        generation.completed(state.step)
    return (time.thread_time_ns() - began) // CALLS


if __name__ == "__main__":
    main()
