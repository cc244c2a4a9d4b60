"""The data of the examples in this folder, and a hash of what they learned. Use your own data instead."""

import hashlib
from collections.abc import Iterable

import numpy


class Samples:
    """Inputs and targets that are the same in every process."""

    def __init__(self, length: int = 480) -> None:
        self.inputs = numpy.random.default_rng(0).standard_normal((length, 8), dtype=numpy.float32)
        self.targets = (self.inputs**2).sum(axis=1, keepdims=True)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> "tuple[numpy.ndarray, numpy.ndarray]":
        return self.inputs[index], self.targets[index]


def fingerprint(weights: "Iterable[numpy.ndarray]") -> str:
    """Return a hash of the weights: two runs have the same one only if every bit is equal."""
    found = hashlib.sha256()
    for weight in weights:
        found.update(numpy.ascontiguousarray(weight).tobytes())
    return found.hexdigest()[:16]
