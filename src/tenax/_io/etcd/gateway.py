"""The encoding of etcd's JSON gateway, and the meaning of its errors. Pure.

Keys and values are base64; answers have 64-bit integers as strings; false, zero and empty fields are omitted; the
messages of a stream are lines with ``result`` or ``error``. Error bodies differ between versions:
``{"error","message","code"}`` in 3.4, ``{"code","message"}`` in 3.5; in streams they are objects with ``grpc_code`` or
``code``. The error texts are the same in all versions and more precise than the codes.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any, Generic, Literal, TypeVar, get_args

import msgspec

from tenax._core.bounds import DECODE_ERRORS
from tenax._core.etcd import operations as ops
from tenax._core.etcd.errors import EtcdCompacted, EtcdError, EtcdFull, EtcdRefused, EtcdRejected, EtcdUnavailable
from tenax._core.model import assert_never

T = TypeVar("T")

# --- requests ---------------------------------------------------------------------------------------------------------

WATCH_PATH = "/v3/watch"
ROOT = "root"  # the user and the role that etcd requires before authentication can be enabled
_IN_TRANSACTION = {ops.Range: "request_range", ops.Put: "request_put", ops.Delete: "request_delete_range"}
_RESULTS = {"=": "EQUAL", "!=": "NOT_EQUAL", ">": "GREATER", "<": "LESS"}
_TARGETS = {"create": "create_revision", "mod": "mod_revision"}  # the other fields have the name of their target
_USER_REQUESTS: dict[ops.UserStep, tuple[str, dict[str, str]]] = {
    "add user": ("/v3/auth/user/add", {"name": ROOT}),
    "add role": ("/v3/auth/role/add", {"name": ROOT}),
    "grant role": ("/v3/auth/user/grant", {"user": ROOT, "role": ROOT}),
    "enable": ("/v3/auth/enable", {}),
    "list users": ("/v3/auth/user/list", {}),
}


def encode(operation: ops.Operation[Any]) -> tuple[str, bytes]:
    """Return the path and the body of the request. Raises EtcdRejected."""
    if isinstance(operation, ops.Transaction):
        body = {
            "compare": [_comparison(each) for each in operation.compare],
            "success": _in_transaction(operation.then),
            "failure": _in_transaction(operation.otherwise),
        }
        return operation.path, msgspec.json.encode(body)
    if isinstance(operation, ops.SetUpUsers):
        path, request = _USER_REQUESTS[operation.step]
        password = {"password": operation.password} if operation.step == "add user" else {}
        return path, msgspec.json.encode({**request, **password})
    return operation.path, msgspec.json.encode(operation)


def encode_watch(key: bytes, end: bytes, from_revision: int) -> bytes:
    """Return the body of the request that opens a watch."""
    request: dict[str, Any] = {"key": key, "start_revision": from_revision, "progress_notify": True}
    if end:
        request["range_end"] = end
    return msgspec.json.encode({"create_request": request})


def _in_transaction(operations: tuple[ops.AnyKeyOperation, ...]) -> list[dict[str, ops.AnyKeyOperation]]:
    return [{_IN_TRANSACTION[type(each)]: each} for each in operations]


def _comparison(compare: ops.Compare) -> dict[str, Any]:
    value = compare.value
    if isinstance(value, bytes) is not (compare.target == "value"):
        raise EtcdRejected(f"cannot compare the {compare.target} of a key with a value of type {type(value).__name__}")
    return {
        "key": compare.key,
        **({"range_end": compare.end} if compare.end else {}),
        "target": compare.target.upper(),
        "result": _RESULTS[compare.result],
        _TARGETS.get(compare.target, compare.target): value,
    }


def has_side_effects(operation: ops.Operation[Any]) -> bool:
    """Return True if executing the operation without an answer makes a difference."""
    if isinstance(operation, ops.Transaction):
        return not all(isinstance(each, ops.Range) for each in (*operation.then, *operation.otherwise))
    return not isinstance(operation, ops.Range | ops.Status | ops.Members | ops.Authenticate)


# --- answers ----------------------------------------------------------------------------------------------------------


class _Response(msgspec.Struct):
    response_range: ops.RangeAnswer | None = None
    response_put: ops.PutAnswer | None = None
    response_delete_range: ops.DeleteAnswer | None = None

    @property
    def answer(self) -> ops.AnyKeyAnswer:
        return self.response_range or self.response_delete_range or self.response_put or ops.PutAnswer()


class _Transaction(msgspec.Struct):
    header: ops.Header = ops.Header()
    succeeded: bool = False
    responses: tuple[_Response, ...] = ()


class _Fault(msgspec.Struct):
    grpc_code: int = 0
    code: int = 0
    message: str = ""
    error: str = ""


class _Event(msgspec.Struct):
    kv: ops.KeyValue
    type: str = "PUT"


class _WatchResult(msgspec.Struct):
    created: bool = False
    canceled: bool = False
    compact_revision: int = 0
    cancel_reason: str = ""
    events: tuple[_Event, ...] = ()


class _Line(msgspec.Struct, Generic[T]):
    result: T | None = None
    error: _Fault | None = None


class _UnaryFault(_Fault):
    error: str | _Fault = ""  # type: ignore[assignment]


class InvalidResponse(Exception):
    """The body is not a valid response of etcd."""


@functools.cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind, strict=False)  # not strict: etcd sends integers as strings


def _decode(kind: Any, body: bytes) -> Any:
    try:
        return _decoder(kind).decode(body)
    except DECODE_ERRORS as error:  # malformed, or nested too deeply
        raise InvalidResponse(f"not etcd's format ({error})") from error


def decode(operation: ops.Operation[Any], status: int, body: bytes) -> Any:
    """Return the answer, or the fault. Raises InvalidResponse."""
    if status != 200:
        fault = decode_fault(status, body)
        success = _as_success(operation, fault)
        return fault if success is None else success
    match operation:
        case ops.Transaction():
            found = _decode(_Transaction, body)
            return ops.TransactionAnswer(found.header, found.succeeded, tuple(each.answer for each in found.responses))
        case ops.KeepAlive():
            line = _decode(_Line[ops.LeaseAnswer], body.partition(b"\n")[0])
            if line.error is not None:
                return _fault_of(line.error)
            return line.result or Fault("again", "the keep-alive ended without an answer")
        case _:
            (answer_type,) = get_args(operation.__orig_bases__[0])  # type: ignore[attr-defined]
            return _decode(answer_type, body)


def _as_success(operation: ops.Operation[Any], fault: Fault) -> Any:
    """Return the answer for an error that means that the operation had been executed before."""
    if isinstance(operation, ops.GrantLease) and operation.id and "lease already exists" in fault.message:
        return ops.LeaseAnswer(ops.Header(), operation.id, operation.ttl_s)
    if isinstance(operation, ops.RevokeLease) and "requested lease not found" in fault.message:
        return ops.LeaseAnswer(ops.Header(), operation.id)
    if isinstance(operation, ops.SetUpUsers) and "name already exists" in fault.message:
        return ops.UsersAnswer()
    return None


# --- a watch ----------------------------------------------------------------------------------------------------------


class WatchMessage(msgspec.Struct, frozen=True):
    """One message of a watch: it is open, it has changes, or it ended with a fault."""

    is_open: bool = False
    changes: tuple[ops.Change, ...] = ()
    fault: Fault | None = None


def decode_watch(line: bytes) -> WatchMessage:
    """Decode one line of the stream. Raises InvalidResponse."""
    message: _Line[_WatchResult] = _decode(_Line[_WatchResult], line)
    result = message.result or _WatchResult()
    if message.error is not None:
        return WatchMessage(fault=_fault_of(message.error))
    if result.canceled:
        return WatchMessage(fault=_cancellation(result))
    changes = tuple(ops.Change("delete" if each.type == "DELETE" else "put", each.kv) for each in result.events)
    return WatchMessage(result.created, changes)


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
_CODES: dict[str, tuple[int, FaultKind]] = {
    "InvalidArgument": (3, "rejected"),
    "NotFound": (5, "rejected"),
    "AlreadyExists": (6, "rejected"),
    "PermissionDenied": (7, "refused"),
    "FailedPrecondition": (9, "rejected"),
    "OutOfRange": (11, "rejected"),
    "Unimplemented": (12, "rejected"),
    "Unauthenticated": (16, "token"),
}
_OF_STATUS: dict[int, FaultKind] = {401: "token", 403: "refused", 407: "refused", 408: "again", 429: "again"}


def decode_fault(status: int, body: bytes) -> Fault:
    """Decode the body of a response with a status other than 200, of any version of etcd."""
    try:
        found: _UnaryFault = _decode(_UnaryFault, body)
    except InvalidResponse:
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
        code = _CODES.get(named[1], (0, "again"))[0]
    by_text: Iterator[FaultKind] = (kind for kind, pattern in _MEANINGS if pattern.search(message))
    kind = next(by_text, dict(_CODES.values()).get(code, "again"))
    return Fault(kind, message, is_certain=_CERTAINLY_NOT_DONE.search(message) is not None)


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
