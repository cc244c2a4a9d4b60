"""Link machines with bugs that the simulator must detect from the outside."""

from __future__ import annotations

from tenax._core import messages
from tenax._core.lease import Lease
from tenax._core.link import client, wire
from tenax._core.link.client import LinkClient
from tenax._core.link.server import LinkServer, SendFrame

# --- the node's side --------------------------------------------------------------------------------------------------


class KeepsEveryBeat(Lease):
    def beat(self, now: float) -> int:
        sent = self._sent
        number = super().beat(now)
        self._sent = sent | self._sent
        return number


class RemembersEveryBeat(LinkClient):
    make_lease = KeepsEveryBeat


class EndsLate(Lease):
    def ends_at(self) -> float:
        return self.proven_at + self.terms.lease_s * 1.3


class FencesTooLate(LinkClient):
    """Keeps its workers for longer than the coordinator waits."""

    make_lease = EndsLate


class AcceptsLateGenerations(LinkClient):
    """Starts a generation that was sent long ago, as a node does that was suspended or had a slow link."""

    def _is_recent(self, now):
        return True


class DropsTheLease(LinkClient):
    """Neither fences the node nor lets its keeper do so."""

    def _hold(self, now):
        return [client.Hold(0)]

    def _check_lease(self, now):
        return []


class CountsFromTheAnswer(LinkClient):
    """Counts the lease from when an answer was received, not from when the beat was sent."""

    def received(self, frame, now):
        if isinstance(frame, wire.BeatAnswer):
            self.lease.proven_at = self.lease.answered_at = now
        return super().received(frame, now)


class TrustsTheHandshake(LinkClient):
    """Takes acknowledged bytes of a handshake for beats that have arrived."""

    def tick(self, now, *, has_all_arrived=False):
        if self.phase is not client.LinkPhase.UNLINKED and has_all_arrived:
            self.lease.proven_at = now
        return super().tick(now, has_all_arrived=has_all_arrived)


class TrustsEveryFailure(LinkClient):
    """Takes every lost connection for a proof that there is no coordinator."""

    def retry(self, why, what_to_check, now):
        return [*self.unserved(now), *super().retry(why, what_to_check, now)]


class AnnouncesOnce(LinkClient):
    """Sends the node's state on its first link only."""

    has_announced = False

    def announce(self, messages, now):
        found = super().announce([] if self.has_announced else messages, now)
        self.has_announced = True
        return found


class ToleratesSilence(LinkClient):
    """Fences the node, but keeps the silent link instead of looking for the coordinator."""

    def _close(self, why, now, *, by_peer=False):
        return [] if self.is_linked else super()._close(why, now, by_peer=by_peer)


class BeatsOnce(LinkClient):
    def _beat(self, now):
        found = super()._beat(now)
        self._beat_at = None
        return found


class JoinsAfterLeaving(LinkClient):
    def send(self, message):
        found = super().send(message)
        self.is_finished &= not isinstance(message, messages.NodeLeft)
        return found


class ForgetsTheNote(LinkClient):
    """Takes over without what the last coordinator left."""

    def takeover(self, note, recover_s):
        return super().takeover(client.Note() if note is not None else None, recover_s)


class PresumesDeath(LinkClient):
    """Takes over at once from a coordinator whose node may be alive."""

    def takeover(self, note, recover_s):
        return super().takeover(note, 0.0)


# --- the coordinator's side -------------------------------------------------------------------------------------------


class TakesAResetForDeath(LinkServer):
    def closed(self, peer, why, *, was_finished):
        return super().closed(peer, why, was_finished=True)


class TakesAnUnjoinedLinkForANode(LinkServer):
    """Takes the end of a link for the death of everything on the node, although its keeper does not hold it yet."""

    def closed(self, peer, why, *, was_finished):
        peer.has_joined = True
        return super().closed(peer, why, was_finished=was_finished)


