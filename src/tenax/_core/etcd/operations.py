"""The operations of etcd and their answers, as values.

Keys and values are bytes; ``gateway`` encodes them. Every operation carries the type of its answer, so that
``client.call(Range(...), done, failed)`` expects a ``done`` that takes a ``RangeAnswer``.

Reads are linearizable.
"""

from __future__ import annotations

from typing import Generic, Literal, TypeVar

import msgspec

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


class Origin(msgspec.Struct, frozen=True):
    """The cluster and the member that answered, and its raft term. 0 if unknown."""

    cluster_id: int = 0
    member_id: int = 0
    term: int = 0


class RangeAnswer(msgspec.Struct, frozen=True):
    """``count`` is the number of keys in the range, even if fewer were sent. ``revision`` is the store's."""

    revision: int
    kvs: tuple[KeyValue, ...] = ()
    count: int = 0
    origin: Origin = Origin()


class PutAnswer(msgspec.Struct, frozen=True):
    revision: int


class DeleteAnswer(msgspec.Struct, frozen=True):
    revision: int
    deleted: int = 0


AnyKeyAnswer = RangeAnswer | PutAnswer | DeleteAnswer


class TransactionAnswer(msgspec.Struct, frozen=True):
    """``succeeded``: all comparisons held and ``then`` was executed, else ``otherwise``. ``answers`` are in order."""

    revision: int
    succeeded: bool = False
    answers: tuple[AnyKeyAnswer, ...] = ()


class LeaseAnswer(msgspec.Struct, frozen=True):
    """``ttl_s`` is 0 if the lease does not exist."""

    revision: int
    id: int
    ttl_s: int = 0


class StatusAnswer(msgspec.Struct, frozen=True):
    """A member's status. ``leader`` is a member's id, 0 without a leader."""

    revision: int
    member_id: int = 0
    version: str = ""
    leader: int = 0
    db_size: int = 0
    errors: tuple[str, ...] = ()
    is_learner: bool = False
    cluster_id: int = 0
    term: int = 0


class Member(msgspec.Struct, frozen=True):
    """``name`` is empty for a member that was added but has not started yet."""

    id: int
    name: str = ""
    peer_urls: tuple[str, ...] = ()
    client_urls: tuple[str, ...] = ()
    is_learner: bool = False


class MembersAnswer(msgspec.Struct, frozen=True):
    """``member`` is the member that was added, if any."""

    members: tuple[Member, ...] = ()
    member: Member | None = None


class CompactAnswer(msgspec.Struct, frozen=True):
    revision: int


class AuthenticateAnswer(msgspec.Struct, frozen=True):
    token: str

    def __repr__(self) -> str:
        return "AuthenticateAnswer(token=...)"


class UsersAnswer(msgspec.Struct, frozen=True):
    """The names of all users, for the step "list users"."""

    users: tuple[str, ...] = ()


# --- operations -------------------------------------------------------------------------------------------------------


class Operation(msgspec.Struct, Generic[A], frozen=True):
    """The base of all operations. ``A`` is the type of the answer."""


class Range(Operation[RangeAnswer], frozen=True):
    """Read one key, or the keys from ``key`` up to but excluding ``end``. ``limit`` 0: all."""

    key: bytes
    end: bytes = b""
    limit: int = 0
    keys_only: bool = False
    count_only: bool = False


class Put(Operation[PutAnswer], frozen=True):
    key: bytes
    value: bytes
    lease: int = 0


class Delete(Operation[DeleteAnswer], frozen=True):
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

    compare: tuple[Compare, ...] = ()
    then: tuple[AnyKeyOperation, ...] = ()
    otherwise: tuple[AnyKeyOperation, ...] = ()


class GrantLease(Operation[LeaseAnswer], frozen=True):
    """Grant a lease. A random ``id`` makes it idempotent: a lease with that id that exists is the caller's own."""

    ttl_s: int
    id: int = 0


class KeepAlive(Operation[LeaseAnswer], frozen=True):
    """Renew a lease once. ``ttl_s`` of the answer is 0 if the lease has expired."""

    id: int


class RevokeLease(Operation[LeaseAnswer], frozen=True):
    """Revoke a lease and delete its keys. Succeeds if the lease does not exist."""

    id: int


class Compact(Operation[CompactAnswer], frozen=True):
    """Discard the history before this revision."""

    revision: int


class Status(Operation[StatusAnswer], frozen=True):
    """Query the status of one member. Needs no majority."""


class Members(Operation[MembersAnswer], frozen=True):
    """List the members of the cluster. ``is_linearizable`` needs a majority; etcd 3.4 ignores it."""

    is_linearizable: bool = False


class AddMember(Operation[MembersAnswer], frozen=True):
    """Add a member. A retry after a lost answer is rejected because the URLs exist; see ``Members``."""

    peer_urls: tuple[str, ...]
    is_learner: bool = False


class RemoveMember(Operation[MembersAnswer], frozen=True):
    """Remove a member. A retry after a lost answer is rejected because the member does not exist."""

    id: int


class PromoteMember(Operation[MembersAnswer], frozen=True):
    """Promote a learner to a voter."""

    id: int


class Authenticate(Operation[AuthenticateAnswer], frozen=True):
    """Get a token for a user. The client does this by itself."""

    user: str
    password: str

    def __repr__(self) -> str:
        return f"Authenticate(user={self.user!r}, password=...)"


UserStep = Literal["add user", "add role", "grant role", "enable", "list users"]


class SetUpUsers(Operation[UsersAnswer], frozen=True):
    """One step of setting up etcd's user ``root``. Each step is idempotent."""

    step: UserStep
    password: str = ""

    def __repr__(self) -> str:
        return f"SetUpUsers(step={self.step!r}, password=...)"


AnyOperation = (
    Range
    | Put
    | Delete
    | Transaction
    | GrantLease
    | KeepAlive
    | RevokeLease
    | Compact
    | Status
    | Members
    | AddMember
    | RemoveMember
    | PromoteMember
    | Authenticate
    | SetUpUsers
)
AnyAnswer = (
    RangeAnswer
    | PutAnswer
    | DeleteAnswer
    | TransactionAnswer
    | LeaseAnswer
    | CompactAnswer
    | StatusAnswer
    | MembersAnswer
    | AuthenticateAnswer
    | UsersAnswer
)

# --- watches ----------------------------------------------------------------------------------------------------------


class Change(msgspec.Struct, frozen=True):
    """A key was put or deleted. A deleted key has only ``key`` and ``mod_revision``."""

    kind: Literal["put", "delete"]
    kv: KeyValue
