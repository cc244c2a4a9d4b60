"""No process of the job outlives its agent; and the limits of a keeper."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kit.processes import (
    AT_ONCE_S,
    UNPRIVILEGED_UID,
    Program,
    gone,
    interpreter_for,
    is_alive,
    needs_root,
    on_linux,
    program,
)

pytestmark = on_linux
__all__ = ["program"]

Start = Callable[..., Program]

# Two workers that ignore what can be ignored, each with a daemon in a session of its own that ignores it too.
AGENT = """
import os, signal, sys
from kit.processes import EventCollector, launch, python
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
for rank in range(2):
    keeper.start(1, rank, launch(python(STUBBORN), descriptors={1: 1}))
print(keeper.pid, flush=True)
"""
WAIT = "\nhearing.take(events.NodeCleared, timeout_s=600)\n"
PROCESSES = 5  # the keeper, the workers, the daemons


@pytest.mark.parametrize("user", [None, pytest.param(UNPRIVILEGED_UID, marks=needs_root)], ids=["root", "without root"])
@pytest.mark.parametrize("attempt", range(3))
def test_all_processes_die_with_a_killed_agent(program: Start, user: int | None, attempt: int) -> None:
    """Within a second, with or without privileges."""
    agent = program(AGENT + WAIT, user=user)
    pids = agent.pipe.numbers(PROCESSES)
    assert all(map(is_alive, pids)), agent.errors
    agent.send(signal.SIGKILL)
    agent.wait()
    assert gone(pids, AT_ONCE_S)


def _block_usr1() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])


def test_all_processes_die_with_an_agent_that_exits(program: Start) -> None:
    """By ``os._exit`` or a crash, without closing the keeper."""
    agent = program(AGENT + "\nsignal.sigwait([signal.SIGUSR1])\nos._exit(3)\n", preexec_fn=_block_usr1)
    pids = agent.pipe.numbers(PROCESSES)
    agent.send(signal.SIGUSR1)
    assert agent.wait() == 3
    assert gone(pids, AT_ONCE_S)


def test_commands_of_a_dead_agent_leave_no_process(program: Start) -> None:
    """It dies while its keeper starts, with commands in the channel."""
    agent = program(AGENT + "\nos.kill(os.getpid(), signal.SIGKILL)\n")
    agent.wait()
    text = agent.pipe.rest()  # ends when the last of them is gone, for all of them hold this pipe
    assert gone([int(line) for line in text.split()], AT_ONCE_S)


def test_a_child_of_the_agent_does_not_hide_its_death(program: Start) -> None:
    """A forked child holds copies of the agent's descriptors; the job still ends."""
    fork = """
bystander = os.fork()
if bystander == 0:
    while True:
        signal.pause()
print(-bystander, flush=True)
"""
    agent = program(AGENT + fork + WAIT)
    bystander, *pids = agent.pipe.numbers(PROCESSES + 1)
    try:
        agent.send(signal.SIGKILL)
        agent.wait()
        assert gone(pids, AT_ONCE_S)
        assert is_alive(-bystander)
    finally:
        os.kill(-bystander, signal.SIGKILL)


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_functions_die_with_their_agent(program: Start, method: str) -> None:
    """With every start method, together with their daemons."""
    code = """
    import os, signal, sys
    def stubborn():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.fork() == 0:
            os.setsid()
            if os.fork():
                os._exit(0)
        os.write(int(os.environ["PID_FD"]), b"%d\\n" % os.getpid())
        while True:
            signal.pause()
    if __name__ == "__main__":
        from tenax.agent.server import LocalElasticAgent, WorkerSpec
        os.environ["PID_FD"] = "1"
        LocalElasticAgent(WorkerSpec(entrypoint=stubborn), start_method=sys.argv[1]).run()
    """
    agent = program(code, method)
    pids = agent.pipe.numbers(2)
    agent.send(signal.SIGKILL)
    agent.wait()
    assert gone(pids, AT_ONCE_S)
    assert agent.pipe.rest() == ""


@needs_root
def test_a_full_process_table_fails_only_the_start(program: Start) -> None:
    """With a message; running workers are not affected."""
    code = """
    import resource
    from kit.processes import EventCollector, launch
    from tenax._core import events
    from tenax._processes.keeper import KeeperProcess
    keeper = KeeperProcess()
    hearing = EventCollector(keeper)
    keeper.start(1, 0, launch(["/bin/sleep", "60"]))
    hearing.take(events.WorkerStarted)
    resource.prlimit(keeper.pid, resource.RLIMIT_NPROC, (3, 3))
    keeper.start(1, 1, launch(["/bin/sleep", "60"]))
    failed = hearing.take(events.WorkerStartFailed)
    print(failed.local_rank, failed.exit_code, failed.reason, len(hearing.events))
    keeper.close()
    """
    alone = 100_000 + os.getpid()  # the limit counts all processes of a user
    agent = program(code, user=alone)
    assert agent.pipe.rest().split("\n")[0] == "1 1 Resource temporarily unavailable 0", agent.errors
    assert agent.wait() == 0


@pytest.fixture
def untouchable() -> Iterator[str]:
    """A Python that runs as root (setuid)."""
    folder = Path(tempfile.mkdtemp(prefix="tenax-test-"))
    folder.chmod(0o755)
    copy = folder / "python"
    shutil.copy(os.path.realpath(interpreter_for(UNPRIVILEGED_UID)), copy)
    copy.chmod(0o4755)
    yield str(copy)
    shutil.rmtree(folder)


@needs_root
def test_a_worker_of_another_user_is_abandoned(program: Start, untouchable: str) -> None:
    """A worker that runs as another user (as with sudo) cannot be signalled; the keeper continues."""
    code = """
    import os, signal, sys
    from kit.processes import EventCollector, launch
    from tenax._core import events
    from tenax._processes.keeper import KeeperProcess
    keeper = KeeperProcess()
    hearing = EventCollector(keeper)
    become_root = "import os, signal; os.setresuid(0, 0, 0); print(os.getpid(), flush=True); signal.pause()"
    reader, writer = os.pipe()
    keeper.start(1, 0, launch([sys.argv[1], "-ISc", become_root], descriptors={1: writer}))
    os.write(1, os.read(reader, 100))
    keeper.start(1, 1, launch(["/bin/sleep", "60"]))
    hearing.take(events.WorkerStarted, local_rank=0)
    hearing.take(events.WorkerStarted, local_rank=1)
    keeper.signal(1, signal.SIGTERM)
    print(hearing.take(events.WorkerExited).exit_code)
    keeper.kill(1)
    print(hearing.receives_nothing())
    keeper.close()
    print("closed")
    """
    agent = program(code, untouchable, user=UNPRIVILEGED_UID)
    pid = int(agent.pipe.line())
    try:
        assert agent.pipe.rest().split() == ["-15", "True", "closed"], agent.errors
        assert agent.wait() == 0
        assert is_alive(pid)
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
