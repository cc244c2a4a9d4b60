"""Responses that take time: one that is produced after the handler has returned, and one without an end.

Neither blocks the server. The methods of a stream, for pages that update themselves (server-sent events), are called in
the server's thread. Data that its client does not read is buffered up to a limit. A client that stops reading is
disconnected and may reconnect.
"""

from __future__ import annotations

import threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tenax._io.http.message import Response

_HEARTBEAT = b":\n\n"  # a comment; it lets each side detect that the other is gone


class DeferredResponse:
    """Returned instead of a response. ``respond`` may be called from any thread; the first response counts.

    Without one the client gets an error response after ``within_s``.
    """

    def __init__(self, within_s: float) -> None:
        self.within_s = within_s
        self._lock = threading.Lock()
        self._response: Response | None = None
        self._deliver: Callable[[Response], None] | None = None

    def respond(self, response: Response) -> None:
        with self._lock:
            if self._response is not None:
                return
            self._response, deliver = response, self._deliver
        if deliver is not None:
            deliver(response)

    def deliver_to(self, deliver: Callable[[Response], None]) -> None:
        """Set the receiver, for the server. A response that was set before is delivered at once."""
        with self._lock:
            self._deliver, response = deliver, self._response
        if response is not None:
            deliver(response)


class Stream:
    """Returned instead of a response. ``on_end`` is called once, whichever side ends the stream."""

    def __init__(
        self,
        on_end: Callable[[Stream], None] = lambda _: None,
        *,
        headers: Mapping[str, str] = {},
        heartbeat: bytes = _HEARTBEAT,
    ) -> None:
        self.on_end = on_end
        self.headers = headers
        self.heartbeat = heartbeat
        self._early = b""  # data from before ``open``
        self._send: Callable[[bytes], None] | None = None
        self._close: Callable[[], None] | None = None

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
