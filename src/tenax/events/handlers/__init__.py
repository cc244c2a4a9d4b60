"""Event handlers by name: ``console``, ``null``, ``jsonl:PATH``, ``logging:LOGGER``, and third-party ones.

A third-party handler is registered here, provided by an installed package in the entry point group
``tenax.event_handlers``, or added to ``_log_handlers``, TorchElastic's table of ``logging.Handler`` by name. That table
is created on first access, and consulted for every event from then on.
"""

from __future__ import annotations

import os
import sys

from tenax._io import handler_names
from tenax._io.handler_names import UnknownHandler, close_all, parse_names
from tenax._io.json_lines import JsonLinesFile
from tenax.events._configured import EventHandler, Undo

TYPE_CHECKING = False
if TYPE_CHECKING:
    import logging
    from collections.abc import Callable, Iterable
    from typing import Any, TextIO

    from tenax.events.api import Event, RdzvEvent

    Maker = Callable[[str], EventHandler]
    _log_handlers: dict[str, logging.Handler]

__all__ = ["ENTRY_POINTS", "UnknownHandler", "get_logging_handler", "make_handlers", "register_handler"]

ENTRY_POINTS = "tenax.event_handlers"
_KIND = "event handler"
_OLD_LOGGER = "torchelastic-events-{}"  # TorchElastic's logger name, which formatters and filters may use

_registered: dict[str, Maker] = {}
_made: dict[str, list[EventHandler]] = {}  # by destination, for record()


def __getattr__(name: str) -> Any:
    if name == "_log_handlers":
        from tenax.events.handlers._logging import old_handlers

        table = globals().setdefault("_log_handlers", old_handlers())
        _forget(table)  # from now on the table defines these names
        return table
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def get_logging_handler(destination: str = "null") -> logging.Handler:
    """Return TorchElastic's ``logging.Handler`` of this name. Raises ``ValueError`` if there is none."""
    table = _table()
    if destination not in table:
        raise UnknownHandler(
            f"unknown logging handler {destination!r} for events; known handlers: {', '.join(sorted(table))}"
        )
    return table[destination]


def register_handler(name: str, maker: Maker) -> Undo:
    """Register a handler by name: ``maker(argument)`` returns one; the argument is the text after a colon, or empty.

    Returns an ``Undo``. Raises ``ValueError`` if the name is taken.
    """
    if not name or set(name) & set(":, \t\n"):
        raise ValueError(f"invalid event handler name {name!r}; expected a name without ':', ',' and spaces")
    if name in _makers():
        raise ValueError(f"the event handler {name!r} already exists; choose another name")
    _registered[name] = maker
    _forget([name])

    def forget() -> None:
        _registered.pop(name, None)
        _forget([name])

    return Undo(forget)


def make_handlers(text: str) -> list[EventHandler]:
    """Create the handlers of a list such as ``console,jsonl:/var/log/events.jsonl``. The caller closes them.

    Raises ``ValueError`` with a message if a name is unknown or its handler cannot be created.
    """
    made: list[EventHandler] = handler_names.make_handlers(text, _KIND, _makers(), ENTRY_POINTS, "record")
    return made


def check_names(text: str) -> None:
    """Check a list of names without creating or opening anything.

    Raises ``ValueError`` for a name that is unknown or cannot be loaded, and for a wrong argument of a built-in one.
    """
    handler_names.check_names(text, _KIND, _makers(), ENTRY_POINTS)
    for name, argument in parse_names(text):
        if name == "jsonl":
            _require_path(argument)
        elif name in ("console", "null", "dynamic_rendezvous"):
            _refuse_argument(name, argument)


def handlers_of(destination: str) -> list[EventHandler]:
    """Return the handlers of a destination for ``record``. They are created once."""
    if destination == "null" and "_log_handlers" not in globals():
        return []
    if destination not in _made:
        _made[destination] = make_handlers(destination)
    return _made[destination]


