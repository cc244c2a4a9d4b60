"""The operations of etcd and their answers, as values.

Both have the fields of etcd's JSON messages, so that ``gateway`` encodes and decodes them as they are; keys and values
are bytes, encoded as base64. Every operation has the path of its request and the type of its answer, so that
``client.call(Range(...), done, failed)`` expects a ``done`` that takes a ``RangeAnswer``.

Reads are linearizable.
"""

from __future__ import annotations

from typing import ClassVar, Generic, Literal, TypeVar

import msgspec

from tenax._core.text import concealed_repr

A = TypeVar("A")

CompareTarget = Literal["create", "mod", "version", "value", "lease"]
CompareResult = Literal["=", "!=", ">", "<"]


def run_prefix(run_id: str) -> bytes:
    """Return the prefix of all keys of one run. No run's prefix is a prefix of another's."""
    return b"/tenax/" + key_part(run_id) + b"/"


def key_part(text: str) -> bytes:
    """Return the text as one part of a key, without slashes. The encoding is injective."""
    return text.replace("%", "%25").replace("/", "%2F").encode("utf-8", "surrogatepass")


def prefix_end(prefix: bytes) -> bytes:
    """Return the end of the range of all keys with this prefix; for an empty prefix, of all keys."""
    kept = prefix.rstrip(b"\xff")
    if not kept:
        return b"\0"  # etcd: up to the last key
    return kept[:-1] + bytes([kept[-1] + 1])


# --- answers ----------------------------------------------------------------------------------------------------------


class KeyValue(msgspec.Struct, frozen=True):
    """One key as etcd stores it. ``lease`` is 0 without a lease."""

    key: bytes
    value: bytes = b""
    create_revision: int = 0
    mod_revision: int = 0
    version: int = 0
    lease: int = 0


class Header(msgspec.Struct, frozen=True):
    """The revision of the store, the cluster and the member that answered, and its raft term. 0 if unknown."""

    revision: int = 0
    cluster_id: int = 0
    member_id: int = 0
    raft_term: int = 0


class Answer(msgspec.Struct, frozen=True):
    """The base of the answers with a header."""

    header: Header = Header()

    @property
    def revision(self) -> int:
        return self.header.revision


class RangeAnswer(Answer, frozen=True):
    """``count`` is the number of keys in the range, even if fewer were sent."""

    kvs: tuple[KeyValue, ...] = ()
    count: int = 0


class PutAnswer(Answer, frozen=True):
    pass


class DeleteAnswer(Answer, frozen=True):
    deleted: int = 0


AnyKeyAnswer = RangeAnswer | PutAnswer | DeleteAnswer


class TransactionAnswer(Answer, frozen=True):
    """``succeeded``: all comparisons held and ``then`` was executed, else ``otherwise``. ``answers`` are in order."""

    succeeded: bool = False
    answers: tuple[AnyKeyAnswer, ...] = ()


class LeaseAnswer(Answer, frozen=True, rename={"id": "ID", "ttl_s": "TTL"}):
    """``ttl_s`` is 0 if the lease does not exist."""

    id: int = 0
    ttl_s: int = 0


class StatusAnswer(Answer, frozen=True, rename={"db_size": "dbSize"}):
    """A member's status. ``leader`` is a member's id, 0 without a leader."""

    version: str = ""
    leader: int = 0
    db_size: int = 0
    errors: tuple[str, ...] = ()


_MEMBER_FIELDS = {"id": "ID", "peer_urls": "peerURLs", "client_urls": "clientURLs", "is_learner": "isLearner"}


class Member(msgspec.Struct, frozen=True, rename=_MEMBER_FIELDS):
    """``name`` is empty for a member that was added but has not started yet."""

    id: int = 0
    name: str = ""
    peer_urls: tuple[str, ...] = ()
    client_urls: tuple[str, ...] = ()
    is_learner: bool = False


class MembersAnswer(msgspec.Struct, frozen=True):
    """``member`` is the member that was added, if any."""

    members: tuple[Member, ...] = ()
    member: Member | None = None


class AuthenticateAnswer(msgspec.Struct, frozen=True):
    token: str = ""

    __repr__ = concealed_repr


class UsersAnswer(msgspec.Struct, frozen=True):
    """The names of all users, for the step "list users"."""

    users: tuple[str, ...] = ()


# --- operations -------------------------------------------------------------------------------------------------------


class Operation(msgspec.Struct, Generic[A], frozen=True, omit_defaults=True):
    """The base of all operations. ``A`` is the type of the answer."""

    path: ClassVar[str]


