"""Members on real etcd servers: they form a cluster, come back, are replaced, and leave."""

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

from kit.processes import PATIENCE_S, gone, leaving_nothing, on_linux
from tenax._io.etcd.managed import member_key
from tenax._io.etcd.operations import AddMember, Members, Put, Range, RemoveMember
from tenax._io.tls import TlsFiles

from .kit import Party, tls_files

MakeParty = Callable[..., Party]
SECRET = b"the secret of the run"
open_and_with_users = pytest.mark.parametrize("secret", [b"", SECRET], ids=["open", "with users"])


@on_linux
@open_and_with_users
def test_three_form_a_cluster_and_leave_nothing(party: MakeParty, tmp_path: Path, secret: bytes) -> None:
    """One member on each named host; each has left its key; the data is nobody else's, and gone at the end."""
    with leaving_nothing():
        there = party(secret=secret)
        members = there.add_all()
        assert all(member.is_here for member in members)
        assert set(there.cluster()) == {f"http://{name}:2380" for name in there.names}
        for name in there.names:
            assert there.ask(Range(member_key("a run/1", name))).kvs[0].value == f"http://{name}:2379".encode()
        for member in members:
            assert stat.S_IMODE(os.stat(member.data_directory).st_mode) == 0o700
        pids = [member.server_pid for member in members]
        there.leave(*members)
        assert gone(pids)
        assert not any(member.is_here for member in members)
        assert list((tmp_path / "data").iterdir()) == []
        there.close()


@open_and_with_users
def test_a_lost_member_is_replaced_and_the_data_survives(party: MakeParty, secret: bytes) -> None:
    """M3: its host was lost with its data; what comes in its place has a new identity, and everything that was put."""
    there = party(secret=secret)
    members = there.add_all()
    there.ask(Put(b"kept", b"value"))
    name = there.names[2]
    before = there.cluster()[f"http://{name}:2380"]
    directory = members[2].data_directory
    members[2].close()
    shutil.rmtree(directory)
    replaced = there.add(name)
    there.until(lambda: replaced.is_serving, "the new member to serve")
    after = there.cluster()
    assert len(after) == 3
    assert after[f"http://{name}:2380"].id != before.id
    assert there.ask(Range(b"kept"), name).kvs[0].value == b"value"
    assert any("was lost with its data" in line for line in there.said)

    # The cluster removes it while it is away: then its data is of no use, and it comes back as another once more (M2).
    replaced.close()
    there.ask(RemoveMember(after[f"http://{name}:2380"].id), *there.names[:2])
    again = there.add(name)
    there.until(lambda: again.is_serving, "the removed member to be let in again")
    assert there.cluster()[f"http://{name}:2380"].id != after[f"http://{name}:2380"].id
    assert any("was removed from the cluster; its data was discarded" in line for line in there.said)
    assert there.ask(Range(b"kept"), name).kvs[0].value == b"value"


@open_and_with_users
def test_a_member_with_its_data_comes_back_as_itself(party: MakeParty, secret: bytes) -> None:
    """The agent was killed and started again: the member is the one it was."""
    there = party(secret=secret)
    members = there.add_all()
    there.ask(Put(b"kept", b"value"))
    before = there.cluster()
    members[0].close()
    again = there.add(there.names[0])
    there.until(lambda: again.is_serving, "the member to serve again")
    assert {url: member.id for url, member in there.cluster().items()} == {u: m.id for u, m in before.items()}
    assert there.ask(Range(b"kept"), there.names[0]).kvs[0].value == b"value"


@open_and_with_users
def test_a_server_that_is_killed_is_started_again(party: MakeParty, secret: bytes) -> None:
    """It is told how it ended, and comes back with its data."""
    there = party(1, secret=secret)
    (member,) = there.add_all()
    there.ask(Put(b"kept", b"value"))
    killed = member.server_pid
    os.kill(killed, signal.SIGKILL)
    there.until(lambda: not member.is_serving, "its end to be noticed")
    there.until(lambda: member.is_serving, "another server to serve")
    assert member.server_pid not in (0, killed)
    assert any("was killed by SIGKILL" in line for line in there.said)
    assert there.ask(Range(b"kept")).kvs[0].value == b"value"


@open_and_with_users
def test_who_leaves_shrinks_the_cluster_and_may_come_back(party: MakeParty, secret: bytes) -> None:
    """Two of three leave, and the one who stays is a majority: it takes writes, and lets one of them in again (M3).

    That one's key is still there and its member is not, so it is added, and gets what the others hold.
    """
    there = party(secret=secret)
    members = there.add_all()
    before = there.cluster()
    _wait_until_members_may_be_removed(there)
    there.leave(members[0])
    all_who_belong = Members(is_linearizable=True)  # as decided, not as far as this member has heard
    assert len(there.ask(all_who_belong, there.names[2]).members) == 2
    there.leave(members[1])
    assert len(there.ask(all_who_belong, there.names[2]).members) == 1
    there.ask(Put(b"alone", b"value"), there.names[2])
    again = there.add(there.names[1])
    there.until(lambda: again.is_serving, "it to serve again")
    url = f"http://{there.names[1]}:2380"
    assert there.cluster(there.names[2])[url].id != before[url].id
    assert there.ask(Range(b"alone"), there.names[1]).kvs[0].value == b"value"


