"""The secret of a run: its sources, checks and file permissions."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kit.processes import needs_root
from tenax._engines.secret import MIN_BYTES, configured_secret, make_shared_secret, user_secret
from tenax.rendezvous import (
    c10d_rendezvous_backend,
    etcd_rendezvous,
    etcd_rendezvous_backend,
    static_tcp_rendezvous,
)
from tenax.rendezvous._tcp_handler import tcp_settings
from tenax.rendezvous.api import RendezvousParameters
from tenax.rendezvous.registry import get_rendezvous_handler

GOOD = "0123456789abcdef"


def parameters(endpoint: str = "node0:29400", **config: object) -> RendezvousParameters:
    return RendezvousParameters("tcp", endpoint, "run", 1, 2, **config)


def private(path: Path, content: str | bytes = f" {GOOD}\n") -> str:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    path.chmod(0o600)
    return str(path)


# --- a configured secret ----------------------------------------------------------------------------------------------


def test_whitespace_around_a_secret_in_a_file_is_stripped(tmp_path: Path) -> None:
    """Editors and echo end a file with a newline."""
    assert configured_secret(parameters(token_file=private(tmp_path / "token"))) == GOOD.encode()


def test_a_shared_secret_is_created_once(tmp_path: Path) -> None:
    """In folders that only this user can enter, for use as a token file."""
    path = tmp_path / "a" / "secret"
    make_shared_secret(str(path))
    secret = configured_secret(parameters(token_file=str(path)))
    assert len(secret) == 64
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    make_shared_secret(str(path))
    assert configured_secret(parameters(token_file=str(path))) == secret
    assert os.listdir(path.parent) == ["secret"]


def test_without_a_configured_secret_there_is_none() -> None:
    """For an endpoint that is not loopback."""
    assert configured_secret(parameters()) == b""
    assert not tcp_settings(parameters()).uses_user_secret


@pytest.mark.parametrize("content", ["", "\n", GOOD[:-1], "x" * 5000])
def test_a_secret_that_is_too_short_or_too_long_is_rejected_with_the_remedy(tmp_path: Path, content: str) -> None:
    """The message contains the length and not the secret."""
    with pytest.raises(ValueError, match=r"expected 16 to 4096; create one with: .*openssl rand -hex 32") as raised:
        configured_secret(parameters(token_file=private(tmp_path / "token", content)))
    assert not content.strip() or content.strip() not in str(raised.value)


def test_a_short_token_is_rejected_too() -> None:
    with pytest.raises(ValueError, match=r"\(token\) has 15 bytes"):
        configured_secret(parameters(token="x" * (MIN_BYTES - 1)))


@pytest.mark.parametrize("mode", [0o640, 0o620, 0o604, 0o602, 0o644, 0o666])
def test_a_file_that_others_can_read_or_change_is_rejected_with_the_remedy(tmp_path: Path, mode: int) -> None:
    """Readers could join and operate the run; writers could lock nodes out."""
    path = private(tmp_path / "token")
    os.chmod(path, mode)
    with pytest.raises(ValueError, match=f"can be read or changed by other users; run: chmod 600 {path}") as raised:
        configured_secret(parameters(token_file=path))
    assert GOOD not in str(raised.value)


@needs_root
def test_a_file_of_another_user_is_rejected(tmp_path: Path) -> None:
    """Its owner could read and change the secret."""
    path = private(tmp_path / "token")
    os.chown(path, 12345, -1)
    with pytest.raises(ValueError, match="belongs to another user"):
        configured_secret(parameters(token_file=path))


# --- the secret of this user ------------------------------------------------------------------------------------------


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"TENAX_PRIVATE_DIR": str(tmp_path / "private")}


@pytest.mark.parametrize("endpoint", ["127.0.0.1:29400", "localhost", "[::1]:29400", "127.1.2.3"])
def test_a_loopback_endpoint_uses_the_users_secret_by_default(endpoint: str) -> None:
    """A configured one overrides it."""
    assert tcp_settings(parameters(endpoint)).uses_user_secret
    assert not tcp_settings(parameters(endpoint, token=GOOD)).uses_user_secret


def test_the_users_secret_is_created_once_and_only_the_user_can_read_it(environ: dict[str, str]) -> None:
    """32 random bytes, in a folder that only this user can enter."""
    secret = user_secret(environ)
    assert len(secret) == 32
    assert user_secret(environ) == secret == user_secret(environ, create=False)
    folder = Path(environ["TENAX_PRIVATE_DIR"])
    assert [path.name for path in folder.iterdir()] == ["secret"]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "secret").stat().st_mode) == 0o600


def test_an_operator_creates_nothing(environ: dict[str, str]) -> None:
    """Without a secret there is no run of this user."""
    assert user_secret(environ, create=False) == b""
    assert not Path(environ["TENAX_PRIVATE_DIR"]).exists()


def test_agents_that_start_together_get_the_same_secret(environ: dict[str, str]) -> None:
    """And no temporary file is left in the folder."""
    found: list[bytes] = []
    barrier = threading.Barrier(16)

    def start() -> None:
        barrier.wait()
        found.append(user_secret(environ))

    threads = [threading.Thread(target=start) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 16
    assert len(set(found)) == 1
    assert os.listdir(environ["TENAX_PRIVATE_DIR"]) == ["secret"]


def _others_can_enter(folder: Path, tmp_path: Path) -> None:
    folder.mkdir(0o755)


def _is_a_link(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(0o700)
    folder.symlink_to(tmp_path / "elsewhere")


def _has_a_link(folder: Path, tmp_path: Path) -> None:
    folder.mkdir(0o700)
    private(tmp_path / "known", b"k" * 32)
    (folder / "secret").symlink_to(tmp_path / "known")


def _has_a_secret_that_others_can_read(folder: Path, tmp_path: Path) -> None:
    folder.mkdir(0o700)
    (folder / "secret").write_bytes(b"k" * 32)
    (folder / "secret").chmod(0o644)


def _has_half_a_secret(folder: Path, tmp_path: Path) -> None:
    folder.mkdir(0o700)
    private(folder / "secret", b"k" * 16)


def _is_a_file(folder: Path, tmp_path: Path) -> None:
    folder.write_text("")


@pytest.mark.parametrize(
    "prepare",
    [
        *(_others_can_enter, _is_a_link, _has_a_link, _has_a_secret_that_others_can_read, _has_half_a_secret),
        _is_a_file,
    ],
)
@pytest.mark.parametrize("create", [True, False])
def test_a_folder_that_is_not_private_is_rejected_with_the_remedy(
    environ: dict[str, str], tmp_path: Path, prepare, create: bool
) -> None:
    """A run is refused rather than open to other users of the host."""
    prepare(Path(environ["TENAX_PRIVATE_DIR"]), tmp_path)
    with pytest.raises(OSError, match="cannot store the secret of this user in") as raised:
        user_secret(environ, create=create)
    for remedy in ("token_file=FILE", "TENAX_RDZV_TOKEN", "TENAX_PRIVATE_DIR"):
        assert remedy in str(raised.value)


@pytest.mark.process
def test_a_run_on_loopback_without_a_private_folder_is_refused_before_it_starts(
    environ: dict[str, str], tmp_path: Path
) -> None:
    """With one message and the exit code for usage errors."""
    _others_can_enter(Path(environ["TENAX_PRIVATE_DIR"]), tmp_path)
    command = ["run", "--nnodes=1:2", "--rdzv-endpoint=127.0.0.1:29400", "--no-python", "true"]
    done = subprocess.run(
        [sys.executable, "-m", "tenax", *command],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "cannot store the secret of this user in" in done.stderr
    assert "Traceback" not in done.stderr


@needs_root
def test_the_folder_of_another_user_is_not_used(environ: dict[str, str]) -> None:
    """Another user may have created it first, because its path can be guessed."""
    folder = Path(environ["TENAX_PRIVATE_DIR"])
    folder.mkdir(0o700)
    os.chown(folder, 12345, -1)
    with pytest.raises(OSError, match="only this user can enter"):
        user_secret(environ)


# --- agents with hooks ------------------------------------------------------------------------------------------------


def _tcp_next_rendezvous(params: RendezvousParameters) -> None:
    get_rendezvous_handler(params).next_rendezvous()


def _etcd_next_rendezvous(params: RendezvousParameters) -> None:
    etcd = RendezvousParameters("etcd", "127.0.0.1:1", "run", 1, 2, **params.config)
    get_rendezvous_handler(etcd).next_rendezvous()


HANDLERS: dict[str, Callable[[RendezvousParameters], object]] = {
    "next_rendezvous() of the tcp handler": _tcp_next_rendezvous,
    "the c10d backend": c10d_rendezvous_backend.create_backend,
    "the static handler": static_tcp_rendezvous.create_rdzv_handler,
    "next_rendezvous() of the etcd handler": _etcd_next_rendezvous,
    "the etcd backend": etcd_rendezvous_backend.create_backend,
    "the oldest etcd handler": etcd_rendezvous.create_rdzv_handler,
}


@pytest.mark.parametrize("create", HANDLERS.values(), ids=HANDLERS.keys())
@pytest.mark.parametrize("option", ["token", "token_file"])
def test_a_secret_that_would_have_no_effect_is_refused(tmp_path: Path, create, option: str) -> None:
    """Agents with hooks use a store, or etcd alone, where the secret is not checked."""
    value = GOOD if option == "token" else private(tmp_path / "token")
    with pytest.raises(ValueError, match=f"^{option} would have no effect: .*remove it") as raised:
        create(parameters("127.0.0.1:1", rank=0, timeout=1, **{option: value}))
    assert GOOD not in str(raised.value)


@pytest.mark.parametrize("create", list(HANDLERS.values())[:3], ids=list(HANDLERS)[:3])
@pytest.mark.parametrize("option", ["ssl_cert", "ssl_cert_key", "ca_cert"])
def test_tls_that_would_have_no_effect_is_refused(tmp_path: Path, create, option: str) -> None:
    """A store of torch's protocol is not encrypted. (Connections to etcd can be.)"""
    with pytest.raises(ValueError, match=r"would have no effect|could not load the TLS files"):
        create(parameters("127.0.0.1:1", rank=0, timeout=1, **{option: str(tmp_path / "file")}))


SECRET_IN_ENVIRONMENT = """
from tenax.rendezvous.api import RendezvousParameters
from tenax.rendezvous.c10d_rendezvous_backend import create_backend
create_backend(RendezvousParameters("c10d", "127.0.0.1:1", "run", 1, 2))
"""


@pytest.mark.process
def test_a_secret_of_the_environment_that_would_have_no_effect_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SECRET_IN_ENVIRONMENT],
        env={**os.environ, "TENAX_RDZV_TOKEN": GOOD},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "ValueError: TENAX_RDZV_TOKEN would have no effect" in done.stderr
