"""The coordinator's side of its links, as a pure machine: who is authenticated, which link is a node's, who is lost.

A shell owns the connections and the clock. It calls a method for everything that happens, carries out what the method
returns, in order, and calls ``tick`` at ``next_deadline``, after it has read everything that has arrived. Invariants:

V1  A peer that has not proved the secret gets a challenge, a limited time and a limited number of connections
    (``admission.py``), and a rejection that reveals nothing about the run. It changes nothing. Rejections are counted.
V2  A node has one link: the last one that was authenticated. Nothing is accepted from an earlier one.
V3  A node is lost when its link is closed in good order (FIN: nothing that its agent started is alive) after it has
    joined, when it has left, or when it was silent for the length of the lease, if it has one; not when a link is
    reset.
V4  Time during which this process did not run is not counted as silence. After a long pause every node gets a full
    lease and the coordinator's deadlines a full period: see decision 0042.
V5  ``sent_at`` of a message is corrected by the fastest recent beat, so that its delay does not matter.
V6  A node is sent a generation only on a link on which it has joined. So no generation crosses a join, and a join
    without the node's last generation proves that the node has not received that one. The coordinator sends it again.
"""

from __future__ import annotations

import msgspec

from tenax._core.admission import Admission, peer_group
from tenax._core.bounds import MAX_GENERATIONS_AHEAD, clamped_time
from tenax._core.coordinator import AnyCoordinatorEvent, CancelRequested, NodeLost, Over, Received, Resumed
from tenax._core.events import GenerationFormed, RunEnded
from tenax._core.link import wire
from tenax._core.messages import (
    MAX_HOST_ADDRESSES,
    FailureSeen,
    FromNode,
    NodeJoined,
    NodeProgress,
    NodeReady,
    NodeStopped,
)
from tenax._core.text import format_seconds

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tenax._core.coordinator import CoordinatorState, Send
    from tenax._core.lease import LeaseTerms

HANDSHAKE_TIMEOUT_S = 5.0
MAX_UNAUTHENTICATED = 2048
_REPORT_EVERY_S = 10.0  # rejections are shown on the console no more often
_MAX_SHOWN = 64  # characters of a run id that an unauthenticated peer has sent
_TICKS_PER_LEASE = 20
_MAX_TICK_S = 1.0  # also of a long lease, because unauthenticated peers expire by it
_MAX_ANSWERS_KEPT = 16  # beat answers that a node has not acknowledged
_CLOCKS_DRIFT_S = 60.0  # an older comparison of two clocks is replaced by a new one
_MAX_OPERATORS = 256
_OPERATOR_S = 60.0  # how long an operator's link may be quiet


class Peer:
    """One connection and the state of its peer."""

    def __init__(self, now: float, nonce: bytes, address: str = "") -> None:
        self.address = address
        self.nonce = nonce  # random
        self.hello: wire.Hello | None = None
        self.node_id = ""
        self.is_trusted = False
        self.is_operator = False
        self.has_joined = False  # its keeper holds the connection: only then a FIN means that the node is clear
        self.is_leaving = False  # it was sent the end of the run, or was refused and has no workers
        self.since = now
        self.received_at = now
        self.proven_at = now  # when the last answer that it has acknowledged was sent
        self._answers: dict[int, float] = {}  # beat number -> when it was answered; removed once acknowledged
        self.ahead_s: float | None = None  # how far its clock is ahead, from the fastest recent beat
        self._compared_at = 0.0

    def answer(self, beat: wire.Beat, now: float) -> None:
        """Record that a beat is answered now, which answer it acknowledges, and the difference of the clocks."""
        if beat.seen in self._answers:
            self.proven_at = max(self.proven_at, self._answers[beat.seen])
            self._answers = {each: at for each, at in self._answers.items() if each > beat.seen}
        elif len(self._answers) >= _MAX_ANSWERS_KEPT:
            del self._answers[next(iter(self._answers))]
        self._answers[beat.number] = now
        ahead_s = beat.at - now
        if self.ahead_s is None or ahead_s > self.ahead_s or now - self._compared_at > _CLOCKS_DRIFT_S:
            self.ahead_s, self._compared_at = ahead_s, now

    def dated(self, message: FromNode, now: float) -> FromNode:
        """Set ``sent_at`` to the time of arrival on the sender's clock, however long the message took (V5)."""
        if self.ahead_s is None or not isinstance(message, FailureSeen | NodeStopped | NodeProgress):
            return message
        return msgspec.structs.replace(message, sent_at=clamped_time(max(message.sent_at, now + self.ahead_s)))

    def quiet_state(self) -> PeerBeats:
        times = (self.since, self.received_at, self.proven_at, self._compared_at)
        return PeerBeats(times, dict(self._answers), self.ahead_s)

    def set_quiet_state(self, beats: PeerBeats) -> None:
        self.since, self.received_at, self.proven_at, self._compared_at = beats.times
        self._answers, self.ahead_s = dict(beats.answers), beats.ahead_s


