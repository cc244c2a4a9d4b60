"""Elections and decisions on a real etcd: one leads, what is heard is written, and the deposed write nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kit.etcd import EtcdCluster, needs_etcd, unique_prefix
from tenax._core.authority import AuthorityTerms
from tenax._core.coordinator import CoordinatorState, RunSettings, Send
from tenax._core.events import GenerationEnded, GenerationFormed, Waiting
from tenax._core.lease import LeaseTerms
from tenax._core.model import Assignment, Failure, Outcome, Verdict
from tenax._core.record import RecordedMember, RunRecord
from tenax._engines.etcd.candidacy import Candidacy, Elected
from tenax._engines.etcd.decisions import Decisions
from tenax._engines.etcd.keys import Keys, Leader, LeaderAndRecord, Written
from tenax._engines.etcd.leader_address import LeaderAddress
from tenax._io.etcd.client import EtcdClient
from tenax._io.etcd.errors import EtcdError
from tenax._io.etcd.operations import Delete, Put, Range
from tenax._io.loop import Loop

pytestmark = [needs_etcd, pytest.mark.process]
PATIENCE_S = 30.0
TERMS = AuthorityTerms(LeaseTerms(1.0, 10.0))


class Bench:
    """A loop, a client, and the keys of one run."""

    def __init__(self, etcd: EtcdCluster) -> None:
        self.loop = Loop()
        self.client = EtcdClient(self.loop, etcd.settings())
        self.keys = Keys(unique_prefix().decode())
        self.won: dict[str, Elected] = {}
        self.lost: list[str] = []
        self.failed: list[EtcdError] = []
        self.candidacies: dict[str, Candidacy] = {}
        self.delivered: list[Send] = []
        self.deposed: list[str] = []
        self.written: list[RunRecord] = []

    def until(self, is_so: Callable[[], Any]) -> None:
        until = self.loop.now() + PATIENCE_S
        while not is_so():
            assert self.loop.now() < until, "it did not come to pass"
            tick = self.loop.now() + 0.05
            self.loop.next_event(lambda tick=tick: tick)  # type: ignore[misc]

    def ask(self, operation: Any) -> Any:
        answers: list[Any] = []
        self.client.call(operation, answers.append, answers.append)
        self.until(lambda: answers)
        assert not isinstance(answers[0], EtcdError), answers[0]
        return answers[0]

    def stands(self, name: str, known: RunRecord | None = None, **told: Any) -> Candidacy:
        candidacy = self.candidacies[name] = Candidacy(
            self.client,
            self.keys,
            Leader(LeaderAddress(name, f"host-{name}", "127.0.0.1", 1), name.encode()),
            told.get("terms", TERMS),
            fit=told.get("fit", "nodes and secret"),
            must_fit=told.get("must_fit", True),
            known=known,
            won=lambda elected: self.won.__setitem__(name, elected),
            lost=lambda: self.lost.append(name),
            failed=self.failed.append,
            troubled=lambda _: None,
            deposed=self.deposed.append,
        )
        candidacy.start()
        return candidacy

    def elect(self, name: str, **told: Any) -> Elected:
        self.stands(name, **told)
        self.until(lambda: name in self.won)
        return self.won[name]

    def decisions(self, name: str) -> Decisions:
        return Decisions(
            self.client,
            self.keys,
            self.won[name],
            self.candidacies[name].record_lease.id,
            TERMS,
            deliver=self.delivered.append,
            deposed=self.deposed.append,
            troubled=lambda error: pytest.fail(str(error)),
            written=self.written.append,
        )

    def standing(self) -> LeaderAndRecord:
        return LeaderAndRecord(self.ask(self.keys.both()))

    def recorded(self) -> Written:
        written = self.standing().written
        assert written is not None
        return written

    def close(self) -> None:
        for candidacy in self.candidacies.values():
            candidacy.close()
        self.client.close()
        self.loop.close()


@pytest.fixture
def bench(etcd: EtcdCluster) -> Iterator[Bench]:
    made = Bench(etcd)
    yield made
    made.close()


def state(generation: int, **changes: Any) -> CoordinatorState:
    made = CoordinatorState(RunSettings("run"), generation=generation, members={"a": 0}, member_labels={"a": "host"})
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def formed(generation: int) -> Send:
    return Send(("a",), GenerationFormed(Assignment(generation, 0, 1, 0, 1, 0, 1, "addr", 1)))


ENDED = Send(("a",), GenerationEnded(1, "a node was lost"))
WAITING = Send(("a",), Waiting("for somebody"))


def test_of_many_candidates_one_wins(bench: Bench) -> None:
    names = [f"n{number}" for number in range(8)]
    for name in names:
        bench.stands(name)
    bench.until(lambda: len(bench.won) + len(bench.lost) == len(names))
    assert len(bench.won) == 1
    (winner,) = bench.won
    leader = bench.standing().leader
    assert leader is not None
    assert leader.address.node_id == winner


def test_a_decision_is_heard_when_it_is_written(bench: Bench) -> None:
    bench.elect("x")
    decisions = bench.decisions("x")
    decisions.submit(formed(1), state(1))
    decisions.submit(WAITING, state(1))
    assert not bench.delivered, "and what follows waits behind it"
    bench.until(lambda: bench.delivered)
    assert bench.delivered == [formed(1), WAITING]
    assert bench.recorded().record.generation == 1
    assert bench.recorded().record.members == (RecordedMember("a", 0, "host"),)


def test_times_are_recorded_on_the_wall_clock(bench: Bench) -> None:
    """A successor on another host can compare them with its own."""
    bench.elect("x")
    decisions = bench.decisions("x")
    now = bench.loop.now()
    decisions.submit(formed(1), state(1, formed_at=now, earlier=[Failure(1, 0, 0, 9, 1, now - 3600)]))
    bench.until(lambda: bench.delivered)
    record = bench.recorded().record
    assert abs(record.formed_at - time.time()) < PATIENCE_S
    assert abs(record.formed_at - record.earlier[0].seen_at - 3600) < 0.001


def test_what_is_no_decision_is_heard_at_once(bench: Bench) -> None:
    bench.elect("x")
    decisions = bench.decisions("x")
    decisions.submit(WAITING, state(0))
    assert bench.delivered == [WAITING]


def test_a_generation_ends_without_etcd_and_the_next_begins_with_it(
    make_etcd: Callable[..., EtcdCluster],
) -> None:
    etcd = make_etcd(1)
    bench = Bench(etcd)
    bench.elect("x")
    decisions = bench.decisions("x")
    decisions.submit(formed(1), state(1))
    bench.until(lambda: bench.delivered)
    etcd.stop(0)
    decisions.submit(ENDED, state(1))
    assert bench.delivered == [formed(1), ENDED]
    decisions.submit(formed(2), state(2, settled=1))
    decisions.submit(formed(3), state(3, settled=2))
    etcd.cont(0)
    bench.until(lambda: len(bench.delivered) == 4)
    assert bench.delivered[2:] == [formed(2), formed(3)]
    assert [record.generation for record in bench.written] == [1, 2, 3]
    bench.close()


def test_who_was_deposed_writes_nothing_and_nobody_hears_it(bench: Bench) -> None:
    bench.elect("old")
    decisions = bench.decisions("old")
    bench.ask(Delete(bench.keys.leader))
    new = bench.elect("new")
    decisions.submit(formed(1), state(1))
    decisions.submit(WAITING, state(1))
    bench.until(lambda: bench.deposed)
    assert not bench.delivered
    assert bench.recorded() == new.written
    decisions.submit(formed(2), state(2))
    bench.ask(Range(bench.keys.record))
    assert not bench.delivered
    assert bench.standing().recorded_at == new.recorded_at


def test_a_record_that_somebody_else_has_written_is_not_written_over(bench: Bench) -> None:
    """As by an attempt of the leader before, that came late."""
    bench.elect("x")
    decisions = bench.decisions("x")
    bench.ask(Put(bench.keys.record, b"{}"))
    decisions.submit(formed(1), state(1))
    bench.until(lambda: bench.deposed)
    assert not bench.delivered


def test_a_successor_begins_with_the_record_and_knows_who_led(bench: Bench) -> None:
    """All who may still answer members that it has not seen; until it has seen them."""
    bench.elect("first")
    bench.decisions("first").submit(formed(1), state(1))
    bench.until(lambda: bench.delivered)
    for name, before in (("second", ["first"]), ("third", ["first", "second"])):
        bench.ask(Delete(bench.keys.leader))
        elected = bench.elect(name)
        assert elected.written.record.generation == 1
        assert [place.node_id for place in elected.written.before] == before
        assert elected.written.by.node_id == name
    bench.decisions("third").forget_earlier(state(1))
    bench.until(lambda: len(bench.written) == 2)
    assert bench.recorded().before == ()
    assert bench.recorded().by.node_id == "third"


def test_a_successor_waits_by_the_longest_terms_of_all_before(bench: Bench) -> None:
    """Nodes may have been told different ones, and who led before granted by its own."""
    bench.elect("first", terms=AuthorityTerms(LeaseTerms(1.0, 30.0), outage_s=5.0))
    bench.decisions("first").submit(formed(1), state(1))
    bench.until(lambda: bench.delivered)
    bench.ask(Delete(bench.keys.leader))
    first = bench.elect("second", terms=AuthorityTerms(LeaseTerms(2.0, 6.0), outage_s=600.0)).written.longest
    assert first == AuthorityTerms(LeaseTerms(2.0, 10.0), outage_s=600.0), "the decision was by other terms"


def test_a_stranger_does_not_lead_what_it_was_not_started_for(bench: Bench) -> None:
    """Another number of nodes, or another secret: it is refused, and the record is as it was."""
    before = bench.elect("first").written
    bench.ask(Delete(bench.keys.leader))
    bench.stands("stranger", fit="something else")
    bench.until(lambda: bench.failed)
    assert "or the TLS settings of this node differ from those of the run" in str(bench.failed[0])
    assert bench.recorded() == before
    bench.stands("a member that was linked", fit="something else", must_fit=False)
    bench.until(lambda: bench.won.get("a member that was linked"))
    assert bench.recorded().fit == before.fit


def test_who_led_while_nobody_worked_need_not_be_known(bench: Bench) -> None:
    bench.elect("first")
    bench.decisions("first").submit(WAITING, state(3, settled=3))
    bench.until(lambda: bench.delivered)
    bench.ask(Delete(bench.keys.leader))
    assert bench.elect("second").written.before == ()


def test_after_the_verdict_the_name_is_free_again_soon(bench: Bench) -> None:
    bench.elect("x")
    decisions = bench.decisions("x")
    decisions.submit(WAITING, state(1, settled=1, verdict=Verdict(Outcome.SUCCEEDED, "all succeeded")))
    bench.until(lambda: bench.delivered)
    kv = bench.standing().record_kv
    assert kv is not None
    assert kv.lease not in (0, bench.candidacies["x"].record_lease.id)


def test_a_record_that_etcd_has_lost_is_remembered(bench: Bench) -> None:
    bench.stands("x", known=RunRecord(7))
    bench.until(lambda: bench.won)
    assert bench.recorded().record.generation == 7


@pytest.mark.parametrize("value", [b"what others write", b'{"nested":' * 10_000 + b"1" + b"}" * 10_000])
@pytest.mark.parametrize("key", ["leader", "record"])
def test_what_is_not_ours_under_our_keys_is_told(bench: Bench, key: str, value: bytes) -> None:
    """Also JSON that is nested too deeply to be read."""
    bench.ask(Put(getattr(bench.keys, key), value))
    bench.stands("x")
    bench.until(lambda: bench.failed)
    assert "another version of tenax, or another program, wrote it" in str(bench.failed[0])
    assert not bench.won


def test_a_resignation_takes_the_key_and_leaves_the_record(bench: Bench) -> None:
    bench.elect("x")
    ended: list[bool] = []
    bench.candidacies["x"].end(lambda: ended.append(True))
    bench.until(lambda: ended)
    standing = bench.standing()
    assert standing.leader is None
    assert standing.written is not None


def test_runs_with_like_names_are_apart() -> None:
    assert Keys("a/b").leader != Keys("a").leader
    assert Keys("a/b").leader != Keys("a%2Fb").leader
