"""ElasticDistributedSampler: each rank's share of the rest of a dataset, in the order of an epoch.

The one place in tenax that may import torch, and only when a program asks for the class:

- Where torch is installed, the class is a ``torch.utils.data.distributed.DistributedSampler``, which a ``DataLoader``
  and the libraries around it recognise, and the order is that of TorchElastic's sampler: ``torch.randperm`` with the
  epoch as seed.
- Where it is not, the class has the same interface and is plain Python. Its order sorts the indices by the numbers
  that ``random.Random(epoch).random()`` gives them, which Python promises not to change.

Both deal out the order alike: rank r of n gets its elements r, r + n, r + 2n …; if the rest of the dataset cannot be
divided by n, its beginning comes again at the end, as often as that takes.
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
    # Without a loader it is the stand-in of tenax.compat, and not torch.
    made = _plain_sampler() if found is None or found.loader is None else _torch_sampler()
    made.__module__, made.__qualname__ = __name__, name  # so that instances can be pickled
    return globals().setdefault(name, made)


def share_of(order: Sequence[int], rank: int, num_replicas: int) -> list[int]:
    """What one rank gets of an order that is dealt out evenly."""
    total = -(-len(order) // num_replicas) * num_replicas
    return list(islice(cycle(order), rank, total, num_replicas))


def _check_start(start_index: int, size: int) -> None:
    if not 0 <= start_index < size:
        raise ValueError(f"start_index is {start_index}; expected one of the dataset's {size} indices, counted from 0")


def _torch_sampler() -> type:
    # Not an import statement: tenax must not depend on torch, and a checker sees to it.
    torch: Any = importlib.import_module("torch")
    base: Any = importlib.import_module("torch.utils.data.distributed").DistributedSampler

    class ElasticDistributedSampler(base):  # type: ignore[misc]
        """Each rank's share of the indices of ``dataset`` from ``start_index`` on, shuffled anew for each epoch.

        ``num_replicas``, ``rank``: of the process group if they are not given. Call ``set_epoch`` before each epoch.
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
        """Each rank's share of the indices of ``dataset`` from ``start_index`` on, shuffled anew for each epoch.

        ``num_replicas``, ``rank``: ``WORLD_SIZE`` and ``RANK`` if they are not given. Call ``set_epoch`` before each
        epoch.
        """

        def __init__(
            self,
            dataset: Sized,
            num_replicas: int | None = None,
            rank: int | None = None,
            start_index: int = 0,
        ) -> None:
            self.num_replicas = _of_environment("WORLD_SIZE") if num_replicas is None else num_replicas
            self.rank = _of_environment("RANK") if rank is None else rank
            if not 0 <= self.rank < self.num_replicas:
                raise ValueError(f"rank is {self.rank}; expected 0 to {self.num_replicas - 1}")
            _check_start(start_index, len(dataset))
            self.dataset = dataset
            self.start_index = start_index
            self.epoch = 0
            self.num_samples = -(-(len(dataset) - start_index) // self.num_replicas)
            self.total_size = self.num_samples * self.num_replicas

        def set_epoch(self, epoch: int) -> None:
            """Which order the next iteration has."""
            self.epoch = epoch

        def __iter__(self) -> Iterator[int]:
            return iter(
                share_of(order_of(self.epoch, self.start_index, len(self.dataset)), self.rank, self.num_replicas)
            )

        def __len__(self) -> int:
            return self.num_samples

    return ElasticDistributedSampler


def order_of(epoch: int, start_index: int, size: int) -> list[int]:
    """The order of an epoch where there is no torch."""
    from random import Random

    numbers = Random(epoch)  # noqa: S311 - an order, not a secret
    return sorted(
        range(start_index, size), key={index: numbers.random() for index in range(start_index, size)}.__getitem__
    )


def _of_environment(name: str) -> int:
    text = os.environ.get(name, "")
    if not text.isdecimal():
        raise ValueError(
            f"{name} is {text!r} in the environment; pass num_replicas and rank, or run this under a launcher"
        )
    return int(text)
