"""The encoding of etcd's JSON gateway, and the meaning of its errors. Pure.

Keys and values are base64; 64-bit integers are strings; false, zero and empty fields are omitted; the messages of a
stream are lines with ``result`` or ``error``. Error bodies differ between versions: ``{"error","message","code"}`` in
3.4, ``{"code","message"}`` in 3.5; in streams they are objects with ``grpc_code`` or ``code``. The error texts are the
same in all versions and more precise than the codes.
"""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from tenax._core.etcd.errors import EtcdCompacted, EtcdError, EtcdFull, EtcdRefused, EtcdRejected, EtcdUnavailable
from tenax._core.etcd.operations import (
    AddMember,
    AnyAnswer,
    AnyKeyAnswer,
    AnyKeyOperation,
    AnyOperation,
    Authenticate,
    AuthenticateAnswer,
    Change,
    Compact,
    CompactAnswer,
    Compare,
    Delete,
    DeleteAnswer,
    GrantLease,
    KeepAlive,
    KeyValue,
    LeaseAnswer,
    Member,
    Members,
    MembersAnswer,
    Origin,
    PromoteMember,
    Put,
    PutAnswer,
    Range,
    RangeAnswer,
    RemoveMember,
    RevokeLease,
    SetUpUsers,
    Status,
    StatusAnswer,
    Transaction,
    TransactionAnswer,
    UsersAnswer,
)
from tenax._core.model import assert_never
from tenax._core.text import concealed_repr

# --- requests ---------------------------------------------------------------------------------------------------------

WATCH_PATH = "/v3/watch"
ROOT = "root"  # the user and the role that etcd requires before authentication can be enabled
_RESULTS = {"=": "EQUAL", "!=": "NOT_EQUAL", ">": "GREATER", "<": "LESS"}
_TARGETS = {
    "create": "create_revision",
    "mod": "mod_revision",
    "version": "version",
    "value": "value",
    "lease": "lease",
}


def encode(operation: AnyOperation) -> tuple[str, bytes]:
    """Return the path and the body of the request."""
    path, body = _request(operation)
    return path, msgspec.json.encode(body)


def encode_watch(key: bytes, end: bytes, from_revision: int) -> bytes:
    """Return the body of the request that opens a watch."""
    request: dict[str, Any] = {"key": key, "start_revision": str(from_revision), "progress_notify": True}
    if end:
        request["range_end"] = end
    return msgspec.json.encode({"create_request": request})


def _request(operation: AnyOperation) -> tuple[str, dict[str, Any]]:
    match operation:
        case Range():
            return "/v3/kv/range", _key_request(operation)[1]
        case Put():
            return "/v3/kv/put", _key_request(operation)[1]
        case Delete():
            return "/v3/kv/deleterange", _key_request(operation)[1]
        case Transaction():
            return "/v3/kv/txn", {
                "compare": [_comparison(each) for each in operation.compare],
                "success": [dict([_key_request(each)]) for each in operation.then],
                "failure": [dict([_key_request(each)]) for each in operation.otherwise],
            }
        case GrantLease():
            return "/v3/lease/grant", {"TTL": str(operation.ttl_s), "ID": str(operation.id)}
        case KeepAlive():
            return "/v3/lease/keepalive", {"ID": str(operation.id)}
        case RevokeLease():
            return "/v3/lease/revoke", {"ID": str(operation.id)}
        case Compact():
            return "/v3/kv/compaction", {"revision": str(operation.revision)}
        case Status():
            return "/v3/maintenance/status", {}
        case Members():
            return "/v3/cluster/member/list", {"linearizable": True} if operation.is_linearizable else {}
        case AddMember():
            return "/v3/cluster/member/add", {"peerURLs": operation.peer_urls, "isLearner": operation.is_learner}
        case RemoveMember():
            return "/v3/cluster/member/remove", {"ID": str(operation.id)}
        case PromoteMember():
            return "/v3/cluster/member/promote", {"ID": str(operation.id)}
        case Authenticate():
            return "/v3/auth/authenticate", {"name": operation.user, "password": operation.password}
        case SetUpUsers("add user"):
            return "/v3/auth/user/add", {"name": ROOT, "password": operation.password}
        case SetUpUsers("add role"):
            return "/v3/auth/role/add", {"name": ROOT}
        case SetUpUsers("grant role"):
            return "/v3/auth/user/grant", {"user": ROOT, "role": ROOT}
        case SetUpUsers("enable"):
            return "/v3/auth/enable", {}
        case SetUpUsers():
            return "/v3/auth/user/list", {}
        case _:
            return assert_never(operation)


