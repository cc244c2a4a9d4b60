"""Users of managed members: with a secret, a client without it can do nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kit.processes import TIMEOUT_S, on_linux
from tenax._core.etcd.errors import EtcdError, EtcdRefused
from tenax._core.etcd.operations import (
    Delete,
    Members,
    Operation,
    Put,
    PutAnswer,
    Range,
    RemoveMember,
    SetUpUsers,
    Transaction,
)
from tenax._engines.etcd.managed import ManagedSettings, member_key
from tenax._engines.etcd.operator import connect_through_etcd
from tenax._engines.tcp.operator import Unreachable
from tenax._io.etcd.client import EtcdClient
from tenax._io.etcd.settings import EtcdSettings
from tenax.rendezvous._etcd_handler import etcd_engine_settings
from tenax.rendezvous.api import RendezvousParameters

from .kit import ManagedCluster

MakeCluster = Callable[..., ManagedCluster]
SECRET = b"the secret of the run"
OPEN = "any client that can reach ports 2379 and 2380 can read and change the etcd of this run"


def refusal(cluster: ManagedCluster, operation: Operation[object], **login: str) -> EtcdError:
    """Return the error that the members answer to another client."""
    settings = EtcdSettings((f"{cluster.names[0]}:2379",), **login)
    client = EtcdClient(cluster.loop, settings)
    errors: list[EtcdError] = []
    answers: list[object] = []
    client.call(operation, answers.append, errors.append)
    cluster.until(lambda: errors or answers, "an answer")
    client.close()
    assert not answers, answers
    return errors[0]


def test_without_the_secret_nothing_can_be_read_or_changed(make_cluster: MakeCluster) -> None:
    """Neither keys nor members nor users, without a login or with a wrong one."""
    cluster = make_cluster(1, secret=SECRET)
    cluster.add_all()
    key = member_key("a run/1", cluster.names[0])
    (member,) = cluster.call(Members()).members
    wrong = ManagedSettings(cluster.names, "a run/1", secret=b"another secret of 16").password
    for login in ({}, {"user": "root", "password": wrong}):
        for operation in (
            Range(key),
            Put(b"key", b"value"),
            Delete(key),
            Transaction((), (Put(b"key", b"value"),)),
            RemoveMember(member.id),
            SetUpUsers("add user", "a password"),
            SetUpUsers("list users"),
        ):
            assert isinstance(refusal(cluster, operation, **login), EtcdRefused), operation  # type: ignore[arg-type]
    assert cluster.call(Range(key)).kvs
    assert cluster.call(SetUpUsers("list users")).users == ("root",)
    assert not any(OPEN in line for line in cluster.messages)


def test_without_a_secret_members_report_that_they_are_open(make_cluster: MakeCluster) -> None:
    """With the ports and the setting that protects them."""
    cluster = make_cluster(1)
    cluster.add_all()
    assert sum(OPEN in line for line in cluster.messages) == 1
    assert cluster.call(Range(b"key")).kvs == ()


def test_a_client_waits_until_users_are_set_up(make_cluster: MakeCluster) -> None:
    """An agent writes nothing to an etcd that is still open, least of all the secret of its links."""
    cluster = make_cluster(1)
    cluster.add_all()
    settings = cluster.settings(cluster.names[0], secret=SECRET)
    client = EtcdClient(
        cluster.loop, EtcdSettings((f"{cluster.names[0]}:2379",), "root", settings.password, waits_for_users=True)
    )
    done: list[PutAnswer] = []
    errors: list[EtcdError] = []
    client.call(Put(b"key", b"value"), done.append, errors.append, patience_s=TIMEOUT_S)
    until = cluster.loop.now() + 0.3
    cluster.loop.next_event(lambda: until)
    assert not done
    assert not errors
    for step in ("add user", "add role", "grant role", "enable"):
        cluster.call(SetUpUsers(step, settings.password))  # type: ignore[arg-type]
    cluster.until(lambda: done or errors, "the write")
    client.close()
    assert done, errors
    assert cluster.call(Range(b"key"), user="root", password=settings.password).kvs[0].value == b"value"


def test_data_of_a_run_with_another_secret_is_not_used(make_cluster: MakeCluster) -> None:
    """The message has its path and the next step."""
    cluster = make_cluster(1, secret=SECRET)
    (member,) = cluster.add_all()
    directory = member.directory.path
    member.close()
    for secret in (b"another secret of 16", b""):
        again = cluster.add(cluster.names[0], secret=secret)
        cluster.until(lambda: cluster.failures, "a refusal", may_fail=True)
        (message,) = cluster.failures
        assert "refused its own agent" in message
        assert f"If {directory} holds data of an earlier run with another secret, remove it" in message
        assert "password" not in message.replace("invalid user ID or password", "").replace("a password", "")
        assert not again.is_here
        cluster.failures.clear()
    back = cluster.add(cluster.names[0])
    cluster.until(lambda: back.is_serving, "the run's own member to serve again")


def test_unknown_users_are_not_accepted(make_cluster: MakeCluster) -> None:
    """A client that connected before users were set up may have added one. The run does not start."""
    cluster = make_cluster(1)
    (member,) = cluster.add_all()
    import json
    import urllib.request

    request = urllib.request.Request(
        f"http://{cluster.names[0]}:2379/v3/auth/user/add", json.dumps({"name": "eve", "password": "eve"}).encode()
    )
    urllib.request.urlopen(request, timeout=TIMEOUT_S).close()
    member.close()
    cluster.add(cluster.names[0], secret=SECRET)
    cluster.until(lambda: cluster.failures, "a refusal", may_fail=True)
    assert "has a user 'eve' that tenax did not add" in cluster.failures[0]


@on_linux
def test_no_secret_is_visible_in_the_process_list_or_the_log(make_cluster: MakeCluster) -> None:
    """Neither the secret nor the password that derives from it, in the command line, the environment or the log."""
    import os

    os.environ["TENAX_RDZV_TOKEN"] = SECRET.decode()
    try:
        cluster = make_cluster(1, secret=SECRET)
        (member,) = cluster.add_all()
    finally:
        del os.environ["TENAX_RDZV_TOKEN"]
    password = cluster.settings(cluster.names[0]).password
    pids = [member.server.pid]
    seen = [Path(f"/proc/{pid}/{what}").read_bytes() for pid in pids for what in ("cmdline", "environ")]
    seen.append((Path(member.directory.path) / "etcd.log").read_bytes())
    seen.append(repr((cluster.settings(cluster.names[0]), SetUpUsers("add user", password), cluster.messages)).encode())
    for text in seen:
        assert SECRET not in text
        assert password.encode() not in text


def test_the_password_derives_from_the_run_and_the_secret() -> None:
    """Without a secret there is none."""

    def password(run_id: str, secret: bytes) -> str:
        return ManagedSettings(("n0",), run_id, secret=secret).password

    assert password("run", b"") == ""
    assert len({password("run", SECRET), password("run2", SECRET), password("run", SECRET + b"x")}) == 3
    assert password("run", SECRET) == password("run", SECRET)


def test_an_operator_logs_in_with_the_settings_of_the_run(make_cluster: MakeCluster) -> None:
    """Without managed=true or without the secret, the message names what is missing."""
    cluster = make_cluster(1, secret=SECRET)
    cluster.add_all()
    name = f"{cluster.names[0]}:2379"

    def attempt(**conf: str) -> str:
        with pytest.raises(Unreachable) as raised:
            connect_through_etcd(etcd_engine_settings(RendezvousParameters("etcd", name, "a run/1", 1, 2, **conf)))
        return str(raised.value)

    assert "has no coordinator for it" in attempt(managed="true", token=SECRET.decode())
    assert "if tenax runs this etcd, add managed=true to --rdzv-conf" in attempt(token=SECRET.decode())
    assert "requires a user and a password" in attempt(managed="true")


def parameters(**conf: str) -> RendezvousParameters:
    return RendezvousParameters("etcd", "n0,n1,n2", "run", 1, 2, managed="true", **conf)


def test_the_login_of_agents_derives_from_the_secret() -> None:
    """It matches the user that the members set up, and waits for it."""
    settings = etcd_engine_settings(parameters(token=SECRET.decode()))
    assert settings.managed is not None
    assert settings.etcd.user == "root"
    assert settings.etcd.password == settings.managed.password
    assert settings.etcd.waits_for_users
    without = etcd_engine_settings(parameters())
    assert (without.etcd.user, without.etcd.password, without.etcd.waits_for_users) == ("", "", False)


def test_a_certificate_with_a_common_name_is_refused_with_a_secret(tmp_path: Path) -> None:
    """etcd with users would refuse every call; this is detected before anything starts."""
    import trustme

    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    authority.issue_cert("n0", common_name="someone").private_key_and_cert_chain_pem.write_to_path(
        str(tmp_path / "me.pem")
    )
    files = {"ssl_cert": str(tmp_path / "me.pem"), "ca_cert": str(tmp_path / "ca.pem")}
    with pytest.raises(ValueError, match="has the Common Name 'someone', which etcd does not accept when it has users"):
        etcd_engine_settings(parameters(token=SECRET.decode(), **files))
    assert etcd_engine_settings(parameters(**files)).tls is not None
