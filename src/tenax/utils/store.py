"""Meeting in a store: values of all ranks, and a barrier. For tenax's stores and torch's alike.

The keys are those of TorchElastic, so that both kinds of agents may meet at one place. They stay in the store: a
prefix is good for one meeting. Whose store it is also says what is raised when time is up: ``StoreTimeoutError`` with
ours, ``torch.distributed.DistStoreError`` with torch's; both are RuntimeErrors.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from datetime import timedelta

from tenax.store._api import StoreError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

__all__ = ["barrier", "get_all", "store_timeout", "synchronize"]

_COUNT = "/num_members"
_ALL_THERE = "/last_member"
_TRACE = "/TRACE"
_TRACED = "/TRACING_GATE"
_MAX_MISSING_NAMED = 16
_IGNORED = "<val_ignored>"  # a key is only waited for


@contextmanager
def store_timeout(store: Any, timeout: float) -> Iterator[None]:
    """Within the block, methods of the store wait for so many seconds. Then it is as before, whatever happened."""
    before = store.timeout
    store.set_timeout(timedelta(seconds=timeout))
    try:
        yield
    finally:
        store.set_timeout(before)


def get_all(store: Any, rank: int, prefix: str, world_size: int) -> list[bytes]:
    """Return the values of ``prefix0``, ``prefix1`` … of all ranks; wait for those that are missing.

    Rank 0, which often serves the store, returns only when every rank has read them.
    """
    values: list[bytes] = store.multi_get([f"{prefix}{each}" for each in range(world_size)])
    all_done = _count_in(store, world_size, f"{prefix}/finished")
    if rank == 0:
        store.wait([all_done])
    return values


def synchronize(
    store: Any, data: bytes, rank: int, world_size: int, key_prefix: str, timeout: float = 300
) -> list[bytes]:
    """Publish the value of this rank and return the values of all ranks, in their order."""
    with store_timeout(store, timeout):
        store.set(f"{key_prefix}{rank}", data)
        return get_all(store, rank, key_prefix, world_size)


def barrier(
    store: Any,
    world_size: int,
    key_prefix: str,
    barrier_timeout: float = 300,
    rank: int | None = None,
    rank_tracing_decoder: Callable[[int], str] | None = None,
    trace_timeout: float = 10,
) -> None:
    """Wait until so many have come.

    With a ``rank``, the error says who did not: rank 0 waits up to ``trace_timeout`` for a sign of each of the others.
    ``rank_tracing_decoder`` names a rank in that error, for example by its host.
    """
    if rank is None and rank_tracing_decoder is not None:
        raise AssertionError("rank_tracing_decoder requires rank, to find the missing ranks; pass it")
    all_there = _count_in(store, world_size, key_prefix)
    # Only this wait has the barrier's time. The store itself has its own, to do what it is asked.
    patience = timedelta(seconds=barrier_timeout)
    try:
        store.wait([all_there], patience)
    except _errors_of_stores() as error:
        if rank is None:
            raise
        name = rank_tracing_decoder or str
        if rank == 0:
            missing = _who_is_missing(store, world_size, key_prefix, name, trace_timeout)
        elif _rank_0_knows(store, key_prefix, rank, patience):
            missing = [f"<see rank 0 ({name(0)})>"]
        else:
            raise
        raise type(error)(
            f"rank {rank} timed out after {barrier_timeout:g} s at the barrier {key_prefix!r} of {world_size} ranks; "
            f"missing_ranks=[{', '.join(missing)}]"
        ) from None


def _count_in(store: Any, world_size: int, prefix: str) -> str:
    """Say that we are here; returns the key that appears when all are."""
    if store.add(prefix + _COUNT, 1) == world_size:
        store.set(prefix + _ALL_THERE, _IGNORED)
    return prefix + _ALL_THERE


def _who_is_missing(
    store: Any, world_size: int, prefix: str, name: Callable[[int], str], trace_timeout: float
) -> list[str]:
    """At rank 0: who gives no sign of having been here."""
    store.set(f"{prefix}0{_TRACE}", _IGNORED)
    missing: list[str] = []
    for other in range(1, world_size):
        sign = f"{prefix}{other}{_TRACE}"
        # When one is missing, all have had their time.
        is_there = store.check([sign]) if missing else _comes(store, sign, timedelta(seconds=trace_timeout))
        if not is_there:
            missing.append(name(other))
            if len(missing) == _MAX_MISSING_NAMED:
                break
    store.set(prefix + _TRACED, _IGNORED)
    return missing


def _rank_0_knows(store: Any, prefix: str, rank: int, patience: timedelta) -> bool:
    """At the others: leave a sign, and hear whether rank 0 has looked for it."""
    store.set(f"{prefix}{rank}{_TRACE}", _IGNORED)
    return _comes(store, prefix + _TRACED, patience)


def _comes(store: Any, key: str, patience: timedelta) -> bool:
    try:
        store.wait([key], patience)
    except _errors_of_stores():
        return False
    return True


def _errors_of_stores() -> tuple[type[Exception], ...]:
    """What stores raise when something does not come. Only who has imported torch can have a store of torch's."""
    theirs = getattr(sys.modules.get("torch._C"), "_DistStoreError", None)
    return (StoreError,) if theirs is None else (StoreError, theirs)
