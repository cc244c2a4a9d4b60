"""An agent inside another program leaves its signal handlers, threads and event loops as they were."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from kit.processes import AT_ONCE_S, Program, gone, on_linux, program

pytestmark = on_linux
__all__ = ["program"]

Start = Callable[..., Program]

# Workers that print their pid and the signal that they receive.
HOST = """
import asyncio, os, signal, sys, threading
from tenax.agent.server import LocalElasticAgent, SimpleElasticAgent, WorkerSpec
from tenax.multiprocessing import SignalException
from kit.descriptors import descriptors

WORKER = '''
import os, signal, sys
def received(number, _):
    os.write(2, b"received %d\\\\n" % number)
    os._exit(0)
for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"):
    signal.signal(getattr(signal, name), received)
os.write(2, b"%d\\\\n" % os.getpid())
while True:
    signal.pause()
'''

class WithHooks(LocalElasticAgent):
    def _stop_workers(self, worker_group):
        super()._stop_workers(worker_group)

def agent(kind=LocalElasticAgent, **options):
    # The workers write to the standard output of this process, which the test reads.
    os.dup2(1, 2)
    args = ("-I", "-S", "-c", WORKER)
    spec = WorkerSpec(entrypoint=sys.executable, args=args, local_world_size=2, monitor_interval=0.01)
    return kind(spec, **options)

def handlers():
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    return [signal.getsignal(number) for number in numbers], signal.set_wakeup_fd(-1)
"""


def signal_host(host: Program, number: signal.Signals) -> list[int]:
    """Wait until both workers run, send the host a signal, and return their pids."""
    pids = host.pipe.numbers(2)
    host.send(number)
    return pids


@pytest.mark.parametrize("kind", ["LocalElasticAgent", "WithHooks"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=str)
def test_a_signal_ends_the_run_with_an_exception(program: Start, number: signal.Signals, kind: str) -> None:
    """The workers get the same signal, and the host's handlers are restored."""
    host = program(
        HOST
        + f"""
before = handlers()
elastic_agent = agent({kind})
try:
    elastic_agent.run()
except SignalException as error:
    print(error.sigval.name, elastic_agent.get_worker_group().state.name if {kind} is LocalElasticAgent else "STOPPED")
print(handlers() == before)
"""
    )
    pids = signal_host(host, number)
    lines = host.pipe.rest().split("\n")
    assert host.wait() == 0, host.errors
    assert sorted(lines[:2]) == [f"received {number:d}"] * 2
    assert lines[2:] == [f"{number.name} STOPPED", "True", ""]
    assert gone(pids, 0)


def test_only_the_configured_signals_are_handled(program: Start) -> None:
    """``signals_to_handle``: other signals keep their effect."""
    host = program(
        HOST
        + """
try:
    agent(signals_to_handle="SIGUSR1").run()
except SignalException as error:
    print(error.sigval.name, flush=True)
agent(signals_to_handle="SIGUSR1").run()
"""
    )
    signal_host(host, signal.SIGUSR1)
    assert [host.pipe.line() for _ in range(3)] == ["received 10", "received 10", "SIGUSR1"]
    pids = signal_host(host, signal.SIGTERM)
    assert host.wait() == -signal.SIGTERM
    assert gone(pids, AT_ONCE_S)


# Waits for a notice, prints it, and exits.
WAIT_FOR_NOTICE = """
import os, time
from tenax import preemption
os.write(2, b"%d\\n" % os.getpid())
while not (notice := preemption.notice()):
    time.sleep(0.002)
os.write(2, f"{notice.why} {30 < notice.seconds_left <= 60}\\n".encode())
"""


def test_a_notice_reaches_the_workers_and_stops_none(program: Start, tmp_path: Path) -> None:
    """``notice_signals`` of an agent inside another program."""
    host = program(
        """
import os, sys
from tenax.agent.server import LocalElasticAgent, WorkerSpec
from tenax._logs.specs import DefaultLogsSpecs
os.dup2(1, 2)
spec = WorkerSpec(entrypoint=sys.executable, args=("-c", sys.argv[1]))
agent = LocalElasticAgent(spec, DefaultLogsSpecs(log_dir=sys.argv[2]), notice_signals="SIGUSR1", notice_s=60)
print(agent.run().state.name)
""",
        WAIT_FOR_NOTICE,
        tmp_path,
    )
    host.pipe.numbers(1)
    host.send(signal.SIGUSR1)
    assert host.pipe.rest().split("\n") == ["its agent received SIGUSR1 True", "SUCCEEDED", ""], host.errors
    assert host.wait() == 0


