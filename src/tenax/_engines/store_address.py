"""The store's place: where this node would host the workers' store, were it to hold rank 0.

Each time the node is ready for a generation it offers an address and a port, so that the coordinator can answer every
node in one message. The socket is bound and kept: nobody can take the port in between, and it is a new one for every
generation. With ``in_agent=False`` the worker with rank 0 hosts the store, as scripts that bind the port themselves
need it; then the port is only looked for, not kept.

The store serves this host's processes of the run's user, and the other members' hosts: the coordinator knows their
addresses, because each node announces its own with its offer. ``allow`` is what an operator allows besides
(``--rdzv-conf store_allow``, as ``store_allow`` reads it).
"""

from __future__ import annotations

import errno

import msgspec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tenax._core.messages import NodeReady
    from tenax._core.model import Assignment
    from tenax._io.ports import EventLoop
    from tenax.rendezvous.api import RendezvousParameters
    from tenax.store._host import StoreHost

_LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


class StoreAddress:
    """One node's offers, one after the other."""

    def __init__(
        self, addr: str, port: int = 0, *, in_agent: bool = True, bind_to: str = "", allow: Sequence[str] = ()
    ) -> None:
        self.addr = addr  # what the others are told; may be set until the first offer
        self.bind_to = bind_to  # the address to listen at; empty: loopback if that is our address, else everywhere
        self._port = port  # 0: a fresh one for every generation
        self._in_agent = in_agent
        self._allow = allow
        self._own_addresses: Sequence[str] = ()
        self._host: StoreHost | None = None

    def open(self, loop: EventLoop, say: Callable[[str], None]) -> None:
        if self._in_agent:
            from tenax.store._host import StoreHost

            self._host = StoreHost(
                lambda reason: say(f"the workers' store was lost: {reason}"), allow=self._allow, on_notice=say
            )
            loop.watch(self._host)

    def offer(self, ready: NodeReady, addresses: tuple[str, ...] = ()) -> NodeReady:
        """Return the message with the store's address and those of this host. Raises OSError if no port is free."""
        self._own_addresses = addresses
        if self._host is None:
            from tenax._engines.free_port import free_port

            port = self._port or free_port()
        else:
            if self._port:
                self._host.end()  # the port is the old generation's until then; a fresh one lets it finish in peace
            port = self._host.bind(self.bind_to or self._where(), self._port)
        return msgspec.structs.replace(
            ready,
            store_addr=self.addr,
            store_port=port,
            is_agent_store=self._host is not None,
            addresses=addresses,
        )

    def why_not(self, error: OSError) -> str:
        """A sentence for whoever wanted to join, when there was nothing to offer."""
        if self._port and error.errno == errno.EADDRINUSE:
            return (
                f"port {self._port} for the workers' store is taken on this host; choose another (--master-port, or "
                "--rdzv-conf store_port), or name none and a free one is used"
            )
        return f"there is no port for the workers' store: {error.strerror or error}"

    def _where(self) -> str:
        if self.addr not in _LOOPBACK:
            return ""
        return "127.0.0.1" if self.addr == "localhost" else self.addr

    def serve(self, part: Assignment) -> None:
        """The generation is formed. If we hold rank 0 the offer was taken; if not, nobody will come."""
        if self._host is not None:
            if part.group_rank == 0:
                # No other host has one of our own addresses; peers on this host are served by their user.
                hosts = [each for each in part.store_peers if each not in self._own_addresses]
                self._host.serve(part.generation, part.master_port, hosts)
            else:
                self._host.stop_serving()

    def close(self) -> None:
        if self._host is not None:
            self._host.close()
            self._host = None


def store_allow(params: RendezvousParameters) -> tuple[str, ...]:
    """Return the addresses and networks of the rendezvous option ``store_allow``, or ``any``. Raises ValueError.

    On the command line they are joined by ``+``, because a comma separates options; in Python they may be a list.
    """
    value = params.get("store_allow")
    if not value:
        return ()
    from tenax.store._peers import ANY, networks

    names = value.split("+") if isinstance(value, str) else [str(each) for each in value]
    names = [name.strip() for name in names]
    try:
        networks([name for name in names if name != ANY])
    except ValueError:
        raise ValueError(
            f"the rendezvous option 'store_allow' is {value!r}; expected 'any', or addresses and networks joined by "
            "'+', such as 10.1.2.3+192.168.0.0/16"
        ) from None
    return tuple(names)
