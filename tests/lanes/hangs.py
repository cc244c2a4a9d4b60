"""The command: real jobs with torch that hang, real jobs that look as if they did, and hours of simulated ones.

./dev hangs                       each of six shapes twice: one rank stops, and the report must name it and stay
./dev hangs --shapes ddp fsdp2 --times 1 --watch 10
./dev hangs --healthy 20          six healthy jobs at the same time for 20 minutes: no report
./dev hangs --simulated 1000      so many hours of simulated jobs, with fresh seeds: no report
"""

from __future__ import annotations

import argparse
import random
import re
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kit.addresses import own_endpoint
from kit.jobs import Runner, Running, ended
from lanes import print_line
from observe.hangs.workloads import Workload

JOBS = str(Path(__file__).parent / "hang_jobs.py")
# By name: the job of ``hang_jobs.py``, and its nodes and workers per node.
SHAPES = {
    "collective": ("collective", 1, 2),
    "ddp": ("ddp", 1, 2),
    "ddp2x2": ("ddp", 2, 2),
    "two-groups": ("two-groups", 1, 2),
    "fsdp2": ("fsdp2", 1, 2),
    "data-loader": ("data-loader", 1, 2),
}
HEALTHY = ("slow", "bursty", "reading", "compiling", "checkpointing", "idle")
WITHIN_S = 15.0
_HANGS = re.compile(r"^tenax: generation 1 seems to hang: ", re.MULTILINE)
_WITHDRAWN = "does not hang any more"
_MAX_WAIT_S = 300.0  # for a report, on a busy machine
_HOURS_PER_JOB = 12.0


def main(argv: list[str] | None = None) -> int:
    """Return 1 if a hang was not reported as it should be, or a healthy job was reported."""
    options = _parser().parse_args(argv)
    if options.simulated:
        return _simulate(options.simulated)
    if options.healthy:
        return _run_healthy(options.healthy, options.hang_after or 30.0)
    return _run_shapes(options)


# --- hangs ------------------------------------------------------------------------------------------------------------


def _run_shapes(options: argparse.Namespace) -> int:
    plan = [name for _ in range(options.times) for name in options.shapes]
    with ThreadPoolExecutor(options.jobs) as pool:
        problems = list(pool.map(lambda name: _run_shape(name, options.hang_after or 5.0, options.watch), plan))
    right = sum(problem == "" for problem in problems)
    print_line(f"{right} of {len(plan)} hangs reported with the right rank within {WITHIN_S:g} s, and never withdrawn")
    return 0 if right == len(plan) else 1


def _run_shape(name: str, hang_after_s: float, watch_s: float) -> str:
    """Run one job until it hangs; return what was wrong with the report, or an empty text."""
    job, nodes, workers = SHAPES[name]
    with tempfile.TemporaryDirectory(prefix="tenax-lane-", ignore_cleanup_errors=True) as home:
        runner = Runner(Path(home), f"hangs-{name}-{random.getrandbits(32):x}")
        note = Path(home) / "stopped"
        flags = ["--nproc-per-node", str(workers), "--hang-after", f"{hang_after_s:g}", "--shutdown-timeout", "5"]
        if nodes > 1:
            flags += ["--nnodes", str(nodes), "--rdzv-backend", "tcp", "--rdzv-endpoint", own_endpoint()]
        agents = [
            runner.start(*flags, "--log-dir", f"logs{node}", "--redirects", "3", JOBS, job, str(note))
            for node in range(nodes)
        ]
        try:
            problem, figures = _watch(agents, note, watch_s)
        finally:
            for agent in agents:
                agent.send(signal.SIGTERM)
            for agent in agents:
                agent.wait()
        print_line(f"{name}: {figures}{f'; WRONG: {problem}' if problem else ''}")
        if problem:
            print_line("\n".join(agent.err for agent in agents))
        runner.close()
    return problem


def _watch(agents: list[Running], note: Path, watch_s: float) -> tuple[str, str]:
    """Return what is wrong with the report of a hang, and the figures."""
    deadline = time.monotonic() + _MAX_WAIT_S
    while not all(_HANGS.search(agent.err) and "no action is taken" in agent.err for agent in agents):
        if time.monotonic() > deadline or any(agent.process.poll() is not None for agent in agents):
            return "no report", "no report"
        time.sleep(0.05)
    stopped_at, rank = note.read_text().split()
    took_s = time.time() - float(stopped_at)
    first = agents[0].err.split("the odd one out first:\n")[-1].splitlines()[0].removeprefix("tenax:").strip()
    ended(agents[0].process, watch_s)
    withdrawn = sum(agent.err.count(_WITHDRAWN) for agent in agents)
    figures = f"reported after {took_s:.1f} s: {first}; withdrawn {withdrawn} times in {watch_s:g} s"
    if not first.startswith(f"rank {rank} "):
        return f"rank {rank} stopped", figures
    if withdrawn:
        return "withdrawn", figures
    return ("" if took_s <= WITHIN_S else f"later than {WITHIN_S:g} s"), figures


# --- false alarms -----------------------------------------------------------------------------------------------------


def _run_healthy(minutes: float, hang_after_s: float) -> int:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tenax-lane-", ignore_cleanup_errors=True) as home:
        runner = Runner(Path(home), f"healthy-{random.getrandbits(32):x}")
        flags = ["--nproc-per-node", "2", "--hang-after", f"{hang_after_s:g}", "--redirects", "3"]
        arguments = [str(60 * minutes), str(hang_after_s)]
        agents = {kind: runner.start(*flags, "--log-dir", kind, JOBS, kind, *arguments) for kind in HEALTHY}
        alarms = job_s = 0.0
        failed = False
        for kind, agent in agents.items():
            done = agent.wait(60 * minutes + 600)
            took_s, count = time.monotonic() - began, len(_HANGS.findall(done.err))
            failed |= done.code != 0
            alarms += count
            job_s += took_s
            print_line(f"{kind}: {count} false alarms in {took_s / 60:.1f} min, exit code {done.code}")
            if count or done.code:
                print_line(done.err)
        runner.close()
    print_line(f"{alarms:g} false alarms in {job_s / 3600:.2f} h of real jobs (--hang-after {hang_after_s:g})")
    return 1 if alarms or failed else 0


def _simulate(hours: float) -> int:
    done, alarms, jobs = 0.0, 0, 0
    while done < hours:
        seed = random.getrandbits(48)
        job = Workload(seed)
        for assessment in job.live(_HOURS_PER_JOB):
            if assessment.is_quiet:
                alarms += 1
                print_line(f"FALSE ALARM: seed {seed}, after {job.now:.0f} s: {assessment}")
                break
        done += job.now / 3600
        jobs += 1
    print_line(f"{alarms} false alarms in {done:.0f} simulated hours of {jobs} jobs")
    return 1 if alarms else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="./dev hangs", description="Search for wrong reports of hangs.")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), help="default: all")
    parser.add_argument("--times", type=int, default=2, help="number of runs of each shape (default: 2)")
    parser.add_argument("--jobs", type=int, default=3, help="number of shapes at the same time (default: 3)")
    parser.add_argument("--watch", type=float, default=120.0, help="seconds after a report (default: 120)")
    parser.add_argument("--hang-after", type=float, help="as of tenax run (default: 5; 30 for healthy jobs)")
    parser.add_argument("--healthy", type=float, metavar="MINUTES", help="run healthy jobs at the same time instead")
    parser.add_argument("--simulated", type=float, metavar="HOURS", help="simulate jobs instead")
    return parser


if __name__ == "__main__":
    sys.exit(main())
