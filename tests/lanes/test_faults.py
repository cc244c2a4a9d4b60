"""The lane of faults: two short plans are played; plans, evidence and checker are looked at by themselves."""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kit.etcd import needs_etcd
from tenax._core.model import Outcome, Verdict
from tenax._core.record import RecordedMember, RunRecord

from .desk import Line, WorkerHub
from .faults import main
from .history import History, Recorded, WorkerLife, broken
from .plan import LONGEST_S, SHORTEST_S, draw
from .play import Play

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at processes through /proc")

# Short plans with much in them: a dead leader and a stopped one, agents that come, workers that fail, etcd away.
PLAYED = (176, 227)
PLAYED_S = 6.0


# --- real ones --------------------------------------------------------------------------------------------------------


@needs_etcd
@pytest.mark.parametrize("seed", PLAYED)
def test_a_run_survives_its_plan(seed: int, tmp_path: Path) -> None:
    played = Play(draw(seed, PLAYED_S), tmp_path, patience_s=50.0)
    assert not played.run(), f"{played.broken}\n{played.story}"
    assert played.counts["generations"] > 0, "nobody ever worked"


# --- plans ------------------------------------------------------------------------------------------------------------


def test_a_plan_is_a_function_of_its_seed() -> None:
    assert [draw(seed) for seed in range(50)] == [draw(seed) for seed in range(50)]
    assert len({str(draw(seed).faults) for seed in range(50)}) == 50


@pytest.mark.parametrize("seconds", [0.0, 6.0])
def test_every_plan_can_be_played(seconds: float) -> None:
    for seed in range(300):
        plan = draw(seed, seconds)
        assert plan.agents in (3, 4)
        times = [fault.at_s for fault in plan.faults]
        assert times == sorted(times)
        assert times
        assert times[-1] <= (seconds or 25.0)
        for fault in plan.faults:
            assert fault.kind != "stop" or fault.lasts_s, "what is stopped is continued"
            assert fault.lasts_s == 0 or SHORTEST_S <= fault.lasts_s <= LONGEST_S
        assert sum(fault.target == "worker" for fault in plan.faults) <= plan.max_restarts, "it can succeed"


def test_plans_have_everything_in_them() -> None:
    drawn = {(fault.kind, fault.target) for seed in range(100) for fault in draw(seed).faults}
    etcd = {(kind, target) for kind in ("kill", "stop") for target in ("etcd leader", "etcd member", "all of etcd")}
    agents = {(kind, target) for kind in ("kill", "stop") for target in ("leader", "agent")}
    assert drawn == etcd | agents | {("start", "agent"), ("fail", "worker"), ("kill", "worker")}


# --- evidence ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def desk() -> Iterator[WorkerHub]:
    made = WorkerHub()
    yield made
    made.close()


def report(desk: WorkerHub, generation: int, rank: int = 0) -> socket.socket:
    """A worker comes to the desk; it is known there when this returns."""
    sock = socket.socket(socket.AF_UNIX)
    sock.connect("\0" + desk.name)
    env = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    env |= {"TORCHELASTIC_RESTART_COUNT": "0", "TENAX_GENERATION": str(generation)}
    known = len(desk.lives)
    said = {"agent": "node0", "pid": 1000 * generation + rank, "began": time.monotonic(), **env}
    sock.sendall(json.dumps(said).encode() + b"\n")
    assert desk.wait_for(lambda: len(desk.lives) > known, 30)
    return sock


def test_an_open_connection_is_a_proof(desk: WorkerHub) -> None:
    with report(desk, 1), report(desk, 2):
        old, new = desk.lives
        assert old.alive_at > new.began_at
        assert any(each.startswith("S1") for each in broken(History(0, desk.lives)))


def test_a_closed_connection_is_none_though_its_last_words_were_not_read() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        line = Line(ours)
        theirs.sendall(b"last words\n")
        assert line.is_open()
        theirs.close()
        assert not line.is_open()


def test_who_is_gone_was_not_there_together(desk: WorkerHub) -> None:
    report(desk, 1).close()
    with report(desk, 2):
        old, new = desk.lives
        assert old.alive_at < new.began_at
        assert not [each for each in broken(History(0, desk.lives)) if each.startswith("S1")]


def test_a_sign_of_life_counts_from_when_it_was_made(desk: WorkerHub) -> None:
    with report(desk, 1) as old:
        moment = time.monotonic()
        old.sendall(b"%.6f\n%.6f\n" % (moment - 1, moment))
        old.shutdown(socket.SHUT_WR)
        assert desk.wait_for(lambda: desk.lives[0].gone_at > 0, 30)
        assert desk.lives[0].alive_at == pytest.approx(moment, abs=1e-5)
        assert desk.alive() == []


def test_workers_are_told_to_succeed_also_if_they_come_later(desk: WorkerHub) -> None:
    with report(desk, 1) as first:
        desk.finish()
        with report(desk, 2) as second:
            assert first.recv(10) == second.recv(10) == b"0\n"


# --- the checker ------------------------------------------------------------------------------------------------------

MEMBERS = (RecordedMember("one", 0, "host"), RecordedMember("other", 1, "host #2"))


def life(generation: int, rank: int, began_at: float, alive_at: float, **changes: object) -> WorkerLife:
    made = WorkerLife(
        f"node{rank}", 1000 * generation + rank, generation, rank, 2, f"store{generation}", 0, began_at, alive_at
    )
    return msgspec.structs.replace(made, **changes)


