"""All stores satisfy one contract: tenax's, tenax's client with torch's servers, torch's client with tenax's server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from store.servers import our_server, torch_client, torch_server
from tenax.store import FileStore, MemoryStore, PrefixStore, Store, StoreServer, TCPStore
from tenax.testing.store_contract import StoreContract

pytestmark = pytest.mark.process

TIMEOUT_S = 60.0


class Makers:
    """Creates each kind of store, and releases it after the test."""

    def __init__(self, folder: Path, resources: ExitStack) -> None:
        self._folder = folder
        self._resources = resources

    def memory(self) -> Store:
        return MemoryStore(TIMEOUT_S)

    def file(self) -> Store:
        path = self._folder / f"store{len(list(self._folder.iterdir()))}"
        return self._resources.enter_context(FileStore(path, timeout=TIMEOUT_S))

    def ours(self) -> Store:
        server = self._resources.enter_context(StoreServer.in_thread())
        return self._resources.enter_context(TCPStore(server.host, server.port, timeout=TIMEOUT_S))

    def libuv(self) -> Store:
        return self._client_of_torch("libuv")

    def legacy(self) -> Store:
        return self._client_of_torch("legacy")

    def _client_of_torch(self, kind: str) -> Store:
        server = torch_server(kind)
        self._resources.callback(lambda _: None, server)  # it serves as long as there is a reference to it
        return self._resources.enter_context(TCPStore("127.0.0.1", server.port, timeout=TIMEOUT_S))

    def torch(self) -> Any:
        return torch_client(self._resources.enter_context(our_server()).port)


@pytest.fixture
def makers(tmp_path: Path) -> Iterator[Makers]:
    with ExitStack() as resources:
        yield Makers(tmp_path, resources)


class OurContract(StoreContract):
    make: Callable[[], Any]

    def make_store(self) -> Any:
        return self.make()


def skip_unsupported_by_torchs_client(request: pytest.FixtureRequest) -> None:
    if request.function.__name__ == "test_every_pushed_value_goes_to_one_waiting_client":
        pytest.skip("a waiting client of torch gets an error if another client was faster")


class TestOurs(OurContract):
    """Without a prefix, and with one that contains a slash."""

    @pytest.fixture(autouse=True, params=["memory", "file", "ours", "libuv"])
    def _kind(self, makers: Makers, request: pytest.FixtureRequest) -> None:
        self.make = getattr(makers, request.param)


class TestUnderAPrefix(OurContract):
    @pytest.fixture(autouse=True, params=["memory", "file", "ours", "libuv", "torch"])
    def _kind(self, makers: Makers, request: pytest.FixtureRequest) -> None:
        if request.param == "torch":
            self.error = self.timeout_error = self.queue_empty_error = RuntimeError
            skip_unsupported_by_torchs_client(request)
        self.make = lambda: PrefixStore("some/part", getattr(makers, request.param)())


class TestOurClientWithTorchsLegacyServer(OurContract):
    has_queues = False  # it closes the connection

    @pytest.fixture(autouse=True)
    def _kind(self, makers: Makers) -> None:
        self.make = makers.legacy

    def test_compare_set_wakes_waiting_clients(self) -> None:
        pytest.skip("torch's legacy server does not")


class TestTorchsClientWithOurServer(OurContract):
    error = timeout_error = queue_empty_error = RuntimeError  # torch's errors are

    @pytest.fixture(autouse=True)
    def _kind(self, makers: Makers, request: pytest.FixtureRequest) -> None:
        skip_unsupported_by_torchs_client(request)
        self.make = makers.torch
