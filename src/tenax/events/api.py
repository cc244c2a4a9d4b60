"""TorchElastic's event dataclasses, serialized to the same JSON: the same keys in the same order.

They are real dataclasses, because users call ``asdict`` and ``replace`` on them. Importing dataclasses is slow, so the
launcher's start does not import this module.
"""

from __future__ import annotations

import json
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from enum import Enum
from typing import Any, TypeVar

__all__ = ["Event", "EventMetadataValue", "EventSource", "NodeState", "RdzvEvent"]

EventMetadataValue = str | int | float | bool | None
T = TypeVar("T")


class EventSource(str, Enum):
    """What an event is about."""

    AGENT = "AGENT"
    WORKER = "WORKER"


class NodeState(str, Enum):
    """The state of a node in its rendezvous."""

    INIT = "INIT"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"


@dataclass
class Event:
    """An event of a run.

    ``name``: the agent's own names begin with ``torchelastic.worker.status.``.
    ``source``: what the event is about.
    ``timestamp``: whole milliseconds since the epoch, the unit that TorchElastic documents for this field but never
    sets. The agent's events have the time of the event itself, which may be slightly before it is sent. 0: unknown.
    ``record`` does not change it.
    ``metadata``: details. The guide lists those of the agent's events.
    """

    name: str
    source: EventSource
    timestamp: int = 0
    metadata: dict[str, EventMetadataValue] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.serialize()

    @staticmethod
    def deserialize(data: str | Event) -> Event:
        """Parse the output of ``serialize``. Raises ``ValueError`` if the text is not an event."""
        return data if isinstance(data, Event) else _parse(Event, data, "event", source=EventSource)

    def serialize(self) -> str:
        """Return one line of JSON."""
        return json.dumps(asdict(self))


@dataclass
class RdzvEvent:
    """An event of a rendezvous.

    ``name``: location in the code, ``<file>:<class>.<method>``.
    ``run_id``: of the run.
    ``message``: what happened.
    ``hostname``, ``pid``, ``node_state``: of the node.
    ``master_endpoint``: address of the workers' store, if known.
    ``rank``: of the node, if it has one.
    ``local_id``: distinguishes handlers in one process, if there are several.
    ``error_trace``: traceback of an error.
    """

    name: str
    run_id: str
    message: str
    hostname: str
    pid: int
    node_state: NodeState
    master_endpoint: str = ""
    rank: int | None = None
    local_id: int | None = None
    error_trace: str = ""

    def __str__(self) -> str:
        return self.serialize()

    @staticmethod
    def deserialize(data: str | RdzvEvent) -> RdzvEvent:
        """Parse the output of ``serialize``. Raises ``ValueError`` if the text is not a rendezvous event."""
        return (
            data if isinstance(data, RdzvEvent) else _parse(RdzvEvent, data, "rendezvous event", node_state=NodeState)
        )

    def serialize(self) -> str:
        """Return one line of JSON."""
        return json.dumps(asdict(self))


def _parse(kind: type[T], text: object, noun: str, **enums: type[Enum]) -> T:
    """Parse the output of ``serialize``. ``noun``: of this kind. ``enums``: fields that are members of an enum.

    Drops unknown fields, which a later release may write.
    """
    article = "an" if noun.startswith("e") else "a"
    if not isinstance(text, str):
        raise TypeError(
            f"cannot read {article} {noun} from a {type(text).__name__}; expected the output of serialize()"
        )
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"invalid JSON for {article} {noun} ({error}): {text[:80]!r}") from error
    if not isinstance(found, dict):
        raise ValueError(f"expected {article} {noun}, not a {type(found).__name__}: {text[:80]!r}")
    for name, enum in enums.items():
        members = {member.value: member for member in enum}
        value = found.get(name)
        if not isinstance(value, str) or value not in members:
            raise ValueError(f"the {name} of the {noun} is {value!r}; expected one of {', '.join(members)}")
        found[name] = members[value]
    known: tuple[Field[Any], ...] = fields(kind)  # type: ignore[arg-type]
    required = [each.name for each in known if each.default is MISSING and each.default_factory is MISSING]
    if missing := [name for name in required if name not in found]:
        raise ValueError(f"the {noun} lacks {', '.join(missing)}; expected the output of serialize()")
    return kind(**{each.name: found[each.name] for each in known if each.name in found})
