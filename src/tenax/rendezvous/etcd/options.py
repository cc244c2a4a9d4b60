"""Rendezvous options that say how to reach etcd, as a user may write them in ``--rdzv-conf``."""

from __future__ import annotations

import os

from tenax.etcd.settings import EtcdSettings, etcd_settings
from tenax.rendezvous.secret import read_private_file
from tenax.tls import TlsFiles

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tenax.rendezvous.api import RendezvousParameters

PASSWORD_VARIABLE = "TENAX_ETCD_PASSWORD"  # noqa: S105 - the variable's name
_MOST_PASSWORD_BYTES = 4096


def etcd_settings_from(
    params: RendezvousParameters, cert: str = "ssl_cert", key: str = "ssl_cert_key", ca: str = "ca_cert"
) -> EtcdSettings:
    """``protocol`` (http or https), files for TLS by the names given here, ``user``, and ``password`` or
    ``password_file`` or the variable TENAX_ETCD_PASSWORD. Raises ValueError with one sentence."""
    files = TlsFiles(*(str(params.get(name) or "") for name in (cert, key, ca)))
    protocol = str(params.get("protocol") or "").strip().lower()
    if protocol not in ("", "http", "https"):
        raise ValueError(f"the protocol of the rendezvous is {protocol!r}; expected 'http' or 'https'")
    endpoint = params.endpoint or "localhost"
    if protocol:
        endpoint = ",".join(_with_scheme(each, protocol) for each in endpoint.split(",") if each.strip())
    user = str(params.get("user") or "")
    tls = files if files != TlsFiles() else None
    return etcd_settings(endpoint, user=user, password=_password(params, user), tls=tls)


def _with_scheme(endpoint: str, protocol: str) -> str:
    """The protocol of an endpoint that says none. One that says another one is refused with the others."""
    return endpoint.strip() if "://" in endpoint else f"{protocol}://{endpoint.strip()}"


def _password(params: RendezvousParameters, user: str) -> str:
    password, path = params.get("password"), params.get("password_file")
    if password and path:
        raise ValueError("both rendezvous options 'password' and 'password_file' are given; expected one of them")
    if password:
        return str(password)
    if not path:
        return os.environ.get(PASSWORD_VARIABLE, "") if user else ""
    try:
        text = read_private_file(str(path), "password_file", _MOST_PASSWORD_BYTES).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"the file of the rendezvous option 'password_file' is not text: {error.reason}") from None
    found = text.strip("\r\n")
    if not found or len(text) > _MOST_PASSWORD_BYTES:
        raise ValueError(f"the file {str(path)!r} of the option 'password_file' is empty or too long for a password")
    return found
