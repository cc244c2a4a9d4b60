"""``tenax stop``, ``tenax restart`` and ``tenax drain``: an operator's requests to a run.

On a terminal they describe the effect and ask for confirmation. Elsewhere they act only with ``--yes``. They print what
was started and do not wait for it to finish.
"""

from __future__ import annotations

import os
import pwd
import select
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from tenax._core.requests import AnyRequest, DrainRequest, NodeRequest, RestartRequest, StatusRequest, StopRequest
from tenax._core.text import counted, harmless
from tenax._failures.exit_codes import FAILED
from tenax._view.status import NodeStatus, RunStatus
from tenax.cli.command import Arguments
from tenax.cli.flags import UsageError
from tenax.cli.job import SELECTOR_HELP, Job, JobSelector, find_job, parse_job_arguments
from tenax.cli.run import print_page, print_stderr

_COMMON = f"""\
  --yes       do not ask for confirmation
  --why TEXT  the reason, for the report and the journal

{SELECTOR_HELP}
Exit code 0: the request was accepted. 1: it was refused, or there is no such run. 2: wrong usage.
"""

STOP_USAGE = f"""\
usage: tenax stop [RUN_ID] [--why TEXT] [--yes] [--wait] [--endpoint HOST:PORT ...]

Stop a run on every node, as Ctrl-C does: workers get SIGTERM, and after the grace period (--shutdown-timeout of
'tenax run') SIGKILL. Every agent exits with code 130.

  tenax stop                       the only run on this host
  tenax stop llama --yes --wait    without confirmation; wait until the agent on this host has exited
  tenax stop llama --why 'maintenance of rack 7'

{_COMMON}"""

RESTART_USAGE = f"""\
usage: tenax restart [RUN_ID] [--why TEXT] [--yes] [--endpoint HOST:PORT ...]

Restart all workers of a run, on every node, in a new generation. The old workers get SIGTERM and the grace period. The
restart does not count towards --max-restarts.

  tenax restart
  tenax restart llama --why 'new data'

{_COMMON}"""

DRAIN_USAGE = f"""\
usage: tenax drain NODE [RUN_ID] [--why TEXT] [--yes] [--endpoint HOST:PORT ...]

Remove one node from a run, as SIGTERM to its agent does: its workers get SIGTERM and the grace period, and the other
nodes continue if enough are left. NODE is its name or rank, as shown by 'tenax status'.

  tenax drain node17
  tenax drain 3 llama --why 'a GPU with many errors'

{_COMMON}"""

_MAX_WHY = 1000
_BUSY = ("starting", "working", "stopping", "draining")  # states of a node whose workers run


def stop(argv: Sequence[str]) -> int:
    arguments = parse_job_arguments(argv, switches=("--yes", "--wait"), values=("--why",))

    def plan(_: Job, status: RunStatus) -> str:
        busy = [node for node in status.nodes if node.state in _BUSY]
        return f"stops the run {status.run_id!r}" + (f": {_size(busy)}" if busy else ", which has no running worker")

    return _do(arguments, StopRequest(_why(arguments, "stopped")), plan)


def restart(argv: Sequence[str]) -> int:
    arguments = parse_job_arguments(argv, switches=("--yes",), values=("--why",))

    def plan(_: Job, status: RunStatus) -> str:
        size = _size([node for node in status.nodes if node.state != "spare"])
        return f"restarts the run {status.run_id!r} (generation {status.generation}): {size}"

    return _do(arguments, RestartRequest(_why(arguments, "requested")), plan)


def drain(argv: Sequence[str]) -> int:
    arguments = parse_job_arguments(argv, switches=("--yes",), values=("--why",))
    if not arguments.positional:
        raise UsageError("no node given; add its name or rank, as shown by 'tenax status'")
    node = arguments.positional.pop(0)
    request = DrainRequest(node, _why(arguments, "requested"))
    return _do(arguments, request, lambda job, status: _drain_plan(job, status, node))


