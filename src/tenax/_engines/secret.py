"""The secret of a run: its sources and checks.

Sources, in this order: the rendezvous options ``token`` and ``token_file``, the variable ``TENAX_RDZV_TOKEN``, and for
a loopback endpoint this user's secret on this host, created when first needed. So on one host only agents and operators
of the same user can reach a run, without a flag. Other endpoints have no default, because other hosts do not have the
user's secret.

Secrets are never printed. Every error names the remedy.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress

from tenax._io.private_folder import FOLDER_VARIABLE, check_private, make_private, private_folder
from tenax._io.safe_open import read_with_status, replace_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from tenax.rendezvous.api import RendezvousParameters

TOKEN_VARIABLE = "TENAX_RDZV_TOKEN"  # noqa: S105 - the variable's name
MIN_BYTES = 16
MAX_BYTES = 4096
_USER_SECRET_BYTES = 32
_TOKEN_OPTIONS = ("token", "token_file")
TLS_OPTIONS = ("ssl_cert", "ssl_cert_key", "ca_cert")


def configured_secret(params: RendezvousParameters) -> bytes:
    """Return the secret given for this run; empty if there is none. Raises ValueError."""
    token, path = params.get("token"), params.get("token_file")
    if token and path:
        raise ValueError("both rendezvous options 'token' and 'token_file' are given; give only one")
    if path:
        secret, source = read_private_file(str(path), "token_file", MAX_BYTES).strip(), "token_file"
    else:
        secret = str(token or os.environ.get(TOKEN_VARIABLE, "")).encode()
        source = "token" if token else TOKEN_VARIABLE
    if (secret or path) and not MIN_BYTES <= len(secret) <= MAX_BYTES:
        raise ValueError(
            f"the rendezvous secret ({source}) has {len(secret)} bytes; expected {MIN_BYTES} to {MAX_BYTES}; "
            "create one with: (umask 077; openssl rand -hex 32 > FILE)"
        )
    return secret


def read_private_file(path: str, option: str, max_bytes: int) -> bytes:
    """Return the content of a file that holds a secret. Raises ValueError if other users can read or change it."""
    try:
        with open(path, "rb") as file:
            about = os.fstat(file.fileno())
            content = file.read(max_bytes + 1)
    except OSError as error:
        raise ValueError(f"cannot read the file of the rendezvous option {option!r}: {error}") from error
    if stat.S_ISCHR(about.st_mode):  # a terminal or /dev/null
        return content
    if about.st_mode & 0o077:
        raise ValueError(
            f"the file {path!r} of the rendezvous option {option!r} can be read or changed by other users; "
            f"run: chmod 600 {path}"
        )
    if about.st_uid not in (0, os.geteuid()):
        raise ValueError(
            f"the file {path!r} of the rendezvous option {option!r} belongs to another user; use a copy that you own"
        )
    return content


def refuse_unused_options(params: RendezvousParameters, options: tuple[str, ...], why: str) -> None:
    """Raise ValueError if a secret or one of these options is given: it would have no effect, because of ``why``."""
    given = [option for option in (*_TOKEN_OPTIONS, *options) if params.get(option)]
    if os.environ.get(TOKEN_VARIABLE):
        given.append(TOKEN_VARIABLE)
    if given:
        raise ValueError(f"{', '.join(given)} would have no effect: {why}; remove it, or use the tcp engine")


# --- the secret of this user ------------------------------------------------------------------------------------------


def user_secret(environ: Mapping[str, str] = os.environ, *, create: bool = True) -> bytes:
    """Return the secret of this user on this host. If there is none, create it, or return b"" without ``create``.

    Raises OSError if it cannot be kept private.
    """
    folder = private_folder(environ)
    path = os.path.join(folder, "secret")
    try:
        if create:
            make_private(folder)
        elif not os.path.lexists(folder):
            return b""
        else:
            check_private(folder)
        try:
            return _read(path)
        except FileNotFoundError:
            if not create:
                return b""
        _create(path, os.urandom(_USER_SECRET_BYTES))
        return _read(path)
    except OSError as error:
        raise OSError(
            f"cannot store the secret of this user in {folder}: {error.strerror or error}; give the run a secret "
            f"(--rdzv-conf token_file=FILE or the variable {TOKEN_VARIABLE}), or set {FOLDER_VARIABLE} to another "
            "folder"
        ) from error


def make_shared_secret(path: str) -> None:
    """Create a secret of this user for all hosts that share this file, unless it exists. Raises OSError."""
    os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
    if not os.path.lexists(path):
        _create(path, os.urandom(_USER_SECRET_BYTES).hex().encode())


def _create(path: str, secret: bytes) -> None:
    """Create the file atomically: only the first of several agents succeeds."""
    with suppress(FileExistsError):
        replace_file(path, secret, put=os.link)


def _read(path: str) -> bytes:
    secret, about = read_with_status(path, _USER_SECRET_BYTES + 1)
    if about.st_uid != os.getuid() or about.st_mode & 0o077:
        raise PermissionError(f"{path} must be a file that only this user can read; remove it")
    if len(secret) != _USER_SECRET_BYTES:
        raise OSError(f"{path} does not have {_USER_SECRET_BYTES} bytes; remove it")
    return secret
