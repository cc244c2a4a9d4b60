"""The store's place: an address with every offer, a port that nobody can take, a store that ends in time."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest

from kit.processes import PATIENCE_S, children, gone, leaving_nothing, on_linux
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


class Housed:
    """A place on a loop. ``beside`` does what blocks in a thread, while the loop serves."""

    def __init__(self, place: StoreAddress) -> None:
        self.place = place
        self.loop = Loop()
        self.said: list[str] = []
        self.stores: list[TCPStore] = []
        place.open(self.loop, self.said.append)

    def offer(self) -> NodeReady:
        return self.place.offer(NodeReady(0))

    def serve(self, generation: int, group_rank: int = 0) -> int:
        """One generation: offer, and hold this rank in it. The port."""
        port = self.offer().store_port
        self.form(generation, port, group_rank)
        return port

    def form(self, generation: int, port: int, group_rank: int = 0) -> None:
        self.place.serve(Assignment(generation, group_rank, 2, master_port=port))

    def beside(self, what: Callable[[], T]) -> T:
        results: list[Any] = []

        def run() -> None:
            try:
                results.append(what())
            except BaseException as error:
                results.append(error)
            self.loop.post_from_anywhere(Tick())

        thread = threading.Thread(target=run)
        thread.start()
        assert self.loop.next_event(lambda: self.loop.now() + PATIENCE_S) is not None, "it takes too long"
        thread.join()
        (result,) = results
        if isinstance(result, BaseException):
            raise result
        return result  # type: ignore[no-any-return]

    def connect(self, port: int, host: str = "127.0.0.1") -> TCPStore:
        store = self.beside(lambda: TCPStore(host, port, timeout=PATIENCE_S))
        self.stores.append(store)
        return store

    def close(self) -> None:
        for store in self.stores:
            store.close()
        self.place.close()
        self.loop.close()


@pytest.fixture
def housed() -> Iterator[Callable[..., Housed]]:
    made: list[Housed] = []

    def make(addr: str = "127.0.0.1", *words: Any, **options: Any) -> Housed:
        made.append(Housed(StoreAddress(addr, *words, **options)))
        return made[-1]

    with leaving_nothing():
        yield make
        for each in made:
            each.close()


def refused(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def test_an_offer_is_an_address_that_is_ours_already(housed: Callable[..., Housed]) -> None:
    """The port is bound while the nodes still gather: nobody else can take it. What was said else stays."""
    made = housed()
    ready = made.place.offer(NodeReady(7))
    assert (ready.generation, ready.store_addr, ready.is_agent_store) == (7, "127.0.0.1", True)
    with socket.socket() as thief, pytest.raises(OSError, match="Address already in use"):
        thief.bind(("127.0.0.1", ready.store_port))


def test_nobody_connects_no_process(housed: Callable[..., Housed]) -> None:
    """A job that does not use the store pays for one socket."""
    before = children()
    made = housed()
    for generation in (1, 2, 3):
        made.serve(generation)
        assert made.loop.next_event(made.loop.now) is None
    assert children() == before


@pytest.mark.process
def test_every_generation_has_a_port_and_keys_of_its_own(housed: Callable[..., Housed]) -> None:
    """The old store works until the next generation is formed, and is gone then; its keys are nobody's."""
    made = housed()
    first = made.serve(1)
    old = made.connect(first)
    made.beside(lambda: old.set("key", b"of generation 1"))
    second = made.offer().store_port
    assert second != first
    assert made.beside(lambda: old.get("key")) == b"of generation 1", "who still ends may still use it"
    made.form(2, second)
    assert refused(first)
    new = made.connect(second)
    assert made.beside(lambda: new.check(["key"])) is False
    with pytest.raises(StoreConnectionError):
        made.beside(lambda: old.get("key"))
    assert made.said == []


@pytest.mark.process
def test_a_port_that_was_named_is_the_same_for_every_generation(housed: Callable[..., Housed]) -> None:
    """Although the one before had clients that are still connected; the keys are new all the same."""
    made = housed("127.0.0.1", port := free_port())
    for generation in range(1, 5):
        assert made.serve(generation) == port
        store = made.connect(port)
        assert made.beside(lambda store=store: store.check(["key"])) is False
        made.beside(lambda store=store: store.set("key", b"value"))
    assert made.said == []


@pytest.mark.process
def test_an_earlier_offer_stands(housed: Callable[..., Housed]) -> None:
    """A node that was linked anew offers again; the coordinator may have told the others of the first offer."""
    made = housed()
    offers = [made.offer().store_port for _ in range(3)]
    assert len(set(offers)) == 3
    made.form(1, offers[0])
    made.connect(offers[0])
    assert refused(offers[1]), "nobody was told of these"
    assert refused(offers[2])


def test_an_offer_that_is_too_old_is_told_as_a_loss(housed: Callable[..., Housed]) -> None:
    """A node that offered very often does not hold ports without end."""
    made = housed()
    first, *_ = [made.offer().store_port for _ in range(20)]
    assert refused(first)
    made.form(1, first)
    assert made.said == [f"the workers' store was lost: port {first} is no longer bound"]


