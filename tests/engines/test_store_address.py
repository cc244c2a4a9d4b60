"""``StoreAddress``: a bound port with every offer, a new store for every generation."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest

from kit.processes import TIMEOUT_S, children, gone, leaving_nothing, on_linux
from tenax._core.events import Tick
from tenax._core.messages import NodeReady
from tenax._core.model import Assignment
from tenax._engines.free_port import free_port
from tenax._engines.store_address import StoreAddress, store_allow
from tenax._io.loop import Loop
from tenax.rendezvous.api import RendezvousParameters
from tenax.store import StoreConnectionError, StoreTimeoutError, TCPStore

pytestmark = on_linux

T = TypeVar("T")


class Harness:
    """A store address on a loop. ``in_thread`` runs a blocking call in a thread while the loop serves."""

    def __init__(self, store_address: StoreAddress) -> None:
        self.store_address = store_address
        self.loop = Loop()
        self.printed: list[str] = []
        self.stores: list[TCPStore] = []
        store_address.open(self.loop, self.printed.append)

    def offer(self) -> NodeReady:
        return self.store_address.offer(NodeReady(0))

    def serve(self, generation: int, group_rank: int = 0) -> int:
        """Offer an address, form a generation with this group rank, and return the port."""
        port = self.offer().store_port
        self.form(generation, port, group_rank)
        return port

    def form(self, generation: int, port: int, group_rank: int = 0) -> None:
        self.store_address.serve(Assignment(generation, group_rank, 2, master_port=port))

    def in_thread(self, what: Callable[[], T]) -> T:
        results: list[Any] = []

        def run() -> None:
            try:
                results.append(what())
            except BaseException as error:
                results.append(error)
            self.loop.soon(lambda: self.loop.post(Tick()))

        thread = threading.Thread(target=run)
        thread.start()
        assert self.loop.next_event(lambda: self.loop.now() + TIMEOUT_S) is not None, "timed out"
        thread.join()
        (result,) = results
        if isinstance(result, BaseException):
            raise result
        return result  # type: ignore[no-any-return]

    def connect(self, port: int, host: str = "127.0.0.1") -> TCPStore:
        store = self.in_thread(lambda: TCPStore(host, port, timeout=TIMEOUT_S))
        self.stores.append(store)
        return store

    def close(self) -> None:
        for store in self.stores:
            store.close()
        self.store_address.close()
        self.loop.close()


@pytest.fixture
def make_harness() -> Iterator[Callable[..., Harness]]:
    made: list[Harness] = []

    def make(addr: str = "127.0.0.1", *arguments: Any, **options: Any) -> Harness:
        made.append(Harness(StoreAddress(addr, *arguments, **options)))
        return made[-1]

    with leaving_nothing():
        yield make
        for each in made:
            each.close()


def refused(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def test_an_offered_port_is_already_bound(make_harness: Callable[..., Harness]) -> None:
    """No other process can take it while the nodes gather. The rest of the message is unchanged."""
    harness = make_harness()
    ready = harness.store_address.offer(NodeReady(7))
    assert (ready.generation, ready.store_addr, ready.is_agent_store) == (7, "127.0.0.1", True)
    with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
        other.bind(("127.0.0.1", ready.store_port))


def test_no_store_process_starts_without_a_client(make_harness: Callable[..., Harness]) -> None:
    """A job that does not use the store costs one socket."""
    before = children()
    harness = make_harness()
    for generation in (1, 2, 3):
        harness.serve(generation)
        assert harness.loop.next_event(harness.loop.now) is None
    assert children() == before


@pytest.mark.process
def test_every_generation_has_its_own_port_and_keys(make_harness: Callable[..., Harness]) -> None:
    """The old store works until the next generation is formed; then it is gone with its keys."""
    harness = make_harness()
    first = harness.serve(1)
    old = harness.connect(first)
    harness.in_thread(lambda: old.set("key", b"of generation 1"))
    second = harness.offer().store_port
    assert second != first
    assert harness.in_thread(lambda: old.get("key")) == b"of generation 1", "workers that are stopping may still use it"
    harness.form(2, second)
    assert refused(first)
    new = harness.connect(second)
    assert harness.in_thread(lambda: new.check(["key"])) is False
    with pytest.raises(StoreConnectionError):
        harness.in_thread(lambda: old.get("key"))
    assert harness.printed == []


@pytest.mark.process
def test_a_fixed_port_is_used_in_every_generation(make_harness: Callable[..., Harness]) -> None:
    """Although clients of the previous store are still connected. The keys are new."""
    harness = make_harness("127.0.0.1", port := free_port())
    for generation in range(1, 5):
        assert harness.serve(generation) == port
        store = harness.connect(port)
        assert harness.in_thread(lambda store=store: store.check(["key"])) is False
        harness.in_thread(lambda store=store: store.set("key", b"value"))
    assert harness.printed == []


@pytest.mark.process
def test_an_earlier_offer_stays_valid(make_harness: Callable[..., Harness]) -> None:
    """A node that reconnects offers again; the coordinator may have sent the first offer to the others."""
    harness = make_harness()
    offers = [harness.offer().store_port for _ in range(3)]
    assert len(set(offers)) == 3
    harness.form(1, offers[0])
    harness.connect(offers[0])
    assert refused(offers[1]), "these were not used"
    assert refused(offers[2])


def test_the_use_of_an_expired_offer_is_reported_as_a_lost_store(make_harness: Callable[..., Harness]) -> None:
    """The number of bound ports is bounded."""
    harness = make_harness()
    first, *_ = [harness.offer().store_port for _ in range(20)]
    assert refused(first)
    harness.form(1, first)
    assert harness.printed == [f"the workers' store was lost: port {first} is no longer bound"]


@pytest.mark.process
def test_a_fixed_port_can_be_offered_again(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness("127.0.0.1", port := free_port())
    assert [harness.offer().store_port for _ in range(3)] == [port] * 3
    harness.form(1, port)
    harness.connect(port)


@pytest.mark.process
def test_one_process_serves_all_generations(make_harness: Callable[..., Harness]) -> None:
    """So a restart does not wait for a process to start. Closing ends it."""
    before = children()
    harness = make_harness()
    pids = set()
    for generation in (1, 2, 3):
        harness.connect(harness.serve(generation))
        pids |= children() - before
    (pid,) = pids
    harness.store_address.close()
    assert gone([pid], 0)


@pytest.mark.process
def test_a_node_without_rank_0_serves_no_store(make_harness: Callable[..., Harness]) -> None:
    """Its store of the previous generation ends too."""
    harness = make_harness()
    first = harness.serve(1)
    harness.connect(first)
    harness.serve(2, group_rank=1)
    assert refused(first)


@pytest.mark.process
def test_a_lost_store_is_reported_and_replaced(make_harness: Callable[..., Harness]) -> None:
    """The console shows why workers fail; the next generation has a new process."""
    before = children()
    harness = make_harness()
    harness.connect(harness.serve(1))
    (pid,) = children() - before
    os.kill(pid, signal.SIGKILL)
    assert gone([pid])
    give_up_at = harness.loop.now() + TIMEOUT_S
    assert harness.loop.next_event(lambda: harness.loop.now() if harness.printed else give_up_at) is None
    assert harness.printed == ["the workers' store was lost: its process was killed by SIGKILL"]
    store = harness.connect(harness.serve(2))
    harness.in_thread(lambda: store.set("key", b"value"))


def test_a_worker_can_host_the_store(make_harness: Callable[..., Harness]) -> None:
    """Then a free port is picked but not bound, and no process is started."""
    before = children()
    harness = make_harness(in_agent=False)
    ready = harness.offer()
    assert not ready.is_agent_store
    harness.form(1, ready.store_port)
    with socket.create_server(("127.0.0.1", ready.store_port)):
        pass
    assert len({harness.offer().store_port for _ in range(8)}) > 1
    assert children() == before


def test_a_worker_hosts_the_store_at_the_fixed_port(make_harness: Callable[..., Harness]) -> None:
    """The port is passed on without a check, because the worker binds it."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert make_harness("10.1.2.3", port, in_agent=False).offer() == NodeReady(0, "10.1.2.3", port, False)


