"""One node's rendezvous: agreed at once, a new port for every generation, and the public names around it."""

from __future__ import annotations

import resource
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from tenax.core import events as fact
from tenax.core.model import Assignment
from tenax.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousHandlerRegistry,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
    rendezvous_handler_registry,
)
from tenax.rendezvous.local import LocalRendezvous, LocalRendezvousHandler
from tenax.rendezvous.port import free_port
from tenax.rendezvous.registry import get_rendezvous_handler


def params(backend: str = "local", endpoint: str = "", nodes: int = 1, **options: Any) -> RendezvousParameters:
    return RendezvousParameters(backend, endpoint, "run", nodes, nodes, **options)


# --- the engine -------------------------------------------------------------------------------------------------------


def joined(engine: LocalRendezvous, generation: int) -> Assignment:
    heard: list[fact.AnyEvent] = []
    engine.open(heard.append)
    engine.join(generation, 4, "trainer")
    (event,) = heard
    assert isinstance(event, fact.GenerationFormed)
    return event.assignment


def test_a_group_of_one_is_agreed_at_once() -> None:
    """All ranks are ours, from 0 on; the store is on this host."""
    part = joined(LocalRendezvous("run"), 3)
    assert (part.generation, part.group_rank, part.group_world_size) == (3, 0, 1)
    assert (part.first_global_rank, part.world_size, part.first_role_rank, part.role_world_size) == (0, 4, 0, 4)
    assert part.master_addr == "127.0.0.1"
    assert not part.use_agent_store


def test_every_generation_has_a_port_of_its_own() -> None:
    """Unless one was named."""
    engine = LocalRendezvous("run")
    assert len({joined(engine, generation).master_port for generation in range(1, 6)}) > 1
    named = LocalRendezvous("run", "host", 1234)
    assert {
        (joined(named, generation).master_addr, joined(named, generation).master_port) for generation in (1, 2)
    } == {("host", 1234)}


def test_a_host_without_a_free_port_refuses() -> None:
    """A reason instead of an exception: the run ends with a sentence."""
    heard: list[fact.AnyEvent] = []
    engine = LocalRendezvous("run")
    engine.open(heard.append)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        engine.join(1, 1, "trainer")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    (event,) = heard
    assert isinstance(event, fact.JoinRefused)
    assert event.reason.startswith("there is no free port for the workers' store: ")


# --- ports ------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/sys/net/ipv4/ip_local_port_range").exists(), reason="the range is not known here")
def test_a_port_that_no_outgoing_connection_is_given() -> None:
    """It is free, and outside the range from which the kernel serves those who do not care."""
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    for _ in range(20):
        port = free_port()
        assert not low <= port <= high or low <= 20000
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))


def test_a_port_of_ipv6() -> None:
    """The address decides the family."""
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    try:
        port = free_port("::1")
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    with socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", port))


# --- the handler ------------------------------------------------------------------------------------------------------


def test_the_handler_answers_as_documented() -> None:
    """One node, always ready, nobody waiting; closed means closed."""
    handler = LocalRendezvousHandler("run")
    assert (handler.get_backend(), handler.get_run_id(), handler.num_nodes_waiting()) == ("local", "run", 0)
    assert not handler.use_agent_store
    info = handler.next_rendezvous()
    assert (info.rank, info.world_size, info.store) == (0, 1, None)
    assert info.bootstrap_store_info.master_addr == "127.0.0.1"
    assert not handler.is_closed()
    handler.set_closed()
    assert handler.is_closed()
    with pytest.raises(RendezvousClosedError, match="'run' was closed"):
        handler.next_rendezvous()
    assert handler.shutdown() is True


@pytest.mark.parametrize("backend", ["local", "tcp", "c10d", "static", "etcd", "etcd-v2"])
def test_every_usual_name_means_one_node(backend: str) -> None:
    """Old command lines name a backend although there is only one node."""
    handler = get_rendezvous_handler(params(backend))
    assert handler.get_backend() == backend
    assert handler.next_rendezvous().world_size == 1


def test_more_nodes_are_refused_in_a_sentence() -> None:
    """Rather than run one of them alone."""
    with pytest.raises(ValueError, match="asked for up to 2 nodes, but this release of tenax runs one node"):
        get_rendezvous_handler(params("c10d", nodes=2))


@pytest.mark.parametrize(
    ("endpoint", "address"),
    [
        ("host:1234", ("host", 1234)),
        ("[::1]:1234", ("::1", 1234)),
        (":1234", ("127.0.0.1", 1234)),
        ("", ("127.0.0.1", 0)),
    ],
)
def test_a_static_endpoint_is_the_workers_address(endpoint: str, address: tuple[str, int]) -> None:
    """``--master-addr`` and ``--master-port`` come this way."""
    handler = get_rendezvous_handler(params("static", endpoint))
    assert isinstance(handler, LocalRendezvousHandler)
    assert (handler.master_addr, handler.master_port) == address


