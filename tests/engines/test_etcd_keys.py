"""Keys in etcd: no run reads or writes another's; values read from etcd are bounded."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenax._core.authority import AuthorityTerms
from tenax._core.coordinator import CoordinatorMachine, Opened, RunSettings
from tenax._core.etcd.errors import EtcdRejected
from tenax._core.etcd.operations import (
    Header,
    KeyValue,
    PutAnswer,
    RangeAnswer,
    TransactionAnswer,
    key_part,
    run_prefix,
)
from tenax._core.leadership.keys import (
    MAX_VALUE_BYTES,
    Keys,
    Leader,
    LeaderAddress,
    LeaderAndRecord,
    Written,
    read_leader,
)
from tenax._core.lease import LeaseTerms
from tenax._core.record import RecordedMember, RunRecord
from tenax._engines.etcd.managed import member_key

NASTY = (
    "",
    "/",
    "..",
    ".",
    "%",
    "%2F",
    "%25",
    "job",
    "job/",
    "job/2",
    "job2",
    "../job",
    "nodes",
    "leader",
    "\0",
    "ü",
    "\ud800",
)
run_ids = st.one_of(st.sampled_from(NASTY), st.text(max_size=20), st.lists(st.sampled_from(NASTY)).map("/".join))
names = run_ids


def keys_of(run_id: str, name: str) -> list[bytes]:
    keys = Keys(run_id)
    return [keys.leader, keys.record, keys.nodes, keys.node(name), member_key(run_id, name)]


@given(run_ids, run_ids, names)
def test_the_key_ranges_of_two_runs_are_disjoint(one: str, other: str, name: str) -> None:
    """All keys of a run start with its prefix, and no prefix starts with another, so a range or permission for one run
    never covers another."""
    assert all(key.startswith(run_prefix(one)) for key in keys_of(one, name))
    if one != other:
        assert not run_prefix(one).startswith(run_prefix(other))
        assert not any(key.startswith(run_prefix(other)) for key in keys_of(one, name))


@given(run_ids, names, names)
def test_different_names_have_different_keys(run_id: str, one: str, other: str) -> None:
    """No node or member overwrites another's key, nor the leader or the record."""
    if one != other:
        assert key_part(one) != key_part(other)
        assert member_key(run_id, one) != member_key(run_id, other)
        assert Keys(run_id).node(one) != Keys(run_id).node(other)
    assert b"/" not in key_part(one)
    assert len({Keys(run_id).leader, Keys(run_id).record, Keys(run_id).node(one), member_key(run_id, other)}) == 4


def test_usual_run_ids_are_readable() -> None:
    """``etcdctl get --prefix /tenax/job17/`` shows a run."""
    assert Keys("job17").leader == b"/tenax/job17/leader"
    assert member_key("job17", "n0:2379") == b"/tenax/job17/members/n0:2379"


# --- values -----------------------------------------------------------------------------------------------------------

ADDRESS = LeaderAddress("node", "host", "10.0.0.1", 4000, "machine")
LEADER: dict[str, Any] = msgspec.to_builtins(Leader(ADDRESS, b"secret", b"digest"))
WRITTEN: dict[str, Any] = msgspec.to_builtins(
    Written(RunRecord(2, (RecordedMember("a", 0, "host0"),), 1, world_size=4), ADDRESS)
)


def keys_with(record: bytes) -> LeaderAndRecord:
    none = RangeAnswer(Header(1))
    answers = (none, RangeAnswer(Header(1), (KeyValue(b"/tenax/run/record", record),)), none)
    return LeaderAndRecord(TransactionAnswer(Header(1), True, answers))


def changed(value: dict[str, Any], path: str, new: object) -> bytes:
    """Return the JSON of this value with one field replaced."""
    copy: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(value))
    inner: Any = copy
    *parents, last = path.split(".")
    for name in parents:
        inner = inner[int(name)] if isinstance(inner, list) else inner.setdefault(name, {})
    inner[last] = new
    return msgspec.json.encode(copy)


@pytest.mark.parametrize(
    ("path", "new"),
    [
        ("address.port", 0),
        ("address.port", 65536),
        ("address.port", -1),
        ("address.port", 10**30),
        ("address.host", "h" * 1000),
        ("address.addr", "a" * 1000),
        ("address.host", "host\ntenax: the run succeeded"),
        ("address.addr", "\x1b[2J"),
        ("address.node_id", 5),
        ("address", None),
        ("secret", "A" * 1000),
        ("secret", 5),
        ("certificate", "AAAA" * 100),
    ],
)
def test_a_leader_out_of_bounds_is_rejected_with_its_key(path: str, new: object) -> None:
    """The message names the key and the remedy, and does not contain the secret."""
    read_leader(KeyValue(b"/tenax/run/leader", msgspec.json.encode(LEADER)))
    with pytest.raises(EtcdRejected, match="cannot read the key '/tenax/run/leader' in etcd") as error:
        read_leader(KeyValue(b"/tenax/run/leader", changed(LEADER, path, new)))
    assert LEADER["secret"] not in error.value.message


