"""The benchmarks are a package at the root of the repository, which is not installed with tenax."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))


@pytest.fixture
def tenax() -> Any:
    """The launcher beside this interpreter, with the compiled worker."""
    from benchmarks.report import OURS

    from benchmarks import harness

    try:
        harness.build_worker()
        return harness.find_launchers([OURS])[0]
    except harness.Unusable as reason:
        pytest.skip(str(reason))


@pytest.fixture
def samples() -> Iterator[Any]:
    """Samples without failures or misses after the test."""
    from benchmarks.samples import Samples

    samples = Samples()
    yield samples
    assert samples.failures == []
    assert samples.misses == {}
