"""``StoreHost``, which runs the workers' store for the agent: a real loop, process and clients."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest

from kit.processes import (
    TIMEOUT_S,
    Program,
    forks_with_threads,
    gone,
    is_alive,
    leaving_nothing,
    on_linux,
    program,
    until,
)
from store import requests as ask
from store.requests import Peer
from store.users import UNPRIVILEGED_UID, answer_to
from tenax._core.events import Tick
from tenax._io.loop import Loop
from tenax.store import StoreHost, StoreTimeoutError, TCPStore

__all__ = ["program"]

pytestmark = [on_linux, pytest.mark.process]
T = TypeVar("T")
HERE = "127.0.0.1"


class Agent:
    """A loop that runs during other calls, as in an agent."""

    def __init__(self, **options: object) -> None:
        self.lost: list[str] = []
        self.notices: list[str] = []
        self.loop = Loop()
        self.store = StoreHost(self._on_lost, on_notice=self._on_notice, **options)  # type: ignore[arg-type]
        self.loop.watch(self.store)

    def _on_lost(self, reason: str) -> None:
        self.lost.append(reason)
        self.loop.post(Tick())

    def _on_notice(self, text: str) -> None:
        self.notices.append(text)
        self.loop.post(Tick())

    def run_until(self, condition: Callable[[], bool]) -> None:
        deadline = self.loop.now() + TIMEOUT_S
        while not condition():
            assert self.loop.next_event(lambda: deadline) is not None, "timed out"

    def run_while(self, function: Callable[[], T]) -> T:
        """Run a blocking call in a thread, and the loop meanwhile."""
        results: list[T] = []
        errors: list[BaseException] = []

        def call() -> None:
            try:
                results.append(function())
            except BaseException as error:
                errors.append(error)
            self.loop.soon(lambda: self.loop.post(Tick()))

        thread = threading.Thread(target=call)
        thread.start()
        self.run_until(lambda: bool(results or errors))
        thread.join(TIMEOUT_S)
        if errors:
            raise errors[0]
        return results[0]

    def client(self, port: int) -> TCPStore:
        return self.run_while(lambda: TCPStore(HERE, port, timeout=TIMEOUT_S))

    def close(self) -> None:
        self.store.close()
        self.loop.close()


@pytest.fixture
def agent() -> Iterator[Agent]:
    with leaving_nothing():
        made = Agent()
        yield made
        made.close()


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((HERE, port)) == 0


def test_a_job_that_does_not_use_the_store_starts_no_process(agent: Agent) -> None:
    assert agent.store.fileno() == -1
    for generation in (1, 2):
        agent.store.bind(HERE)
        assert agent.store.fileno() == -1
        agent.store.serve(generation)
        assert agent.store.fileno() >= 0
        assert agent.store.pid == 0
        agent.store.end()
        assert agent.store.fileno() == -1


def test_the_first_client_starts_the_process_and_is_served_by_it(agent: Agent) -> None:
    port = agent.store.bind(HERE)
    agent.store.serve(1)
    store = agent.client(port)
    assert is_alive(agent.store.pid)
    store.set("key", "value")  # the loop does not run: the process serves alone
    assert store.get("key") == b"value"
    store.close()


def test_clients_that_came_before_the_generation_was_served_wait_for_it(agent: Agent) -> None:
    port = agent.store.bind(HERE)
    early = Peer(port)
    early.send(ask.add(b"/n", 5))
    agent.store.serve(1)
    assert agent.run_while(lambda: early.receive(8)) == ask.number(5)
    early.close()


def test_every_generation_has_its_own_port_and_keys_and_the_same_process(agent: Agent) -> None:
    ports, pids = [], []
    for generation in (1, 2, 3):
        ports.append(agent.store.bind(HERE))
        agent.store.serve(generation)
        with agent.client(ports[-1]) as store:
            assert store.num_keys() == 0
            store.set("key", str(generation))
            assert store.get("key") == str(generation).encode()
        pids.append(agent.store.pid)
        assert not any(is_open(port) for port in ports[:-1])
    assert len(set(ports)) == 3
    assert len(set(pids)) == 1


def test_the_end_of_a_generation_resets_its_connections(agent: Agent) -> None:
    port = agent.store.bind(HERE)
    agent.store.serve(1)
    agent.client(port).close()
    with Peer(port) as waiting:
        waiting.send(ask.wait(b"/never"))
        assert waiting.answers() == b""
        agent.store.end()
        assert not is_open(port)
        with pytest.raises(ConnectionResetError):
            waiting.sock.recv(1)


def test_the_port_is_closed_at_the_end_even_if_the_process_is_stuck(agent: Agent) -> None:
    port = agent.store.bind(HERE)
    agent.store.serve(1)
    agent.client(port).close()
    os.kill(agent.store.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, agent.store.pid, os.WSTOPPED)
    agent.store.end()
    assert not is_open(port)


def test_a_fixed_port_can_be_bound_again_at_once(agent: Agent) -> None:
    port = agent.store.bind(HERE)
    for generation in range(1, 10):
        agent.store.serve(generation)
        peer = agent.run_while(lambda: Peer(port))
        peer.send(ask.add(b"/n", 1))
        assert agent.run_while(lambda peer=peer: peer.receive(8)) == ask.number(1)  # type: ignore[misc]
        agent.store.end()
        assert agent.store.bind(HERE, port) == port
        peer.close()


def test_all_bound_ports_stay_open_until_one_is_served(agent: Agent) -> None:
    """A generation may use an earlier port than the last one."""
    first = agent.store.bind(HERE)
    second = agent.store.bind(HERE)
    third = agent.store.bind(HERE)
    assert is_open(first)
    assert is_open(second)
    agent.store.serve(1, second)
    assert not is_open(first)
    assert not is_open(third)
    assert is_open(second)


def test_a_dead_process_is_reported_once_and_replaced_for_the_next_generation(agent: Agent) -> None:
    port = agent.store.bind(HERE)
    agent.store.serve(1)
    agent.client(port).close()
    first = agent.store.pid
    os.kill(first, signal.SIGKILL)
    agent.run_until(lambda: bool(agent.lost))
    assert agent.lost == ["its process was killed by SIGKILL"]
    assert agent.store.fileno() == -1
    assert not is_open(port)
    port = agent.store.bind(HERE)
    agent.store.serve(2)
    with agent.client(port) as store:
        assert store.num_keys() == 0
    assert agent.store.pid != first
    assert len(agent.lost) == 1


def test_a_process_that_dies_between_generations_is_replaced_silently(agent: Agent) -> None:
    port = agent.store.bind(HERE)
    agent.store.serve(1)
    agent.client(port).close()
    agent.store.end()
    first = agent.store.pid
    os.kill(first, signal.SIGKILL)
    os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
    port = agent.store.bind(HERE)
    agent.store.serve(2)
    with agent.client(port) as store:
        assert store.add("n", 1) == 1
    assert agent.store.pid != first
    assert agent.lost == []


def test_the_process_ignores_signals(agent: Agent) -> None:
    port = agent.store.bind(HERE)
    agent.store.serve(1)
    with agent.client(port) as store:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            os.kill(agent.store.pid, number)
        assert store.add("n", 1) == 1
    assert agent.lost == []


def test_invalid_clients_are_reported(agent: Agent) -> None:
    port = agent.store.bind(HERE)
    agent.store.serve(1)
    with Peer(port, greets=False) as peer:
        peer.send(b"hello?")
        agent.run_until(lambda: bool(agent.notices))
    assert agent.notices == [
        "the workers' store closed one connection, the last because it did not send the greeting of a store client"
    ]


@pytest.mark.skipif(os.geteuid() != 0, reason="a process of another user needs root to be started")
def test_what_an_operator_allows_reaches_the_process_and_rejections_come_back() -> None:
    """By default only the user of the run is served on this host."""
    for allow in ((), ("127.0.0.0/8",)):
        with leaving_nothing():
            agent = Agent(allow=allow)
            port = agent.store.bind(HERE)
            agent.store.serve(1, hosts=["10.1.2.3"])
            answer = agent.run_while(lambda port=port: answer_to(HERE, port, UNPRIVILEGED_UID))
            assert answer == (b"abcd" if allow else b"")
            if not allow:
                agent.run_until(lambda agent=agent: bool(agent.notices))
                assert f"127.0.0.1 is a process of uid {UNPRIVILEGED_UID}" in agent.notices[0]
            agent.close()


@forks_with_threads
def test_a_forked_copy_of_the_agent_does_not_keep_the_port_open(agent: Agent) -> None:
    port = agent.store.bind(HERE)
    agent.store.serve(1)
    descriptor = agent.store.fileno()
    agent.store.bind(HERE)
    pid = os.fork()
    if pid == 0:
        try:
            os.fstat(descriptor)
        except OSError:
            os._exit(0 if agent.store.fileno() == -1 else 1)
        os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0
    agent.client(port).close()


AGENT = """
    import sys
    from tenax._core.events import Tick
    from tenax._io.loop import Loop
    from tenax.store import StoreHost
    loop = Loop()
    store = StoreHost(lambda reason: print("lost", reason, flush=True))
    loop.watch(store)
    print(store.bind("127.0.0.1"), flush=True)
    store.serve(1)
    while not store.pid:
        loop._wait(None)
    print(store.pid, flush=True)
    while True:
        loop._wait(None)
