"""The keeper with real processes: the state in which workers start, and that none survives a kill."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.processes import EventCollector, Pipe, gone, is_alive, launch, leaving_nothing, on_linux, pipe, python, until
from tenax._core import events
from tenax._processes.keeper import MARK, KeeperProcess

pytestmark = on_linux
__all__ = ["pipe"]


@pytest.fixture
def hearing() -> Iterator[EventCollector]:
    with leaving_nothing():
        keeper = KeeperProcess()
        yield EventCollector(keeper)
        keeper.close()


def keeper_of(hearing: EventCollector) -> KeeperProcess:
    assert isinstance(hearing.processes, KeeperProcess)
    return hearing.processes


def start(hearing: EventCollector, argv: list[str], out: Pipe | None = None, rank: int = 0, **options: object) -> None:
    """Start a worker whose standard output is the pipe."""
    descriptors = {1: out.writer} if out is not None else {}
    given = options.pop("descriptors", {})
    assert isinstance(given, dict)
    hearing.processes.start(1, rank, launch(argv, descriptors={**descriptors, **given}, **options))  # type: ignore[arg-type]


def output_of(hearing: EventCollector, argv: list[str], out: Pipe, **options: object) -> str:
    """Return what a worker prints until its end."""
    start(hearing, argv, out, **options)
    text = out.rest()
    assert hearing.take(events.WorkerExited).exit_code == 0
    return text


# --- what a worker finds ----------------------------------------------------------------------------------------------


def test_a_worker_leads_its_own_group_and_session(hearing: EventCollector, pipe: Pipe) -> None:
    """So Ctrl-C in the agent's terminal does not reach it, and its group can be signalled."""
    text = output_of(hearing, python("import os; print(os.getpid(), os.getpgrp(), os.getsid(0))"), pipe)
    pid = hearing.take(events.WorkerStarted).pid
    assert text.split() == [str(pid)] * 3


def test_a_worker_has_only_the_given_descriptors(hearing: EventCollector) -> None:
    """None of the keeper, the agent or another worker."""
    pipes = [Pipe() for _ in range(4)]
    argv = python("import os; print(*sorted(map(int, os.listdir('/proc/self/fd'))))")
    for rank, each in enumerate(pipes):
        start(hearing, argv, each, rank=rank, descriptors={9: each.writer} if rank == 2 else {})
    texts = [each.rest().split() for each in pipes]
    for each in pipes:
        each.close()
    listing = "3"  # of the worker itself, while it looks
    assert texts == [["0", "1", "2", listing], ["0", "1", "2", listing], ["0", "1", "2", listing, "9"], texts[0]]


def test_descriptors_get_the_requested_numbers(hearing: EventCollector) -> None:
    """Also if they are swapped or equal the keeper's own numbers."""
    numbers = [1, 3, 4, 5, 6, 7, 8, 12, 200]
    pipes = {number: Pipe() for number in numbers}
    code = "import os, sys; [os.write(n, b'%d' % n) for n in map(int, sys.argv[1:])]"
    descriptors = {number: each.writer for number, each in pipes.items()}
    start(hearing, python(code, *numbers), descriptors=descriptors)
    assert {number: each.rest() for number, each in pipes.items()} == {number: str(number) for number in numbers}
    for each in pipes.values():
        each.close()


def test_the_environment_is_exactly_the_given_one(hearing: EventCollector, pipe: Pipe) -> None:
    """Byte for byte; only the keeper's mark is added."""
    given = {"EMPTY": "", "SPACE": " a b ", "EQUALS": "a=b", "LINES": "a\nb", "BYTES": "\udcff\udc80", "Ü": "ü"}
    text = output_of(hearing, ["/usr/bin/env", "-0"], pipe, env=given)
    found = dict(variable.split("=", 1) for variable in text.rstrip("\0").split("\0"))
    assert found.pop(MARK)
    assert found == given


AGENT = """
import os, signal, sys
from kit.processes import EventCollector, launch
from tenax._core import events
from tenax._processes.keeper import KeeperProcess
if sys.argv[1] == "nohup":
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
keeper = KeeperProcess()
hearing = EventCollector(keeper)
keeper.start(1, 0, launch(sys.argv[2:], env=dict(os.environ)))
hearing.take(events.WorkerExited)
keeper.close()
"""


def output_below_an_agent(mood: str, argv: list[str], **variables: bytes) -> bytes:
    """Return what a worker prints whose agent is another process with these variables."""
    env = {**os.environb, b"PYTHONPATH": os.fsencode(Path(__file__).parents[1])}
    env.update((name.encode(), value) for name, value in variables.items())
    done = subprocess.run(python(AGENT, mood, *argv, flags=()), env=env, capture_output=True, timeout=30)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("value", [b"\xc3\xa4", b"\xe4"])
