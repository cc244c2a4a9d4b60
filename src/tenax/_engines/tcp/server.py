"""The coordinator's server: one coordinator, one link per node.

It is one watchable in the agent's event loop (its own selector is a descriptor), so a thousand quiet links cost the
agent nothing. A node's message becomes a coordinator event. A link that is closed in good order, or a node that is
silent for the length of the lease, means that the node is lost. Invariants:

- Everything that has arrived is read before a node is declared silent.
- Time during which this process did not run is not counted as silence. After a long pause every node gets a full lease
  and the coordinator's deadlines a full period: see decision 0042.
- Unauthenticated peers get few bytes, few seconds, a limited number of connections (``_core/admission.py``), and a
  rejection that reveals nothing about the run. They are counted.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket

import msgspec

from tenax._core.admission import Admission, peer_group
from tenax._core.bounds import MAX_GENERATIONS_AHEAD, clamped_time
from tenax._core.coordinator import CancelRequested, NodeLost, Opened, Received, Resumed, RunPhase
from tenax._core.events import RunEnded
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
from tenax._engines.coordinator_host import CoordinatorHost
from tenax._engines.operator_api import OperatorApi
from tenax._engines.tcp.link import Link
from tenax._io.endpoint import is_loopback

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterator

    from tenax._core.coordinator import AnyCoordinatorEvent, CoordinatorState, RunSettings, Send
    from tenax._core.lease import LeaseTerms
    from tenax._core.policy import RestartPolicy
    from tenax._core.requests import OfNode
    from tenax._io.interfaces import Cancellable, EventLoop, RecordRun, Reply

    HoldBack = Callable[[Send, CoordinatorState], None]

_MAX_LINKS = 65_536
_MAX_UNAUTHENTICATED = 2048  # connections, and at most half of all descriptors
_HANDSHAKE_TIMEOUT_S = 5.0
_REPORT_EVERY_S = 10.0  # rejections are shown on the console no more often
_MAX_SHOWN = 64  # characters of a run id that an unauthenticated peer has sent
_TICKS_PER_LEASE = 20
_MAX_TICK_S = 1.0  # also of a long lease, because unauthenticated peers expire by it
_MAX_READ_ROUNDS = 8  # per tick: the first reads all that has arrived, the others serve new connections
_ACCEPTS_AT_ONCE = 256
_MAX_ANSWERS_KEPT = 16  # beat answers that a node has not acknowledged
_FINAL_FLUSH_S = 1.0  # shared by all links when the server closes
_CLOCKS_DRIFT_S = 60.0  # an older comparison of two clocks is replaced by a new one
_MAX_PENDING_REQUESTS = 1024  # that nodes have not answered
_REQUEST_TIMEOUT_S = 60.0  # longer than any request may wait on a node
_MAX_OPERATORS = 256
_OPERATOR_S = 60.0  # how long an operator's link may be quiet
_RESERVED_DESCRIPTORS = 32  # not available to links: for starting workers and opening files


class _Peer:
    """One link and the state of its peer."""

    def __init__(self, since: float, address: str = "") -> None:
        self.link: Link
        self.address = address
        self.descriptor = -1  # also after the link has closed it
        self.node_id = ""
        self.hello: wire.Hello | None = None
        self.nonce = b""
        self.is_trusted = False
        self.is_operator = False
        self.is_leaving = False  # it was sent the end of the run, or was refused and has no workers
        self.since = since
        self.received_at = since
        self.interest = selectors.EVENT_READ
        self.clocks = _Clocks()
        self.answers: dict[int, float] = {}  # beat number -> when it was answered; removed once acknowledged
        self.proven_at = since  # when the last answer that it has acknowledged was sent

    def answer(self, number: int, seen: int, now: float) -> None:
        """Record that beat ``number`` is answered now and that the answer to beat ``seen`` is acknowledged."""
        if seen in self.answers:
            self.proven_at = max(self.proven_at, self.answers[seen])
            self.answers = {each: at for each, at in self.answers.items() if each > seen}
        elif len(self.answers) >= _MAX_ANSWERS_KEPT:
            del self.answers[next(iter(self.answers))]
        self.answers[number] = now


class _PendingRequest:
    """A request that a node has not answered."""

    def __init__(self, node_id: str, reply: Reply, at: float) -> None:
        self.node_id = node_id
        self.reply = reply
        self.at = at


class _Clocks:
    """Estimates how far a node's clock is ahead of the local one, from the fastest recent beat."""

    def __init__(self) -> None:
        self._ahead_s: float | None = None
        self._since = 0.0

    def compare(self, theirs: float, ours: float) -> None:
        ahead_s = theirs - ours
        if self._ahead_s is None or ahead_s > self._ahead_s or ours - self._since > _CLOCKS_DRIFT_S:
            self._ahead_s, self._since = ahead_s, ours

    def dated(self, message: FromNode, now: float) -> FromNode:
        """Set ``sent_at`` to the time of arrival on the sender's clock, however long the message took."""
        if self._ahead_s is None or not isinstance(message, FailureSeen | NodeStopped | NodeProgress):
            return message
        return msgspec.structs.replace(message, sent_at=clamped_time(max(message.sent_at, now + self._ahead_s)))


