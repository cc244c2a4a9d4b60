"""A successor's recovery from a record: which nodes it awaits, and for how long (C2, C4, C7)."""

from __future__ import annotations

import msgspec
import pytest

from tenax._core import coordinator as run
from tenax._core import events, messages
from tenax._core.coordinator import CoordinatorMachine, RunSettings
from tenax._core.model import Evidence, Failure, Outcome, Verdict
from tenax._core.record import RecordedMember, RunRecord, mark_of, record_of
from tenax.testing.run_invariants import RunChecker

SETTINGS = RunSettings("run", 2, 3, max_restarts=3, join_timeout_s=600.0)
LEASE_S, RETURN_S, ALONE_S = 6.0, 9.0, 66.0
STORE = "store:1"


class Successor:
    """A machine with its checker, opened from a record at time 0."""

    def __init__(self, record: RunRecord) -> None:
        self.machine = CoordinatorMachine(SETTINGS)
        self._checker = RunChecker(SETTINGS)
        self.sent: list[tuple[tuple[str, ...], events.FromCoordinator]] = []
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
        self._checker.expect(self.machine.state, event)
        step = self.machine.step(event, now)
        self._checker.check(self.machine.state, event, step, now)
        self.sent = [(send.to, send.event) for send in step.sends]

    def join(self, name: str, now: float = 0.0, generation: int = 1, *, is_running: bool = True) -> None:
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

    def tick(self, until: float) -> None:
        """Check that the next deadline is at this time, and handle it."""
        deadline = self.machine.state.next_deadline()
        assert deadline is not None
        assert deadline == until
        self.step(run.Tick(), until)

    @property
    def phase(self) -> run.RunPhase:
        return self.machine.state.phase


def record(names: str = "abc", **changes: object) -> RunRecord:
    members = tuple(RecordedMember(name, rank, f"host-{name}") for rank, name in enumerate(names))
    record = RunRecord(1, members, world_size=len(names), store=STORE, restarts_used=1)
    return msgspec.structs.replace(record, **changes)


def test_the_generation_continues_when_all_members_are_back() -> None:
    successor = Successor(record())
    for name in "abc":
        assert isinstance(successor.phase, run.Recovering)
        successor.join(name)
    assert isinstance(successor.phase, run.Running)
    assert not successor.sent
    assert successor.machine.state.generation == 1


@pytest.mark.parametrize("is_at_work", [True, False], ids=["at work", "without its assignment"])
def test_a_member_keeps_its_rank_if_a_new_node_requested_it_first(*, is_at_work: bool) -> None:
    """Otherwise the member would be refused, and the generation would end."""
    successor = Successor(record("ab"))
    new, member = (messages.NodeInfo(name, name, rank=0, min_nodes=2, max_nodes=3) for name in ("new", "a"))
    successor.step(run.Received("new", messages.NodeJoined(new)), 1.0)
    at_work = messages.NodeJoined(member, 1, is_running=True, group_rank=0, group_world_size=2, store=STORE)
    successor.step(run.Received("a", at_work if is_at_work else messages.NodeJoined(member)), 2.0)
    reason = "this node requests node rank 0, which host-a has; give each node its own"
    assert successor.sent == [(("new",), events.JoinRefused(reason))]
    assert successor.machine.state.nodes.keys() == {"a"}
    assert isinstance(successor.phase, run.Recovering)
    assert successor.phase.awaited == {"b": "host-b"}


@pytest.mark.parametrize("has_succeeded", [True, False], ids=["succeeded", "running"])
def test_nodes_of_a_run_that_was_begun_anew_do_not_decide_about_it(*, has_succeeded: bool) -> None:
    """They were cut off until the record had expired, and others began the run anew, with numbers from 1."""
    successor = Successor(record("ab"))
    for rank, name in enumerate(("old-0", "old-1")):
        node = messages.NodeInfo(name, name, min_nodes=2, max_nodes=3)
        old = {"is_running": not has_succeeded, "has_succeeded": has_succeeded, "group_rank": rank}
        joined = messages.NodeJoined(node, 5, group_world_size=2, store="old:1", **old)
        successor.step(run.Received(name, joined), 1.0)
        over = events.GenerationEnded(5, "the other nodes continued without this node", stops=True)
        assert successor.sent == [((name,), over)]
        successor.step(run.Received(name, messages.NodeReady(5, "store", 2)), 1.1)
    assert isinstance(successor.phase, run.Recovering)
    assert successor.phase.awaited == {"a": "host-a", "b": "host-b"}
    for name in "ab":
        successor.step(run.Received(name, at_work(name)), 2.0)
    assert (type(successor.phase), successor.machine.state.generation) == (run.Ending, 1), "it ends to admit another"
    for name in "ab":
        successor.step(run.Received(name, messages.NodeReady(1, "store", 3)), 3.0)
    assert (type(successor.phase), successor.machine.state.generation) == (run.Running, 6)


def at_work(name: str) -> messages.NodeJoined:
    node = messages.NodeInfo(name, name, min_nodes=2, max_nodes=3)
    rank = "ab".index(name)
    return messages.NodeJoined(node, 1, is_running=True, group_rank=rank, group_world_size=2, store=STORE)


def test_a_missing_member_is_awaited_from_the_first_return_on() -> None:
    successor = Successor(record())
    successor.join("a", now=100.0)
    successor.join("b", now=105.0)
    successor.tick(until=100.0 + RETURN_S)
    assert isinstance(successor.phase, run.Ending)
    assert successor.machine.state.last.lost == {"host-c": "it did not reconnect after the coordinator was lost"}
    successor.step(run.Received("a", messages.NodeReady(1, "store", 2)), 110.0)
    successor.step(run.Received("b", messages.NodeReady(1, "store", 3)), 110.0)
    assert isinstance(successor.phase, run.Running)
    assert successor.machine.state.generation == 2
    assert successor.machine.state.restarts_used == 1, "a loss is not charged"


