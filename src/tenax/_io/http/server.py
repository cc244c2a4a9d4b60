"""HttpServer: a thread that answers short HTTP requests at a socket, and that no client can hold up.

One thread for all connections; it waits for a descriptor or for the next deadline. Every connection has a bounded
time, a bounded size and one request. When there are too many, one without a request is closed: the oldest of the
address that has the most of them, so that silent connections of one peer do not push out those of others, and a probe
that connects and asks at once is answered. A client that only connects and leaves, as a TCP probe does, is no error.

An answer may be one that is found out meanwhile (``Later``), or one without an end (``Stream``). There are only so many
of each, fewer than there are connections; and a stream lives for as long as its client takes what is said.
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

from tenax._io.http.deferred import Later
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
from tenax._io.http.request_reader import RequestReader
from tenax._io.http.stream import Stream

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    Answer = Response | Later | Stream

_CHUNK = 1 << 14
_MAX_THROWN_AWAY = 1 << 18
_ACCEPT_AT_ONCE = 64
_DEAF_S = 1.0  # after the system had no descriptor left for one more connection
_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_JOIN_S = 2.0  # an answer of somebody else's making may hang; the thread is a daemon


class Patience(msgspec.Struct, frozen=True):
    """How much of this server its clients may have."""

    connections: int = 64
    ask_s: float = 5.0  # from connecting to the end of the request
    take_s: float = 5.0  # from the answer to the end of the connection
    apart: int = 8  # answers for one path that are being made in threads of their own
    later: int = 32  # answers that others find out
    streams: int = 24
    stream_bytes: int = 8 << 20  # that one client of a stream has not taken
    heartbeat_s: float = 15.0  # a stream is never silent for longer


class _Connection:
    def __init__(self, sock: socket.socket, peer: str, until: float) -> None:
        self.sock = sock
        self.peer = peer  # its address without the port; empty for a Unix socket
        self.until: float | None = until  # None: for as long as the client wants
        self.reader: RequestReader | None = None  # until the first byte has come
        self.to_say = bytearray()
        self.has_asked = False
        self.wants_body = True  # not so after a HEAD
        self.is_done = False  # the answer is out; what still comes is thrown away until the client closes
        self.thrown_away = 0
        self.later: Later | None = None  # what it waits for
        self.stream: Stream | None = None
        self.beat_at = 0.0  # when something must be said again on the stream

    @property
    def is_attached(self) -> bool:
        """It has asked, and waits; whether it is still there is worth knowing."""
        return self.later is not None or self.stream is not None

    @property
    def interest(self) -> int:
        if self.to_say:
            return selectors.EVENT_WRITE
        return 0 if self.has_asked and not self.is_done and not self.is_attached else selectors.EVENT_READ


class HttpServer:
    """Serves between ``start`` and ``stop``, once. Takes over the listening socket.

    ``answer`` is called in the server's thread and should be quick; for requests that ``is_apart`` picks, in a thread
    of its own. What it raises becomes an answer. Of those made apart, one path has so many at a time: one that hangs
    does not take the place of others. So ``is_apart`` must pick from a bounded number of paths; and what it picks is
    answered by a response.
    """

    def __init__(
        self,
        listener: socket.socket,
        answer: Callable[[Request], Answer],
        *,
        name: str,
        limits: Limits = Limits(),  # noqa: B008 - frozen
        patience: Patience = Patience(),  # noqa: B008 - frozen
        is_apart: Callable[[Request], bool] = lambda _: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._listener = listener
        self._answer = answer
        self._is_apart = is_apart
        self._limits = limits
        self._patience = patience
        self._now = clock
        self._selector = selectors.PollSelector()
        self._connections: dict[int, _Connection] = {}  # by descriptor, oldest first
        self._answers: deque[tuple[_Connection, str, float, Response, threading.Thread]] = deque()  # made apart
        self._apart: dict[str, list[float]] = {}  # by path, when each answer that is being made was begun
        self._calls: deque[Callable[[], None]] = deque()
        self._deaf_until: float | None = None
        self._is_stopping = False
        # Not a pipe: a thread that answers too late must not write to a number that is somebody else's by now.
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
        """Make this call in the server's thread. From any thread; what is asked for before ``stop`` is still done."""
        self._calls.append(call)
        self._wake()

    def stop(self) -> None:
        """Returns when the thread is gone, which takes no time unless an answer hangs."""
        self._is_stopping = True
        if self._thread.ident is None:
            self._close()
        elif self._thread.is_alive():
            self._wake()
            self._thread.join(_JOIN_S)

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while not self._is_stopping:
                ready = self._selector.select(self._seconds_to_wait())
                for key, _ in ready:
                    self._attend(key.fd)
                self._make_calls()
                self._give_answers()
                self._end_overdue()
            self._make_calls()
        finally:
            self._close()

    def _make_calls(self) -> None:
        while self._calls:
            self._calls.popleft()()

    def _seconds_to_wait(self) -> float | None:
        moments = [each.until for each in self._connections.values() if each.until is not None]
        moments += [each.beat_at for each in self._connections.values() if each.stream is not None]
        if self._deaf_until is not None:
            moments.append(self._deaf_until)
        return max(0.0, min(moments) - self._now()) if moments else None

    def _attend(self, descriptor: int) -> None:
        if descriptor == self._wake_reader.fileno():
            with suppress(BlockingIOError):
                self._wake_reader.recv(_CHUNK)
        elif descriptor == self._listener.fileno():
            self._accept()
        elif descriptor in self._connections:
            self._go_on(self._connections[descriptor])

    def _accept(self) -> None:
        for _ in range(_ACCEPT_AT_ONCE):
            try:
                sock, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _FULL:
                    self._make_room()
                    self._deaf_until = self._now() + _DEAF_S
                    self._selector.unregister(self._listener)
                    return
                continue  # the client is gone already
            sock.setblocking(False)
            if len(self._connections) >= self._patience.connections:
                self._make_room()
            peer = str(address[0]) if isinstance(address, tuple) else ""
            connection = _Connection(sock, peer, self._now() + self._patience.ask_s)
            self._connections[sock.fileno()] = connection
            self._selector.register(sock, selectors.EVENT_READ)
            self._go_on(connection)  # who asks in the same breath is not made to wait behind those who do not

    def _make_room(self) -> None:
        """End the oldest connection without a request, of the peer that has the most of them."""
        waiting = [each for each in self._connections.values() if not each.has_asked or each.is_done]
        candidates = waiting or list(self._connections.values())
        counts = Counter(each.peer for each in candidates)
        if candidates:
            self._end(max(candidates, key=lambda each: counts[each.peer]))  # of equals, the first: the oldest

    def _go_on(self, connection: _Connection) -> None:
        try:
            if connection.to_say:
                self._say(connection)
            else:
                self._hear(connection)
        except BlockingIOError:
            pass
        except OSError:  # it is gone, with or without an answer
            self._end(connection)
            return
        if connection.sock.fileno() in self._connections:
            self._show_interest(connection)

    def _hear(self, connection: _Connection) -> None:
        data = connection.sock.recv(_CHUNK)
        if not data:
            self._end(connection)
            return
        if connection.is_done or connection.is_attached:
            connection.thrown_away += len(data)
            if connection.thrown_away > _MAX_THROWN_AWAY:
                self._end(connection)
            return
        if connection.reader is None:
            connection.reader = RequestReader(self._limits)
        found = connection.reader.feed(data)
        if found is None:
            return
        connection.has_asked = True
        connection.wants_body = isinstance(found, Response) or found.method != "HEAD"
        if isinstance(found, Response):
            self._begin_to_say(connection, found)
        elif self._is_apart(found):
            self._answer_apart(connection, found)
        else:
            self._begin(connection, self._answered(found))

    def _begin(self, connection: _Connection, answer: Answer) -> None:
        if isinstance(answer, Later):
            self._wait_for(connection, answer)
        elif isinstance(answer, Stream):
            self._open_stream(connection, answer)
        else:
            self._begin_to_say(connection, answer)

    def _wait_for(self, connection: _Connection, later: Later) -> None:
        waiting = sum(each.later is not None for each in self._connections.values())
        if waiting >= self._patience.later:
            sentence = f"{waiting} answers are being waited for already; ask again when one of them has come"
            self._begin_to_say(connection, text(UNAVAILABLE, sentence))
            return
        connection.later = later
        connection.until = self._now() + later.within_s
        later.deliver_to(lambda response: self.soon(lambda: self._give(connection, response)))

    def _give(self, connection: _Connection, response: Response) -> None:
        if connection.later is None or connection.sock.fileno() not in self._connections:
            return
        connection.later = None
        try:
            self._begin_to_say(connection, response)
            self._show_interest(connection)
        except OSError:  # who asked has given up
            self._end(connection)

    def _open_stream(self, connection: _Connection, stream: Stream) -> None:
        open_now = sum(each.stream is not None for each in self._connections.values())
        if open_now >= self._patience.streams:
            sentence = f"{open_now} others are watching already, which is as many as may; close one of them"
            self._begin_to_say(connection, text(UNAVAILABLE, sentence))
            stream.on_end(stream)
            return
        head = render_head(stream.content_type, stream.headers)
        if not connection.wants_body:
            stream.on_end(stream)
            self._say_all(connection, head)
            return
        connection.stream, connection.until = stream, None
        self._say_on_stream(connection, head)
        stream.open(lambda data: self._say_on_stream(connection, data), lambda: self._end(connection))

    def _say_on_stream(self, connection: _Connection, data: bytes) -> None:
        if connection.sock.fileno() not in self._connections:
            return
        was_silent = not connection.to_say
        connection.to_say += data
        connection.beat_at = self._now() + self._patience.heartbeat_s
        if len(connection.to_say) > self._patience.stream_bytes:
            self._end(connection)
            return
        if was_silent:
            connection.until = self._now() + self._patience.take_s
            self._go_on(connection)

    def _answered(self, request: Request) -> Answer:
        try:
            return self._answer(request)
        # Also SystemExit: an exit() in a handler is not ours to obey, and whoever asked waits for an answer.
        except BaseException as error:
            return text(INTERNAL_ERROR, f"{type(error).__name__}: {error}".partition("\n")[0])

    def _answer_apart(self, connection: _Connection, request: Request) -> None:
        path, now = request.path, self._now()
        begun = self._apart.get(path, [])
        if len(begun) >= self._patience.apart:
            sentence = f"{path} is being answered {len(begun)} times already, the first for {now - begun[0]:.0f} s"
            self._begin_to_say(connection, text(UNAVAILABLE, f"{sentence}; it may hang. Ask again when one has ended"))
            return

        def answer() -> None:
            made = self._answered(request)
            if not isinstance(made, Response):
                made = text(INTERNAL_ERROR, f"{path} is answered in a thread of its own, so it must be a response")
            self._answers.append((connection, path, now, made, threading.current_thread()))
            self._wake()

        try:
            threading.Thread(target=answer, name=f"{self._thread.name}: {path}", daemon=True).start()
        except RuntimeError as error:  # the system gives no more threads
            self._begin_to_say(connection, text(UNAVAILABLE, f"{path} cannot be answered now: {error}"))
            return
        self._apart.setdefault(path, []).append(now)
        connection.until = None

    def _give_answers(self) -> None:
        while self._answers:
            connection, path, begun_at, response, thread = self._answers.popleft()
            thread.join()  # it has nothing left to do
            self._apart[path].remove(begun_at)
            if not self._apart[path]:
                del self._apart[path]
            if connection.sock.fileno() not in self._connections:
                continue
            try:
                self._begin_to_say(connection, response)
            except OSError:  # who asked has given up
                self._end(connection)
            else:
                self._go_on(connection)

    def _begin_to_say(self, connection: _Connection, response: Response) -> None:
        self._say_all(connection, render(response, with_body=connection.wants_body))

    def _say_all(self, connection: _Connection, data: bytes) -> None:
        connection.to_say += data
        connection.until = self._now() + self._patience.take_s
        with suppress(BlockingIOError):
            self._say(connection)

    def _say(self, connection: _Connection) -> None:
        sent = connection.sock.send(connection.to_say)
        del connection.to_say[:sent]
        if connection.stream is not None:
            connection.until = self._now() + self._patience.take_s if connection.to_say else None
        elif not connection.to_say:
            # Closed at once, what the client still sends would be answered by a reset, which may overtake the answer.
            connection.sock.shutdown(socket.SHUT_WR)
            connection.is_done = True

    def _show_interest(self, connection: _Connection) -> None:
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
        if self._deaf_until is not None and self._deaf_until <= now:
            self._deaf_until = None
            self._selector.register(self._listener, selectors.EVENT_READ)
        for connection in [each for each in self._connections.values() if each.stream is not None]:
            if connection.beat_at <= now and connection.stream is not None:
                self._say_on_stream(connection, connection.stream.heartbeat)
        for connection in [each for each in self._connections.values() if each.until is not None and each.until <= now]:
            if connection.later is not None:
                sentence = f"no answer was found within {connection.later.within_s:g} s; ask again"
                self._give(connection, text(UNAVAILABLE, sentence))
                continue
            if connection.has_asked or connection.reader is None:
                self._end(connection)
                continue
            connection.has_asked = True
            response = text(TIMED_OUT, f"the request did not end within {self._patience.ask_s:g} s")
            try:
                self._begin_to_say(connection, response)
                self._show_interest(connection)
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
        with suppress(OSError):  # full: it wakes up anyway; closed: nobody is left to wake
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
    """A forked process has no thread that would serve, and must not hold the port of the one that has."""
    for server in list(_servers):
        server._close()


os.register_at_fork(after_in_child=_close_copies)
