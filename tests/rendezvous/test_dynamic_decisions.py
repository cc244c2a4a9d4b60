"""The pure part of the dynamic rendezvous: single decisions, the watch, and whole clusters in one thread."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tenax.rendezvous._dynamic import decisions
from tenax.rendezvous._dynamic.decisions import Done, Joiner, Put, Refused, View, Wait, Watch
from tenax.rendezvous._dynamic.state import Node, Standing, State, decode, encode
from tenax.rendezvous.api import (
    RendezvousClosedError,
    RendezvousGracefulExitError,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from tenax.rendezvous.dynamic_rendezvous import RendezvousSettings, RendezvousTimeout

WAITING, JOINED, RUNNING = Standing.WAITING, Standing.JOINED, Standing.RUNNING


def terms(min_nodes: int = 2, max_nodes: int = 4, join_s: float = 600, last_call_s: float = 30) -> RendezvousSettings:
    timeout = RendezvousTimeout(timedelta(seconds=join_s), timedelta(seconds=last_call_s))
    return RendezvousSettings("run", min_nodes, max_nodes, timeout, timedelta(seconds=5), 3)


def state(*nodes: Node, members: str = "", **fields: Any) -> State:
    """``members="abc"``: a is rank 0, b rank 1, c rank 2."""
    ranks = {each: rank for rank, each in enumerate(members)}
    return State(**{"run_id": "run", "min_nodes": 2, "max_nodes": 4, "nodes": nodes, "members": ranks, **fields})


def nodes(**standings: Standing) -> list[Node]:
    return [Node(each, f"host-{each}", standing) for each, standing in standings.items()]


def joiner(node_id: str, terms_: RendezvousSettings | None = None, last_round: int = 0, now: float = 0.0) -> Joiner:
    return Joiner(node_id, f"host-{node_id}", terms_ or terms(), last_round, now)


def standings(state_: State) -> dict[str, Standing]:
    return {node.id: node.standing for node in state_.nodes}


# --- ranks (S2, D3) ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "chosen", "expected"),
    [
        ("", "abc", "abc"),
        ("abc", "abc", "abc"),
        ("abc", "cab", "abc"),  # the order of rejoining does not matter
        ("abcd", "acd", "acd"),  # b is not replaced: later ranks move up, in order
        ("abcd", "acdx", "axcd"),  # x replaces b: the others keep their ranks
        ("abcd", "bcdx", "xbcd"),
        ("abcd", "adxy", "axyd"),
        ("abc", "abcxy", "abcxy"),
        ("abcd", "dx", "xd"),
        ("abcd", "xyz", "xyz"),
    ],
)
def test_members_keep_their_order_and_new_nodes_get_the_free_ranks(before: str, chosen: str, expected: str) -> None:
    ranks = decisions.ranks({each: rank for rank, each in enumerate(before)}, list(chosen))
    assert ranks == {each: rank for rank, each in enumerate(expected)}


def test_members_have_priority_over_new_nodes() -> None:
    """The new node waits although it joined first."""
    done = decisions.complete(state(*nodes(x=JOINED, b=JOINED, a=JOINED), members="ab", round=2, max_nodes=2))
    assert done.members == {"a": 0, "b": 1}
    assert standings(done) == {"x": WAITING, "b": RUNNING, "a": RUNNING}


# --- single decisions -------------------------------------------------------------------------------------------------


def test_the_first_node_opens_round_1() -> None:
    decision = joiner("a").decide(None, View(), 0.0)
    assert isinstance(decision, Put)
    assert (decision.state.round, decision.state.complete, standings(decision.state)) == (1, False, {"a": JOINED})


def test_the_node_that_reaches_max_nodes_completes_the_round() -> None:
    decision = joiner("b", terms(2, 2)).decide(state(*nodes(a=JOINED), max_nodes=2), View(), 0.0)
    assert isinstance(decision, Put)
    assert decision.state.complete
    assert decision.state.members == {"a": 0, "b": 1}


def test_a_group_of_new_nodes_waits_for_the_last_call() -> None:
    """D4: there are enough nodes, but more may join."""
    here = state(*nodes(a=JOINED, b=JOINED))
    assert isinstance(joiner("a").decide(here, View(enough_s=29.9), 50.0), Wait)
    decision = joiner("a").decide(here, View(enough_s=30.0), 50.0)
    assert isinstance(decision, Put)
    assert decision.state.complete


def test_known_members_form_the_next_round_at_once() -> None:
    """D4: the last live member completes it, without a last call."""
    here = state(*nodes(a=JOINED, b=RUNNING), members="abc", round=2)
    decision = joiner("b", last_round=1).decide(here, View(), 0.0)
    assert isinstance(decision, Put)
    assert decision.state.complete
    assert decision.state.members == {"a": 0, "b": 1}


def test_a_live_member_is_awaited_for_a_limited_time() -> None:
    """It may have to stop its workers; after two last calls the others continue without it."""
    here = state(*nodes(a=JOINED, b=JOINED, c=RUNNING), members="abc", round=2)
    waiting = joiner("a", last_round=1).decide(here, View(gathering_s=59, enough_s=59), 59.0)
    assert isinstance(waiting, Wait)
    assert "host-c" in waiting.why
    done = joiner("a", last_round=1).decide(here, View(gathering_s=60, enough_s=60), 60.0)
    assert isinstance(done, Put)
    assert done.state.members == {"a": 0, "b": 1}
    assert done.state.node("c") is None


def test_a_dead_member_is_not_awaited() -> None:
    here = state(*nodes(a=JOINED, b=JOINED, c=RUNNING), members="abc", round=2)
    decision = joiner("a", last_round=1).decide(here, View(dead=frozenset("c")), 1.0)
    assert isinstance(decision, Put)
    assert decision.state.members == {"a": 0, "b": 1}


def test_a_live_member_is_not_replaced_by_a_faster_spare() -> None:
    """D3: the member may still be stopping its workers."""
    here = state(*nodes(a=JOINED, b=RUNNING, s=WAITING), members="ab", round=2, max_nodes=2)
    decision = joiner("s", terms(2, 2)).decide(here, View(), 0.0)
    assert isinstance(decision, Wait)
    assert decision.is_spare
    later = joiner("s", terms(2, 2)).decide(here, View(gathering_s=60), 60.0)
    assert isinstance(later, Put)
    assert later.state.members == {"a": 0, "s": 1}


def test_a_new_node_waits_while_a_group_runs() -> None:
    here = state(*nodes(a=RUNNING, b=RUNNING), members="ab", complete=True)
    decision = joiner("n").decide(here, View(), 0.0)
    assert isinstance(decision, Put)
    assert decision.state.complete
    assert standings(decision.state)["n"] is WAITING


def test_a_new_node_opens_the_next_round_if_all_members_are_dead() -> None:
    """D6: no other node can."""
    here = state(*nodes(a=RUNNING, b=RUNNING, n=WAITING), members="abc", complete=True, round=7)
    decision = joiner("n").decide(here, View(dead=frozenset("ab")), 0.0)
    assert isinstance(decision, Put)
    assert (decision.state.round, decision.state.complete) == (8, False)
    assert standings(decision.state) == {"n": JOINED}


def test_a_member_that_joins_again_opens_the_next_round() -> None:
    here = state(*nodes(a=RUNNING, b=RUNNING), members="ab", complete=True, round=3)
    assert joiner("a", last_round=2).decide(here, View(), 0.0) == Done(3, 0, 2)
    decision = joiner("a", last_round=3).decide(here, View(), 0.0)
    assert isinstance(decision, Put)
    assert (decision.state.round, standings(decision.state)) == (4, {"a": JOINED, "b": RUNNING})


def test_a_member_removed_by_the_others_does_not_enter_the_round() -> None:
    """It noticed late that the round is complete, and was removed meanwhile."""
    here = state(*nodes(b=RUNNING), members="ab", complete=True, round=3)
    decision = joiner("a", last_round=2).decide(here, View(), 0.0)
    assert isinstance(decision, Put)
    assert decision.state.round == 4


def test_rounds_grow_after_the_state_was_lost() -> None:
    """D2: numbers of old rounds are not used again."""
    decision = joiner("a", last_round=9).decide(None, View(), 0.0)
    assert isinstance(decision, Put)
    assert decision.state.round == 10
    recreated = state(*nodes(n=JOINED), round=1)
    decision = joiner("a", last_round=9).decide(recreated, View(), 0.0)
    assert isinstance(decision, Put)
    assert (decision.state.round, standings(decision.state)) == (10, {"n": JOINED, "a": JOINED})


def test_a_spare_has_no_deadline_and_exits_without_an_error() -> None:
    """D5; with TorchElastic's RendezvousGracefulExitError."""
    full = state(*nodes(a=RUNNING, b=RUNNING, s=WAITING), members="ab", complete=True, max_nodes=2)
    spare = joiner("s", terms(2, 2, join_s=10))
    for now in (0.0, 1000.0, 100000.0):
        decision = spare.decide(full, View(), now)
        assert isinstance(decision, Wait)
        assert decision.is_spare
    decision = spare.decide(decisions.closed(full, "the workers of host-a finished"), View(), 100001.0)
    assert isinstance(decision, Refused)
    assert isinstance(decision.error, RendezvousGracefulExitError)