class ConfusesLinks(LinkServer):
    """Takes the end of an earlier link of a node for the end of its link."""

    def _bind(self, peer, node_id):
        self.nodes.pop(node_id, None)
        return super()._bind(peer, node_id)

    def closed(self, peer, why, *, was_finished):
        if peer.node_id in self.nodes:
            self.nodes[peer.node_id] = peer
        return super().closed(peer, why, was_finished=was_finished)


class LosesReturnedNodes(LinkServer):
    """Counts the absence of a node on after it has reconnected."""

    def _bind(self, peer, node_id):
        absent = dict(self.absent)
        found = super()._bind(peer, node_id)
        self.absent = absent
        return found


class ForgetsAbsentNodes(LinkServer):
    """Waits forever for a node whose link was reset."""

    def closed(self, peer, why, *, was_finished):
        found = super().closed(peer, why, was_finished=was_finished)
        self.absent.clear()
        return found


class IgnoresSilence(LinkServer):
    def _check_silence(self, peer, now):
        return []


class ForgetsTheLastFrame(LinkServer):
    """Does not reset the silence timer of a node that sends beats."""

    def received(self, peer, frame, now):
        received_at = peer.received_at
        found = super().received(peer, frame, now)
        peer.received_at = received_at
        return found


class LosesPatience(LinkServer):
    """Declares a node lost before its lease has ended."""

    def tick(self, now):
        self._tick_at += 0.2
        return super().tick(now)


class BlamesNodesForItsPauses(LinkServer):
    """Counts the time during which its own process was suspended as silence of the nodes, and loses them for it.

    Also the node in its process, which has no lease. If that one is not lost, this breaks no property: the beats of the
    others are read before silence is measured, and a node whose beats have not arrived stops its workers in time.
    """

    def tick(self, now):
        self._tick_at = now
        self._is_unleased = lambda _: False
        return super().tick(now)


class DatesMessagesOnSending(LinkServer):
    """Uses the time at which a message was written, which may have waited for long."""

    def _checked(self, peer, message, now):
        super()._checked(peer, message, now)
        return message


class AnswersUnheardBeats(LinkServer):
    """Answers the beat of one node to all, so that leases of others are renewed for beats that have not arrived."""

    def _on_trusted(self, peer, frame, now):
        found = super()._on_trusted(peer, frame, now)
        if isinstance(frame, wire.Beat):
            found.append(SendFrame(tuple(self.nodes.values()), wire.BeatAnswer(frame.number)))
        return found


class SendsBeforeTheJoin(LinkServer):
    """Sends a generation that crosses the join, from which the coordinator concludes that it was not received."""

    def _bind(self, peer, node_id):
        peer.has_joined = True
        return super()._bind(peer, node_id)


# For each mistake a seed that finds it, and the property that breaks. If a change of the machines changes the history
# of a seed, ``./dev mistakes`` finds another.
MISTAKES: dict[type, tuple[int, str]] = {
    RemembersEveryBeat: (20, "S12"),
    FencesTooLate: (4, "S1"),
    AcceptsLateGenerations: (92, "S1"),
    DropsTheLease: (4, "S1"),
    CountsFromTheAnswer: (3539, "S1"),
    TrustsTheHandshake: (52, "S1"),
    TrustsEveryFailure: (1879, "S1"),
    AnnouncesOnce: (4, "L3"),
    ToleratesSilence: (182, "L3"),
    BeatsOnce: (96, "L3"),
    JoinsAfterLeaving: (312, "L3"),
    ForgetsTheNote: (9, "S6"),
    PresumesDeath: (48, "S1"),
    TakesAResetForDeath: (43, "S1"),
    ConfusesLinks: (46, "S1"),
    LosesReturnedNodes: (16, "S1"),
    ForgetsAbsentNodes: (58, "L3"),
    IgnoresSilence: (248, "L3"),
    ForgetsTheLastFrame: (4, "S1"),
    LosesPatience: (4, "S1"),
    BlamesNodesForItsPauses: (1193, "S1"),
    DatesMessagesOnSending: (40, "S8"),
    AnswersUnheardBeats: (56, "S1"),
}
