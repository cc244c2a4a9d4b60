"""The states of the core are values of values: none has many fields, and what ends is replaced as a whole."""

from __future__ import annotations

import importlib
import pkgutil

import msgspec
import pytest

import tenax._core
from tenax._core import coordinator as run
from tenax._core import messages
from tenax._core.agent_state import AgentState
from tenax._core.model import AgentSettings, Member
from tenax._core.run_state import AnyRunPhase, Generation

MAX_FIELDS = 19


def values_of_the_core() -> list[type[msgspec.Struct]]:
    found = pkgutil.walk_packages(tenax._core.__path__, "tenax._core.")
    modules = [importlib.import_module(each.name) for each in found]
    return [
        each
        for module in modules
        for each in vars(module).values()
        if isinstance(each, type) and issubclass(each, msgspec.Struct) and each.__module__ == module.__name__
    ]


@pytest.mark.parametrize("value", values_of_the_core(), ids=lambda value: f"{value.__module__}.{value.__name__}")
def test_no_value_has_20_fields(value: type[msgspec.Struct]) -> None:
    assert len(value.__struct_fields__) <= MAX_FIELDS


def test_both_states_are_counted() -> None:
    assert {run.CoordinatorState, AgentState, Generation, *AnyRunPhase.__args__} <= set(values_of_the_core())


def test_each_phase_has_its_own_deadlines() -> None:
    """A phase starts with none of another phase, or of another value of the same phase."""
    first, second = run.Gathering(), run.Gathering()
    first.deadlines[run.RunDeadline.JOIN] = 1.0
    assert second.deadlines == run.Paused().deadlines == {}


def test_a_generation_leaves_nothing_to_the_next() -> None:
    """Forming a generation replaces all that was known of the previous one."""
    machine = run.CoordinatorMachine(run.RunSettings("run", max_nodes=2))
    machine.step(run.Opened(), 0.0)
    for name in ("a", "b"):
        info = messages.NodeInfo(name, name, min_nodes=1, max_nodes=2)
        machine.step(run.Received(name, messages.NodeJoined(info)), 0.0)
        machine.step(run.Received(name, messages.NodeReady(0)), 0.0)
    machine.step(run.NodeLost("a", "connection closed"), 1.0)
    assert machine.state.last.lost == {"a": "connection closed"}
    machine.step(run.Received("b", messages.NodeReady(1)), 2.0)
    parts = {"b": Member("b", "b", 0, 1)}
    expected = Generation({"b": 0}, {"b": "b"}, world_size=1, formed_at=2.0, unstarted={"b"}, parts=parts)
    assert (machine.state.generation, machine.state.last) == (2, expected)


def test_a_new_agent_is_clear_and_waits_for_nothing() -> None:
    state = AgentState(AgentSettings("run", "trainer", 1, 0))
    assert state.cleared
    assert (state.generation, state.deadlines, state.workers) == (0, {}, {})
