"""Taking over from a record: who is awaited, for how long, and what follows (C2, C4, C7)."""

from __future__ import annotations

import msgspec
import pytest

from tenax._core import coordinator as run
from tenax._core import events, messages
from tenax._core.coordinator import CoordinatorMachine, RunPhase, RunSettings
from tenax._core.model import Outcome, Verdict
from tenax._core.record import RecordedMember, RunRecord, mark_of, record_of
from tenax.testing.run_invariants import RunChecker

SETTINGS = RunSettings("run", 2, 3, max_restarts=3, join_timeout_s=600.0)
LEASE_S, RETURN_S, ALONE_S = 6.0, 9.0, 66.0
STORE = "store:1"


class Successor:
    """A machine with its checker, opened from a record at the moment 0."""

    def __init__(self, record: RunRecord) -> None:
        self.machine = CoordinatorMachine(SETTINGS)
        self._checker = RunChecker(SETTINGS)
        self.said: list[tuple[tuple[str, ...], events.FromCoordinator]] = []
        self.step(
            run.Opened(
                LEASE_S,
                generation=record.generation,
                restarts_used=record.restarts_used,
                store=record.store,
                verdict=record.verdict,
                record=record,
                return_s=RETURN_S,
                alone_s=ALONE_S,
            )
        )

    def step(self, event: run.AnyCoordinatorEvent, now: float = 0.0) -> None:
        sends = self.machine.step(event, now)
        self._checker.check(self.machine.state, event, sends, now)
        self.said = [(send.to, send.event) for send in sends]

    def comes(self, name: str, now: float = 0.0, generation: int = 1, *, is_running: bool = True) -> None:
        info = messages.NodeInfo(name, name, min_nodes=2, max_nodes=3)
        rank = {"a": 0, "b": 1, "c": 2}[name]
        joined = messages.NodeJoined(
            info,
            generation,
            is_running=is_running,
            group_rank=rank,
            group_world_size=3,
            store=STORE if generation else "",
        )
        self.step(run.Received(name, joined), now)
        if not is_running:
            self.step(run.Received(name, messages.NodeReady(generation, "store", 2)), now)

    def time_passes(self, until: float) -> None:
        """Nothing happens before, and then what is due."""
        deadline = self.machine.state.next_deadline()
        assert deadline is not None
        assert deadline == until
        self.step(run.Tick(), until)

    @property
    def phase(self) -> RunPhase:
        return self.machine.state.phase


def record(names: str = "abc", **changes: object) -> RunRecord:
    members = tuple(RecordedMember(name, rank, f"host-{name}") for rank, name in enumerate(names))
    made = RunRecord(1, members, world_size=len(names), store=STORE, restarts_used=1)
    return msgspec.structs.replace(made, **changes)


def test_when_all_are_back_nothing_has_happened() -> None:
    made = Successor(record())
    for name in "abc":
        assert made.phase is RunPhase.RECOVERING
        made.comes(name)
    assert made.phase is RunPhase.RUNNING
    assert not made.said
    assert made.machine.state.generation == 1


def test_who_does_not_come_back_is_awaited_since_the_first_did() -> None:
    made = Successor(record())
    made.comes("a", now=100.0)
    made.comes("b", now=105.0)
    made.time_passes(until=100.0 + RETURN_S)
    assert made.phase is RunPhase.ENDING
    assert made.machine.state.lost == {"host-c": "it did not come back after the coordinator was lost"}
    made.step(run.Received("a", messages.NodeReady(1, "store", 2)), 110.0)
    made.step(run.Received("b", messages.NodeReady(1, "store", 3)), 110.0)
    assert made.phase is RunPhase.RUNNING
    assert made.machine.state.generation == 2
    assert made.machine.state.restarts_used == 1, "a loss is not charged"


def test_a_generation_of_which_nobody_is_seen_is_left_to_those_who_may_be_in_it() -> None:
    """Newcomers give up in the end, with a reason; there is no verdict, for the run may go on elsewhere."""
    made = Successor(record())
    made.step(run.Received("new", messages.NodeJoined(messages.NodeInfo("new", "new", min_nodes=2, max_nodes=3))), 1.0)
    made.step(run.Received("new", messages.NodeReady(0)), 1.0)
    made.time_passes(until=SETTINGS.join_timeout_s)
    ((to, refused),) = made.said
    assert to == ("new",)
    assert isinstance(refused, events.JoinRefused)
    assert "host-a, host-b, host-c" in refused.reason
    assert made.machine.state.verdict is None
    assert made.phase is RunPhase.RECOVERING


def test_the_one_member_of_a_generation_is_awaited_for_as_long_as_it_may_go_on() -> None:
    made = Successor(record("a"))
    made.time_passes(until=ALONE_S)
    assert made.phase is RunPhase.GATHERING
    assert made.machine.state.membership_changes == 1


def test_the_node_of_a_dead_leader_is_not_awaited() -> None:
    made = Successor(record())
    made.comes("a")
    made.comes("b")
    made.step(run.EarlierCoordinatorGone("c"), 1.0)
    assert made.phase is RunPhase.ENDING
    assert made.machine.state.lost == {"host-c": "its agent died"}


def test_a_dead_leader_that_was_a_spare_is_not_missed() -> None:
    made = Successor(record())
    made.step(run.EarlierCoordinatorGone("spare"))
    for name in "abc":
        made.comes(name, now=1.0)
    assert made.phase is RunPhase.RUNNING
    assert not made.said


@pytest.mark.parametrize("others", [0, 1])
def test_members_stop_when_no_leader_answers_them(others: int) -> None:
    """If all that led before are dead, whoever is not here has stopped a lease later. If one may live: nothing."""
    made = Successor(record())
    made.step(run.EarlierCoordinatorGone("spare", others), 10.0)
    made.time_passes(until=SETTINGS.join_timeout_s if others else 10.0 + LEASE_S)
    assert made.phase is (RunPhase.RECOVERING if others else RunPhase.GATHERING)


def test_a_member_that_never_heard_of_its_generation() -> None:
    """It was decided, and the leader died before it could format_steps everybody: it ends, uncharged."""
    made = Successor(record())
    made.comes("a")
    made.comes("b", generation=0, is_running=False)
    made.comes("c")
    assert made.phase is RunPhase.ENDING
    assert made.machine.state.unstopped == {"a", "c"}


def test_a_settled_generation_is_not_awaited_and_not_charged_again() -> None:
    made = Successor(record(settled=1, next_why="rank 0 on host-a failed"))
    assert made.phase is RunPhase.GATHERING
    for name in "abc":
        made.comes(name, is_running=False)
    assert made.machine.state.generation == 2
    assert made.machine.state.restarts_used == 1


def test_after_the_verdict_everybody_who_comes_is_told() -> None:
    made = Successor(record(verdict=Verdict(Outcome.SUCCEEDED, "all succeeded")))
    made.comes("a")
    ((to, ended),) = made.said
    assert to == ("a",)
    assert isinstance(ended, events.RunEnded)


def test_the_record_of_a_successor_is_the_same_again() -> None:
    """What was inherited is handed on, and the mark tells that there is nothing new."""
    old = record(membership_changes=2, drains=1, ranks_by_name={"n": 1}, longest_s=3.0)
    made = Successor(old)
    for name in "abc":
        made.comes(name)
    state = made.machine.state
    assert record_of(state) == old
    assert mark_of(state) == old.mark
