"""One attempt of a node to become the leader.

    grant the leases -> read leader and record -> write both, if neither has changed -> won
                                    |-> there is a leader -> lost       '-> read again
                                    '-> this node's run has ended -> ended

The record is written in the same transaction as the leader key: it names the new leader, so that a successor knows
whose answers may still keep workers alive. The transaction is guarded by what was read, so pending writes of an earlier
leader fail. An attempt with an unknown outcome is settled by reading the leader key. While a generation may be running,
the record keeps its lease until the winner decides something: if all its members are lost, it expires, however often
other nodes wait for them.
"""

from __future__ import annotations

import msgspec

from tenax._core.etcd.errors import EtcdRejected, EtcdUnavailable
from tenax._core.etcd.operations import KeyValue, Put, Transaction, TransactionAnswer
from tenax._core.leadership.held_lease import HeldLease
from tenax._core.leadership.keys import VERDICT_TTL_S, Leader, LeaderAndRecord, Written
from tenax._core.record import RunRecord
from tenax._core.text import format_seconds

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from tenax._core.authority import AuthorityTerms
    from tenax._core.etcd.errors import EtcdError
    from tenax._core.leadership.calls import Call, Calls
    from tenax._core.leadership.keys import Keys, LeaderAddress
    from tenax._core.model import Verdict

_MISFIT = (
    "--nnodes, the secret (token, token_file, TENAX_RDZV_TOKEN) or the TLS settings of this node differ from "
    "those of the run with its --rdzv-id; use the same settings, or another --rdzv-id"
)


class Elected(msgspec.Struct, frozen=True):
    """The state in etcd at the start of a term."""

    term: int
    recorded_at: int  # the revision of the record
    written: Written
    leader: Leader  # this node
    found: KeyValue | None = None  # the record before the election
    was_recorded: bool = True  # whether the run had a record


class Candidacy:
    """Calls ``won``, ``lost`` (another node leads), ``ended`` (this node's run is over) or ``failed`` once."""

    def __init__(
        self,
        client: Calls,
        keys: Keys,
        leader: Leader,
        terms: AuthorityTerms,
        lease_ids: tuple[int, int],
        *,
        fit: str,
        must_fit: bool,
        known: RunRecord | None,
        run: int,
        may_begin: Callable[[], bool],
        won: Callable[[Elected], None],
        lost: Callable[[], None],
        ended: Callable[[Verdict | None], None],
        failed: Callable[[EtcdError], None],
        troubled: Callable[[EtcdError], None],
        deposed: Callable[[str], None],
    ) -> None:
        """``lease_ids``: random ones, of the leader key and of the record.

        ``fit`` is the digest of this node's settings; with ``must_fit`` the record must have the same.
        ``known`` is the record to use if etcd has lost it. ``run`` is the run that this node was in, or 0. If etcd has
        no record of it, it must not lead unless ``may_begin``. ``ended`` gets the verdict, None if it is unknown.
        ``troubled`` is called while etcd does not answer, ``deposed`` when a lease is lost, also after the election.
        """
        self._client = client
        self._keys = keys
        self._leader = leader
        self._terms = terms
        self._fit = fit
        self._must_fit = must_fit
        self._known = known
        self._run = run
        self._may_begin = may_begin
        self._on_trouble = troubled
        self._won = won
        self._lost = lost
        self._ended = ended
        self._failed = failed
        self._call: Call | None = None
        self._was_recorded = True
        self.holds_record = False  # the record, or the verdict, is or may be bound to record_lease
        self.lease = HeldLease(
            client, lease_ids[0], terms.ttl_s, held=self._granted, lost=deposed, troubled=self._troubled
        )
        self.record_lease = HeldLease(
            client,
            lease_ids[1],
            terms.record_s,
            held=self._granted,
            lost=deposed,
            troubled=self._troubled,
            every_s=terms.record_s / 24,
        )

    def start(self) -> None:
        self.lease.start()
        self.record_lease.start()

    def _troubled(self, error: EtcdError) -> None:
        if isinstance(error, EtcdUnavailable):
            self._on_trouble(error)
        else:
            self._failed(error)

    def _granted(self) -> None:
        if self.lease.is_held and self.record_lease.is_held:
            self._read()

    def _read(self) -> None:
        self._call = self._client.call(self._keys.read(self._run), self._on_read, self._on_failed)

    def _on_read(self, answer: TransactionAnswer) -> None:
        try:
            state = LeaderAndRecord(answer)
            leader, past = state.leader, state.written
        except EtcdRejected as error:
            self._failed(error)
            return
        if leader is not None:
            if msgspec.structs.replace(leader, run=0) == self._leader and past is not None:
                self.holds_record = state.record_kv is not None and state.record_kv.lease == self.record_lease.id
                self._won(Elected(state.term, state.recorded_at, past, leader, None, self._was_recorded))
            else:
                self._lost()
            return
        if state.verdict is not None:
            self._ended(state.verdict)
            return
        if past is not None and past.record.verdict is not None:
            wait_s = format_seconds(VERDICT_TTL_S)
            remedy = f"to use its --rdzv-id again, wait {wait_s} after all its workers have stopped"
            if past.before:
                remedy = "nodes that were cut off may still run its workers; stop them, and use another --rdzv-id"
            why = f"a run with this --rdzv-id is over: {past.record.verdict.why}; {remedy}"
            self._failed(EtcdRejected(why))
            return
        if self._run and (past is None or past.run != self._run) and not self._may_begin():
            self._ended(None)
            return
        if past is not None and self._must_fit and past.fit != self._fit:
            self._failed(EtcdRejected(_MISFIT))
            return
        record = (past.record if past is not None else self._known) or RunRecord()
        before: tuple[LeaderAddress, ...] = ()
        longest, lease_id = self._terms, self.record_lease.id
        if past is not None and state.record_kv is not None and record.is_at_work:
            lease_id = state.record_kv.lease
            before, longest = (*past.before, past.by), past.longest.longest(self._terms)
        fit = past.fit if past is not None else self._fit
        run = past.run if past is not None else self._run or self.record_lease.id
        leader = msgspec.structs.replace(self._leader, run=run)
        written = Written(record, leader.address, before, longest, fit, run)
        put_leader = Put(self._keys.leader, msgspec.json.encode(leader), self.lease.id)
        put_record = Put(self._keys.record, msgspec.json.encode(written), lease_id)
        guards = (self._keys.has_no_leader(), self._keys.is_recorded_at(state.recorded_at))

        def on_written(answer: TransactionAnswer) -> None:
            if answer.succeeded:
                found, revision = state.record_kv, answer.revision
                self._won(Elected(revision, revision, written, leader, found, self._was_recorded))
            else:
                self.holds_record = False
                self._read()

        self._was_recorded = past is not None
        self.holds_record = lease_id == self.record_lease.id
        self._call = self._client.call(Transaction(guards, (put_leader, put_record)), on_written, self._on_failed)

    def _on_failed(self, error: EtcdError) -> None:
        if isinstance(error, EtcdUnavailable):
            self._on_trouble(error)
            self._read()
        else:
            self._failed(error)

    def end(self, then: Callable[[], None]) -> None:
        """Withdraw or resign: revoke the lease of the leader key. The record stays if ``holds_record``."""
        self.close()
        if not self.holds_record:
            self.record_lease.end()
        self.lease.end(then)

    def close(self) -> None:
        if self._call is not None:
            self._call.cancel()
        self.lease.close()
        self.record_lease.close()
