"""The restart policy: decides, from a failure or a change of the nodes and the history, what follows and what it costs.

The coordinator calls it once per generation that failed or lost nodes, after every node is clear and the evidence is
collected, and when a node could be admitted. The decision is a value with its reason. A policy is pure: the same
arguments give the same decision. It may be user code: an exception, or an answer that is no decision, ends the run with
that reason (``ask_policy``).
"""

from __future__ import annotations

from typing import Annotated, Protocol

import msgspec

from tenax._core.bounds import MAX_REASON, Seconds
from tenax._core.model import Failure, by_cause, failure_began_at
from tenax._core.text import one_line

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

# A generation that ran no longer than this failed at its start.
START_S = 60.0
_MISMATCH = "collective_mismatch"  # as named in ``_view/cause.py``
# Errors that an unchanged program raises again.
_INCURABLE = frozenset(
    {"SyntaxError", "IndentationError", "TabError", "ModuleNotFoundError", "ImportError", "NameError"}
)


class Decision(msgspec.Struct, frozen=True, tag=True, tag_field="decision", omit_defaults=True):
    """Base of the decisions."""

    why: Annotated[str, msgspec.Meta(min_length=1)]


class Restart(Decision, frozen=True):
    """Form the next generation now. Charges one restart."""

    keeps_survivors: bool = True  # False: also restart the workers that are held


class Wait(Decision, frozen=True, kw_only=True):
    """Form the next generation after a pause. Charges one restart."""

    seconds: Seconds
    keeps_survivors: bool = True


class GiveUp(Decision, frozen=True):
    """End the run as failed."""


class Continue(Decision, frozen=True):
    """Form the next generation now, of the nodes that there are. Charges nothing. Only after a change."""

    keeps_survivors: bool = True


class Keep(Decision, frozen=True):
    """Keep the running generation: the new node waits for the next one. Only when a node joins."""


AnyDecision = Restart | Wait | GiveUp | Continue | Keep


class Change(msgspec.Struct, frozen=True):
    """Nodes were lost or drained, or a node joined and there is room for it."""

    kind: str  # "loss", "drain" or "join"
    hosts: tuple[str, ...]
    why: str

    @property
    def answers(self) -> tuple[type[Decision], ...]:
        return (Continue, Restart, Keep) if self.kind == "join" else (Continue, Restart, Wait, GiveUp)


class History(msgspec.Struct, frozen=True):
    """What happened before this failure, and the other failures of its generation.

    The times of all failures (``seen_at``) are on one clock. Compare them with each other: a policy has no clock.
    """

    restarts_used: int
    max_restarts: int
    # The first cause of each earlier generation that failed and was restarted, oldest first; at most the last 100.
    earlier: tuple[Failure, ...] = ()
    failures: tuple[Failure, ...] = ()  # all of this generation, on all nodes, first cause first
    world_size: int = 0
    lived_s: float = START_S + 1  # how long this generation had run when the failure began
    longest_s: float = 0.0  # how long the longest earlier generation ran
    membership_changes: int = 0  # earlier generations that ended because nodes were lost or joined, uncharged
    drains: int = 0  # earlier generations that ended because nodes were drained, uncharged
    survivors: int = 0  # workers of this generation that continued from the one before

    @property
    def restarts_left(self) -> int:
        return self.max_restarts - self.restarts_used


class RestartPolicy(Protocol):
    """The interface of a restart policy.

    It may also have ``decide_change(change, history)``, which returns ``Continue``, ``Restart``, ``Wait`` or ``GiveUp``
    after a loss or a drain, and ``Continue``, ``Restart`` or ``Keep`` when a node joins. Without it, the run continues.
    """

    def decide(self, failure: Failure, history: History) -> AnyDecision: ...


def ask_policy(
    policy: RestartPolicy, what: Failure | Change, history: History, reraise: tuple[type[Exception], ...] = ()
) -> AnyDecision:
    """Return the policy's decision. Whatever the policy does, this is one, and it can be stored and sent."""
    name = f"the restart policy {type(policy).__name__}"
    try:
        if isinstance(what, Failure):
            answer = policy.decide(what, history)
        else:
            answer = getattr(policy, "decide_change", _continue)(what, history)
    except reraise:
        raise
    except (Exception, SystemExit) as error:
        return GiveUp(_reason(f"{name} raised {type(error).__name__}: {error}"))
    expected = what.answers if isinstance(what, Change) else (Restart, Wait, GiveUp)
    if not isinstance(answer, expected):
        *others, last = (each.__name__ for each in expected)
        return GiveUp(f"{name} returned {type(answer).__name__}; expected {', '.join(others)} or {last}")
    try:
        answer = msgspec.structs.replace(answer, why=_reason(answer.why))
        checked: AnyDecision = msgspec.json.decode(msgspec.json.encode(answer), type=AnyDecision)
        return checked
    except Exception as error:
        return GiveUp(_reason(f"{name} returned an invalid {type(answer).__name__}: {error}"))


