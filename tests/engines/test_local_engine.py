"""One node's rendezvous: agreed at once, a new port for every generation, and the public names around it."""

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

from kit.processes import PATIENCE_S, leaving_nothing
from tenax._core import events, messages
from tenax._core.model import AgentSettings, Assignment, Failure, Outcome
from tenax._core.policy import AnyDecision, History, RestartPolicy, Wait
from tenax._engines.free_port import free_port
from tenax._engines.local import LocalEngine
from tenax._engines.store_address import StoreAddress
from tenax._io.interfaces import ControlledNode
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


class Seated:
    """A node and its engine, on a loop of their own."""

    def __init__(self, engine: LocalEngine, policy: RestartPolicy | None = None, **settings: Any) -> None:
        self.loop = Loop()
        self.engine = engine
        self.said: list[str] = []
        chosen = {"run_id": "run", "role": "trainer", "local_world_size": 4, "max_restarts": 1, **settings}
        node = ControlledNode(
            settings=AgentSettings(**chosen),
            policy=policy,
            messages_on_connecting=lambda _: [],
            hold=lambda _: None,
            keep=lambda *_: None,
            release=lambda _: None,
            print_line=self.said.append,
        )
        engine.open(self.loop, self.loop.post, node)

    def hear(self) -> events.AnyEvent:
        """The next event; everything here is answered at once."""
        event = self.loop.next_event(lambda: self.loop.now() + PATIENCE_S)
        assert event is not None, "nothing was heard"
        return event

    def join(self, last: int = 0) -> Assignment:
        self.engine.send(messages.NodeReady(last))
        event = self.hear()
        assert isinstance(event, events.GenerationFormed), event
        return event.assignment

    def fail(self, generation: int) -> None:
        failure = Failure(generation, 0, 0, 77, 3, self.loop.now())
        self.engine.send(messages.NodeStopped(generation, self.loop.now(), (failure,)))
        assert isinstance(self.hear(), events.GenerationEnded)

    def close(self) -> None:
        self.engine.close()
        self.loop.close()


@pytest.fixture
def seated() -> Iterator[Callable[..., Seated]]:
    made: list[Seated] = []

    def make(place: StoreAddress | None = None, **options: Any) -> Seated:
        made.append(Seated(LocalEngine("run", place), **options))
        return made[-1]

    with leaving_nothing():
        yield make
        for each in made:
            each.close()


def test_a_group_of_one_is_agreed_at_once(seated: Callable[..., Seated]) -> None:
    """All ranks are ours, from 0 on; the store is the agent's, on this host."""
    part = seated(StoreAddress("127.0.0.1")).join()
    assert (part.generation, part.group_rank, part.group_world_size, part.why) == (1, 0, 1, "first generation")
    assert (part.first_global_rank, part.world_size, part.first_role_rank, part.role_world_size) == (0, 4, 0, 4)
    assert (part.master_addr, part.use_agent_store, part.restarts_used) == ("127.0.0.1", True, 0)
    assert part.master_port > 0


def test_without_a_place_there_is_no_store(seated: Callable[..., Seated]) -> None:
    """For processes that nobody told of one."""
    part = seated().join()
    assert (part.master_addr, part.master_port, part.use_agent_store) == ("", 0, False)


def test_a_failure_is_answered_with_the_next_generation_while_restarts_are_left(seated: Callable[..., Seated]) -> None:
    """The coordinator in this process decides: a restart with its reason, then the end of the run with the cause."""
    made = seated(StoreAddress("127.0.0.1"), max_restarts=1)
    made.join()
    made.fail(1)
    part = made.join(1)
    assert (part.generation, part.restarts_used, part.why) == (2, 1, "restart 1 of 1")
    made.fail(2)
    made.engine.send(messages.NodeReady(2))
    ended = made.hear()
    assert isinstance(ended, events.RunEnded)
    assert (ended.verdict.outcome, ended.verdict.why) == (Outcome.FAILED, "the only restart is used")
    assert [(failure.generation, failure.host) for failure in ended.verdict.failures] == [(2, os.uname().nodename)]
    assert [failure.generation for failure in ended.verdict.earlier] == [1]


class SlowDown:
    def decide(self, failure: Failure, history: History) -> AnyDecision:
        return Wait("too hot", seconds=0.01)


def test_a_policy_of_the_users_own_is_asked_here(seated: Callable[..., Seated]) -> None:
    """Its pause is kept by the loop; the person hears why nothing happens."""
    made = seated(policy=SlowDown(), max_restarts=0)
    made.join()
    made.fail(1)
    made.engine.send(messages.NodeReady(1))
    assert made.hear() == events.Waiting("waiting 0.01 s before the restart: too hot")
    formed = made.hear()
    while isinstance(formed, events.Waiting):
        formed = made.hear()
    assert isinstance(formed, events.GenerationFormed)
    assert (formed.assignment.generation, formed.assignment.why) == (2, "too hot")


