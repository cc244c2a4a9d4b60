"""The jobs of ``./dev hangs``, with real torch: in a shape one rank stops, the healthy ones never do.

``hang_jobs.py SHAPE NOTE``: trains for a while, then the last rank but one writes the time to ``NOTE`` and stops.
``hang_jobs.py HEALTHY SECONDS HANG_AFTER``: behaves for so long as a job that is easily taken for a hanging one.
"""

from __future__ import annotations

import datetime
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from tenax import progress

_TRAIN_S = 15.0  # before a rank stops
_BATCH = 8
_WIDTH = 64


def read_from_a_lost_disk() -> None:
    threading.Event().wait()


def small_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(_WIDTH, _WIDTH), torch.nn.ReLU(), torch.nn.Linear(_WIDTH, 1))


def batches() -> Iterator[torch.Tensor]:
    while True:
        yield torch.randn(_BATCH, _WIDTH)


def odd_rank() -> int:
    return max(0, dist.get_world_size() - 2)


class Stop:
    """Whether it is time to stop: the same step for all ranks, and the odd one writes when that was."""

    def __init__(self, note: str) -> None:
        self._note = note
        self._until = time.monotonic() + _TRAIN_S

    def is_due(self) -> bool:
        is_over = torch.tensor(float(time.monotonic() > self._until))
        dist.broadcast(is_over, 0)
        return bool(is_over)

    def stop_if_odd(self) -> None:
        if dist.get_rank() == odd_rank():
            Path(self._note).write_text(f"{time.time()} {dist.get_rank()}")
            read_from_a_lost_disk()


# --- shapes: one rank stops -------------------------------------------------------------------------------------------


def collective(note: str) -> None:
    """All ranks reduce the gradients by hand."""
    reduce_by_hand(note, [None])


def two_groups(note: str) -> None:
    """The same over two groups, each with a thread that wakes up 100 times a second."""
    reduce_by_hand(note, [dist.new_group(), dist.new_group()])


def reduce_by_hand(note: str, groups: list[dist.ProcessGroup | None]) -> None:
    model, stop = small_model(), Stop(note)
    for batch in batches():
        model.zero_grad()
        model(batch).sum().backward()
        for number, parameter in enumerate(model.parameters()):
            dist.all_reduce(parameter.grad, group=groups[number % len(groups)])
        if stop.is_due():
            stop.stop_if_odd()


def ddp(note: str) -> None:
    """The others wait in the backward pass."""
    from torch.nn.parallel import DistributedDataParallel

    train(DistributedDataParallel(small_model()), note, batches())


