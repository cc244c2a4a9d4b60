"""The wire protocol: any bytes are either valid frames or a ``WireError``; a proof is valid for one connection."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tenax._core.events import FromCoordinator, GenerationEnded, JoinRefused, LeaveNoticed, RunEnded, Waiting
from tenax._core.link import wire
from tenax._core.link.wire import FrameReader, Hello, WireError, prove
from tenax._core.messages import FromNode, NodeInfo, NodeJoined, NodeReady, NodeStopped
from tenax._core.model import Evidence, Failure, Outcome, Stopped, Verdict, truncate_failures

# A slow machine is not a failure.
SLOW_OK = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

# --- values -----------------------------------------------------------------------------------------------------------

LARGEST = 1 << 53
FINITE = st.floats(-LARGEST, LARGEST)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
LINE = st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"]), min_size=1, max_size=20)
ANSWER = st.sampled_from([b"null", b'"done"', b'{"nodes":[1,2]}']).map(msgspec.Raw)


def any_of(kind: Any) -> st.SearchStrategy[Any]:
    """Generate values of a type within the bounds of the wire. New fields and bounds are included automatically."""
    return _values(msgspec.inspect.type_info(kind))


def _values(info: Any) -> st.SearchStrategy[Any]:
    of = msgspec.inspect
    match info:
        case of.IntType():
            return st.integers(_or(info.ge, -LARGEST), _or(info.le, _or(info.lt, LARGEST + 1) - 1))
        case of.FloatType():
            return st.floats(_or(info.ge, -LARGEST), _or(info.le, LARGEST))
        case of.StrType():
            return LINE if info.pattern else TEXT
        case of.VarTupleType():
            return st.lists(_values(info.item_type), max_size=3).map(tuple)
        case of.DictType():
            return st.dictionaries(_values(info.key_type), _values(info.value_type), max_size=3)
        case of.UnionType():
            return st.one_of(*map(_values, info.types))
        case of.EnumType():
            return st.sampled_from(list(info.cls))
        case of.StructType():
            return st.builds(info.cls, **{field.name: _values(field.type) for field in info.fields})
        case of.RawType():
            return ANSWER
        case of.BytesType():
            return st.binary(max_size=40)
        case of.BoolType():
            return st.booleans()
        case of.NoneType():
            return st.none()
    raise TypeError(f"no values of {info}")


def _or(bound: Any, otherwise: Any) -> Any:
    return otherwise if bound is None else bound


FROM_AGENT = list(wire.FromAgent.__args__)
FROM_SERVER = list(wire.FromServer.__args__)
BODIES = st.lists(st.binary(max_size=300), max_size=12)


def framed(bodies: list[bytes]) -> bytes:
    return b"".join(len(body).to_bytes(4, "big") + body for body in bodies)


def body_of(frame: Any) -> bytes:
    (body,) = FrameReader(wire.MAX_BYTES).feed(wire.encode(frame))
    return body


# --- frames -----------------------------------------------------------------------------------------------------------


@SLOW_OK
@given(BODIES, st.data())
def test_any_segmentation_gives_the_same_frames(bodies: list[bytes], data: st.DataObject) -> None:
    stream = framed(bodies)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=20)))
    reader = FrameReader()
    found: list[bytes] = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += reader.feed(stream[start:end])
    assert found == bodies


@SLOW_OK
@given(BODIES)
def test_byte_by_byte_gives_the_same_frames(bodies: list[bytes]) -> None:
    reader = FrameReader()
    assert [body for byte in framed(bodies) for body in reader.feed(bytes([byte]))] == bodies


@SLOW_OK
@given(st.binary(max_size=200), st.integers(1, 50))
def test_a_truncated_frame_is_not_returned(body: bytes, missing: int) -> None:
    stream = framed([body])
    assert FrameReader().feed(stream[: max(0, len(stream) - missing)]) == []


@pytest.mark.parametrize("size", [wire.MAX_UNAUTHENTICATED_BYTES + 1, 1 << 20, 1 << 31, (1 << 32) - 1])
def test_a_frame_that_is_too_long_is_rejected_by_its_length(size: int) -> None:
    with pytest.raises(WireError, match=str(size)):
        FrameReader().feed(size.to_bytes(4, "big"))


def test_a_frame_of_the_maximum_length_is_accepted() -> None:
    for max_bytes in (wire.MAX_UNAUTHENTICATED_BYTES, wire.MAX_BYTES):
        assert FrameReader(max_bytes).feed(framed([b"x" * max_bytes])) == [b"x" * max_bytes]


@SLOW_OK
@given(st.lists(st.binary(min_size=1, max_size=4096), min_size=1, max_size=40))
def test_random_bytes_raise_wire_error_or_wait_in_a_bounded_buffer(chunks: list[bytes]) -> None:
    """The buffer never exceeds one frame of the maximum size."""
    reader = FrameReader()
    try:
        for chunk in chunks:
            for body in reader.feed(chunk):
                assert len(body) <= wire.MAX_UNAUTHENTICATED_BYTES
    except WireError:
        return
    assert len(reader._buffer) <= 4 + wire.MAX_UNAUTHENTICATED_BYTES


def test_a_reader_of_a_long_stream_needs_no_more_memory_than_one_frame() -> None:
    reader = FrameReader(wire.MAX_BYTES)
    frame = framed([b"x" * 1000])
    tracemalloc.start()
    try:
        for _ in range(20_000):  # 20 MB, split inside frames
            assert len(reader.feed(frame[:700])) + len(reader.feed(frame[700:])) == 1
        assert tracemalloc.get_traced_memory()[1] < 2_000_000  # other threads of the test process allocate too
    finally:
        tracemalloc.stop()


# --- values on the wire -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FROM_AGENT, ids=lambda kind: kind.__name__)
def test_every_frame_of_an_agent_round_trips(kind: type[Any]) -> None:
    @settings(SLOW_OK, max_examples=25)
    @given(any_of(kind))
    def check(frame: Any) -> None:
        assert wire.decode_from_agent(body_of(frame)) == frame

    check()


@pytest.mark.parametrize("kind", FROM_SERVER, ids=lambda kind: kind.__name__)
def test_every_frame_of_the_server_round_trips(kind: type[Any]) -> None:
    @settings(SLOW_OK, max_examples=25)
    @given(any_of(kind))
    def check(frame: Any) -> None:
        assert wire.decode_from_server(body_of(frame)) == frame

    check()


@pytest.mark.parametrize("kind", FromNode.__args__, ids=lambda kind: kind.__name__)
def test_every_message_of_a_node_round_trips(kind: type[Any]) -> None:
    @settings(SLOW_OK, max_examples=25)
    @given(any_of(kind))
    def check(message: Any) -> None:
        assert wire.decode_from_agent(body_of(wire.Message(message))) == wire.Message(message)

    check()


@pytest.mark.parametrize("kind", FromCoordinator.__args__, ids=lambda kind: kind.__name__)
def test_every_event_of_the_coordinator_round_trips(kind: type[Any]) -> None:
    @settings(SLOW_OK, max_examples=25)
    @given(any_of(kind))
    def check(event: Any) -> None:
        assert wire.decode_from_server(body_of(wire.Event(event))) == wire.Event(event)

    check()


def test_text_that_is_not_valid_unicode_is_escaped() -> None:
    """A worker's output may be any bytes, and must not prevent the report."""
    sent = wire.Event(JoinRefused("half a character: \udc80"))
    assert wire.decode_from_server(body_of(sent)) == wire.Event(JoinRefused("half a character: \\udc80"))


