"""A handler for tests of events, which keeps what it receives."""

from __future__ import annotations

from tenax.events import Event, EventHandler, EventSource, RdzvEvent


class Keeping(EventHandler):
    """Keeps every event; then raises the given exception."""

    def __init__(self, raises: BaseException | None = None) -> None:
        self.kept: list[Event | RdzvEvent] = []
        self._raises = raises

    def record(self, event: Event | RdzvEvent) -> None:
        self.kept.append(event)
        if self._raises is not None:
            raise self._raises


def an_event(name: str = "saved", **metadata: str | int | float | bool | None) -> Event:
    return Event(name, EventSource.WORKER, 1_700_000_000_123, dict(metadata))
