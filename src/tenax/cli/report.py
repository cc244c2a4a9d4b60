"""``tenax report JOURNAL_OR_FOLDER ...``: summarizes one or many runs as an HTML page and text, or as JSON."""

from __future__ import annotations

import os

import msgspec

from tenax._core.text import harmless

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

USAGE = """\
usage: tenax report [-o FILE] [--json] JOURNAL_OR_FOLDER ...

Summarize one or more runs from their journals: how each ended and how its time was spent, why generations ended early,
which hosts fail often, how long recoveries took. Writes a self-contained HTML page and prints a summary.

  tenax report /logs                       all runs below a folder; writes report.html
  tenax report /logs/job17_647c6fd7        one run
  tenax report /logs -o /www/week.html     write the page to this file
  tenax report --json /logs                the numbers on stdout, for programs; writes no page

A folder is searched six levels deep for coordinator.jsonl and journal.jsonl.

Exit code 0: all journals were read. 1: a journal could not be read completely; it is named. 2: none was read.
"""

_DEFAULT = "report.html"


class ReportArguments(msgspec.Struct, frozen=True):
    """The parsed command line."""

    paths: tuple[str, ...]
    output: str = _DEFAULT
    as_json: bool = False


class WrongUsage(Exception):
    """The command line is invalid. The message is the reason."""


def report_command(argv: Sequence[str]) -> int:
    """Execute ``tenax report ARGV`` and return the exit code."""
    from tenax._failures.exit_codes import FAILED, SUCCEEDED, WRONG_USAGE
    from tenax.cli.run import print_page, print_stderr

    if {"-h", "--help"}.intersection(argv):
        return print_page(USAGE)
    try:
        arguments = parse(argv)
    except WrongUsage as error:
        print_stderr(f"tenax report: {harmless(str(error))}\ntry: tenax report --help")
        return WRONG_USAGE
    from tenax._view.summary import format_summary, summary_of
    from tenax.cli.journals import read_histories

    found = read_histories(arguments.paths)
    for trouble in found.troubles:
        print_stderr(f"tenax report: {harmless(trouble)}")
    if not found.histories:
        return WRONG_USAGE
    summary = summary_of(found.histories)
    if arguments.as_json:
        from tenax.cli.status import print_json

        print_json(summary, indent=2)
        return FAILED if found.troubles else SUCCEEDED
    from tenax._io.safe_open import create_safely
    from tenax._view.html.report_page import report_page

    try:
        with create_safely(arguments.output) as file:
            file.write(report_page(summary, found.histories, found.troubles).encode())
    except OSError as error:
        print_stderr(f"tenax report: could not write {arguments.output!r}: {error.strerror}")
        return WRONG_USAGE
    print_page(harmless(format_summary(summary, [f"page: {os.path.abspath(arguments.output)}"])))
    return FAILED if found.troubles else SUCCEEDED


def parse(argv: Sequence[str]) -> ReportArguments:
    """Parse the command line. Raises ``WrongUsage``."""
    paths, output, as_json = [], _DEFAULT, False
    left = iter(argv)
    for arg in left:
        flag, equals, value = arg.partition("=")
        if flag in ("-o", "--output"):
            output = value if equals else next(left, "")
            if not output:
                raise WrongUsage(f"{flag} needs a file")
        elif arg == "--json":
            as_json = True
        elif arg.startswith("-"):
            raise WrongUsage(f"unknown flag {arg!r}")
        else:
            paths.append(arg)
    if not paths:
        raise WrongUsage("no journal or folder given")
    return ReportArguments(tuple(paths), output, as_json)
