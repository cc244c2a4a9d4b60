"""Subscriptions at one member: the first list, changes, and lost history."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kit.etcd import ALLOWED, ALONE, USER, USER_PASSWORD, EtcdCluster, unique_prefix
from kit.linear import assert_linear
from tenax._core.etcd.errors import EtcdError, EtcdRefused
from tenax._core.etcd.operations import Change, Compact, Delete, Put, RangeAnswer, Transaction, prefix_end
from tenax._io.etcd.http_connection import EtcdEndpoint
from tenax._io.etcd.http_response import Head
from tenax._io.etcd.settings import etcd_settings
from tenax._io.etcd.subscription import Subscription, WatchStream

from .kit import ClientInLoop, ScriptedServer, http


class Subscriber:
    """A subscription and what it reported, in order."""

    def __init__(self, client: ClientInLoop, prefix: bytes) -> None:
        self.received: list[Any] = []
        self.troubles: list[EtcdError] = []
        self.subscription = Subscription(
            client.etcd, prefix, prefix_end(prefix), self.received.append, self._changed, self.troubles.append
        )
        self.subscription.start()

    def _changed(self, changes: list[Change]) -> None:
        assert changes
        self.received += [(change.kind, change.kv.key, change.kv.value) for change in changes]

    @property
    def begun(self) -> list[RangeAnswer]:
        return [each for each in self.received if isinstance(each, RangeAnswer)]


@pytest.fixture
def client(etcd: EtcdCluster) -> Iterator[ClientInLoop]:
    with ClientInLoop(etcd.settings()) as client:
        yield client


def test_current_values_and_changes_are_reported(client: ClientInLoop) -> None:
    prefix = unique_prefix()
    client.call(Put(prefix + b"a", b"1"))
    client.call(Put(prefix[:-1], b"outside the prefix"))
    subscriber = Subscriber(client, prefix)
    client.until(lambda: subscriber.received)
    assert [(kv.key, kv.value) for kv in subscriber.received[0].kvs] == [(prefix + b"a", b"1")]
    client.call(Put(prefix + b"b", b"2"))
    client.call(Put(prefix[:-1], b"outside the prefix too"))
    client.call(Transaction((), (Put(prefix + b"c", b"3" * 300_000), Delete(prefix + b"a"))))
    client.until(lambda: len(subscriber.received) >= 4)
    assert subscriber.received[1] == ("put", prefix + b"b", b"2")
    assert set(subscriber.received[2:]) == {("put", prefix + b"c", b"3" * 300_000), ("delete", prefix + b"a", b"")}
    subscriber.subscription.close()
    client.call(Put(prefix + b"d", b""))
    client.run_for(0.1)
    assert len(subscriber.received) == 4
    assert not subscriber.troubles


def test_changes_between_the_list_and_the_stream_are_reported(client: ClientInLoop) -> None:
    prefix = unique_prefix()
    changes: list[Change] = []
    other: list[object] = []

    def begun(_: RangeAnswer) -> None:
        client.etcd.call(Put(prefix + b"k", b"v"), other.append, other.append)

    subscription = Subscription(client.etcd, prefix, prefix_end(prefix), begun, changes.extend, other.append)
    subscription.start()
    client.until(lambda: changes)
    assert [change.kv.key for change in changes] == [prefix + b"k"]
    subscription.close()


def test_a_subscription_can_be_closed_in_its_callback(client: ClientInLoop) -> None:
    subscriptions: list[Subscription] = []
    received: list[object] = []

    def begun(answer: RangeAnswer) -> None:
        received.append(answer)
        subscriptions[0].close()

    subscriptions.append(Subscription(client.etcd, unique_prefix(), b"", begun, received.append, received.append))
    subscriptions[0].start()
    client.until(lambda: received)
    client.run_for(0.1)
    assert len(received) == 1


def test_compacted_history_restarts_the_subscription(make_etcd: Callable[..., EtcdCluster]) -> None:
    cluster = make_etcd(**ALONE)
    with ClientInLoop(cluster.settings()) as client, ClientInLoop(cluster.settings()) as other:
        subscriber = Subscriber(client, b"p/")
        client.until(lambda: subscriber.subscription.endpoint)
        cluster.kill(0)  # the subscriber does not notice: its loop does not run
        cluster.start(0)
        for value in (b"1", b"2", b"3"):
            revision = other.call(Put(b"p/k", value)).revision
        other.call(Compact(revision))
        client.until(lambda: len(subscriber.begun) == 2)
        assert subscriber.received == subscriber.begun  # lost changes are not reported in part
        assert [(kv.key, kv.value, kv.version) for kv in subscriber.received[1].kvs] == [(b"p/k", b"3", 3)]
        other.call(Put(b"p/k", b"4"))
        client.until(lambda: len(subscriber.received) == 3)
        assert subscriber.received[2] == ("put", b"p/k", b"4")
        subscriber.subscription.close()


def test_a_wiped_etcd_restarts_the_subscription(make_etcd: Callable[..., EtcdCluster]) -> None:
    cluster = make_etcd(**ALONE)
    with ClientInLoop(cluster.settings()) as client:
        for value in (b"1", b"2", b"3"):
            client.call(Put(b"p/k", value))
        subscriber = Subscriber(client, b"p/")
        client.until(lambda: subscriber.subscription.endpoint)
        cluster.wipe()
        cluster.start_all()
        client.until(lambda: len(subscriber.begun) == 2)
        assert (subscriber.received[1].kvs, subscriber.received[1].revision) == ((), 1)
        client.call(Put(b"p/n", b"new"))
        client.until(lambda: len(subscriber.received) == 3)
        assert subscriber.received[2] == ("put", b"p/n", b"new")
        subscriber.subscription.close()


def test_a_refusal_ends_the_subscription(make_etcd: Callable[..., EtcdCluster]) -> None:
    cluster = make_etcd(users=True, **ALONE)
    with ClientInLoop(cluster.settings(user=USER, password=USER_PASSWORD)) as client:
        refused = Subscriber(client, b"elsewhere/")
        allowed = Subscriber(client, ALLOWED)
        client.until(lambda: refused.troubles)
        client.until(lambda: allowed.subscription.endpoint)
        assert isinstance(refused.troubles[0], EtcdRefused)
        assert "permission denied" in refused.troubles[0].message
        client.call(Put(ALLOWED + b"k", b"v"))
        client.until(lambda: len(allowed.received) == 2)
        assert (len(refused.troubles), refused.received, allowed.troubles) == (1, [], [])
        allowed.subscription.close()


def test_a_stream_of_single_bytes_is_decoded() -> None:
    listed = http(b'{"header":{"revision":"5","cluster_id":"1","raft_term":"2"}}')
    lines = (
        b'{"result":{"header":{"revision":"5"},"created":true}}\n'
        b'{"result":{"header":{"revision":"6"},"events":[{"kv":{"key":"aw==","mod_revision":"6"}}]}}\n'
        b'{"result":{"header":{"revision":"7"},"events":[{"type":"DELETE","kv":{"key":"aw==","mod_revision":"7"}}]}}\n'
    )

    def script(server: ScriptedServer, sock: Any) -> None:
        server.read_request(sock)
        sock.sendall(listed)
        server.read_request(sock)
        for byte in b"HTTP/1.1 200 OK\r\n\r\n" + lines:
            sock.sendall(bytes([byte]))
        sock.recv(1)

    with ScriptedServer(script) as server:
        with ClientInLoop(etcd_settings(server.endpoint)) as client:
            changes: list[Change] = []
            subscription = Subscription(client.etcd, b"k", b"", lambda _: None, changes.extend, lambda _: None)
            subscription.start()
            client.until(lambda: len(changes) == 2)
            subscription.close()
        assert [(change.kind, change.kv.mod_revision) for change in changes] == [("put", 6), ("delete", 7)]
        assert b"Grpc-Metadata-hasleader: true" in server.requests[1]
        assert b'"start_revision":6' in server.requests[1]


@pytest.mark.parametrize("end", [b"", b"\n"], ids=["one line", "many lines"])
def test_a_watch_is_read_in_linear_time(end: bytes) -> None:
    """Including a line without an end in small parts."""
    endpoint = EtcdEndpoint(0, "127.0.0.1:1")
    with ClientInLoop(etcd_settings(endpoint.name)) as client:

        def read(parts: list[bytes]) -> None:
            ended: list[object] = []
            stream = WatchStream(client.etcd, endpoint, b"{}", ended.append, ended.append)
            stream.on_part(Head(200))
            for part in parts:
                stream.on_part(part)
            assert not ended

        part = b'{"result":{}}' + end
        assert_linear(read, lambda n: [part] * (n // len(part)), size=1 << 18)