@pytest.mark.process
@pytest.mark.parametrize("addr", ["127.0.0.1", "localhost"])
def test_a_loopback_store_listens_on_loopback_only(make_harness: Callable[..., Harness], addr: str) -> None:
    harness = make_harness(addr)
    ready = harness.offer()
    assert ready.store_addr == addr
    with socket.socket() as other:
        other.bind(("127.0.0.2", ready.store_port))  # so it does not listen on all addresses
    harness.form(1, ready.store_port)
    harness.connect(ready.store_port, addr)


@pytest.mark.process
def test_a_store_at_another_address_listens_on_all_addresses(make_harness: Callable[..., Harness]) -> None:
    """Behind NAT, the address that others use may not be one of this host's."""
    harness = make_harness("some-name.example")
    ready = harness.offer()
    assert ready.store_addr == "some-name.example"
    harness.form(1, ready.store_port)
    harness.connect(ready.store_port, "127.0.0.2")


@pytest.mark.process
def test_the_listening_address_can_differ_from_the_announced_one(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness("some-name.example", bind_to="127.0.0.2")
    ready = harness.offer()
    harness.form(1, ready.store_port)
    harness.connect(ready.store_port, "127.0.0.2")
    assert refused(ready.store_port)


@pytest.mark.process
def test_clients_get_an_error_when_the_store_is_closed(make_harness: Callable[..., Harness]) -> None:
    """They do not wait for a key forever."""
    harness = make_harness()
    store = harness.connect(harness.serve(1))
    harness.store_address.close()
    harness.store_address.close()
    with pytest.raises((StoreConnectionError, StoreTimeoutError)):
        store.get("key")


def test_an_offer_announces_the_addresses_of_this_host(make_harness: Callable[..., Harness]) -> None:
    """So that the node with rank 0 accepts connections of this node's workers."""
    assert make_harness().store_address.offer(NodeReady(0), ("10.1.2.3",)).addresses == ("10.1.2.3",)


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (None, ()),
        ("", ()),
        ("any", ("any",)),
        ("10.1.2.3+fd00::/8 + 192.168.0.1/16", ("10.1.2.3", "fd00::/8", "192.168.0.1/16")),
        (["10.1.2.3", "any"], ("10.1.2.3", "any")),
    ],
)
def test_store_allow_takes_addresses_and_networks(value: object, names: tuple[str, ...]) -> None:
    """Joined by + on the command line, where a comma separates options; as a list in Python."""
    assert store_allow(RendezvousParameters("tcp", "", "run", 1, 1, store_allow=value)) == names


@pytest.mark.parametrize("value", ["all", "10.1.2", "10.1.2.3,any", "host0", "10.0.0.0/33", "+"])
def test_an_invalid_store_allow_is_rejected_with_the_expected_form(value: str) -> None:
    """Before anything starts. Names are not resolved."""
    with pytest.raises(ValueError, match=r"'store_allow' is .* expected 'any', or addresses and networks joined by"):
        store_allow(RendezvousParameters("tcp", "", "run", 1, 1, store_allow=value))
