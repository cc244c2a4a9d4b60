"""The node's side of its link to the coordinator, as a pure machine.

    UNLINKED -> opened -> GREETING -> Challenge -> PROVING -> Accepted -> LINKED -> closed -> UNLINKED ...

A shell owns the connection and the clock. It calls a method for everything that happens, carries out what the method
returns, in order, and calls ``tick`` at ``next_deadline``. It also finds the coordinator, or hosts it. Invariants:

K1  Nothing is accepted before the coordinator has proved the secret; each frame is accepted only in its phase.
K2  Every link starts with a beat and the node's complete state (``announce``). Nothing is queued between links.
K3  A coordinator that is *silent* may have declared this node lost: the node is fenced when the lease ends
    (``lease.py``), and the keeper holds a copy of that deadline (``Hold``) for when this process is stopped. When the
    run has ended, that deadline is the grace period of the workers and one ``fence_s``. A node that hosts the
    coordinator needs no lease; if it was refused, it is fenced when its link is lost.
K4  A generation is accepted only under a lease with a recently answered beat, after this node was ready, and once.
K5  A refused connection proves that there is no coordinator, and renews the lease from when the attempt began.
K6  A node that has not been linked for ``join_timeout_s`` gives up with a reason.
K7  A node that has left the run, and stays because it hosts the coordinator, does not announce itself again.
"""

from __future__ import annotations

import enum

import msgspec

from tenax._core.coordinator import Opened
from tenax._core.events import AnyEvent, Fenced, FromCoordinator, GenerationFormed, JoinRefused, RunEnded
from tenax._core.lease import Lease, LeaseBeats, LeaseTerms
from tenax._core.link import wire
from tenax._core.messages import FromNode, NodeInfo, NodeLeft, NodeReady
from tenax._core.model import Assignment, Verdict
from tenax._core.text import format_duration

HANDSHAKE_TIMEOUT_S = 5.0
RETRY_SOON_S, RETRY_LATER_S = 0.1, 1.0
_REPORT_EVERY_S = 10.0
_NO_HANDSHAKE = "no answer to the handshake"
_TOO_LATE = "its message arrived too late"


class SendFrame(msgspec.Struct, frozen=True):
    frame: wire.FromAgent


class Close(msgspec.Struct, frozen=True):
    """Reset the connection, or close it once what was sent is on its way. The machine regards it as closed."""

    is_finished: bool = False


class Linked(msgspec.Struct, frozen=True):
    """The coordinator is authenticated: let the keeper hold the connection, then call ``announce``."""


class Lost(msgspec.Struct, frozen=True):
    """The link, or an attempt to open one, has failed: find the coordinator again."""

    reason: str
    retry_s: float  # the delay before the next attempt


class Emit(msgspec.Struct, frozen=True):
    """An event for the agent machine."""

    event: AnyEvent


class Forward(msgspec.Struct, frozen=True):
    """An operator's request to this node, or the answer to one from this node."""

    frame: wire.Ask | wire.Answer


class Hold(msgspec.Struct, frozen=True):
    """The keeper kills the workers in this many seconds unless this is repeated; 0: never."""

    seconds: float


class Print(msgspec.Struct, frozen=True):
    text: str


Output = SendFrame | Close | Linked | Lost | Emit | Forward | Hold | Print


class LinkPhase(enum.Enum):
    UNLINKED = "unlinked"
    GREETING = "greeting"  # the hello is sent
    PROVING = "proving"  # the proof is sent
    LINKED = "linked"


