"""TLS: encryption, certificates on both sides, and the messages when they do not match."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kit.etcd import ALLOWED, ROOT, ROOT_PASSWORD, EtcdCluster, find_etcd
from tenax._core.etcd.errors import EtcdError, EtcdRefused
from tenax._core.etcd.operations import Put, Range
from tenax._io.etcd.settings import etcd_settings
from tenax._io.tls import TlsFiles

from .kit import ClientInLoop, ScriptedServer, answer_to, http, raised


@pytest.fixture(scope="module")
def mutual(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    """One member that requires certificates, users and passwords. No test changes it."""
    if find_etcd() is None:
        pytest.skip("needs etcd, next to python or on PATH")
    with EtcdCluster(tmp_path_factory.mktemp("etcd"), tls="mutual", users=True) as cluster:
        yield cluster


def refusal(cluster: EtcdCluster, tls: TlsFiles, **options: str) -> str:
    with ClientInLoop(cluster.settings(tls=tls, **options)) as client:
        return raised(lambda: client.call(Range(b"k")), EtcdRefused)


def test_calls_work_with_mutual_tls_and_users(mutual: EtcdCluster) -> None:
    with ClientInLoop(mutual.settings()) as client:
        for number in range(3):
            client.call(Put(ALLOWED + b"k", b"x" * 100_000 * number))
        assert len(client.call(Range(ALLOWED + b"k")).kvs[0].value) == 200_000
        assert client.etcd.local_address().startswith("127.")


def test_a_watch_works_with_tls(mutual: EtcdCluster) -> None:
    etcd = mutual.client()
    try:
        revision = etcd.call(Put(b"watched", b"v")).revision
        (change,) = etcd.wait_for_change(b"watched", b"", revision, 30)
        assert change.kv.value == b"v"
    finally:
        etcd.close()


def test_a_client_needs_no_certificate_if_the_server_requires_none(tmp_path_factory: pytest.TempPathFactory) -> None:
    with EtcdCluster(tmp_path_factory.mktemp("etcd"), tls="server") as cluster:
        with ClientInLoop(cluster.settings()) as client:
            client.call(Put(b"k", b"v"))
        # the system's CAs did not sign it
        with ClientInLoop(etcd_settings("https://" + cluster.endpoints)) as client:
            message = raised(lambda: client.call(Range(b"k")), EtcdRefused)
        assert "untrusted certificate" in message
        with ClientInLoop(etcd_settings(cluster.endpoints)) as client:
            message = raised(lambda: client.call(Range(b"k"), patience_s=0.5), EtcdError)
        assert "https://" in message or "it expects TLS" in message  # depending on the version


def test_a_missing_client_certificate_is_reported(mutual: EtcdCluster) -> None:
    assert mutual.certificates is not None
    message = refusal(mutual, TlsFiles(ca=mutual.certificates.ca))
    assert "rejected this client's certificate, or requires one" in message


def test_a_client_certificate_of_another_ca_is_reported(mutual: EtcdCluster) -> None:
    assert mutual.certificates is not None
    message = refusal(mutual, TlsFiles(*mutual.certificates.other_client, mutual.certificates.ca))
    assert "rejected this client's certificate" in message


def test_an_untrusted_server_is_reported(mutual: EtcdCluster) -> None:
    assert mutual.certificates is not None
    message = refusal(mutual, TlsFiles(*mutual.certificates.client, mutual.certificates.other_ca))
    assert "untrusted certificate" in message


def test_a_client_certificate_with_a_common_name_is_refused(mutual: EtcdCluster) -> None:
    """etcd's gateway refuses it if there are users. The call is not retried."""
    assert mutual.certificates is not None
    files = TlsFiles(*mutual.certificates.named_client, mutual.certificates.ca)
    message = refusal(mutual, files, user=ROOT, password=ROOT_PASSWORD)
    assert "Common Name" in message


def test_missing_files_are_reported(mutual: EtcdCluster, tmp_path: object) -> None:
    message = refusal(mutual, TlsFiles(ca=f"{tmp_path}/none.pem"))
    assert message == f"could not load the TLS files ({tmp_path}/none.pem): No such file or directory"


def test_a_server_without_tls_is_reported() -> None:
    plain = ScriptedServer(lambda _, sock: sock.sendall(http(b"", "400 Bad Request")))
    with plain as server, ClientInLoop(etcd_settings("https://" + server.endpoint)) as client:
        message = raised(lambda: client.call(Range(b"k")), EtcdRefused)
    assert "it does not use TLS" in message


def test_one_member_without_tls_does_not_fail_the_call(mutual: EtcdCluster) -> None:
    bad = answer_to(http(b"", "400 Bad Request"))
    with ScriptedServer(lambda _, sock: sock.sendall(http(b"", "400 Bad Request")), bad) as server:
        endpoints = f"{server.endpoint},{mutual.endpoints}"
        with ClientInLoop(mutual.settings(endpoints=endpoints)) as client:
            client.call(Range(b"k"))
