"""The restart policy: the budget, to the last restart, and what is not worth one."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenax._core import coordinator as run
from tenax._core import events, messages
from tenax._core.coordinator import CoordinatorMachine, RunDeadline, RunPhase, RunSettings, Send
from tenax._core.model import Evidence, Failure, Outcome
from tenax._core.policy import START_S, AnyDecision, BudgetPolicy, GiveUp, History, Restart, RestartPolicy, Wait

from .policies import Pausing

CORE = settings.get_profile("core")

FAILURE = Failure(generation=1, local_rank=0, global_rank=0, pid=100, exit_code=1, seen_at=1.0)


@pytest.mark.parametrize(("used", "allowed"), [(u, a) for a, u in itertools.product(range(8), range(8)) if u <= a])
def test_the_budget_is_exact(used: int, allowed: int) -> None:
    """A restart is granted while, and only while, fewer than ``max_restarts`` were used; the reason counts along."""
    history = History(restarts_used=used, max_restarts=allowed)
    assert history.restarts_left == allowed - used
    decision = BudgetPolicy().decide(FAILURE, history)
    if used < allowed:
        assert decision == Restart(f"restart {used + 1} of {allowed}")
    elif allowed == 0:
        assert decision == GiveUp("no restarts are allowed (--max-restarts 0)")
    else:
        assert decision == GiveUp("the one restart is used" if allowed == 1 else f"all {allowed} restarts are used")


# --- what is not worth a restart --------------------------------------------------------------------------------------


def failed(
    error_type: str = "RuntimeError", message: str = "RuntimeError: boom", rank: int = 0, code: int = 1
) -> Failure:
    return Failure(2, rank, rank, 200 + rank, code, 9.0, evidence=Evidence(error_type, message))


def decide(failure: Failure, policy: BudgetPolicy | None = None, **more) -> AnyDecision:
    history = History(restarts_used=1, max_restarts=4, **{"lived_s": 5.0, **more})
    return (policy or BudgetPolicy()).decide(failure, history)


INCURABLE = ["SyntaxError", "IndentationError", "TabError", "ModuleNotFoundError", "ImportError", "NameError"]


@pytest.mark.parametrize("kind", INCURABLE)
def test_a_program_that_is_wrong_is_not_tried_again(kind: str) -> None:
    """An error of the program itself, at its start: it would be there again."""
    assert decide(failed(kind)) == GiveUp(
        f"{kind} at the start is an error of the program itself, so the 3 restarts left would not help"
    )


@pytest.mark.parametrize(
    "more", [{"lived_s": START_S + 1}, {"longest_s": START_S + 1}, {"lived_s": START_S + 1, "longest_s": 1.0}]
)
@pytest.mark.parametrize("kind", INCURABLE)
def test_what_ran_once_can_run_again(kind: str, more: dict[str, float]) -> None:
    """The same error after the start, or after a generation that got beyond it, may be the world's fault."""
    assert decide(failed(kind), **more) == Restart("restart 2 of 4")


def everybody(message: str, count: int = 2) -> tuple[Failure, ...]:
    return tuple(failed(message=message, rank=rank) for rank in range(count))


def test_everybody_with_the_same_error_twice_is_not_tried_a_third_time() -> None:
    """All workers, at the start, with the error that was the first cause the time before."""
    now = everybody("RuntimeError: boom")
    why = "all 2 workers failed at the start with the same error as the time before"
    assert decide(now[0], failures=now, world_size=2, earlier=(failed(),)) == GiveUp(
        f"{why}, so the 3 restarts left would not help"
    )


@pytest.mark.parametrize(
    "more",
    [
        {"earlier": ()},  # the first time
        {"earlier": (failed(message="RuntimeError: bang"),)},  # another error
        {"earlier": (failed(), failed(message="RuntimeError: bang"))},  # the same, but not the last time
        {"world_size": 3},  # not everybody
        {"failures": (failed(), failed(message="RuntimeError: bang", rank=1))},  # not the same for everybody
        {"lived_s": START_S + 1},  # not at the start
        {"longest_s": START_S + 1},  # a generation got further
        {"failures": (failed(),), "world_size": 1},  # one worker alone: nobody to compare with
    ],
)
def test_anything_less_is_tried_again(more: dict[str, object]) -> None:
    """Each of the conditions is needed."""
    now = everybody("RuntimeError: boom")
    whole: dict[str, object] = {"failures": now, "world_size": 2, "earlier": (failed(),), **more}
    assert decide(now[0], **whole) == Restart("restart 2 of 4")


