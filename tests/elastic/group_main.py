"""Three forked ranks that train with torch and gloo, and the agent's part of their generations.

    python group_main.py [cuda]

torch is imported once, before the forks. Trains twice, undisturbed and with a fault in each generation, and prints one
JSON object: the digest of the final state of every rank, and what happened in the disturbed training.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import signal
import socket
import sys
import time

import torch
import torch._dynamo  # each rank would import it for its optimizer
import torch.distributed as dist
import torch.distributed.nn.functional
from torch.nn.parallel import DistributedDataParallel

from tenax import elastic
from tenax.store import TCPStore

RANKS = 3
STEPS = 12
FAULTS = ("killed", "stopped", "exception in the optimizer")  # of rank 2, in generations 1, 2, 3
AT = (3, 6, 9)  # during this step
DEVICE = sys.argv[1] if len(sys.argv) > 1 else "cpu"


class Model(torch.nn.Module):
    """BatchNorm sees what all ranks see: its statistics are the same on all of them. The rest sees a rank's own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))

    def forward(self, shared: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        return self.layers(torch.cat([self.norm(shared), own], dim=1))

    def reset(self) -> None:
        for layer in (self.norm, self.layers[0], self.layers[2]):
            layer.reset_parameters()


def numbers(seed: int) -> torch.Tensor:
    return torch.randn(16, 4, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def train(rank: int, output: int, faults: tuple[str, ...]) -> None:
    torch.manual_seed(rank)  # each rank begins with other weights: agree has to make them equal
    model = Model().to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    if rank == 2 and faults:
        optimizer.register_step_post_hook(lambda *_: fail_in_optimizer(faults, state.step, output))
    state = elastic.State(model=model, optimizer=optimizer, losses=[], step=0)
    report = {"pid": os.getpid(), "generations": [], "restored": 0}

    def restore(state: elastic.State) -> None:
        report["restored"] += 1
        torch.manual_seed(0)
        model.reset()

    for generation in elastic.generations():
        with generation:
            dist.init_process_group("gloo")
            generation.agree(state, restore=restore)
            report["generations"].append([generation.number, state.step, generation.why])
            # Otherwise a replica sums the gradients of its first step in another order than those of later steps.
            replica = DistributedDataParallel(model, find_unused_parameters=True)
            while state.step < STEPS:
                fault = fault_of(generation.number, state.step, faults) if rank == 2 else ""
                loss = replica(numbers(state.step), numbers(1000 * (rank + 1) + state.step)).pow(2).mean()
                if fault == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                if fault == "stopped":
                    os.write(output, b"stopping\n")
                    os.kill(os.getpid(), signal.SIGSTOP)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()  # here, so that gradients of a step that was cut would be added to the next
                state.losses.append(loss.item() if rank == 0 else 0.0)
                state.step += 1
                generation.completed(state.step)
    digest = hashlib.sha256()
    for value in [*model.state_dict().values(), *(each for s in optimizer.state.values() for each in s.values())]:
        digest.update(value.cpu().numpy().tobytes())
    os.write(output, json.dumps(report | {"digest": digest.hexdigest(), "losses": len(state.losses)}).encode() + b"\n")


def fault_of(generation: int, step: int, faults: tuple[str, ...]) -> str:
    return faults[generation - 1] if generation <= len(faults) and step == AT[generation - 1] else ""


def fail_in_optimizer(faults: tuple[str, ...], step: int, output: int) -> None:
    if fault_of(int(os.environ["TENAX_GENERATION"]), step, faults) == "exception in the optimizer":
        os.write(output, b"failing\n")
        raise ConnectionResetError("in the middle of an update")


class Rank:
    """One forked rank, and the agent's end of its channel."""

    def __init__(self, rank: int, env: dict[str, str], faults: tuple[str, ...]) -> None:
        self.socket, theirs = socket.socketpair()
        reader, writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            self.socket.close()
            os.environ.update(env | {"RANK": str(rank), "TENAX_ELASTIC_FD": str(theirs.detach())})
            try:
                train(rank, writer, faults)
            except BaseException:
                import traceback

                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        theirs.close()
        os.close(writer)
        self.output = os.fdopen(reader, "rb")
        self.messages = self.socket.makefile("rb")
        self.expect("opt_in")

    def send(self, **message: object) -> None:
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def expect(self, kind: str) -> None:
        readable, _, _ = select.select([self.socket], [], [], 30)
        line = self.messages.readline() if readable else b"nothing within 30 s"
        if not line or json.loads(line)["type"] != kind:
            raise SystemExit(f"expected {kind}: {line!r}")

    def end(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def env_of(generation: int, store: TCPStore) -> dict[str, str]:
    return {
        "WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(generation - 1),
        "TENAX_GENERATION": str(generation),
        "TENAX_GENERATION_REASON": f"restart {generation - 1}",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }


def run(faults: tuple[str, ...]) -> tuple[list[dict[str, object]], list[float]]:
    """Return what the ranks report, and how long after each end all survivors were held."""
    stores = [TCPStore("127.0.0.1", 0, is_master=True)]
    ranks = [Rank(rank, env_of(1, stores[0]), faults) for rank in range(RANKS)]
    held_s = []
    for generation, fault in enumerate(faults, 1):
        if fault == "killed":
            os.waitpid(ranks[2].pid, 0)
        else:
            assert ranks[2].output.readline() in (b"stopping\n", b"failing\n")
        survivors = ranks if fault.startswith("exception") else ranks[:2]
        began = time.monotonic()
        for each in survivors:
            each.send(type="end", generation=generation, why=f"rank 2 was {fault}")
        for each in survivors:
            each.expect("held")
        held_s.append(time.monotonic() - began)
        if fault == "stopped":
            ranks[2].end()
        stores.append(TCPStore("127.0.0.1", 0, is_master=True))
        env = env_of(generation + 1, stores[-1])
        for rank, each in enumerate(survivors):
            each.send(type="begin", generation=generation + 1, env=env | {"RANK": str(rank)})
            each.expect("opt_in")
        if len(survivors) < RANKS:
            ranks[2] = Rank(2, env, faults)
    reports = [json.loads(each.output.readline()) for each in ranks]
    for each in ranks:
        assert os.waitpid(each.pid, 0)[1] == 0
    return reports, held_s


if __name__ == "__main__":
    torch.set_num_threads(1)
    signal.alarm(270)
    undisturbed, _ = run(())
    disturbed, held_s = run(FAULTS)
    json.dump({"undisturbed": undisturbed, "disturbed": disturbed, "held_s": held_s}, sys.stdout)
