"""DynamicRendezvousHandler passes the contract of handlers with every kind of store and backend."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tenax.rendezvous.api import RendezvousHandler
from tenax.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from tenax.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousBackend, RendezvousTimeout, Token
from tenax.store import FileStore, MemoryStore, StoreServer, TCPStore
from tenax.testing.rendezvous_contract import RendezvousHandlerContract

TIMEOUT = timedelta(seconds=60)


def handler_over(
    backend: RendezvousBackend,
    store: Any,
    run_id: str,
    min_nodes: int,
    max_nodes: int,
    join_timeout_s: float,
    last_call_s: float,
) -> RendezvousHandler:
    return DynamicRendezvousHandler.from_backend(
        run_id,
        store,
        backend,
        min_nodes,
        max_nodes,
        local_addr="127.0.0.1",
        timeout=RendezvousTimeout(timedelta(seconds=join_timeout_s), timedelta(seconds=last_call_s)),
        keep_alive_interval=1,
        keep_alive_max_attempt=20,  # no node counts as dead on a busy machine
    )


class OverAStore(RendezvousHandlerContract):
    def store(self) -> Any:
        raise NotImplementedError

    def make_handler(
        self, run_id: str, min_nodes: int, max_nodes: int, join_timeout_s: float = 60, last_call_s: float = 0.1
    ) -> RendezvousHandler:
        store = self.store()
        backend = C10dRendezvousBackend(store, run_id)
        return handler_over(backend, store, run_id, min_nodes, max_nodes, join_timeout_s, last_call_s)


class TestOverMemoryStore(OverAStore):
    @pytest.fixture(autouse=True)
    def _set_up(self) -> None:
        self._store = MemoryStore()

    def store(self) -> Any:
        return self._store


class TestOverFileStore(OverAStore):
    @pytest.fixture(autouse=True)
    def _set_up(self, tmp_path: Path) -> None:
        self._path = str(tmp_path / "store")

    def store(self) -> Any:
        return FileStore(self._path, -1)


class TestOverTCPStore(OverAStore):
    def setup_method(self) -> None:
        super().setup_method()
        self._server = StoreServer.in_thread("127.0.0.1", 0)

    def teardown_method(self) -> None:
        super().teardown_method()
        self._server.close()

    def store(self) -> Any:
        return TCPStore("127.0.0.1", self._server.port, timeout=TIMEOUT)


class TestOverTorchTCPStore(OverAStore):
    @pytest.fixture(autouse=True)
    def _set_up(self) -> None:
        distributed = pytest.importorskip("torch.distributed", reason="torch is not installed")
        self._stores = distributed.TCPStore
        self._server = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)

    def store(self) -> Any:
        return self._stores("127.0.0.1", self._server.port, is_master=False, timeout=TIMEOUT)


class ThirdPartyBackend(RendezvousBackend):
    """As written from the documentation: a dictionary and version numbers."""

    _lock = threading.Lock()

    def __init__(self, cells: dict[str, tuple[bytes, int]], run_id: str) -> None:
        self._cells = cells
        self._run_id = run_id

    @property
    def name(self) -> str:
        return "third-party"

    def get_state(self) -> tuple[bytes, Token] | None:
        return self._cells.get(self._run_id)

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        with self._lock:
            found = self._cells.get(self._run_id)
            if (None if found is None else found[1]) != token:
                return None if found is None else (*found, False)
            self._cells[self._run_id] = written = (state, (token or 0) + 1)
            return (*written, True)


class TestOverAThirdPartyBackend(RendezvousHandlerContract):
    @pytest.fixture(autouse=True)
    def _set_up(self) -> None:
        self._cells: dict[str, tuple[bytes, int]] = {}
        self._store = MemoryStore()

    def make_handler(
        self, run_id: str, min_nodes: int, max_nodes: int, join_timeout_s: float = 60, last_call_s: float = 0.1
    ) -> RendezvousHandler:
        backend = ThirdPartyBackend(self._cells, run_id)
        return handler_over(backend, self._store, run_id, min_nodes, max_nodes, join_timeout_s, last_call_s)
