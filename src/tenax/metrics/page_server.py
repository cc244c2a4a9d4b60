"""A page server: one text over HTTP, to few readers, from a thread that nobody waits for.

GET of the one path answers with what the text is now. Everything is bounded: readers at a time, bytes of a request,
seconds for a reader from its first byte to its last. Whoever asks for more is hung up on, and costs nobody else
anything. The thread is a daemon: it never keeps a process alive.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_MOST_READERS = 16
_MOST_REQUEST_BYTES = 8192
_MOST_SECONDS = 10.0
_DEAF_S = 1.0


class PageServer:
    """Serves ``page()`` at ``http://host:port/path``. Raises OSError if it cannot listen there."""

    def __init__(
        self,
        page: Callable[[], str],
        *,
        path: str,
        content_type: str,
        host: str = "127.0.0.1",
        port: int = 0,
        most_readers: int = _MOST_READERS,
        most_seconds: float = _MOST_SECONDS,
    ) -> None:
        self._page = page
        self._path = path.encode()
        self._content_type = content_type
        self._most_readers = most_readers
        self._most_seconds = most_seconds
        self._socket = _listen(host, port)
        self.host = host
        self.port: int = self._socket.getsockname()[1]
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._readers: dict[socket.socket, _Reader] = {}
        self._deaf_until: float | None = None  # nobody is welcomed before
        self._thread = threading.Thread(target=self._serve, name=f"tenax: page at {self.port}", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}{self._path.decode()}"

    def close(self) -> None:
        """Hang up on everybody. May be called twice."""
        self._wake.close()
        self._thread.join()

    # --- in the thread ------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        try:
            while True:
                for key, _ in self._selector.select(self._patience()):
                    if key.fileobj is self._woken:
                        return
                    if key.fileobj is self._socket:
                        self._welcome()
                    else:
                        self._go_on(key.data)
                self._look_at_the_clock()
        finally:
            for each in (*self._readers, self._socket, self._woken):
                each.close()
            self._selector.close()

    def _patience(self) -> float | None:
        until = [reader.until for reader in self._readers.values()]
        if self._deaf_until is not None:
            until.append(self._deaf_until)
        return max(0.0, min(until) - time.monotonic()) if until else None

    def _look_at_the_clock(self) -> None:
        now = time.monotonic()
        for reader in [*self._readers.values()]:
            if reader.is_done or reader.until <= now:
                self._selector.unregister(reader.socket)
                reader.socket.close()
                del self._readers[reader.socket]
        if self._deaf_until is not None and self._deaf_until <= now:
            self._deaf_until = None
            self._selector.register(self._socket, selectors.EVENT_READ)

    def _welcome(self) -> None:
        try:
            client, _ = self._socket.accept()
        except (BlockingIOError, ConnectionError):  # it has left again
            return
        except OSError:  # no descriptor or no memory for it: it would be announced again and again
            self._deaf_until = time.monotonic() + _DEAF_S
            self._selector.unregister(self._socket)
            return
        if len(self._readers) >= self._most_readers:
            client.close()
            return
        client.setblocking(False)
        self._readers[client] = reader = _Reader(client, time.monotonic() + self._most_seconds)
        self._selector.register(client, selectors.EVENT_READ, reader)

    def _go_on(self, reader: _Reader) -> None:
        try:
            if not reader.answer:
                reader.answer = memoryview(self._read(reader))
                if reader.answer:
                    self._selector.modify(reader.socket, selectors.EVENT_WRITE, reader)
            else:
                reader.answer = reader.answer[reader.socket.send(reader.answer) :]
                reader.is_done = not reader.answer
        except BlockingIOError:
            return
        except OSError:  # it hung up
            reader.is_done = True

    def _read(self, reader: _Reader) -> bytes:
        """The answer, as soon as the question is complete."""
        data = reader.socket.recv(4096)
        reader.question += data
        if not data or len(reader.question) > _MOST_REQUEST_BYTES:
            reader.is_done = True
            return b""
        if b"\r\n\r\n" not in reader.question and b"\n\n" not in reader.question:
            return b""
        return self._answer(reader.question.split(b"\n", 1)[0].split())

    def _answer(self, words: list[bytes]) -> bytes:
        if len(words) < 2 or not words[-1].startswith(b"HTTP/"):
            return _response("400 Bad Request", "text/plain", "not HTTP\n")
        method, path = words[0], words[1].partition(b"?")[0]
        if path != self._path:
            return _response("404 Not Found", "text/plain", f"there is only {self._path.decode()}\n")
        if method not in (b"GET", b"HEAD"):
            return _response("405 Method Not Allowed", "text/plain", "only GET\n", "Allow: GET, HEAD\r\n")
        return _response("200 OK", self._content_type, self._page(), has_body=method == b"GET")


class _Reader:
    """One connection: a question that comes in, or an answer that goes out."""

    def __init__(self, client: socket.socket, until: float) -> None:
        self.socket = client
        self.until = until
        self.question = b""
        self.answer = memoryview(b"")
        self.is_done = False


def _response(status: str, content_type: str, text: str, more: str = "", *, has_body: bool = True) -> bytes:
    body = text.encode()
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n{more}"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + (body if has_body else b"")


def _listen(host: str, port: int) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        # A port that an earlier run had may be taken again while its last connections fade away.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(_MOST_READERS)
        listening.setblocking(False)
    except BaseException:
        listening.close()
        raise
    return listening