def _key_request(operation: AnyKeyOperation) -> tuple[str, dict[str, Any]]:
    """Return the operation's field name within a transaction, and its fields."""
    request: dict[str, Any] = {"key": operation.key}
    match operation:
        case Range():
            if operation.end:
                request["range_end"] = operation.end
            if operation.limit:
                request["limit"] = str(operation.limit)
            if operation.keys_only:
                request["keys_only"] = True
            if operation.count_only:
                request["count_only"] = True
            return "request_range", request
        case Put():
            request["value"] = operation.value
            if operation.lease:
                request["lease"] = str(operation.lease)
            return "request_put", request
        case Delete():
            if operation.end:
                request["range_end"] = operation.end
            return "request_delete_range", request
        case _:
            return assert_never(operation)


def _comparison(compare: Compare) -> dict[str, Any]:
    value = compare.value
    if isinstance(value, bytes) is not (compare.target == "value"):
        raise EtcdRejected(f"cannot compare the {compare.target} of a key with a value of type {type(value).__name__}")
    return {
        "key": compare.key,
        **({"range_end": compare.end} if compare.end else {}),
        "target": compare.target.upper(),
        "result": _RESULTS[compare.result],
        _TARGETS[compare.target]: value if isinstance(value, bytes) else str(value),
    }


def has_side_effects(operation: AnyOperation) -> bool:
    """Return True if executing the operation without an answer makes a difference."""
    if isinstance(operation, Transaction):
        return not all(isinstance(each, Range) for each in (*operation.then, *operation.otherwise))
    return not isinstance(operation, Range | Status | Members | Authenticate)


# --- answers ----------------------------------------------------------------------------------------------------------


class _Header(msgspec.Struct, frozen=True):
    cluster_id: int = 0
    member_id: int = 0
    revision: int = 0
    raft_term: int = 0


_NO_HEADER = _Header()


class _Answer(msgspec.Struct):
    """The fields of all answers in one type: etcd omits those that an answer does not have."""

    header: _Header = _NO_HEADER
    kvs: tuple[KeyValue, ...] = ()
    count: int = 0
    deleted: int = 0
    succeeded: bool = False
    responses: tuple[_Response, ...] = ()
    lease_id: int = msgspec.field(default=0, name="ID")
    ttl_s: int = msgspec.field(default=0, name="TTL")
    token: str = ""
    users: tuple[str, ...] = ()

    __repr__ = concealed_repr


class _Response(msgspec.Struct):
    """One response within a transaction."""

    response_range: _Answer | None = None
    response_put: _Answer | None = None
    response_delete_range: _Answer | None = None


class _Fault(msgspec.Struct):
    grpc_code: int = 0
    code: int = 0
    message: str = ""
    error: str = ""


class _LeaseLine(msgspec.Struct):
    result: _Answer | None = None
    error: _Fault | None = None


class _Status(msgspec.Struct):
    header: _Header = _NO_HEADER
    version: str = ""
    db_size: int = msgspec.field(default=0, name="dbSize")
    leader: int = 0
    errors: tuple[str, ...] = ()
    is_learner: bool = msgspec.field(default=False, name="isLearner")
    term: int = msgspec.field(default=0, name="raftTerm")


class _Member(msgspec.Struct):
    id: int = msgspec.field(default=0, name="ID")
    name: str = ""
    peer_urls: tuple[str, ...] = msgspec.field(default=(), name="peerURLs")
    client_urls: tuple[str, ...] = msgspec.field(default=(), name="clientURLs")
    is_learner: bool = msgspec.field(default=False, name="isLearner")