def test_an_ignored_hangup_stays_ignored(program: Start) -> None:
    """``nohup``: although SIGHUP is among the handled signals."""
    host = program(
        HOST
        + """
try:
    agent().run()
except SignalException as error:
    print(error.sigval.name)
""",
        preexec_fn=_ignore_hangup,
    )
    signal_host(host, signal.SIGHUP)
    host.send(signal.SIGTERM)
    assert [host.pipe.line() for _ in range(3)] == ["received 15", "received 15", "SIGTERM"]


def _ignore_hangup() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def test_a_second_interrupt_kills_the_workers(program: Start) -> None:
    """If they have not exited after the first one."""
    host = program(
        HOST.replace("os._exit(0)", "signal.pause()")
        + """
try:
    agent().run()
except SignalException as error:
    print(error.sigval.name)
"""
    )
    pids = signal_host(host, signal.SIGINT)
    assert [host.pipe.line() for _ in range(2)] == ["received 2", "received 2"]
    host.send(signal.SIGINT)
    assert host.pipe.line() == "SIGINT"
    assert gone(pids, 0)


def test_an_agent_in_another_thread_handles_no_signals(program: Start) -> None:
    """The handlers of the host stay in effect."""
    host = program(
        HOST
        + """
signal.signal(signal.SIGTERM, lambda *_: (print("host", flush=True), os._exit(3)))
thread = threading.Thread(target=agent().run)
thread.start()
thread.join()
"""
    )
    pids = signal_host(host, signal.SIGTERM)
    assert host.pipe.line() == "host"
    assert host.wait() == 3
    assert gone(pids, AT_ONCE_S)


ASYNC = """
def work():
    return os.getpid()

def function_agent():
    return LocalElasticAgent(WorkerSpec(entrypoint=work), start_method=sys.argv[1])

async def main():
    loop = asyncio.get_running_loop()
    received = []
    loop.add_signal_handler(signal.SIGUSR1, received.append, "usr1")
    inside = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(inside)
    {body}
    assert signal.set_wakeup_fd(-1) == inside, "asyncio's descriptor was not restored"
    signal.set_wakeup_fd(inside)
    os.kill(os.getpid(), signal.SIGUSR1)
    while not received:
        await asyncio.sleep(0.001)
    print(len(result.return_values), received)

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.parametrize("method", ["spawn", "fork"])
@pytest.mark.parametrize(
    "body",
    ["result = function_agent().run()", "result = await loop.run_in_executor(None, function_agent().run)"],
    ids=["in a coroutine", "in an executor"],
)
def test_a_run_inside_an_event_loop_keeps_its_signal_handlers(program: Start, body: str, method: str) -> None:
    """In a coroutine that blocks the loop, or in an executor."""
    host = program(HOST + ASYNC.replace("{body}", body), method)
    assert host.pipe.rest() == "1 ['usr1']\n", host.errors
    assert host.wait() == 0


def test_a_signal_to_an_event_loop_during_a_run_is_not_lost(program: Start) -> None:
    """asyncio handles it after the run."""
    host = program(
        HOST
        + """
async def main():
    loop = asyncio.get_running_loop()
    received = []
    loop.add_signal_handler(signal.SIGUSR2, received.append, "usr2")
    try:
        agent().run()
    except SignalException as error:
        print(error.sigval.name)
    for _ in range(1000):
        await asyncio.sleep(0.001)
        if received:
            break
    print(received)
asyncio.run(main())
"""
    )
    host.pipe.numbers(2)
    host.send(signal.SIGUSR2)
    host.send(signal.SIGTERM)
    assert host.pipe.rest().split("\n")[-3:] == ["SIGTERM", "['usr2']", ""], host.errors