def test_the_deadline_of_a_spare_starts_when_it_is_needed() -> None:
    spare = joiner("s", terms(2, 2, join_s=10))
    full = state(*nodes(a=RUNNING, b=RUNNING, s=WAITING), members="ab", complete=True, max_nodes=2)
    assert isinstance(spare.decide(full, View(), 5000.0), Wait)
    needed = state(*nodes(s=JOINED), members="ab", round=2, max_nodes=2)
    assert isinstance(spare.decide(needed, View(), 5009.0), Wait)
    decision = spare.decide(needed, View(), 5010.0)
    assert isinstance(decision, Refused)
    assert isinstance(decision.error, RendezvousTimeoutError)


def test_a_join_timeout_names_the_nodes_that_joined() -> None:
    decision = joiner("a", terms(join_s=10)).decide(state(*nodes(a=JOINED)), View(), 10.0)
    assert isinstance(decision, Refused)
    assert isinstance(decision.error, RendezvousTimeoutError)
    assert str(decision.error) == (
        "only 1 of at least 2 nodes joined round 1 of the run 'run' within 10 s: host-a; start the missing nodes, or "
        "allow fewer"
    )


def test_a_closed_run_rejects_nodes() -> None:
    decision = joiner("a").decide(state(closed="it was closed on host-b"), View(), 0.0)
    assert isinstance(decision, Refused)
    assert isinstance(decision.error, RendezvousClosedError)
    assert str(decision.error) == "the run 'run' is over: it was closed on host-b"


