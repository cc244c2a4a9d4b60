"""HttpServer: a thread that answers short HTTP requests, and that no client can block.

One thread serves all connections; it waits for a descriptor or for the next deadline. Each connection has a time limit,
a size limit and one request. At the maximum number of connections the server closes one without a request: the oldest
of the peer address that has the most of them. So idle connections of one peer do not displace other peers, and a
probe that sends its request at once is answered. Connecting and disconnecting without a request, as TCP probes do, is
not an error.

A response may be produced later (``DeferredResponse``) or have no end (``Stream``). Both have a maximum number below
that of connections. A stream stays open as long as its client reads.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import threading
import time
from collections import Counter, deque
from contextlib import suppress
from weakref import WeakSet

import msgspec

from tenax._core.text import format_duration, format_seconds
from tenax._io.http.message import (
    INTERNAL_ERROR,
    TIMED_OUT,
    UNAVAILABLE,
    Limits,
    Request,
    Response,
    render,
    render_head,
    text,
)
from tenax._io.http.pending import DeferredResponse, Stream
from tenax._io.http.request_reader import RequestReader

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    Answer = Response | DeferredResponse | Stream

_READ_BYTES = 1 << 14
_MAX_DISCARDED = 1 << 18
_MAX_ACCEPTS = 64
_ACCEPT_PAUSE_S = 1.0  # after accept failed because the system is out of resources
_OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_STOP_S = 2.0  # a third-party handler may hang; the thread is a daemon


class ClientLimits(msgspec.Struct, frozen=True):
    """The limits for clients."""

    connections: int = 64
    request_s: float = 5.0  # from the connect to the end of the request
    response_s: float = 5.0  # from the response to the end of the connection
    threads_per_path: int = 8  # concurrent requests for one path that are answered in their own threads
    deferred: int = 32  # concurrent deferred responses
    streams: int = 24
    stream_bytes: int = 8 << 20  # unsent data of one stream
    heartbeat_s: float = 15.0  # the longest silence on a stream


class _Connection(msgspec.Struct, eq=False):
    sock: socket.socket
    peer: str  # its address without the port; empty for a Unix socket
    until: float | None  # None: no deadline
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

    @property
    def interest(self) -> int:
        if self.outgoing:
            return selectors.EVENT_WRITE
        return 0 if self.has_request and not self.is_answered and not self.is_attached else selectors.EVENT_READ


class HttpServer:
    """Serves between ``start`` and ``stop``, once. Takes over the listening socket.

    ``answer`` is called in the server's thread and should be fast; if ``in_thread`` returns True for a request, it is
    called in its own thread and must return a ``Response``. An exception becomes an error response. The number of
    threads is limited per path, so that a path that hangs does not block others; ``in_thread`` must therefore select
    from a bounded set of paths.
    """

    def __init__(
        self,
        listener: socket.socket,
        answer: Callable[[Request], Answer],
        *,
        name: str,
        limits: Limits = Limits(),  # noqa: B008 - frozen
        client_limits: ClientLimits = ClientLimits(),  # noqa: B008 - frozen
        in_thread: Callable[[Request], bool] = lambda _: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._listener = listener
        self._answer = answer
        self._in_thread = in_thread
        self._limits = limits
        self._client_limits = client_limits
        self._now = clock
        self._selector = selectors.PollSelector()
        self._connections: dict[int, _Connection] = {}  # by descriptor, oldest first
        self._finished: deque[tuple[_Connection, str, float, Response, threading.Thread]] = deque()  # from threads
        self._in_threads: dict[str, list[float]] = {}  # by path: the start times of running threads
        self._calls: deque[Callable[[], None]] = deque()
        self._accept_again_at: float | None = None
        self._is_stopping = False
        # Not a pipe: a thread that finishes late must not write to a descriptor number that has been reused.
        self._wake_reader, self._wake_writer = socket.socketpair()
        for each in (self._wake_reader, self._wake_writer, listener):
            each.setblocking(False)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._selector.register(listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        _servers.add(self)

    @property
    def thread(self) -> threading.Thread:
        return self._thread

    def start(self) -> None:
        self._thread.start()

    def soon(self, call: Callable[[], None]) -> None:
        """Schedule a call in the server's thread, from any thread. Calls scheduled before ``stop`` are still made."""
        self._calls.append(call)
        self._wake()

    def stop(self) -> None:
        """Stop the thread and wait for it, at most ``_STOP_S`` if a handler hangs."""
        self._is_stopping = True
        if self._thread.ident is None:
            self._close()
        elif self._thread.is_alive():
            self._wake()
            self._thread.join(_STOP_S)

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while not self._is_stopping:
                ready = self._selector.select(self._seconds_to_wait())
                for key, _ in ready:
                    self._handle_ready(key.fd)
                self._run_calls()
                self._send_finished()
                self._end_overdue()
            self._run_calls()
        finally:
            self._close()

    def _run_calls(self) -> None:
        while self._calls:
            self._calls.popleft()()

    def _seconds_to_wait(self) -> float | None:
        moments = [each.until for each in self._connections.values() if each.until is not None]
        moments += [each.heartbeat_at for each in self._connections.values() if each.stream is not None]
        if self._accept_again_at is not None:
            moments.append(self._accept_again_at)
        return max(0.0, min(moments) - self._now()) if moments else None

    def _handle_ready(self, descriptor: int) -> None:
        if descriptor == self._wake_reader.fileno():
            with suppress(BlockingIOError):
                self._wake_reader.recv(_READ_BYTES)
        elif descriptor == self._listener.fileno():
            self._accept()
        elif descriptor in self._connections:
            self._advance(self._connections[descriptor])

    def _accept(self) -> None:
        for _ in range(_MAX_ACCEPTS):
            try:
                sock, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _OUT_OF_RESOURCES:
                    self._make_room()
                    self._accept_again_at = self._now() + _ACCEPT_PAUSE_S
                    self._selector.unregister(self._listener)
                    return
                continue  # the client has disconnected
            sock.setblocking(False)
            if len(self._connections) >= self._client_limits.connections:
                self._make_room()
            peer = str(address[0]) if isinstance(address, tuple) else ""
            connection = _Connection(sock, peer, self._now() + self._client_limits.request_s)
            self._connections[sock.fileno()] = connection
            self._selector.register(sock, selectors.EVENT_READ)
            self._advance(connection)  # the request may have arrived already; answer it before accepting more

    def _make_room(self) -> None:
        """Close the oldest connection without a request, of the peer that has the most of them."""
        waiting = [each for each in self._connections.values() if not each.has_request or each.is_answered]
        candidates = waiting or list(self._connections.values())
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
            return
        if connection.sock.fileno() in self._connections:
            self._update_interest(connection)

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
        connection.sends_body = isinstance(found, Response) or found.method != "HEAD"
        if isinstance(found, Response):
            self._respond(connection, found)
        elif self._in_thread(found):
            self._answer_in_thread(connection, found)
        else:
            self._start_answer(connection, self._call_answer(found))

    def _start_answer(self, connection: _Connection, answer: Answer) -> None:
        if isinstance(answer, DeferredResponse):
            self._defer(connection, answer)
        elif isinstance(answer, Stream):
            self._open_stream(connection, answer)
        else:
            self._respond(connection, answer)

    def _defer(self, connection: _Connection, deferred: DeferredResponse) -> None:
        waiting = sum(each.deferred is not None for each in self._connections.values())
        if waiting >= self._client_limits.deferred:
            message = f"too many pending requests ({waiting}); retry later"
            self._respond(connection, text(UNAVAILABLE, message))
            return
        connection.deferred = deferred
        connection.until = self._now() + deferred.within_s
        deferred.deliver_to(lambda response: self.soon(lambda: self._deliver(connection, response)))

    def _deliver(self, connection: _Connection, response: Response) -> None:
        if connection.deferred is None or connection.sock.fileno() not in self._connections:
            return
        connection.deferred = None
        try:
            self._respond(connection, response)
            self._update_interest(connection)
        except OSError:  # the client has disconnected
            self._end(connection)

    def _open_stream(self, connection: _Connection, stream: Stream) -> None:
        open_now = sum(each.stream is not None for each in self._connections.values())
        if open_now >= self._client_limits.streams:
            message = f"too many open streams ({open_now}); close one and retry"
            self._respond(connection, text(UNAVAILABLE, message))
            stream.on_end(stream)
            return
        head = render_head(stream.headers)
        if not connection.sends_body:
            stream.on_end(stream)
            self._send_last(connection, head)
            return
        connection.stream, connection.until = stream, None
        self._send_on_stream(connection, head)
        stream.open(lambda data: self._send_on_stream(connection, data), lambda: self._end(connection))

    def _send_on_stream(self, connection: _Connection, data: bytes) -> None:
        if connection.sock.fileno() not in self._connections:
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

    def _call_answer(self, request: Request) -> Answer:
        try:
            return self._answer(request)
        # Also SystemExit: exit() in a handler must not end the server, and the client waits for a response.
        except BaseException as error:
            return text(INTERNAL_ERROR, f"{type(error).__name__}: {error}".partition("\n")[0])

    def _answer_in_thread(self, connection: _Connection, request: Request) -> None:
        path, now = request.path, self._now()
        begun = self._in_threads.get(path, [])
        if len(begun) >= self._client_limits.threads_per_path:
            oldest = format_duration(now - begun[0])
            message = f"{len(begun)} requests for {path} are unfinished, the oldest for {oldest}"
            self._respond(connection, text(UNAVAILABLE, f"{message}; retry when one has ended"))
            return

        def answer() -> None:
            made = self._call_answer(request)
            if not isinstance(made, Response):
                made = text(
                    INTERNAL_ERROR, f"the handler of {path} runs in its own thread, so it must return a Response"
                )
            self._finished.append((connection, path, now, made, threading.current_thread()))
            self._wake()

        try:
            threading.Thread(target=answer, name=f"{self._thread.name}: {path}", daemon=True).start()
        except RuntimeError as error:  # no more threads
            self._respond(connection, text(UNAVAILABLE, f"could not start a thread for {path}: {error}"))
            return
        self._in_threads.setdefault(path, []).append(now)
        connection.until = None

    def _send_finished(self) -> None:
        while self._finished:
            connection, path, begun_at, response, thread = self._finished.popleft()
            thread.join()  # returns at once: the thread has nothing left to do
            self._in_threads[path].remove(begun_at)
            if not self._in_threads[path]:
                del self._in_threads[path]
            if connection.sock.fileno() not in self._connections:
                continue
            try:
                self._respond(connection, response)
            except OSError:  # the client has disconnected
                self._end(connection)
            else:
                self._advance(connection)

    def _respond(self, connection: _Connection, response: Response) -> None:
        self._send_last(connection, render(response, with_body=connection.sends_body))

    def _send_last(self, connection: _Connection, data: bytes) -> None:
        connection.outgoing += data
        connection.until = self._now() + self._client_limits.response_s
        with suppress(BlockingIOError):
            self._send(connection)

    def _send(self, connection: _Connection) -> None:
        sent = connection.sock.send(connection.outgoing)
        del connection.outgoing[:sent]
        if connection.stream is not None:
            connection.until = self._now() + self._client_limits.response_s if connection.outgoing else None
        elif not connection.outgoing:
            # Do not close yet: the kernel answers further input with a reset, which may overtake the response.
            connection.sock.shutdown(socket.SHUT_WR)
            connection.is_answered = True

    def _update_interest(self, connection: _Connection) -> None:
        descriptor, interest = connection.sock.fileno(), connection.interest
        is_registered = descriptor in self._selector.get_map()
        if interest and not is_registered:
            self._selector.register(descriptor, interest)
        elif interest:
            self._selector.modify(descriptor, interest)
        elif is_registered:
            self._selector.unregister(descriptor)

    def _end_overdue(self) -> None:
        now = self._now()
        if self._accept_again_at is not None and self._accept_again_at <= now:
            self._accept_again_at = None
            self._selector.register(self._listener, selectors.EVENT_READ)
        for connection in [each for each in self._connections.values() if each.stream is not None]:
            if connection.heartbeat_at <= now and connection.stream is not None:
                self._send_on_stream(connection, connection.stream.heartbeat)
        for connection in [each for each in self._connections.values() if each.until is not None and each.until <= now]:
            if connection.deferred is not None:
                message = f"no response within {format_seconds(connection.deferred.within_s)}; retry"
                self._deliver(connection, text(UNAVAILABLE, message))
                continue
            if connection.has_request or connection.reader is None:
                self._end(connection)
                continue
            connection.has_request = True
            within = format_seconds(self._client_limits.request_s)
            response = text(TIMED_OUT, f"the request was not complete within {within}")
            try:
                self._respond(connection, response)
                self._update_interest(connection)
            except OSError:
                self._end(connection)

    def _end(self, connection: _Connection) -> None:
        descriptor = connection.sock.fileno()
        if self._connections.pop(descriptor, None) is not None:
            if descriptor in self._selector.get_map():
                self._selector.unregister(descriptor)
            connection.sock.close()
            if connection.stream is not None:
                connection.stream.on_end(connection.stream)

    def _wake(self) -> None:
        with suppress(OSError):  # full: the thread wakes up anyway; closed: the thread is gone
            self._wake_writer.send(b"\0")

    def _close(self) -> None:
        if self in _servers:
            _servers.discard(self)
            for connection in self._connections.values():
                connection.sock.close()
            self._connections.clear()
            self._listener.close()
            self._selector.close()
            self._wake_reader.close()
            self._wake_writer.close()


_servers: WeakSet[HttpServer] = WeakSet()


def _close_copies() -> None:
    """Close the sockets in a forked process: it has no server thread and must not keep the port open."""
    for server in list(_servers):
        server._close()


os.register_at_fork(after_in_child=_close_copies)
