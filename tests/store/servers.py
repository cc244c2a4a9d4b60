"""Servers for tests: tenax's in its own process, and torch's, whose threads are not Python's.

(A torch client may hold the interpreter lock while it waits, so a tenax server in a thread of the same process would
never answer it.)
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

# Answers every line on its standard input with what it has counted.
OURS = """
import os, resource, sys
from tenax.store._key_values import Limits
from tenax._io.listen import listen
from tenax.store._peers import PeerRules
from tenax.store._server import StoreServer
host, limits, peers, descriptors = sys.argv[1:]
listener = listen(host)
server = StoreServer(listener, Limits(**eval(limits)), peers=PeerRules(**eval(peers)))
server.watch(0, lambda: os.write(1, repr(server.counters).encode() + b"\\n") if os.read(0, 99) else os._exit(0))
print(listener.getsockname()[1], flush=True)
if int(descriptors):
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(descriptors), int(descriptors)))
server.serve()
"""


class Server:
    """A server process."""

    def __init__(self, process: subprocess.Popen[bytes], host: str, port: int) -> None:
        self.host = host
        self.port = port
        self.process = process
        self.pid = process.pid

    def peak_memory(self) -> int:
        """The peak of its resident memory, in bytes."""
        with open(f"/proc/{self.pid}/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))

    def counted(self, name: str) -> int:
        """Return a counter of the server."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()
        counters = dict(pair.split("=") for pair in self.process.stdout.readline().decode().split(", "))
        return int(counters[name])


@contextmanager
def our_server(
    host: str = "127.0.0.1",
    *,
    descriptors: int = 0,
    peers: Mapping[str, list[str]] | None = None,
    **limits: float,
) -> Iterator[Server]:
    """``descriptors``: its maximum number of open files; ``peers``: arguments of ``PeerRules``."""
    command = [sys.executable, "-c", OURS, host, repr(limits), repr(dict(peers or {})), str(descriptors)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield Server(process, host, int(process.stdout.readline()))
        finally:
            process.kill()


def torch_server(kind: str) -> Any:
    """Return a torch store that serves with the backend ``libuv`` or ``legacy``; it has a ``port``."""
    import torch.distributed as dist

    return dist.TCPStore(
        "127.0.0.1",
        0,
        is_master=True,
        wait_for_workers=False,
        use_libuv=kind == "libuv",
        timeout=timedelta(seconds=60),
    )


def torch_client(port: int, host: str = "127.0.0.1") -> Any:
    import torch.distributed as dist

    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60))