def record(generation: int, settled: int = 0, **changes: object) -> RunRecord:
    made = RunRecord(generation, MEMBERS if generation else (), settled, 2, f"store{generation}" if generation else "")
    return msgspec.structs.replace(made, **changes)


def verdict(outcome: Outcome = Outcome.SUCCEEDED) -> Verdict:
    return Verdict(outcome=outcome, why="all succeeded", generation=2)


def recorded(*records: RunRecord | None) -> list[Recorded]:
    return [Recorded(float(number), 10 + number, each) for number, each in enumerate(records)]


def good() -> History:
    """Two generations, one after the other, a restart between, and an end."""
    workers = [life(1, 0, 1.0, 5.0), life(1, 1, 1.1, 5.1)]
    workers += [life(2, rank, 6.0, 9.0, restarts=1) for rank in (0, 1)]
    second = record(2, 1, restarts_used=1)
    end = msgspec.structs.replace(second, verdict=verdict())
    return History(1, workers, recorded(record(0), record(1), record(1, 1, restarts_used=1), second, end, None), 1)


def test_a_good_history_holds() -> None:
    assert broken(good()) == []
    assert broken(History(0)) == []


def spoil_overlap(history: History) -> None:
    history.workers[1].alive_at = 6.001


def spoil_overlap_of_a_generation_between(history: History) -> None:
    history.workers += [life(3, 0, 7.0, 8.0)]
    history.records[4:] = recorded(record(3, 2, restarts_used=1))


def spoil_world_size(history: History) -> None:
    history.workers[0].world_size = 3


def spoil_rank(history: History) -> None:
    history.workers[3].rank = 0


def spoil_rank_out_of_its_world(history: History) -> None:
    history.workers[3].rank = 2


def spoil_store(history: History) -> None:
    history.workers[2].store = "another"


def spoil_restart_count(history: History) -> None:
    history.workers[2].restarts = 0


def spoil_world_of_all(history: History) -> None:
    for worker in history.workers[:2]:
        worker.world_size = 4


def spoil_generation_unwritten(history: History) -> None:
    del history.records[3:]


def spoil_too_many_restarts(history: History) -> None:
    history.max_restarts = 0


def spoil_free_restart_charged(history: History) -> None:
    history.hurts = 0


def spoil_generation_down(history: History) -> None:
    history.records[4:4] = recorded(record(1, 1, restarts_used=1))


def spoil_settled_down(history: History) -> None:
    history.records[4:4] = recorded(record(2, 0, restarts_used=1))


def spoil_restarts_down(history: History) -> None:
    history.records[4:4] = recorded(record(2, 1))


def spoil_formed_twice(history: History) -> None:
    others = (RecordedMember("third", 0, "host #3"), MEMBERS[1])
    history.records[4:4] = recorded(record(2, 1, restarts_used=1, members=others))


def spoil_after_verdict(history: History) -> None:
    end = history.records[4].record
    assert end is not None
    history.records[5:5] = recorded(msgspec.structs.replace(end, verdict=verdict(Outcome.FAILED)))


def spoil_formed_after_verdict(history: History) -> None:
    history.records[5:5] = recorded(record(3, 2, restarts_used=1))


def spoil_record_again(history: History) -> None:
    history.records += recorded(record(0))


def spoil_record_lost(history: History) -> None:
    del history.records[4]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (spoil_overlap, "S1: [generation 1 rank 1 of 2 on node1, pid 1001] was alive 0.001 s after [generation 2"),
        (spoil_overlap_of_a_generation_between, "S1: [generation 2"),
        (spoil_world_size, "S2: generation 1 has several world sizes: [2, 3]"),
        (spoil_rank, "have the same rank"),
        (spoil_rank_out_of_its_world, "has no place in its world"),
        (spoil_store, "S2: generation 2 has several stores"),
        (spoil_restart_count, "S2: generation 2 has several restart counts"),
        (spoil_world_of_all, "was told (4, 'store1'), and written is (2, 'store1')"),
        (spoil_generation_unwritten, "S3: generation 2 had workers and was never written"),
        (spoil_too_many_restarts, "1 restarts were charged, and at most 0 are allowed"),
        (spoil_free_restart_charged, "1 restarts were charged, and only 0 workers were made to fail"),
        (spoil_generation_down, "generation went from 2 down to 1"),
        (spoil_settled_down, "settled went from 1 down to 0"),
        (spoil_restarts_down, "restarts_used went from 1 down to 0"),
        (spoil_formed_twice, "generation 2 is another than it was"),
        (spoil_after_verdict, "something changed after the verdict"),
        (spoil_formed_after_verdict, "something changed after the verdict"),
        (spoil_record_again, "there was a record again"),
        (spoil_record_lost, "before there was a verdict"),
    ],
)
def test_what_is_broken_is_found(spoil: object, said: str) -> None:
    history = good()
    assert callable(spoil)
    spoil(history)
    assert any(said in each for each in broken(history)), broken(history)


# --- the command ------------------------------------------------------------------------------------------------------


def test_no_seeds_at_all_are_summed_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "0"]) == 0
    assert capsys.readouterr().out.startswith("0 seeds, 0 broken, in ")
