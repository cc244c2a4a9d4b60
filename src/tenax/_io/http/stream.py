"""Stream: an answer without an end, as a page that is kept up to date reads it (server-sent events).

Everything about it happens in the server's thread. What a client does not take is kept up to a bound; one that takes
nothing any more loses its stream, and is free to ask for another.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

EVENTS = "text/event-stream"
_HEARTBEAT = b":\n\n"  # a comment: the client's side sees that we live, and ours that the client does


class Stream:
    """Returned instead of a response. ``on_end`` is called once, whoever ended it."""

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
        self._said_before = b""
        self._send: Callable[[bytes], None] | None = None
        self._hang_up: Callable[[], None] | None = None

    def say(self, data: bytes) -> None:
        """Send this as soon as the client takes it. To one that is gone nothing is said."""
        if self._send is None:
            self._said_before += data
        else:
            self._send(data)

    def end(self) -> None:
        """Hang up, without what was not taken."""
        if self._hang_up is not None:
            self._hang_up()

    def open(self, send: Callable[[bytes], None], hang_up: Callable[[], None]) -> None:
        """The server's: the way to the client is open."""
        self._send, self._hang_up = send, hang_up
        if self._said_before:
            data, self._said_before = self._said_before, b""
            send(data)


def event(kind: str, data: bytes) -> bytes:
    """One server-sent event. ``data`` is one line."""
    return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"
