"""EtcdValues: values of any size in etcd, which takes 1.5 MiB in one request.

A value up to ``PART_BYTES`` is stored as it is. A larger one is written in parts, under names that nobody used before;
what is stored under its key is a *head* that says where the parts are. So a value appears whole or not at all. Whoever
replaces a head deletes its parts in the same transaction. A writer that dies between its parts and its head leaves the
parts behind: garbage, which nobody reads.

A value that begins like a head is stored in parts too, however short it is: every other value is found as it is.
"""

from __future__ import annotations

from binascii import hexlify
from os import urandom

from tenax._io.etcd.operations import Delete, Put, Range, prefix_end
from tenax.store._api import StoreError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from tenax._io.etcd.operations import KeyValue
    from tenax.store._etcd_keys import EtcdKeys

PART_BYTES = 256 << 10
_HEAD = b"\xff\0tenax value in parts: "


class EtcdValues:
    """The values of one operation of a store: what it reads, and what it is about to store. ``ask`` asks etcd.

    To be used with ``with``: what was staged and is not kept in the end is deleted. After an error it stays, because
    the change may have happened, or may still happen.
    """

    def __init__(self, keys: EtcdKeys, ask: Callable[[Any], Any]) -> None:
        self._keys = keys
        self.ask = ask
        self._staged: set[bytes] = set()
        self._kept: set[bytes] = set()
        self._torn = b""  # the last head whose parts were not all there

    def load(self, kv: KeyValue) -> bytes | None:
        """The value of what was found under a key. None: it was replaced in the meantime, look again."""
        if not kv.value.startswith(_HEAD):
            return kv.value
        value_id, count, length = _parsed(kv.value)
        name = self._keys.parts(value_id)
        parts: list[bytes] = []
        for number in range(count):
            parts += [part.value for part in self.ask(Range(_part(name, number))).kvs]
        value = b"".join(parts)
        if len(parts) == count and len(value) == length:
            return value
        if self._torn == kv.value:  # and it is still there, although parts go together with their head
            raise StoreError(f"parts of the value of {kv.key!r} are missing in etcd: somebody else has deleted them.")
        self._torn = kv.value
        return None

    def remains(self, stored: bytes) -> tuple[Delete, ...]:
        """What to delete when this is replaced."""
        if not stored.startswith(_HEAD):
            return ()
        name = self._keys.parts(_parsed(stored)[0])
        return (Delete(name, prefix_end(name)),)

    def stage(self, value: bytes, most_bytes: int = PART_BYTES) -> bytes:
        """What to store under the key. The parts of a value of more than ``most_bytes`` are in etcd afterwards."""
        if len(value) <= most_bytes and not value.startswith(_HEAD):
            return value
        value_id = hexlify(urandom(16))
        name = self._keys.parts(value_id)
        starts = range(0, len(value), PART_BYTES)
        for number, start in enumerate(starts):
            self.ask(Put(_part(name, number), value[start : start + PART_BYTES]))
        head = _HEAD + b"%s %d %d" % (value_id, len(starts), len(value))
        self._staged.add(head)
        return head

    def keep(self, stored: bytes) -> None:
        """This was stored."""
        self._kept.add(stored)

    def __enter__(self) -> EtcdValues:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if kind is None:
            for head in self._staged - self._kept:
                for delete in self.remains(head):
                    self.ask(delete)


def _parsed(head: bytes) -> tuple[bytes, int, int]:
    try:
        value_id, count, length = head[len(_HEAD) :].split()
        return value_id, int(count), int(length)
    except ValueError:
        raise StoreError(f"a value in etcd begins like one of a store of tenax, but is none: {head[:80]!r}.") from None


def _part(name: bytes, number: int) -> bytes:
    return name + b"%08d" % number
