"""The contract of handlers for the blocking methods of the tcp handler, and for a third-party handler that has only the
methods of older TorchElastic documentation and returns a tuple."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tenax._engines.free_port import free_port
from tenax.rendezvous import RendezvousHandler, RendezvousParameters, rendezvous_handler_registry
from tenax.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from tenax.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout
from tenax.rendezvous.registry import get_rendezvous_handler
from tenax.store import MemoryStore
from tenax.testing.rendezvous_contract import RendezvousHandlerContract


class TestBlockingMethodsOfTheTcpHandler(RendezvousHandlerContract):
    """As used by an agent with its own hooks."""

    @pytest.fixture(autouse=True)
    def _endpoint(self) -> None:
        # If torch is imported, the store is torch's, which listens on all addresses of this host.
        self._address = f"127.0.0.1:{free_port()}"

    def make_handler(
        self, run_id: str, min_nodes: int, max_nodes: int, join_timeout_s: float = 60, last_call_s: float = 0.1
    ) -> RendezvousHandler:
        return get_rendezvous_handler(
            RendezvousParameters(
                "c10d",
                self._address,
                run_id,
                min_nodes,
                max(max_nodes, 2),  # with one node it would use the local engine
                local_addr="127.0.0.1",
                join_timeout=join_timeout_s,
                last_call_timeout=last_call_s,
                keep_alive_interval=1,
                keep_alive_max_attempt=20,
            )
        )


class OldHandler(RendezvousHandler):
    """Only the methods of the older documentation."""

    def __init__(self, inner: DynamicRendezvousHandler) -> None:
        self._inner = inner

    def next_rendezvous(self) -> Any:
        info = self._inner.next_rendezvous()
        return info.store, info.rank, info.world_size

    def is_closed(self) -> bool:
        return self._inner.is_closed()

    def set_closed(self) -> None:
        self._inner.set_closed()

    def num_nodes_waiting(self) -> int:
        return self._inner.num_nodes_waiting()

    def get_run_id(self) -> str:
        return self._inner.get_run_id()

    def shutdown(self) -> bool:
        return self._inner.shutdown()


class TestAnOldHandler(RendezvousHandlerContract):
    @pytest.fixture(autouse=True)
    def _set_up(self) -> None:
        self._store = MemoryStore()

    def make_handler(
        self, run_id: str, min_nodes: int, max_nodes: int, join_timeout_s: float = 60, last_call_s: float = 0.1
    ) -> RendezvousHandler:
        return OldHandler(
            DynamicRendezvousHandler.from_backend(
                run_id,
                self._store,
                C10dRendezvousBackend(self._store, run_id),
                min_nodes,
                max_nodes,
                local_addr="127.0.0.1",
                timeout=RendezvousTimeout(timedelta(seconds=join_timeout_s), timedelta(seconds=last_call_s)),
                keep_alive_interval=1,
                keep_alive_max_attempt=20,
            )
        )


def create_old_handler(params: RendezvousParameters) -> RendezvousHandler:
    store = MemoryStore()
    backend = C10dRendezvousBackend(store, params.run_id)
    return OldHandler(
        DynamicRendezvousHandler.from_backend(params.run_id, store, backend, params.min_nodes, params.max_nodes)
    )


def test_a_handler_without_get_backend_can_be_registered_under_any_name() -> None:
    rendezvous_handler_registry.register("older", create_old_handler)
    handler = get_rendezvous_handler(RendezvousParameters("older", "", "run", 1, 1))
    assert isinstance(handler, OldHandler)
    assert handler.get_run_id() == "run"


def test_an_installed_package_can_provide_a_handler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under TorchElastic's entry point group: a function without arguments that returns the creator."""
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[torchrun.handlers]\nfrom-a-package = their_rendezvous:get_creator\n")
    (tmp_path / "their_rendezvous.py").write_text(
        "from tenax.rendezvous._engine_handler import LocalRendezvousHandler\n"
        "class Theirs(LocalRendezvousHandler):\n"
        "    def get_backend(self):\n"
        "        return 'from-a-package'\n"
        "def get_creator():\n"
        "    return lambda params: Theirs(params.run_id)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    handler = get_rendezvous_handler(RendezvousParameters("from-a-package", "", "run", 1, 1))
    assert (type(handler).__name__, handler.get_run_id()) == ("Theirs", "run")
