"""The process that serves the workers' store for an agent: one generation after the other, each at its own port.

It is a separate process because a store under load uses most of a core, and the agent's loop must not wait for it. It
makes no decisions, uses only the standard library, and exits at once when the agent's channel closes.

Commands from the agent                                Replies
  serve, generation, hosts, allow  + listener            notice, generation, text
  close, generation

Closing a generation closes its listener, resets its connections and discards its keys.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import socket
from contextlib import suppress

from tenax._io.helper_channel import Channel, ChannelClosed
from tenax.store._peers import PeerRules
from tenax.store._server import StoreServer


class StoreProcess:
    """The whole process: it serves a store, or waits for the command to serve one."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._generation = 0  # of the last server
        self._servers: list[StoreServer] = []  # in order; all but the last are stopped

    def run(self) -> None:
        """Run until the agent's channel closes, which ends the process."""
        poll = select.poll()
        poll.register(self._channel.fileno(), select.POLLIN)
        while True:
            if not self._servers:
                poll.poll()
                self._handle_commands()
            else:
                self._servers[0].serve()  # returns at once if it is stopped
                self._servers.pop(0).close()

    def _handle_commands(self) -> None:
        try:
            for message, descriptors in self._channel.receive():
                match message:
                    case ("serve", generation, hosts, allow):
                        self._stop()
                        self._generation = generation
                        self._add_server(generation, socket.socket(fileno=descriptors[0]), PeerRules(hosts, allow))
                    case ("close", generation) if generation == self._generation:
                        self._stop()
        except ChannelClosed:
            os._exit(0)

    def _stop(self) -> None:
        for server in self._servers:
            server.stop()

    def _add_server(self, generation: int, listener: socket.socket, peers: PeerRules) -> None:
        server = StoreServer(listener, peers=peers, on_notice=lambda text: self._send_notice(generation, text))
        server.watch(self._channel.fileno(), self._handle_commands)
        self._servers.append(server)

    def _send_notice(self, generation: int, text: str) -> None:
        if not self._channel.wants_to_write:  # do not queue notices for an agent that does not read
            with suppress(ChannelClosed):  # _handle_commands handles it
                self._channel.send(("notice", generation, text))


def main(descriptor: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # for the agent only: workers that are being stopped still use the store
    _raise_file_limit()
    StoreProcess(Channel.from_descriptor(descriptor)).run()


def _raise_file_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):  # some systems report "unlimited" but reject it
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
