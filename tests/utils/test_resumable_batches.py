"""``tenax.data``: whatever the world size and however often a job is resumed, each sample is used exactly once."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenax.data import ResumableBatches


def part(length: int, batch_size: int, world: int, rank: int, epoch: int, step: int) -> list[list[int]]:
    batches = ResumableBatches(length, batch_size, seed=3, rank=rank, world_size=world)
    batches.resume(epoch, step)
    return list(batches)


@given(st.data(), st.integers(1, 150), st.integers(2, 40), st.integers(0, 3))
def test_a_resumed_epoch_repeats_and_misses_nothing(data: st.DataObject, length: int, size: int, epoch: int) -> None:
    """Any number of restarts, each with another world size; all ranks make the same steps, none with an empty batch."""
    seen: list[int] = []
    step, steps = 0, ResumableBatches(length, size, rank=0, world_size=1).steps
    while step < steps:
        world = data.draw(st.integers(1, max(1, min(size // 2, length))))
        done = data.draw(st.integers(1, steps - step))
        parts = [part(length, size, world, rank, epoch, step) for rank in range(world)]
        assert {len(each) for each in parts} == {steps - step}
        assert all(batch for each in parts for batch in each)
        seen += [index for number in range(done) for each in parts for index in each[number]]
        step += done
    assert sorted(seen) == list(range(length))


@given(st.integers(8, 300), st.integers(8, 40), st.integers(1, 4), st.integers(1, 4))
def test_a_step_has_the_same_samples_at_any_world_size(length: int, size: int, one: int, other: int) -> None:
    steps = [
        [
            {index for each in parts for index in each[number]}
            for number in range(ResumableBatches(length, size, rank=0, world_size=1).steps)
        ]
        for world in (one, other)
        for parts in [[part(length, size, world, rank, 1, 0) for rank in range(world)]]
    ]
    assert steps[0] == steps[1]


def test_epochs_have_different_orders_and_the_seed_decides_them() -> None:
    batches = ResumableBatches(1000, 100, seed=1, rank=0, world_size=1)
    first, second = list(batches), list(batches)
    assert first != second
    assert batches.epoch == 2
    again = ResumableBatches(1000, 100, seed=1, rank=0, world_size=1)
    again.resume(1, 0)
    assert list(again) == second
    assert list(ResumableBatches(1000, 100, seed=2, rank=0, world_size=1)) != first
    assert [index for batch in ResumableBatches(10, 4, shuffle=False) for index in batch] == list(range(10))


def test_the_end_of_an_epoch_is_the_begin_of_the_next() -> None:
    batches = ResumableBatches(10, 4, rank=0, world_size=2)
    batches.resume(5, batches.steps)
    assert (batches.epoch, batches.step, len(batches)) == (6, 0, 3)


def test_the_order_is_random() -> None:
    """Neighbours are far apart, and every index is as often in each half."""
    order = [index for batch in ResumableBatches(10_000, 100, rank=0, world_size=1) for index in batch]
    assert sum(abs(a - b) < 100 for a, b in itertools.pairwise(order)) < 400  # 200 expected
    assert 2300 < sum(index < 5000 for index in order[:5000]) < 2700


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 100, "batch_size": 7, "world_size": 4, "rank": 0}, "batch_size 7 is too small for 4 ranks"),
        ({"length": 3, "batch_size": 8, "world_size": 4, "rank": 0}, "3 samples are too few for 4 ranks"),
        ({"length": 9, "batch_size": 8, "world_size": 4, "rank": 4}, "rank 4 is not a rank of world_size 4"),
    ],
)
def test_impossible_requests_are_rejected(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ResumableBatches(options.pop("length"), options.pop("batch_size"), **options)  # type: ignore[arg-type]


def test_an_impossible_position_is_rejected() -> None:
    with pytest.raises(ValueError, match="epoch 0, step 4: an epoch of this dataset has steps 0 to 3"):
        ResumableBatches(10, 4, rank=0, world_size=1).resume(0, 4)


def test_rank_and_world_size_are_those_of_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    batches = ResumableBatches(8, 4)
    assert (batches.rank, batches.world_size) == (1, 2)
