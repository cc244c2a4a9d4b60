"""``tenax timeline JOURNAL_OR_FOLDER``: draws a run as an HTML page and as a trace for Perfetto."""

from __future__ import annotations

import os
import re

import msgspec

from tenax._core.text import harmless

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from tenax._view.history import RunHistory

USAGE = """\
usage: tenax timeline [-o FILE] [--format html|perfetto] JOURNAL_OR_FOLDER ...

Draw the history of a run from its journals, during the run or after it. Writes RUN_ID-timeline.html, a self-contained
page, and RUN_ID-trace.json for ui.perfetto.dev and chrome://tracing.

  tenax timeline /logs/job17_647c6fd7                    both, for the run in that folder
  tenax timeline /logs/job17_647c6fd7 -o run.html        the page
  tenax timeline /logs/job17_647c6fd7 --format perfetto  the trace
  tenax timeline n0/coordinator.jsonl n1/journal.jsonl   from several nodes' journals

coordinator.jsonl covers all nodes; it is on the node that served the coordinator. A node's journal.jsonl adds its
workers. Differences between the clocks of hosts are not corrected.

Exit code 0: written. 1: written, but a journal could not be read; it is named. 2: nothing was written.
"""

_FORMATS = ("html", "perfetto")


class TimelineArguments(msgspec.Struct, frozen=True):
    """The parsed command line."""

    paths: tuple[str, ...]
    output: str = ""
    format: str = ""  # empty: both


class WrongUsage(Exception):
    """The command line is invalid. The message is the reason."""


def timeline_command(argv: Sequence[str]) -> int:
    """Execute ``tenax timeline ARGV`` and return the exit code."""
    from tenax._failures.exit_codes import FAILED, SUCCEEDED, WRONG_USAGE
    from tenax.cli.run import print_page, print_stderr

    if {"-h", "--help"}.intersection(argv):
        return print_page(USAGE)
    try:
        arguments = parse(argv)
    except WrongUsage as error:
        print_stderr(f"tenax timeline: {harmless(str(error))}\ntry: tenax timeline --help")
        return WRONG_USAGE
    from tenax.cli.journals import read_histories

    found = read_histories(arguments.paths)
    for trouble in found.troubles:
        print_stderr(f"tenax timeline: {harmless(trouble)}")
    if len(found.histories) != 1:
        if found.histories:
            runs = ", ".join(each.run_id for each in found.histories[:5])
            more = ", ..." if len(found.histories) > 5 else ""
            print_stderr(
                f"tenax timeline: found {len(found.histories)} runs ({harmless(runs)}{more}); "
                "give the journals of one, or use tenax report"
            )
        return WRONG_USAGE
    (history,) = found.histories
    for note in history.missing:
        print_stderr(f"tenax timeline: note: {harmless(note)}")
    try:
        written = [_write(path, history, form) for path, form in _files(arguments, history)]
    except OSError as error:
        print_stderr(f"tenax timeline: could not write {error.filename!r}: {error.strerror}")
        return WRONG_USAGE
    print_page("".join(f"{path}\n" for path in written))
    return FAILED if found.troubles else SUCCEEDED


def parse(argv: Sequence[str]) -> TimelineArguments:
    """Parse the command line. Raises ``WrongUsage``."""
    paths, output, form = [], "", ""
    left = iter(argv)
    for arg in left:
        flag, equals, value = arg.partition("=")
        if flag in ("-o", "--output", "--format"):
            value = value if equals else next(left, "")
            if not value:
                raise WrongUsage(f"{flag} needs a value")
            if flag == "--format":
                form = value
            else:
                output = value
        elif arg.startswith("-"):
            raise WrongUsage(f"unknown flag {arg!r}")
        else:
            paths.append(arg)
    if form and form not in _FORMATS:
        raise WrongUsage(f"--format takes html or perfetto, not {form!r}")
    if not paths:
        raise WrongUsage("no journal or folder given")
    return TimelineArguments(tuple(paths), output, form)


def _files(arguments: TimelineArguments, history: RunHistory) -> list[tuple[str, str]]:
    """Return the path and format of each file to write."""
    # A run id may contain any character; a file name may not.
    stem = re.sub(r"[^A-Za-z0-9._-]+", "_", history.run_id).strip(".")[:100] or "run"
    named = {"html": f"{stem}-timeline.html", "perfetto": f"{stem}-trace.json"}
    if arguments.output:
        is_trace = arguments.format == "perfetto" or (not arguments.format and arguments.output.endswith(".json"))
        return [(arguments.output, "perfetto" if is_trace else "html")]
    return [(named[form], form) for form in ((arguments.format,) if arguments.format else _FORMATS)]


def _write(path: str, history: RunHistory, form: str) -> str:
    if form == "html":
        from tenax._view.html.timeline_page import timeline_page

        data = timeline_page(history).encode()
    else:
        from tenax._view.chrome_trace import trace_in_text

        data = trace_in_text(history)
    from tenax._io.safe_open import create_safely

    with create_safely(path) as file:
        file.write(data)
    return os.path.abspath(path)
