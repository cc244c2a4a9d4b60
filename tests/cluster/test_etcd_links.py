"""Links between agents with etcd: TLS and the fixed port."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import ssl
from base64 import b64decode, b64encode
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from kit.cluster import Agent, Cluster
from kit.etcd import EtcdCluster, needs_etcd
from kit.processes import TIMEOUT_S, until
from network.etcd_members import records_of
from tenax._core.leadership.keys import Keys, Leader

pytestmark = needs_etcd

MakeEtcd = Callable[..., EtcdCluster]
SERVES = "this node serves the coordinator"
TAKES_OVER = "this node takes over the coordinator"
PLAIN = "the links between agents are not encrypted"
REFUSED = 71
PATIENT = {"keep_alive_max_attempt": 20}


def leader_of(cluster: Cluster, etcd: EtcdCluster) -> Leader:
    key = b64encode(Keys(cluster.options["run_id"]).leader).decode()
    (kv,) = etcd.ask(0, "/v3/kv/range", {"key": key}, etcd.token())["kvs"]
    return msgspec.json.decode(b64decode(kv["value"]), type=Leader)


def settled(cluster: Cluster, etcd: EtcdCluster) -> bool:
    """Return whether all members of the generation are linked to the current leader."""
    return records_of(lambda path, body: etcd.ask(0, path, body), cluster.options["run_id"])[-1].before == ()


def in_one_line(text: str) -> str:
    return " ".join(text.split())


def own_ports(count: int) -> list[int]:
    """Return ports for this test process, below the ephemeral range."""
    first = 17_000 + os.getpid() % 1000 * 15
    found: list[int] = []
    for port in range(first, first + 15):
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        found.append(port)
    return found[:count]


def let_lead(cluster: Cluster, etcd: EtcdCluster, heir: Agent, others: Sequence[Agent]) -> None:
    """Make ``heir`` the leader: the others are stopped while the leader key is deleted."""
    for agent in others:
        agent.send(signal.SIGSTOP)
        os.waitid(os.P_PID, agent.process.pid, os.WSTOPPED | os.WNOWAIT)
    key = b64encode(Keys(cluster.options["run_id"]).leader).decode()
    assert etcd.ask(0, "/v3/kv/deleterange", {"key": key})["deleted"] == "1"
    heir.until_printed(TAKES_OVER)
    for agent in others:
        agent.send(signal.SIGCONT)


# --- TLS --------------------------------------------------------------------------------------------------------------


def test_links_use_the_certificates_of_the_connections_to_etcd(cluster: Cluster, make_etcd: MakeEtcd) -> None:
    """The leader shows the certificate it announced, and accepts only peers with a certificate."""
    etcd = make_etcd(1, tls="mutual")
    assert etcd.certificates is not None
    cluster.use_etcd(etcd)
    cluster.start(2)
    workers = cluster.hub.generation(2)
    leader = leader_of(cluster, etcd)
    address = (leader.address.addr, leader.address.port)
    context = ssl.create_default_context(cafile=etcd.certificates.ca)
    context.check_hostname = False
    with socket.create_connection(address, TIMEOUT_S) as sock, pytest.raises((ssl.SSLError, ConnectionError)):  # noqa: SIM117
        with context.wrap_socket(sock, server_hostname="leader") as bare:
            bare.recv(1)  # TLS 1.3 rejects a missing certificate after the handshake
    context.load_cert_chain(*etcd.certificates.client)
    with (
        socket.create_connection(address, TIMEOUT_S) as sock,
        context.wrap_socket(sock, server_hostname="leader") as secured,
    ):
        shown = secured.getpeercert(binary_form=True)
        assert shown is not None
        assert hashlib.sha256(shown).digest() == leader.certificate
    with socket.create_connection(address, TIMEOUT_S) as sock:
        sock.sendall(b"\0\0\0\2{}")
        assert sock.recv(1) != b"\0", "frames outside TLS are not answered"
    cluster.finish(workers)
    assert not any(PLAIN in in_one_line(agent.text) for agent in cluster.agents)


def test_unencrypted_links_are_reported(cluster: Cluster, make_etcd: MakeEtcd) -> None:
    """With ca_cert alone only etcd is verified. A line says that links are not encrypted, unless link_tls=false."""
    etcd = make_etcd(1, tls="server")
    cluster.use_etcd(etcd)
    (one,) = cluster.start()
    one.until_printed(SERVES)
    (other,) = cluster.start(conf={"link_tls": "false"})
    workers = cluster.hub.generation(2)
    assert leader_of(cluster, etcd).certificate == b""
    cluster.finish(workers, one, other)
    assert PLAIN in in_one_line(one.text)
    assert PLAIN not in in_one_line(other.text)


@pytest.mark.parametrize("leads_with_tls", [True, False])
def test_nodes_with_different_tls_settings_do_not_link(
    cluster: Cluster, make_etcd: MakeEtcd, leads_with_tls: bool
) -> None:
    """There is no fallback to an unencrypted link: the second node is rejected with the remedy."""
    etcd = make_etcd(1, tls="server")
    assert etcd.certificates is not None
    cert, key = etcd.certificates.client
    files = {"ssl_cert": cert, "ssl_cert_key": key}
    cluster.use_etcd(etcd)
    (first,) = cluster.start(conf=files if leads_with_tls else {})
    first.until_printed(SERVES)
    (second,) = cluster.start(conf={} if leads_with_tls else files)
    assert second.wait() == REFUSED
    expected = "requires TLS" if leads_with_tls else "does not use TLS"
    assert expected in in_one_line(second.printed_report), second
    assert "ssl_cert, ssl_cert_key and ca_cert" in in_one_line(second.printed_report)
    first.send(signal.SIGTERM)
    assert first.wait() == 128 + signal.SIGTERM


# --- the port ---------------------------------------------------------------------------------------------------------


def test_a_leader_uses_its_fixed_port_again_in_a_later_term(cluster: Cluster, etcd: EtcdCluster) -> None:
    """It leads, another node leads, and it leads again at the same port; the workers keep running."""
    cluster.use_etcd(etcd, **PATIENT)
    ports = own_ports(2)
    (first,) = cluster.start(conf={"link_port": ports[0]})
    first.until_printed(SERVES)
    (second,) = cluster.start(conf={"link_port": ports[1]})
    workers = cluster.hub.generation(2)
    assert leader_of(cluster, etcd).address.port == ports[0]
    let_lead(cluster, etcd, second, [first])
    until(lambda: settled(cluster, etcd), "all members to be linked to the second")
    assert leader_of(cluster, etcd).address.port == ports[1]
    let_lead(cluster, etcd, first, [second])
    until(lambda: settled(cluster, etcd), "all members to be linked to the first again")
    assert leader_of(cluster, etcd).address.port == ports[0]
    cluster.finish(workers)


def test_a_second_run_with_the_same_fixed_port_is_refused(cluster: Cluster, etcd: EtcdCluster) -> None:
    """The message names the port and the option."""
    (port,) = own_ports(1)
    conf: dict[str, Any] = {"link_port": port}
    cluster.use_etcd(etcd)
    (first,) = cluster.start(conf=conf)
    first.until_printed(SERVES)
    (second,) = cluster.start(run_id=f"{cluster.options['run_id']}-other", conf={**conf, "join_timeout": 2})
    assert second.wait() == REFUSED
    report = in_one_line(second.printed_report)
    assert f"cannot listen at 127.0.0.1:{port} for connections from other nodes: Address already in use" in report, (
        second
    )
    assert "choose another port with --rdzv-conf link_port=PORT" in report
    assert "Traceback" not in second.text
    first.send(signal.SIGTERM)
    assert first.wait() == 128 + signal.SIGTERM


# --- settings without effect ------------------------------------------------------------------------------------------


def test_settings_without_effect_are_reported(cluster: Cluster, etcd: EtcdCluster) -> None:
    """A user for an etcd without authentication, and options of torchrun that the engine does not use."""
    cluster.use_etcd(etcd)
    (agent,) = cluster.start(nodes=(1, 2), conf={"user": "me", "password": "unused", "etcd_prefix": "/mine"})
    agent.until_printed(SERVES)
    agent.send(signal.SIGTERM)
    assert agent.wait() == 128 + signal.SIGTERM
    printed = in_one_line(agent.text)
    assert "user=me has no effect, because authentication is not enabled in etcd" in printed
    assert "rendezvous options without effect with etcd: etcd_prefix" in printed
    assert "unused" not in printed
