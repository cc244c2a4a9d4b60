"""The authority of an elected leader: whether an answer of its may prolong the life of workers.

A node whose last *counting* answer is too old kills its workers (``lease.py``). A leader that was cut off from the
place where leaders are elected (etcd) may have a successor, which forms another generation when the members that it
misses have surely stopped. So the old leader's answers count only while one of these holds:

(a) Its lease in etcd was proven by a keep-alive that was *sent* less than ``sure_s`` ago: nobody else leads.
(b) Together: its generation has two members or more, and every one of them acknowledged, less than ``settle_s`` ago
    by our clock, something that we had sent: a node has one link, so none of them is with another leader, and no
    other leader forms a generation without having seen at least one of them. For as long as the record of that
    generation surely stands (``keep_record``): a day.
(c) Alone: a generation of one has nobody to be together with. It goes on for ``outage_s``; a successor
    waits longer.
(d) No generation is at work.

And the successor's side: how long it waits for members of the record that do not show up. Pure: ``now`` is an argument.
"""

from __future__ import annotations

import msgspec

from tenax._core.lease import LeaseTerms

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable


class AuthorityTerms(msgspec.Struct, frozen=True):
    lease: LeaseTerms = LeaseTerms(beat_s=1.0, lease_s=6.0)
    outage_s: float = 60.0  # how long a generation of one node goes on without etcd

    def longest(self, other: AuthorityTerms) -> AuthorityTerms:
        """Whoever follows both waits by the longer of each: nodes may have been told different ones."""
        lease, others = self.lease, other.lease
        return AuthorityTerms(
            LeaseTerms(max(lease.beat_s, others.beat_s), max(lease.lease_s, others.lease_s)),
            max(self.outage_s, other.outage_s),
        )

    @property
    def ttl_s(self) -> int:
        """Of the leader's lease in etcd. Half of a node's: so nodes find a new leader before they must stop."""
        return max(2, round(self.lease.lease_s / 2))

    @property
    def sure_s(self) -> float:
        """Less than ``ttl_s``: etcd may count a little faster than we do."""
        return self.ttl_s * 5 / 6

    @property
    def settle_s(self) -> float:
        """Enough for two beats, one lost, and their way."""
        return max(3 * self.lease.beat_s, self.lease.lease_s / 2)

    @property
    def return_s(self) -> float:
        """From the first member that shows up at a successor until those that do not have stopped."""
        return self.settle_s + self.lease.lease_s

    @property
    def alone_s(self) -> float:
        """From an election until the one member of a generation has stopped, if it does not show up."""
        return self.outage_s + self.lease.lease_s


class Authority:
    """The leader's side."""

    def __init__(self, terms: AuthorityTerms, proven_at: float) -> None:
        self.terms = terms
        self.proven_at = proven_at  # when the last keep-alive was sent that etcd answered
        self._together_until = 0.0
        self._recorded_until = proven_at

    def keep_record(self, until: float) -> None:
        """Until then the record is in etcd, even if nobody reaches it: others see it, and wait for its members."""
        self._recorded_until = max(self._recorded_until, until - self.terms.lease.lease_s)

    def prove(self, sent_at: float) -> None:
        self.proven_at = max(self.proven_at, sent_at)

    def is_sure(self, now: float) -> bool:
        return now < self.proven_at + self.terms.sure_s

    def counts(self, now: float, is_at_work: bool, members: Iterable[float | None]) -> bool:
        """``members``: when we had sent what each of them has acknowledged last. None: it is not linked to us.

        They are looked at only if nothing else holds, and not again while what was seen last is good enough: what they
        have acknowledged only grows.
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
        """Another generation: what is known of the members of the last one is worth nothing."""
        self._together_until = 0.0
