"""The event handler: what receives events. Write one to send them where you want them."""

from __future__ import annotations

from abc import ABC, abstractmethod

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tenax.events.api import Event, RdzvEvent


class EventHandler(ABC):
    """Receives events, one after the other.

    An agent calls its handlers in a thread apart: what they raise, and how long they take, is no matter of the job. An
    event that you record yourself is handed over before ``record`` returns, and what is raised comes back to you.
    """

    @abstractmethod
    def record(self, event: Event | RdzvEvent) -> None:
        """Take one event. A ``RdzvEvent`` comes from a rendezvous of the kind that a backend of your own makes."""

    def close(self) -> None:  # noqa: B027 - most have nothing to do
        """Send what is still held back. Called by whoever made the handler: an agent closes those it made by name."""
