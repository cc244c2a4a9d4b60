"""The client: no call exceeds its timeout, whatever the server does, and lost changes are reported."""

from __future__ import annotations

import os
import signal
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import pytest

from kit.addresses import own_address
from kit.processes import TIMEOUT_S, forks_with_threads, leaving_nothing
from store import requests as ask
from store.requests import Peer
from store.servers import our_server
from tenax._io.listen import listen
from tenax.store import Store, StoreConnectionError, StoreServer, StoreTimeoutError, TCPStore

CALLS: dict[str, Callable[[Store], object]] = {
    "set": lambda store: store.set("k", "v"),
    "get": lambda store: store.get("k"),
    "add": lambda store: store.add("k", 1),
    "compare_set": lambda store: store.compare_set("k", "", "v"),
    "append": lambda store: store.append("k", "v"),
    "wait": lambda store: store.wait(["k"]),
    "check": lambda store: store.check(["k"]),
    "delete_key": lambda store: store.delete_key("k"),
    "num_keys": lambda store: store.num_keys(),
    "list_keys": lambda store: store.list_keys(),
    "multi_get": lambda store: store.multi_get(["k"]),
    "multi_set": lambda store: store.multi_set(["k"], ["v"]),
    "queue_push": lambda store: store.queue_push("k", "v"),
    "queue_pop": lambda store: store.queue_pop("k"),
    "queue_len": lambda store: store.queue_len("k"),
    "barrier": lambda store: store.barrier("k", 1),
    "clone": lambda store: store.clone(),
    "a value that fills the buffers": lambda store: store.set("k", b"x" * (64 << 20)),
}


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.process
def test_no_call_to_a_frozen_server_exceeds_its_timeout() -> None:
    """When the server continues, the client works over a new connection."""
    with our_server() as server, TCPStore(server.host, server.port, timeout=60) as store:
        store.set("k", "1")
        store.set_timeout(0.05)
        with frozen(server.pid):
            for call in CALLS.values():
                with pytest.raises(StoreTimeoutError):
                    call(store)
            with pytest.raises(StoreTimeoutError, match=r"could not connect to .* within 0\.05 s"):
                TCPStore(server.host, server.port, timeout=0.05)
        store.set_timeout(60)
        store.set("k", "2")
        assert store.get("k") == b"2"


def test_a_timeout_may_be_seconds_or_a_timedelta() -> None:
    with StoreServer.in_thread() as server, TCPStore(server.host, server.port, timeout=timedelta(seconds=9)) as store:
        assert store.timeout == timedelta(seconds=9)
        store.set_timeout(0.5)
        assert store.timeout == timedelta(seconds=0.5)
        for timeout in (0.01, 0, timedelta(milliseconds=10)):
            with pytest.raises(StoreTimeoutError):
                store.wait(["never"], timeout)
            with pytest.raises(StoreTimeoutError):
                store.barrier(f"never {timeout}", 2, timeout)
        with pytest.raises(ValueError, match="timeout must be"):
            store.set_timeout(-1)
        with pytest.raises(ValueError, match="timeout must be"):
            store.wait(["never"], float("nan"))


def test_amounts_must_fit_into_eight_bytes() -> None:
    with StoreServer.in_thread() as server, TCPStore(server.host, server.port, timeout=60) as store:
        with pytest.raises(ValueError, match="64-bit integer"):
            store.add("n", 1 << 63)
        assert store.add("n", -(1 << 63)) == -(1 << 63)


def test_errors_name_the_operation_and_the_server() -> None:
    with StoreServer.in_thread() as server, TCPStore(server.host, server.port, timeout=60) as store:
        place = f"the store at 127.0.0.1:{server.port}"
        with pytest.raises(StoreTimeoutError) as late:
            store.wait([f"key{number}" for number in range(7)], 0.01)
        assert str(late.value) == (
            f"timed out after 0.01 s waiting for the keys 'key0', 'key1', 'key2', 'key3', 'key4' and 2 more in {place}."
        )
        store.set("word", "hello")
        with pytest.raises(StoreConnectionError) as lost:
            store.add("word", 1)
        assert str(lost.value) == f"{place}: could not add to 'word': the server closed the connection."
        assert store.get("word") == b"hello"
    assert isinstance(late.value, TimeoutError)
    assert isinstance(lost.value, ConnectionError)


