"""Events through Python's logging: to a logger or handler, and TorchElastic's table of such handlers.

Changes no logging configuration and does not read ``LOGLEVEL``: how much a program logs does not affect its events.
Events are records of level INFO.
"""

from __future__ import annotations

import logging
import sys
from typing import TextIO

from tenax.events._configured import EventHandler

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tenax.events.api import Event, RdzvEvent

    _StreamHandler = logging.StreamHandler[TextIO]
else:
    _StreamHandler = logging.StreamHandler


class LoggingEventHandler(EventHandler):
    """Passes each event to a ``logging.Handler`` or ``logging.Logger`` as a record whose message is its JSON.

    The record's attribute ``event`` is the event itself. The target's levels and filters apply.
    """

    def __init__(self, target: logging.Handler | logging.Logger, name: str = "tenax.events") -> None:
        self._target = target
        self._name = name  # of the records

    def record(self, event: Event | RdzvEvent) -> None:
        hand_over(event, self._target, self._name)


def hand_over(event: Event | RdzvEvent, target: logging.Handler | logging.Logger, name: str) -> None:
    """Pass the event to the target as a log record, if the target's level allows it."""
    is_enabled = (
        target.isEnabledFor(logging.INFO) if isinstance(target, logging.Logger) else target.level <= logging.INFO
    )
    if not is_enabled:
        return
    record = logging.LogRecord(name, logging.INFO, __file__, 0, event.serialize(), None, None)
    record.event = event
    target.handle(record)


class _TakesEvents(logging.Handler):
    """Adds ``info``, as in TorchElastic's documentation: ``get_logging_handler("console").info(event)``."""

    def info(self, event: Event | RdzvEvent) -> None:
        hand_over(event, self, "tenax.events")


class NullLogging(_TakesEvents, logging.NullHandler):
    """Drops everything. Its type lets callers detect that."""

    def info(self, event: Event | RdzvEvent) -> None:
        """Do nothing."""


class ConsoleLogging(_TakesEvents, _StreamHandler):
    """Writes to the current ``sys.stderr``, or to the stream set by ``setStream``."""

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
    """Return TorchElastic's table with its default entries."""
    return {"console": ConsoleLogging(), "dynamic_rendezvous": NullLogging(), "null": NullLogging()}