class _Members(msgspec.Struct):
    members: tuple[_Member, ...] = ()
    member: _Member | None = None


class _Event(msgspec.Struct):
    kv: KeyValue
    type: str = "PUT"


class _WatchResult(msgspec.Struct):
    header: _Header = _NO_HEADER
    created: bool = False
    canceled: bool = False
    compact_revision: int = 0
    cancel_reason: str = ""
    events: tuple[_Event, ...] = ()


class _WatchLine(msgspec.Struct):
    result: _WatchResult | None = None
    error: _Fault | None = None


class _UnaryFault(msgspec.Struct):
    error: str | _Fault = ""
    message: str = ""
    code: int = 0
    grpc_code: int = 0


# Not strict: etcd sends integers as strings.
_answer_decoder = msgspec.json.Decoder(_Answer, strict=False)
_lease_decoder = msgspec.json.Decoder(_LeaseLine, strict=False)
_status_decoder = msgspec.json.Decoder(_Status, strict=False)
_members_decoder = msgspec.json.Decoder(_Members, strict=False)
_watch_decoder = msgspec.json.Decoder(_WatchLine, strict=False)
_fault_decoder = msgspec.json.Decoder(_UnaryFault, strict=False)


# What a decoder raises for a body that is malformed or nested too deeply.
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class InvalidResponse(Exception):
    """The body is not a valid response of etcd."""


def decode(operation: AnyOperation, status: int, body: bytes) -> AnyAnswer | Fault:
    """Return the answer, or the fault. Raises InvalidResponse."""
    if status != 200:
        fault = decode_fault(status, body)
        success = _as_success(operation, fault)
        return fault if success is None else success
    try:
        return _decode(operation, body)
    except _UNREADABLE as error:
        raise InvalidResponse(f"not etcd's format ({error})") from error


def _decode(operation: AnyOperation, body: bytes) -> AnyAnswer | Fault:
    match operation:
        case KeepAlive():
            line = _lease_decoder.decode(body.partition(b"\n")[0])
            if line.error is not None:
                return _fault_of(line.error)
            if line.result is None:
                return Fault("again", "the keep-alive ended without an answer")
            return LeaseAnswer(line.result.header.revision, operation.id, line.result.ttl_s)
        case Status():
            return _status(_status_decoder.decode(body))
        case Members() | AddMember() | RemoveMember() | PromoteMember():
            found = _members_decoder.decode(body)
            added = None if found.member is None else _member(found.member)
            return MembersAnswer(tuple(map(_member, found.members)), added)
        case _:
            return _plain_answer(operation, _answer_decoder.decode(body))


def _plain_answer(operation: AnyOperation, answer: _Answer) -> AnyAnswer:
    revision = answer.header.revision
    match operation:
        case Range():
            return _range(answer)
        case Put():
            return PutAnswer(revision)
        case Delete():
            return DeleteAnswer(revision, answer.deleted)
        case Transaction():
            return TransactionAnswer(revision, answer.succeeded, tuple(map(_key_answer, answer.responses)))
        case GrantLease():
            return LeaseAnswer(revision, answer.lease_id, answer.ttl_s)
        case RevokeLease():
            return LeaseAnswer(revision, operation.id)
        case Compact():
            return CompactAnswer(revision)
        case Authenticate():
            return AuthenticateAnswer(answer.token)
        case SetUpUsers():
            return UsersAnswer(answer.users)
        case _:
            raise AssertionError(operation)


def _range(answer: _Answer) -> RangeAnswer:
    header = answer.header
    origin = Origin(header.cluster_id, header.member_id, header.raft_term)
    return RangeAnswer(header.revision, answer.kvs, answer.count, origin)


def _key_answer(response: _Response) -> AnyKeyAnswer:
    if response.response_range is not None:
        return _range(response.response_range)
    if response.response_delete_range is not None:
        deleted = response.response_delete_range
        return DeleteAnswer(deleted.header.revision, deleted.deleted)
    return PutAnswer(0 if response.response_put is None else response.response_put.header.revision)


