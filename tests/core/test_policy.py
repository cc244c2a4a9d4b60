"""The restart policy: the budget, and failures that are not restarted."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenax._core import coordinator as run
from tenax._core import events, messages
from tenax._core.coordinator import CoordinatorMachine, RunDeadline, RunSettings, Send
from tenax._core.model import Evidence, Failure, Outcome
from tenax._core.policy import (
    START_S,
    AnyDecision,
    BudgetPolicy,
    Change,
    Continue,
    GiveUp,
    History,
    Keep,
    Restart,
    RestartPolicy,
    Wait,
    ask_policy,
)

from .policies import Pausing

CORE = settings.get_profile("core")

FAILURE = Failure(generation=1, local_rank=0, global_rank=0, pid=100, exit_code=1, seen_at=1.0)


@pytest.mark.parametrize(("used", "allowed"), [(u, a) for a, u in itertools.product(range(8), range(8)) if u <= a])
def test_the_budget_is_exact(used: int, allowed: int) -> None:
    """A restart is granted if and only if fewer than ``max_restarts`` were used; the reason has the count."""
    history = History(restarts_used=used, max_restarts=allowed)
    assert history.restarts_left == allowed - used
    decision = BudgetPolicy().decide(FAILURE, history)
    if used < allowed:
        assert decision == Restart(f"restart {used + 1} of {allowed}")
    elif allowed == 0:
        assert decision == GiveUp("no restarts are allowed (--max-restarts 0)")
    else:
        assert decision == GiveUp("the only restart is used" if allowed == 1 else f"all {allowed} restarts are used")


@pytest.mark.parametrize(
    ("cause", "message", "survivors", "is_repeated", "keeps"),
    [
        ("", "RuntimeError: boom", 0, False, True),
        ("", "RuntimeError: boom", 3, False, True),
        ("", "RuntimeError: boom", 0, True, True),
        ("", "RuntimeError: boom", 3, True, False),
        ("", "", 3, True, True),  # killed twice by a signal: no sign of a wrong state
        ("collective_mismatch", "RuntimeError: boom", 0, False, False),
    ],
)
def test_survivors_are_kept_unless_their_memory_may_be_the_cause(
    cause: str, message: str, survivors: int, is_repeated: bool, keeps: bool
) -> None:
    """A collective mismatch, or the same error in a generation that continued with survivors."""
    failure = Failure(2, 0, 0, 200, 1, 9.0, evidence=Evidence("RuntimeError", message, cause=cause))
    history = History(1, 3, (failure,) if is_repeated else (), lived_s=START_S + 1, survivors=survivors)
    assert BudgetPolicy().decide(failure, history) == Restart("restart 2 of 3", keeps_survivors=keeps)


def test_only_an_operator_ends_a_generation_without_survivors() -> None:
    for event, stops in ((run.RestartRequested("new data"), True), (run.NodeLost("b", "connection closed"), False)):
        machine = CoordinatorMachine(RunSettings("run", 2, 2))
        for name in ("a", "b"):
            info = messages.NodeInfo(name, name, min_nodes=2, max_nodes=2)
            machine.step(run.Received(name, messages.NodeJoined(info)), 0.0)
            machine.step(run.Received(name, messages.NodeReady(0)), 0.0)
        (ended,) = (send.event for send in machine.step(event, 1.0).sends)
        assert isinstance(ended, events.GenerationEnded)
        assert ended.stops is stops


# --- failures that are not restarted ----------------------------------------------------------------------------------


def failed(
    error_type: str = "RuntimeError", message: str = "RuntimeError: boom", rank: int = 0, code: int = 1
) -> Failure:
    return Failure(2, rank, rank, 200 + rank, code, 9.0, evidence=Evidence(error_type, message))


def decide(failure: Failure, policy: BudgetPolicy | None = None, **more) -> AnyDecision:
    history = History(restarts_used=1, max_restarts=4, **{"lived_s": 5.0, **more})
    return (policy or BudgetPolicy()).decide(failure, history)


PROGRAM_ERRORS = ["SyntaxError", "IndentationError", "TabError", "ModuleNotFoundError", "ImportError", "NameError"]


@pytest.mark.parametrize("kind", PROGRAM_ERRORS)
def test_a_program_error_at_the_start_is_not_restarted(kind: str) -> None:
    """It would happen again."""
    assert decide(failed(kind)) == GiveUp(
        f"{kind} at startup is an error in the program itself; the remaining 3 restarts would not help"
    )


@pytest.mark.parametrize(
    "more", [{"lived_s": START_S + 1}, {"longest_s": START_S + 1}, {"lived_s": START_S + 1, "longest_s": 1.0}]
)
@pytest.mark.parametrize("kind", PROGRAM_ERRORS)
def test_a_program_error_after_the_start_is_restarted(kind: str, more: dict[str, float]) -> None:
    """The error occurs after the start, or an earlier generation got beyond the start: it may have an outside cause."""
    assert decide(failed(kind), **more) == Restart("restart 2 of 4")


def all_failed(message: str, count: int = 2) -> tuple[Failure, ...]:
    return tuple(failed(message=message, rank=rank) for rank in range(count))


def test_the_same_error_of_all_workers_twice_is_not_restarted() -> None:
    """All workers fail at the start with the error that was the first cause the last time."""
    now = all_failed("RuntimeError: boom")
    why = "all 2 workers failed at startup with the same error as before"
    assert decide(now[0], failures=now, world_size=2, earlier=(failed(),)) == GiveUp(
        f"{why}; the remaining 3 restarts would not help"
    )


@pytest.mark.parametrize(
    "more",
    [
        {"earlier": ()},  # the first time
        {"earlier": (failed(message="RuntimeError: bang"),)},  # another error
        {"earlier": (failed(), failed(message="RuntimeError: bang"))},  # the same, but not the last time
        {"world_size": 3},  # not all workers
        {"failures": (failed(), failed(message="RuntimeError: bang", rank=1))},  # not the same error in all workers
        {"lived_s": START_S + 1},  # not at the start
        {"longest_s": START_S + 1},  # a generation got further
        {"failures": (failed(),), "world_size": 1},  # a single worker: none to compare with
    ],
)
def test_each_condition_is_needed_to_give_up(more: dict[str, object]) -> None:
    now = all_failed("RuntimeError: boom")
    conditions: dict[str, object] = {"failures": now, "world_size": 2, "earlier": (failed(),), **more}
    assert decide(now[0], **conditions) == Restart("restart 2 of 4")


def test_errors_without_a_message_are_not_compared() -> None:
    """Two deaths by a signal may have different causes."""
    now = tuple(failed("", "", rank) for rank in range(2))
    assert decide(now[0], failures=now, world_size=2, earlier=(failed("", ""),)) == Restart("restart 2 of 4")


def test_truncated_messages_are_compared() -> None:
    """Messages of earlier failures, and of many at once, are truncated before they are stored."""
    long = "RuntimeError: " + "x" * 5_000
    now = (failed(message=long), failed(message=long, rank=1).brief())
    decision = decide(now[0], failures=now, world_size=2, earlier=(failed(message=long).brief(),))
    assert isinstance(decision, GiveUp)


def test_failures_that_the_user_marked_as_fatal_are_not_restarted() -> None:
    """They are marked by exit code or by the exception's name, with or without its module."""
    policy = BudgetPolicy(fatal_exit_codes=(42, -11), fatal_errors=("ConfigError", "my.pkg.DataError"))
    late = {"lived_s": 1e6}
    assert decide(failed(code=42), policy, **late) == GiveUp(
        "exit code 42 is marked as fatal (--fatal-exit-codes); the remaining 3 restarts would not help"
    )
    assert isinstance(decide(failed(code=-11), policy, **late), GiveUp)
    for kind in ("ConfigError", "app.ConfigError", "my.pkg.DataError", "DataError"):
        assert decide(failed(kind), policy, **late) == GiveUp(
            f"{kind} is marked as fatal (--fatal-errors); the remaining 3 restarts would not help"
        )
    assert decide(failed(), policy, **late) == Restart("restart 2 of 4")