def test_without_a_message_nobody_knows_whether_it_is_the_same() -> None:
    """Killed by a signal twice is no proof of anything."""
    now = tuple(failed("", "", rank) for rank in range(2))
    assert decide(now[0], failures=now, world_size=2, earlier=(failed("", ""),)) == Restart("restart 2 of 4")


def test_a_long_error_is_the_same_error() -> None:
    """What is kept of earlier failures, and of many at once, is cut: the cut ones are compared with each other."""
    long = "RuntimeError: " + "x" * 5_000
    now = (failed(message=long), failed(message=long, rank=1).brief())
    decision = decide(now[0], failures=now, world_size=2, earlier=(failed(message=long).brief(),))
    assert isinstance(decision, GiveUp)


def test_what_the_user_knows_to_be_fatal() -> None:
    """By exit code or by the name of the exception, with or without its module, whenever it happens."""
    policy = BudgetPolicy(fatal_exit_codes=(42, -11), fatal_errors=("ConfigError", "my.pkg.DataError"))
    late = {"lived_s": 1e6}
    assert decide(failed(code=42), policy, **late) == GiveUp(
        "exit code 42 is marked as fatal (--fatal-exit-codes), so the 3 restarts left would not help"
    )
    assert isinstance(decide(failed(code=-11), policy, **late), GiveUp)
    for kind in ("ConfigError", "app.ConfigError", "my.pkg.DataError", "DataError"):
        assert decide(failed(kind), policy, **late) == GiveUp(
            f"{kind} is marked as fatal (--fatal-errors), so the 3 restarts left would not help"
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
def test_the_budget_policy_never_grants_more_than_it_may(
    failure, used, allowed, earlier, others, world_size, lived_s, longest_s
) -> None:
    """Whatever happened: no restart beyond the budget, always a reason, and the same answer to the same question."""
    history = History(used, allowed, tuple(earlier), (failure, *others), world_size, lived_s, longest_s)
    policy = BudgetPolicy(fatal_exit_codes=(3,), fatal_errors=("Fatal",))
    decision = policy.decide(failure, history)
    assert decision == policy.decide(failure, history)
    assert decision.why
    if isinstance(decision, Restart):
        assert used < allowed
        assert failure.exit_code != 3
        assert failure.evidence.error_type != "x.Fatal"


# --- how the coordinator asks -----------------------------------------------------------------------------------------


class Job:
    """A run of one node with two workers that fail whenever they are told to."""

    def __init__(self, allowed: int, policy: RestartPolicy | None = None) -> None:
        self.machine = CoordinatorMachine(RunSettings("run", max_restarts=allowed), policy)
        self.now = 0.0
        self.hear(run.Opened())
        self.sends = self.hear(run.Received("a", messages.NodeJoined(messages.NodeInfo("a", "host-a", slots=2))))
        self.ready()

    def hear(self, event: run.AnyCoordinatorEvent) -> list[Send]:
        self.sends = self.machine.step(event, self.now)
        return self.sends

    def ready(self) -> None:
        self.hear(run.Received("a", messages.NodeReady(self.machine.state.generation)))

    def told(self) -> int:
        """What the workers are told of restarts in the generation that was just formed."""
        (send,) = self.sends
        assert isinstance(send.event, events.GenerationFormed)
        return send.event.assignment.restarts_used

    def fail(self, *failures: Failure) -> None:
        generation = self.machine.state.generation
        self.hear(run.Received("a", messages.NodeStopped(generation, self.now, failures)))
        self.ready()


@pytest.mark.parametrize("allowed", range(6))
def test_a_job_that_always_fails_starts_once_more_than_it_may_restart(allowed: int) -> None:
    """C4: with the budget policy, N restarts mean N + 1 generations, and the workers are told 0, 1 ... N."""
    job = Job(allowed)
    told = []
    while job.machine.state.phase is RunPhase.RUNNING:
        told.append(job.told())
        job.now += 100
        job.fail(FAILURE)
    verdict = job.machine.state.verdict
    assert verdict is not None
    assert (verdict.outcome, verdict.restarts_used) == (Outcome.FAILED, allowed)
    assert told == list(range(allowed + 1))


@pytest.mark.parametrize("allowed", range(1, 5))
def test_a_pause_costs_a_restart_too(allowed: int) -> None:
    """``Wait`` is paid for like ``Restart``: a policy that pauses is held to the same count."""
    job = Job(allowed, Pausing())
    for restart in range(allowed):
        job.fail(FAILURE)
        assert job.machine.state.deadlines == {RunDeadline.PAUSE: job.now + 5.0 * 2**restart}
        job.now = job.machine.state.deadlines[RunDeadline.PAUSE]
        job.hear(run.Tick())
        assert job.told() == restart + 1
    job.fail(FAILURE)
    verdict = job.machine.state.verdict
    assert verdict is not None
    assert (verdict.outcome, verdict.restarts_used) == (Outcome.FAILED, allowed)


def test_more_restarts_than_the_history_keeps() -> None:
    """The memory of earlier failures is bounded, the count of restarts is not."""
    job = Job(250)
    while job.machine.state.phase is RunPhase.RUNNING:
        job.now += 100
        generation = job.machine.state.generation
        job.fail(msgspec.structs.replace(FAILURE, generation=generation, seen_at=job.now))
    verdict = job.machine.state.verdict
    assert verdict is not None
    assert (verdict.outcome, verdict.restarts_used, verdict.generation) == (Outcome.FAILED, 250, 251)
    assert [failure.generation for failure in verdict.earlier] == list(range(151, 251))


def test_the_policy_is_asked_once_per_failed_generation_with_all_that_is_known() -> None:
    """It sees all failures, the first cause first with its evidence and host; how long it lived and the best one before
    it lived; the count before this failure; and the first causes of old."""
    asked: list[tuple[Failure, History]] = []

    class Curious:
        def decide(self, failure: Failure, history: History) -> AnyDecision:
            asked.append((failure, history))
            return Restart("again")

    job = Job(1, Curious())
    for generation, lived_s in ((1, 100.0), (2, 50.0), (3, 70.0)):
        job.now += lived_s
        seen = Failure(generation, 0, 0, 100, 1, job.now)
        cause = Failure(
            generation, 1, 1, 101, generation, job.now, evidence=Evidence("E", "E: boom", raised_at=job.now - 1)
        )
        job.hear(run.Received("a", messages.FailureSeen(generation, seen, job.now)))
        assert len(asked) == generation - 1, "not before every node has stopped"
        job.fail(seen, cause)
        assert len(asked) == generation
    first, second, third = (failure for failure, _ in asked)
    assert [(each.generation, each.global_rank, each.exit_code, each.host) for each in (first, second, third)] == [
        (1, 1, 1, "host-a"),
        (2, 1, 2, "host-a"),
        (3, 1, 3, "host-a"),
    ]
    assert first.evidence.message == "E: boom"
    histories = [history for _, history in asked]
    assert [[each.global_rank for each in history.failures] for history in histories] == [[1, 0]] * 3
    assert [(each.restarts_used, each.max_restarts, each.world_size) for each in histories] == [
        (0, 1, 2),
        (1, 1, 2),
        (2, 1, 2),
    ]
    assert [history.earlier for history in histories] == [(), (first,), (first, second)]
    assert [history.lived_s for history in histories] == [99.0, 49.0, 69.0]
    assert [history.longest_s for history in histories] == [0.0, 100.0, 100.0]


def test_a_policy_that_raises_ends_the_run_with_a_reason() -> None:
    """A policy is somebody's code: what it throws is told to everybody, and no node is left waiting."""

    class Raises:
        def decide(self, failure: Failure, history: History) -> AnyDecision:
            raise ZeroDivisionError("oh")

    job = Job(3, Raises())
    job.fail(FAILURE)
    verdict = job.machine.state.verdict
    assert verdict is not None
    assert verdict.why == "the restart policy Raises raised ZeroDivisionError: oh"
    assert verdict.restarts_used == 0


@pytest.mark.parametrize("decision", [Restart("again"), Wait("later", seconds=2.5), GiveUp("enough")])
def test_a_decision_can_be_written_down(decision: AnyDecision) -> None:
    """The three answers survive JSON, and each sends why."""
    assert msgspec.json.decode(msgspec.json.encode(decision), type=AnyDecision) == decision
    assert decision.why
