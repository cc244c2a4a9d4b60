"""Runs one seed of the corpus with real agents on loopback, and checks their reports."""

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

from tests.kit.causes import known_cause

from kit.addresses import own_endpoint
from kit.jobs import TENAX, TIMEOUT_S, Runner
from tenax._node.journal import read_journal, read_run_journal

from .corpus import Seed
from .views import Seen, replayed, views_of, views_of_agents

_HERE = Path(__file__).parent
NODE_FIELDS = {"log_dir", "journal", "host", "began_at", "failed_at"}  # differ between nodes
_numbers = itertools.count(1)
_GROUPS = (
    (Path("/sys/fs/cgroup/memory"), {"memory.limit_in_bytes": 48 << 20}),
    (Path("/sys/fs/cgroup"), {"memory.max": 48 << 20, "memory.swap.max": 0}),
)


class WrongVerdict(AssertionError):
    """The verdict does not match the seed."""


@contextlib.contextmanager
def memory_group(name: str) -> Iterator[Path | None]:
    """Create a control group with little memory, of version 1 or 2. Yields None if that is not permitted."""
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
    """Run it and check the verdict. Return the output of all nodes. Raises ``WrongVerdict``."""
    number = next(_numbers)
    runner = Runner(folder, f"verdict-{number}")
    with memory_group(f"tenax-verdict-{os.getpid()}-{number}") as group:
        if seed.fault == "out_of_memory":
            if group is None:
                return "skipped: creating a control group is not permitted"
            runner.environ["VERDICT_MEMORY_GROUP"] = str(group)
        texts, reports, codes = _run(seed, runner, number)
    runner.close()
    errors = [*_errors(seed, texts, reports, codes), *disagreements(runner.home, reports[0], seed.nodes)]
    if errors:
        raise WrongVerdict(f"{seed.name}: {'; '.join(errors)}\n" + "\n".join(texts))
    return "\n".join(texts)


def _run(seed: Seed, runner: Runner, number: int) -> tuple[list[str], list[dict[str, Any]], list[int]]:
    for rank in range(seed.nodes * seed.workers):
        os.mkfifo(runner.home / f"port.{rank}")
    program = runner.home / "without_interpreter"
    program.write_text("#!/no/such/interpreter\n")
    program.chmod(0o755)
    endpoint = own_endpoint()
    env = {**runner.environ, "VERDICT_FOLDER": str(runner.home)}
    if seed.fault == "scope_expired":
        env["TORCHELASTIC_ENABLE_FILE_TIMER"] = "1"
    flags = ["--nnodes", str(seed.nodes), "--nproc-per-node", str(seed.workers), "--rdzv-backend", "c10d"]
    preload = "torch.distributed" if seed.fault.startswith("gloo") else "none"
    flags += ["--rdzv-endpoint", endpoint, "--rdzv-id", f"verdict-{number}", "--preload", preload]
    flags += ["--shutdown-timeout", "1", "--max-restarts", "1" if seed.variant == "second" else "0"]
    root = "1" if seed.root is None else str(seed.root)
    arguments = [str(_HERE / "seeded.py"), seed.fault, root, seed.victims, seed.variant]
    if seed.command:
        arguments = ["--no-python", *seed.command]
    elif not seed.record:
        arguments = ["--no-python", sys.executable, "-S", *arguments]
    agents = []
    for node in range(seed.nodes):
        command = [*TENAX, "run", *flags, "--report", f"report.{node}.json", *arguments]
        with open(runner.home / f"node.{node}", "wb") as console:
            out = {"stdout": console, "stderr": console, "stdin": subprocess.DEVNULL}
            agents.append(subprocess.Popen(command, **out, cwd=runner.home, env=env))
    try:
        # Importing torch in each process is slow on a busy machine.
        patience_s = TIMEOUT_S * (3 if seed.fault.startswith("gloo") else 1)
        codes = [agent.wait(patience_s) for agent in agents]
    except subprocess.TimeoutExpired:
        texts = [(runner.home / f"node.{node}").read_text(errors="replace") for node in range(seed.nodes)]
        raise WrongVerdict("an agent did not exit\n" + "\n".join(texts)) from None
    finally:
        for agent in agents:
            if agent.poll() is None:
                agent.kill()
                agent.wait()
                runner.leaves_within_s = 2.0
    texts = [(runner.home / f"node.{node}").read_text(errors="replace") for node in range(seed.nodes)]
    missing = [node for node in range(seed.nodes) if not (runner.home / f"report.{node}.json").exists()]
    if missing:
        raise WrongVerdict(f"nodes {missing} wrote no report\n" + "\n".join(texts))
    reports = [json.loads((runner.home / f"report.{node}.json").read_text()) for node in range(seed.nodes)]
    return texts, reports, codes


