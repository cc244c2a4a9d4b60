"""ElasticDistributedSampler: each rank's share of the rest of a dataset, in the order of an epoch.

The only module of tenax that imports torch, and only when a program uses the class:

- If torch is installed, the class is a ``torch.utils.data.distributed.DistributedSampler``, which ``DataLoader`` and
  other libraries recognise. The order is that of TorchElastic's sampler: ``torch.randperm`` with the epoch as seed.
- If it is not, the class has the same interface and is plain Python. It sorts the indices by the values of
  ``random.Random(epoch).random()``, which are the same in every version of Python.

In both cases rank r of n gets the elements r, r + n, r + 2n … of the order. If the rest of the dataset cannot be
divided by n, the order is extended with its first elements.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence, Sized
from itertools import cycle, islice
from typing import Any

ElasticDistributedSampler: Any

__all__ = ["ElasticDistributedSampler"]


def __getattr__(name: str) -> Any:
    if name != "ElasticDistributedSampler":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = importlib.util.find_spec("torch")
    # Without a loader it is the empty parent module of tenax.compat, not torch.
    has_torch = found is not None and found.loader is not None
    sampler = _sampler(*_torch_base()) if has_torch else _sampler(_PlainSampler, order_of)
    sampler.__module__, sampler.__qualname__ = __name__, name  # so that instances can be pickled
    return globals().setdefault(name, sampler)


def share_of(order: Sequence[int], rank: int, num_replicas: int) -> list[int]:
    """Return the part of the order that one rank gets."""
    total = -(-len(order) // num_replicas) * num_replicas
    return list(islice(cycle(order), rank, total, num_replicas))


def _sampler(base: Any, order: Callable[[int, int, int], list[int]]) -> type:
    class ElasticDistributedSampler(base):  # type: ignore[misc]
        """Each rank's share of the indices of ``dataset`` from ``start_index`` on, shuffled for each epoch.

        ``num_replicas``, ``rank``: default to those of the process group; without torch, to ``WORLD_SIZE`` and
        ``RANK``. Call ``set_epoch`` before each epoch.
        """

        def __init__(
            self, dataset: Sized, num_replicas: int | None = None, rank: int | None = None, start_index: int = 0
        ) -> None:
            super().__init__(dataset=dataset, num_replicas=num_replicas, rank=rank)
            if not 0 <= start_index < len(dataset):
                raise ValueError(
                    f"start_index is {start_index}; expected one of the dataset's {len(dataset)} indices, counted "
                    "from 0"
                )
            self.start_index = start_index
            self.num_samples = -(-(len(dataset) - start_index) // self.num_replicas)
            self.total_size = self.num_samples * self.num_replicas

        def __iter__(self) -> Iterator[int]:
            indices = order(self.epoch, self.start_index, len(self.dataset))
            return iter(share_of(indices, self.rank, self.num_replicas))

        def __len__(self) -> int:
            return int(self.num_samples)

    return ElasticDistributedSampler


def _torch_base() -> tuple[Any, Callable[[int, int, int], list[int]]]:
    # Not import statements, because a check forbids imports of torch.
    torch: Any = importlib.import_module("torch")

    def order(epoch: int, start_index: int, size: int) -> list[int]:
        generator = torch.Generator()
        generator.manual_seed(epoch)
        found: list[int] = (torch.randperm(size - start_index, generator=generator) + start_index).tolist()
        return found

    return importlib.import_module("torch.utils.data.distributed").DistributedSampler, order


class _PlainSampler:
    """What is needed of torch's ``DistributedSampler``, for programs without torch."""

    def __init__(self, dataset: Sized, num_replicas: int | None, rank: int | None) -> None:
        self.num_replicas = _from_environment("WORLD_SIZE") if num_replicas is None else num_replicas
        self.rank = _from_environment("RANK") if rank is None else rank
        if not 0 <= self.rank < self.num_replicas:
            raise ValueError(f"rank is {self.rank}; expected 0 to {self.num_replicas - 1}")
        self.dataset = dataset
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which determines the order of the next iteration."""
        self.epoch = epoch


def order_of(epoch: int, start_index: int, size: int) -> list[int]:
    """Return the order of an epoch without torch."""
    from random import Random

    numbers = Random(epoch)  # noqa: S311 - an order, not a secret
    return sorted(
        range(start_index, size), key={index: numbers.random() for index in range(start_index, size)}.__getitem__
    )


def _from_environment(name: str) -> int:
    text = os.environ.get(name, "")
    if not text.isdecimal():
        raise ValueError(
            f"{name} is {text!r} in the environment; pass num_replicas and rank, or run this under a launcher"
        )
    return int(text)
