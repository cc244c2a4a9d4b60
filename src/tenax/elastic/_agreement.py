"""Brings all ranks to one step: who has a whole state, who sends it to whom, who restores it.

``decide`` is pure, and every rank decides from the same rows. Invariants:

1. After ``agree`` all ranks have the same step. There is no mixture: a rank has the whole state of one step, or raises.
2. Only a whole state is sent: one that this process has had since its last agreement and that no exception has cut.
3. Sharded state is never sent.
"""

from __future__ import annotations

import json
import os
from contextlib import closing, contextmanager
from typing import Any, NamedTuple, TypeAlias

from tenax.elastic import _torch
from tenax.elastic._worker import warn

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tenax.elastic._generation import Generation
    from tenax.elastic._state import State
    from tenax.store import TCPStore

    Group: TypeAlias = "_torch.TorchGroup | _StoreGroup"  # how the ranks reach each other


_NOTHING = -1  # in place of a step, for a state that is not whole
_CHUNK = 4 << 20  # the store's limit for a value is 8 MiB
_MAX_IN_STORE = 256 << 20


class Row(NamedTuple):
    step: int  # -1: nothing whole
    is_sharded: bool
    is_in_place: bool  # for a shard: this rank had the same rank and world size before


class Plan(NamedTuple):
    why_restore: str = ""  # not empty: every rank restores the checkpoint
    transfers: tuple[tuple[int, int], ...] = ()  # from, to


def decide(rows: Sequence[Row]) -> Plan:
    """Decide from what every rank has, by rank."""
    missing = [rank for rank, row in enumerate(rows) if row.step == _NOTHING]
    if len(missing) == len(rows):
        return Plan("no rank has a whole state in memory")
    if any(row.is_sharded for row in rows):
        if missing:
            return Plan(f"the state is sharded, and rank {missing[0]} does not have its shard")
        moved = next((rank for rank, row in enumerate(rows) if not row.is_in_place), None)
        if moved is not None:
            return Plan(f"the state is sharded, and rank {moved} had another rank or world size before")
        if len({row.step for row in rows}) > 1:
            return Plan("the state is sharded, and its shards are of different steps")
        return Plan()
    last = max(row.step for row in rows)
    senders = [rank for rank, row in enumerate(rows) if row.step == last]
    receivers = [rank for rank, row in enumerate(rows) if row.step != last]
    return Plan("", tuple((senders[at % len(senders)], receiver) for at, receiver in enumerate(receivers)))


def agree(generation: Generation, state: State, restore: Callable[[State], object] | None) -> None:
    is_torn = state._is_torn
    if type(state.step) is not int or (state.step < 0 and not is_torn):
        raise TypeError(f"state.step is {state.step!r}: it must be the number of completed steps")
    if not state._is_sharded:
        state._encode()  # what cannot be sent is an error now, not at the first failure
    place = (generation.rank, generation.world_size)
    had = state._place is not None and not is_torn
    if had:
        _torch.forget_step(state)
    with _group_of(generation) as group:
        plan = decide(_rows(group, state, had, state._place == place))
        if plan.why_restore:
            state._begin_replacement()
            if state._place is not None or is_torn:
                if generation.rank == 0:
                    warn(f"all ranks restore the checkpoint: {plan.why_restore}")
                state.step = _NOTHING  # so that a restore that finds no checkpoint does not keep what is not whole
            if restore is not None:
                restore(state)
            plan = decide(_rows(group, state, state.step >= 0, True))
            if plan.why_restore:
                raise RuntimeError(f"the ranks could not agree on a state after restoring it: {plan.why_restore}")
        if group is not None:
            _transfer(group, state, generation.rank, plan.transfers)
    state._end_agreement(place)
    _torch.begin_steps(state)


def _rows(group: Group | None, state: State, is_whole: bool, is_in_place: bool) -> list[Row]:
    mine = Row(state.step if is_whole else _NOTHING, state._is_sharded, is_in_place)
    if group is None:
        return [mine]
    rows = group.gather([int(each) for each in mine])
    return [Row(step, bool(is_sharded), bool(is_in_place)) for step, is_sharded, is_in_place in rows]


def _transfer(group: Group, state: State, rank: int, transfers: Sequence[tuple[int, int]]) -> None:
    receivers = [receiver for sender, receiver in transfers if sender == rank]
    if receivers:
        encoded, buffers = state._encode()
        header = json.dumps(encoded).encode()
        for receiver in receivers:
            group.send(header, buffers, receiver)
    for sender, receiver in transfers:
        if receiver == rank:
            received = group.receive(sender)
            state._begin_replacement()  # not before: the sender may be lost, and this state is whole
            state._load(*received)


@contextmanager
def _group_of(generation: Generation) -> Iterator[Group | None]:
    """The group to use: torch's default process group if there is one, otherwise the workers' store. None: alone."""
    if generation.world_size == 1:
        yield None
    elif _torch.has_group():
        yield _torch.TorchGroup()
    elif "MASTER_PORT" not in os.environ:
        raise RuntimeError("agree needs a process group or MASTER_ADDR and MASTER_PORT, the address of the store")
    else:
        from tenax.store import TCPStore

        with closing(TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))) as store:
            yield _StoreGroup(store, generation)


class _StoreGroup:
    """The ranks of a generation, through their store: for states of plain values, bytes and arrays."""

    def __init__(self, store: TCPStore, generation: Generation) -> None:
        self._store = store
        self._generation = generation
        self._rank = generation.rank

    def _key(self, name: str) -> str:
        return f"tenax.elastic/{self._generation.number}/{name}"

    def gather(self, row: Sequence[int]) -> list[list[int]]:
        self._generation._gathered += 1
        keys = [self._key(f"row/{self._generation._gathered}/{rank}") for rank in range(self._generation.world_size)]
        self._store.set(keys[self._rank], json.dumps(list(row)))
        return [json.loads(each) for each in self._store.multi_get(keys)]

    def send(self, header: bytes, buffers: list[Any], rank: int) -> None:
        contents = [memoryview(header), *(_bytes(buffer) for buffer in buffers)]
        total = sum(len(content) for content in contents)
        if total > _MAX_IN_STORE:
            raise ValueError(
                f"the state has {total >> 20} MiB; at most {_MAX_IN_STORE >> 20} MiB are sent through the store"
            )
        self._store.set(self._key(f"state/{rank}"), str(len(header)))
        for at, content in enumerate(contents):
            for part, (start, end) in enumerate(_pieces(len(content))):
                self._store.set(self._key(f"state/{rank}/{at}/{part}"), bytes(content[start:end]))

    def receive(self, rank: int) -> tuple[Any, list[Any]]:  # noqa: ARG002 - the keys name the receiver
        encoded = json.loads(self._receive(0, int(self._store.get(self._key(f"state/{self._rank}")))))
        return encoded, [self._receive(1 + at, mark["details"][0]) for at, mark in enumerate(_torch.marks_of(encoded))]

    def _receive(self, at: int, size: int) -> bytes:
        received = []
        for part, _ in enumerate(_pieces(size)):
            key = self._key(f"state/{self._rank}/{at}/{part}")
            received.append(self._store.get(key))
            self._store.delete_key(key)
        return b"".join(received)


def _bytes(buffer: Any) -> memoryview:
    if _torch.is_tensor(buffer):
        raise TypeError("the state has tensors, which only a process group sends: call init_process_group before agree")
    return memoryview(buffer)


def _pieces(size: int) -> Iterator[tuple[int, int]]:
    for start in range(0, max(size, 1), _CHUNK):
        yield start, min(size, start + _CHUNK)
