"""A lease that is held: granted, kept alive, lost, ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kit.etcd import ALONE, EtcdCluster, unique_prefix
from tenax._io.etcd.errors import EtcdError, EtcdUnavailable
from tenax._io.etcd.held_lease import HeldLease
from tenax._io.etcd.operations import KeepAlive, Put, Range, RevokeLease
from tenax._io.etcd.settings import etcd_settings

from .kit import ClientInLoop, ScriptedServer, answer_to, http, silent_until_gone


class Holder:
    """A lease, and what was told of it."""

    def __init__(self, desk: ClientInLoop, ttl_s: int, every_s: float | None = None) -> None:
        self.told: list[str] = []
        self.troubles: list[EtcdError] = []
        self.proofs: list[float] = []
        self.lease = HeldLease(
            desk.client,
            ttl_s,
            held=lambda: self.told.append("held"),
            lost=self.told.append,
            troubled=self.troubles.append,
            every_s=every_s,
        )
        self.lease.on_proven = lambda: self.proofs.append(self.lease.proven_at)


@pytest.fixture
def desk(etcd: EtcdCluster) -> Iterator[ClientInLoop]:
    with ClientInLoop(etcd.settings()) as desk:
        yield desk


def test_it_is_kept_alive_beyond_its_time(desk: ClientInLoop) -> None:
    holder = Holder(desk, 2)
    before = desk.loop.now()
    holder.lease.start()
    desk.until(lambda: holder.told)
    assert before <= holder.lease.proven_at <= desk.loop.now()
    key = unique_prefix() + b"k"
    desk.call(Put(key, b"", holder.lease.id))
    desk.until(lambda: desk.loop.now() - before > 4 and len(holder.proofs) > 4)  # twice its time
    assert desk.call(Range(key)).kvs
    assert holder.told == ["held"]
    assert holder.proofs == sorted(set(holder.proofs))
    ended: list[str] = []
    holder.lease.end(lambda: ended.append("ended"))
    desk.until(lambda: ended)
    assert not desk.call(Range(key)).kvs
    assert holder.told == ["held"]


def test_a_lease_that_somebody_revoked_is_lost_once(desk: ClientInLoop) -> None:
    holder = Holder(desk, 60, every_s=0.1)
    holder.lease.start()
    desk.until(lambda: holder.told)
    desk.call(RevokeLease(holder.lease.id))
    desk.until(lambda: len(holder.told) > 1)
    assert "expired or was revoked" in holder.told[1]
    proofs = len(holder.proofs)
    desk.run_for(0.5)
    assert len(holder.told) == 2
    assert len(holder.proofs) == proofs
    assert not holder.lease.is_held


def test_closed_it_runs_out_by_itself(desk: ClientInLoop) -> None:
    holder = Holder(desk, 60)
    holder.lease.start()
    desk.until(lambda: holder.told)
    holder.lease.close()
    assert desk.call(KeepAlive(holder.lease.id)).ttl_s > 0
    desk.call(RevokeLease(holder.lease.id))


def test_silence_is_trouble_and_not_loss(make_etcd: Callable[..., EtcdCluster]) -> None:
    cluster = make_etcd(**ALONE)
    with ClientInLoop(cluster.settings(attempt_s=0.2)) as desk:
        holder = Holder(desk, 1, every_s=0.2)
        holder.lease.start()
        desk.until(lambda: holder.told)
        cluster.stop(0)
        desk.until(lambda: len(holder.troubles) > 1)  # longer than its time
        assert holder.told == ["held"]
        assert all(isinstance(trouble, EtcdUnavailable) for trouble in holder.troubles)
        stopped_at, proven_at = desk.loop.now(), holder.lease.proven_at
        assert proven_at < stopped_at - 1
        cluster.cont(0)
        desk.until(lambda: len(holder.told) > 1 or holder.lease.proven_at > stopped_at)  # etcd decides which
        holder.lease.close()


def test_an_etcd_that_comes_later(make_etcd: Callable[..., EtcdCluster]) -> None:
    cluster = make_etcd(**ALONE)
    cluster.kill(0)
    with ClientInLoop(cluster.settings()) as desk:
        holder = Holder(desk, 1, every_s=0.1)
        holder.lease.start()
        desk.until(lambda: holder.troubles)
        assert holder.told == []
        cluster.start(0)
        desk.until(lambda: holder.told)
        assert holder.told == ["held"]
        holder.lease.close()


def test_a_wiped_etcd_has_lost_it(make_etcd: Callable[..., EtcdCluster]) -> None:
    cluster = make_etcd(**ALONE)
    with ClientInLoop(cluster.settings()) as desk:
        holder = Holder(desk, 60, every_s=0.2)
        holder.lease.start()
        desk.until(lambda: holder.told)
        cluster.wipe()
        cluster.start_all()
        desk.until(lambda: len(holder.told) == 2)
        assert "expired or was revoked" in holder.told[1]


def test_ending_without_etcd_ends_all_the_same(make_etcd: Callable[..., EtcdCluster]) -> None:
    cluster = make_etcd(**ALONE)
    with ClientInLoop(cluster.settings()) as desk:
        holder = Holder(desk, 60)
        holder.lease.start()
        desk.until(lambda: holder.told)
        cluster.kill(0)
        ended: list[str] = []
        holder.lease.end(lambda: ended.append("ended"))
        assert not ended
        desk.until(lambda: ended)


def test_a_grant_that_took_long_is_proven_anew_before_it_counts() -> None:
    """Its first answer was lost: the lease may be as old as that attempt."""
    exists = http(b'{"code":9,"message":"etcdserver: lease already exists"}', "400 Bad Request")
    alive = http(b'{"result":{"header":{"revision":"4"},"ID":"1","TTL":"60"}}\n')
    scripted = ScriptedServer(silent_until_gone, answer_to(exists, alive, exists))
    with scripted as server, ClientInLoop(etcd_settings(server.endpoint, attempt_s=0.3)) as desk:
        holder = Holder(desk, 60, every_s=0.2)
        began = desk.loop.now()
        holder.lease.start()
        desk.until(lambda: holder.told)
        assert [request.split()[1] for request in server.requests] == [
            b"/v3/lease/grant",
            b"/v3/lease/grant",
            b"/v3/lease/keepalive",
        ]
        assert holder.lease.proven_at >= began + 0.3
        holder.lease.close()
