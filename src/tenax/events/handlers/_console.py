"""The console: one line of JSON per event on stderr."""

from __future__ import annotations

import sys

from tenax.events._handler import EventHandler

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TextIO

    from tenax.events.api import Event, RdzvEvent


class ConsoleEventHandler(EventHandler):
    """Writes to ``stream``; None: to what ``sys.stderr`` is at that moment. Whole lines, flushed.

    An agent that has a console of its own sets ``say``, and lines go there, in order with its other ones.
    """

    say: Callable[[str], None] | None = None

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream

    def record(self, event: Event | RdzvEvent) -> None:
        if self.say is not None:
            self.say(event.serialize())
            return
        stream = sys.stderr if self._stream is None else self._stream
        if stream is not None:  # a process without a stderr has nobody who reads it
            stream.write(f"{event.serialize()}\n")  # in one piece, so that lines of other threads stay whole
            stream.flush()