def _forget(names: Iterable[str]) -> None:
    """Close the destinations that use one of these names, whose meaning has changed."""
    changed = set(names)
    errors: list[Exception] = []
    for destination in [*_made]:
        if not changed.isdisjoint(name for name, _ in parse_names(destination)):
            errors += close_all(_made.pop(destination, ()))
    if errors:
        raise errors[0]


def receives_rendezvous_events() -> bool:
    """Return True if TorchElastic's table has a handler for rendezvous events."""
    if "_log_handlers" not in globals():
        return False
    import logging

    found = _table().get("dynamic_rendezvous")
    return found is not None and not isinstance(found, logging.NullHandler)


def _table() -> dict[str, logging.Handler]:
    table: dict[str, logging.Handler] = globals().get("_log_handlers") or __getattr__("_log_handlers")
    return table


def _makers() -> dict[str, Maker]:
    own: dict[str, Maker] = {
        "console": _without_argument("console", ConsoleEventHandler),
        "dynamic_rendezvous": _make_old("dynamic_rendezvous"),
        "jsonl": _make_json_lines,
        "logging": _make_logging,
        "null": _without_argument("null", NullEventHandler),
    }
    # Once TorchElastic's table has been accessed, it may have been changed, and defines its names.
    old = {name: _make_old(name) for name in globals().get("_log_handlers", ())}
    return {**own, **_registered, **old}


def _make_old(name: str) -> Maker:
    return _without_argument(name, lambda: _OldHandler(name))


def _without_argument(name: str, make: Callable[[], EventHandler]) -> Maker:
    def maker(argument: str) -> EventHandler:
        _refuse_argument(name, argument)
        return make()

    return maker


def _make_json_lines(argument: str) -> EventHandler:
    _require_path(argument)
    try:
        return JsonLinesEventHandler(argument)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UnknownHandler(f"could not open the event file {argument!r}: {reason}") from error


def _make_logging(argument: str) -> EventHandler:
    import logging

    from tenax.events.handlers._logging import LoggingEventHandler

    name = argument or "tenax.events"
    return LoggingEventHandler(logging.getLogger(name), name)


def _require_path(argument: str) -> None:
    if not argument:
        raise UnknownHandler("the event handler 'jsonl' needs a file to append to: jsonl:PATH")


def _refuse_argument(name: str, argument: str) -> None:
    if argument:
        raise UnknownHandler(f"the event handler {name!r} takes no argument")


class ConsoleEventHandler(EventHandler):
    """Writes whole lines to ``stream``, and flushes; None: to the current ``sys.stderr``.

    An agent with a console of its own sets ``print_line``, so that lines stay in order with its other output.
    """

    print_line: Callable[[str], None] | None = None

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream

    def record(self, event: Event | RdzvEvent) -> None:
        if self.print_line is not None:
            self.print_line(event.serialize())
            return
        stream = sys.stderr if self._stream is None else self._stream
        if stream is not None:  # the process may have no stderr
            stream.write(f"{event.serialize()}\n")  # one write, so that lines of several threads do not mix
            stream.flush()


class JsonLinesEventHandler(EventHandler):
    """Appends each event to the file as one line. Several processes of a host may share it.

    Raises ``OSError`` if the file cannot be opened, and later if it cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._file = JsonLinesFile(self.path)

    def record(self, event: Event | RdzvEvent) -> None:
        self._file.append(event.serialize().encode())

    def close(self) -> None:
        self._file.close()


class NullEventHandler(EventHandler):
    """Drops everything."""

    def record(self, event: Event | RdzvEvent) -> None:
        """Do nothing."""


class _OldHandler(EventHandler):
    """Uses the current entry of TorchElastic's table for each event."""

    def __init__(self, name: str) -> None:
        self._name = name

    def record(self, event: Event | RdzvEvent) -> None:
        from tenax.events.handlers._logging import hand_over

        hand_over(event, get_logging_handler(self._name), _OLD_LOGGER.format(self._name))