failures = st.builds(
    failed,
    st.sampled_from(["", "RuntimeError", "ImportError", "x.Fatal"]),
    st.sampled_from(["", "boom", "bang"]),
    st.integers(0, 3),
    st.sampled_from([1, 3, -9]),
)


@given(
    failure=failures,
    used=st.integers(0, 5),
    allowed=st.integers(0, 5),
    earlier=st.lists(failures, max_size=3),
    others=st.lists(failures, max_size=4),
    world_size=st.integers(0, 5),
    lived_s=st.floats(0, 200),
    longest_s=st.floats(0, 200),
)
@settings(CORE, max_examples=300)
def test_the_budget_policy_never_exceeds_the_budget(
    failure, used, allowed, earlier, others, world_size, lived_s, longest_s
) -> None:
    """There is always a reason, and the same history gives the same decision."""
    history = History(used, allowed, tuple(earlier), (failure, *others), world_size, lived_s, longest_s)
    policy = BudgetPolicy(fatal_exit_codes=(3,), fatal_errors=("Fatal",))
    decision = policy.decide(failure, history)
    assert decision == policy.decide(failure, history)
    assert decision.why
    if isinstance(decision, Restart):
        assert used < allowed
        assert failure.exit_code != 3
        assert failure.evidence.error_type != "x.Fatal"


# --- the coordinator and its policy -----------------------------------------------------------------------------------


