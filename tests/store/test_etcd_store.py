"""The store in etcd: the contract of stores, and exactly-once changes whatever answers are lost."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

from kit.etcd import EtcdCluster, unique_prefix
from tenax._core.etcd.errors import EtcdUnavailable
from tenax._core.etcd.operations import Compact, Delete, Operation, Put, Range, Transaction, prefix_end
from tenax._io.etcd.blocking import BlockingEtcd
from tenax.store import (
    EtcdStore,
    PrefixStore,
    Store,
    StoreConnectionError,
    StoreError,
    StoreTimeoutError,
)
from tenax.store._etcd_values import PART_BYTES
from tenax.testing.store_contract import StoreContract

TIMEOUT_S = 60.0
BIG = bytes(range(256)) * (3 * PART_BYTES // 256) + b"and a bit"


@pytest.fixture(scope="module")
def client(etcd: EtcdCluster) -> Iterator[BlockingEtcd]:
    blocking = etcd.client()
    yield blocking
    blocking.close()


@pytest.fixture
def prefix() -> str:
    return unique_prefix().decode()


@pytest.fixture
def store(client: BlockingEtcd, prefix: str) -> EtcdStore:
    return EtcdStore(client, prefix, TIMEOUT_S)


def names_under(client: BlockingEtcd, prefix: str) -> list[bytes]:
    """Return all keys in etcd under the prefix, without it."""
    start = prefix.encode()
    found = client.call(Range(start, prefix_end(start), keys_only=True))
    return [kv.key.removeprefix(start) for kv in found.kvs]


class TestContract(StoreContract):
    @pytest.fixture(autouse=True)
    def _client(self, client: BlockingEtcd) -> None:
        self.client = client

    def make_store(self) -> Store:
        return EtcdStore(self.client, unique_prefix().decode(), TIMEOUT_S)


class TestContractUnderAPrefix(TestContract):
    def make_store(self) -> Store:
        return PrefixStore("some/part", super().make_store())


# --- exactly once -----------------------------------------------------------------------------------------------------


class FaultyClient(BlockingEtcd):
    """A client with faults in its transactions; other operations pass through."""

    def __init__(self, client: BlockingEtcd, way: Callable[[Callable[[], Any]], Any]) -> None:
        self._inner = client
        self.way: Callable[[Callable[[], Any]], Any] | None = way

    def call(self, operation: Operation[Any], patience_s: float | None = None) -> Any:
        if isinstance(operation, Transaction) and self.way is not None and not isinstance(operation.then[0], Range):
            return self.way(lambda: self._inner.call(operation, patience_s))
        return self._inner.call(operation, patience_s)

    def wait_for_change(self, *args: Any) -> Any:
        return self._inner.wait_for_change(*args)


def retried(send: Callable[[], Any]) -> Any:
    """Lose the first answer; the client retries."""
    send()
    return send()


def answer_lost_for_good(send: Callable[[], Any]) -> Any:
    send()
    raise EtcdUnavailable("no answer")


def test_a_change_whose_answer_was_lost_happens_once(client: BlockingEtcd, prefix: str) -> None:
    store = EtcdStore(FaultyClient(client, retried), prefix)
    assert [store.add("n", 1) for _ in range(5)] == [1, 2, 3, 4, 5]
    store.append("text", "a")
    store.append("text", "b")
    assert store.get("text") == b"ab"
    assert store.compare_set("text", "ab", "c") == b"c"
    store.queue_push("queue", "1")
    store.queue_push("queue", "2")
    assert store.queue_pop("queue") == b"1"
    assert store.queue_len("queue") == 1
    assert store.delete_key("text") is True
    assert store.delete_key("text") is False
    store.multi_set(["a", "b"], ["1", "2"])
    store.set("a", "3")
    assert store.multi_get(["a", "b"]) == [b"3", b"2"]


def test_many_writers_whose_answers_are_lost_lose_no_count(client: BlockingEtcd, prefix: str) -> None:
    counted: list[int] = []

    def count() -> None:
        store = EtcdStore(FaultyClient(client, retried), prefix)
        counted.extend(store.add("n", 1) for _ in range(20))

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert sorted(counted) == list(range(1, 81))


def test_the_result_is_that_of_the_change_even_if_others_have_written_since(
    client: BlockingEtcd, store: EtcdStore, prefix: str
) -> None:
    """The key no longer shows that the change happened."""

    def overtaken(send: Callable[[], Any]) -> Any:
        send()
        store.add("n", 10)
        return send()

    bad = EtcdStore(FaultyClient(client, overtaken), prefix)
    assert bad.add("n", 1) == 1
    assert store.get("n") == b"11"


def test_a_retried_set_does_not_restore_a_deleted_key(client: BlockingEtcd, store: EtcdStore, prefix: str) -> None:
    """The key looks unset, and the retry would set it a second time."""

    def deleted(send: Callable[[], Any]) -> Any:
        send()
        assert store.delete_key("key")
        return send()

    bad = EtcdStore(FaultyClient(client, deleted), prefix)
    assert bad.compare_set("key", "", "claimed") == b"claimed"
    bad.set("key", "value")
    assert bad.add("key", 1) == 1
    assert not store.check(["key"])


def test_a_change_that_raised_an_error_does_not_happen_after_the_next_one(
    client: BlockingEtcd, store: EtcdStore, prefix: str
) -> None:
    held: list[Callable[[], Any]] = []

    def hold(send: Callable[[], Any]) -> Any:
        held.append(send)
        raise EtcdUnavailable("no answer")

    unlucky = FaultyClient(client, hold)
    bad = EtcdStore(unlucky, prefix)
    with pytest.raises(StoreConnectionError, match="it may have taken effect"):
        bad.set("key", "old")
    unlucky.way = None
    bad.set("other", "new")
    assert held[0]().succeeded is False  # a leader was changed meanwhile, and now it comes
    assert not store.check(["key"])


def test_a_writer_continues_after_a_lost_answer(client: BlockingEtcd, store: EtcdStore, prefix: str) -> None:
    """The change took effect, which the writer learns with the next one."""
    unlucky = FaultyClient(client, answer_lost_for_good)
    bad = EtcdStore(unlucky, prefix)
    with pytest.raises(StoreConnectionError):
        bad.add("n", 1)
    unlucky.way = None
    assert bad.add("n", 1) == 2
    assert store.get("n") == b"2"


def test_a_reported_failure_cannot_take_effect_later(client: BlockingEtcd, store: EtcdStore, prefix: str) -> None:
    """A copy of a failed compare_set that is still in transit is excluded before the result is returned."""
    copies: list[Callable[[], Any]] = []

    def late(send: Callable[[], Any]) -> Any:
        if not copies:
            copies.append(send)
            store.set("leader", "another")
        return send()

    bad = EtcdStore(FaultyClient(client, late), prefix)
    assert bad.compare_set("leader", "", "me") == b"another"
    store.delete_key("leader")
    assert copies[0]().succeeded is False
    assert not store.check(["leader"])


def test_a_writer_survives_the_loss_of_all_keys_in_etcd(client: BlockingEtcd, prefix: str) -> None:
    store = EtcdStore(client, prefix)
    assert store.add("n", 5) == 5
    client.call(Delete(prefix.encode(), prefix_end(prefix.encode())))
    assert store.add("n", 1) == 1


def test_no_count_is_lost_or_doubled_when_leaders_die(make_etcd: Callable[..., EtcdCluster]) -> None:
    """The leader is killed twice while writers add and compare_set; members restart in between."""
    cluster = make_etcd(3, heartbeat_ms=30, election_ms=300)
    client = cluster.client()
    sums: list[int] = []
    went_on = threading.Semaphore(0)
    is_over = threading.Event()
    writers = 4

    def write(number: int) -> None:
        store = EtcdStore(client, "/run", TIMEOUT_S)
        while not is_over.is_set():
            sums.append(store.add("n", 1))
            store.append("text", f"{number},")
            went_on.release()

    threads = [threading.Thread(target=write, args=(number,)) for number in range(writers)]
    try:
        for thread in threads:
            thread.start()
        for _ in range(2):
            for _ in range(40):
                assert went_on.acquire(timeout=TIMEOUT_S)
            leader = cluster.leader()
            cluster.kill(leader)
            for _ in range(40):
                assert went_on.acquire(timeout=TIMEOUT_S)
            cluster.start(leader)
        is_over.set()
        for thread in threads:
            thread.join(TIMEOUT_S)
        store = EtcdStore(client, "/run", TIMEOUT_S)
        assert sorted(sums) == list(range(1, len(sums) + 1))
        assert store.get("n") == str(len(sums)).encode()
        assert store.get("text").count(b",") == len(sums)
    finally:
        is_over.set()
        client.close()


def test_a_forked_process_is_another_writer(etcd: EtcdCluster, prefix: str) -> None:
    code = """
        import os, sys
        from tenax.etcd import BlockingEtcd
        from tenax.etcd import etcd_settings
        from tenax.store import EtcdStore

        store = EtcdStore(BlockingEtcd(etcd_settings(sys.argv[1])), sys.argv[2])
        store.add("n", 1)
        children = []
        for _ in range(3):
            pid = os.fork()
            if pid == 0:
                for _ in range(10):
                    store.add("n", 1)
                os._exit(0)
            children.append(pid)
        for _ in range(10):
            store.add("n", 1)
        assert [os.waitpid(pid, 0)[1] for pid in children] == [0, 0, 0]
        print(store.add("n", 0))
    """
    # Python 3.12 and later warn about a fork with threads.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", textwrap.dedent(code), etcd.endpoints, prefix]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.stdout, done.stderr) == ("41\n", "")


# --- waiting ----------------------------------------------------------------------------------------------------------


class Watched(BlockingEtcd):
    """A client that calls a function before it watches."""

    def __init__(self, client: BlockingEtcd, before: Callable[[], None]) -> None:
        self._inner = client
        self.before: Callable[[], None] | None = before
        self.watches = 0

    def call(self, operation: Operation[Any], patience_s: float | None = None) -> Any:
        return self._inner.call(operation, patience_s)

    def wait_for_change(self, *args: Any) -> Any:
        self.watches += 1
        before, self.before = self.before, None
        if before is not None:
            before()
        return self._inner.wait_for_change(*args)


def test_a_wait_sees_a_key_that_was_set_and_deleted(client: BlockingEtcd, store: EtcdStore, prefix: str) -> None:
    def come_and_go() -> None:
        store.multi_set(["a", "b"], ["1", "2"])
        store.delete_key("a")
        store.delete_key("b")

    EtcdStore(Watched(client, come_and_go), prefix).wait(["a", "b"], TIMEOUT_S)
    assert store.list_keys() == []


def test_a_wait_survives_the_compaction_of_etcd(make_etcd: Callable[..., EtcdCluster]) -> None:
    cluster = make_etcd()
    client = cluster.client()
    store = EtcdStore(client, "/run")

    def forget() -> None:
        store.set("other", "1")
        client.call(Compact(client.call(Put(b"x", b"")).revision))
        threading.Thread(target=store.set, args=("key", "value")).start()

    watched = Watched(client, forget)
    try:
        assert EtcdStore(watched, "/run", TIMEOUT_S).get("key") == b"value"
    finally:
        client.close()
    assert watched.watches > 0


def test_the_timeout_of_wait_has_two_names(store: EtcdStore) -> None:
    soon = timedelta(milliseconds=50)
    for wait in (
        lambda: store.wait(["never"], soon),
        lambda: store.wait(["never"], override_timeout=soon),
        lambda: store.wait(["never"], timeout=0.05),
    ):
        with pytest.raises(
            StoreTimeoutError, match=r"timed out after 0\.05 s waiting for the key 'never' in the store"
        ):
            wait()


def test_waiting_for_more_keys_than_fit_in_one_transaction(store: EtcdStore) -> None:
    keys = [str(number) for number in range(150)]
    store.multi_set(keys[:-1], keys[:-1])
    late = threading.Thread(target=store.set, args=(keys[-1], "late"))
    assert not store.check(keys)
    late.start()
    store.wait(keys, TIMEOUT_S)
    late.join(TIMEOUT_S)
    assert store.check(keys)
    assert store.multi_get(keys) == [key.encode() for key in keys[:-1]] + [b"late"]


def test_a_waiting_thread_does_not_block_others_of_the_same_handle(store: EtcdStore) -> None:
    found: list[bytes] = []
    waiting = threading.Thread(target=lambda: found.append(store.get("late")))
    waiting.start()
    assert store.add("n", 1) == 1
    store.set("late", "here")
    waiting.join(TIMEOUT_S)
    assert found == [b"here"]


def test_a_wait_survives_a_restart_of_etcd(make_etcd: Callable[..., EtcdCluster]) -> None:
    """Its members are killed and restart; a key that is set afterwards ends the wait."""
    cluster = make_etcd()
    client = cluster.client()

    def restart() -> None:
        cluster.kill(0)
        cluster.start(0)
        EtcdStore(client, "/run").set("key", "value")

    watched = Watched(client, lambda: threading.Thread(target=restart).start())
    try:
        assert EtcdStore(watched, "/run", TIMEOUT_S).get("key") == b"value"
    finally:
        client.close()


# --- large values -----------------------------------------------------------------------------------------------------


def test_a_value_is_stored_in_etcd_unchanged(client: BlockingEtcd, store: EtcdStore, prefix: str) -> None:
    store.set("some/key", "value")
    store.set("a\0b%c", b"\0")
    assert client.call(Range(prefix.encode() + b"some/key")).kvs[0].value == b"value"
    assert sorted(store.list_keys()) == ["a\0b%c", "some/key"]
    assert store.get("a\0b%c") == b"\0"


@pytest.mark.parametrize("value", [BIG, b"\xff\0tenax value in parts: 1 2 3"], ids=["big", "like a head"])
def test_large_values_leave_nothing_behind(client: BlockingEtcd, store: EtcdStore, prefix: str, value: bytes) -> None:
    store.set("key", value)
    assert store.get("key") == value
    store.set("key", value + b"2")
    assert store.get("key") == value + b"2"
    assert store.compare_set("key", "wrong", value) == value + b"2"
    assert store.compare_set("key", value + b"2", value) == value
    store.append("key", "3")
    assert store.get("key") == value + b"3"
    store.multi_set(["key", "other"], [value, value])
    assert store.multi_get(["key", "other"]) == [value, value]
    store.queue_push("queue", value)
    assert store.queue_pop("queue") == value
    store.set("key", "small")
    assert store.delete_key("other")
    store.close()
    assert names_under(client, prefix) == [b"key"]


def test_large_values_of_concurrent_writers_are_complete(client: BlockingEtcd, store: EtcdStore) -> None:
    values = [bytes([letter]) * (PART_BYTES + letter) for letter in b"abc"]
    store.set("key", values[0])
    seen: set[bytes] = set()

    def write(value: bytes) -> None:
        clone = store.clone()
        for _ in range(4):
            clone.set("key", value)

    threads = [threading.Thread(target=write, args=(value,)) for value in values]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        seen.add(store.get("key"))
    assert seen <= set(values)


def test_keys_damaged_by_another_client_are_reported(client: BlockingEtcd, store: EtcdStore, prefix: str) -> None:
    store.set("key", BIG)
    parts = prefix.encode() + b"\0values/"
    client.call(Delete(parts, prefix_end(parts)))
    with pytest.raises(StoreError, match=r"parts of the value of .*key.* are missing in etcd"):
        store.get("key")
    client.call(Put(prefix.encode() + b"key", b"\xff\0tenax value in parts: nonsense"))
    with pytest.raises(StoreError, match="has an invalid header"):
        store.get("key")


# --- the handle -------------------------------------------------------------------------------------------------------


def test_a_prefix_ends_with_a_slash(client: BlockingEtcd, prefix: str) -> None:
    store = EtcdStore(client, prefix.rstrip("/"))
    assert store.prefix == prefix
    assert store.timeout == timedelta(seconds=300)
    store.set("key", "1")
    EtcdStore(client, f"{prefix.rstrip('/')}-other").set("key", "2")
    assert store.list_keys() == ["key"]
    assert store.get("key") == b"1"


def test_a_closed_store_leaves_the_values_and_the_client(client: BlockingEtcd, store: EtcdStore, prefix: str) -> None:
    store.set("key", "value")
    assert len(names_under(client, prefix)) == 2  # and its marker
    store.close()
    store.close()
    assert names_under(client, prefix) == [b"key"]
    with pytest.raises(StoreConnectionError, match="is closed"):
        store.get("key")


def test_a_store_can_own_its_client(etcd: EtcdCluster, prefix: str) -> None:
    own = etcd.client()
    with EtcdStore(own, prefix, owns_client=True) as store:
        store.clone().close()
        store.set("key", "value")
    with pytest.raises(Exception, match="closed"):
        own.call(Range(b"x"))


def test_a_rejection_of_etcd_is_reported(make_etcd: Callable[..., EtcdCluster]) -> None:
    from kit.etcd import ALLOWED, USER, USER_PASSWORD

    cluster = make_etcd(users=True)
    client = cluster.client(user=USER, password=USER_PASSWORD)
    try:
        EtcdStore(client, ALLOWED.decode()).set("key", "value")
        with pytest.raises(StoreError, match=r"could not set 'key': .*permission"):
            EtcdStore(client, "/elsewhere").set("key", "value")
    finally:
        client.close()


def test_an_unreachable_etcd_is_reported() -> None:
    class Unreachable(BlockingEtcd):
        def __init__(self) -> None:
            return

        def call(self, operation: Operation[Any], patience_s: float | None = None) -> Any:
            raise EtcdUnavailable("e1:2379: connection refused", is_certain=True)

        wait_for_change = call  # type: ignore[assignment]

    store = EtcdStore(Unreachable(), "/run")
    with pytest.raises(StoreConnectionError, match=r"the store under '/run/' in etcd: could not get the key 'a': e1"):
        store.get("a")
    with pytest.raises(StoreConnectionError, match=r"could not set 'a': e1:2379: connection refused\.$"):
        store.set("a", "1")
    store.close()
