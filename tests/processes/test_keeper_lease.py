"""The lease with real workers: it expires even if the agent itself is stopped."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from kit.processes import Program, gone, is_alive, on_linux, program, until

pytestmark = on_linux
__all__ = ["program"]

Start = Callable[..., Program]

# Two workers that ignore what can be ignored, each with a daemon in a session of its own that ignores it too. The agent
# holds them for a moment, stops itself, and when it is continued, prints the events it receives.
AGENT = """
import os, signal, sys
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
keeper = KeeperProcess()
hearing = EventCollector(keeper)
output = Pipe()
for rank in range(2):
    keeper.start(7, rank, launch(python(STUBBORN), descriptors={1: output.writer}))
    hearing.take(events.WorkerStarted)
print(keeper.pid, *output.numbers(4), flush=True)
keeper.hold(LEASE)
os.kill(os.getpid(), signal.SIGSTOP)
print("fenced", hearing.take(events.Fenced).generation, flush=True)
for rank in range(2):
    exited = hearing.take(events.WorkerExited, local_rank=rank)
    print(exited.exit_code, exited.before_stop, flush=True)
"""
THE_NEXT = """
keeper.kill(7)
print("cleared", hearing.take(events.NodeCleared).generation, flush=True)
keeper.hold(600)
keeper.start(8, 0, launch(["/bin/sh", "-c", "exit 5"]))
print(hearing.take(events.WorkerExited, generation=8).exit_code, flush=True)
keeper.close()
"""


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_a_stopped_agent_loses_its_workers_and_learns_of_it(program: Start) -> None:
    """The keeper kills workers and daemons; the continued agent receives the event and continues."""
    agent = program(AGENT.replace("LEASE", "0.05") + THE_NEXT)
    keeper, *job = map(int, agent.pipe.line().split())
    until(lambda: is_stopped(agent.pid), "the agent that stops itself")
    assert gone(job)
    assert is_alive(keeper)
    agent.send(signal.SIGCONT)
    assert agent.pipe.line() == "fenced 7"
    assert [agent.pipe.line() for _ in range(2)] == ["-9 False", "-9 False"]
    assert [agent.pipe.line() for _ in range(2)] == ["cleared 7", "5"]
    assert agent.wait() == 0, agent.errors


def test_an_agent_that_is_stopped_for_less_than_the_lease_keeps_its_workers(program: Start) -> None:
    """Or without a lease."""
    agent = program(AGENT.replace("LEASE", "600"))
    keeper, *job = map(int, agent.pipe.line().split())
    until(lambda: is_stopped(agent.pid), "the agent that stops itself")
    agent.send(signal.SIGCONT)
    until(lambda: not is_stopped(agent.pid), "the agent to continue")
    assert all(map(is_alive, [keeper, *job]))
    agent.send(signal.SIGKILL)
    agent.wait()
    assert gone([keeper, *job])


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_the_lease_covers_functions(program: Start, method: str) -> None:
    """Where the keeper forks instead of starting a program."""
    code = """
    import os, signal, sys
    import msgspec
    from tenax._core import events
    from tenax._node.workers import make_entrypoint
    from kit.processes import EventCollector, Pipe
    def stubborn():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.fork() == 0:
            os.setsid()
            if os.fork():
                os._exit(0)
        os.write(1, b"%d\\n" % os.getpid())
        while True:
            signal.pause()
    if __name__ == "__main__":
        entrypoint = make_entrypoint(stubborn, {0: ()}, sys.argv[1], "stubborn")
        keeper = entrypoint.keeper()
        hearing = EventCollector(keeper)
        output = Pipe()
        launch = entrypoint.launch(0, dict(os.environ))
        launch = msgspec.structs.replace(launch, descriptors={**launch.descriptors, 1: output.writer})
        keeper.start(1, 0, launch)
        hearing.take(events.WorkerStarted)
        entrypoint.release(0)
        print(*output.numbers(2), flush=True)
        keeper.hold(0.05)
        print("fenced", hearing.take(events.Fenced).generation, hearing.take(events.WorkerExited).exit_code, flush=True)
        keeper.close()
        entrypoint.close()
    """
    agent = program(code, method)
    pids = [int(pid) for pid in agent.pipe.line().split()]
    assert agent.pipe.line() == "fenced 1 -9"
    assert gone(pids)
    assert agent.wait() == 0, agent.errors
