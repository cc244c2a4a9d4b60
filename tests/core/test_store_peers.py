"""Which hosts may use a generation's store: those of its members, as they announced them."""

from __future__ import annotations

from tenax._core import messages
from tenax._core.coordinator import CoordinatorMachine, Opened, Received, RunSettings
from tenax._core.events import GenerationFormed
from tenax._core.model import MAX_STORE_PEERS, Assignment


def form(addresses: dict[str, tuple[str, ...]], *, is_agent_store: bool = True) -> dict[str, Assignment]:
    """Return the assignments of a generation of these nodes; the first gets rank 0."""
    machine = CoordinatorMachine(RunSettings("job", len(addresses), len(addresses)))
    machine.step(Opened(), 0.0)
    sends = []
    for rank, (name, own) in enumerate(addresses.items()):
        info = messages.NodeInfo(name, name, rank=rank, min_nodes=len(addresses), max_nodes=len(addresses))
        machine.step(Received(name, messages.NodeJoined(info)), 0.0)
        ready = messages.NodeReady(0, name, 1234, is_agent_store, own)
        sends += machine.step(Received(name, ready), 0.0).sends
    return {send.to[0]: send.event.assignment for send in sends if isinstance(send.event, GenerationFormed)}


def test_the_node_that_hosts_the_store_gets_the_addresses_of_the_others() -> None:
    """Each address is listed once, and no other node gets them. Two agents of one host announce the same one."""
    parts = form({"a": ("10.0.0.1",), "b": ("10.0.0.2", "fd00::2"), "c": ("10.0.0.2",)})
    assert parts["a"].store_peers == ("10.0.0.2", "fd00::2")
    assert [parts[name].store_peers for name in "bc"] == [(), ()]


def test_a_store_that_a_worker_hosts_needs_no_addresses() -> None:
    """It is torch's store, which serves every peer."""
    assert form({"a": ("10.0.0.1",), "b": ("10.0.0.2",)}, is_agent_store=False)["a"].store_peers == ()


def test_the_addresses_of_a_run_of_any_size_fit_into_a_message() -> None:
    """Of many nodes only the first addresses are sent, and at least one of each node."""
    count = MAX_STORE_PEERS // 8
    nodes = {f"{number:05}": tuple(f"{number}.{each}" for each in range(16)) for number in range(count)}
    peers = form(nodes)["00000"].store_peers
    assert len(peers) <= MAX_STORE_PEERS
    assert {peer.split(".")[0] for peer in peers} == {str(number) for number in range(1, count)}
