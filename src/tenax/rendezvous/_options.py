"""Parses rendezvous options (``--rdzv-conf``), and reads the variables that stand for some of them."""

from __future__ import annotations

import os

from tenax._core.bounds import name_problem
from tenax._engines.secret import TLS_OPTIONS, TOKEN_VARIABLE, read_private_file
from tenax._io.tls import TlsFiles

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tenax._io.etcd.settings import EtcdSettings
    from tenax.rendezvous.api import RendezvousParameters

PASSWORD_VARIABLE = "TENAX_ETCD_PASSWORD"  # noqa: S105 - the variable's name
_MAX_PASSWORD_BYTES = 4096
_OLD_TLS_OPTIONS = ("cert", "key", "cacert")  # of torchrun's older etcd backend
# Options that only the engine supports.
_ENGINE_OPTIONS = (
    *("token", "token_file", "managed", "managed_only", "link_port", "link_tls", "outage_timeout"),
    *("scale_up", "node_name", "node_order", "store_port", "store_allow"),
)


def seconds(params: RendezvousParameters, key: str, default: float, least: float = 0.001) -> float:
    value = params.get(key)
    if value is None:
        return default
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = -1.0
    if not least <= seconds < 1e9:
        raise ValueError(f"the rendezvous option {key!r} is {value!r}; expected a positive number")
    return seconds


def whole_seconds(params: RendezvousParameters, key: str, default: int) -> int:
    value = params.get_as_int(key, default)
    if value is None or value <= 0:
        raise ValueError(f"the rendezvous option {key!r} is {value}; expected a positive number of seconds")
    return value


def port(params: RendezvousParameters, key: str) -> int:
    """Return a port; 0 if it is not given."""
    value = params.get_as_int(key, 0) or 0
    if not 0 <= value < 65536:
        raise ValueError(f"the rendezvous option {key!r} is {value}; expected a port below 65536")
    return value


def name(params: RendezvousParameters, key: str, variable: str) -> str:
    """Return the option or the variable. Raises ValueError if it cannot be sent to other nodes."""
    found = str(params.get(key, "") or os.environ.get(variable, ""))
    if problem := name_problem(found):
        raise ValueError(f"the rendezvous option {key!r} (or the variable {variable}) cannot be used: {problem}")
    return found


# --- the connection to etcd -------------------------------------------------------------------------------------------


def etcd_settings_from(params: RendezvousParameters) -> EtcdSettings:
    """Return the settings of the etcd client. Raises ValueError.

    Options: ``protocol`` (http or https), ``ssl_cert``, ``ssl_cert_key``, ``ca_cert`` (or ``cert``, ``key``,
    ``cacert``), ``user``, and ``password`` or ``password_file`` or the variable TENAX_ETCD_PASSWORD.
    """
    from tenax._io.etcd.settings import etcd_settings

    files = _tls_files(params)
    protocol = str(params.get("protocol") or "").strip().lower()
    if protocol not in ("", "http", "https"):
        raise ValueError(f"the rendezvous option 'protocol' is {protocol!r}; expected 'http' or 'https'")
    endpoint = params.endpoint or "localhost"
    if protocol:
        endpoints = [each.strip() for each in endpoint.split(",") if each.strip()]
        # A conflicting protocol is rejected when the endpoints are parsed.
        endpoint = ",".join(each if "://" in each else f"{protocol}://{each}" for each in endpoints)
    user = str(params.get("user") or "")
    tls = files if files != TlsFiles() else None
    return etcd_settings(endpoint, user=user, password=_password(params, user), tls=tls)


def _tls_files(params: RendezvousParameters) -> TlsFiles:
    given = [[name for name in names if params.get(name)] for names in (TLS_OPTIONS, _OLD_TLS_OPTIONS)]
    if all(given):
        raise ValueError(
            f"the rendezvous options {given[0][0]!r} and {given[1][0]!r} belong to two sets of names for TLS "
            f"files; use only {', '.join(TLS_OPTIONS)}"
        )
    names = _OLD_TLS_OPTIONS if given[1] else TLS_OPTIONS
    files = TlsFiles(*(str(params.get(name) or "") for name in names))
    if files.key and not files.cert:
        raise ValueError(f"the rendezvous option {names[1]!r} is given without {names[0]!r}; give both, or neither")
    return files


def refuse_engine_options(params: RendezvousParameters) -> None:
    """Raise ValueError if an option is given that only the engine supports."""
    given = [name for name in _ENGINE_OPTIONS if params.get(name) not in (None, "")]
    if os.environ.get(TOKEN_VARIABLE):
        given.append(TOKEN_VARIABLE)
    if given:
        raise ValueError(
            f"{', '.join(given)} would have no effect: an agent with its own hooks or handlers uses keys in etcd "
            "for the rendezvous; remove it, and restrict access to etcd with users (user, password_file) or "
            "certificates (ssl_cert, ssl_cert_key, ca_cert)"
        )


def _password(params: RendezvousParameters, user: str) -> str:
    password, path = params.get("password"), params.get("password_file")
    if password and path:
        raise ValueError("both rendezvous options 'password' and 'password_file' are given; give only one")
    if password:
        return str(password)
    if not path:
        return os.environ.get(PASSWORD_VARIABLE, "") if user else ""
    try:
        text = read_private_file(str(path), "password_file", _MAX_PASSWORD_BYTES).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"the file of the rendezvous option 'password_file' is not text: {error.reason}") from None
    found = text.strip("\r\n")
    if not found or len(text) > _MAX_PASSWORD_BYTES:
        raise ValueError(f"the file {str(path)!r} of the option 'password_file' is empty or too long for a password")
    return found
