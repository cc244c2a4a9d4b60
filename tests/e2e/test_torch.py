"""Real torch: process groups, collectives and DDP under tenax, through restarts."""

from __future__ import annotations

import sys

from kit.jobs import Runner, holders, is_alive
from kit.processes import needs_torch

pytestmark = needs_torch

# A small training loop that saves its step; rank 1 is killed during the first DEATHS attempts.
TRAIN = """
    import os, signal, sys
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from worker_kit import *

    DEATHS, STEPS = map(int, sys.argv[1:])
    dist.init_process_group("gloo")
    assert (dist.get_rank(), dist.get_world_size()) == (RANK, WORLD)
    assert dist.is_torchelastic_launched()
    total = torch.tensor([float(RANK + 1)])
    dist.all_reduce(total)
    assert total.item() == WORLD * (WORLD + 1) / 2
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    saved = "checkpoint.pt"
    step = 0
    if os.path.exists(saved):
        state = torch.load(saved)
        step = state["step"]
        model.module.load_state_dict(state["model"])
    note("began", step)
    while step < STEPS:
        optimizer.zero_grad()
        model(torch.full((2, 4), float(RANK + step))).sum().backward()
        optimizer.step()
        step += 1
        if RANK == 0:
            torch.save({"step": step, "model": model.module.state_dict()}, saved + ".half")
            os.replace(saved + ".half", saved)
        dist.barrier()
        if RANK == 1 and ATTEMPT < DEATHS and step % 2 == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    gathered = [torch.zeros_like(weights) for _ in range(WORLD)]
    dist.all_gather(gathered, weights)
    assert all(torch.equal(weights, other) for other in gathered)
    dist.destroy_process_group()
    note("finished", step)
    os._exit(0)  # torch 2.13 aborts now and then while the interpreter takes it down, under any launcher and under none
"""


def test_ddp_training_survives_two_killed_workers(runner: Runner) -> None:
    """``init_process_group``, ``all_reduce`` and DDP work with the environment alone. A worker is killed in each of two
    attempts; each restart uses an empty store, and the third attempt finishes."""
    flags = ["--nproc-per-node", "2", "--max-restarts", "2", "--preload", "auto,torch._dynamo"]  # which DDP imports
    done = runner.run(*flags, runner.script(TRAIN), "2", "6")
    assert done.code == 0, done
    assert [runner.note("began", 0, attempt) for attempt in range(3)] == ["0", "2", "4"]
    assert [runner.note("finished", rank, attempt=2) for rank in range(2)] == ["6", "6"]
    deaths = [line for line in done.messages if "was killed by SIGKILL" in line]
    assert len(deaths) == 2
    assert all(line.startswith("rank 1 ") for line in deaths), deaths


def test_a_process_group_uses_the_store_of_the_agent(runner: Runner) -> None:
    """torch hosts none. After a restart the same process serves an empty store at another port."""
    script = runner.script(
        """
        import os
        import torch.distributed as dist
        from worker_kit import *

        dist.init_process_group("gloo")
        dist.barrier()
        dist.distributed_c10d._get_default_store().set(f"left behind by rank {RANK}", "value")
        note("met", f"{os.environ['TORCHELASTIC_USE_AGENT_STORE']} {os.environ['MASTER_PORT']}")
        ready()
        wait_for("go")
        if ATTEMPT == 0 and RANK == 1:
            os._exit(3)
        dist.barrier()
        dist.destroy_process_group()
        os._exit(0)  # see above
        """
    )
    job = runner.start("--nproc-per-node", "2", "--max-restarts", "1", script)
    stores, ports = [], []
    for attempt in range(2):
        workers = [int(runner.note("ready", rank, attempt)) for rank in range(2)]
        stores += runner.store_pids()
        used, port = runner.note("met", attempt=attempt).split()
        assert used == "True"
        assert holders(int(port), [*stores[-1:], *workers]) == stores[-1:]
        ports.append(port)
        for rank in range(2):
            runner.leave_note("go", rank, attempt)
    done = job.wait()
    assert done.code == 0, done
    assert len(stores) == 2
    assert len(set(stores)) == 1, "one process served both"
    assert len(set(ports)) == 2, "each at its own port"
    assert not is_alive(stores[0])


SHARES = """
    import torch
    from tenax.launcher import LaunchConfig, elastic_launch

    def work(shared):
        shared[0] += 1
        return torch.ones(300, 300)

    if __name__ == "__main__":
        shared = torch.zeros(1).share_memory_()
        values = elastic_launch(LaunchConfig(1, 1, 1, start_method="spawn"), work)(shared)
        print(shared.item(), values[0].sum().item())
"""


def test_tensors_are_shared_and_returned_as_by_torch_multiprocessing(runner: Runner) -> None:
    """A function worker changes the tensor that it was given, and returns a tensor."""
    done = runner.run(runner.script(SHARES, "shares.py"), program=[sys.executable])
    assert (done.code, done.out) == (0, "1.0 90000.0\n"), done