class PeerBeats(msgspec.Struct, frozen=True, array_like=True):
    """What beats change of a peer."""

    times: tuple[float, float, float, float]
    answers: dict[int, float]
    ahead_s: float | None


class SendFrame(msgspec.Struct, frozen=True):
    peers: tuple[Peer, ...]
    frame: wire.FromServer


class Trust(msgspec.Struct, frozen=True):
    """The peer is a node: it may send large frames."""

    peer: Peer


class Close(msgspec.Struct, frozen=True):
    """Close a connection, which the machine has forgotten. From a reset the peer concludes nothing."""

    peer: Peer
    is_reset: bool = False


class Step(msgspec.Struct, frozen=True):
    """An event for the coordinator machine."""

    event: AnyCoordinatorEvent


class Forward(msgspec.Struct, frozen=True):
    """A request of an operator or a node, or a node's answer to a request."""

    peer: Peer
    frame: wire.Ask | wire.Answer


class Deposed(msgspec.Struct, frozen=True):
    """A node follows another leader."""

    frame: wire.Replaced


class Unlinked(msgspec.Struct, frozen=True):
    """The link of a node is closed: it does not answer requests that were sent over it."""

    node_id: str


class Print(msgspec.Struct, frozen=True):
    text: str


Output = SendFrame | Trust | Close | Step | Forward | Deposed | Unlinked | Print


