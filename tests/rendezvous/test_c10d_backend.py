"""The c10d backend: one state under one key, changed by compare-and-set; and the stores that hold it."""

from __future__ import annotations

import base64
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from kit.processes import needs_torch
from kit.torch_python import TorchPython
from tenax._engines.free_port import free_port
from tenax.rendezvous.api import RendezvousConnectionError, RendezvousParameters, RendezvousStateError
from tenax.rendezvous.c10d_rendezvous_backend import DEFAULT_PORT, C10dRendezvousBackend, create_backend
from tenax.store import FileStore, MemoryStore, StoreServer, TCPStore

KEY = "torch.rendezvous.run"
KINDS = ["memory", "file", "tcp", "torch tcp", "torch file", "torch hash"]


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """A store of each kind with compare-and-set."""
    torch = pytest.importorskip("torch.distributed") if request.param.startswith("torch") else None
    with ExitStack() as stack:
        kinds: dict[str, Callable[[], Any]] = {
            "memory": MemoryStore,
            "file": lambda: FileStore(str(tmp_path / "store")),
            "tcp": lambda: TCPStore("127.0.0.1", stack.enter_context(StoreServer.in_thread("127.0.0.1", 0)).port),
            "torch tcp": lambda: torch.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
            "torch file": lambda: torch.FileStore(str(tmp_path / "store"), -1),
            "torch hash": lambda: torch.HashStore(),
        }
        yield kinds[request.param]()


def test_the_default_port_is_torchs() -> None:
    assert DEFAULT_PORT == 29400


def test_a_state_is_written_only_with_the_token_of_the_last_one(store: Any) -> None:
    backend = C10dRendezvousBackend(store, "run")
    assert backend.name == "c10d"
    assert backend.get_state() is None
    written = backend.set_state(b"one")
    assert written is not None
    assert (written[0], written[2]) == (b"one", True)
    assert backend.get_state() == written[:2]
    too_late = backend.set_state(b"another one")  # without a token: only if there is none
    assert too_late == (*written[:2], False)
    newer = backend.set_state(b"two", written[1])
    assert newer is not None
    assert (newer[0], newer[2]) == (b"two", True)
    assert backend.set_state(b"three", written[1]) == (*newer[:2], False)
    assert backend.set_state(b"three", "not a valid token") == (*newer[:2], False)
    assert backend.get_state() == newer[:2]


def test_two_backends_see_the_same_state(store: Any) -> None:
    one, other = C10dRendezvousBackend(store, "run"), C10dRendezvousBackend(store, "run")
    one.set_state(b"\x00 any bytes \xff")
    found = other.get_state()
    assert found is not None
    assert found[0] == b"\x00 any bytes \xff"
    assert C10dRendezvousBackend(store, "another run").get_state() is None


def test_a_lost_key_reads_as_no_state(store: Any) -> None:
    """Stores answer as if the old value were there, so writing with its token would never succeed."""
    backend = C10dRendezvousBackend(store, "run")
    written = backend.set_state(b"one")
    assert written is not None
    store.delete_key(KEY)
    assert backend.set_state(b"two", written[1]) is None
    assert backend.get_state() is None
    again = backend.set_state(b"two")
    assert again is not None
    assert again[2]


@pytest.mark.parametrize("value", [b"not base64!", b"AAA", b"\xff\xfe", b"A" * (9 << 20)], ids=lambda value: value[:8])
def test_an_invalid_value_is_rejected(value: bytes) -> None:
    store = MemoryStore()
    backend = C10dRendezvousBackend(store, "run")
    store.set(KEY, value)
    with pytest.raises(RendezvousStateError, match=f"the value of '{KEY}'"):
        backend.get_state()


def test_a_store_error_is_raised_as_a_connection_error() -> None:
    with StoreServer.in_thread("127.0.0.1", 0) as server:
        backend = C10dRendezvousBackend(TCPStore("127.0.0.1", server.port, timeout=timedelta(seconds=1)), "run")
    with pytest.raises(RendezvousConnectionError, match="cannot reach the rendezvous store: "):
        backend.get_state()
    with pytest.raises(RendezvousConnectionError):
        backend.set_state(b"state")


