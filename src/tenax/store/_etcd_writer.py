"""EtcdWriter: changes to etcd that happen exactly once, one after the other, whatever becomes of their answers.

etcd answers a transaction once; the answer can be lost, the client asks again, and a transaction that was given up may
still be carried out seconds later, after a change of leaders. A guard on the key that is changed does not cure that: a
key that was deleted looks as if it had never been there, and a write over our own write hides that ours happened. So
each writer has a *marker*, a key of its own that nobody else writes:

1. Every change is one transaction that also replaces the marker's token by a new one, on the condition that the token
   is still that of our last change. So one of the copies of a transaction happens, and none after our next change.
2. A transaction whose condition failed answers with the marker. If it is the token of one of our attempts, that
   attempt happened, and its result is the result; if not, none has, and the next attempt excludes the earlier ones.
3. Nothing is reported as "not done" while an attempt could still happen: that is excluded first, by moving the marker.

What is not exact: a change that raised an error because nobody answered in time may happen until this writer's next
change. A writer that dies leaves its marker behind, some hundred bytes. ``forget`` deletes it.
"""

from __future__ import annotations

import threading
from binascii import hexlify
from os import urandom
from typing import Generic, TypeVar

import msgspec

from tenax._io.etcd.operations import Compare, Delete, Put, Range, RangeAnswer, Transaction

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

T = TypeVar("T")


class Step(msgspec.Struct, Generic[T], frozen=True):
    """What would be done about what was found. Without operations there is nothing to do, and the result is known."""

    result: T
    operations: tuple[Put | Delete, ...] = ()
    guards: tuple[Compare, ...] = ()  # what was found, and must still be so


class EtcdWriter:
    """Thread-safe: changes wait for one another."""

    def __init__(self, marker: bytes) -> None:
        self._marker = marker
        self._token = b""  # of our last change; empty: there is no marker
        self._is_used = False
        self._lock = threading.Lock()

    def change(self, ask: Callable[[Any], Any], look: Range, plan: Callable[[RangeAnswer | None], Step[T] | None]) -> T:
        """Do what ``plan`` says about what ``look`` finds, and return its result.

        The plan is first asked without having looked, so that it may guess; None means that it must look (again).
        """
        with self._lock:
            results: dict[bytes, T] = {}
            found: RangeAnswer | None = None
            while True:
                step = plan(found)
                if step is None:
                    found = ask(look)
                    continue
                if not step.operations and not results:
                    return step.result
                token = hexlify(urandom(16))
                results[token] = step.result
                self._is_used = True
                answer = ask(self._transaction(step, token, look))
                if not answer.succeeded:
                    marker, found = answer.answers
                    found = msgspec.structs.replace(found, revision=answer.revision)
                    token = marker.kvs[0].value if marker.kvs else b""
                # As we left it: a guard of the step failed. One of this change's: it happened. Another: that of an
                # earlier change, which raised an error and happened nevertheless; or etcd was wiped.
                self._token = token
                if token in results:
                    return results[token]

    def forget(self, ask: Callable[[Any], Any]) -> None:
        """Delete the marker. Whatever of ours could still have happened does not."""
        with self._lock:
            if self._is_used:
                ask(Delete(self._marker))
                self._token, self._is_used = b"", False

    def _transaction(self, step: Step[T], token: bytes, look: Range) -> Transaction:
        marker = self._marker
        guard = Compare(marker, "value", self._token) if self._token else Compare(marker, "create", 0)
        return Transaction(
            compare=(guard, *step.guards),
            then=(*step.operations, Put(marker, token)),
            otherwise=(Range(marker), look),
        )
