"""Replay: repeat every decision of a run from its journal, and describe the run.

The same events at the same times must give the same commands. If they do not, either the journal was changed or this
version of tenax decides differently; each difference is reported.
"""

from __future__ import annotations

import msgspec

from tenax._core.agent import AgentMachine
from tenax._node.messages import Repetitions, lines_for
from tenax.testing.agent_invariants import InvariantBroken, InvariantChecker

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from tenax._core.model import Verdict
    from tenax._node.journal import Footer, Header, Step


class ReplayLine(msgspec.Struct, frozen=True):
    """One line of the description, with the time since the start of the run."""

    after_s: float
    text: str


class Replayed(msgspec.Struct, frozen=True):
    """The result of a replay."""

    lines: list[ReplayLine]
    differences: list[str]
    verdict: Verdict | None
    is_complete: bool  # the journal has its footer, and no step is missing


def replay(header: Header, steps: list[Step], footer: Footer | None) -> Replayed:
    """Repeat the steps of a journal."""
    machine = AgentMachine(header.settings)
    checker = InvariantChecker(machine.state)
    lines: list[ReplayLine] = []
    differences: list[str] = []
    repetitions = Repetitions()
    for number, step in enumerate(steps, 1):
        checker.expect(machine.state, step.event)
        commands = machine.step(step.event, step.at)
        if commands != step.commands:
            differences.append(
                f"step {number}, {type(step.event).__name__}: the journal has {_names(step.commands)}, "
                f"this version of tenax decides {_names(commands)}"
            )
        try:
            checker.check(machine.state, step.event, commands)
        except InvariantBroken as broken:
            differences.append(f"step {number}, {type(step.event).__name__}: invariant broken: {broken}")
        if repetitions.is_shown(step.event, step.at):
            after_s, shown = step.at - header.at, lines_for(step.event, commands, machine.state)
            lines += [ReplayLine(after_s, line.text) for line in shown]
    is_complete = footer is not None and footer.steps_not_written == 0
    return Replayed(lines, differences, machine.state.verdict, is_complete)


def _names(commands: Sequence[msgspec.Struct]) -> str:
    return ", ".join(map(repr, commands)) or "nothing"
