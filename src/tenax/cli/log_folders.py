"""Log lines of an ended or killed run, from the files that it left on this host.

The journal maps generations to folders and ranks; ``journal.times`` has the times of lines. Files without times (from
an older tenax, or copied without them) are shown one after another, with a note.
"""

from __future__ import annotations

import os

import msgspec

from tenax._core.commands import StartWorkers
from tenax._core.requests import LogsRequest
from tenax._core.text import some_of
from tenax._logs.query import Query, Source, following, last
from tenax._logs.times import times_path
from tenax._node.journal import JournalUnreadable, read_journal
from tenax._node.log_queries import STREAMS, RankSet, shown
from tenax._view.log_lines import LeftOut, LogLine
from tenax.cli.command import NoSuchJob
from tenax.cli.flags import UsageError
from tenax.cli.logs import Page

_JOURNAL = "journal.jsonl"


class WorkerLog(msgspec.Struct, frozen=True):
    path: str
    generation: int
    rank: int
    local_rank: int
    stream: str

    @property
    def which(self) -> tuple[int, int, str, int]:
        return self.rank, self.local_rank, self.stream, self.generation


def lines_of(folders: list[str], choice: LogsRequest, page: Page) -> None:
    """Show the chosen lines from these folders. Raises ``UsageError`` and ``NoSuchJob``."""
    logs = [log for folder in run_folders(folders) for log in logs_in(folder)]
    if not logs:
        raise NoSuchJob("the run wrote no log files; 'tenax run --redirects 3' or '--tee 3' writes them")
    ranks, generation = RankSet(choice.ranks), choice.generation or max(log.generation for log in logs)
    chosen = [
        log
        for log in logs
        if log.rank in ranks and generation in (-1, log.generation) and choice.stream in ("", log.stream)
    ]
    without = sum(
        bool(os.path.getsize(log.path)) and not os.path.exists(times_path(os.fsencode(log.path))) for log in chosen
    )
    if without and len(chosen) > 1:
        page.note(f"{without} files have no times; they are shown first, one after another")
    query = Query(last=max(0, choice.last), needle=os.fsencode(choice.containing), since=choice.since, unfinished=True)
    positions, is_more = [0 if choice.last < 0 else -1] * len(chosen), bool(chosen)
    while is_more and not page.is_closed:
        sources = [
            Source(group=log.generation, path=os.fsencode(log.path), in_memory=False, start=position)
            for log, position in zip(chosen, positions, strict=True)
        ]
        result = following(sources, query) if choice.last < 0 else last(sources, query)
        page.show(LogLine(line.at, *chosen[line.source].which, shown(line.text)) for line in result.lines)
        page.leave_out(LeftOut(*chosen[index].which, count, why) for index, count, why in result.left_out)
        positions, is_more = result.positions, result.is_more and choice.last < 0


# --- folders ----------------------------------------------------------------------------------------------------------


def run_folders(folders: list[str]) -> list[str]:
    """Replace each log folder by the folders of the only run in it. Raises ``UsageError``."""
    found: list[str] = []
    for folder in folders:
        if os.path.exists(os.path.join(folder, _JOURNAL)):
            found.append(folder)
            continue
        try:
            names = sorted(os.listdir(folder))
        except OSError as error:
            raise UsageError(f"could not read the folder {folder!r}: {error.strerror}") from error
        inside = [os.path.join(folder, name) for name in names if os.path.exists(os.path.join(folder, name, _JOURNAL))]
        if not inside:
            raise UsageError(f"{folder!r} is not the log folder of a run: it has no {_JOURNAL}")
        if len({_read(os.path.join(each, _JOURNAL))[0] for each in inside}) > 1:
            named = some_of([os.path.basename(each) for each in inside])
            raise UsageError(f"{folder!r} has several runs; select one: {named}")
        found += inside
    return found


def logs_in(folder: str) -> list[WorkerLog]:
    """Return the log files in a run's folder by generation and rank. Raises ``UsageError``."""
    logs: list[WorkerLog] = []
    attempts: dict[int, int] = {}  # number of folders by restart count
    journals = 0
    # One for each run that has used the folder.
    while os.path.exists(journal := os.path.join(folder, f"journal.{journals}.jsonl" if journals else _JOURNAL)):
        journals += 1
        _, starts, workers = _read(journal)
        for start in starts:
            assignment = start.assignment
            number = attempts.get(assignment.restarts_used, 0)
            attempts[assignment.restarts_used] = number + 1
            attempt = f"attempt_{assignment.restarts_used}" + (f".{number}" if number else "")
            for local_rank in range(workers):
                for stream in STREAMS.values():
                    path = os.path.join(folder, attempt, str(local_rank), f"{stream}.log")
                    if os.path.isfile(path):
                        rank = assignment.first_global_rank + local_rank
                        logs.append(WorkerLog(path, assignment.generation, rank, local_rank, stream))
    return logs


def _read(path: str) -> tuple[str, list[StartWorkers], int]:
    """Return the run id, the ``StartWorkers`` commands, and the number of workers."""
    try:
        header, steps, _ = read_journal(path)
    except JournalUnreadable as error:
        raise UsageError(str(error)) from error
    starts = [command for step in steps for command in step.commands if isinstance(command, StartWorkers)]
    return header.settings.run_id, starts, header.settings.local_world_size