def test_a_node_with_other_min_and_max_nodes_is_rejected() -> None:
    """Otherwise it would complete rounds that are incomplete for the others, without end."""
    decision = joiner("b", terms(1, 2)).decide(state(*nodes(a=JOINED)), View(), 0.0)
    assert isinstance(decision, Refused)
    assert isinstance(decision.error, RendezvousStateError)
    assert "this node is configured for 1 to 2 nodes" in str(decision.error)
    assert "but the run 'run' for 2 to 4;" in str(decision.error)


def test_other_min_and_max_nodes_are_accepted_if_all_others_are_dead() -> None:
    decision = joiner("b", terms(1, 2)).decide(state(*nodes(a=JOINED)), View(dead=frozenset("a")), 0.0)
    assert isinstance(decision, Put)
    assert (decision.state.min_nodes, decision.state.max_nodes) == (1, 2)


# --- the result of num_nodes_waiting (D6) -----------------------------------------------------------------------------


def pending(state_: State | None, node_id: str = "a", round_: int = 1, dead: str = "") -> int:
    return decisions.pending(state_, View(dead=frozenset(dead)), node_id, round_)


def test_waiting_nodes_count_up_to_max_nodes() -> None:
    """Spares do not count: a full group would restart without need."""
    group = nodes(a=RUNNING, b=RUNNING)
    assert pending(state(*group, members="ab", complete=True)) == 0
    waiting = [*group, *nodes(x=WAITING, y=WAITING, z=WAITING)]
    assert pending(state(*waiting, members="ab", complete=True)) == 2
    assert pending(state(*waiting, members="ab", complete=True, max_nodes=2)) == 0
    assert pending(state(*waiting, members="ab", complete=True), dead="xyz") == 0


def test_a_dead_member_counts() -> None:
    """Whether it is silent or was removed by another node; a spare can replace it."""
    group = state(*nodes(a=RUNNING, b=RUNNING), members="abc", complete=True)
    assert pending(group) == 1
    assert pending(group, dead="b") == 2
    with_spare = state(*nodes(a=RUNNING, b=RUNNING, s=WAITING), members="ab", complete=True, max_nodes=2)
    assert pending(with_spare, dead="b") == 2


def test_a_later_round_without_this_node_counts() -> None:
    """So a node that was stopped or cut off learns that its group is over."""
    assert pending(state(*nodes(a=RUNNING, b=JOINED, c=JOINED), members="abc", round=2)) == 2
    assert pending(state(*nodes(b=RUNNING), members="b", round=2, complete=True)) == 1
    assert pending(state(*nodes(b=RUNNING), members="ab", complete=True)) == 1
    assert pending(None) == 1


