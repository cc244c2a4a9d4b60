"""EtcdWriter: exactly-once changes to etcd, one after the other, even if answers are lost.

If the answer to a transaction is lost, the client retries, and an abandoned transaction may still be executed seconds
later, after a leader change. Guarding the changed key is not enough: a deleted key looks as if it had never existed,
and another client's write hides whether our write took effect. So each writer has a *marker*, a key that only it
writes:

1. Every change is one transaction that also replaces the marker's token, on the condition that the token is still that
   of this writer's last change. So only one copy of a transaction takes effect, and none after the next change.
2. A transaction whose condition fails returns the marker. If the marker has the token of one of this change's attempts,
   that attempt took effect, and its result is the result. Otherwise none did, and the next attempt excludes the earlier
   ones.
3. A change is not reported as "not done" while an attempt could still take effect: moving the marker excludes that
   first.

One case is not exact: a change that failed because etcd did not answer in time may take effect until this writer's next
change. A writer that dies leaves its marker behind, about a hundred bytes. ``forget`` deletes it.
"""

from __future__ import annotations

import threading
from binascii import hexlify
from collections.abc import Callable
from os import urandom
from typing import Any, Generic, TypeVar

import msgspec

from tenax._core.etcd.operations import Compare, Delete, Put, Range, RangeAnswer, Transaction

T = TypeVar("T")


class Step(msgspec.Struct, Generic[T], frozen=True):
    """The change to make, given what was read. Without operations there is nothing to do, and the result is known."""

    result: T
    operations: tuple[Put | Delete, ...] = ()
    guards: tuple[Compare, ...] = ()  # conditions on what was read


class EtcdWriter:
    """Thread-safe: changes are serialized."""

    def __init__(self, marker: bytes) -> None:
        self._marker = marker
        self._token = b""  # of the last change; empty: there is no marker
        self._is_used = False
        self._lock = threading.Lock()

    def change(
        self, call: Callable[[Any], Any], read: Range, plan: Callable[[RangeAnswer | None], Step[T] | None]
    ) -> Step[T]:
        """Execute the step that ``plan`` returns for the answer to ``read``, and return it.

        ``plan`` is first called with None, before any read, and may guess. If it returns None, it is called again after
        a read.
        """
        with self._lock:
            steps: dict[bytes, Step[T]] = {}
            found: RangeAnswer | None = None
            while True:
                step = plan(found)
                if step is None:
                    found = call(read)
                    continue
                if not step.operations and not steps:
                    return step
                token = hexlify(urandom(16))
                steps[token] = step
                self._is_used = True
                answer = call(self._transaction(step, token, read))
                if not answer.succeeded:
                    marker, found = answer.answers
                    found = msgspec.structs.replace(found, header=answer.header)
                    token = marker.kvs[0].value if marker.kvs else b""
                # The previous token: a guard of the step failed. A token of this change: that attempt took effect.
                # Another one: an earlier change that raised an error took effect nevertheless, or etcd was wiped.
                self._token = token
                if token in steps:
                    return steps[token]

    def forget(self, call: Callable[[Any], Any]) -> None:
        """Delete the marker. No earlier attempt can take effect afterwards."""
        with self._lock:
            if self._is_used:
                call(Delete(self._marker))
                self._token, self._is_used = b"", False

    def _transaction(self, step: Step[T], token: bytes, read: Range) -> Transaction:
        marker = self._marker
        guard = Compare(marker, "value", self._token) if self._token else Compare(marker, "create", 0)
        return Transaction(
            compare=(guard, *step.guards), then=(*step.operations, Put(marker, token)), otherwise=(Range(marker), read)
        )
