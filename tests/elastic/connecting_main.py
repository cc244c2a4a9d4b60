"""Two ranks whose generation ends while gloo connects them to peers that are gone.

Prints one JSON object: by fault, how long after the end each of the two had acknowledged it, in seconds. torch is
imported once, before the forks.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable

import torch.distributed as dist

from tenax import elastic
from tenax.store import TCPStore

SURVIVORS = 2
PEERS = 6  # gloo chooses by the addresses which of two ranks connects to the other: with some, a survivor waits
FAULTS = {"dead": signal.SIGKILL, "stopped": signal.SIGSTOP}  # of the peers, before they connect
TIMEOUT_S = 20.0


class Store(dist.Store):
    """Calls ``on_read`` when this rank, whose own address is known to all, reads the address of a peer."""

    def __init__(self, port: int, on_read: Callable[[], object]) -> None:
        super().__init__()
        self._store = dist.TCPStore("127.0.0.1", port, is_master=False)
        self._on_read = on_read

    def set(self, key: str, value: bytes) -> None:
        self._own = key
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        if key != self._own and int(key.rpartition("/")[2]) != 1 - int(self._own.rpartition("/")[2]):
            self._on_read()
        return self._store.get(key)

    def wait(self, keys: list[str], *_: object) -> None:
        self._store.wait(keys)


def connect(rank: int, port: int, on_read: Callable[[], object]) -> None:
    dist.init_process_group("gloo", store=Store(port, on_read), rank=rank, world_size=SURVIVORS + PEERS)


def survive(rank: int, port: int, writer: int) -> None:
    for generation in elastic.generations():
        with generation:
            connect(rank, port, lambda: os.write(writer, b"."))
            dist.barrier()


def forked(run: Callable[..., None], *arguments: object) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            run(*arguments)
        finally:
            os._exit(1)
    return pid


class Survivor:
    """A forked rank, and the agent's end of its channel."""

    def __init__(self, rank: int, port: int) -> None:
        self.channel, theirs = socket.socketpair()
        self.reads, writer = os.pipe()
        values = {"TENAX_ELASTIC_FD": theirs.fileno(), "TENAX_GENERATION": 1, "MASTER_PORT": port, "RANK": rank}
        os.environ.update({name: str(value) for name, value in values.items()}, WORLD_SIZE=str(SURVIVORS + PEERS))
        self.pid = forked(survive, rank, port, writer)
        del os.environ["TENAX_ELASTIC_FD"]
        theirs.close()
        os.close(writer)

    def has_sent(self, kind: str) -> bool:
        readable, _, _ = select.select([self.channel], [], [], TIMEOUT_S)
        return bool(readable) and json.loads(self.channel.makefile("rb").readline())["type"] == kind

    def close(self) -> None:
        self.channel.close()
        os.close(self.reads)
        end(self.pid)


def end(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def held_after(fault: str) -> list[float]:
    store = TCPStore("127.0.0.1", 0, is_master=True)
    survivors = [Survivor(rank, store.port) for rank in range(SURVIVORS)]
    ends = (lambda: os.kill(os.getpid(), FAULTS[fault]),)
    peers = [forked(connect, rank, store.port, *ends) for rank in range(SURVIVORS, SURVIVORS + PEERS)]
    for pid in peers:
        os.waitpid(pid, os.WUNTRACED)
    for each in survivors:
        assert each.has_sent("opt_in")
        os.read(each.reads, 1)
    began = time.monotonic()
    for each in survivors:
        each.channel.sendall(b'{"type": "end", "generation": 1, "why": "peers are gone"}\n')
    found = [time.monotonic() - began if each.has_sent("held") else TIMEOUT_S for each in survivors]
    for each in survivors:
        each.close()
    for pid in peers if fault == "stopped" else ():
        end(pid)
    store.close()
    return found


if __name__ == "__main__":
    signal.alarm(200)
    json.dump({fault: held_after(fault) for fault in FAULTS}, sys.stdout)
