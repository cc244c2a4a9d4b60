"""A place: one endpoint of etcd, and where the next connection to it should go."""

from __future__ import annotations

from tenax._io.endpoint import Endpoint

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tenax._io.endpoint import Address


class Place:
    """One of the endpoints that the user named. A name may stand for several addresses; they take turns."""

    def __init__(self, index: int, text: str) -> None:
        self.index = index
        self.name = text
        self.endpoint = Endpoint.parse(text)
        self._failures = 0

    def in_order(self, addresses: list[Address]) -> list[Address]:
        """The addresses, beginning with one that has not just failed."""
        first = self._failures % len(addresses)
        return addresses[first:] + addresses[:first]

    def address_failed(self) -> None:
        self._failures += 1
