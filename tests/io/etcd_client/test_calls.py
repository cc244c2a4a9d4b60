"""Calls against a real member, and against servers that misbehave in one way each."""

from __future__ import annotations

import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kit.etcd import ALLOWED, ALONE, ROOT, ROOT_PASSWORD, USER, USER_PASSWORD, EtcdCluster, unique_prefix
from tenax._io.etcd.errors import EtcdError, EtcdFull, EtcdRefused, EtcdRejected, EtcdUnavailable
from tenax._io.etcd.operations import (
    Compact,
    Compare,
    Delete,
    DeleteAnswer,
    GrantLease,
    KeepAlive,
    Members,
    Put,
    PutAnswer,
    Range,
    RangeAnswer,
    RevokeLease,
    Status,
    Transaction,
    prefix_end,
)
from tenax._io.etcd.settings import etcd_settings

from .kit import (
    PUT_DONE,
    ClientInLoop,
    ScriptedServer,
    answer_to,
    http,
    raised,
    silent_until_gone,
)


@pytest.fixture
def desk(etcd: EtcdCluster) -> Any:
    with ClientInLoop(etcd.settings()) as desk:
        yield desk


def test_put_range_delete(desk: ClientInLoop) -> None:
    prefix = unique_prefix()
    for name in (b"a", b"b", b"c"):
        desk.call(Put(prefix + name, b"value of " + name))
    answer = desk.call(Range(prefix, prefix_end(prefix), limit=2))
    assert [(kv.key, kv.value, kv.version) for kv in answer.kvs] == [
        (prefix + b"a", b"value of a", 1),
        (prefix + b"b", b"value of b", 1),
    ]
    assert answer.count == 3
    assert desk.call(Range(prefix, prefix_end(prefix), count_only=True)).kvs == ()
    assert {kv.value for kv in desk.call(Range(prefix, prefix_end(prefix), keys_only=True)).kvs} == {b""}
    assert desk.call(Delete(prefix, prefix_end(prefix))).deleted == 3
    assert desk.call(Range(prefix + b"a")).kvs == ()


@given(name=st.binary(max_size=40), value=st.binary(max_size=200))
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_any_bytes_come_back_as_they_were(desk: ClientInLoop, name: bytes, value: bytes) -> None:
    key = unique_prefix() + name
    revision = desk.call(Put(key, value)).revision
    (kv,) = desk.call(Range(key)).kvs
    assert (kv.key, kv.value, kv.mod_revision) == (key, value, revision)


def test_transactions(desk: ClientInLoop) -> None:
    key = unique_prefix() + b"k"
    is_new = Transaction((Compare(key, "version", 0),), (Put(key, b"first"), Range(key)), (Range(key),))
    won = desk.call(is_new)
    assert won.succeeded
    assert isinstance(won.answers[0], PutAnswer)
    lost = desk.call(is_new)
    assert not lost.succeeded
    (found,) = lost.answers
    assert isinstance(found, RangeAnswer)
    assert found.kvs[0].value == b"first"
    assert found.kvs[0].mod_revision == won.revision
    for compare in (
        Compare(key, "value", b"first"),
        Compare(key, "mod", won.revision),
        Compare(key, "create", won.revision - 1, ">"),
        Compare(key, "lease", 1, "<"),
        Compare(key, "value", b"other", "!="),
        Compare(key, "version", 1, end=prefix_end(key)),
    ):
        assert desk.call(Transaction((compare,))).succeeded, compare
    deleted = desk.call(Transaction((), (Delete(key),)))
    assert deleted.answers == (DeleteAnswer(deleted.revision, 1),)


