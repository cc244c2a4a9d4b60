"""Clients: many light nodes in one process that join tenax's coordinator over the real protocol, and its process.

A light node sends exactly what an agent sends to join: the handshake with its proof, its identity, and that it is
ready. It has no machine, no workers and no heartbeat. The coordinator is tenax's own server in tenax's own loop, with
its journal.
"""

from __future__ import annotations

import os
import selectors
import socket
import time
from multiprocessing.connection import Connection

from benchmarks.crew import many_descriptors
from benchmarks.pipe_commands import PipeCommands
from tenax._core.coordinator import Opened, RunSettings
from tenax._core.events import GenerationFormed
from tenax._core.lease import LeaseTerms
from tenax._core.link import wire
from tenax._core.messages import NodeInfo, NodeJoined, NodeReady
from tenax._engines.tcp.server import CoordinatorServer
from tenax._io.endpoint import Endpoint
from tenax._io.listen import open_listeners
from tenax._io.loop import Loop
from tenax._node.journal import RUN_NAME, RunJournal
from tenax._node.link_journal import LinkJournal

RUN = "rendezvous"
SECRET = b"bench"
SLOTS = 8


def serve(pipe: Connection, folder: str) -> None:
    """Run the coordinator. On ("serve", port, nodes) it starts a new run of that size; replies when it listens."""
    loop = Loop()
    servers: list[CoordinatorServer] = []

    def execute(_: str, port: int, nodes: int) -> None:
        while servers:
            servers.pop().close()
        endpoint = Endpoint("127.0.0.1", port)
        settings = RunSettings(RUN, nodes, nodes, 3)
        os.makedirs(own := os.path.join(folder, str(port)))
        journal = RunJournal(os.path.join(own, RUN_NAME))
        links = LinkJournal(os.path.join(own, "links.jsonl"), loop)
        assert journal.path, "the journal cannot be written"
        journal.begin_run(settings, loop.now())
        listeners = open_listeners(endpoint, [(socket.AF_INET, (endpoint.host, port))])
        server = CoordinatorServer(
            listeners,
            settings,
            LeaseTerms(),
            SECRET,
            loop,
            record=journal.run_step,
            create=links.recorder.create,
        )
        server.open(Opened())
        servers.append(server)
        pipe.send("serving")

    loop.watch(PipeCommands(pipe, execute))
    loop.next_event(lambda: None)


class Light:
    """One light node."""

    def __init__(self, number: int, nodes: int, port: int) -> None:
        self._info = NodeInfo(f"{number:032x}", "host", SLOTS, min_nodes=nodes, max_nodes=nodes)
        self._hello = wire.Hello(wire.VERSION, RUN, self._info.node_id, os.urandom(wire.NONCE_BYTES))
        self._reader = wire.FrameReader(wire.MAX_BYTES)
        self.sock = socket.create_connection(("127.0.0.1", port), timeout=30)
        self.sock.sendall(wire.encode(self._hello))

    def take(self) -> bool:
        """Read and answer pending messages. Return whether the node got its assignment."""
        data = self.sock.recv(1 << 16)
        if not data:
            raise ConnectionError("the coordinator closed the connection")
        for body in self._reader.feed(data):
            match wire.decode_from_server(body):
                case wire.Challenge(nonce):
                    self.sock.sendall(wire.encode(wire.Proof(wire.prove(SECRET, "agent", self._hello, nonce))))
                case wire.Accepted():
                    ready = NodeReady(0, "127.0.0.1", 1000, True)
                    words = (NodeJoined(self._info), ready)
                    self.sock.sendall(b"".join(wire.encode(wire.Message(word)) for word in words))
                case wire.Event(GenerationFormed()):
                    return True
        return False


def work(pipe: Connection) -> None:
    """Run light nodes. On (port, first, last, nodes) these join; replies with the times of begin and end."""
    many_descriptors()
    pipe.send("ready")
    while True:
        port, first, last, nodes = pipe.recv()
        selector = selectors.DefaultSelector()
        began = time.monotonic()
        lights = [Light(number, nodes, port) for number in range(first, last)]
        for light in lights:
            selector.register(light.sock, selectors.EVENT_READ, light)
        left = len(lights)
        while left:
            for key, _ in selector.select():
                left -= key.data.take()
        pipe.send((began, time.monotonic()))
        selector.close()
        for light in lights:
            light.sock.close()
