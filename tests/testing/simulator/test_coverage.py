"""The simulations reach the rare situations that they are meant to test."""

from __future__ import annotations

from tenax._core.agent import AgentMachine
from tenax.testing.simulator import Fault, NodePlan, Setup, draw, simulate
from tenax.testing.simulator.draw import ETCD_KINDS, ISOLATION, KINDS
from tenax.testing.simulator.liveness import DISTURBANCES
from tenax.testing.simulator.setup import WorkerBehaviour

# The first ones reached everything when they were chosen. The search continues where they no longer do.
SEEDS = (4, 5, 9, 14, 16, 24, 38, 41, 42, 48, 70, 73, *range(1, 251))
SITUATIONS = [
    "Fenced(",
    "Fenced(generation=1, why=disconnected from the coordinator for too long",
    "no heartbeat for 5 s",
    "connection closed",
    "lost the coordinator at host0: connection reset",
    "lost the coordinator at host0: no answer for 4.3 s",
    "resumes",
    "was_cut_off=True",
    "[recovering > running]",
    "[recovering > ending]",
    "NodeDraining",
    "LeaveNoticed",
    "LeaveRequested(why=maintenance) to",
    "RestartRequested(why=new data) -> GenerationEnded",
    "WorkersRunning(",
    "NodeProgress(",
    "the new agent replaced this one",
    "the other nodes continued without this node",
    "has_succeeded=True",
    "[paused",
    "joined",
    "RunEnded(verdict=succeeded",
    "RunEnded(verdict=failed",
    "RunEnded(verdict=broken",
    "RunEnded(verdict=cancelled",
]


def test_every_situation_fault_and_disturbance_is_reached() -> None:
    missing = {*SITUATIONS}
    missing |= {f"FAULT         {kind} " for kind in KINDS}
    missing |= {f"disturbance: {kind}\n" for kind in DISTURBANCES}
    for seed in SEEDS:
        if not missing:
            break
        history = simulate(draw(seed, survivors=False), record_history=True).history
        missing = {text for text in missing if text not in history}
    assert not missing


ETCD_SITUATIONS = [
    "elected through etcd",
    "this node takes over the coordinator",
    "this node no longer serves the coordinator: its key in etcd is gone",
    "this node no longer serves the coordinator: it is leaving the run",
    "EarlierCoordinatorGone(",
    "may have been replaced",
    "StopConnecting()",
    "Troubled()",
    "  Ended(verdict=",
    "[recovering > running]",
    "[recovering > ending]",
    "RunEnded(verdict=succeeded",
]


def test_every_situation_of_elected_leaders_is_reached() -> None:
    missing = {*ETCD_SITUATIONS, *(f"FAULT         {kind} " for kind in (*ETCD_KINDS, *ISOLATION))}
    for seed in (*range(1, 20), *range(130, 140)):
        if not missing:
            break
        history = simulate(draw(seed, engine="etcd", survivors=False), record_history=True).history
        missing = {text for text in missing if text not in history}
    assert not missing


def test_healthy_workers_survive_the_death_of_the_coordinator() -> None:
    """The agent at the endpoint is killed and restarted 2 s later. Unless it was a member, the generation continues."""
    setup = Setup(
        seed=1,
        nodes=(NodePlan(0, start_at=0.0), NodePlan(1), NodePlan(2), NodePlan(0, start_at=5.0)),
        min_nodes=3,
        max_nodes=3,
        seconds=60.0,
        behaviour=WorkerBehaviour(generation_s=1e6, fails=0.0),
        faults=(Fault(20.0, "kill_coordinator", seconds=2.0),),
    )
    outcome = simulate(setup, record_history=True)
    assert outcome.broken == ""
    is_member = "rank" in next(line for line in outcome.history.splitlines() if "host0/n1" in line and "Formed" in line)
    assert outcome.counts["generations"] == (2 if is_member else 1)


def test_a_generation_survives_a_suspended_coordinator() -> None:
    """Its kernel acknowledges messages, so no agent fences itself; it reads them before it checks leases."""
    setup = Setup(
        seed=1,
        nodes=(NodePlan(0), NodePlan(1), NodePlan(2)),
        min_nodes=3,
        max_nodes=3,
        seconds=200.0,
        behaviour=WorkerBehaviour(generation_s=1e6, fails=0.0),
        faults=(Fault(20.0, "freeze", seconds=120.0),),
    )
    outcome = simulate(setup, record_history=True)
    assert outcome.broken == ""
    assert outcome.counts["generations"] == 1
    assert "Fenced(" not in outcome.history


def test_a_generation_survives_reset_connections() -> None:
    setup = Setup(
        seed=1,
        nodes=(NodePlan(0), NodePlan(1), NodePlan(2)),
        min_nodes=3,
        max_nodes=3,
        seconds=60.0,
        behaviour=WorkerBehaviour(generation_s=1e6, fails=0.0),
        faults=tuple(Fault(10.0 + number, "break", a=number, b=number) for number in range(12)),
    )
    outcome = simulate(setup)
    assert outcome.broken == ""
    assert outcome.counts["generations"] == 1


def test_the_machines_under_test_are_the_real_ones() -> None:
    from tenax._core.coordinator import CoordinatorMachine
    from tenax._core.leadership.machine import Leadership
    from tenax._core.link.client import LinkClient
    from tenax._core.link.server import LinkServer
    from tenax.testing.simulator import Parts

    parts = Parts()
    assert (parts.make_agent, parts.make_coordinator) == (AgentMachine, CoordinatorMachine)
    assert (parts.make_client, parts.make_server, parts.make_leadership) == (LinkClient, LinkServer, Leadership)
