"""The coordinator's journal: every event it received and every message it sent, on the node that serves it.

The agent's journal (``journal.py``) covers one node; this one shows why generations began and ended on all of them. It
has the same format and limits, and it replays: the same events at the same times must give the same messages.
"""

from __future__ import annotations

import os
import time

import msgspec

from tenax import __version__
from tenax._core.coordinator import AnyCoordinatorEvent, CoordinatorMachine, Received, RunSettings, Send, Step
from tenax._core.messages import NodeProgress
from tenax._core.policy import AnyDecision, RecordedPolicy
from tenax._node.journal import FORMAT, Footer, Journal, read_lines

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from tenax._core.coordinator import CoordinatorState

NAME = "coordinator.jsonl"


class RunHeader(msgspec.Struct, frozen=True, tag="run header", tag_field="line", omit_defaults=True):
    """The first line."""

    format: int
    tenax: str
    settings: RunSettings
    host: str
    wall_time: float  # wall clock at `at`
    at: float


class RunStep(msgspec.Struct, frozen=True, tag="run step", tag_field="line", omit_defaults=True):
    """One event and the messages that followed."""

    at: float
    event: AnyCoordinatorEvent
    sent: list[Send] = []
    decision: AnyDecision | None = None  # of the restart policy, if this step called it


AnyRunLine = RunHeader | RunStep | Footer


class RunJournal(Journal):
    """Writes it. Opened when this node starts to serve the coordinator."""

    def __init__(self, path: str = "", warn: Callable[[str], None] = lambda _: None) -> None:
        super().__init__(path, warn=warn)

    def begin_run(self, settings: RunSettings, now: float) -> None:
        self.write(RunHeader(FORMAT, __version__, settings, os.uname().nodename, time.time(), now))

    def run_step(self, at: float, event: AnyCoordinatorEvent, step: Step, _: CoordinatorState) -> None:
        line = RunStep(at, event, step.sends, step.decision)
        if isinstance(event, Received) and isinstance(event.message, NodeProgress) and not step.sends:
            self.hold(event.node_id, line)
        else:
            self.write(line)


def read_run_journal(path: str) -> tuple[RunHeader, list[RunStep], Footer | None]:
    """Read a coordinator's journal. Raises JournalUnreadable."""
    lines = read_lines(path, AnyRunLine, RunHeader)
    footer = lines[-1] if isinstance(lines[-1], Footer) else None
    return lines[0], [line for line in lines if isinstance(line, RunStep)], footer


def replay_run(header: RunHeader, steps: list[RunStep]) -> tuple[list[tuple[float, str]], list[str]]:
    """Return the run's messages with the time since its start, and where this version of tenax behaves differently."""
    machine = CoordinatorMachine(header.settings, RecordedPolicy(step.decision for step in steps))
    from tenax._view.run_messages import RunMessages

    lines: list[tuple[float, str]] = []
    differences: list[str] = []
    run_messages = RunMessages()
    for number, step in enumerate(steps, 1):
        sent = machine.step(step.event, step.at).sends
        if sent != step.sent:
            differences.append(f"step {number}, {type(step.event).__name__}: the journal has {step.sent}, not {sent}")
        lines += [(step.at - header.at, line) for line in run_messages.lines_for(step.event, step.sent)]
    return lines, differences