def fsdp2(note: str) -> None:
    """The others wait in the forward pass, for the parameters of the one that stopped."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = small_model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[0], model[2]):  # type: ignore[index]
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(model, note, batches())


class Shards(torch.utils.data.IterableDataset[torch.Tensor]):
    """Data of which one rank gets no more once the note exists."""

    def __init__(self, note: str, is_odd: bool) -> None:
        self._note, self._is_odd = note, is_odd

    def __iter__(self) -> Iterator[torch.Tensor]:
        for batch in batches():
            if self._is_odd and Path(self._note).exists():
                read_from_a_lost_disk()
            yield batch


def data_loader(note: str) -> None:
    """One rank waits for a worker process of its DataLoader, the others for that rank."""
    from torch.nn.parallel import DistributedDataParallel

    is_odd = dist.get_rank() == odd_rank()
    loader = torch.utils.data.DataLoader(Shards(note, is_odd), batch_size=None, num_workers=2, prefetch_factor=2)
    model, stop = DistributedDataParallel(small_model()), Stop(note)
    for batch in loader:
        model.zero_grad()
        model(batch).sum().backward()
        if stop.is_due() and is_odd and not Path(note).exists():
            Path(note).write_text(f"{time.time()} {dist.get_rank()}")


def train(model: torch.nn.Module, note: str, data: Iterator[torch.Tensor]) -> None:
    optimizer, stop = torch.optim.SGD(model.parameters(), 0.01), Stop(note)
    for batch in data:
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
        if stop.is_due():
            stop.stop_if_odd()


SHAPES: dict[str, Callable[[str], None]] = {
    "collective": collective,
    "ddp": ddp,
    "two-groups": two_groups,
    "fsdp2": fsdp2,
    "data-loader": data_loader,
}


# --- healthy jobs -----------------------------------------------------------------------------------------------------


class Healthy:
    """A job of all ranks: the kinds differ in what happens between two steps. All pauses are shorter than a hang."""

    def __init__(self, seconds: float, hang_after_s: float) -> None:
        self._until = time.monotonic() + seconds
        self._max_s = 0.8 * hang_after_s
        self._chance = random.Random()  # of rank 0, who decides for all
        self._model = small_model()
        self._step = 0

    def drawn(self, low: float, high: float) -> float:
        """Return the same number between these limits on all ranks."""
        number = torch.tensor(self._chance.uniform(low, high))
        dist.broadcast(number, 0)
        return float(number)

    def step(self, reports: bool) -> None:
        for parameter in self._model.parameters():
            parameter.grad = torch.randn_like(parameter)
            dist.all_reduce(parameter.grad)
        self._step += 1
        if reports:
            progress.step(self._step)

    def continues(self) -> bool:
        is_on = torch.tensor(float(time.monotonic() < self._until))
        dist.broadcast(is_on, 0)
        return bool(is_on)

    def steps_for(self, seconds: float, reports: bool = False) -> None:
        until = time.monotonic() + seconds
        while self.drawn(0, 1) >= 0 and self._all(time.monotonic() < until):
            self.step(reports)
            time.sleep(0.02)

    def _all(self, is_true: bool) -> bool:
        number = torch.tensor(float(is_true))
        dist.broadcast(number, 0)
        return bool(number)

    def slow(self) -> None:
        """Steps of very different length, one rank behind the others, and reported."""
        time.sleep(self.drawn(0.1, self._max_s) * (1 if dist.get_rank() else 0.2))
        self.step(reports=True)

    def bursty(self) -> None:
        """Many steps, then nothing at all."""
        self.steps_for(self.drawn(1, 0.3 * self._max_s))
        time.sleep(self.drawn(0.1, self._max_s))

    def reading(self) -> None:
        """Rank 0 reads files slowly, the others wait for it."""
        until = time.monotonic() + self.drawn(1, 3 * self._max_s)
        while not dist.get_rank() and time.monotonic() < until:
            for path in Path(torch.__file__).parent.glob("*.py"):
                path.read_bytes()
            time.sleep(0.5)
        self.step(reports=False)

    def compiling(self) -> None:
        """Rank 0 waits for a compiler for a long time, the others for rank 0."""
        until = time.monotonic() + self.drawn(1, 3 * self._max_s)
        source = Path(os.__file__).parent / "json"
        with tempfile.TemporaryDirectory() as folder:
            while not dist.get_rank() and time.monotonic() < until:
                compile_all = [sys.executable, "-m", "compileall", "-q", "-f", str(source)]
                subprocess.run(compile_all, check=True, env={**os.environ, "PYTHONPYCACHEPREFIX": folder})
        self.steps_for(self.drawn(1, 0.3 * self._max_s))

    def checkpointing(self) -> None:
        """Reported steps, then rank 0 writes for longer than a hang takes."""
        self.steps_for(self.drawn(1, 0.3 * self._max_s), reports=True)
        until = time.monotonic() + self.drawn(1, 2 * self._max_s)
        if not dist.get_rank():
            with tempfile.TemporaryFile() as file:
                while time.monotonic() < until:
                    file.seek(0)
                    file.write(os.urandom(1 << 20))
                    file.flush()
                    time.sleep(0.1)
        dist.barrier()

    def idle(self) -> None:
        """A line now and then, and a step rarely: it waits for requests."""
        print("waiting for requests", flush=True)
        time.sleep(self.drawn(0.5, self._max_s))

    def run(self, kind: str) -> None:
        while self.continues():
            getattr(self, kind)()


HEALTHY = ("slow", "bursty", "reading", "compiling", "checkpointing", "idle")


def main() -> None:
    kind, *arguments = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=30))
    if kind in SHAPES:
        SHAPES[kind](*arguments)
    else:
        Healthy(*map(float, arguments)).run(kind)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