def test_the_environment_survives_another_encoding(value: bytes) -> None:
    """Agent and keeper may decode bytes differently; the worker gets them unchanged."""
    output = output_below_an_agent("calm", ["/usr/bin/printenv", "WORD"], WORD=value, PYTHONUTF8=b"0", LC_ALL=b"C")
    assert output == value + b"\n"


def ignored_in(status: str) -> set[int]:
    mask = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigIgn"))
    # 32 and 33 are the C library's own, which it ignores in what it spawns.
    return {number for number in range(1, 65) if mask >> (number - 1) & 1} - {32, 33}


STATUS = ["/bin/cat", "/proc/self/status"]  # not Python, which would change it
INHERITED = ignored_in(Path("/proc/self/status").read_text()) - {signal.SIGPIPE, signal.SIGXFSZ}


def test_workers_start_with_default_signal_handling(hearing: EventCollector, pipe: Pipe) -> None:
    """Signals that the keeper or Python ignores are reset, and none is blocked."""
    status = output_of(hearing, STATUS, pipe)
    assert ignored_in(status) == INHERITED
    assert "SigBlk:\t0000000000000000" in status


def test_an_inherited_ignored_hangup_stays_ignored() -> None:
    """As with ``nohup``; no other signal is ignored."""
    assert ignored_in(output_below_an_agent("nohup", STATUS).decode()) == INHERITED | {signal.SIGHUP}


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs to choose from")
def test_a_worker_runs_on_its_cpus(hearing: EventCollector, pipe: Pipe) -> None:
    """The worker is bound before its program runs; the keeper is not bound."""
    last = max(os.sched_getaffinity(0))
    argv = python("import os; print(*os.sched_getaffinity(0))")
    assert output_of(hearing, argv, pipe, cpus=(last,)).split() == [str(last)]
    assert os.sched_getaffinity(keeper_of(hearing).pid) == os.sched_getaffinity(0)


def test_a_worker_starts_in_the_given_directory(hearing: EventCollector, pipe: Pipe, tmp_path: Path) -> None:
    assert output_of(hearing, ["/bin/pwd"], pipe, cwd=str(tmp_path)).strip() == str(tmp_path)


# --- what cannot be started -------------------------------------------------------------------------------------------


def refused(hearing: EventCollector, argv: list[str], **options: object) -> tuple[int, str]:
    start(hearing, argv, **options)
    failed = hearing.take(events.WorkerStartFailed)
    return failed.exit_code, failed.reason


def test_a_missing_program_fails_with_127(hearing: EventCollector) -> None:
    """As in a shell. The message has the name that the user wrote, not a searched path."""
    assert refused(hearing, ["no-such-program"]) == (127, "No such file or directory: 'no-such-program'")
    assert refused(hearing, ["/no/such"]) == (127, "No such file or directory: '/no/such'")
    assert refused(hearing, ["/dev/null/x"])[0] == 127


def test_a_program_that_cannot_be_executed_fails_with_126(hearing: EventCollector, tmp_path: Path) -> None:
    """A file without permission, a directory, and a file that is not a program."""
    plain = tmp_path / "plain"
    plain.write_text("#!/bin/sh\n")
    assert refused(hearing, [str(plain)]) == (126, f"Permission denied: {str(plain)!r}")
    assert refused(hearing, [str(tmp_path)])[0] == 126
    plain.write_bytes(b"\0\1\2\3")
    plain.chmod(0o755)
    assert refused(hearing, [str(plain)]) == (126, f"Exec format error: {str(plain)!r}")


def test_a_missing_working_directory_is_reported(hearing: EventCollector) -> None:
    """The message has the directory, not the program."""
    assert refused(hearing, ["/bin/true"], cwd="/no/such/place") == (
        127,
        "No such file or directory: '/no/such/place'",
    )


def test_a_nul_in_an_argument_or_variable_fails_the_start(hearing: EventCollector) -> None:
    """With a reason; the keeper continues."""
    assert refused(hearing, ["/bin/echo", "a\0b"]) == (1, "ValueError: embedded null byte")
    assert refused(hearing, ["/bin/true"], env={"A": "\0"}) == (1, "ValueError: embedded null byte")


