"""Finds out which of the control hosts is this host, if any.

Names are resolved off the loop. A name is this host's if one of its addresses can be bound here; host names are never
compared. A name that cannot be resolved yet is retried by a timer for a while, because no event announces it.
"""

from __future__ import annotations

from tenax._io.endpoint import Lookup
from tenax._io.etcd.control_host import addresses_here

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from tenax._io.endpoint import Address
    from tenax._io.etcd.control_host import ControlHost
    from tenax._io.interfaces import Cancellable, EventLoop

_PAUSE_S = 1.0
_PATIENCE_S = 120.0


class MemberAddress:
    """Calls once, from the loop: ``found`` with the host and the addresses to listen at, or ``nowhere``."""

    def __init__(
        self,
        loop: EventLoop,
        hosts: tuple[ControlHost, ...],
        found: Callable[[ControlHost, list[str]], None],
        nowhere: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._hosts = hosts
        self._found = found
        self._nowhere = nowhere
        self._until = loop.now() + _PATIENCE_S
        self._lookups: dict[str, Lookup] = {}
        self._timer: Cancellable | None = None
        self._answers: dict[str, list[Address] | None] = {}

    def start(self) -> None:
        self._timer = self._loop.at(self._loop.now(), self._resolve)

    def _resolve(self) -> None:
        self._timer = None
        self._answers.clear()
        for host in self._hosts:
            lookup = Lookup(
                host.endpoint,
                found=lambda addresses, host=host: self._resolved(host, addresses),  # type: ignore[misc]
                failed=lambda _, host=host: self._resolved(host, None),  # type: ignore[misc]
            )
            if lookup.start():
                self._lookups[host.name] = lookup
                self._loop.watch(lookup)
        self._decide()

    def _resolved(self, host: ControlHost, addresses: list[Address] | None) -> None:
        self._answers[host.name] = addresses
        lookup = self._lookups.pop(host.name, None)
        if lookup is not None:
            self._loop.unwatch(lookup)
            self._decide()

    def _decide(self) -> None:
        """Choose the first name, in the user's order, that is this host's. Waits until all are resolved."""
        if self._lookups or len(self._answers) < len(self._hosts):
            return
        for host in self._hosts:
            here = addresses_here(host, self._answers[host.name] or [])
            if here:
                self._found(host, here)
                return
        if None in self._answers.values() and self._loop.now() < self._until:
            self._timer = self._loop.at(self._loop.now() + _PAUSE_S, self._resolve)
        else:
            self._nowhere()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for lookup in self._lookups.values():
            self._loop.unwatch(lookup)
            lookup.close()
        self._lookups.clear()
