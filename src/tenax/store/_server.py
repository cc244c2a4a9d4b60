"""StoreServer: a key-value store behind a listening socket, for clients that speak PyTorch's TCPStore protocol.

One thread, one loop over epoll. ``serve`` runs until ``stop``; everything else happens in its thread.

1. Nobody can stop the others: no call blocks on a peer, every buffer is bounded (``Limits``), whoever sends what is not
   the protocol loses its connection, and whoever does not read is not read either.
2. Who may connect is decided when a connection is accepted (``peers.py``).
3. Connections that have not greeted, and those that greeted and sent no request, are limited per address and evicted
   when descriptors run out. A connection that has sent a request is never evicted.
4. It never spins: without descriptors, or with as many connections as are allowed, and none of them to evict, it stops
   listening until there is room again.
5. It asks nobody for anything: peers are numbers, never names, and nothing is written to a stream. What was wrong is
   counted (``counters``), and told in one line, at most once in ``NOTICE_EVERY_S``, to whoever asked for it.
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
from tenax.store._key_values import KeyValues
from tenax.store._limits import Limits
from tenax.store._peers import CLOSED, PeerRules
from tenax.store._protocol import Session

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from tenax.store._server_thread import ServerThread

NOTICE_EVERY_S = 60.0
_READ_BYTES = 1 << 16
_ACCEPTS_AT_ONCE = 64  # then those who are connected have their turn
_OUT_OF_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_NO_ROOM_PAUSE_S = 0.25  # others may have given descriptors back, which nobody tells us
_GREETING_GRACE_S = 0.1  # a connection that has not greeted for so long may be evicted when there is no room
_NEVER = float("inf")
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
_IN, _OUT = select.POLLIN, select.POLLOUT
_USED, _SILENT, _IDLE = 0, 1, 2  # stages of a connection: it has sent a request; has not greeted; has only greeted


class Counters:
    """What happened, since the server was made."""

    __slots__ = (
        "accepted",
        "dropped_for_memory",
        "evicted_idle",
        "evicted_silent",
        "out_of_room",
        "refused_peers",
        "refused_requests",
        "strangers",
    )

    def __init__(self) -> None:
        self.accepted = 0
        self.refused_peers = 0  # not a member of the run, by address or user
        self.evicted_silent = 0  # had not greeted when there were too many like it
        self.evicted_idle = 0  # had greeted and sent no request when there were too many like it
        self.strangers = 0  # did not greet, or not in time
        self.refused_requests = 0  # malformed, or over a limit
        self.dropped_for_memory = 0  # had most in buffers when all of them together were too much
        self.out_of_room = 0  # times we had to stop listening

    def __repr__(self) -> str:
        return ", ".join(f"{name}={getattr(self, name)}" for name in self.__slots__)


class _Connection(Session):
    __slots__ = ("descriptor", "group", "interest", "recv", "send", "sent", "sock", "stage", "unsent")

    def __init__(self, table: KeyValues, sock: socket.socket, group: str) -> None:
        super().__init__(table)
        self.sock = sock
        self.group = group  # of peers, whose silent and idle connections are limited together
        self.stage = _SILENT
        self.descriptor = sock.fileno()  # -1 when it is closed
        self.recv = sock.recv
        self.send = sock.send
        self.interest = _IN
        self.unsent = b""
        self.sent = 0  # of the unsent


class StoreServer:
    """Owns the listener from now on."""

    def __init__(
        self,
        listener: socket.socket,
        limits: Limits | None = None,
        *,
        peers: PeerRules | None = None,
        on_notice: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``peers``: who is served; by default this user and root on this host, and every other host.

        ``on_notice`` gets a line about connections that were closed.
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
        self._is_timed = False  # something may be due at some time
        self._has_callers = False
        self._listen_again_at = 0.0  # 0: when a connection is closed
        self._connections: dict[int, _Connection] = {}
        limits = self._limits
        self._silent: Admission[int] = Admission(limits.connections, min(limits.silent_per_address, limits.connections))
        self._idle: Admission[int] = Admission(
            limits.connections, min(limits.idle_per_address, limits.connections), from_middle=True
        )
        self._watched: dict[int, Callable[[], None]] = {}
        self._last_fault = ""
        self._next_notice = 0.0
        self._told_faults = 0
        self._is_stopped = False
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_writer, False)
        self._poller, self._poll = _make_poller()
        self._poller.register(listener.fileno(), _IN)
        self.watch(self._wake_reader, self._on_wake)
        _open_servers.add(self)

    @classmethod
    def in_thread(
        cls, host: str = "127.0.0.1", port: int = 0, limits: Limits | None = None, peers: PeerRules | None = None
    ) -> ServerThread:
        """A server in a daemon thread of its own, as a context manager with ``host`` and ``port``."""
        from tenax._io.listen import listen
        from tenax.store._server_thread import ServerThread

        listener = listen(host, port)
        return ServerThread(cls(listener, limits, peers=peers), host, listener.getsockname()[1])

    def watch(self, descriptor: int, on_readable: Callable[[], None]) -> None:
        """Serve one more descriptor in this loop. Before ``serve``, or in its thread."""
        self._watched[descriptor] = on_readable
        self._poller.register(descriptor, _IN)

    def stop(self) -> None:
        """Make ``serve`` return. From any thread, and more than once."""
        self._is_stopped = True
        if self._wake_writer >= 0:
            with suppress(BlockingIOError):  # there is a wake-up in it already
                os.write(self._wake_writer, b"\0")

    def close(self) -> None:
        """Close the listener and all connections at once: who was connected sees a reset. After ``serve``."""
        for connection in list(self._connections.values()):
            with suppress(OSError):  # it is closed already, from the other side
                connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            self._drop(connection)
        self._close_descriptors()

    def _close_descriptors(self) -> None:
        """Close what we hold, and do nothing to what it stands for."""
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
            for descriptor, events in poll(self._keep_time() if self._is_timed else None):
                connection = connections.get(descriptor)
                if connection is None:
                    self._on_other(descriptor)
                    continue
                if events & ~_IN:
                    self._on_unusual(connection, events)
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
            if self._has_callers:
                self._accept()
            if self.table.held_bytes > self._limits.held_bytes:
                self._drop_whoever_holds_most()

    # --- connections --------------------------------------------------------------------------------------------------

    def _answer(self, connection: _Connection, answer: bytes) -> None:
        """Send at once what the peer takes, keep the rest; close the connection if its session says so."""
        if connection.unsent:
            self._keep(connection, answer)
        elif answer:
            try:
                sent = connection.send(answer)
            except BlockingIOError:
                sent = 0
            except OSError:
                self._drop(connection)
                return
            if sent < len(answer):
                self._keep(connection, answer[sent:])
        if connection.fault:
            self._refuse(connection)
        elif connection.unsent or connection.is_paused:
            self._set_interest(connection)

    def _keep(self, connection: _Connection, more: bytes) -> None:
        connection.unsent = connection.unsent[connection.sent :] + more
        connection.sent = 0
        self.table.held_bytes += len(more)

    def _answer_woken(self) -> None:
        woken = self.table.woken
        for connection in woken:
            assert isinstance(connection, _Connection)
            if connection.descriptor >= 0:
                self._answer(connection, connection.take())
        woken.clear()

    def _on_unusual(self, connection: _Connection, events: int) -> None:
        """It can take more, or it is gone."""
        if events & _OUT:
            self._send_kept(connection)
        elif events & _IN:  # gone, but its last requests may be there
            self._on_last_words(connection)
        else:
            self._drop(connection)

    def _send_kept(self, connection: _Connection) -> None:
        if connection.unsent:
            try:
                sent = connection.send(memoryview(connection.unsent)[connection.sent :])
            except BlockingIOError:
                return
            except OSError:
                self._drop(connection)
                return
            connection.sent += sent
            self.table.held_bytes -= sent
            if connection.sent < len(connection.unsent):
                self._set_interest(connection)
                return
            connection.unsent = b""
            connection.sent = 0
        answer = b""
        if connection.is_paused:
            answer = connection.resume()
        self._answer(connection, answer)
        if connection.descriptor >= 0:
            self._set_interest(connection)
        if self.table.woken:
            self._answer_woken()

    def _on_last_words(self, connection: _Connection) -> None:
        """The peer has reset or half-closed its side. What it asked before still has its effect."""
        try:
            data = connection.recv(_READ_BYTES)
        except OSError:
            data = b""
        if not data:
            self._drop(connection)
            return
        answer = connection.receive(data)
        self._advance(connection)
        self._answer(connection, answer)
        if self.table.woken:
            self._answer_woken()

    def _set_interest(self, connection: _Connection) -> None:
        unread = len(connection.unsent) - connection.sent
        interest = _OUT if unread or connection.is_paused else 0
        if unread <= self._limits.unread_bytes and not connection.is_paused:
            interest |= _IN
        if interest != connection.interest:
            connection.interest = interest
            self._poller.modify(connection.descriptor, interest)

    def _advance(self, connection: _Connection) -> None:
        """Note that the peer has greeted, or sent its first request."""
        descriptor = connection.descriptor
        if connection.stage == _SILENT and connection.is_known:
            self._silent.release(descriptor)
            connection.stage = _IDLE
            if not connection.is_used:
                self._evict(self._idle.admit(descriptor, connection.group, self._clock()))
        if connection.stage == _IDLE and connection.is_used:
            self._idle.release(descriptor)
            connection.stage = _USED

    def _evict(self, descriptors: list[int]) -> None:
        """Close connections that have lost their places to others."""
        for descriptor in descriptors:
            connection = self._connections[descriptor]
            if connection.stage == _SILENT:
                self.counters.evicted_silent += 1
                what = "had not greeted"
            else:
                self.counters.evicted_idle += 1
                what = "had greeted and sent no request"
            self._last_fault = f"too many connections of {connection.group} {what}"
            self._give_notice()
            self._drop(connection)

    def _make_room(self) -> bool:
        """Close a connection that has sent no request, for another to be accepted. Return False if there is none."""
        oldest = self._silent.oldest_since()
        is_late = oldest is not None and self._clock() - oldest > _GREETING_GRACE_S
        # So many have been accepted in several rounds, and what the first of them had sent was read in between.
        is_flood = len(self._silent) > 2 * _ACCEPTS_AT_ONCE
        evicted = (self._silent if is_late or is_flood else self._idle).evict_one()
        self._evict(evicted)
        return bool(evicted)

    def _refuse(self, connection: _Connection) -> None:
        if connection.is_known:
            self.counters.refused_requests += 1
        else:
            self.counters.strangers += 1
        self._last_fault = connection.fault
        self._give_notice()
        self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        if connection.descriptor < 0:
            return
        connection.close()
        if connection.stage:
            self._silent.release(connection.descriptor)
            self._idle.release(connection.descriptor)
        self.table.held_bytes -= len(connection.unsent) - connection.sent
        del self._connections[connection.descriptor]
        self._poller.unregister(connection.descriptor)
        connection.descriptor = -1
        connection.sock.close()
        if not self._is_listening and self._listen_again_at != _NEVER:
            self._listen()

    def _drop_whoever_holds_most(self) -> None:
        while self.table.held_bytes > self._limits.held_bytes:
            most = max(self._connections.values(), key=_held)
            self.counters.dropped_for_memory += 1
            self._last_fault = f"it made us keep {_held(most)} bytes"
            self._drop(most)
        self._give_notice()

    # --- everything else ----------------------------------------------------------------------------------------------

    def _on_other(self, descriptor: int) -> None:
        if descriptor == self._listener.fileno():
            self._has_callers = True  # later: a new one may get the number of one that has an event in this round
        elif descriptor in self._watched:
            self._watched[descriptor]()
        # else: a connection that was dropped in this very round

    def _on_wake(self) -> None:
        os.read(self._wake_reader, 4096)

    def _accept(self) -> None:
        self._has_callers = False
        for number in range(_ACCEPTS_AT_ONCE):
            if len(self._connections) >= self._limits.connections:
                if number:
                    return  # if there is another caller, the next round knows
                if not self._make_room():
                    self._stop_listening(self._clock() + _NO_ROOM_PAUSE_S if self._silent else 0.0)
                    return
            try:
                sock, address = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError, InterruptedError):
                return
            except OSError as error:
                if error.errno in _OUT_OF_ROOM:
                    if number:
                        return  # Linux says so even if there is no other caller
                    if self._make_room():
                        continue
                    self._stop_listening(self._clock() + _NO_ROOM_PAUSE_S)
                    return
                if error.errno == errno.EINVAL:  # somebody who holds it too has shut it down
                    self._stop_listening(_NEVER)
                    return
                continue  # a network error of that one connection, which Linux tells here
            group, why_not = self._peers.judge(sock, address)
            if why_not:
                self.counters.refused_peers += 1
                if why_not != CLOSED:  # nobody waits for that one
                    self._last_fault = why_not
                    self._give_notice()
                sock.close()
                continue
            self._take_in(sock, group)

    def _take_in(self, sock: socket.socket, group: str) -> None:
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self._poller.register(sock.fileno(), _IN)
        except OSError:  # it is gone already, or the system lets us watch no more
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

    def _keep_time(self) -> float | None:
        """Do what is due; returns the seconds until something is."""
        now = self._clock()
        for descriptor in self._silent.expired(now, self._limits.handshake_s):
            connection = self._connections[descriptor]
            connection.fault = "it did not greet in time"
            self._refuse(connection)
        if not self._is_listening and self._listen_again_at and now >= self._listen_again_at:
            self._listen()
        since = self._silent.oldest_since()
        due = [] if since is None else [since + self._limits.handshake_s]
        if not self._is_listening and 0 < self._listen_again_at < _NEVER:
            due.append(self._listen_again_at)
        self._is_timed = bool(due)
        return max(0.0, min(due) - now) if due else None

    def _give_notice(self) -> None:
        """One line for whoever wants to know, now and then."""
        if self._on_notice is None:
            return
        now = self._clock()
        if now >= self._next_notice:
            self._next_notice = now + NOTICE_EVERY_S
            counters = self.counters
            count = (
                counters.strangers
                + counters.refused_peers
                + counters.refused_requests
                + counters.dropped_for_memory
                + counters.evicted_silent
                + counters.evicted_idle
                - self._told_faults
            )
            self._told_faults += count
            connections = "one connection" if count == 1 else f"{count} connections"
            self._on_notice(f"the workers' store closed {connections}, the last because {self._last_fault}")


_open_servers: set[StoreServer] = set()


def _close_copies() -> None:
    """A forked process does not keep its parent's ports and connections open."""
    for server in list(_open_servers):
        server._close_descriptors()


os.register_at_fork(after_in_child=_close_copies)


def _held(connection: _Connection) -> int:
    return connection.held_bytes + len(connection.unsent) - connection.sent


def _make_poller() -> tuple[Any, Callable[[float | None], list[tuple[int, int]]]]:
    """epoll, or poll where there is none, and how to wait with it for so many seconds."""
    if hasattr(select, "epoll"):
        epoll = select.epoll()
        return epoll, epoll.poll
    poll = select.poll()
    return poll, lambda timeout: poll.poll(None if timeout is None else timeout * 1000)
