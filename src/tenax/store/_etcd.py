"""EtcdStore: a store in etcd, which outlives every process that uses it.

``_etcd_values`` describes the layout. Guarantees:

1. Every change takes effect exactly once, and the changes of one handle in order, even if an answer was lost and the
   client retried (``_etcd_writer`` explains how). So counters are exact with any number of concurrent clients.
2. A change that raises ``StoreConnectionError`` may have taken effect, or still may until the next change of this
   handle. This is the only exception.
3. Waits are watches, without polling. A change during a disconnect is not missed; a key that was set and deleted again
   counts as set.
4. ``multi_set`` is one transaction for up to 60 keys. More keys take several transactions, in order.

Every call to etcd has at least 5 s, however short the timeout, because leaders change.

Keys stay in etcd until they are deleted. Values of more than 256 KiB are stored in parts, up to etcd's quota (2 GiB by
default). A handle that is not closed leaves its marker behind, about 100 bytes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from tenax._core.etcd.errors import EtcdCompacted, EtcdError, EtcdUnavailable
from tenax._core.etcd.operations import Compare, Delete, KeyValue, Operation, Put, Range, RangeAnswer, Transaction
from tenax.store._api import (
    DEFAULT_TIMEOUT_S,
    QueueEmptyError,
    Store,
    StoreConnectionError,
    StoreError,
    as_amount,
    as_bytes,
    format_keys,
    pairs,
)
from tenax.store._etcd_values import PART_BYTES, EtcdKeys, EtcdValues
from tenax.store._etcd_writer import EtcdWriter, Step
from tenax.store._table import NotANumber, added, as_number

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tenax._io.etcd.blocking import BlockingEtcd
    from tenax.store._api import Timeout

A = TypeVar("A")

_MIN_PATIENCE_S = 5.0
_CLOSE_S = 1.0
_KEYS_AT_ONCE = 60  # etcd allows 128 operations in a transaction; a key may need two, and the marker is one
_SMALL_BYTES = 2 << 10  # values up to this size are not split when many are stored together


class EtcdStore(Store):
    """The constructor's signature is TorchElastic's. ``owns_client``: the store closes the client.

    Thread-safe: waits do not block other calls; changes of one handle are serialized. Usable after a fork.
    """

    def __init__(
        self,
        etcd_client: BlockingEtcd,
        etcd_store_prefix: str,
        timeout: Timeout | None = None,
        *,
        owns_client: bool = False,
    ) -> None:
        super().__init__(DEFAULT_TIMEOUT_S if timeout is None else timeout)
        self._client = etcd_client
        self._owns_client = owns_client
        self._keys = EtcdKeys(etcd_store_prefix)
        self._process = os.getpid()
        self._own_writer = self._new_writer()
        self._is_closed = False

    @property
    def prefix(self) -> str:
        """The prefix of all keys in etcd; it ends with a slash."""
        return self._keys.prefix

    def __str__(self) -> str:
        return f"the store under {self.prefix!r} in etcd"

    def clone(self) -> EtcdStore:
        """Return another handle that shares the client and does not own it."""
        return EtcdStore(self._client, self.prefix, self._timeout_s)

    def close(self) -> None:
        if self._is_closed:
            return
        try:
            if self._process == os.getpid():  # in a forked process the marker is the parent's
                with suppress(EtcdError):  # the marker stays behind, as documented
                    self._own_writer.forget(lambda operation: self._client.call(operation, patience_s=_CLOSE_S))
        finally:
            self._is_closed = True
            if self._owns_client:
                self._client.close()

    def set(self, key: str, value: str | bytes) -> None:
        data = as_bytes(value)
        self._update(key, f"set {key!r}", lambda _: (None, data), loads=False)

    def add(self, key: str, num: int) -> int:
        """Add to the counter of a key, which starts at 0, and return the sum. Exact with concurrent clients."""
        amount = as_amount(num)

        def count(old: bytes | None) -> tuple[int, bytes]:
            total = added(old, amount)
            return total, b"%d" % total

        try:
            return self._update(key, f"add to {key!r}", count)
        except NotANumber as error:
            raise StoreError(f"cannot add to the key {key!r}: {error}.") from error

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        expected, desired = as_bytes(expected_value), as_bytes(desired_value)

        def put(old: bytes | None) -> tuple[bytes, bytes | None]:
            if (old or b"") == expected:
                return desired, desired
            return expected if old is None else old, old

        return self._update(key, f"compare and set {key!r}", put)

    def append(self, key: str, value: str | bytes) -> None:
        data = as_bytes(value)
        self._update(key, f"append to {key!r}", lambda old: (None, data if old is None else old + data))

    def delete_key(self, key: str) -> bool:
        return self._update(key, f"delete {key!r}", lambda old: (old is not None, None), loads=False)

    def _update(
        self, key: str, what: str, change: Callable[[bytes | None], tuple[A, bytes | None]], *, loads: bool = True
    ) -> A:
        """Change the value of a key, if no other client changes it meanwhile; otherwise try again.

        ``change`` returns the result and the new value for the old one. None: there is no such key. Without ``loads``,
        a large old value is not loaded, and ``change`` must not use it.
        """
        name = self._keys.value(key)
        staged: dict[bytes, bytes] = {}
        with self._values(what) as values:

            def plan(found: RangeAnswer | None) -> Step[A] | None:
                kv = found.kvs[0] if found is not None and found.kvs else None
                old = None if kv is None else values.load(kv) if loads else kv.value
                if kv is not None and old is None:  # replaced meanwhile
                    return None
                result, new = change(old)  # before a read: as if the key were new, which saves a read if it is
                if new is old:
                    return None if found is None else Step(result)
                if new is not None and new not in staged:
                    staged[new] = values.stage(new)
                operation = Delete(name) if new is None else Put(name, staged[new])
                is_blind = found is not None and not loads and new is not None  # right whatever the old value is
                guards = () if is_blind else (_unchanged(name, kv),)
                deletes = values.part_deletes(kv.value) if kv is not None else ()
                return Step(result, (operation, *deletes), guards)

            return values.change(Range(name), plan)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        deadline = time.monotonic() + self._timeout_s
        with self._values(f"get {format_keys(keys)}") as values:
            while True:
                found = self._first_of(keys, values.call, keys_only=False)
                if all(found):
                    loaded = [
                        values.load(kv) if kv is not None and kv.key == self._keys.value(key) else b""  # only a queue
                        for key, kv in zip(keys, found, strict=True)
                    ]
                    if None not in loaded:
                        return [each or b"" for each in loaded]
                else:
                    self._wait(keys, deadline, self._timeout_s)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        new = {self._keys.value(key): as_bytes(value) for key, value in pairs(keys, values)}
        max_bytes = PART_BYTES if sum(map(len, new.values())) <= PART_BYTES else _SMALL_BYTES
        with self._values(f"set {format_keys(keys)}") as parts:
            for batch in _batches(list(new)):
                puts = [Put(name, parts.stage(new[name], max_bytes)) for name in batch]
                old = parts.call(Transaction(then=tuple(Range(name) for name in batch))).answers
                deletes = [delete for found in old for kv in found.kvs for delete in parts.part_deletes(kv.value)]
                step = Step(None, (*puts, *deletes))
                parts.change(Range(batch[0], keys_only=True), lambda _: step)  # noqa: B023 - called at once

    def check(self, keys: Sequence[str]) -> bool:
        return all(self._first_of(keys, self._caller(f"check {format_keys(keys)}"), keys_only=True))

    def wait(  # type: ignore[override]  # accepts both signatures, positionally and by keyword
        self, keys: Sequence[str], override_timeout: Timeout | None = None, timeout: Timeout | None = None
    ) -> None:
        """Wait until all of these keys have been set. The timeout has two names: TorchElastic's and torch's."""
        limit_s = self._limit_s(timeout if override_timeout is None else override_timeout)
        self._wait(keys, time.monotonic() + limit_s, limit_s)

    def list_keys(self) -> list[str]:
        call = self._caller("list the keys")
        found = call(Range(self._keys.start, self._keys.end, keys_only=True)).kvs
        return [key for kv in found if (key := self._keys.users_key(kv.key)) is not None]

    def queue_push(self, key: str, value: str | bytes) -> None:
        start, end = self._keys.queue(key)
        with self._values(f"push into the queue {key!r}") as values:
            stored = values.stage(as_bytes(value))
            unique = os.urandom(8).hex()

            def push(found: RangeAnswer | None) -> Step[None] | None:
                """Push after all items at the revision of the read. The order of concurrent pushes is undefined."""
                if found is None:
                    return None
                return Step(None, (Put(self._keys.queued(key, found.revision, unique), stored),))

            values.change(Range(start, end, count_only=True), push)

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        deadline = time.monotonic() + self._timeout_s
        start, end = self._keys.queue(key)
        with self._values(f"pop from the queue {key!r}") as values:

            def pop(found: RangeAnswer | None) -> Step[tuple[bytes | None, int]] | None:
                if found is None:
                    return None
                if not found.kvs:
                    return Step((None, found.revision))
                first = found.kvs[0]
                value = values.load(first)
                if value is None:
                    return None
                deletes = (Delete(first.key), *values.part_deletes(first.value))
                return Step((value, 0), deletes, (_unchanged(first.key, first),))

            while True:
                value, revision = values.change(Range(start, end, limit=1), pop)
                if value is not None:
                    return value
                if not block:
                    raise QueueEmptyError(f"the queue {key!r} is empty.")
                if not self._has_changed((start, end), revision, deadline):
                    raise self._item_missing(key)

    def queue_len(self, key: str) -> int:
        call = self._caller(f"get the length of the queue {key!r}")
        return int(call(Range(*self._keys.queue(key), count_only=True)).count)

    def barrier(self, key: str, world_size: int, timeout: Timeout | None = None) -> None:
        limit_s = self._limit_s(timeout)
        deadline = time.monotonic() + limit_s
        name = self._keys.value(key)
        number = self.add(key, 1)
        call = self._caller(f"wait at {key!r}")
        try:
            while number < world_size:
                found = call(Range(name))
                number = as_number(found.kvs[0].value if found.kvs else b"0")
                if number < world_size and not self._has_changed((name, b""), found.revision, deadline):
                    raise self._callers_missing(key, world_size, limit_s)
        except NotANumber as error:
            raise StoreError(f"the key of the barrier {key!r} was overwritten: {error}.") from error

    def _first_of(self, keys: Sequence[str], call: Callable[[Any], Any], *, keys_only: bool) -> list[KeyValue | None]:
        """Return for each key what makes it exist: its value, or the first item of its queue."""
        answers = [call(self._existence(batch, keys_only)).answers for batch in _batches(keys)]
        return [each.kvs[0] if each.kvs else None for batch in answers for each in batch]

    def _existence(self, keys: Sequence[str], keys_only: bool = True) -> Transaction:
        return Transaction(then=tuple(Range(*self._keys.existence(key), limit=1, keys_only=keys_only) for key in keys))

    def _wait(self, keys: Sequence[str], deadline: float, limit_s: float) -> None:
        """Wait for one key after the other, all from the same revision on, so that no change is missed."""
        missing = list(dict.fromkeys(keys))
        call = self._caller(f"wait for {format_keys(keys)}")
        since = 0
        while missing:
            batch = missing[:_KEYS_AT_ONCE]
            answer = call(self._existence(batch))
            since = since or answer.revision
            present = {key for key, each in zip(batch, answer.answers, strict=True) if each.kvs}
            missing = [key for key in missing if key not in present]
            if not missing or missing[0] not in batch:
                continue
            if not self._has_changed(self._keys.existence(missing[0]), since, deadline):
                raise self._keys_missing(missing, limit_s)
            del missing[0]

    def _has_changed(self, key_range: tuple[bytes, bytes], since: int, deadline: float) -> bool:
        """Watch until a key in the range is put after the revision ``since``. Return False at the deadline."""
        from_revision = since + 1
        while (left_s := deadline - time.monotonic()) > 0:
            try:
                changes = self._usable_client().wait_for_change(*key_range, from_revision, left_s)
            except EtcdCompacted:  # the history is gone, so read the current state
                found = self._call("watch", deadline, Range(*key_range, limit=1))
                if found.kvs:
                    return True
                from_revision = found.revision + 1
            except EtcdError as error:
                raise self._failure("watch", error) from error
            else:
                if any(change.kind == "put" for change in changes):
                    return True
                if changes:
                    from_revision = changes[-1].kv.mod_revision + 1
        return False

    def _values(self, what: str) -> EtcdValues:
        return EtcdValues(self._keys, self._caller(what), self._writer)

    def _caller(self, what: str) -> Callable[[Any], Any]:
        """Return a function that calls etcd, for a store operation that starts now."""
        return partial(self._call, what, time.monotonic() + self._timeout_s)

    def _call(self, what: str, deadline: float, operation: Operation[A]) -> A:
        patience_s = max(_MIN_PATIENCE_S, deadline - time.monotonic())
        try:
            return self._usable_client().call(operation, patience_s=patience_s)
        except EtcdError as error:
            raise self._failure(what, error) from error

    def _failure(self, what: str, error: EtcdError) -> StoreError:
        if not isinstance(error, EtcdUnavailable):
            return StoreError(f"{self}: could not {what}: {error}.")
        outcome = "" if error.is_certain else "; it may have taken effect"
        return StoreConnectionError(f"{self}: could not {what}: {error}{outcome}.")

    def _usable_client(self) -> BlockingEtcd:
        if self._is_closed:
            raise StoreConnectionError(f"{self} is closed.")
        return self._client

    @property
    def _writer(self) -> EtcdWriter:
        """The writer of this process: a forked process gets its own."""
        if self._process != os.getpid():
            self._own_writer = self._new_writer()
            self._process = os.getpid()  # last: from now on, other threads take this writer
        return self._own_writer

    def _new_writer(self) -> EtcdWriter:
        return EtcdWriter(self._keys.writer(os.urandom(16).hex()))


def _unchanged(name: bytes, kv: KeyValue | None) -> Compare:
    """Return the condition that the key has not changed since it was read. A missing key has revision 0."""
    return Compare(name, "mod", kv.mod_revision if kv is not None else 0)


def _batches(names: Sequence[A]) -> Iterator[Sequence[A]]:
    for start in range(0, len(names), _KEYS_AT_ONCE):
        yield names[start : start + _KEYS_AT_ONCE]
