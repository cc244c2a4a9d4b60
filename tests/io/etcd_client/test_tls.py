"""TLS: encrypted, with certificates on both sides, and what is said when they do not fit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kit.etcd import ALLOWED, ROOT, ROOT_PASSWORD, EtcdCluster, find_etcd
from tenax._io.etcd.blocking import BlockingEtcd
from tenax._io.etcd.errors import EtcdError, EtcdRefused
from tenax._io.etcd.operations import Put, Range
from tenax._io.etcd.settings import etcd_settings
from tenax._io.tls import TlsFiles

from .kit import ClientInLoop, ScriptedServer, answer_to, http, raised


@pytest.fixture(scope="module")
def mutual(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    """One member that wants certificates, users and passwords. Nobody harms it."""
    if find_etcd() is None:
        pytest.skip("needs etcd, beside python or on PATH")
    with EtcdCluster(tmp_path_factory.mktemp("etcd"), tls="mutual", users=True) as cluster:
        yield cluster


def refusal(cluster: EtcdCluster, tls: TlsFiles, **told: str) -> str:
    with ClientInLoop(cluster.settings(tls=tls, **told)) as desk:
        return raised(lambda: desk.call(Range(b"k")), EtcdRefused)


def test_mutual_tls_with_users(mutual: EtcdCluster) -> None:
    with ClientInLoop(mutual.settings()) as desk:
        for number in range(3):
            desk.call(Put(ALLOWED + b"k", b"x" * 100_000 * number))
        assert len(desk.call(Range(ALLOWED + b"k")).kvs[0].value) == 200_000
        assert desk.client.local_address().startswith("127.")


def test_watching_through_tls(mutual: EtcdCluster) -> None:
    etcd = BlockingEtcd(mutual.settings())
    try:
        revision = etcd.call(Put(b"watched", b"v")).revision
        (change,) = etcd.wait_for_change(b"watched", b"", revision, 30)
        assert change.kv.value == b"v"
    finally:
        etcd.close()


def test_encrypted_without_a_certificate_of_ours(tmp_path_factory: pytest.TempPathFactory) -> None:
    with EtcdCluster(tmp_path_factory.mktemp("etcd"), tls="server") as cluster:
        with ClientInLoop(cluster.settings()) as desk:
            desk.call(Put(b"k", b"v"))
        # the system's authorities do not know it
        with ClientInLoop(etcd_settings("https://" + cluster.endpoints)) as desk:
            sentence = raised(lambda: desk.call(Range(b"k")), EtcdRefused)
        assert "untrusted certificate" in sentence
        with ClientInLoop(etcd_settings(cluster.endpoints)) as desk:
            sentence = raised(lambda: desk.call(Range(b"k"), patience_s=0.5), EtcdError)
        assert "https://" in sentence or "it expects TLS" in sentence  # by version: it closes, or says so


def test_without_a_certificate(mutual: EtcdCluster) -> None:
    assert mutual.certificates is not None
    sentence = refusal(mutual, TlsFiles(ca=mutual.certificates.ca))
    assert "rejected this client's certificate, or requires one" in sentence


def test_a_strangers_certificate(mutual: EtcdCluster) -> None:
    assert mutual.certificates is not None
    sentence = refusal(mutual, TlsFiles(*mutual.certificates.strange_client, mutual.certificates.ca))
    assert "rejected this client's certificate" in sentence


def test_a_server_that_is_not_trusted(mutual: EtcdCluster) -> None:
    assert mutual.certificates is not None
    sentence = refusal(mutual, TlsFiles(*mutual.certificates.client, mutual.certificates.strange_ca))
    assert "untrusted certificate" in sentence


def test_a_certificate_with_a_common_name(mutual: EtcdCluster) -> None:
    """etcd refuses it at its gateway once it has users; that is said as a refusal, not tried again for ever."""
    assert mutual.certificates is not None
    files = TlsFiles(*mutual.certificates.named_client, mutual.certificates.ca)
    sentence = refusal(mutual, files, user=ROOT, password=ROOT_PASSWORD)
    assert "Common Name" in sentence


def test_files_that_are_not_there(mutual: EtcdCluster, tmp_path: object) -> None:
    sentence = refusal(mutual, TlsFiles(ca=f"{tmp_path}/none.pem"))
    assert sentence == f"could not load the TLS files ({tmp_path}/none.pem): No such file or directory"


def test_tls_to_a_server_without() -> None:
    plain = ScriptedServer(lambda _, sock: sock.sendall(http(b"", "400 Bad Request")))
    with plain as server, ClientInLoop(etcd_settings("https://" + server.endpoint)) as desk:
        sentence = raised(lambda: desk.call(Range(b"k")), EtcdRefused)
    assert "it does not use TLS" in sentence


def test_one_misfit_does_not_spoil_the_others(mutual: EtcdCluster) -> None:
    bad = answer_to(http(b"", "400 Bad Request"))
    with ScriptedServer(lambda _, sock: sock.sendall(http(b"", "400 Bad Request")), bad) as server:
        endpoints = f"{server.endpoint},{mutual.endpoints}"
        with ClientInLoop(mutual.settings(endpoints=endpoints)) as desk:
            desk.call(Range(b"k"))
