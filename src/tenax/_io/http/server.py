"""HttpServer: a thread that answers short HTTP requests, and that no client can block.

One thread serves all connections; it waits for a descriptor or for the next deadline. Each connection has a time limit,
a size limit and one request. At the maximum number of connections the server closes one without a request: the oldest
of the peer address that has the most of them. So idle connections of one peer do not displace other peers, and a
probe that sends its request at once is answered. Connecting and disconnecting without a request, as TCP probes do, is
not an error.

A response may be produced later (``DeferredResponse``) or have no end (``Stream``). Neither blocks the server, and both
have a maximum number below that of connections. A stream stays open as long as its client reads.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections import Counter
from weakref import WeakSet

import msgspec

from tenax._core.text import format_duration, format_seconds
from tenax._io.http import message as http
from tenax._io.http.request_reader import RequestReader
from tenax._io.interfaces import Watchable
from tenax._io.loop import Loop

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_READ_BYTES = 1 << 14
_MAX_DISCARDED = 1 << 18
_MAX_ACCEPTS = 64
_ACCEPT_PAUSE_S = 1.0  # after accept failed because the system is out of resources
_OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_STOP_S = 2.0  # a third-party handler may hang; the thread is a daemon
_HEARTBEAT = b":\n\n"  # a comment; it lets each side detect that the other is gone


class ClientLimits(msgspec.Struct, frozen=True):
    connections: int = 64
    request_s: float = 5.0  # from the connect to the end of the request
    response_s: float = 5.0  # from the response to the end of the connection
    threads_per_path: int = 8  # concurrent requests for one path that are answered in their own threads
    deferred: int = 32  # concurrent deferred responses
    streams: int = 24
    stream_bytes: int = 8 << 20  # unsent data of one stream
    heartbeat_s: float = 15.0  # the longest silence on a stream


class DeferredResponse:
    """Returned instead of a response. ``respond`` may be called from any thread; the first response counts.

    Without one the client gets an error response after ``within_s``.
    """

    def __init__(self, within_s: float) -> None:
        self.within_s = within_s
        self._lock = threading.Lock()
        self._response: http.Response | None = None
        self._deliver: Callable[[http.Response], None] | None = None

    def respond(self, response: http.Response) -> None:
        with self._lock:
            if self._response is not None:
                return
            self._response, deliver = response, self._deliver
        if deliver is not None:
            deliver(response)

    def deliver_to(self, deliver: Callable[[http.Response], None]) -> None:
        """Set the receiver, for the server. A response that was set before is delivered at once."""
        with self._lock:
            self._deliver, response = deliver, self._response
        if response is not None:
            deliver(response)


class Stream(msgspec.Struct, eq=False):
    """Returned instead of a response: one without an end, for pages that update themselves (server-sent events).

    Its methods are called in the server's thread. Data that the client does not read is buffered up to a limit; a
    client that stops reading is disconnected. ``on_end`` is called once, whichever side ends the stream.
    """

    on_end: Callable[[Stream], None] = lambda _: None
    headers: Mapping[str, str] = {}
    heartbeat: bytes = _HEARTBEAT
    _early: bytes = b""  # data from before ``open``
    _send: Callable[[bytes], None] | None = None
    _close: Callable[[], None] | None = None

    def send(self, data: bytes) -> None:
        """Send ``data``, buffered until the client reads it. Does nothing once the client is gone."""
        if self._send is None:
            self._early += data
        else:
            self._send(data)

    def end(self) -> None:
        """Close the connection and discard unsent data."""
        if self._close is not None:
            self._close()

    def open(self, send: Callable[[bytes], None], close: Callable[[], None]) -> None:
        """Attach the connection, for the server."""
        self._send, self._close = send, close
        if self._early:
            data, self._early = self._early, b""
            send(data)


def event(kind: str, data: bytes) -> bytes:
    """Return one server-sent event. ``data`` is one line."""
    return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


Answer = http.Response | DeferredResponse | Stream


class _Connection(msgspec.Struct, eq=False):
    """One client. ``advance`` is called when its socket is ready."""

    sock: socket.socket
    peer: str  # its address without the port; empty for a Unix socket
    until: float | None  # None: no deadline
    advance: Callable[[_Connection], None]
    reader: RequestReader | None = None  # None until the first byte arrives
    outgoing: bytearray = msgspec.field(default_factory=bytearray)
    has_request: bool = False
    sends_body: bool = True  # False after a HEAD request
    is_answered: bool = False  # the response is sent; input is discarded until the client closes
    discarded: int = 0  # bytes
    deferred: DeferredResponse | None = None  # the pending deferred response
    stream: Stream | None = None
    heartbeat_at: float = 0.0

    @property
    def is_attached(self) -> bool:
        """True while a deferred response or a stream is pending; the socket is read to notice a disconnect."""
        return self.deferred is not None or self.stream is not None

    def fileno(self) -> int:
        return self.sock.fileno()

    @property
    def wants_to_read(self) -> bool:
        return not self.outgoing and (not self.has_request or self.is_answered or self.is_attached)

    @property
    def wants_to_write(self) -> bool:
        return bool(self.outgoing)

    def on_readable(self) -> None:
        self.advance(self)

    def on_writable(self) -> None:
        self.advance(self)


class HttpServer(Watchable):
    """Serves between ``start`` and ``stop``, once. Takes over the listening socket.

    ``answer`` is called in the server's thread and should be fast; if ``in_thread`` returns True for a request, it is
    called in its own thread and must return a ``Response``. An exception becomes an error response. The number of
    threads is limited per path, so that a path that hangs does not block others; ``in_thread`` must therefore select
    from a bounded set of paths.
    """

    def __init__(
        self,
        listener: socket.socket,
        answer: Callable[[http.Request], Answer],
        *,
        name: str,
        limits: http.Limits = http.Limits(),  # noqa: B008 - frozen
        client_limits: ClientLimits = ClientLimits(),  # noqa: B008 - frozen
        in_thread: Callable[[http.Request], bool] = lambda _: False,
    ) -> None:
        self._listener = listener
        self._answer = answer
        self._in_thread = in_thread
        self._limits = limits
        self._client_limits = client_limits
        self._loop = Loop()
        self._now = self._loop.now
        self._connections: dict[_Connection, None] = {}  # the oldest first
        self._in_threads: list[tuple[str, float]] = []  # the path of each running thread, and when it was started
        self._is_accepting = True
        self._is_stopping = False
        listener.setblocking(False)
        self._loop.watch(self)
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        _servers.add(self)

    def start(self) -> None:
        self._thread.start()

    def soon(self, call: Callable[[], None]) -> None:
        """Schedule a call in the server's thread, from any thread. Calls scheduled before ``stop`` are still made."""
        self._loop.soon(call)

    def stop(self) -> None:
        """Stop the thread and wait for it, at most ``_STOP_S`` if a handler hangs."""
        self._is_stopping = True
        if self._thread.ident is None:
            self._close()
        else:
            self.soon(lambda: None)  # wakes the thread up
            self._thread.join(_STOP_S)

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while not self._is_stopping:
                self._loop.next_event(self._next_deadline)
                self._end_overdue()
            self._loop.run_calls()
        finally:
            self._close()

    def _next_deadline(self) -> float | None:
        if self._is_stopping:
            return 0.0
        moments = [each.until for each in self._connections if each.until is not None]
        moments += [each.heartbeat_at for each in self._connections if each.stream is not None]
        return min(moments, default=None)

    def fileno(self) -> int:
        return self._listener.fileno() if self._is_accepting else -1

    def on_readable(self) -> None:
        for _ in range(_MAX_ACCEPTS):
            try:
                sock, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _OUT_OF_RESOURCES:
                    self._make_room()
                    self._is_accepting = False
                    self._loop.at(self._now() + _ACCEPT_PAUSE_S, self._accept_again)
                    return
                continue  # the client has disconnected
            sock.setblocking(False)
            if len(self._connections) >= self._client_limits.connections:
                self._make_room()
            peer = str(address[0]) if isinstance(address, tuple) else ""
            connection = _Connection(sock, peer, self._now() + self._client_limits.request_s, self._advance)
            self._connections[connection] = None
            self._loop.watch(connection)
            self._advance(connection)  # the request may have arrived already; answer it before accepting more

    def _accept_again(self) -> None:
        self._is_accepting = True

    def _make_room(self) -> None:
        """Close the oldest connection without a request, of the peer that has the most of them."""
        waiting = [each for each in self._connections if not each.has_request or each.is_answered]
        candidates = waiting or list(self._connections)
        counts = Counter(each.peer for each in candidates)
        if candidates:
            self._end(max(candidates, key=lambda each: counts[each.peer]))  # the first of equals is the oldest

    def _advance(self, connection: _Connection) -> None:
        try:
            if connection.outgoing:
                self._send(connection)
            else:
                self._receive(connection)
        except BlockingIOError:
            pass
        except OSError:  # the client has disconnected
            self._end(connection)

    def _receive(self, connection: _Connection) -> None:
        data = connection.sock.recv(_READ_BYTES)
        if not data:
            self._end(connection)
            return
        if connection.is_answered or connection.is_attached:
            connection.discarded += len(data)
            if connection.discarded > _MAX_DISCARDED:
                self._end(connection)
            return
        if connection.reader is None:
            connection.reader = RequestReader(self._limits)
        found = connection.reader.feed(data)
        if found is None:
            return
        connection.has_request = True
        connection.sends_body = isinstance(found, http.Response) or found.method != "HEAD"
        if isinstance(found, http.Request) and self._in_thread(found):
            self._answer_in_thread(connection, found)
            return
        answer = self._call_answer(found) if isinstance(found, http.Request) else found
        if isinstance(answer, DeferredResponse):
            self._defer(connection, answer)
        elif isinstance(answer, Stream):
            self._open_stream(connection, answer)
        else:
            self._respond(connection, answer)

    def _defer(self, connection: _Connection, deferred: DeferredResponse) -> None:
        waiting = sum(each.deferred is not None for each in self._connections)
        if waiting >= self._client_limits.deferred:
            self._refuse(connection, f"too many pending requests ({waiting}); retry later")
            return
        connection.deferred = deferred
        connection.until = self._now() + deferred.within_s
        deferred.deliver_to(lambda response: self.soon(lambda: self._deliver(connection, response)))

    def _deliver(self, connection: _Connection, response: http.Response) -> None:
        if connection.deferred is not None and connection in self._connections:
            connection.deferred = None
            self._respond(connection, response)

    def _open_stream(self, connection: _Connection, stream: Stream) -> None:
        open_now = sum(each.stream is not None for each in self._connections)
        if open_now >= self._client_limits.streams:
            self._refuse(connection, f"too many open streams ({open_now}); close one and retry")
            stream.on_end(stream)
            return
        head = http.render_head(stream.headers)
        if not connection.sends_body:
            stream.on_end(stream)
            self._send_last(connection, head)
            return
        connection.stream, connection.until = stream, None
        self._send_on_stream(connection, head)
        stream.open(lambda data: self._send_on_stream(connection, data), lambda: self._end(connection))

    def _send_on_stream(self, connection: _Connection, data: bytes) -> None:
        if connection not in self._connections:
            return
        was_idle = not connection.outgoing
        connection.outgoing += data
        connection.heartbeat_at = self._now() + self._client_limits.heartbeat_s
        if len(connection.outgoing) > self._client_limits.stream_bytes:
            self._end(connection)
            return
        if was_idle:
            connection.until = self._now() + self._client_limits.response_s
            self._advance(connection)

    def _call_answer(self, request: http.Request) -> Answer:
        try:
            return self._answer(request)
        # Also SystemExit: exit() in a handler must not end the server, and the client waits for a response.
        except BaseException as error:
            return http.text(http.INTERNAL_ERROR, f"{type(error).__name__}: {error}".partition("\n")[0])

    def _answer_in_thread(self, connection: _Connection, request: http.Request) -> None:
        path, now = request.path, self._now()
        begun = [at for each, at in self._in_threads if each == path]
        if len(begun) >= self._client_limits.threads_per_path:
            oldest = format_duration(now - begun[0])
            message = f"{len(begun)} requests for {path} are unfinished, the oldest for {oldest}"
            self._refuse(connection, f"{message}; retry when one has ended")
            return

        def answer() -> None:
            made = self._call_answer(request)
            wrong = f"the handler of {path} runs in its own thread, so it must return a Response"
            response = made if isinstance(made, http.Response) else http.text(http.INTERNAL_ERROR, wrong)
            self.soon(lambda: finish(response))

        def finish(response: http.Response) -> None:
            thread.join()  # returns at once: the thread has nothing left to do
            self._in_threads.remove((path, now))
            if connection in self._connections:
                self._respond(connection, response)

        thread = threading.Thread(target=answer, name=f"{self._thread.name}: {path}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no more threads
            self._refuse(connection, f"could not start a thread for {path}: {error}")
            return
        self._in_threads.append((path, now))
        connection.until = None

    def _refuse(self, connection: _Connection, message: str) -> None:
        self._respond(connection, http.text(http.UNAVAILABLE, message))

    def _respond(self, connection: _Connection, response: http.Response) -> None:
        self._send_last(connection, http.render(response, with_body=connection.sends_body))

    def _send_last(self, connection: _Connection, data: bytes) -> None:
        connection.outgoing += data
        connection.until = self._now() + self._client_limits.response_s
        self._advance(connection)

    def _send(self, connection: _Connection) -> None:
        sent = connection.sock.send(connection.outgoing)
        del connection.outgoing[:sent]
        if connection.stream is not None:
            connection.until = self._now() + self._client_limits.response_s if connection.outgoing else None
        elif not connection.outgoing:
            # Do not close yet: the kernel answers further input with a reset, which may overtake the response.
            connection.sock.shutdown(socket.SHUT_WR)
            connection.is_answered = True

    def _end_overdue(self) -> None:
        now = self._now()
        for connection in list(self._connections):
            if connection.stream is not None and connection.heartbeat_at <= now:
                self._send_on_stream(connection, connection.stream.heartbeat)
            if connection.until is None or connection.until > now or connection not in self._connections:
                continue
            if connection.deferred is not None:
                message = f"no response within {format_seconds(connection.deferred.within_s)}; retry"
                self._deliver(connection, http.text(http.UNAVAILABLE, message))
            elif connection.has_request or connection.reader is None:
                self._end(connection)
            else:
                connection.has_request = True
                within = format_seconds(self._client_limits.request_s)
                self._respond(connection, http.text(http.TIMED_OUT, f"the request was not complete within {within}"))

    def _end(self, connection: _Connection) -> None:
        if connection in self._connections:
            del self._connections[connection]
            self._loop.unwatch(connection)
            connection.sock.close()
            if connection.stream is not None:
                connection.stream.on_end(connection.stream)

    def _close(self) -> None:
        if self in _servers:
            _servers.discard(self)
            for connection in self._connections:
                connection.sock.close()
            self._connections.clear()
            self._listener.close()
            self._loop.close()


_servers: WeakSet[HttpServer] = WeakSet()


def _close_copies() -> None:
    """Close the sockets in a forked process: it has no server thread and must not keep the port open."""
    for server in list(_servers):
        server._close()


os.register_at_fork(after_in_child=_close_copies)