class Range(Operation[RangeAnswer], frozen=True, rename={"end": "range_end"}):
    """Read one key, or the keys from ``key`` up to but excluding ``end``. ``limit`` 0: all."""

    path = "/v3/kv/range"
    key: bytes
    end: bytes = b""
    limit: int = 0
    keys_only: bool = False
    count_only: bool = False


class Put(Operation[PutAnswer], frozen=True):
    path = "/v3/kv/put"
    key: bytes
    value: bytes
    lease: int = 0


class Delete(Operation[DeleteAnswer], frozen=True, rename={"end": "range_end"}):
    path = "/v3/kv/deleterange"
    key: bytes
    end: bytes = b""


class Compare(msgspec.Struct, frozen=True):
    """One condition. ``value`` is bytes for the target "value", a number for the others.

    A missing key has create revision, mod revision, version and lease 0; comparing its value fails. With ``end`` every
    key of the range must satisfy the condition.
    """

    key: bytes
    target: CompareTarget
    value: int | bytes
    result: CompareResult = "="
    end: bytes = b""


AnyKeyOperation = Range | Put | Delete


class Transaction(Operation[TransactionAnswer], frozen=True):
    """An atomic transaction, in one revision. No key may be put twice."""

    path = "/v3/kv/txn"
    compare: tuple[Compare, ...] = ()
    then: tuple[AnyKeyOperation, ...] = ()
    otherwise: tuple[AnyKeyOperation, ...] = ()


class GrantLease(Operation[LeaseAnswer], frozen=True, rename={"id": "ID", "ttl_s": "TTL"}):
    """Grant a lease. A random ``id`` makes it idempotent: a lease with that id that exists is the caller's own."""

    path = "/v3/lease/grant"
    ttl_s: int
    id: int = 0


class KeepAlive(Operation[LeaseAnswer], frozen=True, rename={"id": "ID"}):
    """Renew a lease once. ``ttl_s`` of the answer is 0 if the lease has expired."""

    path = "/v3/lease/keepalive"
    id: int


class RevokeLease(Operation[LeaseAnswer], frozen=True, rename={"id": "ID"}):
    """Revoke a lease and delete its keys. Succeeds if the lease does not exist."""

    path = "/v3/lease/revoke"
    id: int


class Compact(Operation[Answer], frozen=True):
    """Discard the history before this revision."""

    path = "/v3/kv/compaction"
    revision: int


class Status(Operation[StatusAnswer], frozen=True):
    """Query the status of one member. Needs no majority."""

    path = "/v3/maintenance/status"


class Members(Operation[MembersAnswer], frozen=True, rename={"is_linearizable": "linearizable"}):
    """List the members of the cluster. ``is_linearizable`` needs a majority; etcd 3.4 ignores it."""

    path = "/v3/cluster/member/list"
    is_linearizable: bool = False


class AddMember(Operation[MembersAnswer], frozen=True, rename=_MEMBER_FIELDS):
    """Add a member. A retry after a lost answer is rejected because the URLs exist; see ``Members``."""

    path = "/v3/cluster/member/add"
    peer_urls: tuple[str, ...]
    is_learner: bool = False


class RemoveMember(Operation[MembersAnswer], frozen=True, rename=_MEMBER_FIELDS):
    """Remove a member. A retry after a lost answer is rejected because the member does not exist."""

    path = "/v3/cluster/member/remove"
    id: int


class PromoteMember(Operation[MembersAnswer], frozen=True, rename=_MEMBER_FIELDS):
    """Promote a learner to a voter."""

    path = "/v3/cluster/member/promote"
    id: int


class Authenticate(Operation[AuthenticateAnswer], frozen=True, rename={"user": "name"}):
    """Get a token for a user. The client does this by itself."""

    path = "/v3/auth/authenticate"
    user: str
    password: str

    __repr__ = concealed_repr


UserStep = Literal["add user", "add role", "grant role", "enable", "list users"]


class SetUpUsers(Operation[UsersAnswer], frozen=True):
    """One step of setting up etcd's user ``root``. Each step is idempotent. The path depends on the step."""

    step: UserStep
    password: str = ""

    __repr__ = concealed_repr


# --- watches ----------------------------------------------------------------------------------------------------------


class Change(msgspec.Struct, frozen=True):
    """A key was put or deleted. A deleted key has only ``key`` and ``mod_revision``."""

    kind: Literal["put", "delete"]
    kv: KeyValue
