"""The keys of a run in etcd: all under one prefix, all bound to leases.

    leader          the leader, the address of its links and their secret; bound to its short lease
    record          what was decided, and the current or last leader; bound to a lease of a day
    ended/<run>     the verdict of an earlier run with the same run id; bound to a lease of a day
    nodes/<id>      the nodes; for people and tools
    members/<name>  hosts that had an etcd member before (managed mode, ``tenax._engines.etcd.managed``)

The *term* of a leader is the revision at which its key was created. It guards every write of the leader, so a deposed
leader cannot change anything. Several runs can follow each other under one run id: leader and record contain the
random number of theirs.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

from tenax._core.authority import AuthorityTerms
from tenax._core.etcd.errors import EtcdRejected
from tenax._core.etcd.operations import Compare, KeyValue, Range, Transaction, key_part, run_prefix
from tenax._core.model import Verdict
from tenax._core.record import RunRecord
from tenax._core.text import concealed_repr

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tenax._core.etcd.operations import TransactionAnswer

T = TypeVar("T")
VERDICT_TTL_S = 10  # after the end of the run
NODE_TTL_S = 30
MAX_VALUE_BYTES = 2 << 20  # etcd's default limit is 1.5 MiB
MAX_TERM_S = 1e9


# Without line breaks and control characters: these are printed.
_Text = Annotated[str, msgspec.Meta(max_length=256, pattern=r"\A[^\x00-\x1f\x7f-\x9f\u2028\u2029]*\Z")]


class LeaderAddress(msgspec.Struct, frozen=True):
    node_id: _Text
    host: _Text  # for people
    addr: _Text
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    machine: _Text = ""  # processes with the same one have the same loopback interface


class Leader(msgspec.Struct, frozen=True, omit_defaults=True):
    address: LeaderAddress
    secret: Annotated[bytes, msgspec.Meta(max_length=64)]
    certificate: Annotated[bytes, msgspec.Meta(max_length=32)] = b""  # its SHA-256 digest; empty: links without TLS
    run: int = 0

    __repr__ = concealed_repr


class Written(msgspec.Struct, frozen=True, omit_defaults=True):
    """The value of the record key."""

    record: RunRecord
    by: LeaderAddress  # the leader that wrote it
    before: tuple[LeaderAddress, ...] = ()  # earlier leaders that may still answer members
    longest: AuthorityTerms = AuthorityTerms()  # the maximum of the terms of all these leaders
    fit: Annotated[str, msgspec.Meta(max_length=256)] = ""  # digest of the settings that a leader of this run must have
    run: int = 0

    def __post_init__(self) -> None:
        lease = self.longest.lease
        if not (0 < lease.beat_s <= lease.lease_s < MAX_TERM_S and 0 <= self.longest.outage_s < MAX_TERM_S):
            raise ValueError("the lease terms are out of bounds")


class Keys:
    """The keys of one run."""

    def __init__(self, run_id: str) -> None:
        root = run_prefix(run_id)
        self.leader = root + b"leader"
        self.record = root + b"record"
        self.nodes = root + b"nodes/"
        self._ended = root + b"ended/"

    def node(self, node_id: str) -> bytes:
        return self.nodes + key_part(node_id)

    def ended(self, run: int) -> bytes:
        return self._ended + str(run).encode()

    def read(self, run: int) -> Transaction:
        """Return a transaction that reads the leader, the record and the end of that run at one revision."""
        return Transaction((), then=(Range(self.leader), Range(self.record), Range(self.ended(run))))

    def has_no_leader(self) -> Compare:
        return Compare(self.leader, "create", 0)

    def is_led_by(self, leader: Leader, term: int) -> tuple[Compare, Compare]:
        """Compare term and value: a term may repeat if etcd was wiped, the secret in the value does not."""
        return Compare(self.leader, "create", term), Compare(self.leader, "value", msgspec.json.encode(leader))

    def is_recorded_at(self, revision: int) -> Compare:
        return Compare(self.record, "mod", revision)


class LeaderAndRecord:
    """Leader, record and the end of a run, read at one revision."""

    def __init__(self, answer: TransactionAnswer) -> None:
        """Raises EtcdRejected if ``answer`` does not answer ``Keys.read``."""
        try:
            leaders, records, ends = (each.kvs for each in answer.answers)  # type: ignore[union-attr]
        except (ValueError, AttributeError) as error:
            raise EtcdRejected("etcd sent an unexpected answer to a read of three keys") from error
        self.leader_kv: KeyValue | None = leaders[0] if leaders else None
        self.record_kv: KeyValue | None = records[0] if records else None
        self.verdict = read_verdict(ends)

    @property
    def leader(self) -> Leader | None:
        return read_leader(self.leader_kv) if self.leader_kv is not None else None

    @property
    def written(self) -> Written | None:
        return _read(self.record_kv, Written) if self.record_kv is not None else None

    @property
    def term(self) -> int:
        return self.leader_kv.create_revision if self.leader_kv is not None else 0

    def is_led_by(self, leader: Leader, term: int) -> bool:
        kv = self.leader_kv
        return kv is not None and kv.create_revision == term and kv.value == msgspec.json.encode(leader)

    @property
    def recorded_at(self) -> int:
        return self.record_kv.mod_revision if self.record_kv is not None else 0


def read_leader(kv: KeyValue) -> Leader:
    return _read(kv, Leader)


def read_verdict(kvs: tuple[KeyValue, ...]) -> Verdict | None:
    return _read(kvs[0], Verdict) if kvs else None


def _read(kv: KeyValue, kind: type[T]) -> T:
    try:
        if len(kv.value) > MAX_VALUE_BYTES:
            raise ValueError(f"{len(kv.value)} bytes, more than {MAX_VALUE_BYTES}")
        return msgspec.json.decode(kv.value, type=kind)
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise EtcdRejected(
            f"cannot read the key {kv.key.decode(errors='backslashreplace')!r} in etcd ({error}): another version "
            "of tenax, or another program, wrote it; use the same tenax version on every node, or another "
            "--rdzv-id"
        ) from error
