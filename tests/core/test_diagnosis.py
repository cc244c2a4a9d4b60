"""The diagnosis names the first cause: of failures, and of workers that the others waited for (D1 to D4)."""

from __future__ import annotations

import msgspec
import pytest

from tenax._core import messages
from tenax._core.coordinator import CoordinatorMachine, Opened, Received
from tenax._core.diagnosis import describe_first_cause, diagnose, missing_ranks
from tenax._core.messages import HangReport, StackLocation
from tenax._core.model import Evidence, Failure, Member, Stopped
from tenax._core.run_state import Generation, ReportedHang, RunSettings

TIMEOUT = Evidence(cause="collective_timeout", is_consequence=True, message="Timed out waiting 1000ms for recv")
LOST = Evidence(cause="peer_lost", is_consequence=True, message="Connection reset by peer")
UNJOINED = Evidence(
    cause="store_timeout", is_consequence=True, message="Timed out after 61 seconds waiting for clients. 7/8 joined"
)


def generation(failed: dict[int, Evidence], stopped: tuple[int, ...] = (), **more) -> Generation:
    """Two nodes with four workers each; ranks in neither list exited with code 0."""
    return Generation(
        members={"a": 0, "b": 1},
        accounted={"a", "b"},
        parts={"a": Member("host1", "host1", 0, 4), "b": Member("host2", "host2", 4, 4)},
        world_size=8,
        failures={
            rank: Failure(1, rank % 4, rank, 100 + rank, 1, 10.0 + index, "", evidence, host=f"host{1 + rank // 4}")
            for index, (rank, evidence) in enumerate(failed.items())
        },
        stopped={
            rank: Stopped(rank % 4, rank, 100 + rank, -15, host=f"host{1 + rank // 4}", last_lines=(f"step of {rank}",))
            for rank in stopped
        },
        **more,
    )


def first_of(last: Generation, **more) -> tuple[int, str, str] | None:
    first = diagnose(last, 1, is_change=False, **more).first
    return None if first is None else (first.global_rank, first.evidence.cause, first.reason)


def test_a_cause_comes_before_earlier_consequences() -> None:
    """D1."""
    last = generation({0: TIMEOUT, 5: Evidence(cause="exception")}, stopped=(1, 2, 3, 4, 6, 7))
    assert [each.global_rank for each in diagnose(last, 1, is_change=False).failures] == [5, 0]


def mismatch(rank: int, other: int) -> Evidence:
    text = f"Rank {rank} is running collective: ALLREDUCE, but Rank {other} is running collective: BROADCAST"
    return Evidence(cause="collective_mismatch", message=text)


def test_the_rank_that_most_others_differ_from_is_the_first_cause() -> None:
    """D1: they report the same mismatch, some of them earlier."""
    last = generation({**{rank: mismatch(rank, 5) for rank in (4, 0, 1)}, 5: mismatch(5, 0)}, stopped=(2, 3, 6, 7))
    found = diagnose(last, 1, is_change=False).failures
    assert [(each.global_rank, each.evidence.is_consequence) for each in found][:2] == [(5, False), (4, True)]


def test_the_rank_that_could_not_write_its_part_of_a_checkpoint_is_the_first_cause() -> None:
    full = Evidence(cause="disk_full", message="CheckpointException: CheckpointException ranks:dict_keys([2])")
    found = diagnose(generation(dict.fromkeys((5, 2), full), stopped=(0, 1, 3, 4, 6, 7)), 1, is_change=False).failures
    assert [(each.global_rank, each.evidence.is_consequence) for each in found] == [(2, False), (5, True)]


def test_two_ranks_that_differ_are_both_causes() -> None:
    found = diagnose(generation({1: mismatch(1, 0), 0: mismatch(0, 1)}), 1, is_change=False).failures
    assert [(each.global_rank, each.evidence.is_consequence) for each in found] == [(1, False), (0, False)]


def test_the_rank_that_stopped_responding_is_the_first_cause_of_timeouts() -> None:
    """D2, D4: with its last lines, and no longer among the stopped."""
    last = generation({rank: TIMEOUT for rank in (0, 1, 2, 3, 4, 5, 7)}, stopped=(6,))
    diagnosis = diagnose(last, 1, is_change=False)
    assert diagnosis.first is not None
    assert describe_first_cause(diagnosis.first) == (
        "rank 6 on host2 stopped responding; 7 ranks timed out waiting for it"
    )
    assert diagnosis.first.evidence.last_lines == ("step of 6",)
    assert diagnosis.first.seen_at == 10.0
    assert diagnosis.stopped == ()
    assert len(diagnosis.failures) == 8


def test_a_node_that_stopped_responding_is_named_by_all_its_ranks() -> None:
    last = generation(dict.fromkeys(range(4), TIMEOUT), stopped=(4, 5, 6, 7))
    found = diagnose(last, 1, is_change=False)
    assert [each.global_rank for each in found.failures] == [4, 5, 6, 7, 0, 1, 2, 3]