def test_a_keeper_without_free_descriptors_reports_it_and_continues(hearing: EventCollector) -> None:
    """The start fails; later starts succeed when descriptors are free again."""
    keeper = keeper_of(hearing)
    start(hearing, ["/bin/true"])
    hearing.take(events.WorkerExited)
    before = resource.prlimit(keeper.pid, resource.RLIMIT_NOFILE)
    used = max(int(entry) for entry in os.listdir(f"/proc/{keeper.pid}/fd")) + 1
    resource.prlimit(keeper.pid, resource.RLIMIT_NOFILE, (used, before[1]))
    assert refused(hearing, ["/bin/true"]) == (1, "Too many open files")
    resource.prlimit(keeper.pid, resource.RLIMIT_NOFILE, before)
    start(hearing, ["/bin/true"])
    assert hearing.take(events.WorkerExited).exit_code == 0


def test_a_keeper_that_loses_descriptors_ends_everything(hearing: EventCollector, pipe: Pipe) -> None:
    """Descriptors lost in transit would mix up the output of workers."""
    keeper = keeper_of(hearing)
    start(hearing, ["/bin/sleep", "60"])
    pid = hearing.take(events.WorkerStarted).pid
    used = max(int(entry) for entry in os.listdir(f"/proc/{keeper.pid}/fd")) + 1
    resource.prlimit(keeper.pid, resource.RLIMIT_NOFILE, (used, used))
    start(hearing, ["/bin/echo"], pipe)
    hearing.take(events.KeeperLost)
    assert gone([pid])


# --- ends -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM, signal.SIGINT, signal.SIGABRT])
def test_a_killed_worker_has_the_negative_signal_as_exit_code(hearing: EventCollector, number: signal.Signals) -> None:
    """Whichever process sent the signal."""
    start(hearing, ["/bin/sleep", "60"])
    os.kill(hearing.take(events.WorkerStarted).pid, number)
    assert hearing.take(events.WorkerExited) == events.WorkerExited(1, 0, -number, before_stop=True)


def test_an_exit_has_the_time_of_its_detection(hearing: EventCollector) -> None:
    """So an agent that was stopped still knows which worker exited first."""
    start(hearing, ["/bin/sleep", "60"])
    pid = hearing.take(events.WorkerStarted).pid
    os.kill(pid, signal.SIGKILL)
    until(lambda: not os.path.exists(f"/proc/{pid}"), "the keeper to reap it")
    noticed_at = time.monotonic()
    hearing.take(events.WorkerExited)
    assert hearing.ended_at <= noticed_at


def test_a_stopped_worker_receives_signals(hearing: EventCollector) -> None:
    """It is continued after the signal."""
    start(hearing, ["/bin/sleep", "60"])
    pid = hearing.take(events.WorkerStarted).pid
    os.kill(pid, signal.SIGSTOP)
    hearing.processes.signal(1, signal.SIGTERM)
    assert hearing.take(events.WorkerExited).exit_code == -signal.SIGTERM


def test_a_stopped_child_of_a_signalled_worker_is_continued(hearing: EventCollector, pipe: Pipe) -> None:
    """So that it can react and need not be killed."""
    start(hearing, ["/bin/sh", "-c", "sleep 60 & echo $!; wait"], pipe)
    child = int(pipe.line())
    os.kill(child, signal.SIGSTOP)
    hearing.processes.signal(1, signal.SIGTERM)
    hearing.take(events.WorkerExited)
    hearing.processes.clear(1)
    hearing.take(events.NodeCleared)


def test_a_program_behind_a_shell_gets_the_signal(hearing: EventCollector, pipe: Pipe) -> None:
    """``sh -c 'python train.py & wait'``: the shell dies; the program gets the signal and its grace period."""
    trap = """
    import os, signal, sys
    def save(*_):
        print("saving", flush=True)
        for _ in range(20):
            os.sched_yield()
        print("saved", flush=True)
        os._exit(0)
    signal.signal(signal.SIGTERM, save)
    os.write(1, b"ready\\n")  # a signal that comes while "print" is at work could not print itself
    while True:
        signal.pause()
    """
    start(hearing, ["/bin/sh", "-c", '"$@" & wait', "sh", *python(trap)], pipe)
    assert pipe.line() == "ready"
    hearing.processes.signal(1, signal.SIGTERM)
    assert hearing.take(events.WorkerExited).exit_code == -signal.SIGTERM
    hearing.processes.clear(1)
    hearing.take(events.NodeCleared)
    assert [pipe.line(), pipe.line()] == ["saving", "saved"]