class Note(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a coordinator at a fixed endpoint leaves for its successor there."""

    generation: int = 0
    restarts_used: int = 0
    store: str = ""
    verdict: Verdict | None = None  # the run is over


class Beats(msgspec.Struct, frozen=True, array_like=True):
    """What beats and their answers change."""

    lease: LeaseBeats
    last_answer: int
    received_at: float
    beat_at: float | None
    guard_at: float | None


class LinkClient:
    """One node's links, one at a time."""

    make_lease = Lease

    def __init__(
        self,
        node: NodeInfo,
        run_id: str,
        terms: LeaseTerms,
        now: float,
        *,
        join_timeout_s: float = 600.0,
        location: str = "",
        why_rejected: str = "",
        is_elected: bool = False,
    ) -> None:
        """``location``: of the coordinator, for messages: "at HOST:PORT", "on HOST", or empty if unknown.

        ``why_rejected``: possible causes of a rejection, which the coordinator does not reveal, and the remedy.
        ``is_elected``: a stopped coordinator may have a successor, so acknowledged bytes do not renew the lease.
        """
        self.node = node
        self.phase = LinkPhase.UNLINKED
        self.lease = self.make_lease(terms, now)
        self.location = location
        self.assignment: Assignment | None = None  # in the last generation of this node
        self.is_sole_host = False  # the coordinator is in this process and cannot move: this node needs no lease
        self.is_finished = False  # no further link is wanted
        self.was_ever_linked = False
        self.saw_coordinator_die = False  # its host closed the last link
        self._run_id = run_id
        self._terms = terms
        self._join_timeout_s = join_timeout_s
        self._why_rejected = why_rejected
        self._is_elected = is_elected
        self._secret = b""
        self._hello: wire.Hello
        self._nonce = b""
        self._is_run_over = False
        self._is_refused_host = False  # it hosts the coordinator, which has refused it, so it does not connect again
        self._cancel_reason = ""  # why the run is to be cancelled; empty: it is not
        self._has_offered = False  # NodeReady was sent since the last generation
        self._attempted_at = now  # when the last attempt to connect began, or the proof was sent
        self._last_answer = 0  # the number of the last beat that was answered on this link
        self._received_at = now
        self._fenced_at = 0.0  # end of the lease for which this node was last fenced while linked
        self._lost_since = now
        self._reported_at = -_REPORT_EVERY_S
        self._failures_in_a_row = 0
        self._late_in_a_row = 0  # generations that arrived too late
        self._handshake_until: float | None = None
        self._beat_at: float | None = None
        self._guard_at: float | None = None  # when to look at the lease

    @property
    def is_linked(self) -> bool:
        return self.phase is LinkPhase.LINKED

    @property
    def is_unlinked(self) -> bool:
        return self.phase is LinkPhase.UNLINKED

    @property
    def is_unleased(self) -> bool:
        """Whether the workers of this node may run without a lease. Once it has left, it does not reconnect."""
        return self.is_sole_host and not self.is_finished

    @property
    def where(self) -> str:
        return f"the coordinator {self.location}".rstrip()

    @property
    def is_refusal_final(self) -> bool:
        """After a first link, a rejection by an elected coordinator is from another program at a dead one's address."""
        return not (self._is_elected and self.was_ever_linked)

    def holds_lease(self, now: float) -> bool:
        return self.is_sole_host or self.lease.ends_at() > now

    def next_deadline(self) -> float | None:
        deadlines = (self._handshake_until, self._beat_at, self._guard_at)
        return min([each for each in deadlines if each is not None], default=None)

    def tick(self, now: float, *, has_all_arrived: bool = False) -> list[Output]:
        """``has_all_arrived``: the peer's host has acknowledged every byte, so a silent coordinator is only busy."""
        outputs: list[Output] = []
        if self.is_linked and has_all_arrived and not self._is_elected:  # in a handshake these bytes are no beats
            self.lease.all_has_arrived()
            outputs += self._hold(now)
        if self._handshake_until is not None and self._handshake_until <= now:
            outputs += self._close(_NO_HANDSHAKE, now)
        if self._beat_at is not None and self._beat_at <= now:
            outputs += self._beat(now)
        if self._guard_at is not None and self._guard_at <= now:
            outputs += self._check_lease(now)
        return outputs

    def quiet_state(self) -> Beats:
        """Return what beats have changed, for a journal that does not record each of them."""
        return Beats(self.lease.beats(), self._last_answer, self._received_at, self._beat_at, self._guard_at)

    def set_quiet_state(self, beats: Beats) -> None:
        self.lease.set_beats(beats.lease)
        self._last_answer, self._received_at = beats.last_answer, beats.received_at
        self._beat_at, self._guard_at = beats.beat_at, beats.guard_at

    # --- finding the coordinator --------------------------------------------------------------------------------------

    def serves(self) -> None:
        """This process serves the coordinator at an endpoint: nothing else can."""
        self.is_sole_host = True

    def connecting(self, now: float) -> None:
        """An attempt to connect begins."""
        self._attempted_at = now

    def unserved(self, now: float) -> list[Output]:
        """The coordinator's host refused the connection (K5)."""
        self.lease = self.make_lease(self._terms, max(self.lease.proven_at, self._attempted_at))
        return [*self._hold(now), *self._check_lease(now)]

    def backoff_s(self, jitter: float) -> float:
        """Return the delay before the next attempt: short for a member, exponential for a new node.

        ``jitter``: a random number from 0 to 1.
        """
        delay_s = RETRY_SOON_S if self.assignment is not None else _growing_s(self._failures_in_a_row)
        self._failures_in_a_row += 1
        return delay_s * (1 + 2 * jitter)

    def retry(self, why: str, what_to_check: str, now: float) -> list[Output]:
        """Report why there is no link, or give up (K6): then ``is_finished`` is set."""
        waited = now - self._lost_since
        if self.is_finished:
            return []
        if waited > self._join_timeout_s:
            return self.refuse(
                f"{why}; gave up after {format_duration(waited)}; {what_to_check}, or allow more time with "
                "--rdzv-conf join_timeout=SECONDS"
            )
        if now - self._reported_at >= _REPORT_EVERY_S and waited > 0.5:
            self._reported_at = now
            return [Print(f"{why}; retrying for up to {format_duration(self._join_timeout_s - waited)}")]
        return []

    def refuse(self, reason: str) -> list[Output]:
        """End the attempt to join."""
        if self.is_finished:
            return []
        self.is_finished = True
        return [Emit(JoinRefused(reason))]

    def takeover(self, note: Note | None, recover_s: float) -> Opened:
        """Return what is known of the run if this node serves it: from its assignment and a predecessor's note."""
        assignment = self.assignment
        if assignment is None and note is None:
            return Opened()
        note = note or Note()
        generation, restarts_used, store, dead_rank = note.generation, note.restarts_used, note.store, -1
        if assignment is not None:
            restarts_used = max(restarts_used, assignment.restarts_used)
            if assignment.generation >= generation:
                generation, store = assignment.generation, assignment.store
                if self.saw_coordinator_die and assignment.coordinator_rank != assignment.group_rank:
                    dead_rank = assignment.coordinator_rank
        return Opened(recover_s, dead_rank, generation, restarts_used, store=store, verdict=note.verdict)

    # --- the handshake ------------------------------------------------------------------------------------------------

    def opened(self, nonce: bytes, secret: bytes, now: float) -> list[Output]:
        """The connection is established. ``nonce`` is random."""
        self.phase = LinkPhase.GREETING
        self._secret = secret
        self._hello = wire.Hello(wire.VERSION, self._run_id, self.node.node_id, nonce)
        self._handshake_until = now + HANDSHAKE_TIMEOUT_S
        return [SendFrame(self._hello)]

    def received(self, frame: wire.FromServer, now: float) -> list[Output]:
        """Accept each frame only in its phase (K1). Raises WireError, after which the shell closes the connection."""
        self._received_at = now
        match frame:
            case wire.Event(event) if self.is_linked:
                return self._on_event(event, now)
            case wire.Ask() | wire.Answer() if self.is_linked:
                return [Forward(frame)]
            case wire.BeatAnswer(number, counts) if self.is_linked:
                self._last_answer = max(self._last_answer, number)
                if not counts:
                    return []
                self.lease.answered(number)
                return self._hold(now)
            case wire.Challenge(nonce) if self.phase is LinkPhase.GREETING and len(nonce) == wire.NONCE_BYTES:
                self.phase = LinkPhase.PROVING
                self._nonce, self._attempted_at = nonce, now
                return [SendFrame(wire.Proof(wire.prove(self._secret, "agent", self._hello, nonce)))]
            case wire.Accepted(proof, beat_s, lease_s, counts) if self.phase is LinkPhase.PROVING:
                if wire.is_same(proof, wire.prove(self._secret, "coordinator", self._hello, self._nonce)):
                    return self._on_accepted(LeaseTerms(beat_s, lease_s), now, counts=counts)
                why = f"{self.where} does not know the secret of the run; check which process listens there"
                return self._reject(why, now, is_final=True)
            case wire.Refused() if not self.is_linked and self.phase is not LinkPhase.UNLINKED:
                return self._on_refused(frame, now)
        raise wire.WireError("unexpected frame")

    def _on_refused(self, refused: wire.Refused, now: float) -> list[Output]:
        why = f"{self.where} rejected this node: {self._why_rejected}"
        if refused.version != wire.VERSION:
            why = (
                f"{self.where} rejected this node: its protocol version is {refused.version}, this node's is "
                f"{wire.VERSION}; use the same tenax version on every node"
            )
        return self._reject(why, now, is_final=refused.is_final)

    def _reject(self, why: str, now: float, *, is_final: bool) -> list[Output]:
        if is_final and self.is_refusal_final:
            return self.refuse(why)
        return self._close(why, now, by_peer=True)

    def _on_accepted(self, terms: LeaseTerms, now: float, *, counts: bool) -> list[Output]:
        if self.is_finished:  # since the handshake began (K7)
            return self._close("no longer wanted", now)
        self.phase = LinkPhase.LINKED
        self.was_ever_linked = True
        self._handshake_until = None
        self._failures_in_a_row = 0
        self._reported_at = now - _REPORT_EVERY_S
        self.lease = self.make_lease(terms, self._attempted_at if counts else self.lease.proven_at)
        self._last_answer = 0
        return [Linked()]

    def announce(self, messages: list[FromNode], now: float) -> list[Output]:
        """Send the node's complete state on a new link (K2)."""
        # The beat is first, so that its answer arrives before any reaction to the messages.
        outputs = self._beat(now)
        for message in messages:
            outputs += self.send(message)
        if self._cancel_reason:
            outputs += self.cancel(self._cancel_reason)
        return outputs + self._check_lease(now)

    # --- the link -----------------------------------------------------------------------------------------------------

    def send(self, message: FromNode) -> list[Output]:
        """Send a message; without a link it is dropped (K2). A node that has left does not join again (K7)."""
        self.is_finished |= isinstance(message, NodeLeft)
        if not self.is_linked:
            return []
        self._has_offered |= isinstance(message, NodeReady)
        return [SendFrame(wire.Message(message))]

    def cancel(self, why: str) -> list[Output]:
        """Cancel the run: now, or when the next link is established."""
        self._cancel_reason = why
        return [SendFrame(wire.Cancel(why))] if self.is_linked else []

    def _on_event(self, event: FromCoordinator, now: float) -> list[Output]:
        match event:
            case GenerationFormed(part):
                if not self._is_recent(now):  # the others may have formed a later generation
                    self._late_in_a_row += 1
                    return self._close(_TOO_LATE, now)
                if part == self.assignment:
                    return []  # sent again by a coordinator that did not know whether it had arrived
                if not self._has_offered:
                    raise wire.WireError("generation formed although this node was not ready")
                self._has_offered = False
                self._late_in_a_row = 0
                self.assignment = part
                return [*self._hold(now), Emit(event)]
            case RunEnded() | JoinRefused():
                return self.ended(event, now)
        return [Emit(event)]

    def ended(self, event: RunEnded | JoinRefused, now: float) -> list[Output]:
        """The run has ended, for this node at least."""
        self.is_finished = True
        self._is_run_over = isinstance(event, RunEnded)
        self._is_refused_host = self.is_sole_host and isinstance(event, JoinRefused)
        if self._is_run_over and not self.is_sole_host:
            # The workers have their grace period, also if this process is stopped meanwhile.
            return [Hold(self.node.grace_s + self.lease.terms.fence_s), Emit(event)]
        return [*self._hold(now), Emit(event)]

    def _is_recent(self, now: float) -> bool:
        """Return whether what is received now is recent: it may have been delayed on the way or before the read."""
        return self.is_sole_host or (self.lease.ends_at() > now and self.lease.is_answered(now))

    def _close(self, why: str, now: float, *, by_peer: bool = False) -> list[Output]:
        return [Close(), *self.closed(why, now, by_peer=by_peer)]

    def drop(self, why: str, now: float, *, is_finished: bool = False) -> list[Output]:
        """Close the connection, if there is one."""
        return [] if self.is_unlinked else [Close(is_finished), *self.closed(why, now)]

    def closed(self, why: str, now: float, *, by_peer: bool = False, is_mismatch: bool = False) -> list[Output]:
        """The connection is closed, or could not be used. ``is_mismatch``: the TLS settings differ."""
        was_linked = self.is_linked
        self.phase = LinkPhase.UNLINKED
        self._handshake_until = self._beat_at = None
        if self.is_finished:
            return self._fence(f"lost {self.where} after it had refused this node") if self._is_refused_host else []
        outputs: list[Output] = []
        if was_linked:
            self._lost_since = now
            self.saw_coordinator_die = by_peer
            has_workers = self.assignment is not None and self.lease.ends_at() > now
            goes_on = "; workers keep running while this node reconnects" if has_workers else ""
            outputs.append(Print(f"lost {self.where}: {why}{goes_on}"))
        reason = f"cannot reach {self.where}: {why}"
        if not was_linked and (why.startswith(wire.INVALID) or why == _NO_HANDSHAKE):
            reason = (
                f"the process listening {self.location} is not a tenax coordinator; if another program uses that "
                "port, choose another"
            )
        if is_mismatch and self.assignment is None and self.is_refusal_final:
            return self.refuse(f"{reason}; check the rendezvous options ssl_cert, ssl_cert_key and ca_cert on both")
        # A coordinator whose answers do not count would send the same again.
        if why == _TOO_LATE:
            return [*outputs, Lost(reason, _growing_s(self._late_in_a_row - 1))]
        return [*outputs, Lost(reason, 0.0 if was_linked else RETRY_SOON_S)]

    # --- the lease ----------------------------------------------------------------------------------------------------

    def _beat(self, now: float) -> list[Output]:
        self._beat_at = now + self.lease.terms.beat_s
        return [SendFrame(wire.Beat(self.lease.beat(now), now, self._last_answer))]

    def _hold(self, now: float) -> list[Output]:
        if self.is_sole_host:
            return [Hold(0)]  # the coordinator stops with this process
        if self._is_run_over:
            return []  # see ``ended``
        return [Hold(max(0.001, self.lease.ends_at() - now))] if self.assignment is not None else []

    def _check_lease(self, now: float) -> list[Output]:
        """Plan to look again at the end of the lease, and fence this node if it has ended (K3)."""
        self._guard_at = None
        if self.is_finished or self.is_sole_host:
            return []
        ends_at, fence_s = self.lease.ends_at(), self.lease.terms.fence_s
        if ends_at > now:
            self._guard_at = ends_at
            return []
        if self._is_elected and self.is_linked and now < self._received_at + fence_s:
            # It answers, but its answers do not count: it may have been replaced. Fence once, and keep the link.
            self._guard_at = now + self.lease.terms.beat_s
            if self._fenced_at == ends_at:
                return []
            self._fenced_at = ends_at
            return self._fence(f"{self.where} may have been replaced")
        outputs = self._fence(f"no answer from {self.where} for {format_duration(fence_s)}")
        if self.phase is not LinkPhase.UNLINKED:
            outputs += self._close(f"no answer for {format_duration(fence_s)}", now)
        return outputs

    def _fence(self, why: str) -> list[Output]:
        if self.assignment is None:
            return []
        return [Emit(Fenced(self.assignment.generation, f"{why}; the other nodes may continue without this node"))]


def _growing_s(times: int) -> float:
    return min(RETRY_LATER_S, RETRY_SOON_S * (1 << min(times, 8)))
