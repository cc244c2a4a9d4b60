"""A held lease: granted, kept alive, lost, ended."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from kit.etcd import ALONE, EtcdCluster, unique_prefix
from tenax._core.etcd.errors import EtcdError, EtcdUnavailable
from tenax._core.etcd.operations import KeepAlive, Put, Range, RevokeLease
from tenax._core.leadership.held_lease import HeldLease
from tenax._io.etcd.settings import etcd_settings

from .kit import ClientInLoop, ScriptedServer, answer_to, http, silent_until_disconnect


class Holder:
    """A lease and its callbacks."""

    def __init__(self, client: ClientInLoop, ttl_s: int, every_s: float | None = None) -> None:
        self.reported: list[str] = []
        self.troubles: list[EtcdError] = []
        self.proofs: list[float] = []
        self.lease = HeldLease(
            client.etcd,
            int.from_bytes(os.urandom(7), "big"),
            ttl_s,
            held=lambda: self.reported.append("held"),
            lost=self.reported.append,
            troubled=self.troubles.append,
            every_s=every_s,
        )
        self.lease.on_proven = lambda: self.proofs.append(self.lease.proven_at)


@pytest.fixture
def client(etcd: EtcdCluster) -> Iterator[ClientInLoop]:
    with ClientInLoop(etcd.settings()) as client:
        yield client


def test_a_lease_is_kept_alive_beyond_its_ttl(client: ClientInLoop) -> None:
    holder = Holder(client, 2)
    before = client.loop.now()
    holder.lease.start()
    client.until(lambda: holder.reported)
    assert before <= holder.lease.proven_at <= client.loop.now()
    key = unique_prefix() + b"k"
    client.call(Put(key, b"", holder.lease.id))
    client.until(lambda: client.loop.now() - before > 4 and len(holder.proofs) > 4)  # twice the TTL
    assert client.call(Range(key)).kvs
    assert holder.reported == ["held"]
    assert holder.proofs == sorted(set(holder.proofs))
    ended: list[str] = []
    holder.lease.end(lambda: ended.append("ended"))
    client.until(lambda: ended)
    assert not client.call(Range(key)).kvs
    assert holder.reported == ["held"]


def test_a_revoked_lease_is_lost_once(client: ClientInLoop) -> None:
    holder = Holder(client, 60, every_s=0.1)
    holder.lease.start()
    client.until(lambda: holder.reported)
    client.call(RevokeLease(holder.lease.id))
    client.until(lambda: len(holder.reported) > 1)
    assert "expired or was revoked" in holder.reported[1]
    proofs = len(holder.proofs)
    client.run_for(0.5)
    assert len(holder.reported) == 2
    assert len(holder.proofs) == proofs
    assert not holder.lease.is_held


def test_a_closed_lease_is_not_revoked(client: ClientInLoop) -> None:
    holder = Holder(client, 60)
    holder.lease.start()
    client.until(lambda: holder.reported)
    holder.lease.close()
    assert client.call(KeepAlive(holder.lease.id)).ttl_s > 0
    client.call(RevokeLease(holder.lease.id))


def test_silence_of_etcd_is_trouble_but_not_loss(make_etcd: Callable[..., EtcdCluster]) -> None:
    cluster = make_etcd(**ALONE)
    with ClientInLoop(cluster.settings(attempt_s=0.2)) as client:
        holder = Holder(client, 1, every_s=0.2)
        holder.lease.start()
        client.until(lambda: holder.reported)
        cluster.stop(0)
        client.until(lambda: len(holder.troubles) > 1)  # longer than the TTL
        assert holder.reported == ["held"]
        assert all(isinstance(trouble, EtcdUnavailable) for trouble in holder.troubles)
        stopped_at, proven_at = client.loop.now(), holder.lease.proven_at
        assert proven_at < stopped_at - 1
        cluster.cont(0)
        client.until(lambda: len(holder.reported) > 1 or holder.lease.proven_at > stopped_at)  # etcd decides which
        holder.lease.close()


def test_a_lease_is_granted_once_etcd_is_up(make_etcd: Callable[..., EtcdCluster]) -> None:
    cluster = make_etcd(**ALONE)
    cluster.kill(0)
    with ClientInLoop(cluster.settings()) as client:
        holder = Holder(client, 1, every_s=0.1)
        holder.lease.start()
        client.until(lambda: holder.troubles)
        assert holder.reported == []
        cluster.start(0)
        client.until(lambda: holder.reported)
        assert holder.reported == ["held"]
        holder.lease.close()


def test_a_wiped_etcd_loses_the_lease(make_etcd: Callable[..., EtcdCluster]) -> None:
    cluster = make_etcd(**ALONE)
    with ClientInLoop(cluster.settings()) as client:
        holder = Holder(client, 60, every_s=0.2)
        holder.lease.start()
        client.until(lambda: holder.reported)
        cluster.wipe()
        cluster.start_all()
        client.until(lambda: len(holder.reported) == 2)
        assert "expired or was revoked" in holder.reported[1]


def test_a_lease_can_be_ended_without_etcd(make_etcd: Callable[..., EtcdCluster]) -> None:
    cluster = make_etcd(**ALONE)
    with ClientInLoop(cluster.settings()) as client:
        holder = Holder(client, 60)
        holder.lease.start()
        client.until(lambda: holder.reported)
        cluster.kill(0)
        ended: list[str] = []
        holder.lease.end(lambda: ended.append("ended"))
        assert not ended
        client.until(lambda: ended)


def test_a_slow_grant_needs_a_keep_alive_before_it_is_held() -> None:
    """The first answer was lost: the lease may be as old as that attempt."""
    exists = http(b'{"code":9,"message":"etcdserver: lease already exists"}', "400 Bad Request")
    alive = http(b'{"result":{"header":{"revision":"4"},"ID":"1","TTL":"60"}}\n')
    scripted = ScriptedServer(silent_until_disconnect, answer_to(exists, alive, exists))
    with scripted as server, ClientInLoop(etcd_settings(server.endpoint, attempt_s=0.3)) as client:
        holder = Holder(client, 60, every_s=0.2)
        began = client.loop.now()
        holder.lease.start()
        client.until(lambda: holder.reported)
        assert [request.split()[1] for request in server.requests] == [
            b"/v3/lease/grant",
            b"/v3/lease/grant",
            b"/v3/lease/keepalive",
        ]
        assert holder.lease.proven_at >= began + 0.3
        holder.lease.close()
