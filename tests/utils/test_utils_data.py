"""Data for elastic jobs: the sampler with torch and without, and the iterator over epochs."""

from __future__ import annotations

import itertools
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.processes import needs_torch
from tenax.utils.data import CyclingIterator
from tenax.utils.data.elastic_distributed_sampler import _PlainSampler, _sampler, order_of, share_of

pytestmark = pytest.mark.process

PlainSampler = _sampler(_PlainSampler, order_of)


# --- the sampler ------------------------------------------------------------------------------------------------------


@needs_torch
@settings(max_examples=200, deadline=None)
@given(st.data())
def test_the_indices_equal_torchelastics(data: st.DataObject) -> None:
    """Where TorchElastic's sampler fails, the shares are even."""
    from torch.distributed.elastic.utils.data import ElasticDistributedSampler as Theirs

    from tenax.utils.data import ElasticDistributedSampler as Ours

    size = data.draw(st.integers(1, 40))
    replicas = data.draw(st.integers(1, 12))
    rank = data.draw(st.integers(0, replicas - 1))
    start = data.draw(st.integers(0, size - 1))
    epoch = data.draw(st.integers(0, 5))
    ours, theirs = (kind(range(size), replicas, rank, start) for kind in (Ours, Theirs))
    for sampler in (ours, theirs):
        sampler.set_epoch(epoch)
    assert len(ours) == len(theirs) == len(list(ours))
    assert (ours.num_samples, ours.total_size, ours.start_index) == (
        theirs.num_samples,
        theirs.total_size,
        theirs.start_index,
    )
    try:
        expected = list(theirs)
    except AssertionError:  # the rest of the dataset is shorter than what is missing to an even share
        assert ours.total_size > 2 * (size - start)
    else:
        assert list(ours) == expected


@needs_torch
def test_with_torch_the_sampler_is_a_torch_sampler() -> None:
    """A DataLoader accepts it, and it can be pickled."""
    from torch.utils.data import DataLoader, DistributedSampler

    from tenax.utils.data import ElasticDistributedSampler
    from tenax.utils.data.elastic_distributed_sampler import ElasticDistributedSampler as TheSame

    assert ElasticDistributedSampler is TheSame
    sampler = ElasticDistributedSampler(range(10), num_replicas=2, rank=1, start_index=4)
    assert isinstance(sampler, DistributedSampler)
    assert list(pickle.loads(pickle.dumps(sampler))) == list(sampler)
    batches = [int(value) for batch in DataLoader(range(10), batch_size=2, sampler=sampler) for value in batch]
    assert batches == list(sampler)


@needs_torch
@pytest.mark.parametrize("start", [10, 11, -1])
def test_a_start_outside_of_the_dataset_is_rejected(start: int) -> None:
    from tenax.utils.data import ElasticDistributedSampler

    for kind in (ElasticDistributedSampler, PlainSampler):
        with pytest.raises(ValueError, match="start_index"):
            kind(range(10), 2, 0, start)


@given(st.integers(1, 60), st.integers(1, 12), st.integers(0, 5), st.data())
def test_without_torch_every_rank_gets_an_even_share(size: int, replicas: int, epoch: int, data: st.DataObject) -> None:
    """Of all indices from the start on; all shares are equally long."""
    start = data.draw(st.integers(0, size - 1))
    samplers = [PlainSampler(range(size), replicas, rank, start) for rank in range(replicas)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    shares = [list(sampler) for sampler in samplers]
    assert {len(share) for share in shares} == {len(samplers[0])}
    assert set(itertools.chain(*shares)) == set(range(start, size))


def test_the_order_without_torch_never_changes() -> None:
    """It is the same in every version of Python."""
    assert order_of(0, 0, 10) == [3, 7, 5, 2, 8, 4, 9, 1, 6, 0]
    assert order_of(3, 5, 12) == [11, 10, 5, 7, 6, 8, 9]


def test_an_epoch_has_its_own_order() -> None:
    assert order_of(0, 0, 50) != order_of(1, 0, 50)
    assert order_of(1, 0, 50) == order_of(1, 0, 50)


def test_a_small_dataset_is_repeated_to_fill_the_shares() -> None:
    assert [share_of([7, 8], rank, 5) for rank in range(5)] == [[7], [8], [7], [8], [7]]
    assert [share_of([7, 8, 9], rank, 2) for rank in range(2)] == [[7, 9], [8, 7]]


@pytest.fixture
def run_without_torch(tmp_path: Path) -> Iterator[object]:
    def run(code: str, **env: str) -> str:
        script = tmp_path / "script.py"
        script.write_text(textwrap.dedent(code))
        path = str(Path(__file__).parents[2] / "src")
        done = subprocess.run(
            [sys.executable, "-S", script],
            env={"PYTHONPATH": path, **env},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return run


def test_without_torch_rank_and_world_size_come_from_the_environment(run_without_torch) -> None:
    code = """
        import pickle, sys
        from tenax.utils.data import ElasticDistributedSampler
        sampler = ElasticDistributedSampler(range(7), start_index=3)
        assert list(pickle.loads(pickle.dumps(sampler))) == list(sampler)
        print(sampler.rank, sampler.num_replicas, len(sampler), "torch" in sys.modules)
    """
    assert run_without_torch(code, RANK="1", WORLD_SIZE="3") == "1 3 2 False"


def test_without_rank_and_environment_the_sampler_raises(run_without_torch) -> None:
    code = """
        from tenax.utils.data import ElasticDistributedSampler
        try:
            ElasticDistributedSampler(range(7))
        except ValueError as error:
            print(error)
    """
    assert "pass num_replicas and rank" in run_without_torch(code)


# --- the iterator -----------------------------------------------------------------------------------------------------


def test_epochs_follow_each_other() -> None:
    assert list(CyclingIterator(3, lambda epoch: iter([epoch] * 2))) == [0, 0, 1, 1, 2, 2]


def test_it_starts_at_any_epoch() -> None:
    assert list(CyclingIterator(3, lambda epoch: iter([epoch]), start_epoch=1)) == [1, 2]
    assert list(CyclingIterator(3, lambda epoch: iter([epoch]), start_epoch=7)) == [7]


def test_any_iterable_works() -> None:
    assert list(CyclingIterator(2, lambda _: [1, 2, 3])) == [1, 2, 3, 1, 2, 3]


def test_empty_epochs_are_skipped() -> None:
    """However many there are."""
    assert list(CyclingIterator(5000, lambda epoch: [epoch] if epoch == 4999 else [])) == [4999]


def test_it_stays_exhausted() -> None:
    cycling = CyclingIterator(1, lambda _: [1])
    assert [*cycling, *cycling] == [1]
