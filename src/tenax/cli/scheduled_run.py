"""A run that a scheduler started: its secret, what each node prints at the end, its exit code, and the requeue.

1. The tasks of a step print to one place, so the report is printed in full by one of them: the node of rank 0.
2. A task that leaves a run which continues without it exits with ``leave_code``, 0 under Slurm, which takes the highest
   exit code of the step; the node that serves the coordinator leaves last, and sees whether all nodes left.
3. A job that is being preempted is requeued by its first node, after the workers have exited. A cancelled one is not.
"""

from __future__ import annotations

import msgspec

from tenax._core.events import LeaveNoticed
from tenax._core.model import Outcome
from tenax._failures.exit_codes import INTERNAL_ERROR, exit_code_for
from tenax.cli.scheduler_options import shared_secret_path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tenax._core.agent import AgentState
    from tenax._core.model import Verdict
    from tenax._node.journal import Step
    from tenax._node.node import Node
    from tenax.cli.options import Options
    from tenax.scheduler import Allocation


def with_secret(options: Options, environ: Mapping[str, str]) -> Options:
    """Create the user's secret for all nodes if the options name it. If it cannot be created, the run has none."""
    path = options.rdzv_configs.get("token_file", "")
    if not path or path != shared_secret_path(environ.get("HOME", "")):
        return options
    from tenax._engines.secret import make_shared_secret

    try:
        make_shared_secret(path)
    except OSError as error:
        configs = {key: value for key, value in options.rdzv_configs.items() if key != "token_file"}
        note = (
            f"the run has no secret, because {path} could not be created: {error.strerror}; to set one: --rdzv-conf "
            "token_file=FILE"
        )
        return msgspec.structs.replace(options, rdzv_configs=configs, notes=(*options.notes, note))
    return options


def run_scheduled(
    node: Node, allocation: Allocation, environ: Mapping[str, str], report: Callable[[Verdict], str]
) -> tuple[Verdict, int]:
    """Run the node and return the verdict with the exit code for the scheduler."""
    membership = Membership()
    code = INTERNAL_ERROR  # until there is a verdict

    def final_text(verdict: Verdict) -> str:
        nonlocal code
        code = exit_code_for(verdict)
        text = report(verdict)
        is_asked = allocation.is_first and verdict.outcome is Outcome.CANCELLED
        requeued = _requeue(allocation, environ) if is_asked else ""
        if allocation.is_step and not requeued and membership.does_run_continue(verdict):
            code = allocation.leave_code
            return "tenax: this node has left the run, which continues without it\n"
        if text and allocation.is_step and not membership.is_first(allocation):
            text = f"tenax: the run {verdict.outcome.text}: {verdict.why}; the first node prints the report\n"
        return text + (f"tenax: {requeued}\n" if requeued else "")

    return node.run(final_text, membership.observe), code


def _requeue(allocation: Allocation, environ: Mapping[str, str]) -> str:
    from tenax.scheduler import find_scheduler

    scheduler = find_scheduler(environ)
    return scheduler.requeue(allocation.job) if scheduler is not None else ""


class Membership:
    """What this node knows of the nodes of its last generation: how many there were, and which of them leave."""

    def __init__(self) -> None:
        self._generation = 0
        self._others = 0
        self._rank = -1  # of this node; -1: it was in no generation
        self._has_left = False
        self._leaving: set[str] = set()

    def observe(self, step: Step, state: AgentState) -> None:
        self._has_left = state.leave is not None
        if state.assignment is not None and state.generation != self._generation:
            self._generation, self._leaving = state.generation, set()
            self._rank, self._others = state.assignment.group_rank, state.assignment.group_world_size - 1
        if isinstance(step.event, LeaveNoticed) and step.event.generation == self._generation:
            self._leaving.add(step.event.host)

    def does_run_continue(self, verdict: Verdict) -> bool:
        """Whether this node left on request and another one stayed."""
        return self._has_left and verdict.outcome is Outcome.CANCELLED and len(self._leaving) < self._others

    def is_first(self, allocation: Allocation) -> bool:
        return allocation.is_first if self._rank < 0 else self._rank == 0
