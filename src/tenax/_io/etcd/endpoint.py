"""One of etcd's endpoints, and the address that the next connection tries first."""

from __future__ import annotations

from tenax._io.endpoint import Endpoint

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tenax._io.endpoint import Address


class EtcdEndpoint:
    """One of the endpoints that the user gave. A host name may resolve to several addresses; they take turns."""

    def __init__(self, index: int, text: str) -> None:
        self.index = index
        self.name = text
        self.target = Endpoint.parse(text)
        self._failures = 0

    def in_order(self, addresses: list[Address]) -> list[Address]:
        """Return the addresses, starting with one that did not fail last."""
        first = self._failures % len(addresses)
        return addresses[first:] + addresses[:first]

    def address_failed(self) -> None:
        self._failures += 1
