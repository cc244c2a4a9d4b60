"""The handlers that this process has configured. Every event goes to each of them, wherever else it goes."""

from __future__ import annotations

from _thread import allocate_lock  # threading would cost an import, and a lock is all that is needed

from tenax.events._undo import Undo

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tenax.events._handler import EventHandler

_lock = allocate_lock()
_configured: tuple[EventHandler, ...] = ()  # replaced and never changed, so that whoever reads it needs no lock


def configure(handler: EventHandler) -> Undo:
    """From now on every event goes to this handler as well. The same one twice is there once.

    Returns what takes this call back: call it, or write ``with configure(handler):``. An agent asks for the handlers
    when its run begins.
    """
    if not callable(getattr(handler, "record", None)) or isinstance(handler, type):
        raise TypeError(
            f"{handler!r} is no event handler; expected an object with record(event), such as an EventHandler"
            " (LoggingEventHandler makes one of a logging.Handler)"
        )
    global _configured  # noqa: PLW0603 - the one list of this process
    with _lock:
        if any(each is handler for each in _configured):
            return Undo(lambda: None)
        _configured = (*_configured, handler)
    return Undo(lambda: unconfigure(handler))


def unconfigure(handler: EventHandler) -> bool:
    """No event goes to this handler any more. Tells whether it was configured. It is not closed."""
    global _configured  # noqa: PLW0603
    with _lock:
        left = tuple(each for each in _configured if each is not handler)
        was_there = len(left) < len(_configured)
        _configured = left
    return was_there


def configured_handlers() -> tuple[EventHandler, ...]:
    """Those that are configured now, in the order in which they were."""
    return _configured
