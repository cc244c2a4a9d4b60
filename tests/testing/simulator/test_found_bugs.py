"""Bugs that the simulator has found: with the bug put back, its seed finds it again."""

from __future__ import annotations

import functools
from collections.abc import Callable

import msgspec
import pytest

from tenax.testing.simulator import Fault, NodePlan, Parts, Setup, draw, simulate
from tenax.testing.simulator.setup import WorkerBehaviour

from . import broken_links
from . import broken_parts as broken
from .broken_parts import parts_with

NO_FAILURES = WorkerBehaviour(generation_s=1e6, fails=0.0, collateral=0.0, ignores_term=0.0, leaves_behind=0.0)


@pytest.mark.parametrize(
    ("seed", "part", "name"),
    [
        (218, broken.ChargesForFencedNodes, "S5"),
        (18, broken.KeepsEveryName, "S12"),
        (498, broken.DoesNotWaitForSupersededNodes, "S1"),
        (3801, broken.ReadmitsSupersededNodes, "L3"),
        (9, broken.ForgetsTheVerdict, "S6"),
        (379, broken.DatesExitsOnReceipt, "S8"),
        (20, broken_links.RemembersEveryBeat, "S12"),
    ],
)
def test_a_known_seed_finds_its_bug_again(seed: int, part: type, name: str) -> None:
    """If a change of the machines changes the history of a seed, replace the seed by another that finds the bug."""
    assert simulate(draw(seed, survivors=False), parts_with(part)).property == name


@functools.cache  # several bugs have the same setup
def broken_by(setup: Callable[[int], Setup], seeds: int) -> list[str]:
    return [simulate(setup(seed)).broken for seed in range(seeds)]


def check_fixed(setup: Callable[[int], Setup], parts: Parts, name: str, seeds: int) -> None:
    """No seed breaks a property; with the bug one of them breaks this one."""
    assert broken_by(setup, seeds) == [""] * seeds
    assert any(simulate(setup(seed), parts).property == name for seed in range(seeds))


def generations_of_one_number(seed: int) -> Setup:
    """Two generations get the number 2, and members of both join the next coordinator.

    The coordinators are on nodes that have left. The endpoint's host loses power and its marker while hosts 1 and 2,
    the members of the first generation, are cut off.
    """
    early, late = (NodePlan(0), NodePlan(1), NodePlan(2)), (NodePlan(3, start_at=5.0), NodePlan(4, start_at=5.0))
    return Setup(
        seed=seed,
        nodes=(*early, *late, NodePlan(0, start_at=30.0), NodePlan(0, start_at=45.0)),
        min_nodes=2,
        max_nodes=2,
        last_call_s=0.2,
        seconds=80.0,
        behaviour=NO_FAILURES,
        faults=(
            Fault(1.0, "drain", a=0),
            *(Fault(19.0, "partition", a=host, seconds=25.0) for host in (1, 2)),
            Fault(20.0, "power", a=0, seconds=1.0),
            Fault(35.0, "drain", a=4),
            Fault(50.0, "kill_coordinator"),
        ),
    )


def test_two_generations_with_one_number_are_not_confused() -> None:
    parts = parts_with(broken.ConfusesGenerationsOfOneNumber)
    check_fixed(generations_of_one_number, parts, "S1", seeds=20)


def work_under_a_smaller_number(seed: int) -> Setup:
    """As above, but the first generations have greater numbers, and the next coordinator is the first to learn of them:
    from idle nodes, before or after it learns of nodes at work under the smaller number, which take long to stop."""
    setup = generations_of_one_number(seed)
    late = 50.05 + 0.02 * (seed % 10)
    faults = (
        *(fault for fault in setup.faults if fault.kind != "partition"),
        *(Fault(2.0 + 2 * number, "restart_request") for number in range(3)),
        *(Fault(19.0, "partition", a=host, seconds=late - 19.0) for host in (1, 2)),
        *(Fault(49.9, "partition", a=host, seconds=2.0) for host in (3, 4)[: 1 + seed % 2]),
    )
    return msgspec.structs.replace(
        setup,
        seconds=90.0,
        grace_s=10.0,
        behaviour=msgspec.structs.replace(NO_FAILURES, ignores_term=0.5),
        faults=tuple(sorted(faults, key=lambda fault: fault.at)),
    )


@pytest.mark.parametrize("part", [broken.DoesNotWaitForStaleNodes, broken.EndsRecoveryEarly])
def test_a_node_at_work_under_a_smaller_number_is_waited_for(part: type) -> None:
    check_fixed(work_under_a_smaller_number, parts_with(part), "S1", seeds=20)


def taken_rank(seed: int) -> Setup:
    """As above, but all of these nodes request a rank, so those at work request the ranks of the idle ones."""
    setup = work_under_a_smaller_number(seed)
    ranks = {1: 0, 2: 1, 3: 0, 4: 1}  # by host
    starts = {3: 22.0, 4: 22.0}  # the first coordinator would refuse them
    nodes = (
        NodePlan(each.host, starts.get(each.host, each.start_at), rank=ranks.get(each.host, -1)) for each in setup.nodes
    )
    faults = (*setup.faults, *(Fault(at, "restart_request") for at in (13.0, 15.0)))
    return msgspec.structs.replace(setup, nodes=tuple(nodes), faults=tuple(sorted(faults, key=lambda fault: fault.at)))


def test_a_node_at_work_that_is_refused_is_waited_for() -> None:
    check_fixed(taken_rank, parts_with(broken.DoesNotWaitForRefusedNodes), "S1", seeds=20)


def late_ending(seed: int) -> Setup:
    """A generation ends to admit a node. One member does not receive this, and its worker fails because the other has
    stopped. Then the coordinator dies, whose node had left, and the failure is reported to the next one."""
    return Setup(
        seed=seed,
        nodes=(NodePlan(0), NodePlan(1), NodePlan(2), NodePlan(0, start_at=3.0)),
        min_nodes=2,
        max_nodes=3,
        last_call_s=0.02,
        seconds=40.0,
        behaviour=msgspec.structs.replace(
            NO_FAILURES, collateral=1.0, collateral_s=0.05, ends_within_s=0.002, start_s=0.005
        ),
        faults=(
            Fault(1.0, "drain", a=0),
            Fault(2.9, "stall", a=seed % 2, b=1, seconds=2.0),
            Fault(3.05 + seed * 0.002, "kill_coordinator"),
        ),
    )


def test_the_next_coordinator_knows_why_a_generation_ended() -> None:
    check_fixed(late_ending, parts_with(broken.ForgetsWhyAGenerationEnded), "S5", seeds=40)


def killed_while_linking(seed: int) -> Setup:
    """The link of a member breaks. Its agent reconnects and is killed when the coordinator has accepted the new link
    but the keeper does not hold it yet, so the kernel closes it while the workers are alive."""
    return Setup(
        seed=seed,
        nodes=(NodePlan(0), NodePlan(1), NodePlan(2)),
        min_nodes=2,
        max_nodes=3,
        last_call_s=0.02,
        seconds=20.0,
        behaviour=msgspec.structs.replace(NO_FAILURES, ends_within_s=0.01, kill_s=2.0),
        faults=(Fault(10.0, "break", a=1, b=1), Fault(10.002 + seed * 0.0002, "crash", a=1)),
    )


def test_a_link_that_the_keeper_does_not_hold_yet_is_not_a_node() -> None:
    check_fixed(killed_while_linking, parts_with(broken_links.TakesAnUnjoinedLinkForANode), "S1", seeds=40)
