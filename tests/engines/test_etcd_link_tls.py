"""TLS of links to an elected leader (``_engines/etcd/link_tls.py``): accepted and rejected certificates."""

from __future__ import annotations

import datetime
import ssl
from pathlib import Path

import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kit.tcp import RecordedLink, connected_pair, serve
from tenax._core.link import wire
from tenax._engines.etcd.link_tls import OwnCertificate, follower_context
from tenax._io.tls import TlsFiles

BEAT = wire.encode(wire.Beat(1, 0.0, 0))
SERVER, CLIENT = ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH


class Authority:
    """Signs certificates with a given extended key usage."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.ORGANIZATION_NAME, "tests")])
        constraints = x509.BasicConstraints(ca=True, path_length=None)
        self._certificate = self._sign(self._name, self._key.public_key(), [(constraints, True)])
        self.ca = str(folder / "ca.pem")
        Path(self.ca).write_bytes(self._certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str, *usages: x509.ObjectIdentifier, common_name: str = "") -> TlsFiles:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, name)]
        subject += [x509.NameAttribute(NameOID.COMMON_NAME, common_name)] if common_name else []
        extensions = [(x509.ExtendedKeyUsage(usages), False)] if usages else []
        certificate = self._sign(x509.Name(subject), key.public_key(), extensions)
        path = self._folder / f"{name}.pem"
        secret = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM) + secret)
        return TlsFiles(str(path), "", self.ca)

    def _sign(self, subject: x509.Name, key: ec.EllipticCurvePublicKey, extensions: list) -> x509.Certificate:  # type: ignore[type-arg]
        now = datetime.datetime.now(datetime.timezone.utc)
        builder = x509.CertificateBuilder(self._name, subject, key, x509.random_serial_number())
        builder = builder.not_valid_before(now - datetime.timedelta(hours=1))
        builder = builder.not_valid_after(now + datetime.timedelta(hours=1))
        for extension, is_critical in extensions:
            builder = builder.add_extension(extension, is_critical)
        return builder.sign(self._key, hashes.SHA256())


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.mark.parametrize("usages", [(), (SERVER, CLIENT)], ids=["any usage", "both usages"])
def test_a_certificate_without_names_is_enough(authority: Authority, usages: tuple[x509.ObjectIdentifier, ...]) -> None:
    """It needs no host name or address, because the leader's digest is in etcd."""
    own = OwnCertificate(authority.issue("node", *usages))
    assert len(own.digest) == 32
    assert own.common_name == ""
    assert OwnCertificate(authority.issue("named", common_name="someone")).common_name == "someone"


@pytest.mark.parametrize(("usage", "lacks"), [(CLIENT, "serverAuth"), (SERVER, "clientAuth")])
def test_a_certificate_for_one_side_only_is_refused_with_the_remedy(
    authority: Authority, usage: x509.ObjectIdentifier, lacks: str
) -> None:
    """Any node may lead, so each certificate needs both usages; the message names the missing one."""
    files = authority.issue("one-sided", usage)
    with pytest.raises(ValueError, match=f"its extended key usage lacks {lacks}; .*link_tls=false") as raised:
        OwnCertificate(files)
    assert files.cert in str(raised.value)


def test_a_certificate_of_another_authority_is_refused(authority: Authority, tmp_path: Path) -> None:
    """Other nodes would not accept it, so it is rejected before anything starts."""
    (tmp_path / "other").mkdir()
    other = Authority(tmp_path / "other").issue("untrusted")
    with pytest.raises(ValueError, match=r"expected a valid one signed by an authority in .*ca\.pem"):
        OwnCertificate(TlsFiles(other.cert, "", authority.ca))


def test_a_link_to_the_announced_certificate_carries_frames(authority: Authority) -> None:
    """Both sides use the same files, at any address."""
    files = authority.issue("node")
    own = OwnCertificate(files)
    one, other = connected_pair()
    server = RecordedLink(one, own.context, is_server=True)
    client = RecordedLink(other, follower_context(files, own.digest), server_hostname="192.0.2.7")
    client.link.send(BEAT)
    serve([server, client], lambda: server.bodies)
    assert server.bodies == [BEAT[4:]]
    for each in (server, client):
        each.link.close()


def test_a_link_to_another_certificate_of_the_same_authority_is_closed(authority: Authority) -> None:
    """A process with a certificate of the site but without write access to etcd cannot impersonate the leader."""
    announced = OwnCertificate(authority.issue("leader"))
    impostor = OwnCertificate(authority.issue("impostor"))
    one, other = connected_pair()
    server = RecordedLink(one, impostor.context, is_server=True)
    client = RecordedLink(other, follower_context(authority.issue("node"), announced.digest), server_hostname="host")
    client.link.send(BEAT)
    serve([server, client], lambda: client.closed)
    assert client.closed is not None
    assert "its certificate is not the one announced in etcd" in client.closed[0]
    assert client.link.is_tls_mismatch
    assert not server.bodies, "nothing was sent to it"
    server.link.close()


def test_a_blocking_socket_checks_the_announced_certificate_too(authority: Authority) -> None:
    """Operators' commands use one."""
    import threading

    announced = OwnCertificate(authority.issue("leader"))
    impostor = OwnCertificate(authority.issue("impostor"))
    context = follower_context(authority.issue("operator"), announced.digest)
    for own in (announced, impostor):
        one, other = connected_pair()
        for sock in (one, other):
            sock.settimeout(30.0)

        def accept(sock=one, own=own) -> None:  # type: ignore[no-untyped-def]
            try:
                own.context.wrap_socket(sock, server_side=True).close()
            except (ssl.SSLError, OSError):
                sock.close()

        thread = threading.Thread(target=accept)
        thread.start()
        if own is announced:
            context.wrap_socket(other, server_hostname="host").close()
        else:
            with pytest.raises(ssl.SSLCertVerificationError, match="announced in etcd"):
                context.wrap_socket(other, server_hostname="host")
            other.close()
        thread.join(30.0)


def test_certificates_of_trustme_are_accepted(tmp_path: Path) -> None:
    """They have both usages and no Common Name."""
    issued, ca = trustme.CA(), tmp_path / "ca.pem"
    certificate = issued.issue_cert("client@tests.invalid")
    issued.cert_pem.write_to_path(str(ca))
    certificate.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "node.pem"))
    assert OwnCertificate(TlsFiles(str(tmp_path / "node.pem"), "", str(ca))).common_name == ""
