"""The process that serves the workers' store for an agent: one generation after the other, each at its own port.

Why it is a process of its own: a store under load takes most of a core, and the agent's loop must not wait for it. It
decides nothing, runs from the standard library alone, and goes at once when the agent's channel closes: there is
nothing in it that anybody else could use.

Orders from the agent                                  Answers
  serve, generation, hosts, allow  + listener            notice, generation, text
  close, generation

Closing a generation closes its listener and all its connections: who still holds one sees a reset. Its keys are gone.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import socket
from contextlib import suppress

from tenax._io.channel import Channel, ChannelClosed
from tenax.store._peers import PeerRules
from tenax.store._server import StoreServer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn


class StoreProcess:
    """The whole process: it serves a store, or waits for the order to serve one."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._generation = 0
        self._server: StoreServer | None = None
        self._next: tuple[int, StoreServer] | None = None

    def run(self) -> NoReturn:
        poll = select.poll()
        poll.register(self._channel.fileno(), select.POLLIN)
        while True:
            if self._server is None:
                poll.poll()
                self._obey()
            else:
                self._server.serve()
                self._server.close()
                self._server = None
            if self._server is None and self._next is not None:
                (self._generation, self._server), self._next = self._next, None

    def _obey(self) -> None:
        try:
            for message, descriptors in self._channel.receive():
                match message:
                    case ("serve", generation, hosts, allow):
                        self._end()
                        peers = PeerRules(hosts, allow)
                        self._next = (generation, self._make_server(generation, peers, descriptors[0]))
                    case ("close", generation):
                        if self._next is not None and self._next[0] == generation:
                            self._next[1].close()
                            self._next = None
                        elif generation == self._generation:
                            self._end()
        except ChannelClosed:
            os._exit(0)

    def _end(self) -> None:
        if self._server is not None:
            self._server.stop()
        if self._next is not None:
            self._next[1].close()
            self._next = None

    def _make_server(self, generation: int, peers: PeerRules, descriptor: int) -> StoreServer:
        server = StoreServer(
            socket.socket(fileno=descriptor), peers=peers, on_notice=lambda text: self._say(generation, text)
        )
        server.watch(self._channel.fileno(), self._obey)
        return server

    def _say(self, generation: int, text: str) -> None:
        if not self._channel.wants_to_write:  # an agent that does not listen is not told twice
            with suppress(ChannelClosed):  # seen, in a moment, where we read
                self._channel.send(("notice", generation, text))


def main(descriptor: int) -> None:
    """Entry of the helper process."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # they are for the agent: workers that are asked to end still need us
    _allow_many_connections()
    StoreProcess(Channel.from_descriptor(descriptor)).run()


def _allow_many_connections() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):  # some systems say "unlimited" and do not mean it
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