@pytest.mark.parametrize(
    ("path", "new"),
    [
        ("record.generation", -1),
        ("record.settled", 3),
        ("record.members", [{"node_id": "a", "rank": 0, "label": "x"}] * 2),
        ("by.port", 0),
        ("before", [{"node_id": "a"}]),
        ("longest", {"lease": {"beat_s": 1.0, "lease_s": -6.0}}),
        ("longest", {"lease": {"beat_s": 0.0, "lease_s": 6.0}}),
        ("longest", {"outage_s": 1e300}),
        ("fit", "f" * 1000),
    ],
)
def test_a_record_out_of_bounds_is_rejected(path: str, new: object) -> None:
    """Values that no coordinator writes. (Single values of a record: ``test_bounds``.)"""
    assert keys_with(msgspec.json.encode(WRITTEN)).written is not None
    with pytest.raises(EtcdRejected, match="cannot read the key '/tenax/run/record' in etcd"):
        _ = keys_with(changed(WRITTEN, path, new)).written


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"null",
        b"[]",
        b"\xff\xfe",
        b'{"address":',
        b'{"extra":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"address":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001,
        b'{"extra":"' + b"x" * MAX_VALUE_BYTES + b'"}',
        b'{"record":{"generation":' + b"9" * 5000 + b"}}",
    ],
    ids=[
        "empty",
        "null",
        "list",
        "not UTF-8",
        "truncated",
        "nested lists",
        "nested objects",
        "too large",
        "long number",
    ],
)
def test_corrupt_values_are_rejected(value: bytes) -> None:
    """With an ``EtcdRejected``, never another exception."""
    with pytest.raises(EtcdRejected):
        read_leader(KeyValue(b"/tenax/run/leader", value))
    with pytest.raises(EtcdRejected):
        _ = keys_with(value).written


@given(st.binary(max_size=300))
def test_any_bytes_are_a_valid_value_or_are_rejected(value: bytes) -> None:
    for read in (lambda: read_leader(KeyValue(b"key", value)), lambda: keys_with(value).written):
        with contextlib.suppress(EtcdRejected):
            read()


@pytest.mark.parametrize(
    "answers",
    [
        (),
        (RangeAnswer(Header(1)),),
        (RangeAnswer(Header(1)),) * 2 + (PutAnswer(Header(1)),),
        (RangeAnswer(Header(1)),) * 4,
    ],
)
def test_an_answer_to_another_operation_is_rejected(answers: tuple[Any, ...]) -> None:
    """A read of three keys has three answers."""
    with pytest.raises(EtcdRejected, match="etcd sent an unexpected answer to a read of three keys"):
        LeaderAndRecord(TransactionAnswer(Header(1), True, answers))


def test_terms_within_the_settings_bounds_can_be_written() -> None:
    for beat_s, lease_s, outage_s in ((0.001, 0.002, 0.0), (1.0, 6.0, 60.0), (1e4, 1e8, 1e8)):
        Written(RunRecord(), ADDRESS, longest=AuthorityTerms(LeaseTerms(beat_s, lease_s), outage_s))


counts, ranks = st.integers(0, 1 << 31), st.integers(0, 1000)
members = st.lists(
    st.builds(RecordedMember, st.text("abc", min_size=1, max_size=5), ranks, st.text("abc", max_size=5)),
    max_size=4,
    unique_by=lambda m: m.node_id,
)


@given(generation=counts, settled=counts, members=members, longest_s=st.floats(0, 1e10), restarts=counts)
def test_a_coordinator_starts_from_any_valid_record(
    generation: int, settled: int, members: list[RecordedMember], longest_s: float, restarts: int
) -> None:
    """Also from an unusual one that is within the bounds."""
    record = RunRecord(
        max(generation, settled), tuple(members), min(settled, generation), longest_s=longest_s, restarts_used=restarts
    )
    found = msgspec.json.decode(msgspec.json.encode(record), type=RunRecord)
    machine = CoordinatorMachine(RunSettings("run", 2, 3, max_restarts=3, join_timeout_s=600.0))
    machine.step(
        Opened(6.0, generation=found.generation, restarts_used=restarts, record=found, return_s=9.0, alone_s=66.0),
        0.0,
    )