def test_several_candidates_on_several_nodes_are_not_guessed_at() -> None:
    last = generation({0: TIMEOUT}, stopped=(1, 2, 3, 4, 5, 6, 7))
    assert first_of(last) == (0, "collective_timeout", "")


def test_the_errors_may_name_the_rank() -> None:
    named = Evidence(
        cause="collective_timeout", is_consequence=True, proof="[Rank 0]: Rank 3 failed to pass monitoredBarrier in 1 s"
    )
    assert first_of(generation({0: named}, stopped=(1, 2, 3, 4, 5, 6, 7)))[:2] == (3, "stopped_responding")


@pytest.mark.parametrize(
    ("text", "rank"),
    [
        ("The following tasks are unhealthy (stopped sending heartbeats):\n6\nThe tasks have crashed.", [6]),
        ("Barrier timed out. Id: init::0.\n# of tasks: 1/8.\nSome timed out task names:\n7\n6\n\nRPC: /xla", [6, 7]),
        ("Barrier timed out. Id: Shutdown::1::0.\nThe first task: 1. Some timed out task names:\n7\n6\n", []),
    ],
)
def test_jax_names_the_tasks_that_it_waits_for(text: str, rank: list[int]) -> None:
    """At shutdown it waits for those that still work, not for the one that left."""
    assert missing_ranks([text]) == rank


def test_a_named_rank_may_have_failed_later_because_the_others_exited() -> None:
    """It is in the diagnosis once, as the first cause."""
    named = Evidence(
        cause="collective_timeout", is_consequence=True, message="Rank 3 failed to pass monitoredBarrier in 1 s"
    )
    last = generation({0: named, 1: LOST, 3: LOST}, stopped=(2, 4, 5, 6, 7))
    found = diagnose(last, 1, is_change=False).failures
    assert found[0].reason == "stopped responding; 2 ranks timed out or lost the connection to it"
    assert [(each.global_rank, each.evidence.cause) for each in found] == [
        (3, "stopped_responding"), (0, "collective_timeout"), (1, "peer_lost")
    ]  # fmt: skip


def test_a_rank_that_exited_early_is_named_as_that() -> None:
    last = generation(dict.fromkeys((0, 1, 2), LOST), stopped=(4, 5, 6, 7))
    rank, cause, reason = first_of(last)
    assert (rank, cause) == (3, "exited_early")
    assert reason == "exited with code 0 while others still ran; 3 ranks lost the connection to it"
    assert diagnose(last, 1, is_change=False).first.host == "host1"


def test_a_rank_that_never_joined_is_named_as_that() -> None:
    last = generation({rank: UNJOINED for rank in range(8) if rank != 2}, stopped=(2,))
    assert first_of(last)[:2] == (2, "never_joined")


def test_a_rank_that_timed_out_while_it_was_stopped_is_not_the_missing_one() -> None:
    """D2: JAX reports it and aborts the process, some milliseconds after its peers."""
    last = generation(dict.fromkeys((1, 3, 4), UNJOINED), stopped=(0, 2, 5, 6, 7))
    for rank in (0, 2, 5):
        last.stopped[rank] = msgspec.structs.replace(
            last.stopped[rank], last_lines=("", "RPC: /xla.coordination.CoordinationService/RegisterTask")
        )
    last.stopped[6] = msgspec.structs.replace(last.stopped[6], exit_code=-6)
    assert first_of(last)[:2] == (7, "never_joined")
    last.stopped[6] = msgspec.structs.replace(last.stopped[6], exit_code=-15)
    assert first_of(last)[:2] == (1, "store_timeout")


@pytest.mark.parametrize(("group", "cause"), [("default_pg/0", "never_joined"), ("3", "stopped_responding")])
def test_the_key_of_a_rank_that_gloo_waits_for_names_it(group: str, cause: str) -> None:
    """In the default group it never joined; in a later one it stopped."""
    waits = Evidence(
        cause="store_timeout", is_consequence=True, message=f"wait timeout after 15000ms, keys: /{group}//cpu//0/6"
    )
    assert first_of(generation({0: waits}, stopped=(1, 2, 3, 4, 5, 6, 7)))[:2] == (6, cause)


def test_workers_that_all_time_out_waited_for_each_other() -> None:
    """D2: none was missing. Those that only lost a peer are consequences."""
    last = generation({0: LOST, **dict.fromkeys(range(1, 8), TIMEOUT)})
    found = diagnose(last, 1, is_change=False).failures
    assert first_of(last)[:2] == (1, "deadlock")
    assert [(each.global_rank, each.evidence.is_consequence) for each in (found[6], found[7])] == [
        (7, False),
        (0, True),
    ]


