"""``tenax ps``: the runs that have an agent of this user on this host, a line for each."""

from __future__ import annotations

import os
import time

import msgspec

from tenax._core.bounds import DECODE_ERRORS
from tenax._engines.tcp.operator import OperatorError, connect_to_agent
from tenax.cli.flags import UsageError
from tenax.cli.job import AgentHere, agents_here, guarded, read_words

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from tenax._view.status import RunStatus

USAGE = """\
usage: tenax ps [--json]

The runs that have an agent of yours on this host, a line for each: run id, script, what it does, generation, nodes and
workers, age, coordinator, folder of its logs. 'tenax status RUN_ID' tells more about one. An agent that does not
answer is 'silent': why is said below the table, as far as it is known. Its workers may go on.

  tenax ps
  tenax ps --json           for programs

Exit code 0: they were listed, even if there are none. 1: they could not be looked for. 2: wrong usage.
"""

_STATUS_S = 3.0
_UNKNOWN = "?"
_SILENT = "silent"  # its agent does not answer


class RunHere(msgspec.Struct, frozen=True):
    """A run, as its agents on this host and its coordinator say."""

    run_id: str
    script: str
    phase: str
    doing: str
    generation: int
    nodes: int
    workers: int  # of all nodes
    age_s: float
    coordinator: str
    log_dir: str
    pids: tuple[int, ...]  # of its agents on this host
    trouble: str = ""


def ps_command(argv: Sequence[str]) -> int:
    """Do what ``tenax ps ARGV`` asks, and return the exit code."""
    return guarded("ps", argv, USAGE, _ps)


def _ps(argv: Sequence[str]) -> int:
    from tenax._failures.plain_text import harmless
    from tenax.cli.run import print_page, tell
    from tenax.cli.status import print_json

    words = read_words(argv, switches=("--json",))
    if words.plain or words.values:
        raise UsageError("it lists this host; 'tenax status' shows a run, wherever it is")
    runs = runs_here()
    if "--json" in words.switches:
        return print_json(runs, indent=2)
    if not runs:
        tell("tenax ps: nothing of yours runs on this host")
        return 0
    failed = print_page("".join(f"{line}\n" for line in _table(runs)))
    for run in runs:
        if run.trouble:
            told = run.trouble if run.phase == _SILENT else f"the run {run.run_id!r} cannot be asked: {run.trouble}"
            tell(f"tenax ps: {harmless(told)}")
    return failed


def runs_here() -> list[RunHere]:
    """The oldest first."""
    by_run: dict[tuple[str, str], list[AgentHere]] = {}
    for agent in agents_here():
        # One that does not answer has a line of its own, so that it is seen beside others of its run.
        by_run.setdefault(agent.which_run if not agent.trouble else ("silent", agent.path), []).append(agent)
    now = time.time()
    return [_run(agents, now) for agents in by_run.values()]


def _run(agents: list[AgentHere], now: float) -> RunHere:
    first = min(agents, key=lambda agent: (not agent.is_coordinator, agent.since))
    status, trouble = _status(agents) if not first.trouble else (None, first.silence)
    slots = [node.slots for node in status.nodes] if status is not None else [agent.workers for agent in agents]
    age_s = now - min(agent.since for agent in agents)
    return RunHere(
        run_id=first.run_id,
        script=first.entrypoint,
        phase=_phase(status) if status is not None else first.phase or _SILENT,
        doing=status.doing if status is not None else "",
        generation=status.generation if status is not None else first.generation,
        nodes=len(slots),
        workers=sum(slots),
        age_s=max(0.0, age_s, status.goodput.spent.total_s if status is not None else 0.0),
        coordinator=_coordinator(first),
        log_dir=first.log_dir,
        pids=tuple(agent.pid for agent in agents),
        trouble=trouble,
    )


def _coordinator(agent: AgentHere) -> str:
    """One alone is where its agent is; of one that does not answer that is not known."""
    return agent.coordinator.removeprefix("the coordinator ") or ("" if agent.trouble else "here")


def _status(agents: list[AgentHere]) -> tuple[RunStatus | None, str]:
    """From whichever of them knows."""
    from tenax._core.requests import StatusRequest
    from tenax._view.status import RunStatus

    trouble = ""
    for agent in sorted(agents, key=lambda agent: (not agent.is_coordinator, agent.since)):
        try:
            line = connect_to_agent(agent.path, _STATUS_S)
        except (OSError, OperatorError):
            trouble = trouble or "it has just ended"
            continue
        try:
            return msgspec.json.decode(line.ask(StatusRequest(), _STATUS_S), type=RunStatus), ""
        except (OperatorError, *DECODE_ERRORS) as error:
            trouble = trouble or str(error)
        finally:
            line.close()
    return None, trouble


def _phase(status: RunStatus) -> str:
    return "hangs" if status.hang else status.phase


def _table(runs: list[RunHere]) -> list[str]:
    import sys

    from tenax._view.goodput_text import duration_in_words
    from tenax.cli.cells import Column, plain, table
    from tenax.cli.status import terminal_size

    columns = (
        Column("RUN", 9, least=12),
        Column("SCRIPT", 6, least=10),
        Column("PHASE", 8),
        Column("GENERATION", 4, is_right=True),
        Column("NODES", 5, is_right=True),
        Column("WORKERS", 5, is_right=True),
        Column("AGE", 7, is_right=True),
        Column("COORDINATOR", 2),
        Column("PID", 1, is_right=True),
        Column("LOGS", 3),  # whole or not at all: it is there to be copied
    )
    rows = [
        (
            plain(run.run_id) or _UNKNOWN,
            plain(os.path.basename(run.script)),
            plain(run.phase),
            *((_UNKNOWN,) * 3 if run.phase == _SILENT else map(str, (run.generation, run.nodes, run.workers))),
            duration_in_words(run.age_s),
            plain(run.coordinator) or _UNKNOWN,
            str(run.pids[0]),
            plain(run.log_dir),
        )
        for run in runs
    ]
    return table(columns, rows, terminal_size()[0] if sys.stdout is not None and sys.stdout.isatty() else None)