def _continue(change: Change, _: History) -> AnyDecision:
    return Continue(change.why)


class RecordedPolicy:
    """Returns recorded decisions, because a replay may not have the policy's code."""

    def __init__(self, decisions: Iterable[AnyDecision | None]) -> None:
        self._decisions = [decision for decision in decisions if decision is not None]
        self._next = 0

    def decide(self, what: Failure | Change, history: History) -> AnyDecision:  # noqa: ARG002 - a policy's signature
        self._next += 1
        if self._next > len(self._decisions):
            return GiveUp("the journal holds no further decision")
        return self._decisions[self._next - 1]

    decide_change = decide


def first_cause_first(failures: Iterable[Failure], formed_at: float) -> list[Failure]:
    """Sort the failures of a generation; the first cause gets how long the generation had run."""
    first, *others = sorted(failures, key=by_cause)
    return [msgspec.structs.replace(first, lived_s=max(0.0, failure_began_at(first) - formed_at)), *others]


def _reason(text: str) -> str:
    return one_line(text)[:MAX_REASON]


class BudgetPolicy:
    """Restart at once until ``max_restarts`` are used, but not after failures that would repeat. The default.

    The user marks such failures with ``fatal_exit_codes`` and ``fatal_errors`` (names of exception classes).
    """

    def __init__(self, fatal_exit_codes: tuple[int, ...] = (), fatal_errors: tuple[str, ...] = ()) -> None:
        self._fatal_exit_codes = frozenset(fatal_exit_codes)
        self._fatal_errors = frozenset(_last_part(name) for name in fatal_errors)

    def decide(self, failure: Failure, history: History) -> AnyDecision:
        if history.max_restarts == 0:
            return GiveUp("no restarts are allowed (--max-restarts 0)")
        hopeless = self._why_hopeless(failure) or _why_it_will_fail_again(failure, history)
        if hopeless and history.restarts_left > 0:
            left = "restart" if history.restarts_left == 1 else f"{history.restarts_left} restarts"
            return GiveUp(f"{hopeless}; the remaining {left} would not help")
        if history.restarts_left > 0:
            why = f"restart {history.restarts_used + 1} of {history.max_restarts}"
            return Restart(why, keeps_survivors=not _is_memory_suspect(failure, history))
        return GiveUp(
            "the only restart is used" if history.max_restarts == 1 else f"all {history.max_restarts} restarts are used"
        )

    def _why_hopeless(self, failure: Failure) -> str:
        if failure.exit_code in self._fatal_exit_codes:
            return f"exit code {failure.exit_code} is marked as fatal (--fatal-exit-codes)"
        kind = failure.evidence.error_type
        if kind and _last_part(kind) in self._fatal_errors:  # evidence may lack the module's name
            return f"{kind} is marked as fatal (--fatal-errors)"
        return ""


def _why_it_will_fail_again(failure: Failure, history: History) -> str:
    """Return why a restart would fail again, or "". Only applies if no generation got beyond its start."""
    if max(history.lived_s, history.longest_s) > START_S:
        return ""
    if failure.evidence.error_type in _INCURABLE:
        return f"{failure.evidence.error_type} at startup is an error in the program itself"
    signatures = {_signature(each) for each in history.failures}
    have_all_failed_alike = len(history.failures) == history.world_size >= 2 and len(signatures) == 1
    is_repeated = bool(history.earlier) and _signature(history.earlier[-1]) == _signature(failure)
    if have_all_failed_alike and is_repeated and failure.evidence.message:
        return f"all {history.world_size} workers failed at startup with the same error as before"
    return ""


def _is_memory_suspect(failure: Failure, history: History) -> bool:
    """Whether the survivors' memory may be the cause, so that all workers should restart from the checkpoint."""
    is_repeated = bool(history.earlier) and _signature(history.earlier[-1]) == _signature(failure)
    has_signature = bool(failure.evidence.message)
    return failure.evidence.cause == _MISMATCH or (history.survivors > 0 and is_repeated and has_signature)


def _signature(failure: Failure) -> tuple[str, str]:
    evidence = failure.brief().evidence  # earlier failures are kept in brief
    return evidence.error_type, evidence.message


def _last_part(name: str) -> str:
    return name.rpartition(".")[2]
