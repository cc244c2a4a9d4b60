"""Kept connections: the peer sees an agent's death only after all processes of the agent are dead."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Iterator

import pytest

from kit.processes import TIMEOUT_S, Program, gone, is_alive, on_linux, program

pytestmark = on_linux
__all__ = ["program"]

Start = Callable[..., Program]

# An agent with a link, and with workers that ignore what can be ignored, each with a daemon in a session of its own.
AGENT = """
import os, signal, socket, sys
from kit.processes import EventCollector, Pipe, launch, python
from tenax._core import events
from tenax._processes.keeper import KeeperProcess

STUBBORN = '''
import os, signal
for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"):
    signal.signal(getattr(signal, name), signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
print(os.getpid(), flush=True)
while True:
    signal.pause()
'''
link = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
keeper = KeeperProcess()
hearing = EventCollector(keeper)
keeper.keep("link", link.fileno())
output = Pipe()
for rank in range(4):
    keeper.start(1, rank, launch(python(STUBBORN), descriptors={1: output.writer}))
    hearing.take(events.WorkerStarted)
print(keeper.pid, *output.numbers(8), flush=True)
"""
WAIT = "\nhearing.take(events.NodeCleared, timeout_s=600)\n"


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(TIMEOUT_S)
        yield listener


def linked(listener: socket.socket) -> socket.socket:
    link, _ = listener.accept()
    link.settimeout(TIMEOUT_S)
    return link


@pytest.mark.parametrize("is_read", [True, False], ids=["nothing unread", "something unread"])
def test_the_link_of_a_killed_agent_closes_after_all_its_processes_are_dead(
    program: Start, listener: socket.socket, is_read: bool
) -> None:
    """It closes with an orderly shutdown, not with a reset."""
    agent = program(AGENT + WAIT, listener.getsockname()[1])
    with linked(listener) as link:
        keeper, *job = map(int, agent.pipe.line().split())
        assert all(map(is_alive, job))
        if not is_read:
            link.sendall(b"data that a dead agent will not read")
        agent.send(signal.SIGKILL)
        assert link.recv(1) == b""
        assert gone(job, 0), "the link ended while workers lived"
    agent.wait()
    assert gone([keeper])


def test_the_link_of_an_exiting_agent_closes_after_all_its_processes_are_dead(
    program: Start, listener: socket.socket
) -> None:
    """However the agent closes its end."""
    agent = program(AGENT + "\nlink.close()\nkeeper.close()\n", listener.getsockname()[1])
    with linked(listener) as link:
        _, *job = map(int, agent.pipe.line().split())
        assert link.recv(1) == b""
        assert gone(job, 0)
    assert agent.wait() == 0, agent.errors


def test_a_released_link_closes_with_the_agent(program: Start, listener: socket.socket) -> None:
    """Workers hold no copy of it and continue."""
    agent = program(AGENT + '\nkeeper.release("link")\nlink.close()\n' + WAIT, listener.getsockname()[1])
    with linked(listener) as link:
        keeper, *job = map(int, agent.pipe.line().split())
        assert link.recv(1) == b""
        assert all(map(is_alive, [keeper, *job]))
    agent.send(signal.SIGKILL)
    agent.wait()
    assert gone([keeper, *job])


def test_a_new_link_replaces_the_kept_one(program: Start, listener: socket.socket) -> None:
    """After a reconnect the first copy is closed; releasing a link that is not kept is allowed."""
    again = """
new = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
keeper.keep("link", new.fileno())
keeper.release("no such link")
link.close()
"""
    agent = program(AGENT + again + WAIT, listener.getsockname()[1])
    with linked(listener) as old:
        _, *job = map(int, agent.pipe.line().split())
        with linked(listener) as new:
            assert old.recv(1) == b""
            assert all(map(is_alive, job))
            agent.send(signal.SIGKILL)
            assert new.recv(1) == b""
            assert gone(job, 0)
    agent.wait()


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_forked_functions_hold_no_copy_of_the_link(program: Start, listener: socket.socket, method: str) -> None:
    """Although a forked worker is a copy of the keeper."""
    code = """
    import os, signal, socket, sys
    import msgspec
    from tenax._core import events
    from tenax._node.workers import make_entrypoint
    from kit.processes import EventCollector, Pipe
    def stay():
        os.write(1, b"%d\\n" % os.getpid())
        while True:
            signal.pause()
    if __name__ == "__main__":
        entrypoint = make_entrypoint(stay, {0: ()}, sys.argv[2], "stay")
        keeper = entrypoint.keeper()
        hearing = EventCollector(keeper)
        link = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
        keeper.keep("link", link.fileno())
        output = Pipe()
        launch = entrypoint.launch(0, dict(os.environ))
        launch = msgspec.structs.replace(launch, descriptors={**launch.descriptors, 1: output.writer})
        keeper.start(1, 0, launch)
        hearing.take(events.WorkerStarted)
        entrypoint.release(0)
        print(*output.numbers(1), flush=True)
        keeper.release("link")
        link.close()
        hearing.take(events.NodeCleared, timeout_s=600)
    """
    agent = program(code, listener.getsockname()[1], method)
    with linked(listener) as link:
        worker = int(agent.pipe.line())
        assert link.recv(1) == b""
        assert is_alive(worker)
    agent.send(signal.SIGKILL)
    agent.wait()
    assert gone([worker])
