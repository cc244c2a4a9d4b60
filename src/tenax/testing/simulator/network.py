"""The network: hosts, the paths between them, and connections that stall and break.

Data of a connection arrives in order and once, or not at all. While a path is cut, segments wait at the sender and are
sent when it heals (the kernel retransmits); a reset is sent once and may be lost. The receiving host's kernel accepts
and acknowledges data even if the process is suspended; an acknowledgement needs the path back. A host without power
does not answer; after it is powered on it resets segments of old connections.

There is no wall clock. Each host has a monotonic clock with a constant offset, so a jump of the wall clock cannot have
an effect.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tenax.testing.simulator.scheduler import cancel

if TYPE_CHECKING:
    import random

    from tenax._core.link.client import Note
    from tenax._core.link.server import Peer
    from tenax.testing.simulator.agent import AgentProcess
    from tenax.testing.simulator.elected import Listener, Prober
    from tenax.testing.simulator.process import Process
    from tenax.testing.simulator.scheduler import Scheduler
    from tenax.testing.simulator.server import Server
    from tenax.testing.simulator.setup import Delays

Payload = object  # a frame, or one of these
FIN, RESET = "connection closed", "connection reset"
MAX_SLOWNESS = 8.0
_CONNECT_TIMEOUT_S = 1.0  # how long an agent waits for a connection to be established


class Host:
    """A machine: a kernel, a clock, and the processes on it."""

    def __init__(self, index: int, offset: float) -> None:
        self.index = index
        self.name = f"host{index}"
        self.offset = offset  # of its monotonic clock
        self.is_up = True
        self.off_since = 0.0
        self.boots = 1
        self.server: Server | None = None  # listening on this host
        self.note: Note | None = None  # for the next coordinator; lost with the power
        self.listeners: dict[int, Listener] = {}  # sockets of elected leaders, by port
        self.clearing: dict[int, AgentProcess] = {}  # dead agents with live processes


class End:
    """One end of a connection, owned by one process."""

    def __init__(self, host: Host, owner: Process, on_payload: Callable[[End, Payload], None]) -> None:
        self.host = host
        self.boot = host.boots
        self.owner = owner
        self.on_payload = on_payload
        self.is_open = True
        self.has_finished = False  # this end has sent FIN
        self.out: Stream
        self.peer: Peer | None = None  # at the server's end, once the process has accepted it

    @property
    def is_known(self) -> bool:
        """Whether this host's kernel still has the connection."""
        return self.host.is_up and self.host.boots == self.boot and self.is_open

    def send(self, payload: Payload) -> None:
        if self.is_open and not self.has_finished:
            self.out.send(payload)

    def finish(self) -> None:
        """Send FIN; the other end may keep sending."""
        self.send(FIN)
        self.has_finished = True

    def close(self) -> None:
        """Close the connection; later input is answered with a reset."""
        self.finish()
        self.is_open = False

    def abort(self) -> None:
        """Drop the connection, and send a reset to the other end."""
        if self.is_open:
            self.is_open = False
            self.out.forget()
            self.out.network.reset(self.out.sink, self.host)


class Stream:
    """One direction of a connection."""

    def __init__(self, network: Network, source: End, sink: End) -> None:
        self.network = network
        self.source = source
        self.sink = sink
        self.way = (source.host.index, sink.host.index)
        self.back = (sink.host.index, source.host.index)
        self.held: deque[Payload] = deque()
        self.last_arrival = 0.0
        self.stalled_until = 0.0
        self.sent = self.arrived = self.acknowledged = 0
        self.acknowledged_at = 0.0
        source.out = self

    def send(self, payload: Payload) -> None:
        self.sent += 1
        if self.held or self.stalled_until > self.network.schedule.now or self.way in self.network.cuts:
            self._queue(payload)
        else:
            self._travel(payload)

    def _queue(self, payload: Payload) -> None:
        if not self.held:
            self.network.held[self] = None
        self.held.append(payload)

    def _travel(self, payload: Payload) -> None:
        schedule = self.network.schedule
        at = schedule.now + self.network.delay(self.way)
        self.last_arrival = max(at, self.last_arrival)
        schedule.at(self.last_arrival, self._arrive, payload)

    def stall(self, seconds: float) -> None:
        """Lose a segment: later ones wait until it is retransmitted. Within a host nothing is lost."""
        until = self.network.schedule.now + seconds
        if until > self.stalled_until and self.way[0] != self.way[1]:
            self.stalled_until = until
            self.network.stalled.append(self)
            self.network.schedule.at(until, self.flush)

    def flush(self) -> None:
        """Send queued segments, unless the path is still cut."""
        source = self.source
        if not self.held or self.stalled_until > self.network.schedule.now or self.way in self.network.cuts:
            return
        if not source.host.is_up or source.host.boots != source.boot:
            self.forget()
            return
        while self.held:
            self._travel(self.held.popleft())
        self.network.held.pop(self, None)

    def forget(self) -> None:
        self.held.clear()
        self.network.held.pop(self, None)

    def _arrive(self, payload: Payload) -> None:
        sink = self.sink
        if not sink.host.is_up:
            return
        if not sink.is_known:
            self.network.reset(self.source, sink.host)
            return
        self.arrived += 1
        if self.back in self.network.cuts:
            self.network.unacknowledged[self] = None
        else:
            self.acknowledge()
        sink.owner.receive(sink, payload)

    def acknowledge(self) -> None:
        self.acknowledged = self.arrived
        self.acknowledged_at = self.network.schedule.now + self.network.delay(self.back)

    @property
    def all_is_acknowledged(self) -> bool:
        return self.acknowledged == self.sent and self.acknowledged_at <= self.network.schedule.now


