"""``tenax report`` and ``tenax timeline``: runs from their journals, as HTML pages, text, JSON and traces."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from tenax._failures.exit_codes import FAILED, SUCCEEDED, WRONG_USAGE
from tenax._io.safe_open import create_safely
from tenax._view.chrome_trace import trace_in_text
from tenax._view.history import RunHistory
from tenax._view.html.report_page import report_page
from tenax._view.html.timeline_page import timeline_page
from tenax._view.summary import format_summary, summary_of
from tenax.cli.command import Arguments, parse_arguments, print_json
from tenax.cli.flags import UsageError
from tenax.cli.job import paths_of
from tenax.cli.journals import Found, read_histories
from tenax.cli.run import print_page, print_stderr

REPORT_USAGE = """\
usage: tenax report [-o FILE] [--json] [RUN_ID | JOURNAL | FOLDER ...]

Summarize one or more runs from their journals: how each ended and how its time was spent, why generations ended early,
which hosts fail often, how long recoveries took. Writes a self-contained HTML page and prints a summary.

  tenax report                             the only run on this host, or the last one
  tenax report llama                       a run on this host by its id, or the beginning of it
  tenax report /logs                       all runs below a folder; writes report.html
  tenax report /logs/job17_647c            one run
  tenax report /logs -o /www/week.html     write the page to this file
  tenax report --json /logs                the numbers on stdout, for programs; writes no page

A folder is searched six levels deep for coordinator.jsonl and journal.jsonl.

Exit code 0: all journals were read. 1: a journal could not be read completely; it is named. 2: none was read.
"""

TIMELINE_USAGE = """\
usage: tenax timeline [-o FILE] [--format html|perfetto] [RUN_ID | JOURNAL | FOLDER ...]

Draw the history of a run from its journals, during the run or after it. Writes RUN_ID-timeline.html, a self-contained
page, and RUN_ID-trace.json for ui.perfetto.dev and chrome://tracing.

  tenax timeline                                         both, for the only run on this host, or the last one
  tenax timeline /logs/job17_647c                        ... for the run in that folder
  tenax timeline /logs/job17_647c -o run.html            the page
  tenax timeline /logs/job17_647c --format perfetto      the trace
  tenax timeline n0/coordinator.jsonl n1/journal.jsonl   from several nodes' journals

coordinator.jsonl covers all nodes; it is on the node that served the coordinator. A node's journal.jsonl adds its
workers. Differences between the clocks of hosts are not corrected.

Exit code 0: written. 1: written, but a journal could not be read; it is named. 2: nothing was written.
"""


def report(argv: Sequence[str]) -> int:
    arguments = parse_arguments(argv, switches=("--json",), values=("-o", "--output"))
    found = _read("report", arguments)
    if not found.histories:
        return WRONG_USAGE
    summary = summary_of(found.histories)
    if "--json" in arguments.switches:
        print_json(summary, indent=2)
        return FAILED if found.troubles else SUCCEEDED
    output = _output(arguments) or "report.html"
    if not _write("report", output, report_page(summary, found.histories, found.troubles).encode()):
        return WRONG_USAGE
    print_page(format_summary(summary, [f"page: {os.path.abspath(output)}"]))
    return FAILED if found.troubles else SUCCEEDED


def timeline(argv: Sequence[str]) -> int:
    arguments = parse_arguments(argv, values=("-o", "--output", "--format"))
    form = arguments.values.get("--format", "")
    if form not in ("", "html", "perfetto"):
        raise UsageError(f"--format takes html or perfetto, not {form!r}")
    found = _read("timeline", arguments)
    if len(found.histories) > 1:
        runs = ", ".join(each.run_id for each in found.histories[:5]) + (", ..." if len(found.histories) > 5 else "")
        advice = "give the journals of one, or use tenax report"
        print_stderr(f"tenax timeline: found {len(found.histories)} runs ({runs}); {advice}")
    if len(found.histories) != 1:
        return WRONG_USAGE
    (history,) = found.histories
    for note in history.missing:
        print_stderr(f"tenax timeline: note: {note}")
    for path, data in _timeline_files(_output(arguments), form, history).items():
        if not _write("timeline", path, data):
            return WRONG_USAGE
        print_page(f"{os.path.abspath(path)}\n")
    return FAILED if found.troubles else SUCCEEDED


def _timeline_files(output: str, form: str, history: RunHistory) -> dict[str, bytes]:
    """Return the path and content of each file to write."""
    if output and not form:
        form = "perfetto" if output.endswith(".json") else "html"
    # A run id may contain any character; a file name may not.
    stem = re.sub(r"[^A-Za-z0-9._-]+", "_", history.run_id).strip(".")[:100] or "run"
    files = {}
    if form != "perfetto":
        files[output or f"{stem}-timeline.html"] = timeline_page(history).encode()
    if form != "html":
        files[output or f"{stem}-trace.json"] = trace_in_text(history)
    return files


def _output(arguments: Arguments) -> str:
    return arguments.values.get("-o") or arguments.values.get("--output", "")


def _read(command: str, arguments: Arguments) -> Found:
    """Read the journals. Prints what could not be read."""
    found = read_histories([path for name in arguments.positional or [""] for path in paths_of(name)])
    for trouble in found.troubles:
        print_stderr(f"tenax {command}: {trouble}")
    return found


def _write(command: str, path: str, data: bytes) -> bool:
    """Write a file. Prints an error and returns False if that fails."""
    try:
        with create_safely(path) as file:
            file.write(data)
    except OSError as error:
        print_stderr(f"tenax {command}: could not write {path!r}: {error.strerror}")
        return False
    return True
