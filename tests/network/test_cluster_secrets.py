"""Which nodes may join: a shared secret, and TLS with and without client certificates."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from .cluster import Cluster, in_one_line
from .lab import Host, Lab, requires_netns
from .running import Running

pytestmark = requires_netns

REJECTED = "rejected this node: it serves another run or has another secret"


class Authority:
    """A CA that signs certificates with openssl."""

    def __init__(self, folder: Path) -> None:
        if shutil.which("openssl") is None:
            pytest.skip("creating certificates needs openssl")
        self._folder = folder
        folder.mkdir()
        self.certificate = folder / "ca.pem"
        self._openssl(*self._request("ca", "a lab's CA"), "-x509", "-out", "ca.pem")

    def _openssl(self, *arguments: str) -> None:
        done = subprocess.run(["openssl", *arguments], cwd=self._folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    @staticmethod
    def _request(name: str, subject: str) -> list[str]:
        key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", f"{name}.key"]
        return ["req", "-batch", "-subj", f"/CN={subject}", *key]

    def sign(self, host: Host) -> dict[str, object]:
        """Return the rendezvous options with a certificate for this host."""
        name = host.name
        names = f"subjectAltName=IP:{host.address},DNS:{name}"
        signed = ["-CA", "ca.pem", "-CAkey", "ca.key", "-addext", names, "-out", f"{name}.pem"]
        self._openssl(*self._request(name, name), "-x509", *signed)
        return {"ssl_cert": self._folder / f"{name}.pem", "ssl_cert_key": self._folder / f"{name}.key"}


@pytest.fixture
def authority(lab: Lab) -> Authority:
    return Authority(lab.home / "certificates")


def assert_rejected(cluster: Cluster, agent: Running, message: str) -> None:
    cluster.until(lambda: agent.is_over, f"{agent.name} to exit")
    rejected = agent.wait()
    assert rejected.code != 0
    assert message in in_one_line(rejected.err)
    assert "Traceback" not in rejected.err


def test_a_node_with_another_secret_or_none_is_rejected(lab: Lab) -> None:
    cluster = Cluster(lab, "2:3")
    secret = lab.home / "secret"
    secret.write_text("very lovely weather\n")
    secret.chmod(0o600)
    members = cluster.start(lab[0], conf={"token_file": secret, "last_call_timeout": 0})
    members += cluster.start(lab[1], env={"TENAX_RDZV_TOKEN": "very lovely weather"})
    generation = cluster.until_at_work(2)
    for env in ({"TENAX_RDZV_TOKEN": "very awful weather"}, {}):
        (agent,) = cluster.start(lab[2], env=env)
        assert_rejected(cluster, agent, REJECTED)
        assert "awful weather" not in agent.err
    cluster.until_worked_for(generation, 0.2)
    members += cluster.start(lab[2], env={"TENAX_RDZV_TOKEN": "very lovely weather"})
    cluster.until_at_work(3, after=generation)
    cluster.finish(*members)


def test_nodes_may_trust_a_ca_of_the_system(lab: Lab, authority: Authority) -> None:
    cluster = Cluster(lab, 3)
    trust = {"SSL_CERT_FILE": str(authority.certificate)}
    cluster.start(lab[0], conf=authority.sign(lab[0]), env=trust)
    cluster.start(lab[1], lab[2], conf={"ca_cert": authority.certificate})
    generation = cluster.until_at_work(3)
    (lab.shared / "fail-1").touch()
    cluster.until_at_work(3, after=generation)
    cluster.finish()


def test_with_mutual_tls_a_node_without_a_certificate_is_rejected(lab: Lab, authority: Authority) -> None:
    cluster = Cluster(lab, "2:3", conf={"ca_cert": authority.certificate, "last_call_timeout": 0})
    members = [cluster.start(host, conf=authority.sign(host))[0] for host in lab.hosts[:2]]
    generation = cluster.until_at_work(2)
    (agent,) = cluster.start(lab[2])
    expected = "the peer rejected the TLS handshake: certificate required; check the rendezvous options ssl_cert"
    assert_rejected(cluster, agent, expected)
    cluster.until_worked_for(generation, 0.2)
    members += cluster.start(lab[2], conf=authority.sign(lab[2]))
    cluster.until_at_work(3, after=generation)
    cluster.finish(*members)


def test_nodes_with_different_tls_settings_are_rejected(lab: Lab, authority: Authority) -> None:
    other_authority = Authority(lab.home / "other certificates")
    cluster = Cluster(lab, "1:3", conf={"last_call_timeout": 0})
    members = cluster.start(lab[0], conf={**authority.sign(lab[0]), "ca_cert": authority.certificate})
    generation = cluster.until_at_work(1)
    (plain,) = cluster.start(lab[1])
    assert_rejected(cluster, plain, "the peer uses TLS and this side does not; check the rendezvous options ssl_cert")
    (untrusting,) = cluster.start(lab[1], conf={**authority.sign(lab[1]), "ca_cert": other_authority.certificate})
    assert_rejected(cluster, untrusting, "TLS handshake failed: self-signed certificate in certificate chain")
    (untrusted,) = cluster.start(lab[2], conf={**other_authority.sign(lab[2]), "ca_cert": authority.certificate})
    assert_rejected(cluster, untrusted, "the peer rejected the TLS handshake: unknown ca")
    cluster.until_worked_for(generation, 0.2)
    cluster.finish(*members)


def test_a_certificate_for_another_host_is_reported_by_the_serving_node(lab: Lab, authority: Authority) -> None:
    cluster = Cluster(lab, 3, conf={"ca_cert": authority.certificate})
    (agent,) = cluster.start(lab[0], conf=authority.sign(lab[1]))
    assert_rejected(cluster, agent, f"certificate is not valid for '{lab[0].address}'")


def test_a_node_with_tls_is_rejected_by_a_coordinator_without(lab: Lab, authority: Authority) -> None:
    cluster = Cluster(lab, 2)
    members = cluster.start(lab[0], lab[1])
    generation = cluster.until_at_work(2)
    (agent,) = cluster.start(lab[2], conf={"ca_cert": authority.certificate})
    assert_rejected(cluster, agent, "the peer rejected the TLS handshake: handshake failure")
    cluster.until_worked_for(generation, 0.2)
    cluster.finish(*members)
