"""Calls to a real member, and to servers with one fault each."""

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
from tenax._core.etcd.errors import EtcdError, EtcdFull, EtcdRefused, EtcdRejected, EtcdUnavailable
from tenax._core.etcd.operations import (
    Compact,
    Compare,
    Delete,
    DeleteAnswer,
    GrantLease,
    Header,
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
from tenax._io.etcd.client import PATIENCE_S
from tenax._io.etcd.settings import etcd_settings

from .kit import (
    PUT_DONE,
    ClientInLoop,
    ScriptedServer,
    answer_to,
    http,
    raised,
    silent_until_disconnect,
)


@pytest.fixture
def client(etcd: EtcdCluster) -> Any:
    with ClientInLoop(etcd.settings()) as client:
        yield client


def test_put_range_and_delete(client: ClientInLoop) -> None:
    prefix = unique_prefix()
    for name in (b"a", b"b", b"c"):
        client.call(Put(prefix + name, b"value of " + name))
    answer = client.call(Range(prefix, prefix_end(prefix), limit=2))
    assert [(kv.key, kv.value, kv.version) for kv in answer.kvs] == [
        (prefix + b"a", b"value of a", 1),
        (prefix + b"b", b"value of b", 1),
    ]
    assert answer.count == 3
    assert client.call(Range(prefix, prefix_end(prefix), count_only=True)).kvs == ()
    assert {kv.value for kv in client.call(Range(prefix, prefix_end(prefix), keys_only=True)).kvs} == {b""}
    assert client.call(Delete(prefix, prefix_end(prefix))).deleted == 3
    assert client.call(Range(prefix + b"a")).kvs == ()


@given(name=st.binary(max_size=40), value=st.binary(max_size=200))
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_any_bytes_are_read_as_written(client: ClientInLoop, name: bytes, value: bytes) -> None:
    key = unique_prefix() + name
    revision = client.call(Put(key, value)).revision
    (kv,) = client.call(Range(key)).kvs
    assert (kv.key, kv.value, kv.mod_revision) == (key, value, revision)


def test_transactions_compare_and_execute(client: ClientInLoop) -> None:
    key = unique_prefix() + b"k"
    is_new = Transaction((Compare(key, "version", 0),), (Put(key, b"first"), Range(key)), (Range(key),))
    won = client.call(is_new)
    assert won.succeeded
    assert isinstance(won.answers[0], PutAnswer)
    lost = client.call(is_new)
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
        assert client.call(Transaction((compare,))).succeeded, compare
    deleted = client.call(Transaction((), (Delete(key),)))
    assert deleted.answers == (DeleteAnswer(Header(deleted.revision), 1),)


def test_leases_are_granted_renewed_and_revoked(client: ClientInLoop) -> None:
    key, lease = unique_prefix() + b"k", 2**62 + 12345
    assert client.call(GrantLease(60, lease)).ttl_s == 60
    assert client.call(GrantLease(60, lease)).id == lease  # idempotent
    assert client.call(Put(key, b"v", lease)) is not None
    assert client.call(Range(key)).kvs[0].lease == lease
    assert client.call(KeepAlive(lease)).ttl_s == 60
    client.call(RevokeLease(lease))
    client.call(RevokeLease(lease))  # idempotent
    assert client.call(KeepAlive(lease)).ttl_s == 0
    assert client.call(Range(key)).kvs == ()
    assert client.call(GrantLease(60)).id > 0


def test_status_and_members_are_reported(client: ClientInLoop, etcd: EtcdCluster) -> None:
    status = client.call(Status())
    assert status.leader == status.header.member_id != 0
    assert status.version.startswith("3.")
    (member,) = client.call(Members()).members
    assert (member.id, member.client_urls) == (status.header.member_id, (etcd.url(),))


def test_many_concurrent_calls_are_all_answered(client: ClientInLoop) -> None:
    prefix, answers, errors = unique_prefix(), [], []  # type: ignore[var-annotated]
    for number in range(100):
        client.etcd.call(Put(prefix + b"%d" % number, b""), answers.append, errors.append, patience_s=30)
    assert not answers  # never within the call
    client.until(lambda: len(answers) + len(errors) == 100)
    assert not errors
    assert client.call(Range(prefix, prefix_end(prefix), count_only=True)).count == 100


def test_invalid_requests_are_rejected(client: ClientInLoop, etcd: EtcdCluster) -> None:
    key = unique_prefix() + b"k"
    where = etcd.endpoint(0)
    assert raised(lambda: client.call(Put(b"", b"")), EtcdRejected) == (
        f"etcd at {where} rejected the request: key is not provided"
    )
    twice = Transaction((), (Put(key, b"1"), Put(key, b"2")))
    assert "duplicate key" in raised(lambda: client.call(twice), EtcdRejected)
    assert client.etcd.trouble
    client.call(Put(key, b"x" * 1_400_000))
    assert len(client.call(Range(key)).kvs[0].value) == 1_400_000
    assert not client.etcd.trouble
    assert "too large" in raised(lambda: client.call(Put(key, b"x" * 1_600_000)), EtcdRejected)
    assert "larger than max" in raised(lambda: client.call(Put(key, b"x" * 5_000_000)), EtcdRejected)
    invalid = Transaction((Compare(key, "value", 1),))
    assert "with a value of type int" in raised(lambda: client.call(invalid), EtcdRejected)
    assert "future revision" in raised(lambda: client.call(Compact(1 << 40)), EtcdRejected)


def test_the_local_address_is_known_after_a_call(client: ClientInLoop) -> None:
    assert client.etcd.local_address() == ""
    client.call(Status())
    assert client.etcd.local_address().startswith("127.")


def test_cancelled_and_closed_calls_make_no_callbacks(client: ClientInLoop) -> None:
    called: list[object] = []
    client.etcd.call(Status(), called.append, called.append).cancel()
    client.etcd.call(Status(), called.append, called.append)
    client.etcd.close()
    client.etcd.call(Status(), called.append, called.append)
    client.run_for(0.2)
    assert called == []


def test_a_full_etcd_is_reported(make_etcd: Callable[..., EtcdCluster]) -> None:
    cluster = make_etcd(arguments=("--quota-backend-bytes=2000000",))
    with ClientInLoop(cluster.settings()) as client:

        def fill() -> None:
            for _ in range(50):
                client.call(Put(b"k", b"x" * 500_000))

        assert "alarm disarm" in raised(fill, EtcdFull)
        assert "alarm disarm" in raised(lambda: client.call(Put(b"other", b"")), EtcdFull)
        assert client.call(Range(b"k")).kvs
        assert any("NOSPACE" in each for each in client.call(Status()).errors)


# --- names and sockets ------------------------------------------------------------------------------------------------


def test_a_refused_connection_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:  # its port is closed after this block
        endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
    with ClientInLoop(etcd_settings(endpoint)) as client, pytest.raises(EtcdUnavailable) as caught:
        client.call(Put(b"k", b"v"), patience_s=0.5)
    assert caught.value.message == f"etcd did not answer within 0.5 s: {endpoint}: connection refused"
    assert caught.value.is_certain


def test_a_refused_connection_is_reported_also_if_no_token_could_be_obtained() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:  # its port is closed after this block
        endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
    with ClientInLoop(etcd_settings(endpoint, user="someone", password="secret")) as client:
        patience_s = PATIENCE_S + 0.3  # longer than that of the authentication
        message = raised(lambda: client.call(Put(b"k", b"v"), patience_s=patience_s), EtcdUnavailable)
    assert message == f"etcd did not answer within 5.3 s: {endpoint}: connection refused"


def test_an_unknown_host_name_is_reported() -> None:
    with ClientInLoop(etcd_settings("no-such-host.invalid")) as client:
        message = raised(lambda: client.call(Status(), patience_s=0.5), EtcdUnavailable)
    assert "no-such-host.invalid:2379" in message


def test_a_host_name_is_looked_up() -> None:
    with ScriptedServer(answer_to(PUT_DONE)) as server:
        endpoint = server.endpoint.replace("127.0.0.1", "localhost")
        with ClientInLoop(etcd_settings(endpoint)) as client:
            assert client.call(Put(b"k", b"v")) == PutAnswer(Header(7))


def test_a_silent_server_is_replaced_by_the_next_endpoint() -> None:
    with ScriptedServer(silent_until_disconnect) as silent, ScriptedServer(answer_to(PUT_DONE, PUT_DONE)) as good:
        with ClientInLoop(etcd_settings(f"{silent.endpoint},{good.endpoint}", attempt_s=0.1)) as client:
            assert client.call(Put(b"k", b"v")) == PutAnswer(Header(7))
            client.call(Put(b"k", b"v"))  # starts with the endpoint that answered
        assert (len(silent.requests), len(good.requests)) == (1, 2)


def test_an_unanswered_write_is_not_certain() -> None:
    server = ScriptedServer(*[silent_until_disconnect] * 20)
    with server as silent, ClientInLoop(etcd_settings(silent.endpoint, attempt_s=0.1)) as client:
        for operation, is_certain in ((Put(b"k", b"v"), False), (Range(b"k"), True)):
            with pytest.raises(EtcdUnavailable, match="did not answer in time") as caught:
                client.call(operation, patience_s=0.3)
            assert caught.value.is_certain is is_certain


def test_a_closed_idle_connection_is_replaced_silently() -> None:
    def close_at_the_second_request(server: ScriptedServer, sock: socket.socket) -> None:
        server.read_request(sock)
        sock.sendall(PUT_DONE)
        server.read_request(sock)

    with ScriptedServer(close_at_the_second_request, answer_to(PUT_DONE)) as server:
        with ClientInLoop(etcd_settings(server.endpoint)) as client:
            client.call(Put(b"k", b"1"))
            client.call(Put(b"k", b"2"), patience_s=30)
        assert len(server.requests) == 3  # without another round: there is no script for that


@pytest.mark.parametrize(
    "response",
    [b"SSH-2.0-OpenSSH_9\r\n", http(b"<html>"), http(b"", "502 Bad Gateway"), http(b"{}", "200 OK")[:-1], b""],
)
def test_invalid_responses_are_retried(response: bytes) -> None:
    scripted = ScriptedServer(answer_to(response), answer_to(PUT_DONE))
    with scripted as server, ClientInLoop(etcd_settings(server.endpoint)) as client:
        assert client.call(Put(b"k", b"v")) == PutAnswer(Header(7))


def test_connections_that_the_server_closes_are_not_reused() -> None:
    last = http(b'{"header":{"revision":"7"}}', "200 OK", "Connection: close")
    with (
        ScriptedServer(answer_to(last), answer_to(last)) as server,
        ClientInLoop(etcd_settings(server.endpoint)) as client,
    ):
        client.call(Put(b"k", b"v"))
        client.call(Put(b"k", b"v"))


def test_an_unknown_path_is_rejected() -> None:
    scripted = ScriptedServer(answer_to(http(b"404 page not found", "404 Not Found")))
    with scripted as server, ClientInLoop(etcd_settings(server.endpoint)) as client:
        assert "etcd 3.4 or later" in raised(lambda: client.call(Put(b"k", b"v")), EtcdRejected)


def test_failures_are_reported_by_endpoint() -> None:
    no_leader = http(b'{"code":14,"message":"etcdserver: no leader"}', "503 Service Unavailable")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        closed = f"127.0.0.1:{listener.getsockname()[1]}"
    scripted = ScriptedServer(answer_to(*[no_leader] * 20))
    with scripted as server, ClientInLoop(etcd_settings(f"{closed},{server.endpoint}")) as client:
        with pytest.raises(EtcdUnavailable) as caught:
            client.call(Put(b"k", b"v"), patience_s=0.3)
        assert client.etcd.trouble == f"{closed}: connection refused; {server.endpoint}: no leader"
        assert client.etcd.trouble in caught.value.message
        assert caught.value.is_certain


# --- users ------------------------------------------------------------------------------------------------------------


def test_a_login_is_ignored_if_etcd_has_no_users(etcd: EtcdCluster) -> None:
    with ClientInLoop(etcd.settings(user="someone", password="secret")) as client:
        assert client.call(Status()).version


def test_the_client_imports_little() -> None:
    unwanted = "ssl asyncio http.client urllib urllib.request threading"
    program = (
        "import sys, tenax._io.etcd.client, tenax._io.etcd.subscription, tenax._core.leadership.held_lease\n"
        f"print([name for name in {unwanted.split()} if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert found.strip() == "[]"


def authentications(cluster: EtcdCluster) -> float:
    text = urllib.request.urlopen(f"{cluster.url()}/metrics", timeout=10).read().decode()
    lines = [line for line in text.splitlines() if 'grpc_method="Authenticate"' in line and "started_total" in line]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def test_concurrent_calls_share_one_authentication(make_etcd: Callable[..., EtcdCluster]) -> None:
    cluster = make_etcd(users=True, **ALONE)
    before = authentications(cluster)
    with ClientInLoop(cluster.settings()) as client:
        answers: list[object] = []
        errors: list[EtcdError] = []
        for _ in range(10):
            client.etcd.call(Range(b"k"), answers.append, errors.append, patience_s=30)
        client.until(lambda: len(answers) + len(errors) == 10)
        assert not errors
        assert authentications(cluster) == before + 1
        # Setting the same password again makes etcd drop all tokens of the user.
        token = cluster.token()
        cluster.ask(0, "/v3/auth/user/changepw", {"name": ROOT, "password": ROOT_PASSWORD}, token)
        with pytest.raises(urllib.error.HTTPError, match="401"):
            cluster.ask(0, "/v3/kv/range", {"key": "AA=="}, token)
        before = authentications(cluster)
        client.call(Put(b"k", b"v"))
        assert authentications(cluster) == before + 1
        cluster.kill(0)
        cluster.start(0)
        client.call(Put(b"k", b"v"))


def test_wrong_logins_are_refused(make_etcd: Callable[..., EtcdCluster]) -> None:
    cluster = make_etcd(users=True, **ALONE)
    where = cluster.endpoint(0)
    with ClientInLoop(cluster.settings(password="hush")) as client:
        assert raised(lambda: client.call(Range(b"k")), EtcdRefused) == (
            f"etcd at {where} refused this client: authentication failed, invalid user ID or password"
        )
        assert "hush" not in client.etcd.trouble
    with ClientInLoop(cluster.settings(user="", password="")) as client:
        assert "requires a user and a password" in raised(lambda: client.call(Range(b"k")), EtcdRefused)
    with ClientInLoop(cluster.settings(user=USER, password=USER_PASSWORD)) as client:
        client.call(Put(ALLOWED + b"k", b"v"))
        assert "permission denied" in raised(lambda: client.call(Put(b"k", b"v")), EtcdRefused)