def test_leases(desk: ClientInLoop) -> None:
    key, lease = unique_prefix() + b"k", 2**62 + 12345
    assert desk.call(GrantLease(60, lease)).ttl_s == 60
    assert desk.call(GrantLease(60, lease)).id == lease  # once more is the same
    assert desk.call(Put(key, b"v", lease)) is not None
    assert desk.call(Range(key)).kvs[0].lease == lease
    assert desk.call(KeepAlive(lease)).ttl_s == 60
    desk.call(RevokeLease(lease))
    desk.call(RevokeLease(lease))  # it is gone: so be it
    assert desk.call(KeepAlive(lease)).ttl_s == 0
    assert desk.call(Range(key)).kvs == ()
    assert desk.call(GrantLease(60)).id > 0


def test_status_and_members(desk: ClientInLoop, etcd: EtcdCluster) -> None:
    status = desk.call(Status())
    assert status.leader == status.member_id != 0
    assert status.version.startswith("3.")
    (member,) = desk.call(Members()).members
    assert (member.id, member.client_urls) == (status.member_id, (etcd.url(),))


def test_many_calls_at_once_are_all_answered(desk: ClientInLoop) -> None:
    prefix, answers, errors = unique_prefix(), [], []  # type: ignore[var-annotated]
    for number in range(100):
        desk.client.call(Put(prefix + b"%d" % number, b""), answers.append, errors.append, patience_s=30)
    assert not answers  # never from within
    desk.until(lambda: len(answers) + len(errors) == 100)
    assert not errors
    assert desk.call(Range(prefix, prefix_end(prefix), count_only=True)).count == 100


def test_what_etcd_will_never_take(desk: ClientInLoop, etcd: EtcdCluster) -> None:
    key = unique_prefix() + b"k"
    where = etcd.endpoint(0)
    assert raised(lambda: desk.call(Put(b"", b"")), EtcdRejected) == (
        f"etcd at {where} rejected the request: key is not provided"
    )
    assert "duplicate key" in raised(lambda: desk.call(Transaction((), (Put(key, b"1"), Put(key, b"2")))), EtcdRejected)
    assert desk.client.trouble
    desk.call(Put(key, b"x" * 1_400_000))
    assert len(desk.call(Range(key)).kvs[0].value) == 1_400_000
    assert not desk.client.trouble
    assert "too large" in raised(lambda: desk.call(Put(key, b"x" * 1_600_000)), EtcdRejected)
    assert "larger than max" in raised(lambda: desk.call(Put(key, b"x" * 5_000_000)), EtcdRejected)
    wrong = Transaction((Compare(key, "value", 1),))
    assert "with a value of type int" in raised(lambda: desk.call(wrong), EtcdRejected)
    assert "future revision" in raised(lambda: desk.call(Compact(1 << 40)), EtcdRejected)


def test_local_address(desk: ClientInLoop) -> None:
    assert desk.client.local_address() == ""
    desk.call(Status())
    assert desk.client.local_address().startswith("127.")


def test_cancelled_and_closed_calls_are_silent(desk: ClientInLoop) -> None:
    told: list[object] = []
    desk.client.call(Status(), told.append, told.append).cancel()
    desk.client.call(Status(), told.append, told.append)
    desk.client.close()
    desk.client.call(Status(), told.append, told.append)
    desk.run_for(0.2)
    assert told == []


def test_a_full_etcd_says_so(make_etcd: Callable[..., EtcdCluster]) -> None:
    cluster = make_etcd(arguments=("--quota-backend-bytes=2000000",))
    with ClientInLoop(cluster.settings()) as desk:

        def fill() -> None:
            for _ in range(50):
                desk.call(Put(b"k", b"x" * 500_000))

        assert "alarm disarm" in raised(fill, EtcdFull)
        assert "alarm disarm" in raised(lambda: desk.call(Put(b"other", b"")), EtcdFull)
        assert desk.call(Range(b"k")).kvs
        assert any("NOSPACE" in each for each in desk.call(Status()).errors)


# --- names and sockets ------------------------------------------------------------------------------------------------


