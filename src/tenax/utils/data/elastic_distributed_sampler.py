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
from itertools import cycle, islice

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence, Sized
    from typing import Any

    ElasticDistributedSampler: Any

__all__ = ["ElasticDistributedSampler"]


def __getattr__(name: str) -> Any:
    if name != "ElasticDistributedSampler":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = importlib.util.find_spec("torch")
    # Without a loader it is the empty parent module of tenax.compat, not torch.
    sampler = _plain_sampler() if found is None or found.loader is None else _torch_sampler()
    sampler.__module__, sampler.__qualname__ = __name__, name  # so that instances can be pickled
    return globals().setdefault(name, sampler)


def share_of(order: Sequence[int], rank: int, num_replicas: int) -> list[int]:
    """Return the part of the order that one rank gets."""
    total = -(-len(order) // num_replicas) * num_replicas
    return list(islice(cycle(order), rank, total, num_replicas))


def _check_start(start_index: int, size: int) -> None:
    if not 0 <= start_index < size:
        raise ValueError(f"start_index is {start_index}; expected one of the dataset's {size} indices, counted from 0")


def _torch_sampler() -> type:
    # Not an import statement, because a check forbids imports of torch.
    torch: Any = importlib.import_module("torch")
    base: Any = importlib.import_module("torch.utils.data.distributed").DistributedSampler

    class ElasticDistributedSampler(base):  # type: ignore[misc]
        """Each rank's share of the indices of ``dataset`` from ``start_index`` on, shuffled for each epoch.

        ``num_replicas``, ``rank``: default to those of the process group. Call ``set_epoch`` before each epoch.
        """

        def __init__(
            self,
            dataset: Sized,
            num_replicas: int | None = None,
            rank: int | None = None,
            start_index: int = 0,
        ) -> None:
            super().__init__(dataset=dataset, num_replicas=num_replicas, rank=rank)
            _check_start(start_index, len(dataset))
            self.start_index = start_index
            self.num_samples = -(-(len(dataset) - start_index) // self.num_replicas)
            self.total_size = self.num_samples * self.num_replicas

        def __iter__(self) -> Iterator[int]:
            generator = torch.Generator()
            generator.manual_seed(self.epoch)
            order = torch.randperm(len(self.dataset) - self.start_index, generator=generator)
            return iter(share_of((order + self.start_index).tolist(), self.rank, self.num_replicas))

        def __len__(self) -> int:
            return int(self.num_samples)

    return ElasticDistributedSampler


def _plain_sampler() -> type:
    class ElasticDistributedSampler:
        """Each rank's share of the indices of ``dataset`` from ``start_index`` on, shuffled for each epoch.

        ``num_replicas``, ``rank``: default to ``WORLD_SIZE`` and ``RANK``. Call ``set_epoch`` before each
        epoch.
        """

        def __init__(
            self,
            dataset: Sized,
            num_replicas: int | None = None,
            rank: int | None = None,
            start_index: int = 0,
        ) -> None:
            self.num_replicas = _from_environment("WORLD_SIZE") if num_replicas is None else num_replicas
            self.rank = _from_environment("RANK") if rank is None else rank
            if not 0 <= self.rank < self.num_replicas:
                raise ValueError(f"rank is {self.rank}; expected 0 to {self.num_replicas - 1}")
            _check_start(start_index, len(dataset))
            self.dataset = dataset
            self.start_index = start_index
            self.epoch = 0
            self.num_samples = -(-(len(dataset) - start_index) // self.num_replicas)
            self.total_size = self.num_samples * self.num_replicas

        def set_epoch(self, epoch: int) -> None:
            """Set the epoch, which determines the order of the next iteration."""
            self.epoch = epoch

        def __iter__(self) -> Iterator[int]:
            return iter(
                share_of(order_of(self.epoch, self.start_index, len(self.dataset)), self.rank, self.num_replicas)
            )

        def __len__(self) -> int:
            return self.num_samples

    return ElasticDistributedSampler


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
