"""Settings: valid endpoints, and the messages for invalid ones."""

from __future__ import annotations

import pytest

from tenax._core.etcd.operations import Authenticate, AuthenticateAnswer, prefix_end
from tenax._io.etcd.settings import etcd_settings
from tenax._io.tls import TlsFiles

pytestmark = pytest.mark.unit

FILES = TlsFiles(ca="ca.pem")


@pytest.mark.parametrize(
    ("text", "endpoints", "is_encrypted"),
    [
        ("e1", ("e1:2379",), False),
        ("e1:1,e2:2", ("e1:1", "e2:2"), False),
        (" http://e1 , e2:2379/,,e1:2379", ("e1:2379", "e2:2379"), False),
        ("https://e1", ("e1:2379",), True),
        ("HTTPS://[::1]:77", ("[::1]:77",), True),
        ("::1", ("[::1]:2379",), False),
    ],
)
def test_endpoints_are_parsed(text: str, endpoints: tuple[str, ...], is_encrypted: bool) -> None:
    settings = etcd_settings(text)
    assert settings.endpoints == endpoints
    assert (settings.tls is not None) is is_encrypted


def test_tls_files_imply_encryption() -> None:
    assert etcd_settings("e1", tls=FILES).tls == FILES
    assert etcd_settings("e1", tls=TlsFiles()).tls == TlsFiles()


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("", {}, "expected HOST:PORT, or several separated by commas"),
        ("e1:99999", {}, "port from 1 to 65535"),
        ("ftp://e1", {}, "expected http:// or https://"),
        ("http://e1,https://e2", {}, "mix http:// and https://"),
        ("http://e1/v3", {}, "expected HOST or HOST:PORT"),
        ("http://e1", {"tls": FILES}, "use https://"),
        ("e1", {"password": "x"}, "without a user"),
        ("e1", {"attempt_s": 0.0}, "positive"),
        ("http://me:hush@e1", {}, "with their own options"),
    ],
)
def test_invalid_settings_are_rejected(text: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        etcd_settings(text, **options)  # type: ignore[arg-type]
    assert "hush" not in str(caught.value)


def test_no_secret_is_printed() -> None:
    assert "hush" not in repr(etcd_settings("e1", user="me", password="hush"))
    assert "hush" not in repr(Authenticate("me", "hush")) + repr(AuthenticateAnswer("hush"))


def test_prefix_end_covers_all_keys_with_the_prefix() -> None:
    assert prefix_end(b"a/") == b"a0"
    assert prefix_end(b"a\xff\xff") == b"b"
    assert prefix_end(b"\xff") == prefix_end(b"") == b"\0"