def test_an_empty_run_id_is_rejected() -> None:
    with pytest.raises(ValueError, match="run id"):
        C10dRendezvousBackend(MemoryStore(), "")


# --- create_backend ---------------------------------------------------------------------------------------------------


def params(endpoint: str, **options: Any) -> RendezvousParameters:
    return RendezvousParameters("c10d", endpoint, "run", 1, 2, **options)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_the_first_node_that_can_listen_at_the_endpoint_hosts_the_store(host: str) -> None:
    """Host names are not compared."""
    endpoint = f"{host}:{free_port()}"
    one, _ = create_backend(params(endpoint))
    other, store = create_backend(params(endpoint))
    one.set_state(b"hello")
    found = other.get_state()
    assert found is not None
    assert found[0] == b"hello"
    store.set("key", "value")
    assert store.get("key") == b"value"


def test_is_host_chooses_the_node_that_hosts_the_store() -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    with pytest.raises(RendezvousConnectionError, match="cannot reach"):
        create_backend(params(endpoint, is_host="no", read_timeout=1))
    host, _ = create_backend(params(endpoint, is_host="yes"))
    client, _ = create_backend(params(endpoint, is_host="no"))
    host.set_state(b"hello")
    assert client.get_state() is not None


def test_a_port_in_use_cannot_be_served() -> None:
    with (
        StoreServer.in_thread("127.0.0.1", 0) as server,
        pytest.raises(RendezvousConnectionError, match="not serve"),
    ):
        create_backend(params(f"127.0.0.1:{server.port}", is_host=True, read_timeout=1))


def test_a_file_store_can_hold_the_state(tmp_path: Path) -> None:
    path = str(tmp_path / "rendezvous")
    one, _ = create_backend(params(path, store_type="File "))
    other, _ = create_backend(params(path, store_type="file"))
    one.set_state(b"hello")
    assert other.get_state() is not None
    with pytest.raises(RendezvousConnectionError, match="cannot use the rendezvous file"):
        create_backend(params(str(tmp_path / "no" / "such" / "folder"), store_type="file"))


@pytest.mark.parametrize(
    ("options", "fault"),
    [({"store_type": "stone"}, "store_type"), ({"read_timeout": 0}, "read_timeout"), ({"is_host": "maybe"}, "is_host")],
)
def test_invalid_options_are_rejected(options: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        create_backend(params("127.0.0.1:1", **options))


_WHICH = """
import sys
from tenax.rendezvous.api import RendezvousParameters
from tenax.rendezvous.c10d_rendezvous_backend import create_backend
for options in ({"store_type": "file"}, {}):
    endpoint = sys.argv[1] if options else "127.0.0.1:" + sys.argv[2]
    backend, store = create_backend(RendezvousParameters("c10d", endpoint, "run", 1, 1, **options))
    assert backend.set_state(b"state")[2]
    print(type(store).__module__.split(".")[0], "torch" in sys.modules)
"""


@pytest.mark.process
@needs_torch
def test_the_store_is_torchs_if_torch_is_already_imported(tmp_path: Path, torch_python: TorchPython) -> None:
    done = torch_python.run("-c", _WHICH, str(tmp_path / "store"), str(free_port()))
    assert done.stdout.splitlines() == ["torch True"] * 2, done.stderr


@pytest.mark.process
def test_the_store_is_tenaxs_if_torch_is_not_imported(tmp_path: Path) -> None:
    """tenax never imports torch itself."""
    command = [sys.executable, "-c", _WHICH, str(tmp_path / "store"), str(free_port())]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["tenax False"] * 2


def test_a_state_written_by_torch_is_found() -> None:
    """Both use the same key, so that a mixed run is rejected instead of becoming two groups."""
    theirs = pytest.importorskip("torch.distributed.elastic.rendezvous.c10d_rendezvous_backend")
    from torch.distributed import HashStore

    store = HashStore()
    theirs.C10dRendezvousBackend(store, "run").set_state(b"\x80 a pickle")
    found = C10dRendezvousBackend(store, "run").get_state()
    assert found is not None
    assert found[0] == b"\x80 a pickle"
    assert store.get(KEY) == base64.b64encode(b"\x80 a pickle")