def disagreements(home: Path, report: dict[str, Any], nodes: int) -> Iterator[str]:
    """Yield where a view of the run, made from its journals, does not show what the report does."""
    (path,) = home.rglob("coordinator*.jsonl")
    header, steps, _ = read_run_journal(str(path))
    views = views_of(header, steps, replayed(header, steps), 0.0)
    agents = [read_journal(str(each))[:2] for each in sorted(home.rglob("journal*.jsonl"))]
    if len(agents) != nodes:
        yield f"there are {len(agents)} journals of agents"
    first, consequences = report["first_cause"], len(report["victims"])
    expected = Seen(
        first["rank"], first["host"], report["cause"], 1 + len(report["other_failures"]) - consequences, consequences
    )
    for name, seen in {**views.values, **views_of_agents(agents)}.items():
        for field, here, there in zip(Seen._fields, seen, expected, strict=True):
            if here is not None and here != there:
                yield f"{field} is {here!r} in {name}, and {there!r} in the report"
    who = f"rank {first['rank']} on {first['host']} "
    for name, text in views.texts.items():
        if who not in " ".join(text.split()):
            yield f"{who!r} is not in {name}:\n{text}"


def _errors(seed: Seed, texts: list[str], reports: list[dict[str, Any]], codes: list[int]) -> Iterator[str]:
    if 0 in codes or len(set(codes)) > 1:
        yield f"the agents exited with {codes}"
    shared = [{key: value for key, value in report.items() if key not in NODE_FIELDS} for report in reports]
    if any(each != shared[0] for each in shared):
        yield "the reports of the nodes differ"
    report = shared[0]
    if report["cause"] != seed.kind:
        yield f"the cause is {report['cause']}, not {seed.kind}"
    if report["cause_is_known"] != (seed.root is not None):
        yield f"cause_is_known is {report['cause_is_known']}"
    rank = report["first_cause"]["rank"]
    if isinstance(seed.root, int) and rank != seed.root:
        yield f"the first cause is rank {rank}"
    # A worker that tenax stopped before it failed is listed as stopped.
    stopped = {each["rank"] for each in report["stopped"]}
    if seed.root == "all" and {rank, *report["same_cause"], *stopped} != set(range(seed.nodes * seed.workers)):
        yield f"only ranks {rank} and {report['same_cause']} have the same cause"
    failed = {each["rank"] for each in report["other_failures"]}
    if isinstance(seed.root, int) and set(report["victims"]) != failed:
        yield f"{failed} also failed, but the victims are {report['victims']}"
    meaning = "Unknown: every failed worker" if seed.root is None else known_cause(seed.kind, report["proof"]).meaning
    in_full = [number for number, text in enumerate(texts) if "First cause" in text]
    if not 1 <= len(in_full) <= 2:
        yield f"nodes {in_full} print the report in full"
    for number, text in enumerate(texts):
        if number not in in_full:
            if f"rank {rank} on" not in text or "; report on" not in text:
                yield f"node {number} does not print the report in one line"
            continue
        block = text[text.find("First cause") :] if "First cause" in text else ""
        printed = " ".join(block.split())
        same = "failed for the same reason" if report["same_cause"] else ""
        for expected in (meaning, f" rank {rank} (", seed.text, same):
            if " ".join(expected.split()) not in printed:
                yield f"node {number} does not print {expected!r}"
