"""Settings of the etcd client: endpoints, credentials and TLS. Checked here, then frozen."""

from __future__ import annotations

import msgspec

from tenax._core.text import concealed_repr
from tenax._io.endpoint import Endpoint
from tenax._io.tls import TlsFiles

DEFAULT_PORT = 2379


class EtcdSettings(msgspec.Struct, frozen=True):
    """``endpoints`` are ``host:port``. With ``tls``, even without files, every connection is encrypted.

    ``attempt_s`` is the time for one member's answer before the next member is tried. It is short because a member
    without a leader holds a write for seconds; later rounds of a call allow more time.

    ``waits_for_users``: do not use etcd before it has users.
    """

    endpoints: tuple[str, ...]
    user: str = ""
    password: str = ""
    tls: TlsFiles | None = None
    attempt_s: float = 0.5
    waits_for_users: bool = False

    __repr__ = concealed_repr


def etcd_settings(
    endpoint_text: str, *, user: str = "", password: str = "", tls: TlsFiles | None = None, attempt_s: float = 0.5
) -> EtcdSettings:
    """Parse ``e1:2379,e2:2379``, each with or without ``http://`` or ``https://``. Raises ValueError.

    With ``https://``, or with any TLS file, connections are encrypted.
    """
    if "@" in endpoint_text:  # do not print it: it may contain a password
        raise ValueError("an etcd endpoint contains '@'; set the user and the password with their own options")
    schemes: set[str] = set()
    endpoints: list[str] = []
    for text in filter(None, map(str.strip, endpoint_text.split(","))):
        scheme, endpoint = _parse(text)
        schemes.add(scheme)
        if endpoint not in endpoints:
            endpoints.append(endpoint)
    if not endpoints:
        raise ValueError(f"the etcd endpoint is {endpoint_text!r}; expected HOST:PORT, or several separated by commas")
    has_files = tls is not None and any((tls.cert, tls.key, tls.ca))
    if "https" in schemes and "http" in schemes:
        raise ValueError(f"the etcd endpoints {endpoint_text!r} mix http:// and https://; use one of them for all")
    if "http" in schemes and has_files:
        raise ValueError(f"TLS files are set, but the etcd endpoint is {endpoint_text!r}; use https://")
    if password and not user:
        raise ValueError("a password for etcd is set without a user; set both or neither")
    if has_files or "https" in schemes:
        tls = tls or TlsFiles()
    if not attempt_s > 0:
        raise ValueError(f"attempt_s is {attempt_s!r}; expected a positive number of seconds")
    return EtcdSettings(tuple(endpoints), user, password, tls, attempt_s)


def _parse(text: str) -> tuple[str, str]:
    scheme, separator, rest = text.rpartition("://")
    scheme = scheme.lower()
    if separator and scheme not in ("http", "https"):
        raise ValueError(f"the etcd endpoint is {text!r}; expected http:// or https:// or neither")
    host = rest.removesuffix("/")
    try:
        if "/" in host or "?" in host or any(map(str.isspace, host)):
            raise ValueError
        return scheme, str(Endpoint.parse(host, DEFAULT_PORT))
    except ValueError:
        raise ValueError(
            f"the etcd endpoint is {text!r}; expected HOST or HOST:PORT with a port from 1 to 65535"
        ) from None
