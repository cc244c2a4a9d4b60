"""Following, at one member: from the first list over changes to a past that is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kit.etcd import ALLOWED, ALONE, USER, USER_PASSWORD, EtcdCluster, unique_prefix
from kit.linear import assert_linear
from tenax._io.etcd.endpoint import EtcdEndpoint
from tenax._io.etcd.errors import EtcdError, EtcdRefused
from tenax._io.etcd.http_connection import HttpConnection
from tenax._io.etcd.http_response import Head
from tenax._io.etcd.operations import Change, Compact, Delete, Put, RangeAnswer, Transaction, prefix_end
from tenax._io.etcd.settings import etcd_settings
from tenax._io.etcd.subscription import Subscription
from tenax._io.etcd.watch_stream import WatchStream

from .kit import ClientInLoop, ScriptedServer, http


class Follower:
    """What was told, in order."""

    def __init__(self, desk: ClientInLoop, prefix: bytes) -> None:
        self.told: list[Any] = []
        self.troubles: list[EtcdError] = []
        self.following = Subscription(
            desk.client, prefix, prefix_end(prefix), self.told.append, self._changed, self.troubles.append
        )
        self.following.start()

    def _changed(self, changes: list[Change]) -> None:
        assert changes
        self.told += [(change.kind, change.kv.key, change.kv.value) for change in changes]

    @property
    def begun(self) -> list[RangeAnswer]:
        return [each for each in self.told if isinstance(each, RangeAnswer)]


@pytest.fixture
def desk(etcd: EtcdCluster) -> Iterator[ClientInLoop]:
    with ClientInLoop(etcd.settings()) as desk:
        yield desk


def test_what_is_and_what_changes(desk: ClientInLoop) -> None:
    prefix = unique_prefix()
    desk.call(Put(prefix + b"a", b"1"))
    desk.call(Put(prefix[:-1], b"not below it"))
    follower = Follower(desk, prefix)
    desk.until(lambda: follower.told)
    assert [(kv.key, kv.value) for kv in follower.told[0].kvs] == [(prefix + b"a", b"1")]
    desk.call(Put(prefix + b"b", b"2"))
    desk.call(Put(prefix[:-1], b"nor is this"))
    desk.call(Transaction((), (Put(prefix + b"c", b"3" * 300_000), Delete(prefix + b"a"))))
    desk.until(lambda: len(follower.told) >= 4)
    assert follower.told[1] == ("put", prefix + b"b", b"2")
    assert set(follower.told[2:]) == {("put", prefix + b"c", b"3" * 300_000), ("delete", prefix + b"a", b"")}
    follower.following.close()
    desk.call(Put(prefix + b"d", b""))
    desk.run_for(0.1)
    assert len(follower.told) == 4
    assert not follower.troubles


def test_what_happened_between_the_list_and_the_stream_is_told(desk: ClientInLoop) -> None:
    prefix = unique_prefix()
    changes: list[Change] = []
    other: list[object] = []

    def begun(_: RangeAnswer) -> None:
        desk.client.call(Put(prefix + b"k", b"v"), other.append, other.append)

    following = Subscription(desk.client, prefix, prefix_end(prefix), begun, changes.extend, other.append)
    following.start()
    desk.until(lambda: changes)
    assert [change.kv.key for change in changes] == [prefix + b"k"]
    following.close()


def test_closed_from_within(desk: ClientInLoop) -> None:
    followings: list[Subscription] = []
    told: list[object] = []

    def begun(answer: RangeAnswer) -> None:
        told.append(answer)
        followings[0].close()

    followings.append(Subscription(desk.client, unique_prefix(), b"", begun, told.append, told.append))
    followings[0].start()
    desk.until(lambda: told)
    desk.run_for(0.1)
    assert len(told) == 1


def test_a_past_that_is_compacted_begins_again(make_etcd: Callable[..., EtcdCluster]) -> None:
    cluster = make_etcd(**ALONE)
    with ClientInLoop(cluster.settings()) as desk, ClientInLoop(cluster.settings()) as other:
        follower = Follower(desk, b"p/")
        desk.until(lambda: follower.following.endpoint)
        cluster.kill(0)  # and the follower does not come to see it, because its loop does not run
        cluster.start(0)
        for value in (b"1", b"2", b"3"):
            revision = other.call(Put(b"p/k", value)).revision
        other.call(Compact(revision))
        desk.until(lambda: len(follower.begun) == 2)
        assert follower.told == follower.begun  # what lies between is lost, not told in part
        assert [(kv.key, kv.value, kv.version) for kv in follower.told[1].kvs] == [(b"p/k", b"3", 3)]
        other.call(Put(b"p/k", b"4"))
        desk.until(lambda: len(follower.told) == 3)
        assert follower.told[2] == ("put", b"p/k", b"4")
        follower.following.close()


def test_an_etcd_that_was_wiped_begins_again(make_etcd: Callable[..., EtcdCluster]) -> None:
    cluster = make_etcd(**ALONE)
    with ClientInLoop(cluster.settings()) as desk:
        for value in (b"1", b"2", b"3"):
            desk.call(Put(b"p/k", value))
        follower = Follower(desk, b"p/")
        desk.until(lambda: follower.following.endpoint)
        cluster.wipe()
        cluster.start_all()
        desk.until(lambda: len(follower.begun) == 2)
        assert (follower.told[1].kvs, follower.told[1].revision) == ((), 1)
        desk.call(Put(b"p/n", b"new"))
        desk.until(lambda: len(follower.told) == 3)
        assert follower.told[2] == ("put", b"p/n", b"new")
        follower.following.close()


def test_what_is_not_allowed_ends_it(make_etcd: Callable[..., EtcdCluster]) -> None:
    cluster = make_etcd(users=True, **ALONE)
    with ClientInLoop(cluster.settings(user=USER, password=USER_PASSWORD)) as desk:
        refused = Follower(desk, b"elsewhere/")
        allowed = Follower(desk, ALLOWED)
        desk.until(lambda: refused.troubles)
        desk.until(lambda: allowed.following.endpoint)
        assert isinstance(refused.troubles[0], EtcdRefused)
        assert "permission denied" in refused.troubles[0].message
        desk.call(Put(ALLOWED + b"k", b"v"))
        desk.until(lambda: len(allowed.told) == 2)
        assert (len(refused.troubles), refused.told, allowed.troubles) == (1, [], [])
        allowed.following.close()


def test_a_stream_cut_into_single_bytes() -> None:
    listed = http(b'{"header":{"revision":"5","cluster_id":"1","raft_term":"2"}}')
    lines = (
        b'{"result":{"header":{"revision":"5"},"created":true}}\n'
        b'{"result":{"header":{"revision":"6"},"events":[{"kv":{"key":"aw==","mod_revision":"6"}}]}}\n'
        b'{"result":{"header":{"revision":"7"},"events":[{"type":"DELETE","kv":{"key":"aw==","mod_revision":"7"}}]}}\n'
    )

    def script(server: ScriptedServer, sock: Any) -> None:
        server.hear(sock)
        sock.sendall(listed)
        server.hear(sock)
        for byte in b"HTTP/1.1 200 OK\r\n\r\n" + lines:
            sock.sendall(bytes([byte]))
        sock.recv(1)

    with ScriptedServer(script) as server:
        with ClientInLoop(etcd_settings(server.endpoint)) as desk:
            changes: list[Change] = []
            following = Subscription(desk.client, b"k", b"", lambda _: None, changes.extend, lambda _: None)
            following.start()
            desk.until(lambda: len(changes) == 2)
            following.close()
        assert [(change.kind, change.kv.mod_revision) for change in changes] == [("put", 6), ("delete", 7)]
        assert b"Grpc-Metadata-hasleader: true" in server.requests[1]
        assert b'"start_revision":"6"' in server.requests[1]


@pytest.mark.parametrize("end", [b"", b"\n"], ids=["one line", "many lines"])
def test_a_watch_is_read_in_linear_time(end: bytes) -> None:
    """Also a line without an end that comes in small parts."""
    place = EtcdEndpoint(0, "127.0.0.1:1")
    with ClientInLoop(etcd_settings(place.name)) as desk:
        connection = HttpConnection(desk.loop, place, desk.client.pool, None)

        def read(parts: list[bytes]) -> None:
            ended: list[object] = []
            stream = WatchStream(desk.client, place, b"k", b"", 1, ended.append, ended.append)
            stream.on_part(connection, Head(200))
            for part in parts:
                stream.on_part(connection, part)
            assert not ended

        part = b'{"result":{}}' + end
        assert_linear(read, lambda n: [part] * (n // len(part)), size=1 << 18)
