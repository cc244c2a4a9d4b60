"""The base class of event handlers."""

from __future__ import annotations

from abc import ABC, abstractmethod

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tenax.events.api import Event, RdzvEvent


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
