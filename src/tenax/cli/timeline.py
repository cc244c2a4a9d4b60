"""``tenax timeline JOURNAL_OR_FOLDER``: draws a run as an HTML page and as a trace for Perfetto."""

from __future__ import annotations

import os
import re

import msgspec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from tenax._view.history import RunHistory

USAGE = """\
usage: tenax timeline [-o FILE] [--format html|perfetto] JOURNAL_OR_FOLDER ...

Draw what happened in a run, from its journals, while it goes on or afterwards. Writes RUN_ID-timeline.html, a page that
needs nothing but a browser, and RUN_ID-trace.json, which ui.perfetto.dev and chrome://tracing open.

  tenax timeline /logs/job17_647c6fd7                    both, of the run in that folder
  tenax timeline /logs/job17_647c6fd7 -o run.html        the page
  tenax timeline /logs/job17_647c6fd7 --format perfetto  the trace
  tenax timeline n0/coordinator.jsonl n1/journal.jsonl   of all nodes whose journals are here

coordinator.jsonl says what happened on all nodes; it lies on the node that served the coordinator. journal.jsonl of a
node adds its workers. Clocks of several hosts are taken as they are.

Exit code 0: drawn. 1: drawn, but some journal could not be read, and is named. 2: nothing was drawn.
"""

_FORMATS = ("html", "perfetto")


class TimelineArguments(msgspec.Struct, frozen=True):
    """The parsed command line."""

    paths: tuple[str, ...]
    output: str = ""
    format: str = ""  # empty: both


class WrongUsage(Exception):
    """The command line is invalid. The message says why."""


def timeline_command(argv: Sequence[str]) -> int:
    """Execute ``tenax timeline ARGV`` and return the exit code."""
    from tenax._failures.exit_codes import FAILED, SUCCEEDED, WRONG_USAGE
    from tenax._failures.plain_text import harmless
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
                f"tenax timeline: there are {len(found.histories)} runs there ({harmless(runs)}{more}); "
                "name the journals of one, or use tenax report"
            )
        return WRONG_USAGE
    (history,) = found.histories
    for note in history.missing:
        print_stderr(f"tenax timeline: note: {harmless(note)}")
    try:
        written = [_write(path, history, form) for path, form in _files(arguments, history)]
    except OSError as error:
        print_stderr(f"tenax timeline: {error.filename!r} cannot be written: {error.strerror}")
        return WRONG_USAGE
    print_page("".join(f"{path}\n" for path in written))
    return FAILED if found.troubles else SUCCEEDED


def parse(argv: Sequence[str]) -> TimelineArguments:
    """Parse the command line. Raises ``WrongUsage``."""
    paths, output, form = [], "", ""
    left = iter(argv)
    for word in left:
        flag, equals, value = word.partition("=")
        if flag in ("-o", "--output", "--format"):
            value = value if equals else next(left, "")
            if not value:
                raise WrongUsage(f"{flag} needs a value")
            if flag == "--format":
                form = value
            else:
                output = value
        elif word.startswith("-"):
            raise WrongUsage(f"there is no flag {word!r}")
        else:
            paths.append(word)
    if form and form not in _FORMATS:
        raise WrongUsage(f"--format {form!r} is none; write html or perfetto")
    if not paths:
        raise WrongUsage("no journal and no folder was named")
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
