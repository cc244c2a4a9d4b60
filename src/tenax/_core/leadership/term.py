"""One term of a leader: from its election until another node leads, or it leaves.

The coordinator starts from the record in etcd. Its messages pass through ``Decisions``; ``Authority`` decides whether
its answers keep workers alive; and while it waits for members of an earlier generation, earlier leaders are probed.
"""

from __future__ import annotations

import msgspec

from tenax._core.authority import Authority
from tenax._core.coordinator import (
    AnyCoordinatorEvent,
    EarlierCoordinatorGone,
    Ending,
    Gathering,
    Paused,
    Recovering,
    Running,
    Send,
)
from tenax._core.etcd.operations import Delete, Put, Transaction
from tenax._core.leadership.decisions import Decisions
from tenax._core.leadership.keys import LeaderAddress
from tenax._core.model import Outcome

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from tenax._core.authority import AuthorityTerms
    from tenax._core.coordinator import CoordinatorState
    from tenax._core.etcd.errors import EtcdError
    from tenax._core.leadership.calls import Calls, Timer
    from tenax._core.leadership.candidacy import Candidacy, Elected
    from tenax._core.leadership.keys import Keys
    from tenax._core.link.server import LinkServer
    from tenax._core.model import Verdict
    from tenax._core.record import RunRecord

_PROBE_EVERY_S = 0.5  # the death of an earlier leader is not announced, so it is probed
_PUT_BACK_S = 1.0


class Deliver(msgspec.Struct, frozen=True):
    """Send an event of the coordinator to nodes."""

    send: Send


class StepCoordinator(msgspec.Struct, frozen=True):
    event: AnyCoordinatorEvent


class Probe(msgspec.Struct, frozen=True):
    """Try to connect to an earlier leader, and report ``probed``."""

    address: LeaderAddress


class StopServing(msgspec.Struct, frozen=True):
    """Close the coordinator's server, and end the probe, without a report."""


TermOutput = Deliver | StepCoordinator | Probe | StopServing