def _drain_plan(job: Job, status: RunStatus, name: str) -> str:
    """Describe the effect of draining a node. Raises ``Declined`` if there is no such node."""
    node = _find_in_status(status, name)
    if node is None:  # the coordinator also has names that a status does not show
        node_id = job.ask(NodeRequest(name), str)
        node = next((node for node in status.nodes if node.node_id == node_id), None)
    if node is None:
        return f"drains the node {name!r} of the run {status.run_id!r}"
    workers = f" and stops its {'worker' if node.slots == 1 else f'{node.slots} workers'}"
    plan = f"drains {node.name} of the run {status.run_id!r}"
    plan += workers if node.state in _BUSY else ", which has no running worker"
    left = len(status.nodes) - 1
    if left == 0 and status.max_nodes == 1:
        return f"{plan}; the run ends, because it has no other node"
    if left < status.min_nodes:
        return f"{plan}; the run waits for more nodes, because {left} of at least {status.min_nodes} are left"
    return f"{plan}; {counted(left, 'node')} continue{'s' if left == 1 else ''}"


def _find_in_status(status: RunStatus, name: str) -> NodeStatus | None:
    """Find a node by name, for the confirmation only: the coordinator decides which node is drained."""
    for node in status.nodes:
        if name in (node.name, node.node_id):
            return node
    found = [node for node in status.nodes if node.host == name]
    found = found or [node for node in status.nodes if node.rank >= 0 and str(node.rank) == name]
    return found[0] if len(found) == 1 else None


def _do(arguments: Arguments, request: AnyRequest, plan: Callable[[Job, RunStatus], str]) -> int:
    """Send the request once the user has confirmed the plan, and with --wait, wait until the agent has exited."""
    with find_job(JobSelector.of(arguments)) as job, ExitStack() as stack:
        waits = "--wait" in arguments.switches
        agent = _pidfd_of_agent(job) if waits else -1  # before the agent can exit and its pid be reused
        if agent >= 0:
            stack.callback(os.close, agent)
        if "--yes" not in arguments.switches:
            if sys.stdin is None or not sys.stdin.isatty():
                raise UsageError("not a terminal, so the question cannot be asked; pass --yes")
            if not _confirm(f"This {plan(job, job.ask(StatusRequest(), RunStatus))}."):
                print_stderr("tenax: cancelled; nothing was changed")
                return FAILED
        exit_code = print_page(f"{job.ask(request, str)}\n")
        if waits and exit_code == 0:
            job.until_gone()
            if agent >= 0:  # the control socket closes shortly before the agent exits
                poll = select.poll()
                poll.register(agent, select.POLLIN)
                poll.poll()
        return exit_code


def _confirm(text: str) -> bool:
    answer = ""
    try:
        sys.stderr.write(f"{harmless(text)}\nContinue? [y/N] ")
        sys.stderr.flush()
        answer = sys.stdin.readline()
    finally:
        if not answer.endswith("\n"):  # after Ctrl-C or Ctrl-D, start a new line
            sys.stderr.write("\n")
    return answer.strip().lower() in ("y", "yes")


def _pidfd_of_agent(job: Job) -> int:
    """Return a pidfd of the agent; -1 if it is on another host or in another container."""
    if job.agent is None or not hasattr(os, "pidfd_open"):
        return -1
    try:
        return os.pidfd_open(job.agent.pid)
    except OSError:
        return -1


def _size(nodes: Sequence[NodeStatus]) -> str:
    return f"{counted(sum(node.slots for node in nodes), 'worker')} on {counted(len(nodes), 'node')}"


def _why(arguments: Arguments, done: str) -> str:
    why = arguments.values.get("--why", "").strip()
    if len(why.encode(errors="surrogateescape")) > _MAX_WHY:
        raise UsageError(f"--why takes at most {_MAX_WHY} bytes")
    try:
        name = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        name = f"user {os.getuid()}"
    return why or f"{done} by {name} on {os.uname().nodename}"