def test_after_a_lost_connection_reads_are_retried_and_changes_fail() -> None:
    with StoreServer.in_thread() as first, TCPStore(first.host, first.port, timeout=60) as store:
        store.set("k", "1")
        first.close()
        with StoreServer.in_thread(port=first.port) as second:
            assert not store.check(["k"])
            second.close()
            with StoreServer.in_thread(port=first.port):
                with pytest.raises(StoreConnectionError):
                    store.set("k", "2")
                store.set("k", "2")
                assert store.get("k") == b"2"
        with pytest.raises(StoreConnectionError):
            store.check(["k"])
        with pytest.raises(StoreConnectionError):
            store.set("k", "3")


def test_the_client_waits_for_a_server_that_starts_later() -> None:
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))  # no other process can bind the port now
        port = place.getsockname()[1]
        with pytest.raises(StoreConnectionError, match="Connection refused"):
            TCPStore("127.0.0.1", port, timeout=0.05)
        found: list[TCPStore] = []
        connecting = threading.Thread(target=lambda: found.append(TCPStore("127.0.0.1", port, timeout=60)))
        connecting.start()
        place.listen()
        server = StoreServer(place.dup())
        serving = threading.Thread(target=server.serve)
        serving.start()
        connecting.join(TIMEOUT_S)
        found[0].set("k", "v")
        found[0].close()
        server.stop()
        serving.join(TIMEOUT_S)
        server.close()


class FakeServer:
    """Answers every connection with the same bytes."""

    def __init__(self, data: bytes) -> None:
        self._listener = listen("127.0.0.1")
        self.port = self._listener.getsockname()[1]
        self._data = data
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            with peer:
                peer.sendall(self._data)
                while peer.recv(1 << 16):
                    pass

    def __enter__(self) -> FakeServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(TIMEOUT_S)
        self._listener.close()


def test_a_server_that_is_not_a_store_is_detected() -> None:
    with (
        FakeServer(b"HTTP/1.1 400 Bad Request\r\n") as impostor,
        pytest.raises(StoreConnectionError, match="is not a store"),
    ):
        TCPStore("127.0.0.1", impostor.port, timeout=60)


@pytest.mark.parametrize("size", [-1, (1 << 30) + 1, (1 << 63) - 1])
def test_giant_lengths_of_a_server_are_rejected(size: int) -> None:
    greeting = struct.pack("<I", os.getpid())
    with FakeServer(greeting + b"\x00" + struct.pack("<q", size)) as impostor:
        store = TCPStore("127.0.0.1", impostor.port, timeout=60)
        with pytest.raises(StoreConnectionError, match="announced"):
            store.get("k")
        store.close()


