"""The model of etcd gives the same answers as a real etcd: to every operation, and to watches."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from kit.etcd import EtcdCluster, needs_etcd, unique_prefix
from kit.processes import TIMEOUT_S
from tenax._core.etcd.errors import EtcdError
from tenax._core.etcd.operations import (
    Answer,
    Change,
    Compare,
    Delete,
    GrantLease,
    KeepAlive,
    Put,
    Range,
    RevokeLease,
    Transaction,
    prefix_end,
)
from tenax._io.etcd.client import EtcdClient
from tenax._io.etcd.subscription import Subscription
from tenax._io.loop import Loop
from tenax.testing.etcd_model import EtcdModel

pytestmark = [needs_etcd, pytest.mark.process]
NAMES = (b"leader", b"record", b"nodes/a", b"nodes/b")


class Both:
    """A model and a real etcd, and the changes that watches of both have reported."""

    def __init__(self, etcd: EtcdCluster) -> None:
        self.prefix = unique_prefix()
        self.model = EtcdModel()
        self.seen: tuple[list[Change], list[Change]] = ([], [])
        self.leases = [int.from_bytes(os.urandom(7), "big") for _ in range(3)]
        self._loop = Loop()
        self._client = EtcdClient(self._loop, etcd.settings())
        self._base = self._call(Range(self.prefix)).revision - self.model.revision
        end = prefix_end(self.prefix)
        begun: list[object] = []
        self._watch = Subscription(self._client, self.prefix, end, begun.append, self.seen[1].extend, begun.append)
        self._watch.start()
        self.until(lambda: begun)
        self.model.watch(self.prefix, end, self.seen[0].extend)

    def until(self, is_so: Callable[[], Any]) -> None:
        until = self._loop.now() + TIMEOUT_S
        while not is_so():
            assert self._loop.now() < until, "timed out"
            tick = self._loop.now() + 0.05
            self._loop.next_event(lambda tick=tick: tick)  # type: ignore[misc]

    def _call(self, operation: Any) -> Any:
        answers: list[Any] = []
        self._client.call(operation, answers.append, answers.append)
        self.until(lambda: answers)
        return answers[0]

    def call(self, operation: Any) -> Any:
        """Execute it in both, compare the answers, and return the model's."""
        try:
            modelled: object = self.model.call(operation, time.monotonic())
        except EtcdError as error:
            modelled = error
        real = self._call(self._real(operation))
        if isinstance(modelled, EtcdError):
            assert type(real) is type(modelled), (operation, real, modelled)
        else:
            assert self._plain(real, self._base) == self._plain(modelled, 0), operation
        return modelled

    def _real(self, operation: Any) -> Any:
        """Return the operation with the revisions of the real etcd, which has other keys too."""
        if not isinstance(operation, Transaction):
            return operation
        compare = tuple(
            msgspec.structs.replace(each, value=each.value + self._base)
            if each.target in ("create", "mod") and each.value
            else each
            for each in operation.compare
        )
        return msgspec.structs.replace(operation, compare=compare)

    def _plain(self, answer: Any, base: int) -> Any:
        """Return the answer as comparable values, without what the model does not have."""
        if isinstance(answer, list | tuple):
            return [self._plain(each, base) for each in answer]
        if not isinstance(answer, msgspec.Struct):
            return answer
        kinds = ("revision", "create_revision", "mod_revision")
        fields = {name: getattr(answer, name) for name in answer.__struct_fields__ if name != "header"}
        if isinstance(answer, Answer):
            fields["revision"] = answer.revision
        is_lease = "ttl_s" in fields
        return {
            name: value - base if name in kinds and value and not is_lease else self._plain(value, base)
            for name, value in fields.items()
            if not (is_lease and name == "revision")
        }

    def check_changes(self) -> None:
        self.until(lambda: len(self.seen[1]) >= len(self.seen[0]))
        assert self._plain(self.seen[1], self._base) == self._plain(self.seen[0], 0)

    def draw(self, rng: random.Random) -> Any:
        key = self.prefix + rng.choice(NAMES)
        lease = rng.choice((0, 0, *self.leases))
        match rng.randrange(8):
            case 0:
                return Range(key)
            case 1:
                return Range(self.prefix, prefix_end(self.prefix), count_only=rng.random() < 0.2)
            case 2:
                return Put(key, bytes([rng.randrange(3)]), lease)
            case 3:
                return Delete(key)
            case 4:
                return GrantLease(600, rng.choice(self.leases))
            case 5:
                return rng.choice((KeepAlive, RevokeLease))(rng.choice(self.leases))
        then = (Put(key, b"then", lease), Range(self.prefix + b"record"), Delete(self.prefix + b"nodes/a"))
        names = [key, self.prefix + b"leader"]
        return Transaction(
            tuple(map(self._draw_compare, [rng] * rng.randrange(3), names)),
            then[: rng.randrange(3 if key.endswith(b"nodes/a") else 4)],
            (Range(key), Range(self.prefix + b"leader"))[: rng.randrange(3)],
        )

    def _draw_compare(self, rng: random.Random, key: bytes) -> Compare:
        kv = self.model.keys.get(key)
        target: Any = rng.choice(("create", "mod", "version", "value", "lease"))
        result: Any = rng.choice("=!><").replace("!", "!=")
        if target == "value":
            return Compare(key, target, rng.choice((b"then", bytes([rng.randrange(3)]))), result)
        field = {"create": "create_revision", "mod": "mod_revision"}.get(target, target)
        return Compare(key, target, rng.choice((0, getattr(kv, field) if kv is not None else 0)), result)

    def close(self) -> None:
        self._watch.close()
        self._client.close()
        self._loop.close()


@pytest.fixture
def both(make_etcd: Callable[..., EtcdCluster]) -> Iterator[Both]:
    made = Both(make_etcd(1))
    yield made
    made.close()


@pytest.mark.parametrize("seed", range(4))
def test_random_operations_give_the_same_answers_and_changes(both: Both, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(250):
        both.call(both.draw(rng))
    both.check_changes()


def test_a_lease_expires_with_its_keys_and_a_renewed_one_does_not(both: Both) -> None:
    short, long, _ = both.leases
    both.call(GrantLease(2, short))
    both.call(GrantLease(600, long))
    both.call(Put(both.prefix + b"leader", b"", short))
    both.call(Put(both.prefix + b"record", b"", long))
    both.until(lambda: len(both.seen[1]) == 3)  # the third change is the expiry
    both.model.expire(time.monotonic())
    both.check_changes()
    assert both.call(KeepAlive(short)).ttl_s == 0
    assert both.call(KeepAlive(long)).ttl_s == 600
    assert both.call(Range(both.prefix + b"leader")).kvs == ()


def test_a_write_under_the_guards_of_a_leader_fails_once_its_key_was_created_anew(both: Both) -> None:
    leader, record = both.prefix + b"leader", both.prefix + b"record"
    term = both.call(Put(leader, b"one")).revision
    write = Transaction((Compare(leader, "create", term), Compare(leader, "value", b"one")), (Put(record, b"by one"),))
    assert both.call(write).succeeded
    both.call(Put(leader, b"one"))  # the same creation
    assert both.call(write).succeeded
    both.call(Delete(leader))
    both.call(Put(leader, b"one"))
    assert not both.call(write).succeeded
