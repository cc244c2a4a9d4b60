"""StoreServer: a key-value store behind a listening socket, for clients that speak PyTorch's TCPStore protocol.

One thread, one loop over epoll. ``serve`` runs until ``stop``; everything else happens in its thread.

1. No client can block others: no call blocks on a peer, every buffer is bounded (``Limits``), a client that violates
   the protocol is disconnected, and the server stops reading from a client that does not read.
2. Peers are accepted or rejected when they connect (``_peers.py``).
3. Connections without a greeting, and those with a greeting but no request, are limited per address and evicted when
   descriptors run out. A connection that has sent a request is never evicted.
4. It never spins: when it is out of descriptors, or at the maximum number of connections, and can evict none, it stops
   accepting until there is room again.
5. It does no name lookups and writes to no stream. Faults are counted (``counters``) and reported to ``on_notice`` in
   one line, at most once in ``NOTICE_EVERY_S``.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import time
from contextlib import suppress

from tenax._core.admission import Admission
from tenax.store._key_values import KeyValues, Limits
from tenax.store._peers import CLOSED, PeerRules
from tenax.store._protocol import Session

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from tenax.store._server_thread import ServerThread

NOTICE_EVERY_S = 60.0
_READ_BYTES = 1 << 16
_MAX_ACCEPTS = 64  # in one round; then existing connections are served
_OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_ACCEPT_PAUSE_S = 0.25  # no event announces that other processes have closed descriptors
_GREETING_GRACE_S = 0.1  # after that a connection without a greeting may be evicted if there is no room
_NEVER = float("inf")
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
_IN, _OUT = select.POLLIN, select.POLLOUT
_USED, _SILENT, _IDLE = 0, 1, 2  # stages of a connection: it sent a request; no greeting yet; only the greeting


class Counters:
    """Event counts since the server was created."""

    def __init__(self) -> None:
        self.accepted = 0
        self.refused_peers = 0  # not a member of the run, by address or user
        self.evicted_silent = 0  # no greeting, and too many such connections
        self.evicted_idle = 0  # no request, and too many such connections
        self.no_greeting = 0  # a wrong greeting, or none in time
        self.refused_requests = 0  # malformed, or over a limit
        self.dropped_for_memory = 0  # the largest buffers when all buffers together were too large
        self.out_of_room = 0  # how often the server stopped accepting

    @property
    def faults(self) -> int:
        """How many connections the server closed."""
        return int(sum(vars(self).values())) - self.accepted - self.out_of_room

    def __repr__(self) -> str:
        return ", ".join(f"{name}={count}" for name, count in vars(self).items())


class _Connection(Session):
    __slots__ = ("descriptor", "group", "interest", "recv", "send", "sock", "stage", "unsent")

    def __init__(self, table: KeyValues, sock: socket.socket, group: str) -> None:
        super().__init__(table)
        self.sock = sock
        self.group = group  # of peers whose silent and idle connections are limited together
        self.stage = _SILENT
        self.descriptor = sock.fileno()  # -1 once closed
        self.recv = sock.recv
        self.send = sock.send
        self.interest = _IN
        self.unsent = bytearray()


class StoreServer:
    """A store server. Takes over the listener."""

    def __init__(
        self,
        listener: socket.socket,
        limits: Limits | None = None,
        *,
        peers: PeerRules | None = None,
        on_notice: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``peers``: which clients are served; by default this user and root on this host, and all other hosts.

        ``on_notice`` gets a line about connections that the server closed.
        """
        listener.setblocking(False)
        self.counters = Counters()
        self.table = KeyValues(limits or Limits())
        self._limits = self.table.limits
        self._peers = PeerRules() if peers is None else peers
        self._on_notice = on_notice
        self._clock = clock
        self._listener = listener
        self._is_listening = True
        self._is_timed = False  # a deadline may exist
        self._has_pending_accepts = False
        self._listen_again_at = 0.0  # 0: when a connection closes
        self._connections: dict[int, _Connection] = {}
        places = self._limits.connections
        self._silent: Admission[int] = Admission(places, min(self._limits.silent_per_address, places))
        self._idle: Admission[int] = Admission(places, min(self._limits.idle_per_address, places), from_middle=True)
        self._watched: dict[int, Callable[[], None]] = {}
        self._next_notice = 0.0
        self._reported_faults = 0
        self._is_stopped = False
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_writer, False)
        self._poller, self._poll = _make_poller()
        self._poller.register(listener.fileno(), _IN)
        self.watch(self._wake_reader, lambda: None)  # ``serve`` returns, so it stays readable
        _open_servers.add(self)

    @classmethod
    def in_thread(
        cls, host: str = "127.0.0.1", port: int = 0, limits: Limits | None = None, peers: PeerRules | None = None
    ) -> ServerThread:
        """Start a server in a daemon thread. Return a context manager with ``host`` and ``port``."""
        from tenax._io.listen import listen
        from tenax.store._server_thread import ServerThread

        listener = listen(host, port)
        return ServerThread(cls(listener, limits, peers=peers), host, listener.getsockname()[1])

    def watch(self, descriptor: int, on_readable: Callable[[], None]) -> None:
        """Watch another descriptor in this loop. Call it before ``serve``, or in its thread."""
        self._watched[descriptor] = on_readable
        self._poller.register(descriptor, _IN)

    def stop(self) -> None:
        """Make ``serve`` return. May be called from any thread, and repeatedly."""
        self._is_stopped = True
        if self._wake_writer >= 0:
            with suppress(BlockingIOError):  # full, so the loop wakes up anyway
                os.write(self._wake_writer, b"\0")

    def close(self) -> None:
        """Close the listener and reset all connections. Call it after ``serve``."""
        for connection in list(self._connections.values()):
            with suppress(OSError):  # the peer has closed it
                connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            self._drop(connection)
        self._close_descriptors()

    def _close_descriptors(self) -> None:
        """Close this process's descriptors without resetting connections."""
        _open_servers.discard(self)
        for connection in self._connections.values():
            connection.sock.close()
        self._listener.close()
        self._peers.close()
        if hasattr(self._poller, "close"):
            self._poller.close()
        if self._wake_reader >= 0:
            os.close(self._wake_reader)
            os.close(self._wake_writer)
            self._wake_reader = self._wake_writer = -1

    def serve(self) -> None:
        connections, woken = self._connections, self.table.woken
        poll, read_bytes = self._poll, _READ_BYTES
        while not self._is_stopped:
            for descriptor, events in poll(self._run_due() if self._is_timed else None):
                connection = connections.get(descriptor)
                if connection is None:
                    self._on_descriptor(descriptor)
                    continue
                if events & _OUT:
                    self._send_unsent(connection)
                    continue
                if not events & _IN:  # closed by the peer; its last requests would be readable
                    self._drop(connection)
                    continue
                try:
                    data = connection.recv(read_bytes)
                except BlockingIOError:
                    continue
                except OSError:
                    data = b""
                if not data:
                    self._drop(connection)
                    continue
                answer = connection.receive(data)
                if connection.stage:
                    self._advance(connection)
                if answer or connection.fault or connection.is_paused:
                    self._answer(connection, answer)
                if woken:
                    self._answer_woken()
            if self._has_pending_accepts:
                self._accept()
            if self.table.held_bytes > self._limits.held_bytes:
                self._drop_largest_holders()

    # --- connections --------------------------------------------------------------------------------------------------

    def _answer(self, connection: _Connection, answer: bytes) -> None:
        """Send the answer as far as possible and queue the rest. Close the connection if its session has a fault."""
        if connection.unsent:
            self._queue(connection, answer)
        elif answer:
            try:
                sent = connection.send(answer)
            except BlockingIOError:
                sent = 0
            except OSError:
                self._drop(connection)
                return
            if sent < len(answer):
                self._queue(connection, answer[sent:])
        if connection.fault:
            self._refuse(connection)
        elif connection.unsent or connection.is_paused:
            self._set_interest(connection)

    def _queue(self, connection: _Connection, more: bytes) -> None:
        connection.unsent += more
        self.table.held_bytes += len(more)

    def _answer_woken(self) -> None:
        woken = self.table.woken
        for connection in woken:
            assert isinstance(connection, _Connection)
            if connection.descriptor >= 0:
                self._answer(connection, connection.take())
        woken.clear()

    def _send_unsent(self, connection: _Connection) -> None:
        if connection.unsent:
            try:
                sent = connection.send(connection.unsent)
            except BlockingIOError:
                return
            except OSError:
                self._drop(connection)
                return
            del connection.unsent[:sent]
            self.table.held_bytes -= sent
            if connection.unsent:
                self._set_interest(connection)
                return
        self._answer(connection, connection.resume() if connection.is_paused else b"")
        if connection.descriptor >= 0:
            self._set_interest(connection)
        if self.table.woken:
            self._answer_woken()

    def _set_interest(self, connection: _Connection) -> None:
        unread = len(connection.unsent)
        interest = _OUT if unread or connection.is_paused else 0
        if unread <= self._limits.unread_bytes and not connection.is_paused:
            interest |= _IN
        if interest != connection.interest:
            connection.interest = interest
            self._poller.modify(connection.descriptor, interest)

    def _advance(self, connection: _Connection) -> None:
        """Update the stage after the greeting or the first request."""
        descriptor = connection.descriptor
        if connection.stage == _SILENT and connection.has_greeted:
            self._silent.release(descriptor)
            connection.stage = _IDLE
            if not connection.is_used:
                self._evict(self._idle.admit(descriptor, connection.group, self._clock()))
        if connection.stage == _IDLE and connection.is_used:
            self._idle.release(descriptor)
            connection.stage = _USED

    def _evict(self, descriptors: list[int]) -> None:
        """Close connections that make room for others."""
        for descriptor in descriptors:
            connection = self._connections[descriptor]
            if connection.stage == _SILENT:
                self.counters.evicted_silent += 1
                what = "had sent no greeting"
            else:
                self.counters.evicted_idle += 1
                what = "had sent no request"
            self._report_fault(f"too many connections of {connection.group} {what}")
            self._drop(connection)

    def _make_room(self) -> bool:
        """Evict a connection without a request, to accept another. Return False if there is none."""
        oldest = self._silent.oldest_since()
        is_late = oldest is not None and self._clock() - oldest > _GREETING_GRACE_S
        # That many were accepted over several rounds, and the input of the first was read in between.
        is_flood = len(self._silent) > 2 * _MAX_ACCEPTS
        evicted = (self._silent if is_late or is_flood else self._idle).evict_one()
        self._evict(evicted)
        return bool(evicted)

    def _refuse(self, connection: _Connection) -> None:
        if connection.has_greeted:
            self.counters.refused_requests += 1
        else:
            self.counters.no_greeting += 1
        self._report_fault(connection.fault)
        self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        if connection.descriptor < 0:
            return
        connection.close()
        if connection.stage:
            self._silent.release(connection.descriptor)
            self._idle.release(connection.descriptor)
        self.table.held_bytes -= len(connection.unsent)
        del self._connections[connection.descriptor]
        self._poller.unregister(connection.descriptor)
        connection.descriptor = -1
        connection.sock.close()
        if not self._is_listening and self._listen_again_at != _NEVER:
            self._listen()

    def _drop_largest_holders(self) -> None:
        while self.table.held_bytes > self._limits.held_bytes:
            largest = max(self._connections.values(), key=_held)
            self.counters.dropped_for_memory += 1
            fault = f"it held {_held(largest)} bytes of the server's memory"
            self._drop(largest)
        self._report_fault(fault)

    def _on_descriptor(self, descriptor: int) -> None:
        if descriptor == self._listener.fileno():
            # Accept after this round: a new connection may reuse a number that still has an event.
            self._has_pending_accepts = True
        elif descriptor in self._watched:
            self._watched[descriptor]()
        # else: a connection that was dropped in this round

    def _accept(self) -> None:
        self._has_pending_accepts = False
        for number in range(_MAX_ACCEPTS):
            if len(self._connections) >= self._limits.connections:
                if number:
                    return  # the next round accepts more
                if not self._make_room():
                    self._stop_listening(self._clock() + _ACCEPT_PAUSE_S if self._silent else 0.0)
                    return
            try:
                sock, address = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError, InterruptedError):
                return
            except OSError as error:
                if error.errno in _OUT_OF_RESOURCES:
                    if number:
                        return  # Linux reports it even if no connection is pending
                    if self._make_room():
                        continue
                    self._stop_listening(self._clock() + _ACCEPT_PAUSE_S)
                    return
                if error.errno == errno.EINVAL:  # another process with a copy of the listener has shut it down
                    self._stop_listening(_NEVER)
                    return
                continue  # a network error of the new connection, which Linux reports here
            group, why_not = self._peers.judge(sock, address)
            if why_not:
                self.counters.refused_peers += 1
                if why_not != CLOSED:  # the client has disconnected by itself
                    self._report_fault(why_not)
                sock.close()
                continue
            self._add_connection(sock, group)

    def _add_connection(self, sock: socket.socket, group: str) -> None:
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self._poller.register(sock.fileno(), _IN)
        except OSError:  # the client has disconnected, or no more descriptors can be polled
            sock.close()
            return
        connection = _Connection(self.table, sock, group)
        self._connections[connection.descriptor] = connection
        self.counters.accepted += 1
        self._is_timed = True
        self._evict(self._silent.admit(connection.descriptor, group, self._clock()))

    def _stop_listening(self, until: float) -> None:
        self._is_listening = False
        self._is_timed = True
        self._listen_again_at = until
        self._poller.unregister(self._listener.fileno())
        self.counters.out_of_room += 1

    def _listen(self) -> None:
        self._is_listening = True
        self._poller.register(self._listener.fileno(), _IN)

    def _run_due(self) -> float | None:
        """Handle what is due. Return the seconds until the next deadline."""
        now = self._clock()
        for descriptor in self._silent.expired(now, self._limits.handshake_s):
            connection = self._connections[descriptor]
            connection.fault = "it sent no greeting in time"
            self._refuse(connection)
        if not self._is_listening and self._listen_again_at and now >= self._listen_again_at:
            self._listen()
        since = self._silent.oldest_since()
        due = [] if since is None else [since + self._limits.handshake_s]
        if not self._is_listening and 0 < self._listen_again_at < _NEVER:
            due.append(self._listen_again_at)
        self._is_timed = bool(due)
        return max(0.0, min(due) - now) if due else None

    def _report_fault(self, last: str) -> None:
        """Report the faults since the last report, at most once in ``NOTICE_EVERY_S``."""
        if self._on_notice is None:
            return
        now = self._clock()
        if now >= self._next_notice:
            self._next_notice = now + NOTICE_EVERY_S
            count = self.counters.faults - self._reported_faults
            self._reported_faults += count
            connections = "one connection" if count == 1 else f"{count} connections"
            self._on_notice(f"the workers' store closed {connections}, the last because {last}")


_open_servers: set[StoreServer] = set()


def _close_copies() -> None:
    """Close the parent's ports and connections in a forked process."""
    for server in list(_open_servers):
        server._close_descriptors()


os.register_at_fork(after_in_child=_close_copies)


def _held(connection: _Connection) -> int:
    return connection.held_bytes + len(connection.unsent)


def _make_poller() -> tuple[Any, Callable[[float | None], list[tuple[int, int]]]]:
    """Return an epoll object, or poll where epoll is missing, and its wait function with a timeout in seconds."""
    if hasattr(select, "epoll"):
        epoll = select.epoll()
        return epoll, epoll.poll
    poll = select.poll()
    return poll, lambda timeout: poll.poll(None if timeout is None else timeout * 1000)