@pytest.mark.process
def test_a_port_that_was_named_may_be_offered_again(housed: Callable[..., Housed]) -> None:
    made = housed("127.0.0.1", port := free_port())
    assert [made.offer().store_port for _ in range(3)] == [port] * 3
    made.form(1, port)
    made.connect(port)


@pytest.mark.process
def test_one_process_serves_one_generation_after_the_other(housed: Callable[..., Housed]) -> None:
    """A restart does not wait for another one to start; closing ends it."""
    before = children()
    made = housed()
    pids = set()
    for generation in (1, 2, 3):
        made.connect(made.serve(generation))
        pids |= children() - before
    (pid,) = pids
    made.place.close()
    assert gone([pid], 0)


@pytest.mark.process
def test_who_does_not_hold_rank_zero_serves_nobody(housed: Callable[..., Housed]) -> None:
    """Its own store of the generation before ends too."""
    made = housed()
    first = made.serve(1)
    made.connect(first)
    made.serve(2, group_rank=1)
    assert refused(first)


@pytest.mark.process
def test_a_store_that_is_lost_is_told_in_words_and_replaced(housed: Callable[..., Housed]) -> None:
    """The person at the console learns why workers fail; the next generation has a new process."""
    before = children()
    made = housed()
    made.connect(made.serve(1))
    (pid,) = children() - before
    os.kill(pid, signal.SIGKILL)
    assert gone([pid])
    give_up_at = made.loop.now() + PATIENCE_S
    assert made.loop.next_event(lambda: made.loop.now() if made.said else give_up_at) is None
    assert made.said == ["the workers' store was lost: its process was killed by SIGKILL"]
    store = made.connect(made.serve(2))
    made.beside(lambda: store.set("key", b"value"))


def test_a_worker_may_host_the_store_itself(housed: Callable[..., Housed]) -> None:
    """Then a port is only looked for: whoever binds it gets it, and nothing runs here."""
    before = children()
    made = housed(in_agent=False)
    ready = made.offer()
    assert not ready.is_agent_store
    made.form(1, ready.store_port)
    with socket.create_server(("127.0.0.1", ready.store_port)):
        pass
    assert len({made.offer().store_port for _ in range(8)}) > 1
    assert children() == before


def test_a_worker_hosts_it_at_the_port_that_was_named(housed: Callable[..., Housed]) -> None:
    """It is passed on as it is, also while somebody else still has it: that is the worker's business."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert housed("10.1.2.3", port, in_agent=False).offer() == NodeReady(0, "10.1.2.3", port, False)


@pytest.mark.process
@pytest.mark.parametrize("addr", ["127.0.0.1", "localhost"])
def test_a_loopback_address_is_open_to_this_host_only(housed: Callable[..., Housed], addr: str) -> None:
    """Nobody else could use it anyway."""
    made = housed(addr)
    ready = made.offer()
    assert ready.store_addr == addr
    with socket.socket() as other:
        other.bind(("127.0.0.2", ready.store_port))  # so it does not listen everywhere
    made.form(1, ready.store_port)
    made.connect(ready.store_port, addr)


@pytest.mark.process
def test_any_other_address_is_announced_and_listened_at_everywhere(housed: Callable[..., Housed]) -> None:
    """A name or an address that others see may not be one that this host has, behind a translation."""
    made = housed("some-name.example")
    ready = made.offer()
    assert ready.store_addr == "some-name.example"
    made.form(1, ready.store_port)
    made.connect(ready.store_port, "127.0.0.2")


@pytest.mark.process
def test_the_address_to_listen_at_can_be_another(housed: Callable[..., Housed]) -> None:
    """Announced is one, bound is the other."""
    made = housed("some-name.example", bind_to="127.0.0.2")
    ready = made.offer()
    made.form(1, ready.store_port)
    made.connect(ready.store_port, "127.0.0.2")
    assert refused(ready.store_port)


@pytest.mark.process
def test_a_closed_place_leaves_its_clients_alone_with_an_error(housed: Callable[..., Housed]) -> None:
    """Nobody waits for ever for a key that will not come."""
    made = housed()
    store = made.connect(made.serve(1))
    made.place.close()
    made.place.close()
    with pytest.raises((StoreConnectionError, StoreTimeoutError)):
        store.get("key")


def test_an_offer_announces_the_addresses_of_this_host(housed: Callable[..., Housed]) -> None:
    """So that the node with rank 0 knows where our workers' connections come from."""
    assert housed().place.offer(NodeReady(0), ("10.1.2.3",)).addresses == ("10.1.2.3",)


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
def test_an_operator_names_addresses_and_networks(value: object, names: tuple[str, ...]) -> None:
    """Joined by + on the command line, where a comma separates options; as a list in Python."""
    assert store_allow(RendezvousParameters("tcp", "", "run", 1, 1, store_allow=value)) == names


@pytest.mark.parametrize("value", ["all", "10.1.2", "10.1.2.3,any", "host0", "10.0.0.0/33", "+"])
def test_what_is_no_address_is_refused_with_the_form_that_is_expected(value: str) -> None:
    """Before anything starts; a name is not looked up."""
    with pytest.raises(ValueError, match=r"'store_allow' is .* expected 'any', or addresses and networks joined by"):
        store_allow(RendezvousParameters("tcp", "", "run", 1, 1, store_allow=value))
