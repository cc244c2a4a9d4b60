"""Members on real etcd servers: they form a cluster, restart, are replaced, and leave."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import ssl
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from kit.processes import TIMEOUT_S, gone, leaving_nothing, on_linux
from tenax._core.etcd.operations import AddMember, Members, Put, Range, RemoveMember
from tenax._engines.etcd.managed import member_key
from tenax._io.tls import TlsFiles

from .kit import ManagedCluster, tls_files

MakeCluster = Callable[..., ManagedCluster]
SECRET = b"the secret of the run"
open_and_with_users = pytest.mark.parametrize("secret", [b"", SECRET], ids=["open", "with users"])
with_users = pytest.mark.parametrize("secret", [SECRET], ids=["with users"])  # open servers do less


@on_linux
@open_and_with_users
def test_members_form_a_cluster_and_leave_nothing(make_cluster: MakeCluster, tmp_path: Path, secret: bytes) -> None:
    """One member per control host, each with its key. The data is private, and removed at the end."""
    with leaving_nothing():
        cluster = make_cluster(secret=secret)
        members = cluster.add_all()
        assert all(member.is_here for member in members)
        assert set(cluster.members_by_url()) == {f"http://{name}:2380" for name in cluster.names}
        for name in cluster.names:
            assert cluster.call(Range(member_key("a run/1", name))).kvs[0].value == f"http://{name}:2379".encode()
        for member in members:
            assert stat.S_IMODE(os.stat(member.directory.path).st_mode) == 0o700
        pids = [member.server.pid for member in members]
        cluster.leave(*members)
        assert gone(pids)
        assert not any(member.is_here for member in members)
        assert list((tmp_path / "data").iterdir()) == []
        cluster.close()


@open_and_with_users
def test_a_lost_member_is_replaced_and_the_data_survives(make_cluster: MakeCluster, secret: bytes) -> None:
    """M3: the replacement of a lost host has a new identity and all data."""
    cluster = make_cluster(secret=secret)
    members = cluster.add_all()
    cluster.call(Put(b"kept", b"value"))
    name = cluster.names[2]
    before = cluster.members_by_url()[f"http://{name}:2380"]
    directory = members[2].directory.path
    members[2].close()
    shutil.rmtree(directory)
    replaced = cluster.add(name)
    cluster.until(lambda: replaced.is_serving, "the new member to serve")
    after = cluster.members_by_url()
    assert len(after) == 3
    assert after[f"http://{name}:2380"].id != before.id
    assert cluster.call(Range(b"kept"), name).kvs[0].value == b"value"
    assert any("was lost with its data" in line for line in cluster.messages)

    # The cluster removes it while it is down: its data is discarded, and it joins with a new identity again (M2).
    replaced.close()
    cluster.call(RemoveMember(after[f"http://{name}:2380"].id), *cluster.names[:2])
    again = cluster.add(name)
    cluster.until(lambda: again.is_serving, "the removed member to serve again")
    assert cluster.members_by_url()[f"http://{name}:2380"].id != after[f"http://{name}:2380"].id
    assert any("was removed from the cluster; its data was discarded" in line for line in cluster.messages)
    assert cluster.call(Range(b"kept"), name).kvs[0].value == b"value"


@with_users
def test_a_member_with_its_data_keeps_its_identity(make_cluster: MakeCluster, secret: bytes) -> None:
    """After its agent was killed and restarted."""
    cluster = make_cluster(secret=secret)
    members = cluster.add_all()
    cluster.call(Put(b"kept", b"value"))
    before = cluster.members_by_url()
    members[0].close()
    again = cluster.add(cluster.names[0])
    cluster.until(lambda: again.is_serving, "the member to serve again")
    assert {url: member.id for url, member in cluster.members_by_url().items()} == {u: m.id for u, m in before.items()}
    assert cluster.call(Range(b"kept"), cluster.names[0]).kvs[0].value == b"value"


@with_users
def test_a_killed_server_is_restarted_with_its_data(make_cluster: MakeCluster, secret: bytes) -> None:
    """And its end is reported."""
    cluster = make_cluster(1, secret=secret)
    (member,) = cluster.add_all()
    cluster.call(Put(b"kept", b"value"))
    killed = member.server.pid
    os.kill(killed, signal.SIGKILL)
    cluster.until(lambda: not member.is_serving, "its end to be noticed")
    cluster.until(lambda: member.is_serving, "another server to serve")
    assert member.server.pid not in (0, killed)
    assert any("was killed by SIGKILL" in line for line in cluster.messages)
    assert cluster.call(Range(b"kept")).kvs[0].value == b"value"


@with_users
def test_a_leaving_member_shrinks_the_cluster_and_may_rejoin(make_cluster: MakeCluster, secret: bytes) -> None:
    """Two of three leave. The remaining one is a majority, accepts writes, and accepts one of them again (M3).

    The rejoining member's key exists and its membership does not, so it is added and gets the data of the others.
    """
    cluster = make_cluster(secret=secret)
    members = cluster.add_all()
    before = cluster.members_by_url()
    _wait_until_members_may_be_removed(cluster)
    cluster.leave(members[0])
    all_members = Members(is_linearizable=True)  # as decided, not as this member knows it
    assert len(cluster.call(all_members, cluster.names[2]).members) == 2
    cluster.leave(members[1])
    assert len(cluster.call(all_members, cluster.names[2]).members) == 1
    cluster.call(Put(b"alone", b"value"), cluster.names[2])
    again = cluster.add(cluster.names[1])
    cluster.until(lambda: again.is_serving, "the member to serve again")
    url = f"http://{cluster.names[1]}:2380"
    assert cluster.members_by_url(cluster.names[2])[url].id != before[url].id
    assert cluster.call(Range(b"alone"), cluster.names[1]).kvs[0].value == b"value"


@with_users
def test_a_late_member_joins_as_an_initial_member(make_cluster: MakeCluster, secret: bytes) -> None:
    """Its name was never started."""
    cluster = make_cluster(secret=secret)
    early = [cluster.add(name) for name in cluster.names[:2]]
    cluster.until(lambda: all(member.is_serving for member in early), "two of three to serve")
    url = f"http://{cluster.names[2]}:2380"
    expected = cluster.members_by_url()[url]
    assert not expected.client_urls  # it was never started
    late = cluster.add(cluster.names[2])
    cluster.until(lambda: late.is_serving, "the third to serve")
    assert cluster.members_by_url()[url].id == expected.id


@with_users
def test_a_member_that_was_rejected_as_new_is_replaced(make_cluster: MakeCluster, secret: bytes) -> None:
    """If the others do not answer in time, its server is rejected and exits, and the member decides again (M2).

    Here the two others are stopped while the third one probes them.
    """
    cluster = make_cluster(secret=secret)
    members = cluster.add_all()
    directory = members[2].directory.path
    members[2].close()
    shutil.rmtree(directory)
    others = [member.server.pid for member in members[:2]]
    for pid in others:
        os.kill(pid, signal.SIGSTOP)
    try:
        again = cluster.add(cluster.names[2])
        cluster.until(lambda: again.server.pid, "a server to start despite the silence")
    finally:
        for pid in others:
            os.kill(pid, signal.SIGCONT)
    cluster.until(lambda: again.is_serving, "the member to serve")
    assert any("exited with code" in line for line in cluster.messages)
    assert len(cluster.members_by_url()) == 3


def test_members_and_clients_need_certificates(make_cluster: MakeCluster, tmp_path: Path) -> None:
    """Clients without one are rejected at both ports."""
    folder = tmp_path / "tls"
    folder.mkdir()
    cluster = make_cluster()
    # Members check the source address; a loopback connection comes from 127.0.0.1.
    files = tls_files(folder, *cluster.names, "127.0.0.1")
    cluster.options["tls"] = files
    cluster.options["secret"] = SECRET
    cluster.add_all()
    assert set(cluster.members_by_url(tls=files)) == {f"https://{name}:2380" for name in cluster.names}
    for port in (2379, 2380):
        with pytest.raises(ssl.SSLError, match="certificate"):
            _request_without_certificate(cluster.names[0], port, files.ca)


def test_a_port_in_use_is_reported(make_cluster: MakeCluster) -> None:
    """With the port and the next step."""
    cluster = make_cluster(1)
    with socket.create_server((cluster.names[0], 2380)):
        member = cluster.add(cluster.names[0], {"taken_s": 0.0})
        cluster.until(lambda: cluster.failures, "a failure", may_fail=True)
    assert cluster.failures[0].startswith(
        f"port 2380 of control host {cluster.names[0]} is in use by another program; "
        "managed etcd needs 2379 and 2380. Choose another port"
    )
    assert not member.is_here


def test_a_member_waits_for_the_ports_of_its_predecessor(make_cluster: MakeCluster) -> None:
    """The previous agent was just killed, and its server is still exiting."""
    cluster = make_cluster(1)
    with socket.create_server((cluster.names[0], 2379)):
        member = cluster.add(cluster.names[0])
        cluster.until(
            lambda: hasattr(member, "directory") and os.path.exists(member.directory.path), "the data directory"
        )
        assert not member.is_here
    cluster.until(lambda: member.is_serving, "the member to serve")


@with_users
def test_one_of_several_agents_on_a_host_runs_the_member(make_cluster: MakeCluster, secret: bytes) -> None:
    """M4: the other agent reports that, and changes nothing."""
    cluster = make_cluster(1, secret=secret)
    (first,) = cluster.add_all()
    second = cluster.add(cluster.names[0], {"taken_s": 0.5})
    cluster.until(
        lambda: any("another agent on this host runs" in line for line in cluster.messages), "the second to yield"
    )
    assert not second.is_here
    cluster.leave(second)
    assert first.is_serving
    cluster.call(Put(b"still", b"here"))


@pytest.mark.parametrize("count", [1, 3])
def test_a_starting_member_can_leave(make_cluster: MakeCluster, count: int) -> None:
    """In time, with nothing left behind."""
    cluster = make_cluster(count)
    member = cluster.add(cluster.names[0])
    cluster.until(lambda: member.server.pid, "a server")
    pid, directory = member.server.pid, member.directory.path
    cluster.leave(member)
    assert gone([pid])
    assert not os.path.exists(directory)


def _wait_until_members_may_be_removed(cluster: ManagedCluster) -> None:
    """etcd accepts changes after all members were connected for 5 s: add a learner and remove it."""
    added = cluster.call(AddMember(("http://127.0.0.1:1",), is_learner=True)).member
    assert added is not None
    cluster.call(RemoveMember(added.id))


def _request_without_certificate(host: str, port: int, ca: str) -> None:
    context = TlsFiles(ca=ca).for_client()
    with (
        socket.create_connection((host, port), TIMEOUT_S) as plain,
        context.wrap_socket(plain, server_hostname=host) as unauthenticated,
    ):
        unauthenticated.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
        unauthenticated.recv(1)
