"""The history of a simulation as lines: time, process, event, decision.

The same seed gives the same text, byte for byte.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import msgspec

from tenax._core.coordinator import Received
from tenax._core.messages import NodeInfo
from tenax._core.model import Assignment, Evidence, Failure, Verdict

if TYPE_CHECKING:
    from tenax.testing.simulator.scheduler import Scheduler


class History:
    """Collects lines, if it is recorded."""

    def __init__(self, schedule: Scheduler, *, is_recorded: bool) -> None:
        self._schedule = schedule
        self.is_recorded = is_recorded
        self.lines: list[str] = []

    def note(self, process: str, text: str) -> None:
        if self.is_recorded:
            self.lines.append(f"{self._schedule.now:11.4f}  {process:12}  {text}\n")


def describe(what: object) -> str:
    """Describe an event, a command or a message in short."""
    match what:
        case Received(node_id, message):
            return f"{node_id} sends {describe(message)}"
        case NodeInfo():
            return what.node_id + (f" ({what.name})" if what.name else "")
        case Assignment():
            return (
                f"generation {what.generation} rank {what.group_rank}/{what.group_world_size} "
                f"store {what.master_addr}:{what.master_port} restarts {what.restarts_used}"
            )
        case Verdict():
            named = ", ".join(describe(failure) for failure in what.failures)
            return f"{what.outcome.value}: {what.why}" + (f" ({named})" if named else "")
        case Failure():
            raised_at = what.evidence.raised_at
            when = f"seen {what.seen_at:.4f}" + ("" if raised_at is None else f" raised {raised_at:.4f}")
            return f"rank {what.global_rank} of {what.generation} {when}"
        case Evidence():
            return "nothing" if what.raised_at is None else f"raised {what.raised_at:.4f}"
        case enum.Enum():
            return str(what.value)
        case float():
            return f"{what:.4f}"
        case tuple():
            return "[" + ", ".join(describe(each) for each in what) + "]"
        case msgspec.Struct():
            return f"{type(what).__name__}({', '.join(_fields(what))})"
    return str(what)


def _fields(what: msgspec.Struct) -> list[str]:
    names, defaults = what.__struct_fields__, what.__struct_defaults__
    required = len(names) - len(defaults)
    fields = []
    for index, name in enumerate(names):
        value = getattr(what, name)
        if name != "sent_at" and (index < required or value != defaults[index - required]):
            fields.append(f"{name}={describe(value)}")
    return fields
