"""Event handlers, and the configured ones of this process: each receives every event, besides its destination."""

from __future__ import annotations

from _thread import allocate_lock  # cheaper to import than threading
from abc import ABC, abstractmethod

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from tenax.events.api import Event, RdzvEvent

_lock = allocate_lock()
_configured: tuple[EventHandler, ...] = ()  # replaced, never modified, so that readers need no lock


class EventHandler(ABC):
    """Receives events, one at a time.

    An agent calls its handlers in a thread of its own: their errors and delays do not affect the job. Your own calls of
    ``record`` call the handlers directly, and their errors reach you.
    """

    @abstractmethod
    def record(self, event: Event | RdzvEvent) -> None:
        """Receive one event. ``RdzvEvent`` is sent by rendezvous backends based on TorchElastic's dynamic one."""

    def close(self) -> None:  # noqa: B027 - most have nothing to do
        """Flush. Called by the owner of the handler: an agent closes the handlers that it created by name."""


class Undo:
    """Reverts the effect of one call once, when called or at the end of a ``with`` block. Later calls do nothing."""

    def __init__(self, undo: Callable[[], object]) -> None:
        self._undo: Callable[[], object] | None = undo

    def __call__(self) -> None:
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()

    def __enter__(self) -> Undo:
        return self

    def __exit__(self, *_: object) -> None:
        self()


def configure(handler: EventHandler) -> Undo:
    """Send every event to this handler too. Adding the same handler again has no effect.

    Returns an ``Undo``: call it, or write ``with configure(handler):``. An agent reads the handlers when its run
    begins.
    """
    if not callable(getattr(handler, "record", None)) or isinstance(handler, type):
        raise TypeError(
            f"{handler!r} is not an event handler; expected an object with record(event), such as an EventHandler"
            " (LoggingEventHandler wraps a logging.Handler)"
        )
    global _configured  # noqa: PLW0603 - the one list of this process
    with _lock:
        if any(each is handler for each in _configured):
            return Undo(lambda: None)
        _configured = (*_configured, handler)
    return Undo(lambda: unconfigure(handler))


def unconfigure(handler: EventHandler) -> bool:
    """Remove a handler without closing it. Return False if it was not configured."""
    global _configured  # noqa: PLW0603
    with _lock:
        left = tuple(each for each in _configured if each is not handler)
        was_there = len(left) < len(_configured)
        _configured = left
    return was_there


def configured_handlers() -> tuple[EventHandler, ...]:
    """Return the configured handlers, in order of configuration."""
    return _configured
