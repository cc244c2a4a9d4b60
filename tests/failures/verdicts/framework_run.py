"""Runs one job of a real framework with two real agents on loopback, and checks their reports."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from kit.addresses import own_endpoint
from kit.jobs import TENAX, Runner

from .frameworks import PRELOAD, Job
from .kit import NODE_FIELDS, disagreements, memory_group
from .played import NODES, SLOTS, ranks_in

_HERE = Path(__file__).parent
_PATIENCE_S = 400.0
_LOWEST_PORT, _PORTS = 20_000, 10_000  # neither assigned by the kernel nor used by kit/addresses.py
_numbers = itertools.count(1)


class Result(NamedTuple):
    """What a job left, and what is wrong with its reports."""

    job: Job
    errors: list[str]
    report: dict[str, Any]  # of the first node
    stderr: dict[int, str]  # by rank
    report_text: str


def run(job: Job, folder: Path) -> Result:
    """Run the job in this folder, which is created, unless it was run there before."""
    if not (folder / "codes").exists():
        _start(job, folder)
    return _result(job, folder)


def _start(job: Job, folder: Path) -> None:
    folder.mkdir(parents=True)
    number = next(_numbers)
    runner = Runner(folder, f"corpus-{number}")
    with memory_group(f"tenax-corpus-{os.getpid()}-{number}") as group:
        runner.environ["VERDICT_MEMORY_GROUP"] = str(group)
        codes = _run(job, runner, number)
    runner.close()
    (folder / "codes").write_text(json.dumps(codes))


def _result(job: Job, folder: Path) -> Result:
    codes = json.loads((folder / "codes").read_text())
    texts = [(folder / f"node.{node}").read_text(errors="replace") for node in range(NODES)]
    files = [folder / f"report.{node}.json" for node in range(NODES)]
    reports = [json.loads(file.read_text()) for file in files if file.exists()]
    errors = list(_errors(job, texts, reports, codes))
    if reports and reports[0]["first_cause"]:
        errors += disagreements(folder, reports[0], NODES)
    stderr = {}
    for path in folder.glob("logs.*/*/attempt_0/*/stderr.log"):
        node = int(path.relative_to(folder).parts[0].removeprefix("logs."))
        first_rank = re.search(r"ranks (\d+) to", texts[node])  # which agent is first is decided when they meet
        if first_rank is not None:
            stderr[int(first_rank[1]) + int(path.parent.name)] = path.read_text(errors="replace")
    shown = max(texts, key=lambda text: "First cause" in text)
    return Result(job, errors, reports[0] if reports else {}, stderr, shown[shown.find("=" * 80) :])


def _run(job: Job, runner: Runner, number: int) -> list[int | None]:
    port = _LOWEST_PORT + (os.getpid() * 97 + number) % _PORTS
    variables = {"VERDICT_FOLDER": str(runner.home), "VERDICT_PORT": str(port), "HF_HUB_OFFLINE": "0"}
    flags = ["--nnodes", str(NODES), "--nproc-per-node", str(SLOTS), "--rdzv-backend", "c10d"]
    flags += ["--rdzv-endpoint", own_endpoint(), "--rdzv-id", f"corpus-{number}", "--preload", PRELOAD[job.framework]]
    flags += ["--shutdown-timeout", "3", "--max-restarts", "0", "--redirects", "3"]
    root = job.ranks if job.ranks.isdecimal() else "-1"
    agents = []
    for node in range(NODES):
        command = [*TENAX, "run", *flags, "--report", f"report.{node}.json", "--log-dir", f"logs.{node}"]
        command += [str(_HERE / "framework_jobs.py"), job.name, root]
        env = {**runner.environ, **variables}
        with open(runner.home / f"node.{node}", "wb") as console:
            out = {"stdout": console, "stderr": console, "stdin": subprocess.DEVNULL}
            agents.append(subprocess.Popen(command, **out, cwd=runner.home, env=env))
    codes: list[int | None] = []
    for agent in agents:
        try:
            codes.append(agent.wait(_PATIENCE_S))
        except subprocess.TimeoutExpired:
            codes.append(None)
            agent.kill()
            agent.wait()
            runner.leaves_within_s = 5.0
    return codes


def _errors(job: Job, texts: list[str], reports: list[dict[str, Any]], codes: list[int | None]) -> Iterator[str]:
    if 0 in codes or None in codes or len(set(codes)) > 1:
        yield f"the agents exited with {codes}"
    if len(reports) < NODES:
        yield f"only {len(reports)} nodes wrote a report"
        return
    shared = [{key: value for key, value in report.items() if key not in NODE_FIELDS} for report in reports]
    if any(each != shared[0] for each in shared):
        yield "the reports of the nodes differ"
    report = shared[0]
    if report["cause"] != job.kind:
        yield f"the cause is {report['cause']}, not {job.kind}"
    if not report["cause_is_known"]:
        yield "the cause is unknown"
    expected = set(ranks_in(job.ranks))
    rank = report["first_cause"]["rank"] if report["first_cause"] else None
    if rank not in expected:
        yield f"the first cause is rank {rank}, not {job.ranks}"
    # A worker that tenax stopped before it failed is listed as stopped.
    stopped = {each["rank"] for each in report["stopped"]}
    if len(expected) > 1 and not expected <= {rank, *report["same_cause"], *report["victims"], *stopped}:
        yield f"only ranks {rank} and {report['same_cause']} have the same cause"
    failed = {each["rank"] for each in report["other_failures"]} - set(report["same_cause"])
    if set(report["victims"]) != failed:
        yield f"{sorted(failed)} also failed, but the victims are {report['victims']}"
    if job.next_step not in report["next_step"]:
        yield f"the next step is {report['next_step']!r}, without {job.next_step!r}"
    in_full = sum("First cause" in text for text in texts)
    in_one_line = sum(f"rank {rank} on" in text and "; report on" in text for text in texts)
    if in_full < 1 or in_full + in_one_line < NODES:
        yield f"{in_full} nodes print the report, {in_one_line} its headline"
