"""``tenax report JOURNAL_OR_FOLDER ...``: summarizes one or many runs as an HTML page and text, or as JSON."""

from __future__ import annotations

import os

from tenax._failures.exit_codes import FAILED, SUCCEEDED, WRONG_USAGE
from tenax._io.safe_open import create_safely
from tenax._view.html.report_page import report_page
from tenax._view.summary import format_summary, summary_of
from tenax.cli.command import parse_arguments, print_json
from tenax.cli.flags import UsageError
from tenax.cli.journals import read_histories
from tenax.cli.run import print_page, print_stderr

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

REPORT_USAGE = """\
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


def report(argv: Sequence[str]) -> int:
    """Execute ``tenax report ARGV`` and return the exit code."""
    arguments = parse_arguments(argv, switches=("--json",), values=("-o", "--output"))
    output = arguments.values.get("-o") or arguments.values.get("--output", "report.html")
    if not arguments.positional:
        raise UsageError("no journal or folder given")
    found = read_histories(arguments.positional)
    for trouble in found.troubles:
        print_stderr(f"tenax report: {trouble}")
    if not found.histories:
        return WRONG_USAGE
    summary = summary_of(found.histories)
    if "--json" in arguments.switches:
        print_json(summary, indent=2)
        return FAILED if found.troubles else SUCCEEDED
    try:
        with create_safely(output) as file:
            file.write(report_page(summary, found.histories, found.troubles).encode())
    except OSError as error:
        print_stderr(f"tenax report: could not write {output!r}: {error.strerror}")
        return WRONG_USAGE
    print_page(format_summary(summary, [f"page: {os.path.abspath(output)}"]))
    return FAILED if found.troubles else SUCCEEDED
