"""The configured event handlers of this process. Each receives every event, in addition to its destination."""

from __future__ import annotations

from _thread import allocate_lock  # cheaper to import than threading

from tenax.events._undo import Undo

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tenax.events._handler import EventHandler

_lock = allocate_lock()
_configured: tuple[EventHandler, ...] = ()  # replaced, never modified, so that readers need no lock


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
