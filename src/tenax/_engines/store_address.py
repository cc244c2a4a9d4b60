"""The address at which this node would host the workers' store if it gets rank 0.

Each time the node is ready for a generation, it offers an address and a port, so that the coordinator can form the
generation with one message per node. The socket is bound when it is offered, so no other process can take the port;
each generation gets a new port. With ``in_agent=False`` the worker with rank 0 hosts the store (for scripts that bind
the port themselves): then a free port is picked, but not bound.

The store accepts processes of the same user on this host, and the hosts of the other members: each node announces its
addresses with its offer. ``allow`` adds more (``--rdzv-conf store_allow``).
"""

from __future__ import annotations

import errno
import os

import msgspec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tenax._core.messages import NodeReady
    from tenax._core.model import Assignment
    from tenax._io.interfaces import EventLoop
    from tenax.rendezvous.api import RendezvousParameters
    from tenax.store._host import StoreHost

_LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


class StoreAddress(msgspec.Struct, eq=False):
    """The store address that one node offers, generation by generation."""

    addr: str  # announced to the other nodes; may be set until the first offer
    port: int = 0  # 0: a new one for every generation
    in_agent: bool = True
    bind_to: str = ""  # the address to listen on; empty: loopback if ``addr`` is loopback, else all addresses
    allow: Sequence[str] = ()
    _own_addresses: Sequence[str] = ()
    _host: StoreHost | None = None

    def open(self, loop: EventLoop, print_line: Callable[[str], None]) -> None:
        if self.in_agent:
            from tenax.store._host import StoreHost

            self._host = StoreHost(
                lambda reason: print_line(f"the workers' store was lost: {reason}"),
                allow=self.allow,
                on_notice=print_line,
            )
            loop.watch(self._host)

    def offer(self, ready: NodeReady, addresses: tuple[str, ...] = ()) -> NodeReady:
        """Return the message with the store's address and those of this host. Raises OSError if no port is free."""
        self._own_addresses = addresses
        if self._host is None:
            from tenax._engines.free_port import free_port

            port = self.port or free_port()
        else:
            if self.port:
                self._host.end()  # a fixed port must be free before it is bound again; a new port need not wait
            loopback = "127.0.0.1" if self.addr == "localhost" else self.addr
            port = self._host.bind(self.bind_to or (loopback if self.addr in _LOOPBACK else ""), self.port)
        in_agent = self._host is not None
        return msgspec.structs.replace(
            ready, store_addr=self.addr, store_port=port, is_agent_store=in_agent, addresses=addresses
        )

    def why_not(self, error: OSError) -> str:
        """Return the reason for which this node cannot join: it has no port to offer."""
        if self.port and error.errno == errno.EADDRINUSE:
            return (
                f"port {self.port} for the workers' store is in use on this host; choose another (--master-port "
                "or --rdzv-conf store_port), or leave it out to use a free one"
            )
        return f"no port for the workers' store: {error.strerror or error}"

    def serve(self, part: Assignment) -> None:
        """Serve the store if this node has rank 0 in the new generation; else accept no connections."""
        if self._host is not None:
            if part.group_rank == 0:
                # This host's addresses are left out: peers on this host are accepted by their user, not by address.
                hosts = [each for each in part.store_peers if each not in self._own_addresses]
                self._host.serve(part.generation, part.master_port, hosts)
            else:
                self._host.stop_serving()

    def close(self) -> None:
        if self._host is not None:
            self._host.close()
            self._host = None


def may_use_agent_store(params: RendezvousParameters | None = None) -> bool:
    """Return whether workers may use the store that the agent serves."""
    default = os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1"
    return default if params is None else bool(params.get_as_bool("use_agent_store", default))


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
