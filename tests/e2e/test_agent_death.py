"""The agent's own fate: killed, frozen, idle. What it leaves behind, whom it holds up, and what it costs."""

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
from kit.jobs import Bench, is_alive, needs_root, until

# Everything that makes processes hard to end: deaf, own sessions, orphans, a child that keeps forking.
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


def everybody(bench: Bench, workers: int) -> list[int]:
    names = ("ready", "daemon", "child")
    return [int(bench.note(name, rank)) for rank in range(workers) for name in names]


@pytest.mark.parametrize("method", ["command", "spawn", "fork"])
def test_nothing_outlives_a_killed_agent(bench: Bench, method: str) -> None:
    """SIGKILL to the agent: one second later nothing of the job is alive, nor any helper of ours."""
    how = [] if method == "command" else ["--run-path", "--start-method", method]
    job = bench.start("--nproc-per-node", "2", *how, bench.script(NASTY))
    pids = everybody(bench, 2)
    job.send(signal.SIGKILL)
    job.wait()
    until(lambda: not any(map(is_alive, pids)), "the end of every process of the job", timeout_s=1)
    until(lambda: not bench.alive(), "the end of our helpers", timeout_s=1)


def test_nothing_outlives_a_killed_agent_again_and_again(bench: Bench) -> None:
    """Killed at other moments, too: while it starts workers, and while it restarts them."""
    script = bench.script("from worker_kit import *; daemon(f'd{ATTEMPT}'); ready(); raise SystemExit(1)")
    for attempt in range(4):
        for note in bench.notes.iterdir():
            note.unlink()
        job = bench.start("--nproc-per-node", "2", "--max-restarts", "1000", script)
        bench.note("ready", attempt=attempt)
        job.send(signal.SIGKILL)
        job.wait()
        until(lambda: not bench.alive(), "the end of everything", timeout_s=1)


def test_a_killed_keeper_takes_everything_with_it(bench: Bench) -> None:
    """The process above the workers is killed: the agent says so, ends what is left, and fails with its own code."""
    job = bench.start("--nproc-per-node", "2", bench.script(NASTY))
    everybody(bench, 2)
    (keeper,) = (pid for pid, command in bench.alive().items() if "keeper_main" in command)
    os.kill(keeper, signal.SIGKILL)
    done = job.wait()
    assert done.code == 71, done
    assert "train.py could not be run" in done.report
    assert "SIGKILL" in done.report
    assert not bench.alive()


def test_a_killed_scribe_costs_lines_not_the_job(bench: Bench) -> None:
    """The process that writes the logs is killed: workers do not notice, it is started again, and that is said."""
    script = bench.script("from worker_kit import *; ready(); wait_for('go'); print('still here'); note('printed')")
    job = bench.start("--tee", "3", "--log-dir", "logs", script)
    bench.pids(1)
    (scribe,) = (pid for pid, command in bench.alive().items() if "writer_main" in command)
    os.kill(scribe, signal.SIGKILL)
    job.until_said("was started again")
    bench.tell("go")
    done = job.wait()
    assert done.code == 0, done
    assert done.out == "[default0]:still here\n"


@needs_root
def test_nothing_outlives_a_killed_agent_without_privileges() -> None:
    """The same as a user who has no rights but his own."""
    python = interpreter_for_others()
    as_nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--no-new-privs", "--bounding-set=-all"]
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders are closed to others
        os.chmod(folder, 0o777)
        bench = Bench(Path(folder), "nobody")
        for made in (bench.notes, bench.home / "tmp"):
            made.chmod(0o777)
        job = bench.start(
            *("--nproc-per-node", "2", bench.script(NASTY)),
            program=[*as_nobody, python, "-m", "tenax", "run"],
            env={
                "PYTHONPATH": os.pathsep.join(
                    map(str, (Path(tenax.__file__).parents[1], Path(msgspec.__file__).parents[1]))
                )
            },
        )
        pids = everybody(bench, 2)
        assert all(os.stat(f"/proc/{pid}").st_uid == 65534 for pid in pids)
        job.send(signal.SIGKILL)
        job.wait()
        until(lambda: not any(map(is_alive, pids)), "the end of every process of the job", timeout_s=1)
        bench.close()


def interpreter_for_others() -> str:
    """A Python of this version that somebody else may run; the test run's own may lie in a home."""
    if shutil.which("setpriv") is None:
        pytest.skip("needs setpriv")
    name = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    for candidate in (os.path.realpath(sys.executable), f"/usr/bin/{name}", f"/usr/local/bin/{name}"):
        places = [Path(tenax.__file__), Path(msgspec.__file__), Path(candidate)]
        folders = {folder for place in places for folder in place.parents}
        if os.path.exists(candidate) and all(folder.stat().st_mode & 0o001 for folder in folders):
            return candidate
    pytest.skip(f"no {name} that others may run with this checkout")


# --- frozen -----------------------------------------------------------------------------------------------------------


def test_a_frozen_agent_blocks_nobodys_print(bench: Bench) -> None:
    """SIGSTOP to the agent: workers go on printing megabytes to the console, and nothing of it is lost."""
    script = bench.script(
        """
        from worker_kit import *
        ready()
        wait_for("go", rank=0)
        flood(1, 100_000, lambda number: f"{RANK} {number:06} " + "x" * 50)
        note("printed")
        """
    )
    job = bench.start("--nproc-per-node", "2", "--tee", "1", "--log-dir", "logs", script)
    bench.pids(2)
    job.send(signal.SIGSTOP)
    bench.tell("go")
    for rank in range(2):
        bench.note("printed", rank)
    job.send(signal.SIGCONT)
    done = job.wait()
    assert done.code == 0
    for rank in range(2):
        numbers = re.findall(rf"^\[default{rank}\]:{rank} (\d+) x+$", done.out, re.MULTILINE)
        assert numbers == [f"{number:06}" for number in range(100_000)]


# --- idle -------------------------------------------------------------------------------------------------------------


def test_an_idle_job_costs_nothing(bench: Bench) -> None:
    """While workers work for two seconds, the agent and its helpers wake up less than twice a second, all together."""
    script = bench.script("import time; from worker_kit import *; ready(); time.sleep(2); note('slept')")
    job = bench.start("--nproc-per-node", "2", "--log-dir", "logs", script)
    workers = bench.pids(2)
    ours = [pid for pid in bench.alive() if pid not in workers]
    assert len(ours) == 3, "agent, keeper, scribe"
    until(lambda: all(state(pid) == "S" for pid in ours), "all of them asleep")
    before = {pid: switches(pid) for pid in ours}
    until(lambda: bench.noted("slept", 0) or bench.noted("slept", 1), "two seconds", timeout_s=20)
    # The end of the first worker may have woken them up, too: a few times, far below the bound.
    woken = {pid: switches(pid) - count for pid, count in before.items() if is_alive(pid)}
    assert all(count <= 4 for count in woken.values()), woken
    assert job.wait().code == 0


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def switches(pid: int) -> int:
    """How often its threads have gone to sleep by themselves, and thus been woken up."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        match = re.search(r"^voluntary_ctxt_switches:\s+(\d+)", (task / "status").read_text(), re.MULTILINE)
        assert match is not None
        total += int(match.group(1))
    return total
