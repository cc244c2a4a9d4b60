"""The place of a member: which of the named control hosts is this one, if any.

Names are looked up off the loop, and then the addresses are tried: a host whose address can be bound here is this one.
No host name is compared with another. A name that nobody knows yet is looked up again for a while, by a timer, because
nothing announces it.
"""

from __future__ import annotations

from tenax._io.endpoint import Lookup
from tenax._io.etcd.control_host import addresses_here

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from tenax._io.endpoint import Address
    from tenax._io.etcd.control_host import ControlHost
    from tenax._io.ports import Cancellable, EventLoop

_PAUSE_S = 1.0
_PATIENCE_S = 120.0


class MemberAddress:
    """Answers once: ``found`` with the host and the addresses to listen at, or ``nowhere``. From the loop."""

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
        self._timer = self._loop.at(self._loop.now(), self._look)

    def _look(self) -> None:
        self._timer = None
        self._answers.clear()
        for host in self._hosts:
            lookup = Lookup(
                host.endpoint,
                found=lambda addresses, host=host: self._note(host, addresses),  # type: ignore[misc]
                failed=lambda _, host=host: self._note(host, None),  # type: ignore[misc]
            )
            if lookup.start():
                self._lookups[host.name] = lookup
                self._loop.watch(lookup)
        self._judge()

    def _note(self, host: ControlHost, addresses: list[Address] | None) -> None:
        self._answers[host.name] = addresses
        lookup = self._lookups.pop(host.name, None)
        if lookup is not None:
            self._loop.unwatch(lookup)
            self._judge()

    def _judge(self) -> None:
        """The first name in the user's order that is ours; hence only when all have been looked up."""
        if self._lookups or len(self._answers) < len(self._hosts):
            return
        for host in self._hosts:
            here = addresses_here(host, self._answers[host.name] or [])
            if here:
                self._found(host, here)
                return
        if None in self._answers.values() and self._loop.now() < self._until:
            self._timer = self._loop.at(self._loop.now() + _PAUSE_S, self._look)
        else:
            self._nowhere()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for lookup in self._lookups.values():
            self._loop.unwatch(lookup)
            lookup.close()
        self._lookups.clear()
