"""The wire protocol between agents, operators and the coordinator: frames and the handshake.

A frame is a length (4 bytes, big-endian) followed by that many bytes of JSON with a type tag. In the handshake both
sides prove, without sending it, that they have the run's secret, and that they mean the same run. The client goes
first:

    agent                                       coordinator
    Hello(version, run_id, node_id, nonce)  ->
                                            <-  Challenge(nonce)             or Refused (another version)
    Proof(proof)                            ->
                                            <-  Accepted(proof, terms)       or Refused
    Message(...), Beat(n) ...                  <-> Event(...), BeatAnswer(n) ...
    Ask(n, ...)                             <-> Answer(n, ...)               both ways: see ``_core/requests.py``

So an unauthenticated peer receives nothing that depends on the secret or on the run. A wrong run and a wrong secret get
the same rejection. The client trusts nothing before it has verified the proof in ``Accepted``.

An operator sets ``is_operator`` in its Hello: it sends requests and is not a node.

Pure: bytes and values. Anything malformed raises ``WireError``, which closes the connection. Nothing received is ever
executed or unpickled.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from tenax._core.bounds import DECODE_ERRORS, MAX_LONG_TEXT, MAX_TEXT, Interval, LongText, Number, Reason, Time
from tenax._core.events import FromCoordinator
from tenax._core.messages import FromNode
from tenax._core.requests import AnyRequest
from tenax._core.text import encodable, shortened_texts

VERSION = 2
MAX_UNAUTHENTICATED_BYTES = 4 << 10
MAX_BYTES = 8 << 20  # fits the verdict of the largest run with paths of maximum length
MAX_UNSENT_ANSWER_BYTES = 4 << 20  # per link, which carries messages and beats too
TOO_MANY_ANSWERS = "too many pending answers on this link; request less at once"
NONCE_BYTES = 16
# Reasons for rejecting an authenticated operator.
NO_SECRET = "no secret"  # noqa: S105 - the run has none, and operators need one
TOO_MANY_OPERATORS = "too many operators"


INVALID = "invalid data"  # why a link was closed because of a WireError: the start of the reason


class WireError(Exception):
    """The bytes are not a valid frame, or the frame is not allowed now."""


class Frame(msgspec.Struct, frozen=True, tag=True, tag_field="frame", omit_defaults=True):
    """Base of all frames."""


class Hello(Frame, frozen=True):
    version: int
    run_id: str
    node_id: str
    nonce: bytes
    is_operator: bool = False  # an operator's tool, not a node


class Proof(Frame, frozen=True):
    proof: bytes


class Message(Frame, frozen=True):
    """A message from a node to the coordinator."""

    message: FromNode


class Beat(Frame, frozen=True):
    number: Number
    at: Time = 0.0  # on the sender's clock, for comparing the two clocks
    seen: Number = 0  # the last beat whose answer the sender has received


class Cancel(Frame, frozen=True):
    """An operator cancels the run."""

    why: Reason


class Replaced(Frame, frozen=True):
    """Another node leads: the value of the leader key in etcd, which this leader perhaps cannot read, and its term."""

    leader: Annotated[bytes, msgspec.Meta(max_length=4096)]
    term: Number


class Challenge(Frame, frozen=True):
    nonce: bytes


class Accepted(Frame, frozen=True):
    """The coordinator's proof and the terms of the lease."""

    proof: bytes
    beat_s: Interval
    lease_s: Interval
    counts: bool = True  # see BeatAnswer


class Refused(Frame, frozen=True):
    """A rejection. It reveals nothing about the run, and its text is not shown: any process can send it."""

    reason: LongText  # shown by nodes of version 1; or ``NO_SECRET``, ``TOO_MANY_OPERATORS``
    is_final: bool = True  # a retry will not help
    version: int = 1  # of the coordinator; version 1 does not send this field


class Event(Frame, frozen=True):
    """A message from the coordinator to a node."""

    event: FromCoordinator


class BeatAnswer(Frame, frozen=True):
    number: Number
    counts: bool = True  # False: the coordinator may have a successor, so this answer does not renew the lease