def test_a_signal_right_after_the_start_is_not_lost(hearing: EventCollector) -> None:
    """A worker that is signalled before its program runs ends without waiting for the grace period."""
    for rank in range(30):
        start(hearing, ["/bin/sleep", "60"], rank=rank)
        hearing.processes.signal(1, signal.SIGTERM)
    for rank in range(30):
        assert hearing.take(events.WorkerExited, timeout_s=5, local_rank=rank).exit_code == -signal.SIGTERM


def test_sixty_four_workers_at_once(hearing: EventCollector) -> None:
    """All start with their own descriptors, and all end."""
    pipes = [Pipe() for _ in range(64)]
    for rank, each in enumerate(pipes):
        start(hearing, ["/bin/sh", "-c", f"echo {rank}; exec sleep 60"], each, rank=rank)
    assert [each.line() for each in pipes] == [str(rank) for rank in range(64)]
    pids = [hearing.take(events.WorkerStarted, local_rank=rank).pid for rank in range(64)]
    hearing.processes.kill(1)
    assert {hearing.take(events.WorkerExited).exit_code for _ in range(64)} == {-signal.SIGKILL}
    hearing.take(events.NodeCleared)
    assert not any(is_alive(pid) for pid in pids)
    for each in pipes:
        each.close()


DAEMON = """
import os, signal
def deaf():
    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        deaf()
        print(os.getpid(), flush=True)
        while True:
            signal.pause()
    os._exit(0)
os.wait()
"""


@pytest.mark.parametrize("order", ["clear", "kill"])
def test_a_double_forked_daemon_in_its_own_session_is_killed(hearing: EventCollector, pipe: Pipe, order: str) -> None:
    """Orphaned and ignoring SIGTERM, it is still a descendant of the keeper."""
    start(hearing, python(DAEMON), pipe)
    daemon = int(pipe.line())
    hearing.take(events.WorkerExited)
    assert is_alive(daemon)
    getattr(hearing.processes, order)(1)
    hearing.take(events.NodeCleared)
    assert not is_alive(daemon)


def test_a_chain_of_forking_processes_is_killed(hearing: EventCollector, pipe: Pipe) -> None:
    """Each process forks the next one in a new session and exits."""
    chain = """
    import os
    print("running", flush=True)
    for _ in range(20000):
        if os.fork():
            os._exit(0)
        os.setsid()
    """
    start(hearing, python(chain), pipe)
    assert pipe.line() == "running"
    hearing.take(events.WorkerExited)
    hearing.processes.kill(1)
    hearing.take(events.NodeCleared)
    assert pipe.rest() == ""


def test_orphans_of_a_running_worker_leave_no_zombies(hearing: EventCollector, pipe: Pipe) -> None:
    """Orphans of a long-lived worker are reaped by the keeper when they exit."""
    start(hearing, ["/bin/sh", "-c", "(sleep 0 & echo $!); exec sleep 60"], pipe)
    orphan = int(pipe.line())
    until(lambda: not Path(f"/proc/{orphan}").exists(), "the orphan to be reaped")


def test_a_killed_keeper_takes_all_its_processes_along(hearing: EventCollector, pipe: Pipe) -> None:
    """Workers die of their death signal, daemons are found by the mark, and the agent gets the reason."""
    start(hearing, python(DAEMON), pipe)
    daemon = int(pipe.line())
    start(hearing, ["/bin/sleep", "60"], rank=1)
    worker = hearing.take(events.WorkerStarted, local_rank=1).pid
    os.kill(keeper_of(hearing).pid, signal.SIGKILL)
    assert hearing.take(events.KeeperLost).reason == "it was killed by SIGKILL"
    assert gone([worker, daemon], 0)


def test_commands_to_a_lost_keeper_are_ignored(hearing: EventCollector) -> None:
    """Between its death and its detection, commands raise nothing."""
    keeper = keeper_of(hearing)
    os.kill(keeper.pid, signal.SIGKILL)
    assert gone([keeper.pid])
    start(hearing, ["/bin/true"])
    hearing.processes.signal(1, signal.SIGTERM)
    hearing.processes.clear(1)
    hearing.processes.kill(1)
    hearing.take(events.KeeperLost)
    start(hearing, ["/bin/true"])
    hearing.processes.kill(1)


def test_the_keeper_ignores_signals(hearing: EventCollector) -> None:
    """Whatever a terminal or a scheduler sends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        until(lambda: "tenax-keeper" in Path(f"/proc/{keeper_of(hearing).pid}/comm").read_text(), "the keeper's start")
        start(hearing, ["/bin/true"])
        hearing.take(events.WorkerExited)
        os.kill(keeper_of(hearing).pid, number)
    start(hearing, ["/bin/true"])
    assert hearing.take(events.WorkerExited).exit_code == 0