def test_the_hang_report_decides_between_candidates_and_has_the_stacks() -> None:
    odd = StackLocation((6,), ("train.py:9 in load",), stacks="Stack (most recent call first):\n  File x")
    hang = HangReport(1, 2, 8, 300.0, "no step", (odd, StackLocation((0, 1, 2, 3, 4, 5, 7))), is_odd=True)
    last = generation({0: TIMEOUT}, stopped=(1, 2, 3, 4, 5, 6, 7), hang=ReportedHang(hang))
    assert first_of(last)[:2] == (6, "stopped_responding")
    assert diagnose(last, 1, is_change=False).first.evidence.stacks == odd.stacks


@pytest.mark.parametrize(("over_at", "rank"), [(5.0, 6), (-300.0, 0)], ids=["just before the timeout", "long before"])
def test_a_withdrawn_hang_report_does_not_decide_unless_the_timeout_ended_it(over_at: float, rank: int) -> None:
    """An exception that is being printed is activity, so it withdraws the report of the hang that it ends."""
    odd = StackLocation((6,), ("train.py:9 in load",), stacks="Stack (most recent call first):\n  File x")
    hang = HangReport(1, 2, 8, 300.0, "no step", (odd, StackLocation((0, 1, 2, 3, 4, 5, 7))), is_odd=True)
    last = generation({0: TIMEOUT}, stopped=(1, 2, 3, 4, 5, 6, 7), hang=ReportedHang(hang, over_at))
    assert first_of(last)[0] == rank


def test_a_lost_connection_to_a_worker_that_still_runs_proves_nothing() -> None:
    assert first_of(generation(dict.fromkeys(range(7), LOST), stopped=(7,))) == (0, "peer_lost", "")


@pytest.mark.parametrize("change", [{"lost": {"host2": "connection closed"}}, {"drained": ["host2"]}])
def test_consequences_of_a_change_are_no_cause(change: dict[str, object]) -> None:
    """D3: a drained node is not a failure, and neither are the workers that lost it."""
    last = generation(dict.fromkeys(range(4), LOST), stopped=(4, 5, 6, 7), **change)
    diagnosis = diagnose(last, 1, is_change=False)
    assert diagnosis.first is None
    assert diagnosis.is_change
    assert [each.label for each in diagnosis.left] == ["host2"]


def test_a_cause_of_its_own_stays_one_when_a_node_left() -> None:
    last = generation({0: Evidence(cause="disk_full")}, drained=["host2"])
    assert first_of(last)[:2] == (0, "disk_full")


def test_ranks_that_messages_name_as_missing() -> None:
    texts = ["Ranks 1, 2 failed to pass monitoredBarrier", "[5, 7] finished collective #4, but didn't join collective"]
    assert missing_ranks(texts) == [1, 2, 5, 7]


def test_a_worker_that_exited_early_is_the_cause_also_if_its_success_is_reported_after_the_failure() -> None:
    machine = CoordinatorMachine(RunSettings("job", 2, 2, 0))
    failure = Failure(1, 0, 0, 100, 1, 8.0, "", LOST)
    stopped = messages.NodeStopped(1, 9.0, (failure,))
    machine.step(Opened(), 0.0)
    for node_id in ("a", "b"):
        info = messages.NodeInfo(node_id, node_id, min_nodes=2, max_nodes=2)
        machine.step(Received(node_id, messages.NodeJoined(info)), 1.0)
        machine.step(Received(node_id, messages.NodeReady(0, node_id, 29500)), 1.0)
    machine.step(Received("a", messages.FailureSeen(1, failure, 8.0)), 8.0)
    for node_id, message in (("b", messages.NodeSucceeded(1)), ("a", stopped)):
        machine.step(Received(node_id, message), 9.0)
        machine.step(Received(node_id, messages.NodeReady(1, node_id, 29501)), 9.0)
    assert machine.state.verdict is not None
    first = machine.state.verdict.failures[0]
    assert (first.global_rank, first.evidence.cause) == (1, "exited_early")


@pytest.mark.parametrize("reporting", [(0, 1, 6), (6,)])
def test_a_named_rank_that_was_stopped_before_it_could_fail_is_the_first_cause(reporting: tuple[int, ...]) -> None:
    """D1: the others report its failure, with its traceback."""
    full = Evidence(cause="disk_full", message="CheckpointException: CheckpointException ranks:dict_keys([2])")
    others = tuple(rank for rank in range(8) if rank not in reporting)
    diagnosis = diagnose(generation(dict.fromkeys(reporting, full), stopped=others), 1, is_change=False)
    found = [(each.global_rank, each.evidence.cause, each.evidence.is_consequence) for each in diagnosis.failures]
    assert found[0] == (2, "disk_full", False)
    assert sorted(found[1:]) == [(rank, "disk_full", True) for rank in reporting]
    assert [each.global_rank for each in diagnosis.stopped] == [rank for rank in others if rank != 2]


def test_one_rank_that_reports_another_collective_is_not_believed_alone() -> None:
    """D1: of two that differ, it may be the wrong one."""
    last = generation({0: mismatch(0, 5)}, stopped=(1, 2, 3, 4, 5, 6, 7))
    assert first_of(last)[0] == 0
