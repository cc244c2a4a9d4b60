"""The lease: how long a node may keep its workers running without contact to the coordinator.

A node sends beats. The coordinator declares a node lost if it receives nothing from it for ``lease_s``, and may then
start a generation without it. The node must have stopped its workers by then, so it counts from when it *sent* the last
beat that is known to have arrived, which is earlier than its arrival, and uses a shorter period (``fence_s``). Both
sides measure durations on their own monotonic clocks; no time of day is compared.

The invariant: if clocks run at the same speed and killing takes less than ``lease_s - fence_s``, no worker of a
disconnected node is alive when the others start without it.

A beat is known to have arrived when the coordinator answered it, or when the kernel reports that the peer's host has
acknowledged every byte: then the node is connected, and a coordinator that does not answer is only busy or paused. (The
coordinator reads pending input before it checks leases, and extends every lease if it was suspended for ``freeze_s``.)

An acknowledgement does not date what the coordinator sent: an assignment may have been delayed for longer than a lease.
So a node accepts a generation only if a beat was *answered* in time (``is_answered``).
"""

from __future__ import annotations

import msgspec


class LeaseTerms(msgspec.Struct, frozen=True):
    """The periods that both sides agree on. The defaults tolerate a pause of 3 s of either side or of the network."""

    beat_s: float = 1.0
    lease_s: float = 5.0

    @property
    def fence_s(self) -> float:
        """Long enough for a beat and a pause of 3 s; the rest of ``lease_s`` is for killing."""
        return self.lease_s * 0.86

    @property
    def freeze_s(self) -> float:
        """A coordinator that did not run for longer than this was suspended; otherwise its machine was busy."""
        return self.lease_s / 2


class LeaseBeats(msgspec.Struct, frozen=True, array_like=True):
    """What beats change of a lease."""

    proven_at: float
    answered_at: float
    sent: dict[int, float]
    number: int
    last_sent_at: float


class Lease:
    """The node's side. One instance per connection; the next one starts with this one's ``proven_at``."""

    def __init__(self, terms: LeaseTerms, proven_at: float) -> None:
        self.terms = terms
        self.proven_at = proven_at  # when the last beat was sent that is known to have arrived
        self.answered_at = proven_at  # when the last beat was sent that the coordinator has answered
        self._sent: dict[int, float] = {}  # unanswered beats whose answer can renew the lease
        self._number = 0
        self._last_sent_at = proven_at

    def beat(self, now: float) -> int:
        """Return the number of a new beat, to be sent now."""
        self._number += 1
        self._sent = {each: at for each, at in self._sent.items() if at + self.terms.fence_s > now}
        self._sent[self._number] = self._last_sent_at = now
        return self._number

    def answered(self, number: int) -> None:
        """The coordinator received this beat and all earlier ones."""
        sent_at = self._sent.get(number)
        if sent_at is not None:
            self.proven_at = max(self.proven_at, sent_at)
            self.answered_at = max(self.answered_at, sent_at)
            self._sent = {each: at for each, at in self._sent.items() if each > number}

    def all_has_arrived(self) -> None:
        """The peer's host acknowledged every byte that was sent."""
        self.proven_at = max(self.proven_at, self._last_sent_at)

    def ends_at(self) -> float:
        """Return when the node must begin to kill its workers."""
        return self.proven_at + self.terms.fence_s

    def is_answered(self, now: float) -> bool:
        """Whether a beat was answered recently enough to accept a generation now."""
        return now < self.answered_at + self.terms.fence_s

    def beats(self) -> LeaseBeats:
        return LeaseBeats(self.proven_at, self.answered_at, dict(self._sent), self._number, self._last_sent_at)

    def set_beats(self, beats: LeaseBeats) -> None:
        self.proven_at, self.answered_at, self._sent = beats.proven_at, beats.answered_at, dict(beats.sent)
        self._number, self._last_sent_at = beats.number, beats.last_sent_at