class Job:
    """A run of one node with two workers that fail on request."""

    def __init__(self, allowed: int, policy: RestartPolicy | None = None) -> None:
        self.machine = CoordinatorMachine(RunSettings("run", max_restarts=allowed), policy)
        self.now = 0.0
        self.step(run.Opened())
        self.step(run.Received("a", messages.NodeJoined(messages.NodeInfo("a", "host-a", slots=2))))
        self.ready()

    def step(self, event: run.AnyCoordinatorEvent) -> list[Send]:
        self.sends = self.machine.step(event, self.now).sends
        return self.sends

    def ready(self) -> None:
        self.step(run.Received("a", messages.NodeReady(self.machine.state.generation)))

    def restarts_used(self) -> int:
        """Return the restart count in the assignment that was just sent."""
        (send,) = self.sends
        assert isinstance(send.event, events.GenerationFormed)
        return send.event.assignment.restarts_used

    def fail(self, *failures: Failure) -> None:
        generation = self.machine.state.generation
        self.step(run.Received("a", messages.NodeStopped(generation, self.now, failures)))
        self.ready()


@pytest.mark.parametrize("allowed", range(6))
def test_a_job_that_always_fails_runs_one_generation_more_than_its_restarts(allowed: int) -> None:
    """C4: with the budget policy, N restarts mean N + 1 generations, with the restart counts 0, 1 ... N."""
    job = Job(allowed)
    counts = []
    while isinstance(job.machine.state.phase, run.Running):
        counts.append(job.restarts_used())
        job.now += 100
        job.fail(FAILURE)
    verdict = job.machine.state.verdict
    assert verdict is not None
    assert (verdict.outcome, verdict.restarts_used) == (Outcome.FAILED, allowed)
    assert counts == list(range(allowed + 1))


@pytest.mark.parametrize("allowed", range(1, 5))
def test_a_pause_is_charged_as_a_restart(allowed: int) -> None:
    """``Wait`` is charged like ``Restart``."""
    job = Job(allowed, Pausing())
    for restart in range(allowed):
        job.fail(FAILURE)
        assert job.machine.state.deadlines == {RunDeadline.PAUSE: job.now + 5.0 * 2**restart}
        job.now = job.machine.state.deadlines[RunDeadline.PAUSE]
        job.step(run.Tick())
        assert job.restarts_used() == restart + 1
    job.fail(FAILURE)
    verdict = job.machine.state.verdict
    assert verdict is not None
    assert (verdict.outcome, verdict.restarts_used) == (Outcome.FAILED, allowed)


def test_the_restart_count_is_unbounded_but_the_history_is_bounded() -> None:
    """The last 100 failures are kept; 250 restarts are counted."""
    job = Job(250)
    while isinstance(job.machine.state.phase, run.Running):
        job.now += 100
        generation = job.machine.state.generation
        job.fail(msgspec.structs.replace(FAILURE, generation=generation, seen_at=job.now))
    verdict = job.machine.state.verdict
    assert verdict is not None
    assert (verdict.outcome, verdict.restarts_used, verdict.generation) == (Outcome.FAILED, 250, 251)
    assert [failure.generation for failure in verdict.earlier] == list(range(151, 251))


def test_the_policy_is_called_once_per_failed_generation_with_the_whole_history() -> None:
    """The history has all failures, the first cause first with its evidence and host; the durations of this and of the
    longest earlier generation; the restart count before this failure; and the earlier first causes."""
    calls: list[tuple[Failure, History]] = []

    class Recording:
        def decide(self, failure: Failure, history: History) -> AnyDecision:
            calls.append((failure, history))
            return Restart("again")

    job = Job(1, Recording())
    for generation, lived_s in ((1, 100.0), (2, 50.0), (3, 70.0)):
        job.now += lived_s
        seen = Failure(generation, 0, 0, 100, 1, job.now)
        cause = Failure(
            generation, 1, 1, 101, generation, job.now, evidence=Evidence("E", "E: boom", raised_at=job.now - 1)
        )
        job.step(run.Received("a", messages.FailureSeen(generation, seen, job.now)))
        assert len(calls) == generation - 1, "called before every node has stopped"
        job.fail(seen, cause)
        assert len(calls) == generation
    first, second, third = (failure for failure, _ in calls)
    assert [(each.generation, each.global_rank, each.exit_code, each.host) for each in (first, second, third)] == [
        (1, 1, 1, "host-a"),
        (2, 1, 2, "host-a"),
        (3, 1, 3, "host-a"),
    ]
    assert first.evidence.message == "E: boom"
    histories = [history for _, history in calls]
    assert [[each.global_rank for each in history.failures] for history in histories] == [[1, 0]] * 3
    assert [(each.restarts_used, each.max_restarts, each.world_size) for each in histories] == [
        (0, 1, 2),
        (1, 1, 2),
        (2, 1, 2),
    ]
    assert [history.earlier for history in histories] == [(), (first,), (first, second)]
    assert [failure.lived_s for failure in (first, second, third)] == [99.0, 49.0, 69.0]
    assert third.seen_at - first.seen_at == job.now - 100.0, "all times are on one clock"
    assert [history.lived_s for history in histories] == [99.0, 49.0, 69.0]
    assert [history.longest_s for history in histories] == [0.0, 100.0, 100.0]


