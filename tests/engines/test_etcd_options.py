"""Options of the rendezvous through etcd: each one is honoured, refused, or named as unused; and none is shown that is
a secret."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import trustme

from tenax._io.tls import TlsFiles
from tenax.cli.options import _KNOWN_SETTINGS
from tenax.rendezvous._etcd_handler import EtcdEngineHandler, etcd_engine_settings
from tenax.rendezvous._etcd_options import etcd_settings_from
from tenax.rendezvous.api import RendezvousParameters
from tenax.rendezvous.etcd_rendezvous import create_rdzv_handler
from tenax.rendezvous.etcd_rendezvous_backend import client_from, create_backend

MARK = "a-secret-with-a-MARK-in-it"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What options with files may name."""
    folder = tmp_path_factory.mktemp("files")
    authority = trustme.CA()
    certificate = authority.issue_cert("node@tests.invalid")
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    certificate.private_key_pem.write_to_path(str(folder / "key.pem"))
    certificate.cert_chain_pems[0].write_to_path(str(folder / "cert.pem"))
    (folder / "secret").write_text(MARK)
    (folder / "secret").chmod(0o600)
    return {name: str(folder / name) for name in ("ca.pem", "key.pem", "cert.pem", "secret")}


def params(endpoint: str = "etcd1:2379", **conf: Any) -> RendezvousParameters:
    return RendezvousParameters("etcd", endpoint, "run", 1, 2, **conf)


# What is given besides, so that the option alone makes the difference.
WITH: dict[str, dict[str, str]] = {
    "ssl_cert": {"ssl_cert_key": "key.pem"},
    "cert": {"key": "key.pem"},
    "password": {"user": "user"},
    "password_file": {"user": "user"},
    "managed_only": {"managed": "true"},
    "link_tls": {"ssl_cert": "cert.pem", "ssl_cert_key": "key.pem", "ca_cert": "ca.pem"},
}
HONOURED: dict[str, str] = {
    **{"join_timeout": "7", "last_call_timeout": "7", "keep_alive_interval": "7", "keep_alive_max_attempt": "7"},
    **{"rank": "1", "protocol": "https", "ssl_cert": "cert.pem", "ca_cert": "ca.pem", "cert": "cert.pem"},
    **{"cacert": "ca.pem", "token": MARK, "token_file": "secret", "scale_up": "restart", "node_name": "a"},
    **{"node_order": "7", "store_port": "7000", "use_agent_store": "no", "user": "me", "password": MARK},
    **{"password_file": "secret", "outage_timeout": "7", "managed": "true", "managed_only": "etcd1:2379"},
    **{"link_port": "7000", "link_tls": "false", "store_allow": "10.1.2.3+192.168.0.0/16"},
}
REFUSED_ALONE = {"ssl_cert_key": "without 'ssl_cert'", "key": "without 'cert'"}
UNUSED = {
    *("timeout", "close_timeout", "heartbeat_timeout", "read_timeout", "use_libuv", "etcd_prefix", "is_host"),
    "store_type",
}


def test_every_known_option_is_in_this_walk() -> None:
    """A new option must be honoured, refused or named as unused, and be listed here."""
    assert set(HONOURED) | set(REFUSED_ALONE) | UNUSED == set(_KNOWN_SETTINGS)


@pytest.mark.parametrize("key", sorted(HONOURED))
def test_an_option_changes_the_settings(key: str, files: dict[str, str]) -> None:
    """With the option the engine has other settings than without."""
    besides = {name: files.get(value, value) for name, value in WITH.get(key, {}).items()}
    alone = besides if "ssl_cert" in besides else {k: v for k, v in besides.items() if k not in ("ssl_cert_key", "key")}
    value = files.get(HONOURED[key], HONOURED[key])
    assert etcd_engine_settings(params(**besides, **{key: value})) != etcd_engine_settings(params(**alone))


@pytest.mark.parametrize("key", sorted(REFUSED_ALONE))
def test_a_key_without_its_certificate_is_refused(key: str, files: dict[str, str]) -> None:
    """It would not be shown to anyone."""
    with pytest.raises(ValueError, match=REFUSED_ALONE[key]):
        etcd_engine_settings(params(**{key: files["key.pem"]}))


@pytest.mark.parametrize("key", sorted(UNUSED))
def test_an_option_without_effect_is_named(key: str) -> None:
    """The engine prints these when it starts; a launcher's own default is no option that someone gave."""
    assert etcd_engine_settings(params(**{key: "7"})).unused == (key,)
    assert etcd_engine_settings(params(timeout=900)).unused == ()


