"""Operations: what can be asked of etcd, and what it answers. Values only.

Keys and values are bytes; how they travel is the gateway's matter. Every operation names the type of its answer, so
that ``client.call(Range(...), done, failed)`` expects a ``done`` that takes a ``RangeAnswer``.

Reads are linearizable: what was written before the question was asked is seen.
"""

from __future__ import annotations

from typing import Generic, Literal, TypeVar

import msgspec

A = TypeVar("A")

CompareTarget = Literal["create", "mod", "version", "value", "lease"]
CompareResult = Literal["=", "!=", ">", "<"]


def run_prefix(run_id: str) -> bytes:
    """Return what all keys of one run begin with. No two runs have prefixes of which one begins with the other."""
    return b"/tenax/" + key_part(run_id) + b"/"


def key_part(text: str) -> bytes:
    """Return the text as one part of a key, without a slash. Different texts have different parts."""
    return text.replace("%", "%25").replace("/", "%2F").encode("utf-8", "surrogatepass")


def prefix_end(prefix: bytes) -> bytes:
    """The end of the range of all keys that begin so. Of no prefix at all: every key."""
    kept = prefix.rstrip(b"\xff")
    if not kept:
        return b"\0"  # etcd's word for "to the last key"
    return kept[:-1] + bytes([kept[-1] + 1])


# --- answers ----------------------------------------------------------------------------------------------------------


class KeyValue(msgspec.Struct, frozen=True):
    """One key as etcd holds it. ``lease`` is 0 where there is none."""

    key: bytes
    value: bytes = b""
    create_revision: int = 0
    mod_revision: int = 0
    version: int = 0
    lease: int = 0


class Origin(msgspec.Struct, frozen=True):
    """Who answered: the cluster, its member, and the term of its leadership. 0 where it was not told."""

    cluster_id: int = 0
    member_id: int = 0
    term: int = 0


class RangeAnswer(msgspec.Struct, frozen=True):
    """``count`` is how many keys there are, however many were sent. ``revision`` is etcd's at that moment."""

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
    """``succeeded``: all comparisons held, and ``then`` was carried out, else ``otherwise``. Its answers, in order."""

    revision: int
    succeeded: bool = False
    answers: tuple[AnyKeyAnswer, ...] = ()


class LeaseAnswer(msgspec.Struct, frozen=True):
    """``ttl_s`` is 0 when there is no such lease (any more)."""

    revision: int
    id: int
    ttl_s: int = 0


class StatusAnswer(msgspec.Struct, frozen=True):
    """One member's view of itself. ``leader`` is a member's id, 0 when there is none."""

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
    """``name`` is empty of a member that was added and has not come up yet."""

    id: int
    name: str = ""
    peer_urls: tuple[str, ...] = ()
    client_urls: tuple[str, ...] = ()
    is_learner: bool = False


class MembersAnswer(msgspec.Struct, frozen=True):
    """``member`` is the one that was added, where one was."""

    members: tuple[Member, ...] = ()
    member: Member | None = None


class CompactAnswer(msgspec.Struct, frozen=True):
    revision: int


class AuthenticateAnswer(msgspec.Struct, frozen=True):
    token: str

    def __repr__(self) -> str:
        return "AuthenticateAnswer(token=...)"


class UsersAnswer(msgspec.Struct, frozen=True):
    """The names of all users, where they were asked for."""

    users: tuple[str, ...] = ()


# --- operations -------------------------------------------------------------------------------------------------------


class Operation(msgspec.Struct, Generic[A], frozen=True):
    """What all operations are. ``A`` is the answer's type."""


class Range(Operation[RangeAnswer], frozen=True):
    """One key, or the keys from ``key`` up to but without ``end``. ``limit`` 0: all of them."""

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

    A key that is not there has create revision, mod revision, version and lease 0; its value compares to nothing.
    With ``end`` every key of the range must satisfy it.
    """

    key: bytes
    target: CompareTarget
    value: int | bytes
    result: CompareResult = "="
    end: bytes = b""


AnyKeyOperation = Range | Put | Delete


class Transaction(Operation[TransactionAnswer], frozen=True):
    """All or nothing, in one revision. No key may be put twice."""

    compare: tuple[Compare, ...] = ()
    then: tuple[AnyKeyOperation, ...] = ()
    otherwise: tuple[AnyKeyOperation, ...] = ()


class GrantLease(Operation[LeaseAnswer], frozen=True):
    """A lease. An ``id`` that the caller chose at random makes it idempotent: one that exists already is its own."""

    ttl_s: int
    id: int = 0


class KeepAlive(Operation[LeaseAnswer], frozen=True):
    """Renew a lease once. Of a dead one the answer has ``ttl_s`` 0."""

    id: int


class RevokeLease(Operation[LeaseAnswer], frozen=True):
    """End a lease, and with it its keys. That there is no such lease is success."""

    id: int


class Compact(Operation[CompactAnswer], frozen=True):
    """Forget the history before this revision."""

    revision: int


class Status(Operation[StatusAnswer], frozen=True):
    """How the member that is asked is doing. Needs no majority."""


class Members(Operation[MembersAnswer], frozen=True):
    """Who belongs to the cluster. ``is_linearizable`` needs a majority; etcd 3.4 does not know it."""

    is_linearizable: bool = False


class AddMember(Operation[MembersAnswer], frozen=True):
    """A new member. Asked for again after an answer was lost it is rejected, because its URLs exist: see Members."""

    peer_urls: tuple[str, ...]
    is_learner: bool = False


class RemoveMember(Operation[MembersAnswer], frozen=True):
    """One member less. Asked for again after an answer was lost it is rejected, because there is no such member."""

    id: int


class PromoteMember(Operation[MembersAnswer], frozen=True):
    """A learner becomes a voter."""

    id: int


class Authenticate(Operation[AuthenticateAnswer], frozen=True):
    """A token for a user. The client does this by itself."""

    user: str
    password: str

    def __repr__(self) -> str:
        return f"Authenticate(user={self.user!r}, password=...)"


UserStep = Literal["add user", "add role", "grant role", "enable", "list users"]


class SetUpUsers(Operation[UsersAnswer], frozen=True):
    """One step of giving etcd its user ``root``. Each may be repeated: what is there already is success."""

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

# --- what a watch tells -----------------------------------------------------------------------------------------------


class Change(msgspec.Struct, frozen=True):
    """A key was put or deleted. Of a deleted one only the key and the revision (``mod_revision``) are told."""

    kind: Literal["put", "delete"]
    kv: KeyValue
