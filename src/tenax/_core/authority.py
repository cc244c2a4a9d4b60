"""The authority of an elected leader: whether its answers may renew the leases of nodes.

A node kills its workers if its last *counting* answer is too old (``lease.py``). A leader without a connection to etcd
may have a successor, which forms another generation once the members that it misses must have stopped. So the old
leader's answers count only while one of these holds:

(a) Its lease in etcd is proven by a keep-alive *sent* less than ``sure_s`` ago: there is no other leader.
(b) Together: its generation has at least two members, and each has acknowledged, less than ``settle_s`` ago on the
    leader's clock, something that the leader sent. A node has one link, so none of them is connected to another leader,
    and no other leader forms a generation without at least one of them. This holds while the record of that generation
    exists in etcd (``keep_record``): a day.
(c) Alone: a generation with one member continues for ``outage_s``; a successor waits longer.
(d) No generation is running.

``AuthorityTerms`` also defines how long a successor waits for recorded members that do not reconnect.
"""

from __future__ import annotations

import msgspec

from tenax._core.lease import LeaseTerms

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable


class AuthorityTerms(msgspec.Struct, frozen=True):
    lease: LeaseTerms = LeaseTerms(beat_s=1.0, lease_s=6.0)
    outage_s: float = 60.0  # how long a generation of one node continues without etcd
    record_s: int = 86_400  # after this time without a leader the record expires, and the run id is free again

    def longest(self, other: AuthorityTerms) -> AuthorityTerms:
        """Return the longer of each period, for a successor of leaders with different settings."""
        lease, others = self.lease, other.lease
        return AuthorityTerms(
            LeaseTerms(max(lease.beat_s, others.beat_s), max(lease.lease_s, others.lease_s)),
            max(self.outage_s, other.outage_s),
            max(self.record_s, other.record_s),
        )

    @property
    def ttl_s(self) -> int:
        """TTL of the leader's lease in etcd: half of a node's lease, so that nodes find a new leader in time."""
        return max(2, round(self.lease.lease_s / 2))

    @property
    def sure_s(self) -> float:
        """Shorter than ``ttl_s``, because etcd's clock may run slightly faster."""
        return self.ttl_s * 5 / 6

    @property
    def settle_s(self) -> float:
        """Long enough for two beats of which one is lost, and their delay."""
        return max(3 * self.lease.beat_s, self.lease.lease_s / 2)

    @property
    def return_s(self) -> float:
        """From when the first member connects to a successor until the missing ones have stopped."""
        return self.settle_s + self.lease.lease_s

    @property
    def alone_s(self) -> float:
        """From an election until the only member of a generation has stopped, if it does not connect."""
        return self.outage_s + self.lease.lease_s


class Authority:
    """The leader's side."""

    def __init__(self, terms: AuthorityTerms, proven_at: float) -> None:
        self.terms = terms
        self.proven_at = proven_at  # when the last keep-alive was sent that etcd answered
        self._together_until = 0.0
        self._recorded_until = proven_at

    def keep_record(self, until: float) -> None:
        """The record stays in etcd until then, so that a successor waits for its members."""
        self._recorded_until = max(self._recorded_until, until - self.terms.lease.lease_s)

    def prove(self, sent_at: float) -> None:
        self.proven_at = max(self.proven_at, sent_at)

    def is_sure(self, now: float) -> bool:
        return now < self.proven_at + self.terms.sure_s

    def counts(self, now: float, is_at_work: bool, members: Iterable[float | None]) -> bool:
        """Whether answers sent now may renew leases.

        ``members``: for each member, when the leader sent what it acknowledged last; None if it is not connected. It is
        iterated only if no other condition holds, and its result is reused while it is recent enough.
        """
        if self.is_sure(now) or not is_at_work:
            return True
        if now >= self._recorded_until:
            return False
        if now < self._together_until:
            return True
        moments = list(members)
        if len(moments) < 2:
            return now < self.proven_at + self.terms.outage_s
        proven = [moment for moment in moments if moment is not None]
        if len(proven) < len(moments):
            return False
        self._together_until = min(proven) + self.terms.settle_s
        return now < self._together_until

    def lapse(self) -> None:
        """Discard what is known of the members, because another generation was formed."""
        self._together_until = 0.0

    def quiet_state(self) -> tuple[float, float, float]:
        return self.proven_at, self._together_until, self._recorded_until

    def set_quiet_state(self, proven_at: float, together_until: float, recorded_until: float) -> None:
        self.proven_at, self._together_until, self._recorded_until = proven_at, together_until, recorded_until
