"""The rendezvous of one node: immediate, with a new port for every generation; and the public rendezvous names."""

from __future__ import annotations

import os
import re
import resource
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kit.fake_node import fake_node
from kit.processes import TIMEOUT_S, leaving_nothing
from tenax._core import events, messages
from tenax._core.model import AgentSettings, Assignment, Failure, Outcome
from tenax._core.policy import AnyDecision, History, RestartPolicy, Wait
from tenax._engines.free_port import free_port
from tenax._engines.local import LocalEngine
from tenax._engines.store_address import StoreAddress
from tenax._io.loop import Loop
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
from tenax.rendezvous._engine_handler import EngineRendezvousHandler, LocalRendezvousHandler
from tenax.rendezvous.registry import get_rendezvous_handler


def params(backend: str = "local", endpoint: str = "", nodes: int = 1, **options: Any) -> RendezvousParameters:
    return RendezvousParameters(backend, endpoint, "run", nodes, nodes, **options)


# --- the engine -------------------------------------------------------------------------------------------------------


class EngineHarness:
    """A node and its engine, on their own loop."""

    def __init__(self, engine: LocalEngine, policy: RestartPolicy | None = None, **settings: Any) -> None:
        self.loop = Loop()
        self.engine = engine
        self.printed: list[str] = []
        chosen = {"run_id": "run", "role": "trainer", "local_world_size": 4, "max_restarts": 1, **settings}
        node = fake_node(AgentSettings(**chosen), policy=policy, print_line=self.printed.append)
        engine.open(self.loop, self.loop.post, node)

    def next_event(self) -> events.AnyEvent:
        """Return the next event."""
        event = self.loop.next_event(lambda: self.loop.now() + TIMEOUT_S)
        assert event is not None, "no event"
        return event

    def join(self, last: int = 0) -> Assignment:
        self.engine.send(messages.NodeReady(last))
        event = self.next_event()
        assert isinstance(event, events.GenerationFormed), event
        return event.assignment

    def fail(self, generation: int) -> None:
        failure = Failure(generation, 0, 0, 77, 3, self.loop.now())
        self.engine.send(messages.NodeStopped(generation, self.loop.now(), (failure,)))
        assert isinstance(self.next_event(), events.GenerationEnded)

    def close(self) -> None:
        self.engine.close()
        self.loop.close()


@pytest.fixture
def make_harness() -> Iterator[Callable[..., EngineHarness]]:
    made: list[EngineHarness] = []

    def make(store_address: StoreAddress | None = None, **options: Any) -> EngineHarness:
        made.append(EngineHarness(LocalEngine("run", store_address), **options))
        return made[-1]

    with leaving_nothing():
        yield make
        for each in made:
            each.close()


def test_a_single_node_gets_its_assignment_at_once(make_harness: Callable[..., EngineHarness]) -> None:
    """It has all ranks from 0 on, and the agent hosts the store."""
    part = make_harness(StoreAddress("127.0.0.1")).join()
    assert (part.generation, part.group_rank, part.group_world_size, part.why) == (1, 0, 1, "first generation")
    assert (part.first_global_rank, part.world_size, part.first_role_rank, part.role_world_size) == (0, 4, 0, 4)
    assert (part.master_addr, part.use_agent_store, part.restarts_used) == ("127.0.0.1", True, 0)
    assert part.master_port > 0


def test_without_a_store_address_there_is_no_store(make_harness: Callable[..., EngineHarness]) -> None:
    part = make_harness().join()
    assert (part.master_addr, part.master_port, part.use_agent_store) == ("", 0, False)


def test_a_failure_starts_the_next_generation_while_restarts_are_left(
    make_harness: Callable[..., EngineHarness],
) -> None:
    """The coordinator in this process decides: first a restart with its reason, then the end of the run."""
    harness = make_harness(StoreAddress("127.0.0.1"), max_restarts=1)
    harness.join()
    harness.fail(1)
    part = harness.join(1)
    assert (part.generation, part.restarts_used, part.why) == (2, 1, "restart 1 of 1")
    harness.fail(2)
    harness.engine.send(messages.NodeReady(2))
    ended = harness.next_event()
    assert isinstance(ended, events.RunEnded)
    assert (ended.verdict.outcome, ended.verdict.why) == (Outcome.FAILED, "the only restart is used")
    assert [(failure.generation, failure.host) for failure in ended.verdict.failures] == [(2, os.uname().nodename)]
    assert [failure.generation for failure in ended.verdict.earlier] == [1]


class SlowDown:
    def decide(self, failure: Failure, history: History) -> AnyDecision:
        return Wait("too hot", seconds=0.01)


def test_a_custom_restart_policy_is_used(make_harness: Callable[..., EngineHarness]) -> None:
    """The loop waits as it decides, and the reason is reported."""
    harness = make_harness(policy=SlowDown(), max_restarts=0)
    harness.join()
    harness.fail(1)
    harness.engine.send(messages.NodeReady(1))
    assert harness.next_event() == events.Waiting("waiting 0.01 s before the restart: too hot")
    formed = harness.next_event()
    while isinstance(formed, events.Waiting):
        formed = harness.next_event()
    assert isinstance(formed, events.GenerationFormed)
    assert (formed.assignment.generation, formed.assignment.why) == (2, "too hot")


