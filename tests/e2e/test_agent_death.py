"""An agent that is killed, stopped or idle: no process outlives it, it delays no worker, and it uses no CPU."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import msgspec
import pytest

import tenax
from kit.jobs import Runner, is_alive, needs_root, until

# Workers that are hard to end: they ignore signals, and have a daemon and an orphan.
NASTY = """
    import os, signal
    from worker_kit import *
    ignore("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    daemon("daemon")
    if os.fork() == 0:
        note("child", os.getpid())
        stay()
    wait_for("child")
    ready()
    stay()
"""


def all_pids(runner: Runner, workers: int) -> list[int]:
    names = ("ready", "daemon", "child")
    return [int(runner.note(name, rank)) for rank in range(workers) for name in names]


@pytest.mark.parametrize("method", ["command", "spawn", "fork"])
def test_no_process_outlives_a_killed_agent(runner: Runner, method: str) -> None:
    """Within one second after SIGKILL, neither workers with their descendants nor helpers are alive."""
    how = [] if method == "command" else ["--run-path", "--start-method", method]
    job = runner.start("--nproc-per-node", "2", *how, runner.script(NASTY))
    pids = all_pids(runner, 2)
    job.send(signal.SIGKILL)
    job.wait()
    until(lambda: not any(map(is_alive, pids)), "the end of every process of the job", timeout_s=1)
    until(lambda: not runner.alive(), "the end of all helpers", timeout_s=1)


def test_no_process_outlives_an_agent_killed_while_it_starts_or_restarts_workers(runner: Runner) -> None:
    script = runner.script("from worker_kit import *; daemon(f'd{ATTEMPT}'); ready(); raise SystemExit(1)")
    for attempt in range(4):
        for note in runner.notes.iterdir():
            note.unlink()
        job = runner.start("--nproc-per-node", "2", "--max-restarts", "1000", script)
        runner.note("ready", attempt=attempt)
        job.send(signal.SIGKILL)
        job.wait()
        until(lambda: not runner.alive(), "the end of everything", timeout_s=1)


def test_a_killed_keeper_ends_the_run(runner: Runner) -> None:
    """The agent reports it, kills the remaining processes, and exits with 71."""
    job = runner.start("--nproc-per-node", "2", runner.script(NASTY))
    all_pids(runner, 2)
    (keeper,) = (pid for pid, command in runner.alive().items() if "keeper_main" in command)
    os.kill(keeper, signal.SIGKILL)
    done = job.wait()
    assert done.code == 71, done
    assert "train.py could not be run" in done.report
    assert "SIGKILL" in done.report
    assert not runner.alive()


def test_a_killed_log_writer_is_restarted(runner: Runner) -> None:
    """Workers are not affected, and a message reports it."""
    script = runner.script("from worker_kit import *; ready(); wait_for('go'); print('still here'); note('printed')")
    job = runner.start("--tee", "3", "--log-dir", "logs", script)
    runner.pids(1)
    (log_writer,) = (pid for pid, command in runner.alive().items() if "writer_main" in command)
    os.kill(log_writer, signal.SIGKILL)
    job.until_printed("died and was restarted")
    runner.leave_note("go")
    done = job.wait()
    assert done.code == 0, done
    assert done.out == "[default0]:still here\n"


@needs_root
def test_no_process_outlives_a_killed_agent_without_privileges() -> None:
    python = interpreter_for_other_users()
    as_other_user = [
        "setpriv",
        "--reuid=65534",
        "--regid=65534",
        "--clear-groups",
        "--no-new-privs",
        "--bounding-set=-all",
    ]
    with tempfile.TemporaryDirectory() as folder:  # other users cannot enter pytest's folders
        os.chmod(folder, 0o777)
        runner = Runner(Path(folder), "other-user")
        for made in (runner.notes, runner.home / "tmp"):
            made.chmod(0o777)
        job = runner.start(
            *("--nproc-per-node", "2", runner.script(NASTY)),
            program=[*as_other_user, python, "-m", "tenax", "run"],
            env={
                "PYTHONPATH": os.pathsep.join(
                    map(str, (Path(tenax.__file__).parents[1], Path(msgspec.__file__).parents[1]))
                )
            },
        )
        pids = all_pids(runner, 2)
        assert all(os.stat(f"/proc/{pid}").st_uid == 65534 for pid in pids)
        job.send(signal.SIGKILL)
        job.wait()
        until(lambda: not any(map(is_alive, pids)), "the end of every process of the job", timeout_s=1)
        runner.close()


def interpreter_for_other_users() -> str:
    """Return a Python of this version that other users can run; that of this test run may be in a home directory."""
    if shutil.which("setpriv") is None:
        pytest.skip("needs setpriv")
    name = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    for candidate in (os.path.realpath(sys.executable), f"/usr/bin/{name}", f"/usr/local/bin/{name}"):
        paths = [Path(tenax.__file__), Path(msgspec.__file__), Path(candidate)]
        folders = {folder for path in paths for folder in path.parents}
        if os.path.exists(candidate) and all(folder.stat().st_mode & 0o001 for folder in folders):
            return candidate
    pytest.skip(f"no {name} that other users can run with this checkout")


# --- stopped ----------------------------------------------------------------------------------------------------------


def test_a_stopped_agent_does_not_delay_the_output_of_workers(runner: Runner) -> None:
    """After SIGSTOP to the agent, workers print megabytes, and no line is lost."""
    script = runner.script(
        """
        from worker_kit import *
        ready()
        wait_for("go", rank=0)
        flood(1, 100_000, lambda number: f"{RANK} {number:06} " + "x" * 50)
        note("printed")
        """
    )
    job = runner.start("--nproc-per-node", "2", "--tee", "1", "--log-dir", "logs", script)
    runner.pids(2)
    job.send(signal.SIGSTOP)
    runner.leave_note("go")
    for rank in range(2):
        runner.note("printed", rank)
    job.send(signal.SIGCONT)
    done = job.wait()
    assert done.code == 0
    for rank in range(2):
        numbers = re.findall(rf"^\[default{rank}\]:{rank} (\d+) x+$", done.out, re.MULTILINE)
        assert numbers == [f"{number:06}" for number in range(100_000)]


# --- idle -------------------------------------------------------------------------------------------------------------


def test_an_idle_agent_hardly_wakes_up(runner: Runner) -> None:
    """During two seconds, the agent and each helper wake up at most twice per second."""
    script = runner.script("import time; from worker_kit import *; ready(); time.sleep(2); note('slept')")
    job = runner.start("--nproc-per-node", "2", "--log-dir", "logs", script)
    workers = runner.pids(2)
    helpers = [pid for pid in runner.alive() if pid not in workers]
    assert len(helpers) == 3, "agent, keeper, log writer"
    until(lambda: all(state(pid) == "S" for pid in helpers), "all of them asleep")
    before = {pid: switches(pid) for pid in helpers}
    until(lambda: runner.noted("slept", 0) or runner.noted("slept", 1), "two seconds", timeout_s=20)
    # The exit of the first worker may have woken them up, too: a few times, below the bound.
    woken = {pid: switches(pid) - count for pid, count in before.items() if is_alive(pid)}
    assert all(count <= 4 for count in woken.values()), woken
    assert job.wait().code == 0


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def switches(pid: int) -> int:
    """Return how often its threads have gone to sleep voluntarily, and thus woken up."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        match = re.search(r"^voluntary_ctxt_switches:\s+(\d+)", (task / "status").read_text(), re.MULTILINE)
        assert match is not None
        total += int(match.group(1))
    return total