@open_and_with_users
def test_a_late_member_is_one_of_the_first(party: MakeParty, secret: bytes) -> None:
    """Its name was never started: it comes in as the member that the others began with."""
    there = party(secret=secret)
    early = [there.add(name) for name in there.names[:2]]
    there.until(lambda: all(member.is_serving for member in early), "two of three to serve")
    url = f"http://{there.names[2]}:2380"
    expected = there.cluster()[url]
    assert not expected.client_urls  # it was never up
    late = there.add(there.names[2])
    there.until(lambda: late.is_serving, "the third to serve")
    assert there.cluster()[url].id == expected.id


@open_and_with_users
def test_a_name_that_was_turned_away_as_new_is_replaced(party: MakeParty, secret: bytes) -> None:
    """Where the others did not answer in time, the server itself finds out, ends, and the member decides again (M2).

    Here the two others are stopped while the third looks around.
    """
    there = party(secret=secret)
    members = there.add_all()
    directory = members[2].data_directory
    members[2].close()
    shutil.rmtree(directory)
    others = [member.server_pid for member in members[:2]]
    for pid in others:
        os.kill(pid, signal.SIGSTOP)
    try:
        again = there.add(there.names[2])
        there.until(lambda: again.server_pid, "it to start a server in spite of the silence")
    finally:
        for pid in others:
            os.kill(pid, signal.SIGCONT)
    there.until(lambda: again.is_serving, "it to serve")
    assert any("exited with code" in line for line in there.said)
    assert len(there.cluster()) == 3


def test_tls(party: MakeParty, tmp_path: Path) -> None:
    """Members and clients show certificates to each other, and nobody is served without."""
    folder = tmp_path / "tls"
    folder.mkdir()
    there = party()
    # Members check from where a member comes; a loopback connection comes from 127.0.0.1.
    files = tls_files(folder, *there.names, "127.0.0.1")
    there.told["tls"] = files
    there.told["secret"] = SECRET
    there.add_all()
    assert set(there.cluster(tls=files)) == {f"https://{name}:2380" for name in there.names}
    for port in (2379, 2380):
        with pytest.raises(ssl.SSLError, match="certificate"):
            _greet_without_certificate(there.names[0], port, files.ca)


def test_ports_that_somebody_else_has(party: MakeParty) -> None:
    """It is said which, and what to do; nothing is left behind."""
    there = party(1)
    with socket.create_server((there.names[0], 2380)):
        member = there.add(there.names[0], {"taken_s": 0.0})
        there.until(lambda: there.failures, "a complaint", may_fail=True)
    assert there.failures[0].startswith(
        f"port 2380 of control host {there.names[0]} is in use by another program; "
        "managed etcd needs 2379 and 2380. Choose another port"
    )
    assert not member.is_here


def test_a_predecessor_may_let_go_late(party: MakeParty) -> None:
    """The agent before us was killed a moment ago, and its server still ends: we wait for its ports."""
    there = party(1)
    with socket.create_server((there.names[0], 2379)):
        member = there.add(there.names[0])
        there.until(lambda: member.data_directory and os.path.exists(member.data_directory), "it to look around")
        assert not member.is_here
    there.until(lambda: member.is_serving, "it to serve")


@open_and_with_users
def test_one_of_several_agents_on_a_host_runs_the_member(party: MakeParty, secret: bytes) -> None:
    """M4: the other sees that the place is held, says so, and leaves everything alone."""
    there = party(1, secret=secret)
    (first,) = there.add_all()
    second = there.add(there.names[0], {"taken_s": 0.5})
    there.until(lambda: any("another agent on this host runs" in line for line in there.said), "the second to give way")
    assert not second.is_here
    there.leave(second)
    assert first.is_serving
    there.ask(Put(b"still", b"here"))


@pytest.mark.parametrize("count", [1, 3])
def test_leaving_at_once(party: MakeParty, count: int) -> None:
    """Also who has just begun leaves in time, with nothing left."""
    there = party(count)
    member = there.add(there.names[0])
    there.until(lambda: member.server_pid, "a server")
    pid, directory = member.server_pid, member.data_directory
    there.leave(member)
    assert gone([pid])
    assert not os.path.exists(directory)


def _wait_until_members_may_be_removed(there: Party) -> None:
    """etcd changes nothing before all members have seen each other for 5 s: one that only listens is let in then."""
    added = there.ask(AddMember(("http://127.0.0.1:1",), is_learner=True)).member
    assert added is not None
    there.ask(RemoveMember(added.id))


def _greet_without_certificate(host: str, port: int, ca: str) -> None:
    context = TlsFiles(ca=ca).for_client()
    with (
        socket.create_connection((host, port), PATIENCE_S) as plain,
        context.wrap_socket(plain, server_hostname=host) as stranger,
    ):
        stranger.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
        stranger.recv(1)
