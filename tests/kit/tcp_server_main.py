"""A coordinator's server in its own process, for tests that stop, limit or measure it.

    python tcp_server_main.py '{"nodes": [1, 4], "beat_s": 0.1, "lease_s": 0.6, "max_descriptors": 0}'

It prints its port, and answers each line on its standard input with one line of figures about itself.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import sys
import time
from pathlib import Path
from typing import Any

from tenax._core.coordinator import NodeLost, Opened, RunSettings
from tenax._core.lease import LeaseTerms
from tenax._engines.tcp.server import CoordinatorServer
from tenax._io.loop import Loop


class StandardInput:
    """The standard input, watched by the loop."""

    def __init__(self, server: CoordinatorServer) -> None:
        self.server = server
        self.lost: list[str] = []
        self.is_over = False

    def fileno(self) -> int:
        return -1 if self.is_over else 0

    wants_to_write = False

    def on_writable(self) -> None:
        """Nothing is written here."""

    def on_readable(self) -> None:
        asked = os.read(0, 4096)
        if not asked:
            self.is_over = True
        for _ in range(asked.count(b"\n")):
            print(json.dumps(self.figures()), flush=True)

    def figures(self) -> dict[str, Any]:
        server = self.server
        status = Path("/proc/self/status").read_text()
        return {
            "rss_kb": int(status.partition("VmRSS:")[2].split()[0]),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "cpu_s": time.process_time(),
            "refused": server.links.refused,
            "nodes": server.links.others(""),
            "generation": server.coordinator.state.generation,
            "lost": self.lost,
        }


def main() -> None:
    options = json.loads(sys.argv[1])
    if options["max_descriptors"]:
        resource.setrlimit(resource.RLIMIT_NOFILE, (options["max_descriptors"],) * 2)
    loop = Loop()
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(4096)
    standard_input: StandardInput

    def record(_at: float, event: Any, _sent: Any, _state: Any) -> None:
        if isinstance(event, NodeLost):
            standard_input.lost.append(f"{event.node_id}: {event.why}")

    server = CoordinatorServer(
        [listener],
        RunSettings("run", *options["nodes"], 3, last_call_s=0),
        LeaseTerms(options["beat_s"], options["lease_s"]),
        b"",
        loop,
        record=record,
        handshake_timeout_s=options["handshake_timeout_s"],
    )
    standard_input = StandardInput(server)
    server.open(Opened())
    loop.watch(standard_input)
    print(listener.getsockname()[1], flush=True)
    while not standard_input.is_over:
        loop.next_event(lambda: loop.now() + 0.5 if standard_input.is_over else None)
    server.close()


main()