def _status(status: _Status) -> StatusAnswer:
    header = status.header
    return StatusAnswer(
        header.revision,
        header.member_id,
        status.version,
        status.leader,
        status.db_size,
        status.errors,
        status.is_learner,
        header.cluster_id,
        status.term,
    )


def _member(member: _Member) -> Member:
    return Member(member.id, member.name, member.peer_urls, member.client_urls, member.is_learner)


def _as_success(operation: AnyOperation, fault: Fault) -> AnyAnswer | None:
    """Return the answer for an error that means that the operation had been executed before."""
    if isinstance(operation, GrantLease) and operation.id and "lease already exists" in fault.message:
        return LeaseAnswer(0, operation.id, operation.ttl_s)
    if isinstance(operation, RevokeLease) and "requested lease not found" in fault.message:
        return LeaseAnswer(0, operation.id)
    if isinstance(operation, SetUpUsers) and "name already exists" in fault.message:
        return UsersAnswer()
    return None


# --- a watch ----------------------------------------------------------------------------------------------------------


class WatchMessage(msgspec.Struct, frozen=True):
    """One message of a watch: it is open, it has changes, or it ended with a fault."""

    revision: int = 0
    is_open: bool = False
    changes: tuple[Change, ...] = ()
    fault: Fault | None = None


def decode_watch(line: bytes) -> WatchMessage:
    """Decode one line of the stream. Raises InvalidResponse."""
    try:
        message = _watch_decoder.decode(line)
    except _UNREADABLE as error:
        raise InvalidResponse(f"not etcd's format ({error})") from error
    result = message.result
    if message.error is not None:
        return WatchMessage(fault=_fault_of(message.error))
    if result is None:
        return WatchMessage()
    revision = result.header.revision
    if result.canceled:
        return WatchMessage(revision, fault=_cancellation(result))
    changes = tuple(Change("delete" if each.type == "DELETE" else "put", each.kv) for each in result.events)
    return WatchMessage(revision, result.created, changes)


def _cancellation(result: _WatchResult) -> Fault:
    if result.compact_revision:
        return Fault("compacted", "the requested revision is compacted", compact_revision=result.compact_revision)
    if not result.cancel_reason:
        return Fault("again", "the watch ended")
    return judge(0, result.cancel_reason)


# --- faults -----------------------------------------------------------------------------------------------------------

FaultKind = Literal["again", "token", "tls", "refused", "rejected", "full", "compacted"]


class Fault(msgspec.Struct, frozen=True):
    """Why one attempt failed, and what follows from that.

    ``again``: another member or a later attempt may succeed. ``token``: a new token is needed. ``tls``: the TLS
    handshake with this member failed. The other kinds are final. ``is_certain``: the operation was not executed.
    ``was_answered``: a member reported the fault; otherwise no member was reached, or none answered.
    """

    kind: FaultKind
    message: str
    is_certain: bool = False
    was_answered: bool = True
    compact_revision: int = 0

    def error(self, where: str = "") -> EtcdError:
        """Return the error for the caller."""
        at = f"etcd at {where}" if where else "etcd"
        match self.kind:
            case "again":
                return EtcdUnavailable(f"{at}: {self.message}", self.is_certain)
            case "compacted":
                return EtcdCompacted(f"{at}: {self.message}", self.compact_revision)
            case "full":
                return EtcdFull(
                    f"{at} accepts no writes: its database has reached its quota ({self.message}); compact and "
                    "defragment it, then disarm the alarm (etcdctl alarm disarm)"
                )
            case "rejected":
                return EtcdRejected(f"{at} rejected the request: {self.message}")
            case "tls":
                return EtcdRefused(f"{at}: {self.message}; check the certificates on both sides")
            case "refused" if not self.was_answered:
                return EtcdRefused(self.message)
            case "token" if "user name is empty" in self.message:
                return EtcdRefused(f"{at} requires a user and a password, and none were given")
            case "token" | "refused":
                return EtcdRefused(f"{at} refused this client: {self.message}")
            case _:
                return assert_never(self.kind)