HELLO = Hello(wire.VERSION, "run", "node", b"n" * wire.NONCE_BYTES)
JOINED = wire.Message(NodeJoined(NodeInfo("node", "host")))


@SLOW_OK
@given(st.binary(max_size=400))
def test_random_bodies_raise_wire_error_only(body: bytes) -> None:
    for decode in (wire.decode_from_agent, wire.decode_from_server):
        with pytest.raises(WireError):
            decode(body)


@SLOW_OK
@given(st.data())
def test_frames_with_changed_bytes_raise_wire_error_or_decode(data: st.DataObject) -> None:
    body = bytearray(body_of(data.draw(st.sampled_from([HELLO, JOINED, wire.Beat(3), wire.Cancel("why")]))))
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        frame = wire.decode_from_agent(bytes(body))
    except WireError:
        return
    assert isinstance(frame, wire.FromAgent)
    assert wire.decode_from_agent(body_of(frame)) == frame


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | FINITE | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)


@SLOW_OK
@given(st.sampled_from([kind.__name__ for kind in FROM_AGENT + FROM_SERVER]), st.dictionaries(TEXT, JSON, max_size=4))
def test_wrong_fields_and_wrong_types_raise_wire_error_only(name: str, fields: dict[str, Any]) -> None:
    body = msgspec.json.encode({**fields, "frame": name})
    for decode in (wire.decode_from_agent, wire.decode_from_server):
        with pytest.raises(WireError):
            decode(body)


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 4000,
        b'{"frame":"Beat","number":1,"x":' + b"[" * 1900 + b"]" * 1900 + b"}",
        b'{"frame":"Beat","number":1,"x":' * 100,
        b'{"frame":"Beat","number":' + b"9" * 4000 + b"}",
        b'{"frame":"Beat","number":9007199254740993}',
        b'{"frame":"Word","message":{"message":"NodeJoined","node":{"node_id":"a","host":"b","slots":1e17}}}',
        b'{"frame":"Word","message":{"message":"NodeStopped","generation":1,"sent_at":-1e308}}',
        b'{"frame":"Beat","number":1e400}',
        b'{"frame":"Beat","number":-1e-400}',
        b'{"frame":"Beat","number":true}',
        b'{"frame":"Beat","number":"1"}',
        b'{"frame":"Beat"}',
        b'{"frame":["Beat"],"number":1}',
        b'{"frame":"Cancel","why":"\xff\xfe"}',
        b'{"frame":"Cancel","why":"\\ud800"}',
        b'{"frame":"Proof","proof":"!not base64!"}',
        b'{"frame":"Word","message":{"message":"NodeStopped","generation":1,"sent_at":1e999}}',
        b'{"frame":"Word","message":{"message":"NodeStopped","generation":1,"sent_at":NaN}}',
        b'{"frame":"Word","message":{"message":"RunEnded"}}',
        b'{"frame":"Event","event":{"event":"JoinRefused","reason":"not for a server"}}',
        b"null",
        b"",
        b"\0" * 100,
    ],
    ids=lambda body: repr(body[:40]),
)
def test_deep_huge_and_wrong_json_raises_wire_error_only(body: bytes) -> None:
    with pytest.raises(WireError):
        wire.decode_from_agent(body)


