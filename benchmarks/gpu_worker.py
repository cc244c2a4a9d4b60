"""A small data-parallel training script on a GPU: stamps its first step, and kills itself DEATHS times.

Usage: gpu_worker.py FILE DEATHS BACKEND. Each stamp is a line "event restarts rank nanoseconds" (CLOCK_MONOTONIC).
"""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    path, deaths, backend = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    restarts, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])

    def stamp(event: str) -> None:
        with open(path, "a") as file:
            file.write(f"{event} {restarts} {rank} {time.monotonic_ns()}\n")

    stamp("main")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group(backend)
    model = DistributedDataParallel(torch.nn.Linear(1024, 1024).cuda())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.randn(64, 1024, device="cuda")).square().mean().backward()
        optimizer.step()
        torch.cuda.synchronize()
        if step == 0:
            stamp("step")
    dist.barrier()
    if restarts < deaths:
        if rank == 0:
            stamp("die")
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()
    dist.destroy_process_group()


main()