def test_threads_share_a_store_with_one_call_at_a_time() -> None:
    with StoreServer.in_thread() as server, TCPStore(server.host, server.port, timeout=60) as store:
        threads = [threading.Thread(target=lambda: [store.add("n", 1) for _ in range(100)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
        assert store.get("n") == b"400"
        store.set_timeout(0.05)

        def call_in_a_thread() -> BaseException | None:
            with ThreadPoolExecutor() as pool:
                return pool.submit(store.add, "n", 1).exception()

        error = store._mutex.run(call_in_a_thread)
        assert isinstance(error, StoreTimeoutError)
        assert "clone the store for each thread" in str(error)


def test_closing_a_store_ends_the_wait_of_another_thread() -> None:
    with StoreServer.in_thread() as server:
        store = TCPStore(server.host, server.port, timeout=60)
        errors: list[Exception] = []

        def wait() -> None:
            try:
                store.wait(["never"])
            except StoreConnectionError as error:
                errors.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        store.close()
        waiting.join(TIMEOUT_S)
        assert "this store object is closed" in str(errors[0])
        with pytest.raises(StoreConnectionError, match="this store object is closed"):
            store.add("n", 1)


@pytest.mark.process
@forks_with_threads
def test_a_forked_process_has_its_own_connection() -> None:
    with our_server() as server, TCPStore(server.host, server.port, timeout=60) as store:
        store.set("k", "parent")
        pid = os.fork()
        if pid == 0:
            ok = False
            try:
                ok = store.get("k") == b"parent" and [store.add("n", 1) for _ in range(100)][-1] > 0
                store.close()
            finally:
                os._exit(0 if ok else 1)
        counts = [store.add("n", 1) for _ in range(100)]
        assert os.waitpid(pid, 0)[1] == 0
        assert counts == sorted(counts)
        assert store.get("n") == b"200"


@pytest.mark.process
@forks_with_threads
def test_a_forked_process_does_not_keep_a_connection_or_a_server_open() -> None:
    # An address of its own: after the server is closed, another test may get its port.
    with StoreServer.in_thread(own_address()) as server, TCPStore(server.host, server.port, timeout=60) as store:
        reader, writer = os.pipe()
        is_forked, forked = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(writer)
            os.close(forked)
            os.read(reader, 1)
            os._exit(0)
        os.close(forked)
        os.read(is_forked, 1)  # until it has run, and closed its copies
        os.close(is_forked)
        store.close()
        server.close()
        with pytest.raises(StoreConnectionError):
            TCPStore(server.host, server.port, timeout=0.01)
        os.close(writer)
        assert os.waitpid(pid, 0)[1] == 0
        os.close(reader)


# --- a master ---------------------------------------------------------------------------------------------------------


def test_a_master_serves_until_its_last_clone_is_closed() -> None:
    with leaving_nothing():
        master = TCPStore("127.0.0.1", 0, is_master=True, timeout=60)
        clone = master.clone()
        master.set("k", "v")
        port = master.port
        master.close()
        assert clone.get("k") == b"v"
        clone.close()
        with pytest.raises(StoreConnectionError):
            TCPStore("127.0.0.1", port, timeout=0.01)


def test_a_master_waits_for_its_workers() -> None:
    listener = listen("127.0.0.1")
    port = listener.getsockname()[1]
    workers: list[TCPStore] = []

    def join() -> None:
        workers.append(TCPStore("127.0.0.1", port, world_size=3, timeout=60))

    threads = [threading.Thread(target=join) for _ in range(2)]
    for thread in threads:
        thread.start()
    with TCPStore(
        "127.0.0.1", port, world_size=3, is_master=True, timeout=60, master_listen_fd=listener.detach()
    ) as master:
        for thread in threads:
            thread.join(TIMEOUT_S)
        assert master.num_keys() == 1  # torch's count of workers
        assert master.list_keys() == []
        for worker in workers:
            worker.close()


@pytest.mark.parametrize("change", [ask.set_(b"init/", b"text"), ask.push(b"init/", b"1")], ids=["set", "push"])
def test_a_master_waits_for_its_workers_whatever_a_client_does_to_their_number(change: bytes) -> None:
    listener = listen("127.0.0.1")
    port, descriptor = listener.getsockname()[1], listener.detach()

    def join(**options: Any) -> None:
        TCPStore("127.0.0.1", port, world_size=2, timeout=30, **options).close()

    with ThreadPoolExecutor() as pool, Peer(port) as peer:
        master = pool.submit(join, is_master=True, master_listen_fd=descriptor)
        peer.send(ask.wait(b"init/"))
        peer.receive(1)
        peer.send(ask.delete(b"init/") + change + ask.delete(b"init/"))
        assert peer.answers() is not None
        with ExitStack() as workers:
            for _ in range(2):
                workers.enter_context(TCPStore("127.0.0.1", port, world_size=2, timeout=30))
            master.result()


def test_a_master_stops_waiting_for_workers_at_its_timeout() -> None:
    with pytest.raises(StoreTimeoutError, match="not all 2 workers connected"):
        TCPStore("127.0.0.1", 0, world_size=2, is_master=True, timeout=1)
    TCPStore("127.0.0.1", 0, world_size=2, is_master=True, timeout=60, wait_for_workers=False).close()


def test_multi_tenant_masters_of_one_port_share_a_server() -> None:
    first = TCPStore("127.0.0.1", 0, is_master=True, multi_tenant=True, timeout=60)
    second = TCPStore("127.0.0.1", first.port, is_master=True, multi_tenant=True, timeout=60)
    first.set("k", "v")
    assert second.get("k") == b"v"
    with pytest.raises(RuntimeError, match="could not serve a store at port"):
        TCPStore("127.0.0.1", first.port, is_master=True, timeout=60)
    second.close()
    first.close()


def test_a_master_uses_a_given_listener() -> None:
    listener = listen("127.0.0.1")
    port = listener.getsockname()[1]
    with TCPStore("127.0.0.1", port, is_master=True, timeout=60, master_listen_fd=listener.detach()) as master:
        master.set("k", "v")
        with TCPStore("127.0.0.1", port, timeout=60) as worker:
            assert worker.get("k") == b"v"