def test_the_local_address_is_where_workers_look() -> None:
    """``--local-addr``."""
    handler = get_rendezvous_handler(params(local_addr="10.0.0.7"))
    assert handler.next_rendezvous().bootstrap_store_info.master_addr == "10.0.0.7"


# --- names ------------------------------------------------------------------------------------------------------------


def test_errors_have_one_base() -> None:
    """Whoever catches RendezvousError catches them all."""
    errors = [
        RendezvousClosedError,
        RendezvousTimeoutError,
        RendezvousConnectionError,
        RendezvousStateError,
        RendezvousGracefulExitError,
    ]
    assert all(issubclass(error, RendezvousError) for error in errors)


class Store:
    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key]


def test_rank_zero_publishes_and_all_read() -> None:
    """RendezvousStoreInfo.build: the address is the same for everybody, whatever their own would be."""
    store = Store()
    first = RendezvousStoreInfo.build(0, store, "host-a", 4000)
    other = RendezvousStoreInfo.build(1, store, "host-b")
    assert first == other == RendezvousStoreInfo("host-a", 4000)
    assert store.values == {"MASTER_ADDR": b"host-a", "MASTER_PORT": b"4000"}
    assert RendezvousStoreInfo.build(0, Store(), "host-a").master_port > 0
    assert "host-a" in repr(first)


def test_an_info_cannot_be_changed() -> None:
    """Its parts are read, not written."""
    info = RendezvousInfo("store", 1, 2, RendezvousStoreInfo("host", 1))
    assert (info.store, info.rank, info.world_size, info.bootstrap_store_info.master_port) == ("store", 1, 2, 1)
    with pytest.raises(AttributeError):
        info.rank = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (("", "", "run", 1, 1), "has no name"),
        (("tcp", "", "run", 0, 1), "min_nodes is 0; expected at least 1"),
        (("tcp", "", "run", 2, 1), "max_nodes is 1; expected at least min_nodes"),
    ],
)
def test_parameters_that_cannot_be(given: tuple[Any, ...], sentence: str) -> None:
    """ValueError with a sentence."""
    with pytest.raises(ValueError, match=sentence):
        RendezvousParameters(*given)


def test_options_as_numbers_and_truths() -> None:
    """As they come from a command line: text."""
    given = params(timeout="30", yes="True", no="n", number=5, flag=False, odd="maybe")
    assert given.get_as_int("timeout") == 30
    assert given.get_as_int("number") == 5
    assert given.get_as_int("missing", 7) == 7
    assert given.get_as_int("missing") is None
    assert given.get_as_bool("yes") is True
    assert given.get_as_bool("no") is False
    assert given.get_as_bool("flag") is False
    assert given.get_as_bool("missing", True) is True
    assert given.get("odd") == "maybe"
    with pytest.raises(ValueError, match="'odd' is 'maybe'; expected yes or no"):
        given.get_as_bool("odd")
    with pytest.raises(ValueError, match="'odd' is 'maybe'; expected a whole number"):
        given.get_as_int("odd")


def create(given: RendezvousParameters) -> RendezvousHandler:
    return LocalRendezvousHandler(given.run_id, backend="mine")


def test_a_registry_of_ones_own() -> None:
    """Names are registered once; the same creator again is fine; a handler must know its own name."""
    registry = RendezvousHandlerRegistry()
    registry.register("mine", create)
    registry.register("mine", create)
    assert "mine" in registry
    with pytest.raises(ValueError, match="'mine' is registered already"):
        registry.register("mine", lambda given: create(given))
    with pytest.raises(ValueError, match="needs a name"):
        registry.register("", create)
    assert registry.create_handler(params("mine")).get_run_id() == "run"
    registry.register("other", create)
    with pytest.raises(RuntimeError, match="made for the backend 'other' calls itself 'mine'"):
        registry.create_handler(params("other"))
    with pytest.raises(ValueError, match="there is no rendezvous backend 'third'; known are mine, other"):
        registry.create_handler(params("third"))


def test_an_installed_package_may_bring_a_handler(tmp_path: Path) -> None:
    """The entry point group 'torchrun.handlers': a function without arguments that returns the creator."""
    (tmp_path / "their_package.py").write_text(
        "from tenax.rendezvous.local import LocalRendezvousHandler\n"
        "def creator():\n"
        "    return lambda given: LocalRendezvousHandler('from a package', backend='packaged')\n"
    )
    info = tmp_path / "their_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[torchrun.handlers]\npackaged = their_package:creator\n")
    sys.path.insert(0, str(tmp_path))
    try:
        handler = get_rendezvous_handler(params("packaged"))
    finally:
        sys.path.remove(str(tmp_path))
    assert handler.get_run_id() == "from a package"
    assert "packaged" in rendezvous_handler_registry
