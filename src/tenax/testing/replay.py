"""Replay: derive every decision of a run again from its journal, and tell its story.

Pure: from a journal to lines. The same facts at the same times must give the same orders; where they do not, either the
journal was changed or this version of tenax decides differently, and the difference is named.
"""

from __future__ import annotations

import msgspec

from tenax._core.agent import AgentMachine
from tenax._node.messages import lines_for
from tenax.testing.agent_invariants import InvariantBroken, InvariantChecker

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from tenax._core.model import Verdict
    from tenax._node.journal import Footer, Header, Step


class Told(msgspec.Struct, frozen=True):
    """One line of the story, with the time since the beginning."""

    after_s: float
    text: str


class Replayed(msgspec.Struct, frozen=True):
    """What came out."""

    story: list[Told]
    differences: list[str]
    verdict: Verdict | None
    is_complete: bool  # the journal has its last line, and nothing was left out of it


def replay(header: Header, steps: list[Step], footer: Footer | None) -> Replayed:
    """Go through the journal as if it happened now."""
    machine = AgentMachine(header.settings)
    checker = InvariantChecker(machine.state)
    story: list[Told] = []
    differences: list[str] = []
    for number, step in enumerate(steps, 1):
        commands = machine.step(step.event, step.at)
        if commands != step.commands:
            differences.append(
                f"step {number}, {type(step.event).__name__}: the journal says {_names(step.commands)}, "
                f"this tenax decides {_names(commands)}"
            )
        try:
            checker.check(machine.state, step.event, commands)
        except InvariantBroken as broken:
            differences.append(f"step {number}, {type(step.event).__name__}: a promise is broken: {broken}")
        story += [Told(step.at - header.at, line.text) for line in lines_for(step.event, commands, machine.state)]
    is_complete = footer is not None and footer.steps_not_written == 0
    return Replayed(story, differences, machine.state.verdict, is_complete)


def _names(commands: Sequence[msgspec.Struct]) -> str:
    return ", ".join(map(repr, commands)) or "nothing"
