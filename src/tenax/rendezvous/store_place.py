"""The store's place: where this node would host the workers' store, were it to hold rank 0.

Each time the node is ready for a generation it offers an address and a port, so that the coordinator can answer every
node in one message. The socket is bound and kept: nobody can take the port in between, and it is a new one for every
generation. With ``in_agent=False`` the worker with rank 0 hosts the store, as scripts that bind the port themselves
need it; then the port is only looked for, not kept.
"""

from __future__ import annotations

import errno

import msgspec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from tenax.core.messages import NodeReady
    from tenax.core.model import Assignment
    from tenax.ports import EventLoop
    from tenax.store.host import StoreHost

_LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


class StorePlace:
    """One node's offers, one after the other."""

    def __init__(self, addr: str, port: int = 0, *, in_agent: bool = True, bind_to: str = "") -> None:
        self.addr = addr  # what the others are told; may be set until the first offer
        self.bind_to = bind_to  # the address to listen at; empty: loopback if that is our address, else everywhere
        self._port = port  # 0: a fresh one for every generation
        self._in_agent = in_agent
        self._host: StoreHost | None = None

    def open(self, loop: EventLoop, say: Callable[[str], None]) -> None:
        if self._in_agent:
            from tenax.store.host import StoreHost

            self._host = StoreHost(lambda reason: say(f"the workers' store was lost: {reason}"))
            loop.watch(self._host)

    def offer(self, ready: NodeReady) -> NodeReady:
        """The message with our address in it. Raises OSError when there is no port to be had."""
        if self._host is None:
            from tenax.rendezvous.port import free_port

            port = self._port or free_port()
        else:
            if self._port:
                self._host.end()  # the port is the old generation's until then; a fresh one lets it finish in peace
            port = self._host.bind(self.bind_to or self._where(), self._port)
        return msgspec.structs.replace(
            ready, store_addr=self.addr, store_port=port, is_agent_store=self._host is not None
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
                self._host.serve(part.generation, part.master_port)
            else:
                self._host.serve_nobody()

    def close(self) -> None:
        if self._host is not None:
            self._host.close()
            self._host = None
