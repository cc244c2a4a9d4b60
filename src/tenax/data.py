"""Batches that can be resumed at any world size: every sample of an epoch is used exactly once.

    batches = ResumableBatches(len(dataset), batch_size=256, seed=7)
    batches.resume(checkpoint["epoch"], checkpoint["step"])
    for batch in DataLoader(dataset, batch_sampler=batches):
        ...

``batch_size`` is that of one step of all ranks together. So step n uses the same samples whether two ranks or six share
them, and epoch and step are all that a checkpoint needs.
"""

from __future__ import annotations

import os
from hashlib import blake2b

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["ResumableBatches"]

_ROUNDS = 4


class ResumableBatches:
    """This rank's part of each global batch, as lists of indices: a ``batch_sampler`` for torch's ``DataLoader``.

    ``length``: the number of samples. ``batch_size``: the samples of one step of all ranks; at least twice the world
    size. ``rank`` and ``world_size`` default to the variables of those names, or to a single rank.

    All ranks make the same number of steps, and no batch is empty: if the last batch is not full, the last two share
    their samples. Iterate it once per epoch; then the next epoch begins, in another order.
    """

    def __init__(
        self,
        length: int,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self.rank = int(os.environ.get("RANK", "0")) if rank is None else rank
        self.world_size = int(os.environ.get("WORLD_SIZE", "1")) if world_size is None else world_size
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} is not a rank of world_size {self.world_size}")
        if batch_size < 2 * self.world_size:
            raise ValueError(
                f"batch_size {batch_size} is too small for {self.world_size} ranks: it is that of all ranks together, "
                "and each needs a sample of the last two batches too; use at least 2 for each rank"
            )
        if length < self.world_size:
            raise ValueError(f"{length} samples are too few for {self.world_size} ranks")
        self.length = length
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.epoch = 0
        self.step = 0  # the first step of the next iteration

    @property
    def steps(self) -> int:
        """The number of steps of a whole epoch."""
        return -(-self.length // self.batch_size)

    def __len__(self) -> int:
        """The number of steps left in this epoch."""
        return self.steps - self.step

    def resume(self, epoch: int, step: int) -> None:
        """Continue in this epoch after ``step`` completed steps. After its last step, the next epoch begins."""
        if epoch < 0 or not 0 <= step <= self.steps:
            raise ValueError(f"epoch {epoch}, step {step}: an epoch of this dataset has steps 0 to {self.steps}")
        self.epoch, self.step = (epoch, step) if step < self.steps else (epoch + 1, 0)

    def __iter__(self) -> Iterator[list[int]]:
        epoch, first = self.epoch, self.step
        self.epoch, self.step = epoch + 1, 0
        order = _Order(self.length, f"{self.seed} {epoch}") if self.shuffle else range(self.length)
        for step in range(first, self.steps):
            begin, end = self._bounds(step)
            count, more = divmod(end - begin, self.world_size)
            begin += self.rank * count + min(self.rank, more)
            yield [order[position] for position in range(begin, begin + count + (self.rank < more))]

    def _bounds(self, step: int) -> tuple[int, int]:
        """Return the positions of a step in the order of the epoch. They do not depend on the world size."""
        begin, end = step * self.batch_size, min((step + 1) * self.batch_size, self.length)
        rest = self.length % self.batch_size
        if rest and self.steps > 1 and step >= self.steps - 2:
            shared = (self.steps - 2) * self.batch_size
            middle = shared + (self.batch_size + rest + 1) // 2
            return (shared, middle) if step == self.steps - 2 else (middle, self.length)
        return begin, end


class _Order:
    """A random order of ``length`` indices, which is computed position by position and needs no memory.

    A Feistel network permutes the numbers of an even number of bits; a number that is not an index is permuted again.
    """

    def __init__(self, length: int, key: str) -> None:
        self._length = length
        self._key = key.encode()
        self._bits = max(1, (length - 1).bit_length() + 1 >> 1)
        self._mask = (1 << self._bits) - 1

    def __getitem__(self, position: int) -> int:
        while True:
            left, right = position >> self._bits, position & self._mask
            for number in range(_ROUNDS):
                data = bytes((number,)) + right.to_bytes(8, "big")
                digest = blake2b(data, digest_size=8, key=self._key[:64]).digest()
                left, right = right, left ^ (int.from_bytes(digest, "big") & self._mask)
            position = left << self._bits | right
            if position < self._length:
                return position
