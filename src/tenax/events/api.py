"""What an event is: TorchElastic's dataclasses, written as the same JSON.

Real dataclasses, because people use ``asdict`` and ``replace`` on them; so this module is not on the launcher's start
path. Whatever read TorchElastic's lines reads ours: the same keys, in the same order.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any, TypeVar

__all__ = ["Event", "EventMetadataValue", "EventSource", "NodeState", "RdzvEvent"]

EventMetadataValue = str | int | float | bool | None
_Member = TypeVar("_Member", bound=Enum)


class EventSource(str, Enum):
    """Who an event is about."""

    AGENT = "AGENT"
    WORKER = "WORKER"


class NodeState(str, Enum):
    """How far a node has come in its rendezvous."""

    INIT = "INIT"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"


@dataclass
class Event:
    """Something that happened to a run.

    ``name``: what; the agent's own begin with ``torchelastic.worker.status.``.
    ``source``: whom it happened to.
    ``timestamp``: when, in whole milliseconds since the epoch: the unit that TorchElastic documents for this field and
    never fills in. The agent's events have the time at which the thing happened, which may be a little before they are
    sent. 0: not known. ``record`` leaves it as it is.
    ``metadata``: details. The agent's are listed in the guide.
    """

    name: str
    source: EventSource
    timestamp: int = 0
    metadata: dict[str, EventMetadataValue] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.serialize()

    @staticmethod
    def deserialize(data: str | Event) -> Event:
        """The event that ``serialize`` wrote. Raises ``ValueError`` if the text is no event."""
        if isinstance(data, Event):
            return data
        fields = _fields(data, "an event")
        fields["source"] = _member(EventSource, fields.get("source"), "source", "event")
        return Event(**_known(fields, Event, "event"))

    def serialize(self) -> str:
        """One line of JSON."""
        return _line(self)


@dataclass
class RdzvEvent:
    """Something that happened in a rendezvous.

    ``name``: where in the code: ``<file>:<class>.<method>``.
    ``run_id``: of which run.
    ``message``: what, in words.
    ``hostname``, ``pid``: of which node.
    ``node_state``: how far that node has come.
    ``master_endpoint``: where the workers' store is, if that is known.
    ``rank``: of the node, if it has one.
    ``local_id``: a number that tells handlers of one process apart, if there is one.
    ``error_trace``: the traceback, if this is about an error.
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
        """The event that ``serialize`` wrote. Raises ``ValueError`` if the text is no rendezvous event."""
        if isinstance(data, RdzvEvent):
            return data
        fields = _fields(data, "a rendezvous event")
        fields["node_state"] = _member(NodeState, fields.get("node_state"), "node_state", "rendezvous event")
        return RdzvEvent(**_known(fields, RdzvEvent, "rendezvous event"))

    def serialize(self) -> str:
        """One line of JSON."""
        return _line(self)


def _line(event: Event | RdzvEvent) -> str:
    import json

    return json.dumps(asdict(event))


def _fields(text: object, kind: str) -> dict[str, Any]:
    import json

    if not isinstance(text, str):
        raise TypeError(f"cannot read {kind} from a {type(text).__name__}; expected the text that serialize() wrote")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"this is not the JSON of {kind} ({error}): {text[:80]!r}") from error
    if not isinstance(found, dict):
        raise ValueError(f"this is not {kind} but a {type(found).__name__}: {text[:80]!r}")
    return found


def _member(kind: type[_Member], found: object, key: str, of: str) -> _Member:
    for member in kind:
        if found == member.value:
            return member
    known = ", ".join(str(member.value) for member in kind)
    raise ValueError(f"the {key} of the {of} is {found!r}; expected one of {known}")


def _known(fields: dict[str, Any], kind: type[Any], of: str) -> dict[str, Any]:
    """Only what there is a field for: a later release may write more."""
    from dataclasses import MISSING
    from dataclasses import fields as fields_of

    known = {each.name: each for each in fields_of(kind)}
    missing = [
        name
        for name, each in known.items()
        if name not in fields and each.default is MISSING and each.default_factory is MISSING
    ]
    if missing:
        raise ValueError(f"the {of} has no {', '.join(missing)}; expected what serialize() writes")
    return {name: value for name, value in fields.items() if name in known}