def test_success_ends_the_run(make_harness: Callable[..., EngineHarness]) -> None:
    harness = make_harness()
    harness.join()
    harness.engine.send(messages.NodeSucceeded(1))
    ended = harness.next_event()
    assert isinstance(ended, events.RunEnded)
    assert (ended.verdict.outcome, ended.verdict.why) == (Outcome.SUCCEEDED, "all 4 workers succeeded")
    assert not harness.engine.stays_for_others()


def test_a_host_without_a_free_port_refuses_to_join(make_harness: Callable[..., EngineHarness]) -> None:
    """With a reason instead of an exception."""
    harness = make_harness(StoreAddress("127.0.0.1"))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        harness.engine.send(messages.NodeReady(0))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    event = harness.next_event()
    assert event == events.JoinRefused("no port for the workers' store: Too many open files")


def test_a_fixed_port_that_is_in_use_is_refused(make_harness: Callable[..., EngineHarness]) -> None:
    """Another port would not be found by processes that expect this one."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        harness = make_harness(StoreAddress("127.0.0.1", other.getsockname()[1]))
        harness.engine.send(messages.NodeReady(0))
        event = harness.next_event()
        assert isinstance(event, events.JoinRefused)
        assert event.reason.startswith(
            f"port {other.getsockname()[1]} for the workers' store is in use on this host; choose another "
        )


# --- ports ------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(
    not Path("/proc/sys/net/ipv4/ip_local_port_range").exists(), reason="the port range is unknown here"
)
def test_a_free_port_is_outside_the_ephemeral_range() -> None:
    """So the kernel does not assign it to an outgoing connection. Nor is it a well-known one."""
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    for _ in range(20):
        port = free_port()
        assert low <= 20000 or (not low <= port <= high and port < 29400)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))


def test_a_free_port_for_an_ipv6_address() -> None:
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


def test_the_local_handler_behaves_as_documented() -> None:
    """One node, no waiting nodes; a closed handler raises."""
    handler = LocalRendezvousHandler("run")
    assert (handler.get_backend(), handler.get_run_id(), handler.num_nodes_waiting()) == ("local", "run", 0)
    info = handler.next_rendezvous()
    assert (info.rank, info.world_size) == (0, 1)
    info.store.set("colour", b"blue")  # hooks may use the store with any number of nodes
    assert info.store.get("colour") == b"blue"
    assert info.bootstrap_store_info.master_addr == "127.0.0.1"
    assert not handler.is_closed()
    handler.set_closed()
    assert handler.is_closed()
    with pytest.raises(RendezvousClosedError, match="'run' was closed"):
        handler.next_rendezvous()
    assert handler.shutdown() is True


@pytest.mark.parametrize("backend", ["local", "tcp", "c10d", "static", "etcd", "etcd-v2"])
def test_every_backend_name_works_for_one_node(backend: str) -> None:
    """Old command lines name a backend although there is one node."""
    handler = get_rendezvous_handler(params(backend))
    assert handler.get_backend() == backend
    assert handler.next_rendezvous().world_size == 1


@pytest.mark.parametrize("backend", ["tcp", "c10d", "etcd", "etcd-v2"])
def test_several_nodes_use_an_engine(backend: str) -> None:
    """With any of these names it is the tcp engine or the etcd engine."""
    handler = get_rendezvous_handler(params(backend, "localhost:29400", nodes=2))
    assert isinstance(handler, EngineRendezvousHandler)
    assert handler.get_backend() == backend


@pytest.mark.parametrize(
    ("backend", "options", "message"),
    [
        ("local", {}, "the rendezvous backend 'local' supports one node, not 2; use 'tcp'"),
        ("static", {}, "'static' needs a fixed number of nodes and the rank of each"),
    ],
)
def test_a_backend_that_cannot_join_several_nodes_is_rejected(
    backend: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        get_rendezvous_handler(params(backend, "localhost:29400", nodes=2, **options))


def test_the_worker_specs_store_address_overrides_the_handlers(make_harness: Callable[..., EngineHarness]) -> None:
    """The default is the loopback address."""
    with leaving_nothing():
        harness = EngineHarness(LocalRendezvousHandler("run", master_addr="::1").engine("127.0.0.1"))
        try:
            part = harness.join()
            assert (part.master_addr, part.use_agent_store) == ("127.0.0.1", True)
        finally:
            harness.close()


@pytest.mark.parametrize("given", [{"use_agent_store": "false"}, {"use_agent_store": False}])
def test_the_agents_store_can_be_disabled(given: dict[str, Any]) -> None:
    """For scripts that bind the port themselves: --rdzv-conf use_agent_store=false."""
    handler = get_rendezvous_handler(params(**given))
    assert isinstance(handler, LocalRendezvousHandler)
    with leaving_nothing():
        harness = EngineHarness(handler.engine())
        try:
            part = harness.join()
            assert not part.use_agent_store
            with socket.create_server(("127.0.0.1", part.master_port)):
                pass  # it is free
        finally:
            harness.close()


@pytest.mark.parametrize(
    ("endpoint", "address"),
    [
        ("host:1234", ("host", 1234)),
        ("[::1]:1234", ("::1", 1234)),
        (":1234", ("127.0.0.1", 1234)),
        ("", ("127.0.0.1", 0)),
    ],
)
def test_a_static_endpoint_is_the_address_of_the_workers_store(endpoint: str, address: tuple[str, int]) -> None:
    """``--master-addr`` and ``--master-port`` come this way."""
    handler = get_rendezvous_handler(params("static", endpoint))
    assert isinstance(handler, LocalRendezvousHandler)
    assert (handler.master_addr, handler.master_port) == address


def test_the_local_address_is_the_address_of_the_workers_store() -> None:
    """``--local-addr``."""
    handler = get_rendezvous_handler(params(local_addr="10.0.0.7"))
    assert handler.next_rendezvous().bootstrap_store_info.master_addr == "10.0.0.7"


# --- names ------------------------------------------------------------------------------------------------------------


def test_all_rendezvous_errors_have_one_base_class() -> None:
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


def test_rank_0_publishes_the_store_address_and_all_read_it() -> None:
    """RendezvousStoreInfo.build returns the same address on every node."""
    store = Store()
    first = RendezvousStoreInfo.build(0, store, "host-a", 4000)
    other = RendezvousStoreInfo.build(1, store, "host-b")
    assert first == other == RendezvousStoreInfo("host-a", 4000)
    assert store.values == {"MASTER_ADDR": b"host-a", "MASTER_PORT": b"4000"}
    assert RendezvousStoreInfo.build(0, Store(), "host-a").master_port > 0
    assert "host-a" in repr(first)


def test_a_rendezvous_info_is_read_only() -> None:
    info = RendezvousInfo("store", 1, 2, RendezvousStoreInfo("host", 1))
    assert (info.store, info.rank, info.world_size, info.bootstrap_store_info.master_port) == ("store", 1, 2, 1)
    with pytest.raises(AttributeError):
        info.rank = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("", "", "run", 1, 1), "the name of the rendezvous backend is empty"),
        (("tcp", "", "run", 0, 1), "min_nodes is 0; expected at least 1"),
        (("tcp", "", "run", 2, 1), "max_nodes is 1; expected at least min_nodes"),
    ],
)
def test_invalid_rendezvous_parameters_are_rejected(given: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RendezvousParameters(*given)


def test_options_are_converted_to_numbers_and_booleans() -> None:
    """From text, as on a command line."""
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


def test_a_registry_creates_registered_handlers() -> None:
    """A name can be registered once, or again with the same creator; a handler must return its registered name."""
    registry = RendezvousHandlerRegistry()
    registry.register("mine", create)
    registry.register("mine", create)
    assert "mine" in registry
    with pytest.raises(ValueError, match="'mine' is already registered"):
        registry.register("mine", lambda given: create(given))
    with pytest.raises(ValueError, match="needs a name"):
        registry.register("", create)
    assert registry.create_handler(params("mine")).get_run_id() == "run"
    registry.register("other", create)
    with pytest.raises(RuntimeError, match="handler for the rendezvous backend 'other' returned 'mine'"):
        registry.create_handler(params("other"))
    with pytest.raises(ValueError, match="unknown rendezvous backend 'third'; known backends: mine, other"):
        registry.create_handler(params("third"))


def test_an_installed_package_can_provide_a_handler(tmp_path: Path) -> None:
    """The entry point group 'torchrun.handlers': a function without arguments that returns the creator."""
    (tmp_path / "their_package.py").write_text(
        "from tenax.rendezvous._engine_handler import LocalRendezvousHandler\n"
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


def test_a_broken_entry_point_fails_only_when_its_backend_is_used(tmp_path: Path) -> None:
    """TorchElastic loads all entry points and logs failures; here the error is raised when the name is used."""
    info = tmp_path / "broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    points = "broken = no_such_module:creator\nc10d = no_such_module:creator\n"
    (info / "entry_points.txt").write_text(f"[torchrun.handlers]\n{points}")
    sys.path.insert(0, str(tmp_path))
    try:
        assert get_rendezvous_handler(params("c10d")).get_backend() == "c10d", "built-in names cannot be replaced"
        with pytest.raises(ValueError, match="cannot load the rendezvous backend 'broken' from 'no_such_module"):
            get_rendezvous_handler(params("broken"))
        with pytest.raises(ValueError, match="unknown rendezvous backend 'unknown'"):
            get_rendezvous_handler(params("unknown"))
    finally:
        sys.path.remove(str(tmp_path))