def test_the_others_are_awaited_as_long_if_the_first_returns_just_before_the_join_timeout() -> None:
    """A leader that was replaced may have answered them until that one left it."""
    successor = Successor(record())
    first_at = SETTINGS.join_timeout_s - 0.2
    successor.join("a", now=first_at)
    successor.tick(until=first_at + RETURN_S)
    assert isinstance(successor.phase, run.Ending)


def test_new_nodes_are_refused_while_no_member_of_the_generation_is_back() -> None:
    """There is no verdict, because the generation may still run elsewhere."""
    successor = Successor(record())
    successor.step(
        run.Received("new", messages.NodeJoined(messages.NodeInfo("new", "new", min_nodes=2, max_nodes=3))), 1.0
    )
    successor.step(run.Received("new", messages.NodeReady(0)), 1.0)
    successor.tick(until=SETTINGS.join_timeout_s)
    ((to, refused),) = successor.sent
    assert to == ("new",)
    assert isinstance(refused, events.JoinRefused)
    assert "host-a, host-b, host-c" in refused.reason
    assert successor.machine.state.verdict is None
    assert isinstance(successor.phase, run.Recovering)


def test_a_single_member_is_awaited_for_as_long_as_it_may_continue_alone() -> None:
    successor = Successor(record("a"))
    successor.tick(until=ALONE_S)
    assert isinstance(successor.phase, run.Gathering)
    assert successor.machine.state.membership_changes == 1


def test_the_node_of_a_dead_leader_is_not_awaited() -> None:
    successor = Successor(record())
    successor.join("a")
    successor.join("b")
    successor.step(run.EarlierCoordinatorGone("c"), 1.0)
    assert isinstance(successor.phase, run.Ending)
    assert successor.machine.state.last.lost == {"host-c": "its agent died"}


def test_a_dead_leader_whose_label_is_not_recorded_is_lost_too() -> None:
    successor = Successor(RunRecord(1, (RecordedMember("a", 0, ""),), world_size=1, store=STORE))
    successor.step(run.EarlierCoordinatorGone("a"), 1.0)
    assert isinstance(successor.phase, run.Gathering)


def test_a_dead_leader_that_was_a_spare_is_not_awaited() -> None:
    successor = Successor(record())
    successor.step(run.EarlierCoordinatorGone("spare"))
    for name in "abc":
        successor.join(name, now=1.0)
    assert isinstance(successor.phase, run.Running)
    assert not successor.sent


@pytest.mark.parametrize("others", [0, 1])
def test_members_without_a_leader_have_stopped_after_a_lease(others: int) -> None:
    """If an earlier leader may be alive, members may follow it, and are awaited for longer."""
    successor = Successor(record())
    successor.step(run.EarlierCoordinatorGone("spare", others), 10.0)
    successor.tick(until=SETTINGS.join_timeout_s if others else 10.0 + LEASE_S)
    assert type(successor.phase) is (run.Recovering if others else run.Gathering)


def test_a_generation_ends_if_a_member_never_received_its_assignment() -> None:
    """The leader died before it had sent all assignments. The end is uncharged."""
    successor = Successor(record())
    successor.join("a")
    successor.join("b", generation=0, is_running=False)
    successor.join("c")
    assert isinstance(successor.phase, run.Ending)
    assert successor.machine.state.phase.unstopped == {"a", "c"}


def test_a_settled_generation_is_not_awaited_and_not_charged_again() -> None:
    successor = Successor(record(settled=1, next_why="rank 0 on host-a failed"))
    assert isinstance(successor.phase, run.Gathering)
    for name in "abc":
        successor.join(name, is_running=False)
    assert successor.machine.state.generation == 2
    assert successor.machine.state.restarts_used == 1


def test_a_node_that_joins_after_the_verdict_is_sent_it() -> None:
    successor = Successor(record(verdict=Verdict(Outcome.SUCCEEDED, "all succeeded")))
    successor.join("a")
    ((to, ended),) = successor.sent
    assert to == ("a",)
    assert isinstance(ended, events.RunEnded)


def test_a_successor_writes_the_same_record() -> None:
    """It keeps what it inherited, and its mark shows that nothing changed."""
    old = record(membership_changes=2, drains=1, ranks_by_name={"n": 1}, longest_s=3.0, formed_at=-40.0)
    successor = Successor(old)
    for name in "abc":
        successor.join(name)
    state = successor.machine.state
    assert record_of(state) == old
    assert mark_of(state) == old.mark


def test_a_record_is_moved_to_the_clock_of_another_host() -> None:
    """All its times are shifted by the same amount, so a restart policy can still compare them."""
    failure = Failure(1, 0, 0, 100, 1, 10.0, evidence=Evidence("E", raised_at=9.0), lived_s=4.0)
    verdict = Verdict(Outcome.FAILED, "no", failures=(failure,), earlier=(failure,))
    old = record(earlier=(failure,), formed_at=12.0, verdict=verdict)
    moved = old.shifted(1000.0)
    assert (moved.earlier[0].seen_at, moved.earlier[0].evidence.raised_at, moved.formed_at) == (1010.0, 1009.0, 1012.0)
    assert moved.earlier[0].lived_s == 4.0
    assert moved.verdict is not None
    assert moved.verdict.failures == moved.verdict.earlier == moved.earlier
    assert moved.shifted(-1000.0) == old