"""


def test_the_death_of_the_agent_ends_the_process(program: Callable[..., Program]) -> None:
    agent = program(AGENT)
    port = int(agent.pipe.line())
    with Peer(port) as peer:
        pid = int(agent.pipe.line())
        assert peer.answers() == b""
        agent.send(signal.SIGKILL)
        agent.wait()
        assert gone([pid])
        until(lambda: not is_open(port), "the port to be closed")


def test_a_process_that_cannot_be_started_is_reported(program: Callable[..., Program]) -> None:
    """No descriptor is free for its channel."""
    agent = program(
        """
        import os, resource, socket
        from tenax._io.loop import Loop
        from tenax.store import StoreHost
        lost = []
        loop = Loop()
        store = StoreHost(lost.append)
        loop.watch(store)
        port = store.bind("127.0.0.1")
        store.serve(1)
        caller = socket.create_connection(("127.0.0.1", port))
        free = os.open(os.devnull, os.O_RDONLY)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, free))
        while not lost:
            loop._wait(None)
        print(*lost, flush=True)
        print(store.fileno(), flush=True)
        """
    )
    assert agent.pipe.line() == (
        "could not start the helper process tenax-store: Too many open files; "
        "raise the limits on processes and open files (ulimit -u, ulimit -n, the container's pids limit)"
    )
    assert agent.pipe.line() == "-1"
    assert agent.wait() == 0


def test_a_client_times_out_if_the_agent_does_not_run(agent: Agent) -> None:
    """The listener is not handed over: the kernel accepts the connection, and no process answers."""
    port = agent.store.bind(HERE)
    agent.store.serve(1)
    with pytest.raises(StoreTimeoutError):
        TCPStore(HERE, port, timeout=0.05)