def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:  # a port that is bound by us, and closed in the next line
        endpoint = f"127.0.0.1:{door.getsockname()[1]}"
    with ClientInLoop(etcd_settings(endpoint)) as desk, pytest.raises(EtcdUnavailable) as caught:
        desk.call(Put(b"k", b"v"), patience_s=0.5)
    assert caught.value.message == f"etcd did not answer within 0.5 s: {endpoint}: connection refused"
    assert caught.value.is_certain


def test_a_name_that_does_not_exist() -> None:
    with ClientInLoop(etcd_settings("no-such-host.invalid")) as desk:
        sentence = raised(lambda: desk.call(Status(), patience_s=0.5), EtcdUnavailable)
    assert "no-such-host.invalid:2379" in sentence


def test_a_name_is_looked_up() -> None:
    with ScriptedServer(answer_to(PUT_DONE)) as server:
        endpoint = server.endpoint.replace("127.0.0.1", "localhost")
        with ClientInLoop(etcd_settings(endpoint)) as desk:
            assert desk.call(Put(b"k", b"v")) == PutAnswer(7)


def test_a_silent_server_is_left_for_the_next() -> None:
    with ScriptedServer(silent_until_gone) as silent, ScriptedServer(answer_to(PUT_DONE, PUT_DONE)) as good:
        with ClientInLoop(etcd_settings(f"{silent.endpoint},{good.endpoint}", attempt_s=0.1)) as desk:
            assert desk.call(Put(b"k", b"v")) == PutAnswer(7)
            desk.call(Put(b"k", b"v"))  # begins where it went well
        assert (len(silent.requests), len(good.requests)) == (1, 2)


def test_a_write_that_nobody_answered_is_not_certain() -> None:
    server = ScriptedServer(*[silent_until_gone] * 20)
    with server as silent, ClientInLoop(etcd_settings(silent.endpoint, attempt_s=0.1)) as desk:
        for operation, is_certain in ((Put(b"k", b"v"), False), (Range(b"k"), True)):
            with pytest.raises(EtcdUnavailable, match="did not answer in time") as caught:
                desk.call(operation, patience_s=0.3)
            assert caught.value.is_certain is is_certain


def test_a_connection_that_idled_is_replaced_without_a_word() -> None:
    def closes_at_the_second(server: ScriptedServer, sock: socket.socket) -> None:
        server.hear(sock)
        sock.sendall(PUT_DONE)
        server.hear(sock)

    with ScriptedServer(closes_at_the_second, answer_to(PUT_DONE)) as server:
        with ClientInLoop(etcd_settings(server.endpoint)) as desk:
            desk.call(Put(b"k", b"1"))
            desk.call(Put(b"k", b"2"), patience_s=30)
        assert len(server.requests) == 3  # and no pause, no other round: there is but one script for that


@pytest.mark.parametrize(
    "nonsense",
    [b"SSH-2.0-OpenSSH_9\r\n", http(b"<html>"), http(b"", "502 Bad Gateway"), http(b"{}", "200 OK")[:-1], b""],
)
def test_servers_that_are_not_etcd(nonsense: bytes) -> None:
    scripted = ScriptedServer(answer_to(nonsense), answer_to(PUT_DONE))
    with scripted as server, ClientInLoop(etcd_settings(server.endpoint)) as desk:
        assert desk.call(Put(b"k", b"v")) == PutAnswer(7)


def test_connections_that_must_not_be_used_again_are_not() -> None:
    last = http(b'{"header":{"revision":"7"}}', "200 OK", "Connection: close")
    with (
        ScriptedServer(answer_to(last), answer_to(last)) as server,
        ClientInLoop(etcd_settings(server.endpoint)) as desk,
    ):
        desk.call(Put(b"k", b"v"))
        desk.call(Put(b"k", b"v"))


def test_a_path_that_nobody_knows() -> None:
    scripted = ScriptedServer(answer_to(http(b"404 page not found", "404 Not Found")))
    with scripted as server, ClientInLoop(etcd_settings(server.endpoint)) as desk:
        assert "etcd 3.4 or later" in raised(lambda: desk.call(Put(b"k", b"v")), EtcdRejected)


