"""Elections and decisions with a real etcd: one leader, messages only after the write, no writes once deposed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kit.etcd import EtcdCluster, needs_etcd, unique_prefix
from kit.processes import TIMEOUT_S
from tenax._core.authority import AuthorityTerms
from tenax._core.coordinator import CoordinatorState, Over, RunSettings, Send
from tenax._core.etcd.errors import EtcdError
from tenax._core.etcd.operations import Delete, Put, Range
from tenax._core.events import GenerationEnded, GenerationFormed, Waiting
from tenax._core.leadership.candidacy import Candidacy, Elected
from tenax._core.leadership.decisions import Decisions
from tenax._core.leadership.keys import Keys, Leader, LeaderAddress, LeaderAndRecord, Written
from tenax._core.lease import LeaseTerms
from tenax._core.model import Assignment, Failure, Outcome, Verdict
from tenax._core.record import RecordedMember, RunRecord
from tenax._core.run_state import Generation
from tenax._io.etcd.client import EtcdClient
from tenax._io.loop import Loop

pytestmark = [needs_etcd, pytest.mark.process]
TERMS = AuthorityTerms(LeaseTerms(1.0, 10.0))


class Harness:
    """A loop, a client, and the keys of one run."""

    def __init__(self, etcd: EtcdCluster) -> None:
        self.loop = Loop()
        self.client = EtcdClient(self.loop, etcd.settings())
        self.keys = Keys(unique_prefix().decode())
        self.won: dict[str, Elected] = {}
        self.lost: list[str] = []
        self.failed: list[EtcdError] = []
        self.ended: list[Verdict | None] = []
        self.candidacies: dict[str, Candidacy] = {}
        self.delivered: list[Send] = []
        self.deposed: list[str] = []
        self.written: list[RunRecord] = []

    def until(self, is_so: Callable[[], Any]) -> None:
        until = self.loop.now() + TIMEOUT_S
        while not is_so():
            assert self.loop.now() < until, "timed out"
            tick = self.loop.now() + 0.05
            self.loop.next_event(lambda tick=tick: tick)  # type: ignore[misc]

    def ask(self, operation: Any) -> Any:
        answers: list[Any] = []
        self.client.call(operation, answers.append, answers.append)
        self.until(lambda: answers)
        assert not isinstance(answers[0], EtcdError), answers[0]
        return answers[0]

    def start_candidacy(self, name: str, known: RunRecord | None = None, **options: Any) -> Candidacy:
        candidacy = self.candidacies[name] = Candidacy(
            self.client,
            self.keys,
            Leader(LeaderAddress(name, f"host-{name}", "127.0.0.1", 1), name.encode()),
            options.get("terms", TERMS),
            (int.from_bytes(os.urandom(7), "big"), int.from_bytes(os.urandom(7), "big")),
            fit=options.get("fit", "nodes and secret"),
            must_fit=options.get("must_fit", True),
            known=known,
            run=options.get("run", 0),
            may_begin=lambda: False,
            won=lambda elected: self.won.__setitem__(name, elected),
            lost=lambda: self.lost.append(name),
            ended=self.ended.append,
            failed=self.failed.append,
            troubled=lambda _: None,
            deposed=self.deposed.append,
        )
        candidacy.start()
        return candidacy

    def elect(self, name: str, **options: Any) -> Elected:
        self.start_candidacy(name, **options)
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

    def read_keys(self) -> LeaderAndRecord:
        return LeaderAndRecord(self.ask(self.keys.read(0)))

    def recorded(self) -> Written:
        written = self.read_keys().written
        assert written is not None
        return written

    def record_lease(self) -> int:
        kv = self.read_keys().record_kv
        assert kv is not None
        return kv.lease

    def close(self) -> None:
        for candidacy in self.candidacies.values():
            candidacy.close()
        self.client.close()
        self.loop.close()


@pytest.fixture
def harness(etcd: EtcdCluster) -> Iterator[Harness]:
    made = Harness(etcd)
    yield made
    made.close()


def state(generation: int, formed_at: float = 0.0, **more: Any) -> CoordinatorState:
    last = Generation({"a": 0}, {"a": "host"}, formed_at=formed_at)
    return CoordinatorState(RunSettings("run"), generation=generation, last=last, **more)


def formed(generation: int) -> Send:
    return Send(("a",), GenerationFormed(Assignment(generation, 0, 1, 0, 1, 0, 1, "addr", 1)))


ENDED = Send(("a",), GenerationEnded(1, "a node was lost"))
WAITING = Send(("a",), Waiting("for a node"))


def test_one_of_many_candidates_wins(harness: Harness) -> None:
    names = [f"n{number}" for number in range(8)]
    for name in names:
        harness.start_candidacy(name)
    harness.until(lambda: len(harness.won) + len(harness.lost) == len(names))
    assert len(harness.won) == 1
    (winner,) = harness.won
    leader = harness.read_keys().leader
    assert leader is not None
    assert leader.address.node_id == winner


def test_a_decision_is_delivered_once_it_is_written(harness: Harness) -> None:
    harness.elect("x")
    decisions = harness.decisions("x")
    decisions.submit(formed(1), state(1))
    decisions.submit(WAITING, state(1))
    assert not harness.delivered, "later messages wait behind it"
    harness.until(lambda: harness.delivered)
    assert harness.delivered == [formed(1), WAITING]
    assert harness.recorded().record.generation == 1
    assert harness.recorded().record.members == (RecordedMember("a", 0, "host"),)


def test_times_are_recorded_on_the_wall_clock(harness: Harness) -> None:
    """A successor on another host can compare them with its own."""
    harness.elect("x")
    decisions = harness.decisions("x")
    now = harness.loop.now()
    earlier = [Failure(1, 0, 0, 9, 1, now - 3600)]
    decisions.submit(formed(1), state(1, formed_at=now, earlier=earlier), time.time() - now)
    harness.until(lambda: harness.delivered)
    record = harness.recorded().record
    assert abs(record.formed_at - time.time()) < TIMEOUT_S
    assert abs(record.formed_at - record.earlier[0].seen_at - 3600) < 0.001


def test_a_message_without_a_decision_is_delivered_at_once(harness: Harness) -> None:
    harness.elect("x")
    decisions = harness.decisions("x")
    decisions.submit(WAITING, state(0))
    assert harness.delivered == [WAITING]


def test_a_generation_can_end_without_etcd_but_the_next_waits_for_it(
    make_etcd: Callable[..., EtcdCluster],
) -> None:
    etcd = make_etcd(1)
    harness = Harness(etcd)
    harness.elect("x")
    decisions = harness.decisions("x")
    decisions.submit(formed(1), state(1))
    harness.until(lambda: harness.delivered)
    etcd.stop(0)
    decisions.submit(ENDED, state(1))
    assert harness.delivered == [formed(1), ENDED]
    decisions.submit(formed(2), state(2, settled=1))
    decisions.submit(formed(3), state(3, settled=2))
    etcd.cont(0)
    harness.until(lambda: len(harness.delivered) == 4)
    assert harness.delivered[2:] == [formed(2), formed(3)]
    assert [record.generation for record in harness.written] == [1, 2, 3]
    harness.close()


def test_a_deposed_leader_writes_and_delivers_nothing(harness: Harness) -> None:
    harness.elect("old")
    decisions = harness.decisions("old")
    harness.ask(Delete(harness.keys.leader))
    new = harness.elect("new")
    decisions.submit(formed(1), state(1))
    decisions.submit(WAITING, state(1))
    harness.until(lambda: harness.deposed)
    assert not harness.delivered
    assert harness.recorded() == new.written
    decisions.submit(formed(2), state(2))
    harness.ask(Range(harness.keys.record))
    assert not harness.delivered
    assert harness.read_keys().recorded_at == new.recorded_at


def test_a_record_written_by_another_process_is_not_overwritten(harness: Harness) -> None:
    """For example by a late attempt of the previous leader."""
    harness.elect("x")
    decisions = harness.decisions("x")
    harness.ask(Put(harness.keys.record, b"{}"))
    decisions.submit(formed(1), state(1))
    harness.until(lambda: harness.deposed)
    assert not harness.delivered


def test_a_successor_continues_the_record_and_knows_the_earlier_leaders(harness: Harness) -> None:
    """All that may still answer members which are not linked to it yet."""
    harness.elect("first")
    harness.decisions("first").submit(formed(1), state(1))
    harness.until(lambda: harness.delivered)
    for name, before in (("second", ["first"]), ("third", ["first", "second"])):
        harness.ask(Delete(harness.keys.leader))
        elected = harness.elect(name)
        assert elected.written.record.generation == 1
        assert [address.node_id for address in elected.written.before] == before
        assert elected.written.by.node_id == name
        assert harness.record_lease() == harness.candidacies["first"].record_lease.id, "it expires if no member returns"
    harness.decisions("third").forget_earlier(state(1))
    harness.until(lambda: len(harness.written) == 2)
    assert harness.recorded().before == ()
    assert harness.recorded().by.node_id == "third"
    assert harness.record_lease() == harness.candidacies["third"].record_lease.id


def test_a_successor_uses_the_longest_terms_of_all_earlier_leaders(harness: Harness) -> None:
    """Nodes may have been started with different terms."""
    harness.elect("first", terms=AuthorityTerms(LeaseTerms(1.0, 30.0), outage_s=5.0))
    harness.decisions("first").submit(formed(1), state(1))
    harness.until(lambda: harness.delivered)
    harness.ask(Delete(harness.keys.leader))
    first = harness.elect("second", terms=AuthorityTerms(LeaseTerms(2.0, 6.0), outage_s=600.0)).written.longest
    assert first == AuthorityTerms(LeaseTerms(2.0, 10.0), outage_s=600.0), "the decision used other terms"


def test_a_node_with_other_settings_cannot_lead_the_run(harness: Harness) -> None:
    """It is refused, and the record stays unchanged."""
    before = harness.elect("first").written
    harness.ask(Delete(harness.keys.leader))
    harness.start_candidacy("other", fit="something else")
    harness.until(lambda: harness.failed)
    assert "or the TLS settings of this node differ from those of the run" in str(harness.failed[0])
    assert harness.recorded() == before
    harness.start_candidacy("a member that was linked", fit="something else", must_fit=False)
    harness.until(lambda: harness.won.get("a member that was linked"))
    assert harness.recorded().fit == before.fit


def test_leaders_without_a_running_generation_are_not_recorded(harness: Harness) -> None:
    harness.elect("first")
    harness.decisions("first").submit(WAITING, state(3, settled=3))
    harness.until(lambda: harness.delivered)
    harness.ask(Delete(harness.keys.leader))
    assert harness.elect("second").written.before == ()


def test_after_the_verdict_the_record_gets_a_short_lease_and_nodes_of_the_run_find_the_verdict(
    harness: Harness,
) -> None:
    verdict = Verdict(Outcome.SUCCEEDED, "all succeeded")
    run = harness.elect("x").leader.run
    decisions = harness.decisions("x")
    decisions.submit(WAITING, state(1, settled=1, phase=Over(verdict)))
    harness.until(lambda: harness.delivered)
    assert harness.record_lease() not in (0, harness.candidacies["x"].record_lease.id)
    harness.ask(Delete(harness.keys.leader))
    harness.start_candidacy("new")
    harness.until(lambda: harness.failed)
    assert "a run with this --rdzv-id is over: all succeeded" in str(harness.failed[0])
    harness.ask(Delete(harness.keys.record))
    assert harness.elect("next run").leader.run != run
    harness.ask(Delete(harness.keys.leader))
    harness.start_candidacy("of the first run", run=run)
    harness.until(lambda: harness.ended)
    assert harness.ended == [verdict]


def test_a_node_of_a_run_that_etcd_does_not_know_cannot_lead_another(harness: Harness) -> None:
    harness.elect("x")
    harness.ask(Delete(harness.keys.leader))
    harness.start_candidacy("of another run", run=7)
    harness.until(lambda: harness.ended)
    assert harness.ended == [None]
    assert not harness.read_keys().leader


def test_a_record_that_etcd_has_lost_is_written_again(harness: Harness) -> None:
    harness.start_candidacy("x", known=RunRecord(7))
    harness.until(lambda: harness.won)
    assert harness.recorded().record.generation == 7


@pytest.mark.parametrize("value", [b"of another program", b'{"nested":' * 10_000 + b"1" + b"}" * 10_000])
@pytest.mark.parametrize("key", ["leader", "record"])
def test_an_invalid_value_under_a_key_of_the_run_is_reported(harness: Harness, key: str, value: bytes) -> None:
    """Also JSON that is nested too deeply."""
    harness.ask(Put(getattr(harness.keys, key), value))
    harness.start_candidacy("x")
    harness.until(lambda: harness.failed)
    assert "another version of tenax, or another program, wrote it" in str(harness.failed[0])
    assert not harness.won


def test_resigning_deletes_the_leader_key_and_keeps_the_record(harness: Harness) -> None:
    harness.elect("x")
    ended: list[bool] = []
    harness.candidacies["x"].end(lambda: ended.append(True))
    harness.until(lambda: ended)
    read_keys = harness.read_keys()
    assert read_keys.leader is None
    assert read_keys.written is not None


def test_runs_with_similar_ids_have_different_keys() -> None:
    assert Keys("a/b").leader != Keys("a").leader
    assert Keys("a/b").leader != Keys("a%2Fb").leader
