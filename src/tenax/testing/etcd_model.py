"""A model of etcd: keys with revisions, leases, transactions and watches, as far as the etcd engine uses them.

It has no network and no clock: the time is an argument. ``tests/testing/test_etcd_model.py`` runs the same operations
in the model and in a real etcd, and compares the answers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from tenax._core.etcd.errors import EtcdRejected
from tenax._core.etcd.operations import (
    Answer,
    AnyKeyAnswer,
    AnyKeyOperation,
    Change,
    Compare,
    Delete,
    DeleteAnswer,
    GrantLease,
    Header,
    KeepAlive,
    KeyValue,
    LeaseAnswer,
    Operation,
    Put,
    PutAnswer,
    Range,
    RangeAnswer,
    RevokeLease,
    Transaction,
    TransactionAnswer,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    Watcher = Callable[[list[Change]], None]


class EtcdModel:
    """One etcd cluster. Every call is executed at once; callers add delays."""

    def __init__(self) -> None:
        self.revision = 1
        self.keys: dict[bytes, KeyValue] = {}
        self.leases: dict[int, tuple[int, float]] = {}  # TTL and when it expires, by id
        self._watchers: list[tuple[bytes, bytes, Watcher]] = []
        self._changes: list[Change] = []  # of the operation that is being executed

    def call(self, operation: Operation[Any], now: float) -> Answer:
        """Execute an operation. Raises EtcdRejected."""
        self._changes = []
        answer = self._execute(operation, now)
        self._notify()
        return answer

    def watch(self, key: bytes, end: bytes, changed: Watcher) -> RangeAnswer:
        """Return the current keys of a range; ``changed`` gets every later change."""
        self._watchers.append((key, end, changed))
        return self._range(Range(key, end))

    def next_expiry(self) -> float | None:
        return min((expires_at for _, expires_at in self.leases.values()), default=None)

    def expire(self, now: float) -> None:
        """Remove the leases that have expired, and their keys."""
        for lease_id, (_, expires_at) in list(self.leases.items()):
            if expires_at <= now:
                self.call(RevokeLease(lease_id), now)

    def prolong(self, now: float) -> None:
        """Give every lease its full TTL, as a new leader among the members of etcd does."""
        self.leases = {lease_id: (ttl_s, now + ttl_s) for lease_id, (ttl_s, _) in self.leases.items()}

    def _execute(self, operation: Operation[Any], now: float) -> Answer:
        match operation:
            case GrantLease(ttl_s, lease_id):
                self.leases.setdefault(lease_id, (ttl_s, now + ttl_s))  # one that exists is the caller's own
                return LeaseAnswer(Header(self.revision), lease_id, ttl_s)
            case KeepAlive(lease_id):
                ttl_s = self.leases[lease_id][0] if lease_id in self.leases else 0
                if ttl_s:
                    self.leases[lease_id] = (ttl_s, now + ttl_s)
                return LeaseAnswer(Header(self.revision), lease_id, ttl_s)
            case RevokeLease(lease_id):
                existed = self.leases.pop(lease_id, None) is not None
                bound = [kv for _, kv in sorted(self.keys.items()) if lease_id and kv.lease == lease_id]
                self._delete(bound, self.revision + 1)
                return LeaseAnswer(Header(self.revision), 0 if existed else lease_id)  # as the client reports it
            case Transaction():
                is_met = all(map(self._holds, operation.compare))
                answers = self._apply(operation.then if is_met else operation.otherwise)
                return TransactionAnswer(Header(self.revision), is_met, answers)
            case Range() | Put() | Delete():
                return self._apply((operation,))[0]
        raise EtcdRejected(f"the model does not know {operation}")

    def _apply(self, operations: tuple[AnyKeyOperation, ...]) -> tuple[AnyKeyAnswer, ...]:
        """Execute operations in one revision, all or none."""
        for operation in operations:
            if isinstance(operation, Put) and operation.lease and operation.lease not in self.leases:
                raise EtcdRejected("etcdserver: requested lease not found")
        revision = self.revision + 1
        return tuple(self._apply_one(operation, revision) for operation in operations)

    def _apply_one(self, operation: AnyKeyOperation, revision: int) -> AnyKeyAnswer:
        match operation:
            case Put(key, value, lease):
                was = self.keys.get(key)
                created, version = (was.create_revision, was.version + 1) if was is not None else (revision, 1)
                self.keys[key] = kv = KeyValue(key, value, created, revision, version, lease)
                self.revision = revision
                self._changes.append(Change("put", kv))
                return PutAnswer(Header(revision))
            case Delete(key, end):
                found = self._found(key, end)
                self._delete(found, revision)
                return DeleteAnswer(Header(self.revision), len(found))
            case Range():
                return self._range(operation)

    def _delete(self, kvs: list[KeyValue], revision: int) -> None:
        for kv in kvs:
            del self.keys[kv.key]
            self.revision = revision
            self._changes.append(Change("delete", KeyValue(kv.key, mod_revision=revision)))

    def _range(self, operation: Range) -> RangeAnswer:
        found = self._found(operation.key, operation.end)
        kvs = found[: operation.limit or None]
        if operation.keys_only:
            kvs = [msgspec.structs.replace(kv, value=b"") for kv in kvs]
        return RangeAnswer(Header(self.revision), () if operation.count_only else tuple(kvs), len(found))

    def _found(self, key: bytes, end: bytes) -> list[KeyValue]:
        if not end:
            return [self.keys[key]] if key in self.keys else []
        return sorted((kv for kv in self.keys.values() if _is_in(kv.key, key, end)), key=lambda kv: kv.key)

    def _holds(self, compare: Compare) -> bool:
        found = self._found(compare.key, compare.end)
        if not found and not compare.end:
            if compare.target == "value":
                return False
            found = [KeyValue(compare.key)]
        return all(_compare(kv, compare) for kv in found)

    def _notify(self) -> None:
        changes, self._changes = self._changes, []
        for key, end, changed in self._watchers:
            seen = [each for each in changes if (_is_in(each.kv.key, key, end) if end else each.kv.key == key)]
            if seen:
                changed(seen)


def _is_in(key: bytes, first: bytes, end: bytes) -> bool:
    return first <= key and (end == b"\0" or key < end)


def _compare(kv: KeyValue, compare: Compare) -> bool:
    field = {"create": "create_revision", "mod": "mod_revision"}.get(compare.target, compare.target)
    value, wanted = getattr(kv, field), compare.value
    return bool({"=": value == wanted, "!=": value != wanted, ">": value > wanted, "<": value < wanted}[compare.result])