_WRAPPING = re.compile(r"(?:rpc error: code = \w+ desc = |etcdserver: |auth: |mvcc: )+")

# The meaning of a text, regardless of its code. The first match counts.
_MEANINGS: tuple[tuple[FaultKind, re.Pattern[str]], ...] = (
    ("token", re.compile(r"invalid auth token|revision of auth store is old|user name is empty|token expired", re.I)),
    ("full", re.compile(r"database space exceeded", re.I)),
    ("compacted", re.compile(r"required revision has been compacted", re.I)),
    ("refused", re.compile(r"authentication failed|permission denied|user name not found", re.I)),
    ("rejected", re.compile(r"too large|larger than max|too many operations|not enabled", re.I)),
    # Preconditions that become true by themselves.
    ("again", re.compile(r"not enough started members|in sync with leader|too many requests|unhealthy cluster", re.I)),
)
_CERTAINLY_NOT_DONE = re.compile(
    r"too many requests|no leader$|not enough started members|in sync with leader|unhealthy cluster", re.I
)
# gRPC codes: invalid argument, not found, already exists, failed precondition, out of range, unimplemented.
_REJECTING_CODES = frozenset((3, 5, 6, 9, 11, 12))
_OF_STATUS: dict[int, FaultKind] = {401: "token", 403: "refused", 407: "refused", 408: "again", 429: "again"}


def decode_fault(status: int, body: bytes) -> Fault:
    """Decode the body of a response with a status other than 200, of any version of etcd."""
    try:
        found = _fault_decoder.decode(body)
    except _UNREADABLE:
        return _fault_from_status(status, body)
    if isinstance(found.error, _Fault):
        return _fault_of(found.error)
    text = found.message or found.error
    return judge(found.grpc_code or found.code, text) if text else _fault_from_status(status, body)


def _fault_of(fault: _Fault) -> Fault:
    return judge(fault.grpc_code or fault.code, fault.message or fault.error)


def judge(code: int, text: str) -> Fault:
    """Classify an error of etcd. ``code`` is the gRPC code, 0 if unknown."""
    wrapping = _WRAPPING.match(text)
    message = (text[wrapping.end() :] if wrapping else text) or f"unknown error (code {code})"
    if code == 0 and (named := re.search(r"code = (\w+)", text)):
        code = _CODES.get(named[1], 0)
    is_certain = _CERTAINLY_NOT_DONE.search(message) is not None
    if known := _meaning(message):
        return Fault(known, message, is_certain)
    if code == 16:
        return Fault("token", message)
    if code == 7:
        return Fault("refused", message)
    return Fault("rejected" if code in _REJECTING_CODES else "again", message, is_certain)


def _meaning(message: str) -> FaultKind | None:
    return next((kind for kind, pattern in _MEANINGS if pattern.search(message)), None)


_CODES = {
    "InvalidArgument": 3,
    "NotFound": 5,
    "AlreadyExists": 6,
    "PermissionDenied": 7,
    "FailedPrecondition": 9,
    "OutOfRange": 11,
    "Unimplemented": 12,
    "Unauthenticated": 16,
}


def _fault_from_status(status: int, body: bytes) -> Fault:
    """Classify an error without etcd's JSON: it comes from a proxy, or from another program."""
    text = body[:200].decode(errors="replace").strip().partition("\n")[0]
    if status == 404:
        return Fault("rejected", "HTTP status 404; expected etcd 3.4 or later with its gRPC gateway enabled")
    if "HTTPS server" in text:
        return Fault("tls", "it expects TLS; use https://", is_certain=True)
    if "CommonName" in text:
        return Fault(
            "refused", "with users, its gateway accepts no certificate that has a Common Name; use one without"
        )
    kind = _OF_STATUS.get(status, "again" if status >= 500 else "rejected")
    return Fault(kind, f"HTTP status {status}" + (f", {text}" if text else ""))
