"""Finds and reads journals for ``tenax report`` and ``tenax timeline``, and groups them by run.

A journal that cannot be read is reported and does not affect the others. A damaged journal is used up to the first
damaged line.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

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
from tenax._view.history import NodePart, RunHistory, RunPart, histories_of
from tenax._view.journal_parts import history_of_node, history_of_run

_MAX_DEPTH = 6
_MAX_FILES = 10_000


class Found(msgspec.Struct):
    """The runs in the given files and folders."""

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
        found += [os.path.join(folder, name) for name in sorted(files) if _is_journal(folder, name)]
        if len(found) > _MAX_FILES:
            trouble = f"more than {_MAX_FILES} journals below {path!r}; the rest is skipped"
            return found[:_MAX_FILES], trouble
    return found, "" if found else f"no journal (coordinator.jsonl, journal.jsonl) below {path!r}"


def _is_journal(folder: str, name: str) -> bool:
    """Journals of later runs in the same folder have a number in their names. A FIFO is excluded: it would block."""
    has_name = name.endswith(".jsonl") and name.startswith(("coordinator", "journal"))
    return has_name and os.path.isfile(os.path.join(folder, name))


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
            runs.append(history_of_run(*_read(path, read_run_journal, RunHeader, RunStep, troubles), folder))
        else:
            nodes.append(history_of_node(*_read(path, read_journal, Header, Step, troubles), folder))
    except JournalUnreadable as error:
        troubles.append(f"{error}; the journal is skipped")


def _read(
    path: str, read: Callable[[str], Any], header: type, step: type, troubles: list[str]
) -> tuple[Any, list[Any], Footer | None]:
    """Return header, steps and footer, up to the first damaged line. Raises JournalUnreadable."""
    try:
        found: tuple[Any, list[Any], Footer | None] = read(path)
    except JournalUnreadable as error:
        lines = error.beginning
        if not lines or not isinstance(lines[0], header):
            raise
        troubles.append(f"{error}; only the lines before that are used")
        found = lines[0], [line for line in lines if isinstance(line, step)], None
    return found
