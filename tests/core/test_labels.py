"""A node keeps its label when the coordinator changes, so that operators can refer to it."""

from __future__ import annotations

from tenax._core.coordinator import CoordinatorMachine, NodeLost, Opened, Received, RunSettings
from tenax._core.messages import NodeInfo, NodeJoined, NodeReady
from tenax._core.record import record_of

SETTINGS = RunSettings("run", 2, 3)


def node(node_id: str) -> NodeInfo:
    return NodeInfo(node_id, "vm", min_nodes=2, max_nodes=3)


def labels(machine: CoordinatorMachine) -> dict[str, str]:
    assert machine.state.names.labels == {record.label: each for each, record in machine.state.nodes.items()}
    return {each: record.label for each, record in machine.state.nodes.items()}


def run_of_three() -> CoordinatorMachine:
    machine = CoordinatorMachine(SETTINGS)
    machine.step(Opened(), 0.0)
    for node_id in ("a", "b", "c"):
        machine.step(Received(node_id, NodeJoined(node(node_id))), 0.0)
        machine.step(Received(node_id, NodeReady(0)), 0.0)
    assert labels(machine) == {"a": "vm", "b": "vm #2", "c": "vm #3"}
    return machine


def test_a_successor_uses_the_recorded_labels_in_any_order_of_joining() -> None:
    """A new node that joins first does not get the label of a node that is still awaited."""
    record = record_of(run_of_three().state)
    successor = CoordinatorMachine(SETTINGS)
    successor.step(Opened(generation=1, record=record, return_s=30.0, recover_s=30.0, alone_s=30.0), 10.0)
    successor.step(Received("d", NodeJoined(node("d"))), 10.0)
    for node_id, rank in (("c", 2), ("b", 1), ("a", 0)):
        rejoined = NodeJoined(
            node(node_id), 1, is_running=True, group_rank=rank, group_world_size=3, store=successor.state.store
        )
        successor.step(Received(node_id, rejoined), 11.0)
    assert labels(successor) == {"d": "vm #4", "c": "vm #3", "b": "vm #2", "a": "vm"}


def test_a_node_that_reconnects_keeps_its_label_unless_another_has_it() -> None:
    machine = run_of_three()
    for node_id in ("a", "b"):
        machine.step(NodeLost(node_id, "connection closed"), 1.0)
    machine.step(Received("b", NodeJoined(node("b"))), 2.0)
    assert labels(machine)["b"] == "vm #2"
    machine.step(Received("e", NodeJoined(node("e"))), 3.0)
    machine.step(Received("a", NodeJoined(node("a"))), 4.0)
    assert (labels(machine)["e"], labels(machine)["a"]) == ("vm", "vm #4")
