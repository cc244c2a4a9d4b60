"""A response without an end, for pages that update themselves (server-sent events).

All methods are called in the server's thread. Data that the client does not read is buffered up to a limit. A client
that stops reading is disconnected and may reconnect.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

EVENTS = "text/event-stream"
_HEARTBEAT = b":\n\n"  # a comment; it lets each side detect that the other is gone


class Stream:
    """Returned instead of a response. ``on_end`` is called once, whichever side ends the stream."""

    def __init__(
        self,
        on_end: Callable[[Stream], None] = lambda _: None,
        *,
        content_type: str = EVENTS,
        headers: Mapping[str, str] = {},
        heartbeat: bytes = _HEARTBEAT,
    ) -> None:
        self.on_end = on_end
        self.content_type = content_type
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
