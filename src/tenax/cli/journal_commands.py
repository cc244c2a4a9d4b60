"""``tenax report`` and ``tenax timeline``: runs from their journals, as HTML pages, text, JSON and traces.

A journal that cannot be read is reported and does not affect the others. A damaged journal is used up to the first
damaged line.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from tenax._failures.exit_codes import FAILED, SUCCEEDED, WRONG_USAGE
from tenax._io.safe_open import create_safely
from tenax._node.journal import (
    Footer,
    Header,
    JournalUnreadable,
    RunHeader,
    RunStep,
    Step,
    kind_of,
    read_journal,
    read_run_journal,
)
from tenax._view.chrome_trace import trace_in_text
from tenax._view.history import NodePart, RunHistory, RunPart, histories_of
from tenax._view.html.report_page import report_page
from tenax._view.html.timeline_page import timeline_page
from tenax._view.journal_parts import history_of_node, history_of_run
from tenax._view.summary import format_summary, summary_of
from tenax.cli.command import Arguments, parse_arguments, print_json
from tenax.cli.flags import UsageError
from tenax.cli.job import paths_of
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

_Journal = tuple[Any, list[Any], Footer | None]
_MAX_DEPTH = 6
_MAX_FILES = 10_000


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


# --- journals ---------------------------------------------------------------------------------------------------------


class Found(msgspec.Struct):
    histories: list[RunHistory] = []
    troubles: list[str] = []  # messages about files that could not be read completely


def find_journals(path: str) -> tuple[list[str], str]:
    """Return this journal, or all below this folder, and a message if there are none or too many."""
    if not os.path.lexists(path):
        return [], f"no file or folder {path!r}; 'tenax ps --all' lists the log folders of runs on this host"
    if not os.path.isdir(path):
        return [path], ""
    found: list[str] = []
    top = path.rstrip(os.sep).count(os.sep)
    for folder, folders, files in os.walk(path):
        if folder.count(os.sep) - top >= _MAX_DEPTH:
            folders.clear()
        folders.sort()
        # Journals of later runs in the same folder have a number in their names. A FIFO would block.
        names = (name for name in files if name.endswith(".jsonl") and name.startswith(("coordinator", "journal")))
        found += filter(os.path.isfile, (os.path.join(folder, name) for name in sorted(names)))
        if len(found) > _MAX_FILES:
            return found[:_MAX_FILES], f"more than {_MAX_FILES} journals below {path!r}; the rest is skipped"
    return found, "" if found else f"no journal (coordinator.jsonl, journal.jsonl) below {path!r}"


def read_histories(named: Sequence[str]) -> Found:
    """Return all runs in these files and folders, oldest first."""
    found = Found()
    runs: list[RunPart] = []
    nodes: list[NodePart] = []
    seen: set[str] = set()
    for each in named:
        paths, trouble = find_journals(each)
        if trouble:
            found.troubles.append(trouble)
        for path in paths:
            if (real := os.path.realpath(path)) not in seen:
                seen.add(real)
                _read_one(path, runs, nodes, found.troubles)
    found.histories = histories_of(runs, nodes)
    return found


def _read_one(path: str, runs: list[RunPart], nodes: list[NodePart], troubles: list[str]) -> None:
    folder = os.path.dirname(os.path.abspath(path))
    try:
        if kind_of(path) == "run header":
            runs.append(history_of_run(*_read_journal(path, read_run_journal, RunHeader, RunStep, troubles), folder))
        else:
            nodes.append(history_of_node(*_read_journal(path, read_journal, Header, Step, troubles), folder))
    except JournalUnreadable as error:
        troubles.append(f"{error}; the journal is skipped")


def _read_journal(
    path: str, read: Callable[[str], _Journal], header: type, step: type, troubles: list[str]
) -> _Journal:
    """Return header, steps and footer, up to the first damaged line. Raises JournalUnreadable."""
    try:
        return read(path)
    except JournalUnreadable as error:
        lines = error.beginning
        if not lines or not isinstance(lines[0], header):
            raise
        troubles.append(f"{error}; only the lines before that are used")
        return lines[0], [line for line in lines if isinstance(line, step)], None
