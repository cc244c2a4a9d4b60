"""The lease: how long a node may still believe that it belongs to its generation.

A node sends beats; the coordinator declares a node dead that it has not heard for ``lease_s``, and may then start a
generation without it. So the node must have stopped its workers before that: it counts from the moment it *sent* the
last beat that is known to have arrived, which is earlier than the moment the coordinator heard it, and gives itself
less time (``fence_s``) than the coordinator gives it. Both sides measure durations on their own monotonic clocks; no
time of day is compared. Pure: ``now`` is an argument.

The law: if clocks run at the same speed and killing takes less than ``lease_s - fence_s``, no worker of a node that was
cut off is alive when the others start without it.

A beat is known to have arrived when the coordinator answered it, or when the system says that the other host has
acknowledged every byte: then we are not cut off, and a coordinator that does not answer is merely busy or paused. (It
reads what has arrived before it judges anybody, and gives every node a full lease if it did not run for ``freeze_s``.)

An acknowledgement does not date what the coordinator sent: a generation that it formed may have been under way for
longer than a lease. So a node accepts a generation only if a beat was *answered* in time (``is_answered``).
"""

from __future__ import annotations

import msgspec


class LeaseTerms(msgspec.Struct, frozen=True):
    """What both sides agree on. The defaults survive a pause of 3 s on either side, or of the network between."""

    beat_s: float = 1.0
    lease_s: float = 5.0

    @property
    def fence_s(self) -> float:
        """Enough for a beat and a pause of 3 s; what is left to ``lease_s`` is for killing."""
        return self.lease_s * 0.86

    @property
    def freeze_s(self) -> float:
        """A coordinator that did not run for longer than this was frozen; less than this is a busy machine."""
        return self.lease_s / 2


class Lease:
    """The node's side. One instance per connection; ``proven_at`` outlives it."""

    def __init__(self, terms: LeaseTerms, proven_at: float) -> None:
        self.terms = terms
        self.proven_at = proven_at  # when the last beat was sent that is known to have arrived
        self.answered_at = proven_at  # when the last beat was sent that the coordinator has answered
        self._sent: dict[int, float] = {}  # beats that were not answered yet
        self._number = 0
        self._last_sent_at = proven_at

    def beat(self, now: float) -> int:
        """The number of the beat that is sent now."""
        self._number += 1
        self._sent[self._number] = self._last_sent_at = now
        return self._number

    def answered(self, number: int) -> None:
        """The coordinator has heard this beat, and with it all before."""
        sent_at = self._sent.get(number)
        if sent_at is not None:
            self.proven_at = max(self.proven_at, sent_at)
            self.answered_at = max(self.answered_at, sent_at)
            self._sent = {each: at for each, at in self._sent.items() if each > number}

    def all_has_arrived(self) -> None:
        """The other host's system has taken every byte that we sent."""
        self.proven_at = max(self.proven_at, self._last_sent_at)
        # An answer to an older beat would change nothing, and a coordinator that is paused sends none.
        self._sent = {each: at for each, at in self._sent.items() if at + self.terms.fence_s > self._last_sent_at}

    def ends_at(self) -> float:
        """When the node must have begun to kill its workers."""
        return self.proven_at + self.terms.fence_s

    def is_answered(self, now: float) -> bool:
        """Whether what the coordinator sends now can be as recent as its last answer."""
        return now < self.answered_at + self.terms.fence_s