class Ask(Frame, frozen=True):
    """A request. The peer answers it once, with the same number."""

    number: Number
    request: AnyRequest


class Answer(Frame, frozen=True):
    number: Number
    value: msgspec.Raw = msgspec.Raw(b"null")
    error: LongText = ""  # the reason if there is no value


FromAgent = Hello | Proof | Message | Beat | Cancel | Replaced | Ask | Answer
FromServer = Challenge | Accepted | Refused | Event | BeatAnswer | Ask | Answer

_encoder = msgspec.json.Encoder()
_from_agent: msgspec.json.Decoder[FromAgent] = msgspec.json.Decoder(FromAgent)
_from_server: msgspec.json.Decoder[FromServer] = msgspec.json.Decoder(FromServer)


def encode(frame: FromAgent | FromServer) -> bytes:
    try:
        body = _encoder.encode(frame)
    except UnicodeEncodeError:  # a worker's output may contain any bytes
        body = _encoder.encode(encodable(msgspec.to_builtins(frame)))
    limit = MAX_TEXT if isinstance(frame, Message) else MAX_LONG_TEXT
    if len(body) > limit:  # a text in it may be longer than the peer accepts
        plain = encodable(msgspec.to_builtins(frame)) if isinstance(frame, Message | Event) else None
        body = _encoder.encode(shortened_texts(plain, limit)) if plain is not None else body
    return len(body).to_bytes(4, "big") + body


def encode_ask(number: int, request: AnyRequest) -> bytes:
    """Encode a request. Raises WireError if the peer would reject it and close the link: an operator wrote it."""
    data = encode(Ask(number, request))
    if len(data) > MAX_BYTES:
        raise WireError(f"frame of {len(data)} bytes exceeds the maximum of {MAX_BYTES}")
    decode_from_server(data[4:])
    return data


def encode_answer(number: int, value: object, error: str) -> bytes:
    """Encode an answer. One that is too long is replaced by an error."""
    try:
        raw = _encoder.encode(value)
    except UnicodeEncodeError:
        raw = _encoder.encode(encodable(msgspec.to_builtins(value)))
    if len(raw) > MAX_BYTES // 2:
        raw, error = b"null", f"the answer is too large ({len(raw)} bytes); request less"
    return encode(Answer(number, msgspec.Raw(raw), error))


def decode_from_agent(body: bytes) -> FromAgent:
    try:
        return _from_agent.decode(body)
    except DECODE_ERRORS as error:
        raise WireError(f"not a valid frame: {error}") from error


def decode_from_server(body: bytes) -> FromServer:
    try:
        return _from_server.decode(body)
    except DECODE_ERRORS as error:
        raise WireError(f"not a valid frame: {error}") from error


class FrameReader:
    """Splits a byte stream into frames."""

    def __init__(self, max_bytes: int = MAX_UNAUTHENTICATED_BYTES) -> None:
        self.max_bytes = max_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        buffer = self._buffer
        buffer += data
        bodies: list[bytes] = []
        start = 0
        while len(buffer) - start >= 4:
            size = int.from_bytes(buffer[start : start + 4], "big")
            if size > self.max_bytes:
                raise WireError(f"frame of {size} bytes exceeds the maximum of {self.max_bytes}")
            end = start + 4 + size
            if len(buffer) < end:
                break
            bodies.append(bytes(buffer[start + 4 : end]))
            start = end
        if start:
            del buffer[:start]
        return bodies


def prove(secret: bytes, role: str, hello: Hello, server_nonce: bytes) -> bytes:
    """Return the proof that ``role`` ("agent", "operator" or "coordinator") has the secret, for this connection."""
    import hmac

    parts = (role.encode(), hello.run_id.encode(), hello.node_id.encode(), hello.nonce, server_nonce)
    text = b"tenax rendezvous 2" + b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return hmac.digest(secret, text, "sha256")


def is_same(one: bytes, other: bytes) -> bool:
    import hmac

    return hmac.compare_digest(one, other)
