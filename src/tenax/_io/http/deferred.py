"""Later: an answer that is not known yet. Somebody else finds it out, and the server holds up nobody meanwhile."""

from __future__ import annotations

import threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from tenax._io.http.message import Response


class Later:
    """Returned instead of a response. ``give`` may be called from any thread; the first response counts.

    Who asked waits for so many seconds at most, and is told so then.
    """

    def __init__(self, within_s: float) -> None:
        self.within_s = within_s
        self._lock = threading.Lock()
        self._response: Response | None = None
        self._deliver: Callable[[Response], None] | None = None

    def give(self, response: Response) -> None:
        with self._lock:
            if self._response is not None:
                return
            self._response, deliver = response, self._deliver
        if deliver is not None:
            deliver(response)

    def deliver_to(self, deliver: Callable[[Response], None]) -> None:
        """The server's: what was given already is delivered at once."""
        with self._lock:
            self._deliver, response = deliver, self._response
        if response is not None:
            deliver(response)
