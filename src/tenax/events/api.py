"""TorchElastic's event dataclasses, serialized to the same JSON: the same keys in the same order.

They are real dataclasses, because users call ``asdict`` and ``replace`` on them. Importing dataclasses is slow, so the
launcher's start does not import this module.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any, TypeVar

__all__ = ["Event", "EventMetadataValue", "EventSource", "NodeState", "RdzvEvent"]

EventMetadataValue = str | int | float | bool | None
_Member = TypeVar("_Member", bound=Enum)


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
        if isinstance(data, Event):
            return data
        fields = _fields(data, "an event")
        fields["source"] = _member(EventSource, fields.get("source"), "source", "event")
        return Event(**_known(fields, Event, "event"))

    def serialize(self) -> str:
        """Return one line of JSON."""
        return _line(self)


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
        if isinstance(data, RdzvEvent):
            return data
        fields = _fields(data, "a rendezvous event")
        fields["node_state"] = _member(NodeState, fields.get("node_state"), "node_state", "rendezvous event")
        return RdzvEvent(**_known(fields, RdzvEvent, "rendezvous event"))

    def serialize(self) -> str:
        """Return one line of JSON."""
        return _line(self)


def _line(event: Event | RdzvEvent) -> str:
    import json

    return json.dumps(asdict(event))


def _fields(text: object, kind: str) -> dict[str, Any]:
    import json

    if not isinstance(text, str):
        raise TypeError(f"cannot read {kind} from a {type(text).__name__}; expected the output of serialize()")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"invalid JSON for {kind} ({error}): {text[:80]!r}") from error
    if not isinstance(found, dict):
        raise ValueError(f"expected {kind}, not a {type(found).__name__}: {text[:80]!r}")
    return found


def _member(kind: type[_Member], found: object, key: str, of: str) -> _Member:
    for member in kind:
        if found == member.value:
            return member
    known = ", ".join(str(member.value) for member in kind)
    raise ValueError(f"the {key} of the {of} is {found!r}; expected one of {known}")


def _known(fields: dict[str, Any], kind: type[Any], of: str) -> dict[str, Any]:
    """Drop unknown fields, which a later release may write. Raises ``ValueError`` if one is missing."""
    from dataclasses import MISSING
    from dataclasses import fields as fields_of

    known = {each.name: each for each in fields_of(kind)}
    missing = [
        name
        for name, each in known.items()
        if name not in fields and each.default is MISSING and each.default_factory is MISSING
    ]
    if missing:
        raise ValueError(f"the {of} lacks {', '.join(missing)}; expected the output of serialize()")
    return {name: value for name, value in fields.items() if name in known}