class Answers:
    """Returns what it was given, or raises it."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def decide(self, failure: Failure, history: History) -> AnyDecision:
        if isinstance(self._answer, BaseException):
            raise self._answer
        return self._answer


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (ZeroDivisionError("oh"), "raised ZeroDivisionError: oh"),
        (SystemExit(3), "raised SystemExit: 3"),
        (ValueError("two\nlines"), "raised ValueError: two\\nlines"),
        (None, "returned NoneType; expected Restart, Wait or GiveUp"),
        ("restart", "returned str; expected Restart, Wait or GiveUp"),
        (Restart, "returned StructMeta; expected Restart, Wait or GiveUp"),
        (Restart(""), "returned an invalid Restart: Expected `str` of length >= 1 - at `$.why`"),
        (GiveUp(None), "returned an invalid GiveUp: 'NoneType' object has no attribute 'isprintable'"),
        (Wait("later", seconds=-1.0), "returned an invalid Wait: Expected `float` >= 0.0 - at `$.seconds`"),
        (
            Wait("later", seconds=float("inf")),
            "returned an invalid Wait: Expected `float`, got `null` - at `$.seconds`",
        ),
        (
            Wait("later", seconds=float("nan")),
            "returned an invalid Wait: Expected `float`, got `null` - at `$.seconds`",
        ),
        (Wait("later", seconds=1e300), "returned an invalid Wait: Expected `float` <= 10000000000.0 - at `$.seconds`"),
    ],
)
def test_a_policy_that_fails_ends_the_run_with_a_reason(answer: Any, why: str) -> None:
    """A policy may be user code: an exception or a wrong answer ends the run, and the reason names both."""
    job = Job(3, Answers(answer))
    job.fail(FAILURE)
    verdict = job.machine.state.verdict
    assert verdict is not None
    assert verdict.why == f"the restart policy Answers {why}"
    assert verdict.restarts_used == 0


@pytest.mark.parametrize(
    ("kind", "answer", "why"),
    [
        ("loss", ZeroDivisionError("oh"), "raised ZeroDivisionError: oh"),
        ("loss", Keep("no"), "returned Keep; expected Continue, Restart, Wait or GiveUp"),
        ("join", GiveUp("no"), "returned GiveUp; expected Continue, Restart or Keep"),
        ("drain", None, "returned NoneType; expected Continue, Restart, Wait or GiveUp"),
    ],
)
def test_a_wrong_answer_to_a_change_is_a_reason_to_give_up(kind: str, answer: Any, why: str) -> None:
    policy = Answers(answer)
    policy.decide_change = policy.decide
    decision = ask_policy(policy, Change(kind, (), "why"), History(0, 1))
    assert decision == GiveUp(f"the restart policy Answers {why}")


@pytest.mark.parametrize("kind", ["loss", "drain", "join"])
def test_without_a_method_for_changes_the_run_continues_at_no_cost(kind: str) -> None:
    assert ask_policy(BudgetPolicy(), Change(kind, (), "host1"), History(0, 0)) == Continue("host1")


def test_a_reason_is_one_short_line() -> None:
    decision = ask_policy(Answers(Restart("a\nb\0" + "x" * 10_000)), FAILURE, History(0, 1))
    assert decision == Restart(("a\\nb\\x00" + "x" * 10_000)[:4096])


@CORE
@given(
    answer=st.one_of(
        st.none(),
        st.builds(Restart, st.text()),
        st.builds(GiveUp, st.text()),
        st.builds(Wait, st.text(), seconds=st.one_of(st.floats(), st.integers(), st.text(), st.none())),
        st.builds(ValueError, st.text()),
    )
)
def test_any_answer_becomes_a_decision_that_can_be_stored(answer: Any) -> None:
    decision = ask_policy(Answers(answer), FAILURE, History(0, 1))
    assert decision.why
    assert msgspec.json.decode(msgspec.json.encode(decision), type=AnyDecision) == decision


@pytest.mark.parametrize(
    "decision", [Restart("again"), Wait("later", seconds=2.5), GiveUp("enough"), Continue("on"), Keep("it")]
)
def test_a_decision_survives_json(decision: AnyDecision) -> None:
    """Each decision has a reason."""
    assert msgspec.json.decode(msgspec.json.encode(decision), type=AnyDecision) == decision
    assert decision.why