def test_nothing_counts_in_a_closed_run_and_all_waiting_nodes_without_a_group() -> None:
    here = state(*nodes(b=RUNNING, x=WAITING, y=WAITING), members="b", complete=True)
    assert pending(decisions.closed(here, "over")) == 0
    assert pending(here, round_=0) == 2
    assert pending(None, round_=0) == 0


def test_only_the_latest_group_ends_the_run() -> None:
    assert decisions.ends_with(state(members="ab", round=3, complete=True), 3)
    assert decisions.ends_with(state(members="ab", round=4), 3)
    assert not decisions.ends_with(state(members="ab", round=4, complete=True), 3)
    assert not decisions.ends_with(state(members="ab", round=3, complete=True), 0)
    assert not decisions.ends_with(None, 3)


# --- the watch (S4) ---------------------------------------------------------------------------------------------------


def beating(**beats: int) -> State:
    return state(
        *(Node(each, each, RUNNING, beat) for each, beat in beats.items()), members="".join(beats), complete=True
    )


@pytest.mark.parametrize("origin", [0.0, 1.7e9, -3600.0])
def test_death_is_silence_on_the_observers_own_clock(origin: float) -> None:
    """With any origin of that clock: only elapsed time counts."""
    watch = Watch(keep_alive_s=5, max_attempts=3)
    assert not watch.look(beating(a=1, b=1), origin).dead
    for second in range(5, 15, 5):
        assert not watch.look(beating(a=1 + second, b=1), origin + second).dead
    assert watch.look(beating(a=99, b=1), origin + 15).dead == {"b"}
    assert not watch.look(beating(a=100, b=2), origin + 16).dead


def test_an_observer_that_was_stopped_does_not_declare_others_dead() -> None:
    """An hour without a reading counts as one interval."""
    watch = Watch(keep_alive_s=5, max_attempts=3)
    watch.look(beating(a=1), 0.0)
    assert not watch.look(beating(a=1), 3600.0).dead
    assert not watch.look(beating(a=1), 3605.0).dead
    assert watch.look(beating(a=1), 3610.0).dead == {"a"}


def test_the_last_call_starts_when_there_are_enough_nodes() -> None:
    """And starts again after there were too few, and in another round."""
    watch = Watch(keep_alive_s=5, max_attempts=300)
    one, two = state(*nodes(a=JOINED)), state(*nodes(a=JOINED, b=JOINED))
    assert watch.look(one, 0.0).enough_s == 0
    assert watch.look(two, 5.0).enough_s == 0
    assert watch.look(two, 8.0).enough_s == 3
    assert watch.look(one, 9.0) == View(gathering_s=9, enough_s=0)
    assert watch.look(two, 10.0).enough_s == 0
    assert watch.look(two, 11.0).enough_s == 1
    assert watch.look(state(*nodes(a=JOINED, b=JOINED), round=2), 12.0) == View()


# --- whole clusters ---------------------------------------------------------------------------------------------------

KEEP_ALIVE_S = 1.0
ATTEMPTS = 3
LAST_CALL_S = 3.0


class SimulatedNode:
    """One node: its clock, its last reading, and its current attempt to join."""

    def __init__(self, node_id: str, origin: float) -> None:
        self.id = node_id
        self.origin = origin
        self.watch = Watch(KEEP_ALIVE_S, ATTEMPTS)
        self.round = self.last_round = 0
        self.joiner: Joiner | None = None
        self.reading: tuple[State | None, int, View] = (None, 0, View())
        self.is_spare = False


