"""The gateway's JSON: requests, answers and errors, as etcd 3.4 and 3.5 encode them."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tenax._core.etcd.errors import EtcdCompacted, EtcdFull, EtcdRefused, EtcdRejected, EtcdUnavailable
from tenax._core.etcd.operations import (
    AddMember,
    Authenticate,
    AuthenticateAnswer,
    Change,
    Compare,
    Delete,
    DeleteAnswer,
    GrantLease,
    Header,
    KeepAlive,
    KeyValue,
    LeaseAnswer,
    Members,
    Put,
    PutAnswer,
    Range,
    RangeAnswer,
    RevokeLease,
    SetUpUsers,
    Status,
    Transaction,
    TransactionAnswer,
    UsersAnswer,
)
from tenax._io.etcd import gateway
from tenax._io.etcd.gateway import Fault

CALM = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
numbers = st.integers(0, 2**63 - 1)
key_values = st.builds(KeyValue, st.binary(min_size=1), st.binary(), numbers, numbers, numbers, numbers)


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def without_zeros(value: dict[str, Any]) -> dict[str, Any]:
    return {key: each for key, each in value.items() if each not in ("", "0", 0, False, [], None)}


def as_gateway_json(kv: KeyValue) -> dict[str, Any]:
    """Encode as the gateway does: base64, numbers as strings, zeros omitted."""
    return without_zeros(
        {
            "key": b64(kv.key),
            "value": b64(kv.value),
            "create_revision": str(kv.create_revision),
            "mod_revision": str(kv.mod_revision),
            "version": str(kv.version),
            "lease": str(kv.lease),
        }
    )


def sent(operation: Any) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(gateway.encode(operation)[1])
    return body


@CALM
@given(st.lists(key_values), numbers, numbers)
def test_ranges_are_decoded_as_written(kvs: list[KeyValue], revision: int, count: int) -> None:
    header = without_zeros({"revision": str(revision)})
    body = without_zeros({"header": header or None, "kvs": [as_gateway_json(kv) for kv in kvs], "count": str(count)})
    answer = gateway.decode(Range(b"k"), 200, json.dumps(body).encode())
    assert answer == RangeAnswer(Header(revision), tuple(kvs), count)


@CALM
@given(st.binary(), st.binary(), numbers)
def test_a_put_encodes_any_bytes(key: bytes, value: bytes, lease: int) -> None:
    body = sent(Put(key, value, lease))
    assert base64.b64decode(body["key"]) == key
    assert base64.b64decode(body["value"]) == value
    assert int(body.get("lease", 0)) == lease


@CALM
@given(st.binary(min_size=1), st.sampled_from(["create", "mod", "version", "lease"]), numbers)
def test_comparisons_with_numbers_are_encoded(key: bytes, target: Any, value: int) -> None:
    (compare,) = sent(Transaction((Compare(key, target, value, "<"),)))["compare"]
    field = {"create": "create_revision", "mod": "mod_revision"}.get(target, target)
    assert compare == {"key": b64(key), "target": target.upper(), "result": "LESS", field: value}


def test_a_full_transaction_is_encoded() -> None:
    operation = Transaction(
        (Compare(b"a", "value", b"v"), Compare(b"a", "mod", 3, "!=", b"b")),
        (Put(b"p", b"q"), Delete(b"d", b"e"), Range(b"r", b"s", 5, keys_only=True)),
        (Range(b"c", count_only=True),),
    )
    assert gateway.encode(operation)[0] == "/v3/kv/txn"
    assert sent(operation) == {
        "compare": [
            {"key": b64(b"a"), "target": "VALUE", "result": "EQUAL", "value": b64(b"v")},
            {"key": b64(b"a"), "range_end": b64(b"b"), "target": "MOD", "result": "NOT_EQUAL", "mod_revision": 3},
        ],
        "success": [
            {"request_put": {"key": b64(b"p"), "value": b64(b"q")}},
            {"request_delete_range": {"key": b64(b"d"), "range_end": b64(b"e")}},
            {"request_range": {"key": b64(b"r"), "range_end": b64(b"s"), "limit": 5, "keys_only": True}},
        ],
        "failure": [{"request_range": {"key": b64(b"c"), "count_only": True}}],
    }


def test_the_answer_of_a_transaction_is_decoded() -> None:
    body = {
        "header": {"revision": "9"},
        "succeeded": True,
        "responses": [
            {"response_put": {"header": {"revision": "9"}}},
            {"response_delete_range": {"header": {"revision": "9"}, "deleted": "2"}},
            {"response_range": {"header": {"revision": "9"}, "kvs": [{"key": b64(b"k")}], "count": "1"}},
        ],
    }
    answer = gateway.decode(Transaction(), 200, json.dumps(body).encode())
    parts = (PutAnswer(Header(9)), DeleteAnswer(Header(9), 2), RangeAnswer(Header(9), (KeyValue(b"k"),), 1))
    assert answer == TransactionAnswer(Header(9), True, parts)
    assert gateway.decode(Transaction(), 200, b'{"header":{"revision":"9"}}') == TransactionAnswer(Header(9), False)


def test_a_comparison_of_the_wrong_type_is_rejected_before_sending() -> None:
    with pytest.raises(EtcdRejected, match="cannot compare the version of a key with a value of type bytes"):
        gateway.encode(Transaction((Compare(b"a", "version", b"1"),)))


def test_leases_and_tokens_are_encoded_and_decoded() -> None:
    assert gateway.encode(GrantLease(5, 2**63 - 1)) == (
        "/v3/lease/grant",
        b'{"TTL":5,"ID":9223372036854775807}',
    )
    alive = b'{"result":{"header":{"revision":"4"},"ID":"77","TTL":"5"}}\n'
    assert gateway.decode(KeepAlive(77), 200, alive) == LeaseAnswer(Header(4), 77, 5)
    dead = b'{"result":{"header":{"revision":"4"},"ID":"77"}}\n'
    assert gateway.decode(KeepAlive(77), 200, dead) == LeaseAnswer(Header(4), 77, 0)
    token = gateway.decode(Authenticate("me", "x"), 200, b'{"token":"abc.7"}')
    assert token == AuthenticateAnswer("abc.7")


def test_members_and_status_are_decoded() -> None:
    body = b'{"members":[{"ID":"5","name":"m","peerURLs":["http://p:2380"],"clientURLs":["http://c:2379"]},{"ID":"6"}]}'
    answer = gateway.decode(Members(), 200, body)
    assert [(each.id, each.name, each.peer_urls) for each in answer.members] == [  # type: ignore[union-attr]
        (5, "m", ("http://p:2380",)),
        (6, "", ()),
    ]
    assert sent(AddMember(("http://p:2380",), True)) == {"peerURLs": ["http://p:2380"], "isLearner": True}
    status: Any = gateway.decode(
        Status(),
        200,
        b'{"header":{"member_id":"18446744073709551615"},"version":"3.4.23","dbSize":"9","errors":["alarm:NOSPACE"]}',
    )
    assert (status.header.member_id, status.version, status.leader) == (2**64 - 1, "3.4.23", 0)
    assert (status.db_size, status.errors) == (9, ("alarm:NOSPACE",))


# --- errors: the same in every version --------------------------------------------------------------------------------


def shapes(code: int, text: str) -> list[bytes]:
    return [
        json.dumps({"error": text, "message": text, "code": code}).encode(),  # 3.4
        json.dumps({"code": code, "message": text}).encode(),  # 3.5
        json.dumps({"error": {"grpc_code": code, "http_code": 503, "message": text, "http_status": "x"}}).encode(),
        json.dumps({"error": {"code": code, "message": text}}).encode(),
        json.dumps({"error": text, "code": code}).encode(),
    ]


MEANINGS = [
    (14, "etcdserver: no leader", "again", EtcdUnavailable),
    (14, "etcdserver: request timed out", "again", EtcdUnavailable),
    (14, "etcdserver: request timed out, possibly due to previous leader failure", "again", EtcdUnavailable),
    (14, "etcdserver: leader changed", "again", EtcdUnavailable),
    (4, "context deadline exceeded", "again", EtcdUnavailable),
    (8, "etcdserver: too many requests", "again", EtcdUnavailable),
    (2, "raft proposal dropped", "again", EtcdUnavailable),
    (9, "etcdserver: re-configuration failed due to not enough started members", "again", EtcdUnavailable),
    (16, "etcdserver: invalid auth token", "token", EtcdRefused),
    (3, "etcdserver: revision of auth store is old", "token", EtcdRefused),
    (3, "etcdserver: user name is empty", "token", EtcdRefused),
    (3, "etcdserver: authentication failed, invalid user ID or password", "refused", EtcdRefused),
    (7, "etcdserver: permission denied", "refused", EtcdRefused),
    (7, "anything", "refused", EtcdRefused),
    (8, "etcdserver: mvcc: database space exceeded", "full", EtcdFull),
    (11, "etcdserver: mvcc: required revision has been compacted", "compacted", EtcdCompacted),
    (11, "etcdserver: mvcc: required revision is a future revision", "rejected", EtcdRejected),
    (3, "etcdserver: request is too large", "rejected", EtcdRejected),
    (8, "grpc: received message larger than max (3 vs. 2)", "rejected", EtcdRejected),
    (9, "etcdserver: authentication is not enabled", "rejected", EtcdRejected),
    (5, "etcdserver: member not found", "rejected", EtcdRejected),
    (12, "unknown service", "rejected", EtcdRejected),
]


@pytest.mark.parametrize(("code", "text", "kind", "error"), MEANINGS)
def test_errors_mean_the_same_in_every_version(code: int, text: str, kind: str, error: type[Exception]) -> None:
    faults = [gateway.decode(Put(b"k", b"v"), 503, body) for body in shapes(code, text)]
    for fault in faults:
        assert isinstance(fault, Fault)
        assert fault.kind == kind
        assert isinstance(fault.error("e1:2379"), error)
        assert "etcdserver:" not in fault.message
    assert len(set(map(repr, faults))) == 1


def test_only_errors_of_operations_that_were_not_executed_are_certain() -> None:
    assert gateway.judge(14, "etcdserver: no leader").is_certain
    assert gateway.judge(8, "etcdserver: too many requests").is_certain
    assert not gateway.judge(14, "etcdserver: request timed out").is_certain
    assert not gateway.judge(2, "whatever").is_certain


def test_errors_within_a_keep_alive_are_decoded() -> None:
    for body in shapes(14, "etcdserver: no leader")[2:4]:
        fault = gateway.decode(KeepAlive(5), 200, body + b"\n")
        assert isinstance(fault, Fault)
        assert (fault.kind, fault.message) == ("again", "no leader")


def test_repeating_an_executed_operation_is_a_success() -> None:
    exists, gone = shapes(9, "etcdserver: lease already exists"), shapes(5, "etcdserver: requested lease not found")
    for body in exists:
        assert gateway.decode(GrantLease(5, 77), 400, body) == LeaseAnswer(Header(), 77, 5)
        assert isinstance(gateway.decode(GrantLease(5), 400, body), Fault)  # etcd chose the id, so it is another lease
    for body in gone:
        assert gateway.decode(RevokeLease(77), 404, body) == LeaseAnswer(Header(), 77)
        assert isinstance(gateway.decode(Put(b"k", b"v", 77), 404, body), Fault)


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (404, b"Not Found\n", "rejected"),
        (502, b"<html>Bad Gateway</html>", "again"),
        (503, b"", "again"),
        (401, b"", "token"),
        (403, b"{}", "refused"),
        (413, b"too much", "rejected"),
        (429, b"slow down", "again"),
        (400, b"Client sent an HTTP request to an HTTPS server.\n", "tls"),
    ],
)
def test_errors_of_proxies_and_other_programs_are_classified(status: int, body: bytes, kind: str) -> None:
    assert gateway.decode_fault(status, body).kind == kind


DEEP = 100_000


@pytest.mark.parametrize("within", [b'{"kvs":%b}', b'{"unknown":%b}', b'{"result":%b}', b'{"error":%b}', b"%b"])
@pytest.mark.parametrize("nested", [b"[" * DEEP + b"]" * DEEP, b'{"a":' * DEEP + b"1" + b"}" * DEEP])
def test_deep_nesting_is_an_invalid_response(within: bytes, nested: bytes) -> None:
    """The decoder never raises RecursionError."""
    body = within % nested
    for decode in (lambda: gateway.decode(Range(b"k"), 200, body), lambda: gateway.decode_watch(body)):
        with pytest.raises(gateway.InvalidResponse):
            decode()
    assert gateway.decode_fault(503, body).kind == "again"


@CALM
@given(st.binary(), st.sampled_from([200, 400, 404, 500, 503]))
def test_any_body_is_decoded_or_an_invalid_response(body: bytes, status: int) -> None:
    for operation in (Range(b"k"), KeepAlive(1), Members(), Status()):
        try:
            gateway.decode(operation, status, body)
        except gateway.InvalidResponse:
            assert status == 200


# --- watches ----------------------------------------------------------------------------------------------------------


@CALM
@given(st.lists(st.tuples(st.booleans(), key_values)), numbers)
def test_changes_are_decoded_as_written(changes: list[tuple[bool, KeyValue]], revision: int) -> None:
    events = [{**({} if is_put else {"type": "DELETE"}), "kv": as_gateway_json(kv)} for is_put, kv in changes]
    line = json.dumps({"result": without_zeros({"header": {"revision": str(revision)}, "events": events})}).encode()
    message = gateway.decode_watch(line)
    assert message.changes == tuple(Change("put" if is_put else "delete", kv) for is_put, kv in changes)
    assert message.fault is None


def test_the_start_and_the_end_of_a_watch_are_decoded() -> None:
    assert gateway.decode_watch(b'{"result":{"header":{"revision":"3"},"created":true}}').is_open
    compacted = gateway.decode_watch(b'{"result":{"header":{},"canceled":true,"compact_revision":"8"}}').fault
    assert compacted is not None
    assert (compacted.kind, compacted.compact_revision) == ("compacted", 8)
    error = compacted.error()
    assert isinstance(error, EtcdCompacted)
    assert error.compact_revision == 8
    denied = gateway.decode_watch(
        b'{"result":{"created":true,"canceled":true,'
        b'"cancel_reason":"rpc error: code = PermissionDenied desc = etcdserver: permission denied"}}'
    ).fault
    assert denied is not None
    assert (denied.kind, denied.message) == ("refused", "permission denied")
    for body in shapes(14, "etcdserver: no leader")[2:4]:
        fault = gateway.decode_watch(body).fault
        assert fault is not None
        assert fault.kind == "again"


@pytest.mark.parametrize("status", [200, 500])
def test_deeply_nested_answers_are_rejected_for_every_operation(status: int) -> None:
    """Another program at etcd's address cannot crash a client with its JSON."""
    body = b'{"more":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    for operation in (Range(b"key"), Members(), Status(), KeepAlive(1), Authenticate("user", "password")):
        if status == 200:
            with pytest.raises(gateway.InvalidResponse):
                gateway.decode(operation, status, body)
        else:
            assert isinstance(gateway.decode(operation, status, body), Fault)
    with pytest.raises(gateway.InvalidResponse):
        gateway.decode_watch(body)


def test_setting_up_users_twice_is_a_success() -> None:
    """Several members do it at the same time."""
    for step, text in (("add user", "user name already exists"), ("add role", "role name already exists")):
        body = json.dumps({"code": 9, "message": f"etcdserver: {text}"}).encode()
        assert gateway.decode(SetUpUsers(step), 400, body) == UsersAnswer()  # type: ignore[arg-type]
    listed = gateway.decode(SetUpUsers("list users"), 200, b'{"header":{},"users":["root"]}')
    assert listed == UsersAnswer(("root",))
    assert "a password" not in repr(SetUpUsers("add user", "a password"))