class LinkServer:
    """All links of one coordinator."""

    def __init__(
        self,
        run_id: str,
        terms: LeaseTerms,
        secret: bytes,
        state: Callable[[], CoordinatorState],
        now: float,
        *,
        counts: Callable[[float], bool] = lambda _: True,
        is_unleased: Callable[[str], bool] = lambda _: False,
        accepts_operators: bool = True,
        handshake_timeout_s: float = HANDSHAKE_TIMEOUT_S,
        max_unauthenticated: int = MAX_UNAUTHENTICATED,
    ) -> None:
        """``counts``: whether an answer to a beat renews the node's lease. Without a secret no operator is accepted.

        ``is_unleased``: whether the node is in this process and keeps its workers without a lease.
        """
        self.refused = 0  # connections that were closed because of what they sent, or did not send
        self.peers: dict[Peer, None] = {}
        self.nodes: dict[str, Peer] = {}
        # Nodes whose link was reset, which does not mean that they are lost: time of the last message, and the cause.
        self.absent: dict[str, tuple[float, str]] = {}
        self._run_id = run_id
        self._terms = terms
        self._secret = secret
        self._state = state
        self._counts = counts
        self._is_unleased = is_unleased
        self._accepts_operators = accepts_operators and bool(secret)
        self._handshake_timeout_s = handshake_timeout_s
        self._admission: Admission[Peer] = Admission(max_unauthenticated, max_unauthenticated * 3 // 4)
        self._report_at = -_REPORT_EVERY_S  # when the next rejection may be shown
        self._unreported = 0
        self._tick_at = now
        self._plan_tick(now)

    @property
    def is_over(self) -> bool:
        return isinstance(self._state().phase, Over)

    def others(self, node_id: str) -> int:
        """Return how many other nodes are linked or may reconnect."""
        return len((self.nodes.keys() | self.absent.keys()) - {node_id})

    def members_proven_at(self) -> Iterator[float | None]:
        """Yield ``proven_at`` of each member of the generation; None for a member that is not linked."""
        for node_id in self._state().members:
            peer = self.nodes.get(node_id)
            yield None if peer is None else peer.proven_at

    # --- unauthenticated peers ----------------------------------------------------------------------------------------

    def opened(self, peer: Peer) -> list[Output]:
        """A peer has connected."""
        self.peers[peer] = None
        outputs: list[Output] = []
        for evicted in self._admission.admit(peer, peer_group(peer.address), peer.since):
            self.refused += 1
            outputs.append(self._forget(evicted, is_reset=True))
        return outputs

    def received(self, peer: Peer, frame: wire.FromAgent, now: float) -> list[Output]:
        """Raises WireError, after which the shell closes the connection."""
        if peer not in self.peers:
            return []  # closed since it was sent (V2)
        peer.received_at = now
        if peer.is_trusted:
            return self._on_trusted(peer, frame, now)
        if isinstance(frame, wire.Hello) and peer.hello is None:
            return self._on_hello(peer, frame, now)
        if isinstance(frame, wire.Proof) and peer.hello is not None:
            return self._on_proof(peer, peer.hello, frame, now)
        raise wire.WireError("unexpected frame")

    def _on_hello(self, peer: Peer, hello: wire.Hello, now: float) -> list[Output]:
        if hello.version != wire.VERSION:
            reason = f"the coordinator's protocol version is {wire.VERSION}; use the same tenax version on every node"
            return self._refuse(peer, f"its protocol version is {hello.version}, not {wire.VERSION}", now, reason)
        if len(hello.nonce) != wire.NONCE_BYTES or not 0 < len(hello.node_id) <= 64:
            raise wire.WireError("invalid hello")
        peer.hello = hello
        peer.proven_at = now  # once it has answered the challenge
        return [SendFrame((peer,), wire.Challenge(peer.nonce))]

    def _on_proof(self, peer: Peer, hello: wire.Hello, proof: wire.Proof, now: float) -> list[Output]:
        """Verify the proof. A wrong secret and a wrong run get the same rejection, at the same step (V1)."""
        role = "operator" if hello.is_operator else "agent"  # part of the proof: it cannot be changed on the way
        is_same_secret = wire.is_same(proof.proof, wire.prove(self._secret, role, hello, peer.nonce))
        if not is_same_secret or hello.run_id != self._run_id:
            why = f"it belongs to the run {hello.run_id[:_MAX_SHOWN]!r}" if is_same_secret else "it has another secret"
            # Not final if this run is over: the next run on this port may be the peer's.
            return self._refuse(peer, why, now, is_final=not self.is_over)
        if hello.is_operator and not self._accepts_operators:
            return self._refuse(peer, "operators need a secret, and this run has none", now, wire.NO_SECRET)
        operators = sum(each.is_operator for each in self.peers) if hello.is_operator else 0
        if operators >= _MAX_OPERATORS:
            why = f"{operators} operators are connected already"
            return self._refuse(peer, why, now, wire.TOO_MANY_OPERATORS, is_final=False)
        self._admission.release(peer)
        peer.is_trusted = True
        our_proof = wire.prove(self._secret, "coordinator", hello, peer.nonce)
        accepted = wire.Accepted(our_proof, self._terms.beat_s, self._terms.lease_s)
        if hello.is_operator:
            peer.is_operator = True
            return [SendFrame((peer,), accepted)]
        accepted = msgspec.structs.replace(accepted, counts=self._counts(now))
        return [*self._bind(peer, hello.node_id), Trust(peer), SendFrame((peer,), accepted)]

    def _bind(self, peer: Peer, node_id: str) -> list[Output]:
        """Make this connection the node's link (V2)."""
        peer.node_id = node_id
        old = self.nodes.get(node_id)
        self.nodes[node_id] = peer
        self.absent.pop(node_id, None)
        return [] if old is None else [self._forget(old, is_reset=True), Unlinked(node_id)]

    def _refuse(self, peer: Peer, why: str, now: float, reason: str = "", *, is_final: bool = True) -> list[Output]:
        """Reject the peer. ``why`` goes to this node's console; ``reason`` to the peer, without details of the run."""
        self.refused += 1
        self._unreported += 1
        outputs: list[Output] = [SendFrame((peer,), wire.Refused(reason, is_final, wire.VERSION)), self._forget(peer)]
        if now >= self._report_at:  # limited, because a peer can reconnect as often as it likes
            more = f" ({self._unreported} rejections since the last report)" if self._unreported > 1 else ""
            self._report_at, self._unreported = now + _REPORT_EVERY_S, 0
            kind = "an operator" if peer.hello is not None and peer.hello.is_operator else "a node"
            outputs.append(Print(f"rejected {kind} from {peer.address or 'this host'}: {why}{more}"))
        return outputs

    # --- nodes --------------------------------------------------------------------------------------------------------

    def _on_trusted(self, peer: Peer, frame: wire.FromAgent, now: float) -> list[Output]:
        match frame:
            case wire.Ask():
                return [Forward(peer, frame)]
            case _ if peer.is_operator:
                raise wire.WireError("operators may only send requests")
            case wire.Answer():
                return [Forward(peer, frame)]
            case wire.Beat(number):
                peer.answer(frame, now)
                return [SendFrame((peer,), wire.BeatAnswer(number, self._counts(now)))]
            case wire.Message(message):
                return [Step(Received(peer.node_id, self._checked(peer, message, now)))]
            case wire.Cancel(why):
                return [Step(CancelRequested(why))]
            case wire.Replaced():
                peer.has_joined = False  # it closes the link in good order, and is not clear
                return [Deposed(frame)]
        raise wire.WireError("unexpected frame")

    def _checked(self, peer: Peer, message: FromNode, now: float) -> FromNode:
        if isinstance(message, NodeJoined):
            self._check_joined(peer, message)
            peer.has_joined = True
        elif isinstance(message, NodeReady):
            return with_seen_address(message, peer.address.partition("%")[0])
        return peer.dated(message, now)

    def _check_joined(self, peer: Peer, joined: NodeJoined) -> None:
        """Raise WireError for impossible values: the coordinator adopts a generation and a budget from this message."""
        if joined.node.node_id != peer.node_id:
            raise wire.WireError("message with the id of another node")
        if joined.generation > self._state().generation + MAX_GENERATIONS_AHEAD:
            raise wire.WireError(f"generation {joined.generation}, too far ahead")
        if joined.restarts_used > max(0, joined.generation - 1):
            raise wire.WireError(f"{joined.restarts_used} restarts in {joined.generation} generations")

    def deliver(self, send: Send) -> list[Output]:
        """Send an event of the coordinator to nodes. Those without a link get their state when they reconnect."""
        is_end, known = isinstance(send.event, RunEnded), self._state().nodes
        peers = tuple(self.nodes[node_id] for node_id in send.to if node_id in self.nodes)
        if isinstance(send.event, GenerationFormed):
            peers = tuple(peer for peer in peers if peer.has_joined)  # V6
        for peer in peers:
            # A refused node may have to stop its workers; it reports them when it joins.
            peer.is_leaving |= is_end or (peer.has_joined and peer.node_id not in known)
        return [SendFrame(peers, wire.Event(send.event))] if peers else []

    def closed(self, peer: Peer, why: str, *, was_finished: bool) -> list[Output]:
        """A connection is closed. ``was_finished``: by the peer, in good order (V3)."""
        if peer not in self.peers:
            return []
        outputs: list[Output] = [self._forget(peer, is_reset=bool(peer.node_id))]
        if not peer.is_trusted:
            self.refused += 1
        elif self.nodes.get(peer.node_id) is peer:
            del self.nodes[peer.node_id]
            if (was_finished and peer.has_joined) or peer.is_leaving:
                outputs.append(Step(NodeLost(peer.node_id, why)))
            else:
                self.absent[peer.node_id] = (peer.received_at, why)
            outputs.append(Unlinked(peer.node_id))
        return outputs

    def _forget(self, peer: Peer, *, is_reset: bool = False) -> Close:
        del self.peers[peer]
        self._admission.release(peer)
        return Close(peer, is_reset)

    def quiet_state(self) -> tuple[float, dict[str, tuple[float, str]], dict[Peer, PeerBeats]]:
        """Return what beats and ticks have changed, for a journal that does not record each of them."""
        return self._tick_at, dict(self.absent), {peer: peer.quiet_state() for peer in self.peers if peer.is_trusted}

    def set_quiet_state(self, tick_at: float, absent: dict[str, tuple[float, str]]) -> None:
        self._tick_at, self.absent = tick_at, absent

    # --- time ---------------------------------------------------------------------------------------------------------

    def next_deadline(self) -> float:
        return self._tick_at

    def _plan_tick(self, now: float) -> None:
        self._tick_at = now + min(_MAX_TICK_S, self._terms.lease_s / _TICKS_PER_LEASE)

    def tick(self, now: float) -> list[Output]:
        """Find the peers that are silent. Everything that has arrived must have been read."""
        outputs: list[Output] = []
        missed_s = now - self._tick_at  # this process, with the node in it, was stopped or starved (V4)
        if missed_s > self._terms.freeze_s:
            outputs.append(Step(Resumed(missed_s)))
            missed_s = float("inf")  # every node gets a full lease
        self._plan_tick(now)
        if missed_s:
            for node_id, (received_at, why) in self.absent.items():
                self.absent[node_id] = (min(now, received_at + missed_s), why)
            for peer in self.peers:
                peer.received_at = min(now, peer.received_at + missed_s)
                peer.since = min(now, peer.since + missed_s)
        for peer in list(self.peers):
            outputs += self._check_silence(peer, now)
        for node_id, (received_at, why) in list(self.absent.items()):
            if now - received_at > self._terms.lease_s and not self._is_unleased(node_id):
                del self.absent[node_id]
                outputs += [Step(NodeLost(node_id, why)), Unlinked(node_id)]
        return outputs

    def _check_silence(self, peer: Peer, now: float) -> list[Output]:
        why = ""
        if not peer.is_trusted:
            if now - peer.since > self._handshake_timeout_s:
                why = "no handshake"
        elif peer.is_operator:
            if now - peer.received_at > _OPERATOR_S:
                why = f"no request for {format_seconds(_OPERATOR_S)}"
        elif now - peer.received_at > self._terms.lease_s:
            why = f"no heartbeat for {format_seconds(self._terms.lease_s)}"
        return self.closed(peer, why, was_finished=False) if why else []


def with_seen_address(ready: NodeReady, seen: str) -> NodeReady:
    """Add the node's address as seen here to those it announced: behind NAT other hosts may see the same one."""
    if not seen or seen == "::1" or seen.startswith("127.") or seen in ready.addresses:
        return ready
    return msgspec.structs.replace(ready, addresses=(seen, *ready.addresses[:MAX_HOST_ADDRESSES]))