class CoordinatorServer:
    """Watched by the agent's loop. ``on_node_gone`` is called when the link of a node has closed."""

    def __init__(
        self,
        listeners: list[socket.socket],
        settings: RunSettings,
        terms: LeaseTerms,
        secret: bytes,
        loop: EventLoop,
        *,
        policy: RestartPolicy | None = None,
        tls: ssl.SSLContext | None = None,
        record: RecordRun = lambda *_: None,
        on_node_gone: Callable[[], None] = lambda: None,
        on_change: Callable[[CoordinatorState], None] = lambda _: None,
        on_tick: Callable[[], None] = lambda: None,
        counts: Callable[[CoordinatorServer], bool] = lambda _: True,
        hold_back: HoldBack | None = None,
        handshake_timeout_s: float = _HANDSHAKE_TIMEOUT_S,
        accepts_operators: bool = True,
        print_line: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Create a server that is not open yet. Without a secret no operator is accepted.

        ``counts``: whether answers to beats renew the nodes' leases.
        ``hold_back``: gets each message, and calls ``deliver`` later.
        ``on_change``: called before a new generation or the verdict is sent.
        ``print_line``: prints a line on this node's console.
        """
        self._listeners = listeners
        self._settings = settings
        self._terms = terms
        self._secret = secret
        self._loop = loop
        self._tls = tls
        self._on_node_gone = on_node_gone
        self._on_change = on_change
        self._on_every_tick = on_tick
        self._counts = counts
        self._hold_back = hold_back
        self._handshake_timeout_s = handshake_timeout_s
        self._accepts_operators = accepts_operators and bool(secret)
        self._print_line = print_line
        self._report_at = -_REPORT_EVERY_S  # when the next rejection may be shown
        self._unreported = 0
        self._noted = (0, False)  # generation and whether the run is over, at the last call of on_change
        self._selector = selectors.DefaultSelector()
        self._peers: set[_Peer] = set()
        self._operators = 0
        self._nodes: dict[str, _Peer] = {}
        # Nodes whose link was reset, which does not mean that they are lost: time of the last message, and the cause.
        self._absent: dict[str, tuple[float, str]] = {}
        self._coordinator = CoordinatorHost(
            settings, policy, loop, self._send_or_hold_back, self._record_step, freeze_s=terms.freeze_s
        )
        self.operator_api = OperatorApi(self._coordinator, loop, self._forward)
        self._pending: dict[int, _PendingRequest] = {}  # by request number
        self._request_count = 0
        self._record = record
        self._timer: Cancellable | None = None
        self._tick_at = 0.0
        self._is_listening = False
        self.refused = 0  # links that were closed because of what they sent, or did not send
        self._max_links = _max_links()
        max_unauthenticated = max(8, min(_MAX_UNAUTHENTICATED, self._max_links // 2))
        self._admission: Admission[_Peer] = Admission(max_unauthenticated, max_unauthenticated * 3 // 4)

    @property
    def coordinator(self) -> CoordinatorHost:
        return self._coordinator

    def open(self, opened: Opened) -> None:
        for listener in self._listeners:
            listener.setblocking(False)
        self._listen()
        self._loop.watch(self)
        self._coordinator.step(opened)
        self._tick_later()

    def others(self, node_id: str) -> int:
        """Return how many other nodes are linked or may reconnect."""
        return len((self._nodes.keys() | self._absent.keys()) - {node_id})

    @property
    def is_over(self) -> bool:
        return self._coordinator.state.phase is RunPhase.OVER

    @property
    def is_at_work(self) -> bool:
        """Whether a member of a generation may be running workers."""
        return self._coordinator.state.phase in (RunPhase.RUNNING, RunPhase.ENDING, RunPhase.RECOVERING)

    def members_proven_at(self) -> Iterator[float | None]:
        """Yield ``proven_at`` of each member of the generation; None for a member that is not linked."""
        for node_id in self._coordinator.state.members:
            peer = self._nodes.get(node_id)
            yield None if peer is None else peer.proven_at

    # --- watched by the loop ------------------------------------------------------------------------------------------

    def fileno(self) -> int:
        return self._selector.fileno() if self._is_open() else -1

    def _is_open(self) -> bool:
        return self._timer is not None

    @property
    def wants_to_write(self) -> bool:
        return False

    def on_writable(self) -> None:
        """The selector handles writable links."""

    def on_readable(self) -> None:
        self._serve()

    def _serve(self) -> bool:
        """Handle everything that is ready now. Return whether there was anything."""
        ready = self._selector.select(0)
        for key, mask in ready:
            if key.data is None:
                self._accept(key.fileobj)  # type: ignore[arg-type]
                continue
            peer: _Peer = key.data
            if mask & selectors.EVENT_WRITE:
                peer.link.on_writable()
            if mask & selectors.EVENT_READ and not peer.link.is_closed:
                peer.link.on_readable()
            self._update_interest(peer)
        return bool(ready)

    def _update_interest(self, peer: _Peer) -> None:
        if peer.link.is_closed:
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.link.wants_to_write else 0)
        if wanted != peer.interest:
            peer.interest = wanted
            self._selector.modify(peer.link.fileno(), wanted, peer)

    # --- unauthenticated peers ----------------------------------------------------------------------------------------

    def _listen(self) -> None:
        if not self._is_listening:
            self._is_listening = True
            for listener in self._listeners:
                self._selector.register(listener, selectors.EVENT_READ, None)

    def _stop_listening(self) -> None:
        """Stop accepting: new connections wait in the listen backlog until there is room."""
        if self._is_listening:
            self._is_listening = False
            for listener in self._listeners:
                self._selector.unregister(listener)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPTS_AT_ONCE):
            if len(self._peers) >= self._max_links:
                self._stop_listening()
                return
            try:
                sock, address = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._stop_listening()
                return  # any other error concerns only this connection, which is gone
            self._add_peer(sock, str(address[0]))

    def _add_peer(self, sock: socket.socket, address: str) -> None:
        peer = _Peer(self._loop.now(), address)

        def on_body(body: bytes) -> None:
            self._on_body(peer, body)

        def on_closed(why: str, by_peer: bool) -> None:  # noqa: ARG001 - a closed link is a lost node either way
            self._on_closed(peer, why)

        peer.descriptor = sock.fileno()
        peer.link = Link(sock, on_body, on_closed, self._tls, is_server=True)
        self._peers.add(peer)
        self._selector.register(sock, selectors.EVENT_READ, peer)
        for evicted in self._admission.admit(peer, peer_group(address), peer.since):
            self.refused += 1
            evicted.link.reset()
            self._forget(evicted)

    def _on_body(self, peer: _Peer, body: bytes) -> None:
        peer.received_at = self._loop.now()
        frame = wire.decode_from_agent(body)
        if peer.is_trusted:
            self._on_trusted(peer, frame)
        elif isinstance(frame, wire.Hello) and peer.hello is None:
            self._on_hello(peer, frame)
        elif isinstance(frame, wire.Proof) and peer.hello is not None:
            self._on_proof(peer, peer.hello, frame)
        else:
            raise wire.WireError("unexpected frame")

    def _on_hello(self, peer: _Peer, hello: wire.Hello) -> None:
        if hello.version != wire.VERSION:
            reason = f"the coordinator's protocol version is {wire.VERSION}; use the same tenax version on every node"
            self._refuse(peer, f"its protocol version is {hello.version}, not {wire.VERSION}", reason)
        elif len(hello.nonce) != wire.NONCE_BYTES or not 0 < len(hello.node_id) <= 64:
            raise wire.WireError("invalid hello")
        else:
            peer.hello = hello
            peer.nonce = os.urandom(wire.NONCE_BYTES)
            peer.proven_at = self._loop.now()  # once it has answered the challenge
            self._send(peer, wire.encode(wire.Challenge(peer.nonce)))

    def _on_proof(self, peer: _Peer, hello: wire.Hello, proof: wire.Proof) -> None:
        """Verify the proof. A wrong secret and a wrong run get the same rejection, at the same step."""
        role = "operator" if hello.is_operator else "agent"  # part of the proof: it cannot be changed on the way
        is_same_secret = wire.is_same(proof.proof, wire.prove(self._secret, role, hello, peer.nonce))
        if not is_same_secret or hello.run_id != self._settings.run_id:
            # Not final if this run is over: the next run on this port may be the peer's.
            wrong_run = f"it belongs to the run {hello.run_id[:_MAX_SHOWN]!r}"
            self._refuse(peer, "it has another secret" if not is_same_secret else wrong_run, is_final=not self.is_over)
            return
        if hello.is_operator and not self._accepts_operators:
            self._refuse(peer, "operators need a secret, and this run has none", wire.NO_SECRET)
            return
        if hello.is_operator and self._operators >= _MAX_OPERATORS:
            why = f"{self._operators} operators are connected already"
            self._refuse(peer, why, wire.TOO_MANY_OPERATORS, is_final=False)
            return
        self._admission.release(peer)
        peer.is_trusted = True
        peer.is_operator = hello.is_operator
        our_proof = wire.prove(self._secret, "coordinator", hello, peer.nonce)
        if peer.is_operator:
            self._operators += 1
            self._send(peer, wire.encode(wire.Accepted(our_proof, self._terms.beat_s, self._terms.lease_s)))
            return
        peer.node_id = hello.node_id
        peer.link.trust()
        old = self._nodes.get(hello.node_id)
        self._nodes[hello.node_id] = peer
        self._absent.pop(hello.node_id, None)
        if old is not None:  # the same agent has reconnected
            old.link.reset()
            self._forget(old)
            self._fail_requests_to(hello.node_id)  # requests sent over the old link are not answered over the new one
        counts = self._counts(self)
        self._send(peer, wire.encode(wire.Accepted(our_proof, self._terms.beat_s, self._terms.lease_s, counts)))

    def _refuse(self, peer: _Peer, why: str, reason: str = "", *, is_final: bool = True) -> None:
        """Reject the peer. ``why`` goes to this node's console; ``reason`` to the peer, without details of the run."""
        self.refused += 1
        self._report_rejection(peer, why)
        self._send(peer, wire.encode(wire.Refused(reason, is_final, wire.VERSION)))
        self._forget(peer, is_flushed=True)

    def _report_rejection(self, peer: _Peer, why: str) -> None:
        """Report rejections at a limited rate: a peer can reconnect as often as it likes."""
        self._unreported += 1
        now = self._loop.now()
        if now < self._report_at:
            return
        more = f" ({self._unreported} rejections since the last report)" if self._unreported > 1 else ""
        self._report_at, self._unreported = now + _REPORT_EVERY_S, 0
        kind = "an operator" if peer.hello is not None and peer.hello.is_operator else "a node"
        self._print_line(f"rejected {kind} from {peer.address or 'this host'}: {why}{more}")

    # --- nodes --------------------------------------------------------------------------------------------------------

    def _on_trusted(self, peer: _Peer, frame: wire.FromAgent) -> None:
        match frame:
            case wire.Ask(number, request):
                self.operator_api.submit(request, lambda value, error: self._answer(peer, number, value, error))
            case _ if peer.is_operator:
                raise wire.WireError("operators may only send requests")
            case wire.Answer(number, value, error):
                pending = self._pending.get(number)
                if pending is not None and pending.node_id == peer.node_id:
                    del self._pending[number]
                    pending.reply(value, error)
            case wire.Beat(number, at, seen):
                peer.clocks.compare(at, peer.received_at)
                peer.answer(number, seen, self._loop.now())
                self._send(peer, wire.encode(wire.BeatAnswer(number, self._counts(self))))
            case wire.Message(message):
                if isinstance(message, NodeJoined):
                    self._check_joined(peer, message)
                if isinstance(message, NodeReady):
                    message = with_seen_address(message, peer.link.remote_address)
                self._coordinator.step(Received(peer.node_id, peer.clocks.dated(message, peer.received_at)))
            case wire.Cancel(why):
                self._coordinator.step(CancelRequested(why))
            case _:
                raise wire.WireError("unexpected frame")

    def _check_joined(self, peer: _Peer, joined: NodeJoined) -> None:
        """Raise WireError for impossible values: the coordinator adopts a generation and a budget from this message."""
        if joined.node.node_id != peer.node_id:
            raise wire.WireError("message with the id of another node")
        if joined.generation > self._coordinator.state.generation + MAX_GENERATIONS_AHEAD:
            raise wire.WireError(f"generation {joined.generation}, too far ahead")
        if joined.restarts_used > max(0, joined.generation - 1):
            raise wire.WireError(f"{joined.restarts_used} restarts in {joined.generation} generations")

    def _record_step(self, now: float, event: AnyCoordinatorEvent, sends: list[Send], state: CoordinatorState) -> None:
        """Record a step. What a successor must know is written before any node receives it."""
        noted = (state.generation, state.verdict is not None)
        if noted != self._noted:
            self._noted = noted
            self._on_change(state)
        self._record(now, event, sends, state)

    def _send_or_hold_back(self, send: Send) -> None:
        """Deliver now, or pass the message to ``hold_back``, which delivers it once the decision is stored."""
        if self._hold_back is None:
            self.deliver(send)
        else:
            self._hold_back(send, self._coordinator.state)

    def deliver(self, send: Send) -> None:
        data = wire.encode(wire.Event(send.event))
        for node_id in send.to:
            peer = self._nodes.get(node_id)
            if peer is not None:
                is_awaited = node_id in self._coordinator.state.nodes  # a refused node may have to stop its workers
                peer.is_leaving |= isinstance(send.event, RunEnded) or not is_awaited
                self._send(peer, data)

    # --- operators ----------------------------------------------------------------------------------------------------

    def _answer(self, peer: _Peer, number: int, value: object, error: str) -> None:
        if peer.link.is_closed:
            return
        if peer.link.unsent_bytes > wire.MAX_UNSENT_ANSWER_BYTES:
            value, error = None, wire.TOO_MANY_ANSWERS
        self._send(peer, wire.encode_answer(number, value, error))

    def _forward(self, node_id: str, request: OfNode, reply: Reply) -> None:
        peer = self._nodes.get(node_id)
        if peer is None or len(self._pending) >= _MAX_PENDING_REQUESTS:
            reply(None, "that node is not connected" if peer is None else "too many pending requests")
            return
        try:
            data = wire.encode_ask(self._request_count + 1, request)
        except wire.WireError as error:
            reply(None, f"invalid request: {error}")
            return
        self._request_count += 1
        self._pending[self._request_count] = _PendingRequest(node_id, reply, self._loop.now())
        self._send(peer, data)

    def _fail_requests_to(self, node_id: str) -> None:
        self._fail_requests("lost the link to that node before it answered", lambda each: each.node_id == node_id)

    def _fail_requests(self, why: str, which: Callable[[_PendingRequest], bool] = lambda _: True) -> None:
        for number, pending in list(self._pending.items()):
            if which(pending) and self._pending.pop(number, None) is not None:
                pending.reply(None, why)

    def cancel(self, why: str) -> None:
        self._coordinator.step(CancelRequested(why))

    def _send(self, peer: _Peer, data: bytes) -> None:
        peer.link.send(data)
        self._update_interest(peer)

    def _on_closed(self, peer: _Peer, why: str) -> None:
        if not peer.is_trusted:
            self.refused += 1
        self._forget(peer)
        if peer.is_trusted and self._nodes.get(peer.node_id) is peer:
            del self._nodes[peer.node_id]
            if peer.link.was_finished or peer.is_leaving:
                self._coordinator.step(NodeLost(peer.node_id, why))
            else:
                self._absent[peer.node_id] = (peer.received_at, why)
            self._fail_requests_to(peer.node_id)
            self._on_node_gone()

    def _forget(self, peer: _Peer, *, is_flushed: bool = False) -> None:
        """Remove the peer and close its link; with ``is_flushed``, try to send what is unsent first."""
        if peer not in self._peers:
            return
        self._peers.discard(peer)
        self._admission.release(peer)
        if peer.is_operator:
            self._operators -= 1
        self._selector.unregister(peer.descriptor)
        if is_flushed:
            peer.link.flush(0.0)
        peer.link.close()
        self._listen()

    # --- time ---------------------------------------------------------------------------------------------------------

    def _tick_later(self) -> None:
        self._tick_at = self._loop.now() + min(_MAX_TICK_S, self._terms.lease_s / _TICKS_PER_LEASE)
        self._timer = self._loop.at(self._tick_at, self._on_tick)

    def _on_tick(self) -> None:
        for _ in range(_MAX_READ_ROUNDS):  # bounded: unauthenticated peers may send without end
            if not self._serve():
                break
        now = self._loop.now()
        missed_s = now - self._tick_at  # this process, with the node in it, was stopped or starved
        if missed_s > self._terms.freeze_s:
            self._coordinator.step(Resumed(missed_s))
            missed_s = float("inf")  # every node gets a full lease
        self._absent = {
            each: (min(now, received_at + missed_s), why) for each, (received_at, why) in self._absent.items()
        }
        for peer in list(self._peers):
            peer.received_at = min(now, peer.received_at + missed_s)
            peer.since = min(now, peer.since + missed_s)
            if not peer.is_trusted:
                if now - peer.since > self._handshake_timeout_s:
                    self.refused += 1
                    self._forget(peer)
            elif peer.is_operator:
                if now - peer.received_at > _OPERATOR_S:
                    peer.link.close(f"no request for {_OPERATOR_S:g} s")
            elif now - peer.received_at > self._terms.lease_s:
                peer.link.reset(f"no heartbeat for {self._terms.lease_s:g} s")
        for node_id, (received_at, why) in list(self._absent.items()):
            if now - received_at > self._terms.lease_s:
                del self._absent[node_id]
                self._coordinator.step(NodeLost(node_id, why))
                self._on_node_gone()
        self._fail_requests("that node did not answer in time", lambda pending: now - pending.at > _REQUEST_TIMEOUT_S)
        if len(self._peers) < self._max_links:
            self._listen()
        self._on_every_tick()
        self._tick_later()

    def close(self) -> None:
        if self._timer is None:
            return
        self._timer.cancel()
        self._timer = None
        self._loop.unwatch(self)
        self._coordinator.close()
        for listener in self._listeners:
            listener.close()
        self._fail_requests("the coordinator stopped before that node answered")
        self.operator_api.close()
        until = self._loop.now() + _FINAL_FLUSH_S
        for peer in sorted(self._peers, key=lambda peer: not peer.node_id):  # nodes first
            peer.link.flush(until - self._loop.now())
            peer.link.close()
        self._selector.close()


def with_seen_address(ready: NodeReady, seen: str) -> NodeReady:
    """Add the node's address as seen here to those it announced: behind NAT other hosts may see the same one."""
    if not seen or is_loopback(seen) or seen in ready.addresses:
        return ready
    return msgspec.structs.replace(ready, addresses=(seen, *ready.addresses[:MAX_HOST_ADDRESSES]))


def _max_links() -> int:
    """Return how many links fit into the descriptor limit. Raises the soft limit, which workers do not inherit."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MAX_LINKS
    wanted = _MAX_LINKS if hard == resource.RLIM_INFINITY else min(hard, _MAX_LINKS)
    if wanted > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return max(16, min(_MAX_LINKS, soft - len(os.listdir("/dev/fd")) - _RESERVED_DESCRIPTORS))
