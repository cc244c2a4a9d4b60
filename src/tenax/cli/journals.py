"""Journals that a person names: found, read as far as they can be, and sorted by the run they belong to.

Law: what cannot be read is named, and takes nothing else with it. A journal with a damaged line is as good as its
beginning.
"""

from __future__ import annotations

import os

import msgspec

from tenax._core.bounds import DECODE_ERRORS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from tenax._node.journal import Footer, Header, Step
    from tenax._node.run_journal import RunHeader, RunStep
    from tenax._view.history import NodePart, RunHistory, RunPart

_MAX_DEEP = 6
_MAX_FILES = 10_000


class Found(msgspec.Struct):
    """What the named files and folders came to."""

    histories: list[RunHistory] = []
    troubles: list[str] = []  # sentences about files that could not be read, or not to their end


def find_journals(place: str) -> tuple[list[str], str]:
    """Files of journals: the one that is named, or all below a folder, and a sentence if that was cut short."""
    if not os.path.isdir(place):
        return [place], ""
    found: list[str] = []
    top = place.rstrip(os.sep).count(os.sep)
    for folder, folders, files in os.walk(place):
        if folder.count(os.sep) - top >= _MAX_DEEP:
            folders.clear()
        folders.sort()
        found += [os.path.join(folder, name) for name in sorted(files) if _is_one(folder, name)]
        if len(found) > _MAX_FILES:
            return found[
                :_MAX_FILES
            ], f"there are more than {_MAX_FILES} journals below {place!r}; the rest is left out"
    return found, "" if found else f"there is no journal (coordinator.jsonl, journal.jsonl) below {place!r}"


def _is_one(folder: str, name: str) -> bool:
    """A second run in the same folder has a number in the names of its journals. A FIFO would be waited for."""
    is_called_so = name.endswith(".jsonl") and name.startswith(("coordinator", "journal"))
    return is_called_so and os.path.isfile(os.path.join(folder, name))


def read_histories(places: Sequence[str]) -> Found:
    """All runs of these files and folders, oldest first."""
    found = Found()
    runs: list[RunPart] = []
    nodes: list[NodePart] = []
    seen: set[str] = set()
    for place in places:
        paths, trouble = find_journals(place)
        if trouble:
            found.troubles.append(trouble)
        for path in paths:
            if (real := os.path.realpath(path)) not in seen:
                seen.add(real)
                _read_one(path, runs, nodes, found.troubles)
    from tenax._view.history import histories_of

    found.histories = histories_of(runs, nodes)
    return found


def _read_one(path: str, runs: list[RunPart], nodes: list[NodePart], troubles: list[str]) -> None:
    from tenax._node.journal import JournalUnreadable
    from tenax._node.run_journal import is_run_journal

    folder = os.path.dirname(os.path.abspath(path))
    try:
        if is_run_journal(path):
            from tenax._view.coordinator_history import history_of_run

            header, steps, footer = _run_journal(path, troubles)
            run = history_of_run(
                header, steps, is_whole=footer is not None, not_written=_not_written(footer), folder=folder
            )
            runs.append(run)
        else:
            from tenax._view.agent_history import history_of_node

            head, its_steps, foot = _agent_journal(path, troubles)
            node = history_of_node(
                head, its_steps, is_whole=foot is not None, not_written=_not_written(foot), folder=folder
            )
            nodes.append(node)
    except JournalUnreadable as error:
        troubles.append(f"{error}; it is left out")


def _not_written(footer: Footer | None) -> int:
    return footer.steps_not_written if footer is not None else 0


def _run_journal(path: str, troubles: list[str]) -> tuple[RunHeader, list[RunStep], Footer | None]:
    from tenax._node.journal import JournalUnreadable
    from tenax._node.run_journal import AnyRunLine, RunHeader, RunStep, read_run_journal

    try:
        return read_run_journal(path)
    except JournalUnreadable as error:
        lines = _beginning(path, AnyRunLine)
        if not lines or not isinstance(lines[0], RunHeader):
            raise
        troubles.append(f"{error}; what stands before that is shown")
        return lines[0], [line for line in lines if isinstance(line, RunStep)], None


def _agent_journal(path: str, troubles: list[str]) -> tuple[Header, list[Step], Footer | None]:
    from tenax._node.journal import AnyLine, Header, JournalUnreadable, Step, read_journal

    try:
        return read_journal(path)
    except JournalUnreadable as error:
        lines = _beginning(path, AnyLine)
        if not lines or not isinstance(lines[0], Header):
            raise
        troubles.append(f"{error}; what stands before that is shown")
        return lines[0], [line for line in lines if isinstance(line, Step)], None


def _beginning(path: str, kinds: Any) -> list[object]:
    """The lines before the first one that is none, or that begins another run."""
    from tenax._node.journal import FORMAT

    decoder: msgspec.json.Decoder[object] = msgspec.json.Decoder(kinds)
    lines: list[object] = []
    try:
        with open(path, "rb") as file:
            for raw in file:
                line = decoder.decode(raw)
                its_format = getattr(line, "format", None)
                if its_format is not None and (lines or its_format != FORMAT):
                    break
                lines.append(line)
    except (OSError, *DECODE_ERRORS):
        pass  # said by whoever read it first
    return lines
