"""A probe of whether a leader is dead, and the addresses of this host.

A leader listens for as long as its agent lives, and its keeper holds the same socket until the last worker is gone. So
a refused connection proves that all of them are dead, provided that the leader's own machine refused it: a loopback
address means a different machine on each host.
"""

from __future__ import annotations

import errno
import os
import socket
from contextlib import suppress

import msgspec

from tenax._io.connect import ConnectAttempt
from tenax._io.endpoint import is_loopback, literal
from tenax._io.listen import listen
from tenax._io.loop import NO_TIMER

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from tenax._core.leadership.keys import LeaderAddress
    from tenax._io.endpoint import Address, Endpoint
    from tenax._io.interfaces import Cancellable, EventLoop

_ELSEWHERE = ("192.0.2.1", "2001:db8::1")  # documentation addresses: the route to them is the default route


class LeaderProbe(msgspec.Struct, eq=False):
    """One connection attempt. Calls ``opened``, ``dead`` or ``away`` (with the reason) once, never from ``start``."""

    _loop: EventLoop
    _address: LeaderAddress
    _opened: Callable[[socket.socket], None]
    _dead: Callable[[], None]
    _away: Callable[[str], None]
    _connecting: ConnectAttempt | None = None
    _timer: Cancellable = NO_TIMER

    def start(self) -> None:
        leader = self._address
        addresses = literal(leader.addr, leader.port)
        if is_loopback(leader.addr) and leader.machine != this_machine():
            why = (
                f"{leader.host} listens at the loopback address {leader.addr}, which other hosts cannot reach; on "
                "that node, set the etcd endpoint to an address that other hosts use too, or set --local-addr"
            )
        elif not addresses:
            why = f"{leader.addr!r} is not an IP address that this host can use"
        else:
            self._connecting = ConnectAttempt(self._loop, addresses[:1], self._opened, self._failed)
            self._connecting.start()
            return
        self._timer = self._loop.at(self._loop.now(), lambda: self._away(why))

    def _failed(self, errors: list[int]) -> None:
        if errors[0] == errno.ECONNREFUSED:
            self._dead()
        else:
            self._away(os.strerror(errors[0]))

    def close(self) -> None:
        self._timer.cancel()
        if self._connecting is not None:
            self._connecting.close()


def listen_at(addr: str, port: int = 0) -> socket.socket:
    """Return a listening socket; with port 0 the system chooses one. Raises OSError."""
    if not literal(addr, port):
        raise OSError(errno.EADDRNOTAVAIL, "not an IP address")
    return listen(addr, port)


def this_machine() -> str:
    """Return an id shared by processes with the same loopback interface: same boot, same network namespace."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return os.uname().nodename


def address_towards(endpoint: Endpoint) -> str:
    """Return this host's address on the route to the endpoint; empty if that needs a name lookup."""
    return _first_source(literal(endpoint.host, endpoint.port))


def address_outwards() -> str:
    """Return this host's address on the default route; empty if there is none."""
    return _first_source([address for host in _ELSEWHERE for address in literal(host, 9)])


def _first_source(addresses: list[Address]) -> str:
    for family, address in addresses:
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect(address)  # sends nothing
            return str(sock.getsockname()[0])
    return ""
