"""``tenax replay JOURNAL``: prints the history of a run, and checks that its decisions follow from its events."""

from __future__ import annotations

import os

from tenax._core.text import format_seconds, one_line

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from tenax._node.journal import Footer, Header
    from tenax.testing.replay import Replayed

USAGE = """\
usage: tenax replay JOURNAL

Print the history of a run from its journal (journal.jsonl in the run's log folder, or that folder), and check that
every decision follows from the recorded events. The node that served the coordinator has a second journal,
coordinator.jsonl: why each generation began and ended, for all nodes.

Exit code 0: every decision follows from the events. 1: some do not; each is named. 2: not a journal.
"""


def replay_command(argv: Sequence[str]) -> int:
    """Execute ``tenax replay ARGV`` and return the exit code."""
    from tenax._failures.exit_codes import FAILED, SUCCEEDED, WRONG_USAGE
    from tenax.cli.run import print_page

    if {"-h", "--help"}.intersection(argv):
        return print_page(USAGE)
    if not argv:
        return _print_error("no journal or folder given", WRONG_USAGE)
    if len(argv) > 1:
        return _print_error(f"expected one journal, not {len(argv)}", WRONG_USAGE)
    from tenax._node.journal import JournalUnreadable, read_journal
    from tenax._node.run_journal import is_run_journal
    from tenax.testing.replay import replay

    path = os.path.join(argv[0], "journal.jsonl") if os.path.isdir(argv[0]) else argv[0]
    try:
        if is_run_journal(path):
            return _replay_coordinator(path)
        header, steps, footer = read_journal(path)
    except JournalUnreadable as error:
        return _print_error(str(error), WRONG_USAGE)
    replayed = replay(header, steps, footer)
    print_page(_page(header, replayed, footer, len(steps)))
    return FAILED if replayed.differences else SUCCEEDED


def _replay_coordinator(path: str) -> int:
    from tenax._failures.exit_codes import FAILED, SUCCEEDED
    from tenax._node.run_journal import read_run_journal, replay_run
    from tenax.cli.run import print_page

    header, steps, footer = read_run_journal(path)
    story, differences = replay_run(header, steps)
    settings = header.settings
    lines = [
        f"coordinator of run {one_line(settings.run_id)} on {one_line(header.host)}: "
        f"{_nodes(settings.min_nodes, settings.max_nodes)}, "
        f"max restarts {settings.max_restarts}, tenax {one_line(header.tenax)}",
        "",
        *(f"{after_s:>10.3f} s  {one_line(text)}" for after_s, text in story),
        "",
        *_ending(footer, differences, len(steps)),
    ]
    print_page("\n".join(lines) + "\n")
    return FAILED if differences else SUCCEEDED


def _nodes(least: int, most: int) -> str:
    if least < most:
        return f"{least} to {most} nodes"
    return "1 node" if most == 1 else f"{most} nodes"


def _print_error(message: str, code: int) -> int:
    from tenax.cli.run import print_stderr

    print_stderr(f"tenax replay: {message}\ntry: tenax replay --help")
    return code


def _page(header: Header, replayed: Replayed, footer: Footer | None, steps: int) -> str:
    settings = header.settings
    lines = [
        f"run {one_line(settings.run_id)} of {one_line(header.entrypoint)} on {one_line(header.host)}, "
        f"started {_started(header.wall_time)}",
        f"workers {settings.local_world_size}, max restarts {settings.max_restarts}, "
        f"grace period {format_seconds(settings.grace_s)}, tenax {one_line(header.tenax)}",
        "",
    ]
    lines += [f"{line.after_s:>10.3f} s  {one_line(line.text)}" for line in replayed.lines]
    lines.append("")
    lines += _ending(footer, replayed.differences, steps)
    return "\n".join(lines) + "\n"


def _started(wall_time: float) -> str:
    import time

    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(wall_time))
    except (OverflowError, OSError, ValueError):  # a damaged journal may contain any number
        return "?"


def _ending(footer: Footer | None, differences: list[str], steps: int) -> list[str]:
    lines: list[str] = []
    if footer is None:
        lines.append("The journal ends here: the agent was killed, or the run has not ended.")
    elif footer.steps_not_written:
        lines.append(f"{footer.steps_not_written} steps are missing: the journal or its disk was full.")
    if differences:
        lines.append(f"{len(differences)} of {steps} steps do not follow from the recorded events:")
        lines += [f"  {one_line(difference)}" for difference in differences]
    else:
        lines.append(f"All {steps} steps were replayed: every decision follows from the recorded events.")
    return lines
