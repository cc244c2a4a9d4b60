"""EtcdKeys: the layout of an etcd store below its prefix. EtcdValues: values of any size in it.

- ``<prefix><key>``: a value, under the user's key. ``%`` and NUL bytes in the key are escaped, so that no user key
  contains a NUL.
- ``<prefix><key>\\0q<order>``: an item of the queue of that name. It sorts right after the key, so that one range, and
  one watch, covers everything that makes a key exist.
- ``<prefix>\\0values/<id>/<number>``: parts of values that are too large for one request, which etcd limits to 1.5 MiB.
- ``<prefix>\\0writers/<id>``: the last change of each writer (``_etcd_writer``).

A value up to ``PART_BYTES`` is stored under its key. A larger value is written in parts, under new names; its key gets
a *head* that refers to the parts. So a value becomes visible atomically. The transaction that replaces a head also
deletes its parts. A writer that dies between its parts and its head leaves the parts behind as garbage.

A short value that starts like a head is stored in parts, too, so that heads are unambiguous.
"""

from __future__ import annotations

from binascii import hexlify
from collections.abc import Callable
from os import urandom
from typing import Any, TypeVar

from tenax._core.etcd.operations import Delete, KeyValue, Put, Range, RangeAnswer, prefix_end
from tenax.store._api import StoreError, as_bytes, as_text
from tenax.store._etcd_writer import EtcdWriter, Step

T = TypeVar("T")

PART_BYTES = 256 << 10
_QUEUE = b"\0q"
_AFTER_QUEUE = b"\0r"
_VALUES = b"\0values/"
_WRITERS = b"\0writers/"
_ORDER_DIGITS = 20
_HEAD = b"\xff\0tenax value in parts: "


class EtcdKeys:
    """The etcd keys below one prefix, which ends with a slash."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix if prefix.endswith("/") else f"{prefix}/"
        self.start = as_bytes(self.prefix)
        self.end = prefix_end(self.start)

    def value(self, key: str) -> bytes:
        return self.start + as_bytes(key).replace(b"%", b"%25").replace(b"\0", b"%00")

    def existence(self, key: str) -> tuple[bytes, bytes]:
        """Return the range that is non-empty if the key or its queue exists. The value, if any, comes first."""
        name = self.value(key)
        return name, name + _AFTER_QUEUE

    def queue(self, key: str) -> tuple[bytes, bytes]:
        """Return the range of a queue, in the order of its items."""
        name = self.value(key)
        return name + _QUEUE, name + _AFTER_QUEUE

    def queued(self, key: str, revision: int, unique: str) -> bytes:
        """Return the key of a queue item that comes after all items pushed up to this revision."""
        return self.value(key) + _QUEUE + b"%0*d-" % (_ORDER_DIGITS, revision) + unique.encode()

    def parts(self, value_id: bytes) -> bytes:
        return self.start + _VALUES + value_id + b"/"

    def writer(self, writer_id: str) -> bytes:
        return self.start + _WRITERS + writer_id.encode()

    def users_key(self, name: bytes) -> str | None:
        """Return the user's key for this etcd key; None if it is internal."""
        if b"\0" in name:
            return None
        return as_text(name[len(self.start) :].replace(b"%00", b"\0").replace(b"%25", b"%"))


class EtcdValues:
    """Loads and stages the values of one store operation. ``call`` executes an etcd operation.

    A context manager: values that were staged but not stored are deleted on exit. After an error they stay, because the
    change may have taken effect, or still may.
    """

    def __init__(self, keys: EtcdKeys, call: Callable[[Any], Any], writer: EtcdWriter) -> None:
        self._keys = keys
        self._writer = writer
        self.call = call
        self._staged: set[bytes] = set()  # heads that are not stored
        self._torn = b""  # the last head with missing parts

    def load(self, kv: KeyValue) -> bytes | None:
        """Return the value of a key. None: it was replaced meanwhile, so the caller must read the key again."""
        if not kv.value.startswith(_HEAD):
            return kv.value
        value_id, count, length = _parse_head(kv.value)
        name = self._keys.parts(value_id)
        parts = [part.value for number in range(count) for part in self.call(Range(_part(name, number))).kvs]
        value = b"".join(parts)
        if len(parts) == count and len(value) == length:
            return value
        if self._torn == kv.value:  # the head is still there, although parts are deleted together with their head
            raise StoreError(f"parts of the value of {kv.key!r} are missing in etcd: another client deleted them.")
        self._torn = kv.value
        return None

    def part_deletes(self, stored: bytes) -> tuple[Delete, ...]:
        """Return the operations that delete the parts of a stored value."""
        if not stored.startswith(_HEAD):
            return ()
        name = self._keys.parts(_parse_head(stored)[0])
        return (Delete(name, prefix_end(name)),)

    def stage(self, value: bytes, max_bytes: int = PART_BYTES) -> bytes:
        """Return what to store under the key. A value of more than ``max_bytes`` is written in parts first."""
        if len(value) <= max_bytes and not value.startswith(_HEAD):
            return value
        value_id = hexlify(urandom(16))
        name = self._keys.parts(value_id)
        starts = range(0, len(value), PART_BYTES)
        for number, start in enumerate(starts):
            self.call(Put(_part(name, number), value[start : start + PART_BYTES]))
        head = _HEAD + b"%s %d %d" % (value_id, len(starts), len(value))
        self._staged.add(head)
        return head

    def change(self, read: Range, plan: Callable[[RangeAnswer | None], Step[T] | None]) -> T:
        """Execute ``EtcdWriter.change``. Return the step's result."""
        step = self._writer.change(self.call, read, plan)
        self._staged.difference_update([each.value for each in step.operations if isinstance(each, Put)])
        return step.result

    def __enter__(self) -> EtcdValues:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            for head in self._staged:
                for delete in self.part_deletes(head):
                    self.call(delete)


def _parse_head(head: bytes) -> tuple[bytes, int, int]:
    try:
        value_id, count, length = head[len(_HEAD) :].split()
        return value_id, int(count), int(length)
    except ValueError:
        raise StoreError(f"a value in etcd has an invalid header: {head[:80]!r}.") from None


def _part(name: bytes, number: int) -> bytes:
    return name + b"%08d" % number