class Term:
    """One term. ``deposed`` is called at most once, and never after ``close``."""

    make_decisions = Decisions
    make_authority = Authority

    def __init__(
        self,
        client: Calls,
        keys: Keys,
        candidacy: Candidacy,
        elected: Elected,
        *,
        node_id: str,
        terms: AuthorityTerms,
        output: Callable[[TermOutput], None],
        deposed: Callable[[str], None],
        troubled: Callable[[EtcdError], None],
    ) -> None:
        self._client = client
        self._keys = keys
        self._candidacy = candidacy
        self.elected = elected
        self._node_id = node_id
        self._output = output
        self._links: LinkServer
        self._state: Callable[[], CoordinatorState]
        self.authority = self.make_authority(terms, candidacy.lease.proven_at)
        candidacy.lease.on_proven = self._prove
        candidacy.record_lease.on_proven = self._keep_record
        self._is_record_kept = candidacy.holds_record
        self._keep_record()
        self._decisions = self.make_decisions(
            client,
            keys,
            elected,
            candidacy.record_lease.id,
            terms,
            deliver=lambda send: output(Deliver(send)),
            deposed=deposed,
            troubled=troubled,
            written=self._on_written,
        )
        self.last_record: RunRecord | None = None  # the last one written
        self._verdict: Verdict | None = None  # of the coordinator; it may not be stored yet
        # Earlier leaders that are not known to be dead. This node's own earlier terms are over.
        self._unconfirmed = [leader for leader in elected.written.before if leader.node_id != node_id]
        self._probing: LeaderAddress | None = None
        self._probe_later: Timer | None = None

    def serve(self, links: LinkServer, state: Callable[[], CoordinatorState]) -> None:
        """The coordinator is open."""
        self._links, self._state = links, state
        if self.elected.written.before and not self._unconfirmed:
            self._output(StepCoordinator(EarlierCoordinatorGone("")))
        self._probe()

    # --- answers and decisions ----------------------------------------------------------------------------------------

    def _prove(self) -> None:
        self.authority.prove(self._candidacy.lease.proven_at)

    def _keep_record(self) -> None:
        lease = self._candidacy.record_lease
        if self._is_record_kept:  # else it has the lease of an earlier leader
            self.authority.keep_record(lease.proven_at + lease.ttl_s)

    def counts(self, now: float) -> bool:
        """Return whether an answer to a beat renews the node's lease."""
        # The workers do not know of an end that is decided but not written yet.
        is_at_work = isinstance(self._state().phase, Running | Ending | Recovering) or (
            self.is_over and self._decisions.is_waiting
        )
        return self.authority.counts(now, is_at_work, self._links.members_proven_at())

    @property
    def is_over(self) -> bool:
        return self._links.is_over

    def stepped(self, state: CoordinatorState, wall_ahead_s: float) -> None:
        verdict = self._verdict = state.verdict
        # A cancelled run may have members at work, if an earlier leader may still answer them.
        may_be_led = self._probing is not None or bool(self._unconfirmed)
        is_unsure = may_be_led and verdict is not None and verdict.outcome is Outcome.CANCELLED
        if not isinstance(state.phase, Recovering) and not is_unsure:
            self._decisions.forget_earlier(state, wall_ahead_s)
            self._candidacy.holds_record |= self._decisions.is_waiting

    def submit(self, send: Send, state: CoordinatorState, wall_ahead_s: float) -> None:
        self._decisions.submit(send, state, wall_ahead_s)
        self._candidacy.holds_record |= self._decisions.is_waiting

    def _on_written(self, record: RunRecord) -> None:
        self.last_record = record
        self._is_record_kept = True
        self._keep_record()
        self.authority.lapse()

    @property
    def unstored_cancel(self) -> str:
        """Why an operator has cancelled the run, if that is not stored yet; else an empty string."""
        verdict, record = self._verdict, self.last_record
        if verdict is None or verdict.outcome is not Outcome.CANCELLED:
            return ""
        return verdict.why if record is None or record.verdict is None else ""

    def is_deciding(self) -> bool:
        """Return whether the consequences of this node's departure are still to be decided or delivered."""
        state = self._state()
        # The coordinator has not processed the departure yet.
        is_unprocessed = self._node_id in state.nodes and not isinstance(state.phase, Recovering)
        # All other nodes leave too: the run ends.
        is_deserted = bool(state.nodes) and all(record.is_draining for record in state.nodes.values())
        return is_unprocessed or is_deserted or isinstance(state.phase, Ending) or self._decisions.is_waiting

    # --- earlier leaders ----------------------------------------------------------------------------------------------

    def _probe(self) -> None:
        """Probe the earlier leaders, one at a time, the last first, while the coordinator is recovering."""
        if self._unconfirmed and isinstance(self._state().phase, Recovering):
            self._probing = self._unconfirmed.pop()
            self._output(Probe(self._probing))

    def probed(self, *, is_dead: bool) -> None:
        """``is_dead``: the connection was refused. A node that is linked to this leader has ended its own term."""
        before, self._probing = self._probing, None
        if before is None:
            return
        if is_dead or before.node_id in self._state().nodes:
            gone = EarlierCoordinatorGone(before.node_id if is_dead else "", len(self._unconfirmed))
            self._output(StepCoordinator(gone))
            self._probe()
        else:
            self._unconfirmed.insert(0, before)
            self._probe_later = self._client.loop.at(self._client.loop.now() + _PROBE_EVERY_S, self._probe)

    # --- the end ------------------------------------------------------------------------------------------------------

    def resign(self, then: Callable[[], None]) -> None:
        """Delete the leader key, so that another node leads at once. If the run is over, the server stays open."""
        candidacy = self._candidacy
        if self.is_over:
            candidacy.end(then)
            return
        state = self._state()
        last: Transaction | None = None
        if isinstance(state.phase, Gathering | Paused):
            if not state.nodes.keys() - {self._node_id}:
                last = self._delete_record()  # the run ends with its last node
        elif isinstance(state.phase, Recovering) and len(state.phase.awaited) == len(state.members):
            last = self._put_back()
        self._stop()

        def done(_: object) -> None:
            candidacy.end(then)

        if last is None:
            candidacy.end(then)
        else:
            self._client.call(last, done, done, patience_s=_PUT_BACK_S)

    def _delete_record(self) -> Transaction:
        """Delete the record under the guard of the term: a successor may lead, and may still need it.

        To revoke the lease would delete it without a guard, because a successor keeps that lease while it waits.
        """
        guards = self._keys.is_led_by(self.elected.leader, self.elected.term)
        return Transaction(guards, (Delete(self._keys.record),))

    def _put_back(self) -> Transaction | None:
        """Restore the record as it was found: no member of the generation has returned."""
        elected, found = self.elected, self.elected.found
        if found is None:
            return None
        guards = (*self._keys.is_led_by(elected.leader, elected.term), self._keys.is_recorded_at(elected.recorded_at))
        return Transaction(guards, (Put(self._keys.record, found.value, found.lease),))

    def close(self) -> None:
        """Stop serving and let the leases expire."""
        self._candidacy.close()
        self._stop()

    def _stop(self) -> None:
        self._decisions.close()
        self._probing = None
        if self._probe_later is not None:
            self._probe_later.cancel()
        self._output(StopServing())
