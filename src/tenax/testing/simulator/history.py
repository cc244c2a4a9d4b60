"""Describes events, commands and messages in the lines of a history. The same seed gives the same text."""

from __future__ import annotations

import enum

import msgspec

from tenax._core.coordinator import Received
from tenax._core.messages import NodeInfo
from tenax._core.model import Assignment, Evidence, Failure, Verdict


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
