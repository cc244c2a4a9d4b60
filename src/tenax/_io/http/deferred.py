"""A response that is produced after the handler has returned, without blocking the server."""

from __future__ import annotations

import threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from tenax._io.http.message import Response


class DeferredResponse:
    """Returned instead of a response. ``respond`` may be called from any thread; the first response counts.

    Without one the client gets an error response after ``within_s``.
    """

    def __init__(self, within_s: float) -> None:
        self.within_s = within_s
        self._lock = threading.Lock()
        self._response: Response | None = None
        self._deliver: Callable[[Response], None] | None = None

    def respond(self, response: Response) -> None:
        with self._lock:
            if self._response is not None:
                return
            self._response, deliver = response, self._deliver
        if deliver is not None:
            deliver(response)

    def deliver_to(self, deliver: Callable[[Response], None]) -> None:
        """Set the receiver, for the server. A response that was set before is delivered at once."""
        with self._lock:
            self._deliver, response = deliver, self._response
        if response is not None:
            deliver(response)
