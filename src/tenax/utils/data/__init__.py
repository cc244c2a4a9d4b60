"""Iteration over a dataset in an elastic job: ``CyclingIterator``, and
``ElasticDistributedSampler(dataset, num_replicas=None, rank=None, start_index=0)``, each rank's share of the rest of a
dataset. The sampler class is created on first access, with torch if that is installed.
"""

from __future__ import annotations

from tenax.utils.data.cycling_iterator import CyclingIterator

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from tenax.utils.data.elastic_distributed_sampler import ElasticDistributedSampler

__all__ = ["CyclingIterator", "ElasticDistributedSampler"]


def __getattr__(name: str) -> Any:
    if name != "ElasticDistributedSampler":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tenax.utils.data import elastic_distributed_sampler

    return elastic_distributed_sampler.ElasticDistributedSampler
