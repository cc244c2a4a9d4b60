"""Events through Python's logging: to a logger or a handler of yours, and TorchElastic's table of such handlers.

Nobody's configuration of logging is changed, and ``LOGLEVEL`` is not read: how much a program logs does not decide
whether its events arrive. Events are records of level INFO.
"""

from __future__ import annotations

import logging
import sys
from typing import TextIO

from tenax.events._handler import EventHandler

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tenax.events.api import Event, RdzvEvent

    _StreamHandler = logging.StreamHandler[TextIO]
else:
    _StreamHandler = logging.StreamHandler


class LoggingEventHandler(EventHandler):
    """Hands each event to a ``logging.Handler`` or a ``logging.Logger`` as a record whose message is its JSON.

    The record's attribute ``event`` is the event itself. Levels and filters that you set on the target hold.
    """

    def __init__(self, target: logging.Handler | logging.Logger, name: str = "tenax.events") -> None:
        self._target = target
        self._name = name  # of the records

    def record(self, event: Event | RdzvEvent) -> None:
        hand_over(event, self._target, self._name)


def hand_over(event: Event | RdzvEvent, target: logging.Handler | logging.Logger, name: str) -> None:
    """Make a record of the event, and let the target have it if it takes such."""
    is_wanted = (
        target.isEnabledFor(logging.INFO) if isinstance(target, logging.Logger) else target.level <= logging.INFO
    )
    if not is_wanted:
        return
    record = logging.LogRecord(name, logging.INFO, __file__, 0, event.serialize(), None, None)
    record.event = event
    target.handle(record)


class _TakesEvents(logging.Handler):
    """What TorchElastic's documents show: ``get_logging_handler("console").info(event)``."""

    def info(self, event: Event | RdzvEvent) -> None:
        hand_over(event, self, "tenax.events")


class NullLogging(_TakesEvents, logging.NullHandler):
    """Drops everything, and says so by its type."""

    def info(self, event: Event | RdzvEvent) -> None:
        """Do nothing."""


class ConsoleLogging(_TakesEvents, _StreamHandler):
    """Writes to what ``sys.stderr`` is at that moment, unless ``setStream`` said otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self._chosen: TextIO | None = None

    @property
    def stream(self) -> TextIO:
        return self._chosen if self._chosen is not None else sys.stderr

    @stream.setter
    def stream(self, stream: TextIO) -> None:
        self._chosen = stream


def old_handlers() -> dict[str, logging.Handler]:
    """The table as it is when nobody has changed it."""
    return {"console": ConsoleLogging(), "dynamic_rendezvous": NullLogging(), "null": NullLogging()}
