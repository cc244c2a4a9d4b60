"""Stores: the processes of the store benchmark: tenax's server, torch's own, and torch's real clients of both.

tenax's server is the one that an agent serves: a `StoreHost` in a loop, which starts its process when the first client
connects. torch's is its TCPStore with libuv, in a process of its own. A client process has a real TCPStore
client of torch for each of the two, and uses one at a time.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.crew import many_descriptors
from tenax.store import _wire as wire

OPERATIONS = ("add", "get", "set", "compare_set", "wait", "check")
VALUE = "v" * 16
WAITERS = 1024
PING = bytes([wire.PING]) + b"ping"


def serve_ours(pipe: Connection) -> None:
    """Run tenax's server. Replies with its port."""
    from benchmarks.pipe_commands import PipeCommands
    from tenax._io.loop import Loop
    from tenax.store._host import StoreHost

    many_descriptors()
    loop = Loop()
    host = StoreHost(lambda reason: pipe.send(f"lost: {reason}"))
    port = host.bind("127.0.0.1")
    host.serve(1)
    loop.watch(host)
    loop.watch(PipeCommands(pipe, lambda: None))
    pipe.send(port)
    loop.next_event(lambda: None)


def serve_theirs(pipe: Connection) -> None:
    """Run torch's server. Replies with its port."""
    many_descriptors()
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=True)
    pipe.send(store.port)
    pipe.recv()


def work(pipe: Connection, number: int, ports: dict[str, int]) -> None:
    """Run a client process.

    On ("repeat", server, operation, seconds) it replies with how often, and how long it took.
    On ("storm", server, name, clients, all clients) it replies with when it began and when its last client was done.
    """
    many_descriptors()
    import torch.distributed as dist

    def connect(port: int) -> Any:
        return dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60))

    stores = {whose: connect(port) for whose, port in ports.items()}
    for store in stores.values():
        store.set(f"{number}/x", VALUE)
    pipe.send("ready")
    while True:
        match pipe.recv():
            case ("repeat", whose, operation, seconds):
                pipe.send(repeat(stores[whose], number, operation, seconds))
            case ("storm", whose, name, clients, world):
                pipe.send(storm(partial(connect, ports[whose]), name, clients, world))


def repeat(store: Any, number: int, operation: str, seconds: float) -> tuple[int, float]:
    """Repeat one operation, with a final round trip, so that only completed operations count."""
    key = f"{number}/x"
    turn = 0

    def compare_set() -> None:
        nonlocal turn
        store.compare_set(f"{number}/c", str(turn) if turn else "", str(turn + 1))
        turn += 1

    store.delete_key(f"{number}/c")
    act: Callable[[], object] = {
        "add": lambda: store.add(f"{number}/n", 1),
        "get": lambda: store.get(key),
        "set": lambda: store.set(key, VALUE),
        "compare_set": compare_set,
        "wait": lambda: store.wait([key]),
        "check": lambda: store.check([key]),
    }[operation]
    began = now = time.monotonic()
    times = 0
    while now < began + seconds:
        act()
        times += 1
        now = time.monotonic()
    store.check([key])
    if operation == "compare_set" and store.get(f"{number}/c") != str(turn).encode():
        raise RuntimeError("not every compare_set was done")
    return times, time.monotonic() - began


def storm(connect: Callable[[], Any], name: str, clients: int, world: int) -> tuple[float, float]:
    """Connect that many clients at once, as workers do at their start: each sets its address, counts itself, and waits
    until all have. Return when the first began and when the last was done."""
    gate = threading.Event()
    done: list[float] = []
    held = []  # kept until the end: each client is a connection

    def one(index: int) -> None:
        gate.wait()
        store = connect()
        held.append(store)
        store.set(f"{name}/address/{index}", VALUE)
        if store.add(f"{name}/here", 1) == world:
            store.set(f"{name}/go", "1")
        store.wait([f"{name}/go"])
        done.append(time.monotonic())

    threads = [threading.Thread(target=one, args=(index,), daemon=True) for index in range(clients)]
    for thread in threads:
        thread.start()
    began = time.monotonic()
    gate.set()
    for thread in threads:
        thread.join()
    if len(done) != clients:
        raise RuntimeError(f"{clients - len(done)} of {clients} clients failed")
    return began, max(done)


def profile() -> None:
    """Measure a server of tenax in a child process with raw clients, for PROFILES.md. Run by hand."""
    import subprocess
    import sys

    code = "from benchmarks.stores import serve_for_profile; serve_for_profile()"
    program = [sys.executable, "-c", code, *sys.argv[1:]]
    server = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert server.stdin is not None
    assert server.stdout is not None
    port = int(server.stdout.readline())
    alike = [(b"/0/x%02d" % (number % 64), b"v" * 16) for number in range(1500)]
    mixed = [(b"/k/%d" % (number % 200), b"%d" % (number * 7)) for number in range(1500)]
    print(f"pipelined sets, keys and values of one length: {pipelined(port, alike, 60):,.0f}/s")
    print(f"pipelined sets, of several lengths:            {pipelined(port, mixed, 60):,.0f}/s")
    print(f"{WAITERS} waiters on one key, set → the last is notified: {waiters_notified(port, WAITERS) * 1e3:.1f} ms")
    server.stdin.close()  # it exits, and prints its profile with --profile
    print(server.stdout.read().decode(), end="")
    server.wait()


def serve_for_profile() -> None:
    """Run tenax's server until stdin closes; with ``--profile``, print its profile."""
    import cProfile
    import pstats
    import sys

    from tenax._io.listen import listen
    from tenax.store._server import StoreServer

    many_descriptors()
    listener = listen("127.0.0.1")
    server = StoreServer(listener)
    server.watch(0, server.stop)
    print(listener.getsockname()[1], flush=True)
    if "--profile" not in sys.argv:
        server.serve()
        return
    profiler = cProfile.Profile()
    profiler.runcall(server.serve)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(12)


def pipelined(port: int, pairs: list[tuple[bytes, bytes]], times: int) -> float:
    """Repeat sets from one client without a pause. Return sets per second."""
    block = b"".join(bytes([wire.SET]) + wire.text(key) + wire.text(value) for key, value in pairs)
    with _greeted(port) as client:
        began = time.monotonic()
        for _ in range(times):
            client.sendall(block)
        _round_trip(client)
        return times * len(pairs) / (time.monotonic() - began)


def waiters_notified(port: int, waiters: int) -> float:
    """Let that many clients wait for one key, and one set it. Return the seconds until all are notified, once each."""
    many_descriptors()
    key = wire.text(b"/waiters")
    with contextlib.ExitStack() as stack:
        setter, *clients = [stack.enter_context(_greeted(port)) for _ in range(waiters + 1)]
        for client in clients:
            # The wait is sent together with the request before it, whose answer proves that the server has read it.
            client.sendall(PING + bytes([wire.WAIT]) + wire.texts([b"/waiters"]))
            assert client.recv(4, socket.MSG_WAITALL) == PING[1:]
        began = time.monotonic()
        setter.sendall(bytes([wire.SET]) + key + wire.text(b"1"))
        for client in clients:
            assert client.recv(2) == wire.STOP_WAITING
        return time.monotonic() - began


def _greeted(port: int) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", port), timeout=60)
    client.sendall(wire.GREETING)
    _round_trip(client)
    return client


def _round_trip(client: socket.socket) -> None:
    client.sendall(PING)
    assert client.recv(4, socket.MSG_WAITALL) == PING[1:]


if __name__ == "__main__":
    profile()