class Network:
    """Paths between hosts. Each direction is cut and healed separately; a path heals when all its cuts have."""

    def __init__(self, schedule: Scheduler, rng: random.Random, delays: Delays) -> None:
        self.schedule = schedule
        self.delays = delays
        self.slowness = 1.0
        self._rng = rng
        self.cuts: dict[tuple[int, int], int] = {}
        self.held: dict[Stream, None] = {}
        self.unacknowledged: dict[Stream, None] = {}
        self.stalled: list[Stream] = []

    def delay(self, way: tuple[int, int]) -> float:
        if way[0] == way[1]:
            return 0.00005
        delays, random = self.delays, self._rng.random
        seconds = delays.min_s + delays.jitter_s * random()
        if random() < delays.slow_share:
            seconds += delays.slow_s * random()
        return seconds * self.slowness

    def is_open(self, source: Host, sink: Host) -> bool:
        return (source.index, sink.index) not in self.cuts

    def cut(self, way: tuple[int, int]) -> None:
        if way[0] != way[1]:
            self.cuts[way] = self.cuts.get(way, 0) + 1

    def heal(self, way: tuple[int, int]) -> None:
        left = self.cuts.get(way, 0) - 1
        if left > 0:
            self.cuts[way] = left
        elif left == 0:
            del self.cuts[way]
            self._resume(way)

    def heal_all(self) -> None:
        ways = list(self.cuts)
        self.cuts.clear()
        for way in ways:
            self._resume(way)

    def calm(self) -> None:
        """Heal all paths and remove all delays."""
        self.slowness = 1.0
        self.heal_all()
        for stream in self.stalled:
            stream.stalled_until = 0.0
            stream.flush()
        self.stalled.clear()

    def _resume(self, way: tuple[int, int]) -> None:
        """Send queued segments a little later: kernels retransmit at growing intervals."""
        for stream in [stream for stream in self.held if stream.way == way]:
            self.schedule.after(0.4 * self._rng.random(), stream.flush)
        back = (way[1], way[0])
        for stream in [stream for stream in self.unacknowledged if stream.way == back]:
            del self.unacknowledged[stream]
            if stream.sink.is_known:
                stream.acknowledge()

    def reset(self, end: End, by: Host) -> None:
        """Send a reset to an end of a connection. It is not retransmitted if lost."""
        if self.is_open(by, end.host):
            self.schedule.after(self.delay((by.index, end.host.index)), self._reset_arrives, end)

    def _reset_arrives(self, end: End) -> None:
        if end.is_known:
            end.is_open = False
            end.out.forget()
            end.owner.receive(end, RESET)

    # --- opening a connection -----------------------------------------------------------------------------------------

    def connect(self, agent: AgentProcess | Prober, endpoint: Host, attempt: int, port: int = 0) -> None:
        """Connect to the coordinator's port, or another.

        One of the agent's ``on_established``, ``on_refused`` and ``on_unanswered`` is called later.
        """
        timeout = agent.later(_CONNECT_TIMEOUT_S, agent.on_unanswered, attempt)
        if self.is_open(agent.host, endpoint):
            way = (agent.host.index, endpoint.index)
            self.schedule.after(self.delay(way), self._on_connect_request, agent, endpoint, attempt, port, timeout)

    def _on_connect_request(
        self, agent: AgentProcess | Prober, endpoint: Host, attempt: int, port: int, timeout: Any
    ) -> None:
        if not endpoint.is_up or not self.is_open(endpoint, agent.host):
            return
        back = self.delay((endpoint.index, agent.host.index))
        listener = endpoint.listeners.get(port) if port else endpoint.server
        if listener is None:
            self.schedule.after(back, self._finish_connect, agent, timeout, agent.on_refused, attempt)
            return
        theirs = End(endpoint, listener.agent, listener.on_payload)
        ours = End(agent.host, agent, agent.on_payload)  # type: ignore[arg-type]
        Stream(self, ours, theirs)
        Stream(self, theirs, ours)
        listener.accept(theirs)
        self.schedule.after(back, self._finish_connect, agent, timeout, agent.on_established, attempt, ours)

    @staticmethod
    def _finish_connect(
        agent: AgentProcess | Prober, timeout: Any, call: Callable[..., None], *arguments: object
    ) -> None:
        cancel(timeout)
        agent.do(call, *arguments)