def test_success_ends_the_run(seated: Callable[..., Seated]) -> None:
    """And nobody has to be waited for."""
    made = seated()
    made.join()
    made.engine.send(messages.NodeSucceeded(1))
    ended = made.hear()
    assert isinstance(ended, events.RunEnded)
    assert (ended.verdict.outcome, ended.verdict.why) == (Outcome.SUCCEEDED, "all 4 workers succeeded")
    assert not made.engine.stays_for_others()


def test_a_host_without_a_free_port_refuses(seated: Callable[..., Seated]) -> None:
    """A reason instead of an exception: the run ends with a sentence."""
    made = seated(StoreAddress("127.0.0.1"))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        made.engine.send(messages.NodeReady(0))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    event = made.hear()
    assert event == events.JoinRefused("no port for the workers' store: Too many open files")


def test_a_port_that_somebody_has_is_refused(seated: Callable[..., Seated]) -> None:
    """A fixed port is the user's wish: another one would not be found by whoever was told of it."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        made = seated(StoreAddress("127.0.0.1", other.getsockname()[1]))
        made.engine.send(messages.NodeReady(0))
        event = made.hear()
        assert isinstance(event, events.JoinRefused)
        assert event.reason.startswith(
            f"port {other.getsockname()[1]} for the workers' store is in use on this host; choose another "
        )


# --- ports ------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/sys/net/ipv4/ip_local_port_range").exists(), reason="the range is not known here")
def test_a_port_that_no_outgoing_connection_is_given() -> None:
    """It is free, and outside the range from which the kernel serves those who do not care. Nor is it a known one."""
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    for _ in range(20):
        port = free_port()
        assert low <= 20000 or (not low <= port <= high and port < 29400)
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
    info = handler.next_rendezvous()
    assert (info.rank, info.world_size) == (0, 1)
    info.store.set("colour", b"blue")  # a store of its own: hooks may use it whatever the number of nodes
    assert info.store.get("colour") == b"blue"
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


@pytest.mark.parametrize("backend", ["tcp", "c10d", "etcd", "etcd-v2"])
def test_more_nodes_meet_through_an_engine(backend: str) -> None:
    """Whatever the name: for several nodes it is the same engine, or that of etcd."""
    handler = get_rendezvous_handler(params(backend, "localhost:29400", nodes=2))
    assert isinstance(handler, EngineRendezvousHandler)
    assert handler.get_backend() == backend


@pytest.mark.parametrize(
    ("backend", "options", "sentence"),
    [
        ("local", {}, "the rendezvous backend 'local' supports one node, not 2; use 'tcp'"),
        ("static", {}, "'static' needs a fixed number of nodes and the rank of each"),
    ],
)
def test_what_cannot_join_several_nodes_says_so(backend: str, options: dict[str, Any], sentence: str) -> None:
    """Rather than run one of them alone."""
    with pytest.raises(ValueError, match=re.escape(sentence)):
        get_rendezvous_handler(params(backend, "localhost:29400", nodes=2, **options))


def test_the_handlers_engine_hosts_the_store_where_the_spec_says(seated: Callable[..., Seated]) -> None:
    """A worker spec's address and port go before the handler's; without any it is this host's loopback."""
    with leaving_nothing():
        made = Seated(LocalRendezvousHandler("run", master_addr="::1").engine("127.0.0.1"))
        try:
            part = made.join()
            assert (part.master_addr, part.use_agent_store) == ("127.0.0.1", True)
        finally:
            made.close()


@pytest.mark.parametrize("given", [{"use_agent_store": "false"}, {"use_agent_store": False}])
def test_the_agents_store_can_be_declined(given: dict[str, Any]) -> None:
    """For scripts that bind the port themselves: --rdzv-conf use_agent_store=false."""
    handler = get_rendezvous_handler(params(**given))
    assert isinstance(handler, LocalRendezvousHandler)
    with leaving_nothing():
        made = Seated(handler.engine())
        try:
            part = made.join()
            assert not part.use_agent_store
            with socket.create_server(("127.0.0.1", part.master_port)):
                pass  # nobody holds it
        finally:
            made.close()


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
        (("", "", "run", 1, 1), "the name of the rendezvous backend is empty"),
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


def test_an_installed_package_may_bring_a_handler(tmp_path: Path) -> None:
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


def test_a_broken_package_harms_only_those_who_ask_for_it(tmp_path: Path) -> None:
    """TorchElastic loads all of them and logs what fails; here the reason is said when its name is used."""
    info = tmp_path / "broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    points = "broken = no_such_module:creator\nc10d = no_such_module:creator\n"
    (info / "entry_points.txt").write_text(f"[torchrun.handlers]\n{points}")
    sys.path.insert(0, str(tmp_path))
    try:
        assert get_rendezvous_handler(params("c10d")).get_backend() == "c10d", "our names are ours"
        with pytest.raises(ValueError, match="cannot load the rendezvous backend 'broken' from 'no_such_module"):
            get_rendezvous_handler(params("broken"))
        with pytest.raises(ValueError, match="unknown rendezvous backend 'nobody'"):
            get_rendezvous_handler(params("nobody"))
    finally:
        sys.path.remove(str(tmp_path))
