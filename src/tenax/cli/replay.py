"""``tenax replay JOURNAL``: prints the history of a run, and checks that its decisions follow from its events."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence

from tenax._core.text import counted, format_seconds, one_line
from tenax._failures.exit_codes import FAILED, SUCCEEDED
from tenax._node.journal import Footer, kind_of, read_journal, read_run_journal, replay_run
from tenax._node.link_journal import read_link_journal
from tenax.cli.command import parse_arguments
from tenax.cli.flags import UsageError
from tenax.cli.job import paths_of
from tenax.cli.run import print_page
from tenax.testing.link_replay import replay_links
from tenax.testing.replay import replay as replay_agent

REPLAY_USAGE = """\
usage: tenax replay [RUN_ID | JOURNAL | FOLDER]

Print the history of a run from its journal (journal.jsonl in its log folder), and check that every decision follows
from the recorded events. Without an argument: of the only run on this host, or the last one. The node that served the
coordinator has a second journal, coordinator.jsonl: why each generation began and ended, for all nodes. With several
nodes each has a journal of its links to the coordinator, and of its leadership with etcd: links.jsonl.

Exit code 0: every decision follows from the events. 1: some do not; each is named. 2: not a journal.
"""


def replay(argv: Sequence[str]) -> int:
    paths = parse_arguments(argv).positional
    if len(paths) > 1:
        raise UsageError(f"expected one journal, not {len(paths)}")
    path = paths_of(paths[0] if paths else "")[0]
    path = os.path.join(path, "journal.jsonl") if os.path.isdir(path) else path
    replay_kind = {"run header": _replay_coordinator, "link header": _replay_links}.get(kind_of(path), _replay_agent)
    return replay_kind(path)


def _replay_coordinator(path: str) -> int:
    header, steps, footer = read_run_journal(path)
    story, differences = replay_run(header, steps)
    settings = header.settings
    least, most = settings.min_nodes, settings.max_nodes
    nodes = f"{least} to {most} nodes" if least < most else counted(most, "node")
    title = f"coordinator of run {settings.run_id} on {header.host}: {nodes}"
    title += f", max restarts {settings.max_restarts}, tenax {header.tenax}"
    return _print([title], story, footer, differences, len(steps))


def _replay_links(path: str) -> int:
    header, lines, footer = read_link_journal(path)
    replayed = replay_links(header, lines)
    title = f"links of the node on {header.host}, from {_started(header.wall_time)}, tenax {header.tenax}"
    return _print([title], replayed.story, footer, replayed.differences, len(lines))


def _replay_agent(path: str) -> int:
    header, steps, footer = read_journal(path)
    replayed = replay_agent(header, steps, footer)
    settings = header.settings
    titles = [
        f"run {settings.run_id} of {header.entrypoint} on {header.host}, started {_started(header.wall_time)}",
        f"workers {settings.local_world_size}, max restarts {settings.max_restarts}, "
        f"grace period {format_seconds(settings.grace_s)}, tenax {header.tenax}",
    ]
    story = [(line.after_s, line.text) for line in replayed.lines]
    return _print(titles, story, footer, replayed.differences, len(steps))


def _started(wall_time: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(wall_time))
    except (OverflowError, OSError, ValueError):  # a damaged journal may contain any number
        return "?"


def _print(
    titles: list[str], story: Iterable[tuple[float, str]], footer: Footer | None, differences: list[str], steps: int
) -> int:
    """Print the history and the result of the check. Return the exit code."""
    lines = [*titles, "", *(f"{after_s:>10.3f} s  {text}" for after_s, text in story), ""]
    if footer is None:
        lines.append("The journal ends here: the agent was killed, or the run has not ended.")
    elif footer.steps_not_written:
        lines.append(f"{footer.steps_not_written} steps are missing: the journal or its disk was full.")
    if differences:
        lines.append(f"{len(differences)} of {steps} steps do not follow from the recorded events:")
        lines += [f"  {difference}" for difference in differences]
    else:
        lines.append(f"All {steps} steps were replayed: every decision follows from the recorded events.")
    print_page("".join(f"{one_line(line)}\n" for line in lines))
    return FAILED if differences else SUCCEEDED