class Cluster(RuleBasedStateMachine):
    """Nodes start, fail and die in any order, between any two steps of each other, with one compare-and-set."""

    def __init__(self) -> None:
        super().__init__()
        self.blob: bytes | None = None
        self.version = 0
        self.time = 0.0
        self.nodes: list[SimulatedNode] = []
        self.started = 0
        self.groups: dict[int, dict[str, int]] = {}

    @initialize(least=st.integers(1, 3), more=st.integers(0, 2), here=st.integers(0, 4))
    def choose_terms(self, least: int, more: int, here: int) -> None:
        self.terms = terms(least, least + more, join_s=1e9, last_call_s=LAST_CALL_S)
        for index in range(here):
            self.start(origin=1000.0 * index)

    def state(self) -> State | None:
        return None if self.blob is None else decode(self.blob, "run")

    def write(self, new: State, version: int) -> bool:
        if version != self.version:
            return False
        old, self.blob, self.version = self.state(), encode(new), self.version + 1
        assert old is None or new.round >= old.round, "D2"
        if new.complete:
            assert sorted(new.members.values()) == list(range(len(new.members))), "S2"
            assert self.terms.min_nodes <= len(new.members) <= self.terms.max_nodes, "D1"
            assert self.groups.setdefault(new.round, new.members) == new.members, "D1"
        return True

    def read(self, node: SimulatedNode) -> None:
        here = self.state()
        node.reading = (here, self.version, node.watch.look(here, self.time + node.origin))

    def act(self, node: SimulatedNode) -> None:
        here, version, view = node.reading
        assert node.joiner is not None
        decision = node.joiner.decide(here, view, self.time + node.origin)
        node.is_spare = isinstance(decision, Wait) and decision.is_spare
        match decision:
            case Put(new):
                self.write(new, version)
                self.read(node)
            case Done(round_, rank, world_size):
                assert self.groups[round_][node.id] == rank
                assert len(self.groups[round_]) == world_size
                assert round_ > node.last_round
                node.round = node.last_round = round_
                node.joiner = None
            case Wait():
                pass
            case Refused(error):
                raise AssertionError(f"unexpected {error!r}")

    def begin_join(self, node: SimulatedNode) -> None:
        node.joiner = Joiner(node.id, node.id, self.terms, node.last_round, self.time + node.origin)
        node.round = 0
        self.read(node)

    def beat(self, node: SimulatedNode) -> None:
        here = self.state()
        beaten = None if here is None else decisions.with_heartbeat(here, node.id)
        if beaten is not None:
            self.write(beaten, self.version)

    def poll(self, node: SimulatedNode) -> None:
        self.read(node)
        if decisions.pending(node.reading[0], node.reading[2], node.id, node.round) > 0:
            self.begin_join(node)

    # --- rules --------------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.nodes) < 6)
    @rule(origin=st.sampled_from([0.0, 1e6, -1e6]))
    def start(self, origin: float) -> None:
        self.started += 1
        node = SimulatedNode(f"n{self.started}", origin)
        self.nodes.append(node)
        self.begin_join(node)

    def pick(self, data: Any, is_joining: bool) -> SimulatedNode | None:
        choices = [node for node in self.nodes if (node.joiner is not None) is is_joining]
        return data.draw(st.sampled_from(choices)) if choices else None

    @rule(data=st.data())
    def a_node_reads(self, data: Any) -> None:
        if node := self.pick(data, is_joining=True):
            self.read(node)

    @rule(data=st.data())
    def a_node_acts_on_its_reading(self, data: Any) -> None:
        if node := self.pick(data, is_joining=True):
            self.act(node)

    @rule()
    def all_nodes_take_a_step(self) -> None:
        self.step_all()

    @rule(data=st.data())
    def an_agent_polls(self, data: Any) -> None:
        if node := self.pick(data, is_joining=False):
            self.poll(node)

    @rule(data=st.data())
    def a_worker_fails(self, data: Any) -> None:
        if node := self.pick(data, is_joining=False):
            self.begin_join(node)

    @precondition(lambda self: len(self.nodes) > 1)
    @rule(data=st.data())
    def a_node_dies(self, data: Any) -> None:
        self.nodes.remove(data.draw(st.sampled_from(self.nodes)))

    @rule(seconds=st.sampled_from([0.3, 1.0, 5.0]), data=st.data())
    def time_passes(self, seconds: float, data: Any) -> None:
        """Some nodes send a heartbeat meanwhile, some do not."""
        self.time += seconds
        for node in self.nodes:
            if data.draw(st.booleans()):
                self.beat(node)

    @invariant()
    def every_node_runs_in_an_agreed_group(self) -> None:
        for node in self.nodes:
            assert node.round == 0 or node.id in self.groups[node.round]

    def teardown(self) -> None:
        """Without further faults, the live nodes form one stable group, or wait if they are too few."""
        if not self.nodes:
            return
        for _ in range(80):
            self.step_all()
        settled = dict(self.groups)
        for _ in range(20):
            self.step_all()
        assert self.groups == settled, "no livelock"
        in_group = [node for node in self.nodes if node.round]
        if len(self.nodes) < self.terms.min_nodes:
            assert not in_group
            return
        assert len(in_group) == min(len(self.nodes), self.terms.max_nodes)
        assert {node.round for node in in_group} == {max(self.groups)}
        assert all(node.is_spare for node in self.nodes if not node.round), "D5"

    def step_all(self) -> None:
        self.time += 0.5
        for node in self.nodes:
            self.beat(node)
        for node in self.nodes:
            if node.joiner is None:
                self.poll(node)
            else:
                self.read(node)
                self.act(node)


TestCluster = Cluster.TestCase
TestCluster.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
