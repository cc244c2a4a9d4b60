"""Elected leaders in the simulation: what single faults of etcd, or of the paths to it, must not cost."""

from __future__ import annotations

import pytest

from tenax._core.authority import AuthorityTerms
from tenax.testing.simulator import Fault, NodePlan, Outcome, Setup, draw, simulate
from tenax.testing.simulator.setup import WorkerBehaviour

from .broken_leadership import MISTAKES, PLANNED
from .broken_parts import parts_with


def run(seed: int, *faults: Fault, nodes: int = 3, seconds: float = 100.0) -> Outcome:
    """Run healthy workers on three hosts."""
    setup = Setup(
        seed=seed,
        nodes=tuple(map(NodePlan, range(nodes))),
        min_nodes=nodes,
        max_nodes=nodes,
        seconds=seconds,
        has_etcd=True,
        terms=AuthorityTerms().lease,
        behaviour=WorkerBehaviour(generation_s=1e6, fails=0.0),
        faults=faults,
    )
    outcome = simulate(setup, record_history=True)
    assert outcome.broken == ""
    return outcome


@pytest.mark.parametrize("seed", range(1, 6))
def test_a_leader_that_is_cut_off_from_etcd_alone_hands_over_and_keeps_its_node(seed: int) -> None:
    """A node reports the new leader to it, so that no worker is restarted."""
    outcome = run(seed, Fault(20.0, "etcd_cut", b=0, seconds=60.0))
    assert "another node is the leader, as a node reports" in outcome.history
    assert outcome.counts["generations"] == 1
    assert "Fenced(" not in outcome.history


def test_workers_of_several_nodes_continue_without_etcd() -> None:
    outcome = run(1, Fault(20.0, "etcd_down", seconds=60.0))
    assert outcome.counts["generations"] == 1
    assert "Fenced(" not in outcome.history


def test_workers_continue_when_the_leader_dies_and_another_node_joins_later() -> None:
    """Only the generation of the dead node ends."""
    outcome = run(1, Fault(20.0, "kill_coordinator", seconds=2.0))
    assert "takes over the coordinator" in outcome.history
    assert outcome.counts["generations"] == 2


@pytest.mark.parametrize("seed", range(1, 6))
def test_newcomers_begin_anew_after_the_records_lease_if_all_hosts_of_a_generation_are_lost(seed: int) -> None:
    """Those that wait for the lost members before that, and give up or are killed, do not prolong it."""
    early, late = (NodePlan(2, 40.0), NodePlan(3, 50.0)), (NodePlan(4, 265.0), NodePlan(5, 265.0))
    setup = Setup(
        seed=seed,
        nodes=(NodePlan(0), NodePlan(1), *early, *late),
        min_nodes=2,
        max_nodes=2,
        seconds=400.0,
        has_etcd=True,
        record_s=240,
        terms=AuthorityTerms().lease,
        behaviour=WorkerBehaviour(generation_s=1e6, fails=0.0),
        faults=(
            Fault(20.0, "power", a=0, seconds=1e6),
            Fault(20.0, "power", a=1, seconds=1e6),
            Fault(45.0, "kill_coordinator", seconds=0.0),
        ),
    )
    outcome = simulate(setup, record_history=True)
    assert outcome.broken == ""
    assert "generation 1 of run 'run' may still be running on host" in outcome.history
    assert "host4/n5      GenerationFormed(assignment=generation 1 " in outcome.history
    assert outcome.counts["generations"] == 2


@pytest.mark.parametrize("part", MISTAKES)
def test_a_mistake_in_leadership_is_found_by_its_seed(part: type) -> None:
    """And not by a fault of the machine without the mistake."""
    seed, name = MISTAKES[part]
    assert simulate(draw(seed, engine="etcd", survivors=False)).broken == ""
    assert simulate(draw(seed, engine="etcd", survivors=False), parts_with(part)).property == name


@pytest.mark.parametrize("part", PLANNED)
def test_a_mistake_in_leadership_is_found_by_planned_faults(part: type) -> None:
    setup, name = PLANNED[part]
    assert simulate(setup).broken == ""
    assert simulate(setup, parts_with(part)).property == name