def test_unknown_fields_of_a_newer_minor_version_are_ignored() -> None:
    """At every depth: in the frame, in the message, in the node."""
    newer = msgspec.to_builtins(JOINED)
    newer["priority"] = 3
    newer["message"]["zone"] = {"rack": [1, 2]}
    newer["message"]["node"]["gpus"] = ["H200"]
    assert wire.decode_from_agent(msgspec.json.encode(newer)) == JOINED


def test_an_unknown_kind_of_frame_or_message_is_rejected() -> None:
    for body in (b'{"frame":"Vote","number":1}', b'{"frame":"Word","message":{"message":"NodeUnknown"}}'):
        with pytest.raises(WireError):
            wire.decode_from_agent(body)


def test_the_longest_verdict_of_a_large_run_fits_into_a_frame() -> None:
    """Thousands of failed workers with long evidence, and every earlier cause."""
    evidence = Evidence(
        "E" * 500,
        "m" * 500,
        "\x01" * 32_000,
        ("\x01" * 400,) * 30,
        "o" * 300,
        "p" * 4096,
        "q" * 4096,
        stacks="\x01" * 32_000,
    )
    failures = [Failure(1, 0, rank, 4_000_000, -11, 1.5, "r" * 5000, evidence, True, "h" * 64) for rank in range(5000)]
    verdict = Verdict(
        Outcome.FAILED,
        "w" * 1000,
        failures=truncate_failures(failures),
        stopped=tuple(
            Stopped(7, rank, 4_000_000, -15, *(("\x01" * 6007, "h" * 64) if rank < 32 else ()))
            for rank in range(10_000)
        ),
        earlier=tuple(failure.brief() for failure in failures[:100]),
    )
    assert len(wire.encode(wire.Event(RunEnded(verdict, 1.0)))) < wire.MAX_BYTES


