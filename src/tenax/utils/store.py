"""Exchange of values and barriers in a store of tenax or torch.

The keys are TorchElastic's, so that agents of both kinds can share a store. They stay in the store, so a prefix can be
used only once. A timeout raises ``StoreTimeoutError`` with a store of tenax and ``torch.distributed.DistStoreError``
with one of torch; both are RuntimeErrors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from tenax._core.text import format_seconds
from tenax.store._api import StoreError

__all__ = ["barrier", "get_all", "store_timeout", "synchronize"]

_COUNT = "/num_members"
_ALL_THERE = "/last_member"
_TRACE = "/TRACE"
_TRACED = "/TRACING_GATE"
_MAX_MISSING_NAMED = 16
_IGNORED = "<val_ignored>"  # a key is only waited for


@contextmanager
def store_timeout(store: Any, timeout: float) -> Iterator[None]:
    """Set the store's timeout within the block, and restore it afterwards."""
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
    """Wait until ``world_size`` processes have called it.

    With ``rank``, the error names the missing ranks: rank 0 waits up to ``trace_timeout`` for a key of each other rank.
    ``rank_tracing_decoder`` returns the name of a rank for that error, for example its host.
    """
    if rank is None and rank_tracing_decoder is not None:
        raise AssertionError("rank_tracing_decoder requires rank, to find the missing ranks; pass it")
    all_there = _count_in(store, world_size, key_prefix)
    # Only this wait uses the barrier's timeout; other operations use the store's.
    timeout = timedelta(seconds=barrier_timeout)
    try:
        store.wait([all_there], timeout)
    except _store_errors() as error:
        if rank is None:
            raise
        name = rank_tracing_decoder or str
        if rank == 0:
            missing = _find_missing(store, world_size, key_prefix, name, trace_timeout)
        else:
            store.set(f"{key_prefix}{rank}{_TRACE}", _IGNORED)
            if not _wait_for(store, key_prefix + _TRACED, timeout):  # rank 0 has not searched
                raise
            missing = [f"<see rank 0 ({name(0)})>"]
        raise type(error)(
            f"rank {rank} timed out after {format_seconds(barrier_timeout)} at the barrier {key_prefix!r} of "
            f"{world_size} ranks; "
            f"missing_ranks=[{', '.join(missing)}]"
        ) from None


def _count_in(store: Any, world_size: int, prefix: str) -> str:
    """Count this process, and return the key that is set when all are counted."""
    if store.add(prefix + _COUNT, 1) == world_size:
        store.set(prefix + _ALL_THERE, _IGNORED)
    return prefix + _ALL_THERE


def _find_missing(
    store: Any, world_size: int, prefix: str, name: Callable[[int], str], trace_timeout: float
) -> list[str]:
    """On rank 0: return the names of the ranks that have not set their key."""
    store.set(f"{prefix}0{_TRACE}", _IGNORED)
    missing: list[str] = []
    for other in range(1, world_size):
        key = f"{prefix}{other}{_TRACE}"
        # After the first missing rank, the others have had the same time.
        is_set = store.check([key]) if missing else _wait_for(store, key, timedelta(seconds=trace_timeout))
        if not is_set:
            missing.append(name(other))
            if len(missing) == _MAX_MISSING_NAMED:
                break
    store.set(prefix + _TRACED, _IGNORED)
    return missing


def _wait_for(store: Any, key: str, timeout: timedelta) -> bool:
    try:
        store.wait([key], timeout)
    except _store_errors():
        return False
    return True


def _store_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that stores raise for a missing key. A store of torch requires an imported torch."""
    torchs = getattr(sys.modules.get("torch._C"), "_DistStoreError", None)
    return (StoreError,) if torchs is None else (StoreError, torchs)