@pytest.mark.parametrize(
    ("conf", "sentence"),
    [
        ({"ssl_cert": "cert.pem", "cacert": "ca.pem"}, "belong to two sets of names for TLS files"),
        ({"managed_only": "etcd1"}, "'managed_only' is given without managed=true"),
        ({"managed": "true", "user": "me", "password": "x"}, "user and password cannot be used with managed=true"),
        ({"link_port": "70000"}, "'link_port' is 70000; expected a port below 65536"),
        ({"link_port": "many"}, "'link_port' is 'many'; expected a whole number"),
        ({"link_port": "7000", "store_port": "7000"}, "are both 7000"),
        ({"link_port": "2380", "managed": "true"}, "which the managed etcd on etcd1:2379 uses"),
        ({"link_tls": "perhaps"}, "'link_tls' is 'perhaps'; expected yes or no"),
        ({"protocol": "http", "ca_cert": "ca.pem"}, "TLS files are set, but the etcd endpoint is 'http://"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    conf: dict[str, str], sentence: str, files: dict[str, str]
) -> None:
    """None of them is dropped in silence."""
    with pytest.raises(ValueError, match=sentence):
        etcd_engine_settings(params(**{key: files.get(value, value) for key, value in conf.items()}))


# --- agents with hooks, and TorchElastic's names ----------------------------------------------------------------------

ENGINE_ONLY: dict[str, str] = {
    **{"token": MARK, "token_file": "secret", "managed": "true", "managed_only": "n", "link_port": "7000"},
    **{"link_tls": "false", "outage_timeout": "7", "scale_up": "restart", "node_name": "a", "node_order": "7"},
    **{"store_port": "7000", "store_allow": "any"},
}


@pytest.mark.parametrize("key", sorted(ENGINE_ONLY))
@pytest.mark.parametrize("create", [create_backend, create_rdzv_handler, client_from])
def test_without_the_engine_its_options_are_refused(create: Any, key: str, files: dict[str, str]) -> None:
    """A secret, above all: nothing would ask for it where nodes meet through keys in etcd."""
    with pytest.raises(ValueError, match=rf"\b{key}\b") as raised:
        create(params("127.0.0.1:1", **{key: files.get(ENGINE_ONLY[key], ENGINE_ONLY[key])}))
    assert MARK not in str(raised.value)


def test_an_agent_with_hooks_does_not_start_with_a_secret() -> None:
    """The handler of the engine refuses to be used by polling, with a token or with the variable for one."""
    handler = EtcdEngineHandler(params("127.0.0.1:1", token=MARK))
    for use in (handler.next_rendezvous, handler.num_nodes_waiting, lambda: handler.use_agent_store):
        with pytest.raises(ValueError, match=r"\btoken\b"):
            use()
    os.environ["TENAX_RDZV_TOKEN"] = MARK
    try:
        with pytest.raises(ValueError, match="TENAX_RDZV_TOKEN"):
            EtcdEngineHandler(params("127.0.0.1:1")).next_rendezvous()
    finally:
        del os.environ["TENAX_RDZV_TOKEN"]


def test_certificates_are_read_by_either_name(files: dict[str, str]) -> None:
    """Also TorchElastic's older handler knows the newer names."""
    for names in (("ssl_cert", "ssl_cert_key", "ca_cert"), ("cert", "key", "cacert")):
        named = dict(zip(names, (files["cert.pem"], files["key.pem"], files["ca.pem"]), strict=True))
        client = client_from(params(**named))
        client.close()
        assert etcd_settings_from(params(**named)).tls == TlsFiles(files["cert.pem"], files["key.pem"], files["ca.pem"])


# --- secrets ----------------------------------------------------------------------------------------------------------


def test_no_secret_is_in_the_text_of_settings(files: dict[str, str]) -> None:
    """``repr`` of every settings class on the way to etcd, with a password, a secret, and managed members."""
    shown = [
        repr(etcd_engine_settings(params(user="me", password=MARK)).etcd),
        repr(etcd_engine_settings(params(user="me", password_file=files["secret"])).etcd),
        repr(etcd_engine_settings(params(managed="true", token=MARK)).managed),
        repr(etcd_engine_settings(params(managed="true", token=MARK)).etcd),
    ]
    managed = etcd_engine_settings(params(managed="true", token=MARK)).managed
    assert managed is not None
    for text in shown:
        assert MARK not in text
        assert managed.password not in text


@pytest.mark.process
@pytest.mark.parametrize("scheme", ["", "https://"])
@pytest.mark.parametrize("word", ["--rdzv-id=run", "--rdzv-conf=managed=true", "--dry-run"])
def test_an_endpoint_with_a_password_is_refused_and_not_repeated(scheme: str, word: str, tmp_path: Path) -> None:
    """``user:password@host`` is an easy mistake, and consoles are kept."""
    (tmp_path / "train.py").touch()
    words = [f"--rdzv-endpoint={scheme}me:{MARK}@etcd1:2379", "--rdzv-backend=etcd", "--nnodes=2", word]
    done = subprocess.run(
        [sys.executable, "-m", "tenax", "run", *words, "train.py"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        timeout=60,
    )
    assert done.returncode == 2, done
    assert "contains '@'" in done.stderr
    assert MARK not in done.stdout + done.stderr
