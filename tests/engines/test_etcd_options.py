"""Rendezvous options with etcd: each has an effect, is rejected, or is reported as unused. Secrets are never shown."""

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
from tenax.rendezvous._options import etcd_settings_from
from tenax.rendezvous.api import RendezvousParameters
from tenax.rendezvous.etcd_rendezvous import create_rdzv_handler
from tenax.rendezvous.etcd_rendezvous_backend import client_from, create_backend

MARK = "a-secret-with-a-MARK-in-it"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Files for the options that need one."""
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


# Other options that an option needs.
WITH: dict[str, dict[str, str]] = {
    "ssl_cert": {"ssl_cert_key": "key.pem"},
    "cert": {"key": "key.pem"},
    "password": {"user": "user"},
    "password_file": {"user": "user"},
    "managed_only": {"managed": "true"},
    "link_tls": {"ssl_cert": "cert.pem", "ssl_cert_key": "key.pem", "ca_cert": "ca.pem"},
}
EFFECTIVE: dict[str, str] = {
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


def test_every_known_option_is_covered_here() -> None:
    """A new option must have an effect, be rejected or be reported as unused, and be listed here."""
    assert set(EFFECTIVE) | set(REFUSED_ALONE) | UNUSED == set(_KNOWN_SETTINGS)


@pytest.mark.parametrize("key", sorted(EFFECTIVE))
def test_an_option_changes_the_settings(key: str, files: dict[str, str]) -> None:
    """The settings with the option differ from those without it."""
    besides = {name: files.get(value, value) for name, value in WITH.get(key, {}).items()}
    alone = besides if "ssl_cert" in besides else {k: v for k, v in besides.items() if k not in ("ssl_cert_key", "key")}
    value = files.get(EFFECTIVE[key], EFFECTIVE[key])
    assert etcd_engine_settings(params(**besides, **{key: value})) != etcd_engine_settings(params(**alone))


@pytest.mark.parametrize("key", sorted(REFUSED_ALONE))
def test_a_key_without_its_certificate_is_refused(key: str, files: dict[str, str]) -> None:
    """It would have no effect."""
    with pytest.raises(ValueError, match=REFUSED_ALONE[key]):
        etcd_engine_settings(params(**{key: files["key.pem"]}))


@pytest.mark.parametrize("key", sorted(UNUSED))
def test_an_option_without_effect_is_reported(key: str) -> None:
    """The engine prints these when it starts, except a launcher's default values."""
    assert etcd_engine_settings(params(**{key: "7"})).unused == (key,)
    assert etcd_engine_settings(params(timeout=900)).unused == ()


@pytest.mark.parametrize(
    ("conf", "message"),
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
def test_contradictory_options_are_rejected(conf: dict[str, str], message: str, files: dict[str, str]) -> None:
    """None is ignored silently."""
    with pytest.raises(ValueError, match=message):
        etcd_engine_settings(params(**{key: files.get(value, value) for key, value in conf.items()}))


# --- agents with hooks, and TorchElastic's names ----------------------------------------------------------------------

ENGINE_ONLY: dict[str, str] = {
    **{"token": MARK, "token_file": "secret", "managed": "true", "managed_only": "n", "link_port": "7000"},
    **{"link_tls": "false", "outage_timeout": "7", "scale_up": "restart", "node_name": "a", "node_order": "7"},
    **{"store_port": "7000", "store_allow": "any"},
}


@pytest.mark.parametrize("key", sorted(ENGINE_ONLY))
@pytest.mark.parametrize("create", [create_backend, create_rdzv_handler, client_from])
def test_engine_options_are_rejected_without_the_engine(create: Any, key: str, files: dict[str, str]) -> None:
    """Above all a secret: without the engine it is never checked."""
    with pytest.raises(ValueError, match=rf"\b{key}\b") as raised:
        create(params("127.0.0.1:1", **{key: files.get(ENGINE_ONLY[key], ENGINE_ONLY[key])}))
    assert MARK not in str(raised.value)


def test_an_agent_with_hooks_rejects_a_secret() -> None:
    """The blocking methods of the engine's handler raise, with a token or with the variable for one."""
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


def test_tls_files_can_be_given_under_either_set_of_names(files: dict[str, str]) -> None:
    """Also to TorchElastic's older handler."""
    for names in (("ssl_cert", "ssl_cert_key", "ca_cert"), ("cert", "key", "cacert")):
        named = dict(zip(names, (files["cert.pem"], files["key.pem"], files["ca.pem"]), strict=True))
        client = client_from(params(**named))
        client.close()
        assert etcd_settings_from(params(**named)).tls == TlsFiles(files["cert.pem"], files["key.pem"], files["ca.pem"])


# --- secrets ----------------------------------------------------------------------------------------------------------


def test_the_repr_of_settings_contains_no_secret(files: dict[str, str]) -> None:
    """Of every settings class for etcd, with a password, a secret, and managed members."""
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
@pytest.mark.parametrize("argument", ["--rdzv-id=run", "--rdzv-conf=managed=true", "--dry-run"])
def test_an_endpoint_with_a_password_is_rejected_and_not_printed(scheme: str, argument: str, tmp_path: Path) -> None:
    """``user:password@host`` is an easy mistake, and console output is stored."""
    (tmp_path / "train.py").touch()
    arguments = [f"--rdzv-endpoint={scheme}me:{MARK}@etcd1:2379", "--rdzv-backend=etcd", "--nnodes=2", argument]
    done = subprocess.run(
        [sys.executable, "-m", "tenax", "run", *arguments, "train.py"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        timeout=60,
    )
    assert done.returncode == 2, done
    assert "contains '@'" in done.stderr
    assert MARK not in done.stdout + done.stderr
