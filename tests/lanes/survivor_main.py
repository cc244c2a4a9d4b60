"""A worker of the survivors' lane: it trains, reports each completed step, and does what it is commanded to.

    survivor_main.py torch|none CHECKPOINT

Reports to the socket LANE_HUB, as lines of JSON. A command is read before each step, and carried out in it.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import socket
import sys
import time
from pathlib import Path
from typing import Any

if sys.argv[1] == "torch":
    import torch
    import torch._dynamo
    import torch.distributed as dist
    import torch.distributed.nn.functional
    from torch.nn.parallel import DistributedDataParallel

from tenax import elastic

sys.path.insert(0, str(Path(__file__).parent))
from survivor_chain import WIDTH, gradient, link

UNIT = 1024  # a weight is a whole number of these parts: exact in floating point


class Hub:
    """The connection to the lane."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect("\0" + os.environ["LANE_HUB"])

    def report(self, **what: Any) -> None:
        self._socket.sendall(json.dumps({"pid": os.getpid(), "at": time.monotonic(), **what}).encode() + b"\n")

    def command(self) -> str:
        return self._socket.recv(100).decode().strip() if select.select([self._socket], [], [], 0)[0] else ""


def misbehave(command: str) -> None:
    """Do what a survivor must not do."""
    if command == "raise":
        raise ValueError("commanded to fail")
    if command == "exit":
        os._exit(3)
    if command == "deaf":
        with elastic.critical():
            time.sleep(1000)
    elif command == "in C":
        ctypes.PyDLL(None).sleep(1000)  # with the interpreter's lock: no other thread runs
    elif command == "loop":
        while True:
            try:
                while True:
                    pass
            except BaseException:
                continue
    elif command == "fork" and os.fork() == 0:
        time.sleep(1000)
        os._exit(0)


class Plain:
    """Sums through the workers' store."""

    def __init__(self) -> None:
        self.weights = [0] * WIDTH
        self.parts = {"weights": self.weights}

    def begin(self, generation: elastic.Generation) -> None:
        from tenax.store import TCPStore

        self._generation = generation
        self._store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))

    def update(self, state: elastic.State) -> None:
        mine, ranks = self._generation, self._generation.world_size
        keys = [f"{state.step}/{rank}" for rank in range(ranks)]
        self._store.set(keys[mine.rank], json.dumps(gradient(state.step, mine.rank, ranks)))
        parts = [json.loads(part) for part in self._store.multi_get(keys)]
        with elastic.critical():
            state.weights = [old - sum(part[at] for part in parts) for at, old in enumerate(state.weights)]
            state.chain = link(state.chain, state.weights)
            state.step += 1

    def whole(self, state: elastic.State) -> list[int]:
        return list(state.weights)

    def restore(self, state: elastic.State, weights: list[int]) -> None:
        state.weights = weights


class Torch:
    """DistributedDataParallel with gloo."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.model = torch.nn.Linear(WIDTH, 1, bias=False, dtype=torch.float64)
        torch.nn.init.zeros_(self.model.weight)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1 / UNIT)
        self.parts = {"model": self.model, "optimizer": self.optimizer}

    def begin(self, generation: elastic.Generation) -> None:
        self._generation = generation
        dist.init_process_group("gloo")

    def update(self, state: elastic.State) -> None:
        mine = self._generation
        if mine is not getattr(self, "_of", None):
            self._of, self._replica = mine, DistributedDataParallel(self.model)
        inputs = torch.tensor([gradient(state.step, mine.rank, mine.world_size)], dtype=torch.float64)
        (self._replica(inputs).sum() * mine.world_size).backward()  # which the replica divides again
        self.optimizer.step()
        self.optimizer.zero_grad()
        state.chain = link(state.chain, self.whole(state))
        state.step += 1

    def whole(self, state: elastic.State) -> list[int]:
        return [round(weight * UNIT) for weight in self.model.weight[0].tolist()]

    def restore(self, state: elastic.State, weights: list[int]) -> None:
        with torch.no_grad():
            self.model.weight[0] = torch.tensor(weights, dtype=torch.float64) / UNIT


def main() -> None:
    checkpoint = Path(sys.argv[2])
    hub = Hub()
    training: Plain | Torch = Torch() if sys.argv[1] == "torch" else Plain()
    state = elastic.State(**training.parts, chain="", step=0)
    has_restored = False
    limit = sys.maxsize

    def restore(state: elastic.State) -> None:
        nonlocal has_restored
        has_restored = True
        if checkpoint.exists():
            found = json.loads(checkpoint.read_text())
            state.step, state.chain = found["step"], found["chain"]
            training.restore(state, found["weights"])

    for generation in elastic.generations(timeout_s=2):
        has_restored = False
        with generation:
            training.begin(generation)
            generation.agree(state, restore=restore)
            reported = {"generation": generation.number, "rank": generation.rank, "world_size": generation.world_size}
            hub.report(**reported, begins=state.step, restored=has_restored, chain=state.chain)
            while state.step < limit:
                command = hub.command()
                if command.isdigit():
                    limit = int(command)
                elif command:
                    hub.report(**reported, obeys=command)
                    misbehave(command)
                training.update(state)
                hub.report(**reported, step=state.step, chain=state.chain)
                generation.completed(state.step)
                if generation.rank == 0 and state.step % 20 == 0:
                    with elastic.critical():
                        content = {"step": state.step, "chain": state.chain, "weights": training.whole(state)}
                        new = checkpoint.with_suffix(".new")
                        new.write_text(json.dumps(content))
                        new.replace(checkpoint)
                time.sleep(0.01)


if __name__ == "__main__":
    main()
