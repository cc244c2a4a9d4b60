"""``tenax ps``: lists the runs that have an agent of this user on this host."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from shutil import get_terminal_size

import msgspec

from tenax._core.requests import StatusRequest
from tenax._core.text import format_duration
from tenax._engines.tcp.operator import OperatorError
from tenax._view.status import RunStatus
from tenax._view.text import format_moment, outcome_label
from tenax.cli.command import parse_arguments, print_json
from tenax.cli.flags import UsageError
from tenax.cli.job import EndedRun, LocalAgent, connect, ended_runs, local_agents
from tenax.cli.run import is_terminal, print_page, print_stderr
from tenax.cli.terminal_table import Column, plain, table

PS_USAGE = """\
usage: tenax ps [--all] [--json]

List the runs that have an agent of this user on this host, one per line: run id, script, phase, generation, nodes,
workers, age, coordinator, pid of the agent, log folder. 'tenax status RUN_ID' shows more about one. The phase of a run
whose agent does not respond is 'silent', with the reason below the table; its workers may still be running.

  tenax ps
  tenax ps --all            also the last ended runs (at most 100 agents), with how each ended
  tenax ps --json           for programs

Exit code 0: the runs were listed, even if there are none. 1: the list could not be read. 2: wrong usage.
"""

_STATUS_S = 3.0
_UNKNOWN = "?"
_SILENT = "silent"  # its agent does not answer


class LocalRun(msgspec.Struct, frozen=True):
    """A run, as reported by its agents on this host and its coordinator."""

    run_id: str
    script: str
    phase: str
    doing: str
    generation: int
    nodes: int
    workers: int  # of all nodes
    age_s: float
    coordinator: str  # where it runs; empty: unknown
    log_dir: str
    pids: tuple[int, ...]  # of its agents on this host
    trouble: str = ""
    ended_at: float = 0.0  # in seconds since the epoch; 0: it is running


def ps(argv: Sequence[str]) -> int:
    arguments = parse_arguments(argv, switches=("--all", "-a", "--json"))
    if arguments.positional:
        raise UsageError("no arguments expected; 'tenax status' shows one run")
    runs = _local_runs(with_ended=bool(arguments.switches & {"--all", "-a"}))
    if "--json" in arguments.switches:
        return print_json(runs, indent=2)
    if not runs:
        print_stderr("tenax ps: you have no run on this host; 'tenax ps --all' also shows ended runs")
        return 0
    failed = print_page("".join(f"{line}\n" for line in _table(runs)))
    for run in runs:
        if run.trouble:
            text = run.trouble if run.phase == _SILENT else f"the run {run.run_id!r} does not respond: {run.trouble}"
            print_stderr(f"tenax ps: {text}")
    return failed


def _local_runs(*, with_ended: bool) -> list[LocalRun]:
    """Return the runs on this host, oldest first; on request with the ended ones before them."""
    by_run: dict[tuple[str, str], list[LocalAgent]] = {}
    for agent in local_agents():
        # An agent that does not answer gets its own line, beside the other agents of its run.
        by_run.setdefault(agent.which_run if not agent.trouble else ("silent", agent.path), []).append(agent)
    now = time.time()
    ended = [run for run in ended_runs() if run.notes[0].which_run not in by_run] if with_ended else []
    return [*map(_ended, reversed(ended)), *(_run(agents, now) for agents in by_run.values())]


def _ended(run: EndedRun) -> LocalRun:
    first = run.notes[0]
    since = min(note.since for note in run.notes)
    return LocalRun(
        run_id=run.run_id,
        script=first.entrypoint,
        phase=outcome_label(run.outcome) or "killed",
        doing="",
        generation=max(note.generation for note in run.notes),
        nodes=len(run.notes),
        workers=sum(note.workers for note in run.notes),
        age_s=max(0.0, run.ended - since),
        coordinator="",
        log_dir=run.noted[0] if run.noted else "",
        pids=tuple(note.pid for note in run.notes),
        ended_at=run.ended,
    )


def _run(agents: list[LocalAgent], now: float) -> LocalRun:
    first = min(agents, key=lambda agent: (not agent.is_coordinator, agent.since))
    status, trouble = None, first.trouble and first.silence
    if not trouble:
        try:
            with connect(agents, _STATUS_S) as job:
                status = job.ask(StatusRequest(), RunStatus, _STATUS_S)
        except OperatorError as error:
            trouble = str(error)
    slots = [node.slots for node in status.nodes] if status is not None else [agent.workers for agent in agents]
    age_s = now - min(agent.since for agent in agents)
    return LocalRun(
        run_id=first.run_id,
        script=first.entrypoint,
        phase=("hangs" if status.hang else status.phase) if status is not None else first.phase or _SILENT,
        doing=status.doing if status is not None else "",
        generation=status.generation if status is not None else first.generation,
        nodes=len(slots),
        workers=sum(slots),
        age_s=max(0.0, age_s, status.goodput.spent.total_s if status is not None else 0.0),
        coordinator=first.coordinator.removeprefix("the coordinator ") or ("" if first.trouble else "here"),
        log_dir=first.log_dir,
        pids=tuple(agent.pid for agent in agents),
        trouble=trouble,
    )


def _table(runs: list[LocalRun]) -> list[str]:
    with_ended = any(run.ended_at for run in runs)
    columns = (
        Column("RUN", 9, min_width=12),
        Column("SCRIPT", 6, min_width=10),
        Column("PHASE", 8),
        Column("GENERATION", 4, is_right=True),
        Column("NODES", 5, is_right=True),
        Column("WORKERS", 5, is_right=True),
        Column("AGE", 7, is_right=True),
        *((Column("ENDED", 6),) if with_ended else ()),
        Column("COORDINATOR", 2),
        Column("PID", 1, is_right=True),
        Column("LOGS", 3),  # never cut, because users copy it
    )
    rows = [
        (
            plain(run.run_id) or _UNKNOWN,
            plain(os.path.basename(run.script)),
            plain(run.phase),
            *((_UNKNOWN,) * 3 if run.phase == _SILENT else map(str, (run.generation, run.nodes, run.workers))),
            format_duration(run.age_s),
            *((format_moment(run.ended_at) if run.ended_at else "",) if with_ended else ()),
            plain(run.coordinator) or ("" if run.ended_at else _UNKNOWN),
            str(run.pids[0]),
            plain(run.log_dir),
        )
        for run in runs
    ]
    return table(columns, rows, get_terminal_size().columns if is_terminal(sys.stdout) else None)
