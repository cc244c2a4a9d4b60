"""The state of a dynamic rendezvous: the one document that all nodes of a run share.

    gathering round 1 -> round 1 complete -> gathering round 2 -> round 2 complete -> ...      closed: for good

Invariants (tests cite the numbers):

S1  An invalid document is never used: ``decode`` raises, and executes nothing that it reads.
S2  The ranks of a round are 0 .. n-1, each once.
S3  Every node is listed once, under an id that is unique to its start.
S4  It contains no times. A node shows that it is alive by counting; each observer measures the silence.

It is JSON with a version, and everything in it is bounded.
"""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec

from tenax._core.bounds import DECODE_ERRORS
from tenax.rendezvous.api import RendezvousStateError

FORMAT = "tenax.rendezvous"
VERSION = 1
MAX_BYTES = 4 << 20
_MAX_NODES = 20_000
_MAX_INTEGER = (1 << 53) - 1  # exact in every JSON reader
_MAX_SHOWN = 24
_MAX_NAMES = 8

Id = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
Count = Annotated[int, msgspec.Meta(ge=0, le=_MAX_INTEGER)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=_MAX_INTEGER)]


class Standing(enum.Enum):
    WAITING = "waiting"  # requests to join; a spare if the group is full
    JOINED = "joined"  # in the gathering round
    RUNNING = "running"  # a member of the last complete round


class Node(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A node that is present."""

    id: Id
    addr: Annotated[str, msgspec.Meta(max_length=255)]  # for people
    standing: Standing
    beat: Count = 0  # alive while this changes


class State(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the nodes agree on."""

    run_id: str
    min_nodes: Positive
    max_nodes: Positive
    round: Positive = 1  # gathering, or running if complete
    complete: bool = False
    closed: Annotated[str, msgspec.Meta(max_length=1000)] = ""  # why the run is closed; empty: it is open
    members: Annotated[dict[Id, Count], msgspec.Meta(max_length=_MAX_NODES)] = {}  # last complete round: id -> rank
    nodes: Annotated[tuple[Node, ...], msgspec.Meta(max_length=_MAX_NODES)] = ()  # in order of arrival
    format: str = FORMAT
    version: int = VERSION

    def node(self, node_id: str) -> Node | None:
        return next((node for node in self.nodes if node.id == node_id), None)

    def with_standing(self, standing: Standing) -> list[Node]:
        return [node for node in self.nodes if node.standing is standing]


class _Header(msgspec.Struct):
    """The fields that every version of the document has."""

    format: str = ""
    version: int = 0


_state_decoder = msgspec.json.Decoder(State)
_header_decoder = msgspec.json.Decoder(_Header)
encode = msgspec.json.encode


def first_names(names: list[str]) -> str:
    """Return the first few names as text, for people."""
    more = [f"and {len(names) - _MAX_NAMES} more"] if len(names) > _MAX_NAMES else []
    return ", ".join(names[:_MAX_NAMES] + more)


def decode(blob: bytes, run_id: str) -> State:
    """Return the state. Raises RendezvousStateError if the bytes are not a state of this run."""
    try:
        found: State | str = _fault_of_document(blob) or _state_decoder.decode(blob)
    except DECODE_ERRORS as error:
        if blob[:1] == b"{":
            found = f"it cannot be read: {error}"
        elif blob[:1] == b"\x80":
            found = "it is a pickle, written by an agent of TorchElastic, which cannot share a run with tenax"
        else:
            found = f"it begins with {bytes(blob[:_MAX_SHOWN])!r}"
    fault = found if isinstance(found, str) else _fault_of_state(found, run_id)
    if isinstance(found, str) or fault:
        raise RendezvousStateError(
            f"the stored rendezvous state of the run {run_id!r} is invalid: {fault}; use a run id that no other "
            "program uses, or delete that state"
        )
    return found


def _fault_of_document(blob: bytes) -> str:
    """Check size, format and version."""
    if not isinstance(blob, bytes):
        return f"it is a {type(blob).__name__} instead of bytes"
    if len(blob) > MAX_BYTES:
        return f"it has {len(blob)} bytes, more than {MAX_BYTES}"
    header = _header_decoder.decode(blob)
    if header.format != FORMAT:
        return f"its format is {header.format[:_MAX_SHOWN]!r} instead of {FORMAT!r}"
    if header.version != VERSION:
        return f"its version is {header.version}; this release of tenax supports version {VERSION}"
    return ""


def _fault_of_state(state: State, run_id: str) -> str:
    """Check what the types do not; return the first fault."""
    if state.run_id != run_id:
        return f"it belongs to the run {state.run_id[:_MAX_SHOWN]!r}"
    if state.max_nodes < state.min_nodes:
        return f"its min_nodes is {state.min_nodes} and its max_nodes {state.max_nodes}"
    if len({node.id for node in state.nodes}) != len(state.nodes):
        return "it lists a node twice"
    if sorted(state.members.values()) != list(range(len(state.members))):
        return "its ranks are not 0, 1, 2 ... each once"
    if any(node.id not in state.members for node in state.with_standing(Standing.RUNNING)):
        return "a running node in it is not a member"
    if state.complete and (not state.members or state.with_standing(Standing.JOINED)):
        return "its round is complete, but a joined node has no rank"
    return ""
