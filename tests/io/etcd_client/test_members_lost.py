"""Members that die or hang: calls, watches and leases go on elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kit.etcd import EtcdCluster
from tenax._io.etcd.errors import EtcdError, EtcdUnavailable
from tenax._io.etcd.held_lease import HeldLease
from tenax._io.etcd.operations import Change, Compare, Put, Range, RangeAnswer, Transaction
from tenax._io.etcd.subscription import Subscription

from .kit import ClientInLoop, raised

QUICK = {"heartbeat_ms": 50, "election_ms": 500}


def create(key: bytes, value: bytes = b"") -> Transaction:
    """A guarded write: done once, however often it is asked for."""
    return Transaction((Compare(key, "version", 0),), (Put(key, value),))


def index_of(cluster: EtcdCluster, endpoint: str) -> int:
    return cluster.endpoints.split(",").index(endpoint)


def test_the_leader_dies_and_the_majority(make_etcd: Callable[..., EtcdCluster]) -> None:
    cluster = make_etcd(3, **QUICK)
    with ClientInLoop(cluster.settings()) as desk:
        desk.call(create(b"a"))
        first = cluster.leader()
        cluster.kill(first)
        desk.call(create(b"b"))
        assert [kv.version for kv in desk.call(Range(b"a", b"c")).kvs] == [1, 1]
        second = cluster.leader()
        cluster.kill(second)  # one of three is left: nobody can write or read
        with pytest.raises(EtcdUnavailable) as caught:
            desk.call(create(b"c"), patience_s=1.5)
        assert not caught.value.is_certain
        for index in (first, second):
            assert f"{cluster.endpoint(index)}: connection refused" in caught.value.message
        cluster.start(first)
        desk.call(create(b"c"))
        assert desk.call(Range(b"c")).kvs[0].version == 1
        assert not desk.client.trouble


def test_a_stopped_member_is_left_by_everybody(make_etcd: Callable[..., EtcdCluster]) -> None:
    """Its connections stay open and nothing ends: only silence tells. A call, a watch and a lease are there."""
    cluster = make_etcd(3, **QUICK)
    begun: list[RangeAnswer] = []
    changes: list[Change] = []
    troubles: list[EtcdError] = []
    lost: list[str] = []
    with ClientInLoop(cluster.settings()) as desk:
        following = Subscription(desk.client, b"k", b"l", begun.append, changes.extend, troubles.append, silent_s=0.5)
        following.start()
        lease = HeldLease(desk.client, 60, held=lambda: None, lost=lost.append, troubled=troubles.append, every_s=0.3)
        lease.start()
        desk.until(lambda: lease.is_held and following.endpoint)
        stopped = index_of(cluster, following.endpoint)
        cluster.stop(stopped)
        desk.call(create(b"k1"))
        proven_at = desk.loop.now()
        desk.until(lambda: lease.proven_at > proven_at, "the lease is kept alive elsewhere")
        desk.until(lambda: changes, "the watch goes on elsewhere")
        assert [change.kv.key for change in changes] == [b"k1"]
        assert following.endpoint != cluster.endpoint(stopped)
        cluster.cont(stopped)
        desk.call(create(b"k2"))
        desk.until(lambda: len(changes) == 2)
        assert (len(begun), lost) == (1, [])
        assert cluster.endpoint(stopped) in troubles[0].message
        following.close()
        lease.close()


def test_a_watch_tells_everything_once_over_the_deaths_of_its_member(make_etcd: Callable[..., EtcdCluster]) -> None:
    cluster = make_etcd(3, **QUICK)
    begun: list[RangeAnswer] = []
    changes: list[Change] = []
    troubles: list[EtcdError] = []
    with ClientInLoop(cluster.settings()) as desk:
        following = Subscription(desk.client, b"n", b"o", begun.append, changes.extend, troubles.append)
        following.start()
        desk.until(lambda: following.endpoint)
        number = 0
        for _ in range(3):
            victim = index_of(cluster, following.endpoint)
            for _ in range(5):
                desk.call(create(b"n%03d" % number))
                number += 1
            cluster.kill(victim)
            for _ in range(5):
                desk.call(create(b"n%03d" % number))
                number += 1
            desk.until(lambda: following.endpoint and following.endpoint != cluster.endpoint(victim), "a new stream")  # noqa: B023
            cluster.start(victim)
        desk.until(lambda: len(changes) >= number)
        desk.call(create(b"n%03d" % number))
        desk.until(lambda: len(changes) > number)
        assert [change.kv.key for change in changes] == [b"n%03d" % each for each in range(number + 1)]
        revisions = [change.kv.mod_revision for change in changes]
        assert revisions == sorted(set(revisions))
        assert len(begun) == 1
        assert len(troubles) >= 3
        following.close()


def test_a_lease_lives_through_a_change_of_leaders(make_etcd: Callable[..., EtcdCluster]) -> None:
    cluster = make_etcd(3, **QUICK)
    lost: list[str] = []
    with ClientInLoop(cluster.settings()) as desk:
        lease = HeldLease(desk.client, 6, held=lambda: None, lost=lost.append, troubled=lambda _: None, every_s=0.3)
        lease.start()
        desk.until(lambda: lease.is_held)
        desk.call(Put(b"k", b"v", lease.id))
        cluster.kill(cluster.leader())
        killed_at = desk.loop.now()
        desk.until(lambda: lease.proven_at > killed_at + 1 or lost)
        assert not lost
        assert desk.call(Range(b"k")).kvs
        lease.close()


def test_a_watch_without_a_majority_says_so(make_etcd: Callable[..., EtcdCluster]) -> None:
    """The member that is left serves connections; but it would be silent for ever."""
    cluster = make_etcd(3, **QUICK)
    troubles: list[EtcdError] = []
    changes: list[Change] = []
    with ClientInLoop(cluster.settings()) as desk:
        following = Subscription(desk.client, b"k", b"", lambda _: None, changes.extend, troubles.append)
        following.start()
        desk.until(lambda: following.endpoint)
        others = [index for index in range(3) if index != index_of(cluster, following.endpoint)]
        for index in others:
            cluster.kill(index)
        desk.until(lambda: troubles)
        assert isinstance(troubles[0], EtcdUnavailable)
        cluster.start_all()
        desk.call(Put(b"k", b"v"))
        desk.until(lambda: changes)
        following.close()


def test_everybody_hangs(make_etcd: Callable[..., EtcdCluster]) -> None:
    cluster = make_etcd(1)
    with ClientInLoop(cluster.settings(attempt_s=0.1)) as desk:
        desk.call(Put(b"k", b"v"))
        cluster.pause_all()
        assert "did not answer in time" in raised(lambda: desk.call(Put(b"k", b"w"), 0.5), EtcdUnavailable)
        cluster.cont_all()
        desk.call(Put(b"k", b"w"))
