"""The handler that drops everything."""

from __future__ import annotations

from tenax.events._handler import EventHandler

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tenax.events.api import Event, RdzvEvent


class NullEventHandler(EventHandler):
    """Drops everything."""

    def record(self, event: Event | RdzvEvent) -> None:
        """Do nothing."""
