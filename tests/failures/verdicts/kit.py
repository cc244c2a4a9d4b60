"""Runs one seed of the corpus: real agents on loopback, started by the command that people use, and what they print."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kit.addresses import own_endpoint
from kit.jobs import PATIENCE_S, TENAX, Bench
from tenax._failures.cause import sentence_of

from .corpus import Seed

_HERE = Path(__file__).parent
_OF_THE_NODE = {"log_dir", "journal", "host", "began_at", "failed_at"}  # each has a clock of its own
_numbers = itertools.count(1)
_GROUPS = (
    (Path("/sys/fs/cgroup/memory"), {"memory.limit_in_bytes": 48 << 20}),
    (Path("/sys/fs/cgroup"), {"memory.max": 48 << 20, "memory.swap.max": 0}),
)


class Wrong(AssertionError):
    """The verdict is not what was seeded."""


@contextlib.contextmanager
def memory_group(name: str) -> Iterator[Path | None]:
    """A real control group with little memory, of version 1 or 2; None where none may be made."""
    for root, limits in _GROUPS:
        if not (root / "cgroup.procs").exists():
            continue
        group = root / name
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if (group / next(iter(limits))).exists():
                for file, value in limits.items():
                    if (group / file).exists():
                        (group / file).write_text(str(value))
                yield group
                return
        finally:
            group.rmdir()
    yield None


def run(seed: Seed, folder: Path) -> str:
    """Run it and judge the verdict; returns what was printed on all nodes. Raises ``Wrong``."""
    number = next(_numbers)
    bench = Bench(folder, f"verdict-{number}")
    with memory_group(f"tenax-verdict-{os.getpid()}-{number}") as group:
        if seed.fault == "out_of_memory":
            if group is None:
                return "skipped: no control group may be made here"
            bench.environ["VERDICT_MEMORY_GROUP"] = str(group)
        texts, reports, codes = _run(seed, bench, number)
    bench.close()
    _check(seed, texts, reports, codes)
    return "\n".join(texts)


def _run(seed: Seed, bench: Bench, number: int) -> tuple[list[str], list[dict[str, Any]], list[int]]:
    for rank in range(seed.nodes * seed.workers):
        os.mkfifo(bench.home / f"door.{rank}")
    program = bench.home / "without_interpreter"
    program.write_text("#!/no/such/interpreter\n")
    program.chmod(0o755)
    endpoint = own_endpoint()
    env = {**bench.environ, "VERDICT_FOLDER": str(bench.home)}
    if seed.fault == "scope_expired":
        env["TORCHELASTIC_ENABLE_FILE_TIMER"] = "1"
    flags = ["--nnodes", str(seed.nodes), "--nproc-per-node", str(seed.workers), "--rdzv-backend", "c10d"]
    flags += ["--rdzv-endpoint", endpoint, "--rdzv-id", f"verdict-{number}", "--preload", "none"]
    flags += ["--shutdown-timeout", "1", "--max-restarts", "1" if seed.how == "second" else "0"]
    root = "1" if seed.root is None else str(seed.root)
    words = [str(_HERE / "seeded.py"), seed.fault, root, seed.victims, seed.how]
    if seed.command:
        words = ["--no-python", *seed.command]
    elif not seed.record:
        words = ["--no-python", sys.executable, "-S", *words]
    agents = []
    for node in range(seed.nodes):
        command = [*TENAX, "run", *flags, "--report", f"report.{node}.json", *words]
        with open(bench.home / f"node.{node}", "wb") as console:
            out = {"stdout": console, "stderr": console, "stdin": subprocess.DEVNULL}
            agents.append(subprocess.Popen(command, **out, cwd=bench.home, env=env))
    try:
        # Of torch each process has to import all; a busy machine takes its time for that.
        patience_s = PATIENCE_S * (3 if seed.fault.startswith("gloo") else 1)
        codes = [agent.wait(patience_s) for agent in agents]
    except subprocess.TimeoutExpired:
        texts = [(bench.home / f"node.{node}").read_text(errors="replace") for node in range(seed.nodes)]
        raise Wrong("an agent did not end\n" + "\n".join(texts)) from None
    finally:
        for agent in agents:
            if agent.poll() is None:
                agent.kill()
                agent.wait()
                bench.leaves_within_s = 2.0
    texts = [(bench.home / f"node.{node}").read_text(errors="replace") for node in range(seed.nodes)]
    missing = [node for node in range(seed.nodes) if not (bench.home / f"report.{node}.json").exists()]
    if missing:
        raise Wrong(f"nodes {missing} wrote no report\n" + "\n".join(texts))
    reports = [json.loads((bench.home / f"report.{node}.json").read_text()) for node in range(seed.nodes)]
    return texts, reports, codes


def _check(seed: Seed, texts: list[str], reports: list[dict[str, Any]], codes: list[int]) -> None:
    wrong = list(_what_is_wrong(seed, texts, reports, codes))
    if wrong:
        raise Wrong(f"{seed.name}: {'; '.join(wrong)}\n" + "\n".join(texts))


def _what_is_wrong(seed: Seed, texts: list[str], reports: list[dict[str, Any]], codes: list[int]) -> Iterator[str]:
    if 0 in codes or len(set(codes)) > 1:
        yield f"the agents exited with {codes}"
    told = [{key: value for key, value in report.items() if key not in _OF_THE_NODE} for report in reports]
    if any(each != told[0] for each in told):
        yield "the nodes do not tell the same"
    report = told[0]
    if report["cause"] != seed.kind:
        yield f"the cause is called {report['cause']}, not {seed.kind}"
    if report["cause_is_known"] != (seed.root is not None):
        yield f"whether the cause is known: {report['cause_is_known']}"
    rank = report["first_cause"]["rank"]
    if isinstance(seed.root, int) and rank != seed.root:
        yield f"rank {rank} is blamed"
    # A worker that tenax stopped before it could say anything is told as stopped.
    stopped = {each["rank"] for each in report["stopped_by_us"]}
    if seed.root == "all" and {rank, *report["same_cause"], *stopped} != set(range(seed.nodes * seed.workers)):
        yield f"ranks {rank} and {report['same_cause']} are told as one"
    failed = {each["rank"] for each in report["other_failures"]}
    if isinstance(seed.root, int) and set(report["victims"]) != failed:
        yield f"{failed} failed besides, and {report['victims']} are said to be victims"
    sentence = "Not known: no worker names one" if seed.root is None else sentence_of(seed.kind, report["proof"])
    for number, text in enumerate(texts):
        block = text[text.find("First cause") :] if "First cause" in text else ""
        words = " ".join(block.split())
        as_one = ": the same" if report["same_cause"] else ""
        for expected in (sentence, f" rank {rank} (", seed.says, as_one):
            if " ".join(expected.split()) not in words:
                yield f"node {number} does not say {expected!r}"
