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
