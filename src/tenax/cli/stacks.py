"""``tenax stacks [RUN_ID]``: shows where the workers of a run are, on every node, without the script's help."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from tenax._core.hang_report import LocalStacks, describe_location, format_ranks, frames_in, places_of
from tenax._core.link.wire import Answer
from tenax._core.requests import StacksRequest, StatusRequest, WorkerStacks
from tenax._core.text import harmless
from tenax._view.status import RunStatus
from tenax.cli.command import NoSuchJob, print_json
from tenax.cli.flags import UsageError
from tenax.cli.job import SELECTOR_HELP, TIMEOUT_S, Job, JobSelector, decode, find_job, parse_job_arguments
from tenax.cli.run import print_page

_NATIVE_TIMEOUT_S = 60.0

STACKS_USAGE = f"""\
usage: tenax stacks [RUN_ID] [--rank RANK] [--native] [--json] [--endpoint HOST:PORT ...]

Show the Python stacks of the workers of a run. Workers at the same location are shown once, the fewest first: if all
wait for one, that one comes first. The job is not disturbed.

  tenax stacks                     the only run on this host
  tenax stacks llama --rank 3      all threads of rank 3
  tenax stacks --native            with native frames, on hosts that have py-spy; it stops each worker while it reads

{SELECTOR_HELP}
Exit code 0: stacks were shown. 1: there were none, or the run does not respond. 2: wrong usage.
"""


def stacks(argv: Sequence[str]) -> int:
    arguments = parse_job_arguments(argv, switches=("--json", "--native"), values=("--rank",))
    wanted = arguments.values.get("--rank", "")
    if wanted and not (wanted.isdecimal() and len(wanted) < 8):
        raise UsageError(f"--rank {wanted}: expected the number of a rank, as shown by 'tenax status'")
    with find_job(JobSelector.of(arguments)) as job:
        found = _ask(job, int(wanted) if wanted else -1, native="--native" in arguments.switches)
    if "--json" in arguments.switches:
        return print_json(found)
    return print_page(_page(found, is_one=bool(wanted)))


def _ask(job: Job, rank: int, *, native: bool) -> list[WorkerStacks]:
    status = job.ask(StatusRequest(), RunStatus)
    asked = {
        job.line.send(StacksRequest(node.node_id, rank - node.first_rank if rank >= 0 else -1, native)): node
        for node in status.nodes
        if node.first_rank >= 0 and (rank < 0 or 0 <= rank - node.first_rank < node.slots)
    }
    if not asked:
        what = f"rank {rank} does not run" if rank >= 0 else "no worker runs"
        raise NoSuchJob(f"{what} in the run {status.run_id!r}: {status.doing}")
    found: list[WorkerStacks] = []
    until = time.monotonic() + (_NATIVE_TIMEOUT_S if native else TIMEOUT_S)
    while asked:
        answer = job.line.receive(until)
        node = asked.pop(answer.number, None) if isinstance(answer, Answer) else None
        if node is None or not isinstance(answer, Answer):
            continue
        if answer.error:
            ranks = range(node.first_rank, node.first_rank + node.slots)
            found += [WorkerStacks(each, 0, node.name, why=answer.error) for each in ranks if rank in (-1, each)]
        else:
            workers = decode(answer.value, list[WorkerStacks])
            found += [msgspec.structs.replace(worker, host=node.name) for worker in workers]
    return sorted(found, key=lambda worker: worker.rank)


def _page(found: list[WorkerStacks], *, is_one: bool) -> str:
    by_rank = {worker.rank: worker for worker in found}
    notes = dict.fromkeys(f"{worker.host}: {worker.note}" for worker in found if worker.note)
    lines: list[str] = ["", *notes] if notes else []
    compared = []
    for worker in found:  # without native frames
        python = "\n".join(line for line in worker.stacks.splitlines() if ", line ??? in " not in line)
        compared.append(LocalStacks(0, worker.rank, worker.pid, python, worker.why))
    for location in places_of(compared):
        worker = by_rank[location.ranks[0]]
        who = format_ranks(location.ranks)
        if len(location.ranks) == 1:
            who += f" (pid {worker.pid} on {worker.host})" if worker.pid else f" (on {worker.host})"
        lines += ["", f"{who}: {describe_location(location)}"]
        shown = worker.stacks.splitlines() if is_one else [f"  {frame}" for frame in frames_in(worker.stacks)[0]]
        lines += [f"  {line.replace(', line ??? in', ' in').replace(':??? in', ' in')}" for line in shown]
    return "\n".join(harmless(line) for line in lines[1:]) + "\n"
