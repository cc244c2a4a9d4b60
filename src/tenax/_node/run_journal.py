"""The coordinator's journal: every fact it heard and all that it said, one JSON line each, on the node that serves it.

The agent's journal (``journal.py``) tells the story of one node; this one tells why generations began and ended for all
of them. It is bounded and loses in the same way, and it replays: the same facts at the same times must give the same
words.
"""

from __future__ import annotations

import os
import time

import msgspec

from tenax import __version__
from tenax._core.coordinator import AnyCoordinatorEvent, CoordinatorMachine, Received, RunSettings, Send
from tenax._core.messages import NodeProgress
from tenax._core.policy import AnyDecision, GiveUp, History
from tenax._node.journal import FORMAT, Footer, Journal, read_lines

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from tenax._core.coordinator import CoordinatorState
    from tenax._core.model import Failure

NAME = "coordinator.jsonl"


class RunHeader(msgspec.Struct, frozen=True, tag="run header", tag_field="line", omit_defaults=True):
    """The first line."""

    format: int
    tenax: str
    settings: RunSettings
    host: str
    wall_time: float  # of the same moment as `at`
    at: float


class RunStep(msgspec.Struct, frozen=True, tag="run step", tag_field="line", omit_defaults=True):
    """One fact, and what was said about it."""

    at: float
    event: AnyCoordinatorEvent
    says: list[Send] = []
    decision: AnyDecision | None = None  # what the policy answered, if it was asked in this step


AnyRunLine = RunHeader | RunStep | Footer


class RunJournal(Journal):
    """Writes it. Opened when this node begins to serve, which may be never."""

    def __init__(self, path: str = "", warn: Callable[[str], None] = lambda _: None) -> None:
        super().__init__(path, warn=warn)
        self._decision: AnyDecision | None = None
        self._earlier: list[Failure] | None = None

    def begin_run(self, settings: RunSettings, now: float) -> None:
        self.write(RunHeader(FORMAT, __version__, settings, os.uname().nodename, time.time(), now))

    def run_step(self, at: float, event: AnyCoordinatorEvent, says: list[Send], state: CoordinatorState) -> None:
        # A policy may answer with the same object every time; but each restart that it grants makes another history.
        was_asked = state.decision is not self._decision or state.earlier is not self._earlier
        self._decision, self._earlier = state.decision, state.earlier
        step = RunStep(at, event, says, state.decision if was_asked else None)
        if isinstance(event, Received) and isinstance(event.message, NodeProgress) and not says:
            self.hold(event.node_id, step)
        else:
            self.write(step)


def is_run_journal(path: str) -> bool:
    """Whether this file is a coordinator's journal rather than an agent's."""
    try:
        with open(path, "rb") as file:
            return b'"line":"run header"' in file.readline(4096)
    except OSError:
        return False


def read_run_journal(path: str) -> tuple[RunHeader, list[RunStep], Footer | None]:
    """A coordinator's journal back from its file. Raises JournalUnreadable."""
    lines = read_lines(path, AnyRunLine, RunHeader)
    footer = lines[-1] if isinstance(lines[-1], Footer) else None
    return lines[0], [line for line in lines if isinstance(line, RunStep)], footer


class RecordedPolicy:
    """Stands for a policy whose code may not be here: it answers what it answered then."""

    def __init__(self, decisions: list[AnyDecision]) -> None:
        self._decisions = list(decisions)

    def decide(self, failure: Failure, history: History) -> AnyDecision:  # noqa: ARG002 - the seam's signature
        return self._decisions.pop(0) if self._decisions else GiveUp("the journal holds no further decision")


def replay_run(header: RunHeader, steps: list[RunStep]) -> tuple[list[tuple[float, str]], list[str]]:
    """The story of the run, with the time since its beginning, and where this tenax would have spoken differently."""
    recorded = RecordedPolicy([step.decision for step in steps if step.decision is not None])
    machine = CoordinatorMachine(header.settings, recorded)
    from tenax._view.run_messages import RunMessages

    story: list[tuple[float, str]] = []
    differences: list[str] = []
    told = RunMessages()
    for number, step in enumerate(steps, 1):
        says = machine.step(step.event, step.at)
        if says != step.says:
            differences.append(f"step {number}, {type(step.event).__name__}: the journal says {step.says}, not {says}")
        story += [(step.at - header.at, line) for line in told.tell(step.event, step.says)]
    return story, differences
