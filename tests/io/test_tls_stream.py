"""``TlsStream``: TLS in memory, as both engines use it."""

from __future__ import annotations

import pytest

from kit.tcp import Certificates, needs_openssl
from tenax._io.tls import REFUSAL, TlsFiles, TlsStream

pytestmark = [needs_openssl, pytest.mark.process]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """A CA with a node's certificate, and an unrelated CA."""
    return Certificates(tmp_path_factory.mktemp("certificates"))


def exchange(client: TlsStream, server: TlsStream) -> tuple[bytes, bytes]:
    """Transfer bytes between the two until neither sends any. Return what each has decrypted."""
    to_client, to_server = b"", b""
    while True:
        from_client, from_server = client.to_send(), server.to_send()
        if not from_client and not from_server:
            return to_client, to_server
        if from_client and server.failure is None:
            to_server += server.receive(from_client)
        if from_server and client.failure is None:
            to_client += client.receive(from_server)


def pair(server: TlsFiles, client: TlsFiles) -> tuple[TlsStream, TlsStream]:
    """Return a client and a server."""
    return TlsStream(client.for_client(), server_hostname="localhost"), TlsStream(server.for_server(), is_server=True)


def test_data_sent_before_the_handshake_is_complete_arrives(certificates: Certificates) -> None:
    """It is held back, and follows the handshake in order."""
    files = TlsFiles(certificates.cert, certificates.key, certificates.ca)
    client, server = pair(files, files)
    assert client.send(b"one ") + client.send(b"two ") == b""
    assert server.send(b"reply") == b""
    assert exchange(client, server) == (b"reply", b"one two ")
    assert client.is_open
    assert server.is_open
    assert server.receive(client.send(b"three")) == b"three"


def test_the_data_does_not_depend_on_how_the_bytes_are_cut(certificates: Certificates) -> None:
    files = TlsFiles(certificates.cert, certificates.key, certificates.ca)
    client, server = pair(files, files)
    exchange(client, server)
    message = bytes(range(256)) * 200
    encrypted = client.send(message)
    received = b"".join(server.receive(encrypted[at : at + 7]) for at in range(0, len(encrypted), 7))
    assert received == message
    assert server.failure is None


def test_a_peer_without_tls_is_recognized_and_gets_an_alert(certificates: Certificates) -> None:
    """On both sides."""
    files = TlsFiles(certificates.cert, certificates.key, certificates.ca)
    client, server = pair(files, files)
    client.to_send()
    client.receive(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    server.receive(b"\0\0\0\x10\x81plain frame...")
    for each in (client, server):
        assert each.failure is not None
        assert each.failure.is_not_tls
        assert not each.failure.is_rejection
        assert each.to_send()[:2] == REFUSAL[:2]


def test_a_rejection_is_reported_on_both_sides(certificates: Certificates) -> None:
    """A client that does not trust the server fails by itself; the server receives an alert."""
    files = TlsFiles(certificates.cert, certificates.key, certificates.ca)
    client, server = pair(TlsFiles(certificates.cert, certificates.key), TlsFiles(ca=certificates.other_ca))
    exchange(client, server)
    assert client.failure is not None
    assert not client.failure.is_rejection
    assert server.failure is not None
    assert server.failure.is_rejection
    assert server.failure.reason == "unknown ca"
    client, server = pair(files, TlsFiles(ca=certificates.ca))  # the server requires a certificate
    exchange(client, server)
    assert client.failure is not None
    assert client.failure.is_rejection


@pytest.mark.parametrize("garbage", [b"\x16\x03\x01\xff\xff" + bytes(70_000), b"\x16\x03\x01\x00\x04\x01\x00\x00\x00"])
def test_a_malformed_handshake_fails_with_a_reason(certificates: Certificates, garbage: bytes) -> None:
    """It never raises."""
    server = TlsStream(TlsFiles(certificates.cert, certificates.key).for_server(), is_server=True)
    assert server.receive(garbage) == b""
    assert server.failure is not None
    assert server.failure.reason
