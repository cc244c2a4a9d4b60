"""Members that die or hang: calls, watches and leases continue at other members."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kit.etcd import EtcdCluster
from tenax._core.etcd.errors import EtcdError, EtcdUnavailable
from tenax._core.etcd.operations import Change, Compare, Put, Range, RangeAnswer, Transaction
from tenax._core.leadership.held_lease import HeldLease
from tenax._io.etcd.subscription import Subscription

from .kit import ClientInLoop, raised

QUICK = {"heartbeat_ms": 50, "election_ms": 500}


def create(key: bytes, value: bytes = b"") -> Transaction:
    """Return a guarded write: it is executed once, however often it is sent."""
    return Transaction((Compare(key, "version", 0),), (Put(key, value),))


def index_of(cluster: EtcdCluster, endpoint: str) -> int:
    return cluster.endpoints.split(",").index(endpoint)


def test_calls_survive_the_leader_and_fail_without_a_majority(make_etcd: Callable[..., EtcdCluster]) -> None:
    cluster = make_etcd(3, **QUICK)
    with ClientInLoop(cluster.settings()) as client:
        client.call(create(b"a"))
        first = cluster.leader()
        cluster.kill(first)
        client.call(create(b"b"))
        assert [kv.version for kv in client.call(Range(b"a", b"c")).kvs] == [1, 1]
        second = cluster.leader()
        cluster.kill(second)  # one of three is left: no writes, no reads
        with pytest.raises(EtcdUnavailable) as caught:
            client.call(create(b"c"), patience_s=1.5)
        assert not caught.value.is_certain
        for index in (first, second):
            assert f"{cluster.endpoint(index)}: connection refused" in caught.value.message
        cluster.start(first)
        client.call(create(b"c"))
        assert client.call(Range(b"c")).kvs[0].version == 1
        assert not client.etcd.trouble


def test_calls_watches_and_leases_leave_a_stopped_member(make_etcd: Callable[..., EtcdCluster]) -> None:
    """Its connections stay open, so only its silence shows it."""
    cluster = make_etcd(3, **QUICK)
    begun: list[RangeAnswer] = []
    changes: list[Change] = []
    troubles: list[EtcdError] = []
    lost: list[str] = []
    with ClientInLoop(cluster.settings()) as client:
        subscription = Subscription(
            client.etcd, b"k", b"l", begun.append, changes.extend, troubles.append, silent_s=0.5
        )
        subscription.start()
        lease = HeldLease(
            client.etcd, 7, 60, held=lambda: None, lost=lost.append, troubled=troubles.append, every_s=0.3
        )
        lease.start()
        client.until(lambda: lease.is_held and subscription.endpoint)
        stopped = index_of(cluster, subscription.endpoint)
        cluster.stop(stopped)
        client.call(create(b"k1"))
        proven_at = client.loop.now()
        client.until(lambda: lease.proven_at > proven_at, "the lease to be kept alive at another member")
        client.until(lambda: changes, "the watch to continue at another member")
        assert [change.kv.key for change in changes] == [b"k1"]
        assert subscription.endpoint != cluster.endpoint(stopped)
        cluster.cont(stopped)
        client.call(create(b"k2"))
        client.until(lambda: len(changes) == 2)
        assert (len(begun), lost) == (1, [])
        assert cluster.endpoint(stopped) in troubles[0].message
        subscription.close()
        lease.close()


def test_a_watch_reports_every_change_once_although_its_members_die(make_etcd: Callable[..., EtcdCluster]) -> None:
    cluster = make_etcd(3, **QUICK)
    begun: list[RangeAnswer] = []
    changes: list[Change] = []
    troubles: list[EtcdError] = []
    with ClientInLoop(cluster.settings()) as client:
        subscription = Subscription(client.etcd, b"n", b"o", begun.append, changes.extend, troubles.append)
        subscription.start()
        client.until(lambda: subscription.endpoint)
        number = 0
        for _ in range(3):
            victim = index_of(cluster, subscription.endpoint)
            for _ in range(5):
                client.call(create(b"n%03d" % number))
                number += 1
            cluster.kill(victim)
            for _ in range(5):
                client.call(create(b"n%03d" % number))
                number += 1
            old = cluster.endpoint(victim)
            client.until(lambda old=old: subscription.endpoint not in ("", old), "a new stream")  # type: ignore[misc]
            cluster.start(victim)
        client.until(lambda: len(changes) >= number)
        client.call(create(b"n%03d" % number))
        client.until(lambda: len(changes) > number)
        assert [change.kv.key for change in changes] == [b"n%03d" % each for each in range(number + 1)]
        revisions = [change.kv.mod_revision for change in changes]
        assert revisions == sorted(set(revisions))
        assert len(begun) == 1
        assert len(troubles) >= 3
        subscription.close()


def test_a_lease_survives_a_change_of_leaders(make_etcd: Callable[..., EtcdCluster]) -> None:
    cluster = make_etcd(3, **QUICK)
    lost: list[str] = []
    with ClientInLoop(cluster.settings()) as client:
        lease = HeldLease(client.etcd, 7, 6, held=lambda: None, lost=lost.append, troubled=lambda _: None, every_s=0.3)
        lease.start()
        client.until(lambda: lease.is_held)
        client.call(Put(b"k", b"v", lease.id))
        cluster.kill(cluster.leader())
        killed_at = client.loop.now()
        client.until(lambda: lease.proven_at > killed_at + 1 or lost)
        assert not lost
        assert client.call(Range(b"k")).kvs
        lease.close()


def test_a_watch_without_a_majority_is_reported(make_etcd: Callable[..., EtcdCluster]) -> None:
    """The remaining member accepts connections but would stay silent."""
    cluster = make_etcd(3, **QUICK)
    troubles: list[EtcdError] = []
    changes: list[Change] = []
    with ClientInLoop(cluster.settings()) as client:
        subscription = Subscription(client.etcd, b"k", b"", lambda _: None, changes.extend, troubles.append)
        subscription.start()
        client.until(lambda: subscription.endpoint)
        others = [index for index in range(3) if index != index_of(cluster, subscription.endpoint)]
        for index in others:
            cluster.kill(index)
        client.until(lambda: troubles)
        assert isinstance(troubles[0], EtcdUnavailable)
        cluster.start_all()
        client.call(Put(b"k", b"v"))
        client.until(lambda: changes)
        subscription.close()


def test_a_call_times_out_if_all_members_hang(make_etcd: Callable[..., EtcdCluster]) -> None:
    cluster = make_etcd(1)
    with ClientInLoop(cluster.settings(attempt_s=0.1)) as client:
        client.call(Put(b"k", b"v"))
        cluster.pause_all()
        assert "did not answer in time" in raised(lambda: client.call(Put(b"k", b"w"), 0.5), EtcdUnavailable)
        cluster.cont_all()
        client.call(Put(b"k", b"w"))
