"""See tenax at work: a job that loses a worker, recovers and finishes, and one that fails for good.

    ./dev demo

Three acts, a few seconds. Everything it says is checked: it exits with 0 only when all of it happened.
"""
# ruff: noqa: T201 - what it prints is what it is for

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
LONGEST_ACT_S = 60.0


class NotAsTold(Exception):
    """Something did not happen as the demo says it does."""


def main() -> int:
    try:
        with tempfile.TemporaryDirectory(prefix="tenax_demo_") as folder:
            first = lose_a_worker(Path(folder))
            fail_for_good(Path(folder))
            tell_it_again(first)
    except NotAsTold as problem:
        print(f"\ndemo: this did not go as told: {problem}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read this has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    say("", "That is all; nothing was left behind. Now yours: .venv/bin/tenax run --nproc-per-node 2 train.py")
    return 0


def lose_a_worker(folder: Path) -> Path:
    """Act 1. Returns the run's log folder."""
    say(
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
            say("", f"   kill -9 {killed}   (this is us: rank {VICTIM} gets no chance to say goodbye)", "")
            check(is_alive(killed), f"rank {VICTIM} is in the middle of its work, but it has ended already")
            os.kill(killed, signal.SIGKILL)

    code = tenax_run(
        ["--nproc-per-node", WORKERS, "--max-restarts", 2, "--log-dir", logs, "--tee", 3],
        ["--folder", checkpoints, "--numbers", NUMBERS, "--seconds-per-step", SECONDS_PER_STEP],
        watch,
    )

    saved = [json.loads((checkpoints / f"rank_{rank}.json").read_text()) for rank in range(WORKERS)]
    total = sum(worker["total"] for worker in saved)
    check(bool(killed), f"rank {VICTIM} was killed midway")
    check(code == 0, f"the job succeeded, but its exit code is {code}")
    check(len(pids[VICTIM]) == 2, f"rank {VICTIM} was started again once, but its processes were {pids[VICTIM]}")
    check(total == sum(range(NUMBERS)), f"no step was lost or counted twice, but the sum is {total}")
    check_all_gone([pid for lives in pids.values() for pid in lives])
    say("", f"   All workers were started again, resumed and finished: exit code 0. The sum is {total}, as it must be.")
    return run_folder(logs)


def fail_for_good(folder: Path) -> None:
    """Act 2."""
    say("", "2. The same job, but now rank 1 raises an exception each time. One report says what went wrong.", "")
    report = folder / "report.json"
    flags = ["--nproc-per-node", WORKERS, "--max-restarts", 1, "--redirects", 3, "--log-dir", folder / "failed"]
    code = tenax_run(
        [*flags, "--report", report],
        ["--folder", folder / "other", "--numbers", NUMBERS, "--fail-rank", 1, "--fail-step", 3],
        lambda _: None,
    )
    told = json.loads(report.read_text())
    check(code == 1, f"the exit code is the failed worker's, 1, but it is {code}")
    check(told["first_cause"]["rank"] == 1, f"rank 1 is the first cause, but the report says {told['summary']}")
    check("not a number" in told["first_cause"]["message"], "the report names the exception")
    check(told["restarts_used"] == 1, f"it was restarted once, but {told['restarts_used']} times are reported")
    check_all_gone([told["first_cause"]["pid"], *(worker["pid"] for worker in told["stopped_by_us"])])
    say("", "   Exit code 1: the failed worker's own.")


def tell_it_again(log_folder: Path) -> None:
    """Act 3."""
    say(
        "",
        "3. Every run keeps a journal. tenax replay tells the story of act 1 from it, and derives each decision again.",
    )
    say("")
    code, lines = tenax(["replay", log_folder], lambda _: None)
    check(code == 0, f"every decision follows from the journal, but the exit code is {code}")
    check(any("SIGKILL" in line for line in lines), "the story tells of the SIGKILL")


def tenax_run(flags: list[object], script_arguments: list[object], watch: Callable[[str], None]) -> int:
    return tenax(["run", *flags, COUNTER.name, *script_arguments], watch)[0]


def tenax(arguments: list[object], watch: Callable[[str], None]) -> tuple[int, list[str]]:
    """Run a tenax command, showing what it prints, a little indented; returns its exit code and its lines."""
    words = [str(argument) for argument in arguments]
    say("   $ tenax " + " ".join(os.path.basename(word) if os.sep in word else word for word in words))
    process = subprocess.Popen(
        [sys.executable, "-m", "tenax", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        cwd=COUNTER.parent,
    )
    assert process.stdout is not None
    too_long = threading.Timer(LONGEST_ACT_S, process.terminate)
    too_long.start()
    lines = []
    try:
        for line in process.stdout:
            lines.append(line.rstrip("\n"))
            say("   " + lines[-1])
            watch(line)
    except BaseException:
        process.terminate()
        raise
    finally:
        process.wait()
        process.stdout.close()
        too_long.cancel()
    return process.returncode, lines


def run_folder(logs: Path) -> Path:
    folders = list(logs.iterdir())
    check(len(folders) == 1, f"a run has one folder in its log folder, but there are {len(folders)}")
    return folders[0]


def check_all_gone(pids: list[int]) -> None:
    alive = [pid for pid in pids if is_alive(pid)]
    check(not alive, f"no worker is left, but {alive} are alive")


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, PermissionError):  # gone, or its number is somebody else's by now
        return False
    return True


def check(holds: bool, claim: str) -> None:
    if not holds:
        raise NotAsTold(claim)


def say(*lines: str) -> None:
    for line in lines:
        print(line.rstrip(), flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