def test_trouble_is_told_place_by_place() -> None:
    no_leader = http(b'{"code":14,"message":"etcdserver: no leader"}', "503 Service Unavailable")
    with socket.create_server(("127.0.0.1", 0)) as door:
        nobody = f"127.0.0.1:{door.getsockname()[1]}"
    scripted = ScriptedServer(answer_to(*[no_leader] * 20))
    with scripted as server, ClientInLoop(etcd_settings(f"{nobody},{server.endpoint}")) as desk:
        with pytest.raises(EtcdUnavailable) as caught:
            desk.call(Put(b"k", b"v"), patience_s=0.3)
        assert desk.client.trouble == f"{nobody}: connection refused; {server.endpoint}: no leader"
        assert desk.client.trouble in caught.value.message
        assert caught.value.is_certain


# --- users ------------------------------------------------------------------------------------------------------------


def test_a_user_for_an_etcd_that_has_none(etcd: EtcdCluster) -> None:
    with ClientInLoop(etcd.settings(user="somebody", password="something")) as desk:
        assert desk.call(Status()).version


def test_the_client_imports_little() -> None:
    unwanted = "ssl asyncio http.client urllib urllib.request threading"
    program = (
        "import sys, tenax._io.etcd.client, tenax._io.etcd.subscription, tenax._io.etcd.held_lease\n"
        f"print([name for name in {unwanted.split()} if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert found.strip() == "[]"


def authentications(cluster: EtcdCluster) -> float:
    text = urllib.request.urlopen(f"{cluster.url()}/metrics", timeout=10).read().decode()
    lines = [line for line in text.splitlines() if 'grpc_method="Authenticate"' in line and "started_total" in line]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def test_one_authentication_for_all(make_etcd: Callable[..., EtcdCluster]) -> None:
    cluster = make_etcd(users=True, **ALONE)
    before = authentications(cluster)
    with ClientInLoop(cluster.settings()) as desk:
        answers: list[object] = []
        errors: list[EtcdError] = []
        for _ in range(10):
            desk.client.call(Range(b"k"), answers.append, errors.append, patience_s=30)
        desk.until(lambda: len(answers) + len(errors) == 10)
        assert not errors
        assert authentications(cluster) == before + 1
        # Its password was changed, to what it was: etcd forgets all tokens of the user, and counts what we do then.
        token = cluster.token()
        cluster.ask(0, "/v3/auth/user/changepw", {"name": ROOT, "password": ROOT_PASSWORD}, token)
        with pytest.raises(urllib.error.HTTPError, match="401"):
            cluster.ask(0, "/v3/kv/range", {"key": "AA=="}, token)
        before = authentications(cluster)
        desk.call(Put(b"k", b"v"))
        assert authentications(cluster) == before + 1
        cluster.kill(0)
        cluster.start(0)
        desk.call(Put(b"k", b"v"))


def test_wrong_users_are_told_so(make_etcd: Callable[..., EtcdCluster]) -> None:
    cluster = make_etcd(users=True, **ALONE)
    where = cluster.endpoint(0)
    with ClientInLoop(cluster.settings(password="hush")) as desk:
        assert raised(lambda: desk.call(Range(b"k")), EtcdRefused) == (
            f"etcd at {where} refused this client: authentication failed, invalid user ID or password"
        )
        assert "hush" not in desk.client.trouble
    with ClientInLoop(cluster.settings(user="", password="")) as desk:
        assert "requires a user and a password" in raised(lambda: desk.call(Range(b"k")), EtcdRefused)
    with ClientInLoop(cluster.settings(user=USER, password=USER_PASSWORD)) as desk:
        desk.call(Put(ALLOWED + b"k", b"v"))
        assert "permission denied" in raised(lambda: desk.call(Put(b"k", b"v")), EtcdRefused)
