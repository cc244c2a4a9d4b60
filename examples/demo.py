"""Shows tenax at work: a job that loses a worker, recovers and finishes, and one that fails for good.

    ./dev demo

Three parts, a few seconds. Every claim that it prints is checked: it exits with 0 only if all of them hold.
"""
# ruff: noqa: T201 - a script that prints

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

COUNTER = Path(__file__).with_name("elastic_counter.py")
WORKERS = 4
NUMBERS = 80
VICTIM = 2
SECONDS_PER_STEP = 0.1
MAX_PART_S = 60.0


class ClaimFailed(Exception):
    """A claim of the demo did not hold."""


def main() -> int:
    try:
        with tempfile.TemporaryDirectory(prefix="tenax_demo_") as folder:
            first = lose_a_worker(Path(folder))
            fail_for_good(Path(folder))
            replay_journal(first)
    except ClaimFailed as problem:
        print(f"\ndemo: failed: {problem}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    show("", "Done; no process is left behind. Now run yours: .venv/bin/tenax run --nproc-per-node 2 train.py")
    return 0


def lose_a_worker(folder: Path) -> Path:
    """Part 1. Returns the run's log folder."""
    show(
        f"1. {WORKERS} workers count together. Midway we kill one of them, as the kernel does when memory runs out.", ""
    )
    logs, checkpoints = folder / "logs", folder / "checkpoints"
    pids: dict[int, list[int]] = {}  # rank -> every process that had it
    killed = 0

    def watch(line: str) -> None:
        nonlocal killed
        if begun := re.search(r"rank (\d+) \(pid (\d+)\) (begins|resumes)", line):
            pids.setdefault(int(begun[1]), []).append(int(begun[2]))
        if not killed and f"rank {VICTIM} saved step 10 " in line:
            killed = pids[VICTIM][-1]
            show("", f"   kill -9 {killed}   (the demo kills rank {VICTIM})", "")
            check(is_alive(killed), f"rank {VICTIM} should be running, but has exited")
            os.kill(killed, signal.SIGKILL)

    code = tenax_run(
        ["--nproc-per-node", WORKERS, "--max-restarts", 2, "--log-dir", logs, "--tee", 3],
        ["--folder", checkpoints, "--numbers", NUMBERS, "--seconds-per-step", SECONDS_PER_STEP],
        watch,
    )

    saved = [json.loads((checkpoints / f"rank_{rank}.json").read_text()) for rank in range(WORKERS)]
    total = sum(worker["total"] for worker in saved)
    check(bool(killed), f"rank {VICTIM} should be killed midway, but never reached step 10")
    check(code == 0, f"the job should succeed, but its exit code is {code}")
    check(len(pids[VICTIM]) == 2, f"rank {VICTIM} should be restarted once, but its processes were {pids[VICTIM]}")
    check(total == sum(range(NUMBERS)), f"each step should count once, but the sum is {total}")
    check_all_gone([pid for processes in pids.values() for pid in processes])
    show("", f"   All workers were restarted, resumed and finished: exit code 0. The sum is {total}, as it must be.")
    return run_folder(logs)


def fail_for_good(folder: Path) -> None:
    """Part 2."""
    show("", "2. The same job, but now rank 1 raises an exception each time. One report shows the cause.", "")
    report = folder / "report.json"
    flags = ["--nproc-per-node", WORKERS, "--max-restarts", 1, "--redirects", 3, "--log-dir", folder / "failed"]
    code = tenax_run(
        [*flags, "--report", report],
        ["--folder", folder / "other", "--numbers", NUMBERS, "--fail-rank", 1, "--fail-step", 3],
        lambda _: None,
    )
    found = json.loads(report.read_text())
    check(code == 1, f"the exit code should be the failed worker's, 1, but is {code}")
    check(found["first_cause"]["rank"] == 1, f"the first cause should be rank 1, but the report has {found['summary']}")
    check("not a number" in found["first_cause"]["message"], "the report should contain the exception, but does not")
    check(found["restarts_used"] == 1, f"one restart should be reported, not {found['restarts_used']}")
    check_all_gone([found["first_cause"]["pid"], *(worker["pid"] for worker in found["stopped"])])
    show("", "   Exit code 1: the failed worker's own.")


def replay_journal(log_folder: Path) -> None:
    """Part 3."""
    show("", "3. Every run writes a journal. tenax replay prints part 1 from it, and checks each decision.", "")
    code, lines = tenax(["replay", log_folder], lambda _: None)
    check(code == 0, f"every decision should follow from the journal, but the exit code is {code}")
    check(any("SIGKILL" in line for line in lines), "the replay should show the SIGKILL, but does not")


def tenax_run(flags: list[object], script_arguments: list[object], watch: Callable[[str], None]) -> int:
    return tenax(["run", *flags, COUNTER.name, *script_arguments], watch)[0]


def tenax(arguments: list[object], watch: Callable[[str], None]) -> tuple[int, list[str]]:
    """Run a tenax command and show its output, indented. Returns its exit code and its lines."""
    args = [str(argument) for argument in arguments]
    show("   $ tenax " + " ".join(os.path.basename(arg) if os.sep in arg else arg for arg in args))
    process = subprocess.Popen(
        [sys.executable, "-m", "tenax", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        cwd=COUNTER.parent,
    )
    assert process.stdout is not None
    timeout = threading.Timer(MAX_PART_S, process.terminate)
    timeout.start()
    lines = []
    try:
        for line in process.stdout:
            lines.append(line.rstrip("\n"))
            show("   " + lines[-1])
            watch(line)
    except BaseException:
        process.terminate()
        raise
    finally:
        process.wait()
        process.stdout.close()
        timeout.cancel()
    return process.returncode, lines


def run_folder(logs: Path) -> Path:
    folders = list(logs.iterdir())
    check(len(folders) == 1, f"a run should have one folder in its log folder, not {len(folders)}")
    return folders[0]


def check_all_gone(pids: list[int]) -> None:
    alive = [pid for pid in pids if is_alive(pid)]
    check(not alive, f"no worker should be left, but {alive} are alive")


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, PermissionError):  # gone, or the pid was reused
        return False
    return True


def check(holds: bool, claim: str) -> None:
    if not holds:
        raise ClaimFailed(claim)


def show(*lines: str) -> None:
    for line in lines:
        print(line.rstrip(), flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