def test_the_longest_message_of_a_large_node_fits_into_a_frame() -> None:
    evidence = Evidence(
        "E" * 500,
        "m" * 500,
        "\x01" * 32_000,
        ("\x01" * 400,) * 30,
        "o" * 300,
        "p" * 4096,
        "q" * 4096,
        stacks="\x01" * 32_000,
    )
    failures = [Failure(1, rank, rank, 4_000_000, -11, 1.5, "r" * 5000, evidence) for rank in range(512)]
    stopped = tuple(Stopped(7, rank, 1, -15, "\x01" * 6007 if rank < 16 else "") for rank in range(512))
    message = NodeStopped(1, 1.0, truncate_failures(failures), stopped)
    assert len(wire.encode(wire.Message(message))) < wire.MAX_BYTES


def test_every_hello_fits_the_limit_of_unauthenticated_peers() -> None:
    hello = Hello(wire.VERSION, "r" * 1000, "n" * 64, b"n" * wire.NONCE_BYTES)
    assert len(wire.encode(hello)) < wire.MAX_UNAUTHENTICATED_BYTES


# --- proofs -----------------------------------------------------------------------------------------------------------


def test_a_proof_is_bound_to_role_run_node_connection_and_secret() -> None:
    """So it cannot be replayed, reflected, or used for another."""
    nonce = b"s" * wire.NONCE_BYTES

    def changed(**fields: Any) -> Hello:
        return msgspec.structs.replace(HELLO, **fields)

    proofs = [
        prove(b"secret", "agent", HELLO, nonce),
        prove(b"secret", "coordinator", HELLO, nonce),
        prove(b"secret", "agent", changed(run_id="other"), nonce),
        prove(b"secret", "agent", changed(node_id="other"), nonce),
        prove(b"secret", "agent", changed(nonce=b"m" * wire.NONCE_BYTES), nonce),
        prove(b"secret", "agent", HELLO, b"t" * wire.NONCE_BYTES),
        prove(b"other secret", "agent", HELLO, nonce),
        prove(b"", "agent", HELLO, nonce),
    ]
    assert len(set(proofs)) == len(proofs)
    assert proofs[0] == prove(b"secret", "agent", HELLO, nonce)


@SLOW_OK
@given(TEXT, TEXT, TEXT, TEXT)
def test_shifting_text_between_the_parts_changes_the_proof(run: str, node: str, run2: str, node2: str) -> None:
    """Run "a" with node "bc" is not run "ab" with node "c"."""
    one, other = (Hello(1, run_id, node_id, b"") for run_id, node_id in ((run, node), (run2, node2)))
    same = prove(b"s", "agent", one, b"") == prove(b"s", "agent", other, b"")
    assert same == ((run, node) == (run2, node2))


def test_reasons_are_readable_in_the_frame() -> None:
    """A network capture can be read."""
    for event in (Waiting("why"), GenerationEnded(3, "why"), LeaveNoticed(3, "host", "why", 1.5)):
        assert b'"why":"why"' in wire.encode(wire.Event(event))
    assert NodeReady(0) == msgspec.json.decode(msgspec.json.encode(NodeReady(0)), type=NodeReady)
