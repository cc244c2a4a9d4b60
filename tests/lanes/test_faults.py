"""The lane of faults: two short plans are executed; plans, evidence and checker are tested separately."""

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

from .faults import main
from .history import History, Recorded, WorkerLife, broken
from .plan import MAX_FAULT_S, MIN_FAULT_S, draw
from .play import Play
from .worker_hub import Line, WorkerHub

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")

# Short plans with many faults: a killed and a stopped leader, new agents, failing workers, etcd down.
PLAYED = (176, 227)
PLAYED_S = 6.0


# --- real runs --------------------------------------------------------------------------------------------------------


@needs_etcd
@pytest.mark.parametrize("seed", PLAYED)
def test_a_run_survives_its_faults(seed: int, tmp_path: Path) -> None:
    play = Play(draw(seed, PLAYED_S), tmp_path, timeout_s=50.0)
    assert not play.run(), f"{play.broken}\n{play.history_text}"
    assert play.counts["generations"] > 0, "there was no generation"


# --- plans ------------------------------------------------------------------------------------------------------------


def test_a_plan_is_a_function_of_its_seed() -> None:
    assert [draw(seed) for seed in range(50)] == [draw(seed) for seed in range(50)]
    assert len({str(draw(seed).faults) for seed in range(50)}) == 50


@pytest.mark.parametrize("seconds", [0.0, 6.0])
def test_every_plan_can_be_executed(seconds: float) -> None:
    for seed in range(300):
        plan = draw(seed, seconds)
        assert plan.agents in (3, 4)
        times = [fault.at_s for fault in plan.faults]
        assert times == sorted(times)
        assert times
        assert times[-1] <= (seconds or 25.0)
        for fault in plan.faults:
            assert fault.kind != "stop" or fault.lasts_s, "a stopped process is continued"
            assert fault.lasts_s == 0 or MIN_FAULT_S <= fault.lasts_s <= MAX_FAULT_S
        assert sum(fault.target == "worker" for fault in plan.faults) <= plan.max_restarts, "the run can succeed"


def test_plans_contain_every_kind_of_fault() -> None:
    drawn = {(fault.kind, fault.target) for seed in range(100) for fault in draw(seed).faults}
    etcd = {(kind, target) for kind in ("kill", "stop") for target in ("etcd leader", "etcd member", "all of etcd")}
    agents = {(kind, target) for kind in ("kill", "stop") for target in ("leader", "agent")}
    assert drawn == etcd | agents | {("start", "agent"), ("fail", "worker"), ("kill", "worker")}


# --- evidence ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub() -> Iterator[WorkerHub]:
    made = WorkerHub()
    yield made
    made.close()


def report(hub: WorkerHub, generation: int, rank: int = 0) -> socket.socket:
    """Connect a worker to the hub; returns when the hub has registered it."""
    sock = socket.socket(socket.AF_UNIX)
    sock.connect("\0" + hub.name)
    env = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    env |= {"TORCHELASTIC_RESTART_COUNT": "0", "TENAX_GENERATION": str(generation)}
    known = len(hub.lives)
    message = {"agent": "node0", "pid": 1000 * generation + rank, "began": time.monotonic(), **env}
    sock.sendall(json.dumps(message).encode() + b"\n")
    assert hub.wait_for(lambda: len(hub.lives) > known, 30)
    return sock


def test_an_open_connection_proves_that_a_worker_is_alive(hub: WorkerHub) -> None:
    with report(hub, 1), report(hub, 2):
        old, new = hub.lives
        assert old.alive_at > new.began_at
        assert any(each.startswith("S1") for each in broken(History(0, hub.lives)))


def test_a_closed_connection_with_unread_data_is_closed() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        line = Line(ours)
        theirs.sendall(b"last line\n")
        assert line.is_open()
        theirs.close()
        assert not line.is_open()


def test_a_worker_that_had_exited_does_not_overlap(hub: WorkerHub) -> None:
    report(hub, 1).close()
    with report(hub, 2):
        old, new = hub.lives
        assert old.alive_at < new.began_at
        assert not [each for each in broken(History(0, hub.lives)) if each.startswith("S1")]


def test_a_sign_of_life_counts_from_its_own_time(hub: WorkerHub) -> None:
    with report(hub, 1) as old:
        moment = time.monotonic()
        old.sendall(b"%.6f\n%.6f\n" % (moment - 1, moment))
        old.shutdown(socket.SHUT_WR)
        assert hub.wait_for(lambda: hub.lives[0].gone_at > 0, 30)
        assert hub.lives[0].alive_at == pytest.approx(moment, abs=1e-5)
        assert hub.alive() == []


def test_finish_also_applies_to_workers_that_connect_later(hub: WorkerHub) -> None:
    with report(hub, 1) as first:
        hub.finish()
        with report(hub, 2) as second:
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
    """Return a history with two generations, one restart between them, and a verdict."""
    workers = [life(1, 0, 1.0, 5.0), life(1, 1, 1.1, 5.1)]
    workers += [life(2, rank, 6.0, 9.0, restarts=1) for rank in (0, 1)]
    second = record(2, 1, restarts_used=1)
    end = msgspec.structs.replace(second, verdict=verdict())
    return History(1, workers, recorded(record(0), record(1), record(1, 1, restarts_used=1), second, end, None), 1)


def test_a_good_history_breaks_no_invariant() -> None:
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


def spoil_uncharged_restart_charged(history: History) -> None:
    history.caused_failures = 0


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
    ("spoil", "message"),
    [
        (
            spoil_overlap,
            "S1: [generation 1 rank 1 of 2 on node1, pid 1001] was alive 0.001 s after the start of [generation 2",
        ),
        (spoil_overlap_of_a_generation_between, "S1: [generation 2"),
        (spoil_world_size, "S2: generation 1 has several world sizes: [2, 3]"),
        (spoil_rank, "have the same rank"),
        (spoil_rank_out_of_its_world, "has a rank outside its world size"),
        (spoil_store, "S2: generation 2 has several stores"),
        (spoil_restart_count, "S2: generation 2 has several restart counts"),
        (spoil_world_of_all, "was assigned (4, 'store1'), but recorded is (2, 'store1')"),
        (spoil_generation_unwritten, "S3: generation 2 had workers but no record"),
        (spoil_too_many_restarts, "1 restarts were charged; the maximum is 0"),
        (spoil_uncharged_restart_charged, "1 restarts were charged, but only 0 failures were caused"),
        (spoil_generation_down, "generation decreased from 2 to 1"),
        (spoil_settled_down, "settled decreased from 1 to 0"),
        (spoil_restarts_down, "restarts_used decreased from 1 to 0"),
        (spoil_formed_twice, "generation 2 differs from the earlier one"),
        (spoil_after_verdict, "the record changed after the verdict"),
        (spoil_formed_after_verdict, "the record changed after the verdict"),
        (spoil_record_again, "a new record was written"),
        (spoil_record_lost, "before the verdict"),
    ],
)
def test_each_broken_invariant_is_found(spoil: object, message: str) -> None:
    history = good()
    assert callable(spoil)
    spoil(history)
    assert any(message in each for each in broken(history)), broken(history)


# --- the command ------------------------------------------------------------------------------------------------------


def test_zero_seeds_have_a_summary(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "0"]) == 0
    assert capsys.readouterr().out.startswith("0 seeds, 0 broken, in ")
