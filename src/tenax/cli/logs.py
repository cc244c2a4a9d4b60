"""``tenax logs [RUN_ID or FOLDER]``: shows the output of any worker of a running or ended run.

The lines of a running job come from its nodes (``live_logs``). Those of an ended or killed run come from the files that
it left on this host: the journal maps generations to folders and ranks; ``journal.times`` has the times of lines. Files
without times (from an older tenax, or copied without them) are shown one after another, with a note.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from tenax._core.commands import StartWorkers
from tenax._core.requests import LogsRequest
from tenax._core.text import one_line, some_of
from tenax._logs.query import Query, Source, following, last
from tenax._logs.times import times_path
from tenax._node.journal import read_journal
from tenax._node.log_queries import STREAMS, InvalidRequest, RankSet, shown
from tenax._view.log_lines import LeftOut, LogLine
from tenax.cli.command import Arguments, NoSuchJob
from tenax.cli.flags import UsageError
from tenax.cli.job import SELECTOR_HELP, JobSelector, RunHasEnded, find_job, parse_job_arguments
from tenax.cli.run import allows_colour, is_terminal, print_page, print_stderr
from tenax.cli.status import is_reader_gone

LOGS_USAGE = f"""\
usage: tenax logs [RUN_ID | FOLDER ...] [--rank RANKS] [--generation N] [--stream stdout|stderr]
                  [--grep TEXT] [--last N] [--since TIME] [--follow] [--times]

Show the output of workers on all nodes, merged by time, each line with the worker's rank.

  tenax logs                            the last 100 lines of the only run on this host, or of the last one
  tenax logs my-run --rank 0,3-5        ... of these ranks
  tenax logs my-run --follow            continue with new lines, also of later generations, until the run ends
  tenax logs my-run --generation 3      the lines of generation 3 (all: every generation)
  tenax logs my-run --stream stderr --grep Error --last all
  tenax logs my-run --since 10m         the last 10 minutes (30s, 10m, 2h, 1d)
  tenax logs /logs/my-run_d9ce          an ended run, from the files in its folder; several folders are merged

  --last N    the last N of the selected lines (default: 100; all: all of them)
  --times     show the time of each line, by its node's clock

Without log files a node keeps the last 64 KiB of each stream, and as much of earlier generations. With --redirects 3 or
--tee 3 of 'tenax run' all lines are kept. Missing lines are reported.

{SELECTOR_HELP}
Exit code 0: lines were shown. 1: there were none, or the run does not respond. 2: wrong usage.
"""

_MAX_TIME = 1e11  # seconds since the epoch that a calendar can show
_DEFAULT_LAST = 100
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
_RESET = "\x1b[0m"
_JOURNAL = "journal.jsonl"


def logs(argv: Sequence[str]) -> int:
    arguments = parse_job_arguments(
        argv,
        switches=("--follow", "-f", "--times"),
        values=("--rank", "--generation", "--stream", "--grep", "--last", "-n", "--since"),
    )
    choice = choice_of(arguments)
    follows = bool(arguments.switches & {"--follow", "-f"})
    page = Page(has_times="--times" in arguments.switches, begins_with_divider=choice.generation < 0)
    if choice.last and not (choice.ranks or choice.stream or choice.containing or choice.since or choice.generation):
        nothing = "the workers of the last generation wrote nothing"
        page.if_nothing = f"{nothing}; '--generation all' also shows the earlier ones"
    is_here = "--endpoint" not in arguments.values and "--rdzv-endpoint" not in arguments.values
    folders = [arg for arg in arguments.positional if is_here and is_folder(arg)]
    missing = [arg for arg in arguments.positional if arg not in folders and os.sep in arg]
    if missing and len(arguments.positional) > 1 and is_here:
        raise UsageError(f"no folder {missing[0]!r}")
    if folders:
        if len(folders) < len(arguments.positional):
            raise UsageError("give either folders or a run id, not both")
        if follows:
            raise UsageError("--follow needs a run that is running, not a folder")
        return _show_folders(folders, choice, page)
    selector = JobSelector.of(arguments)
    try:
        job = find_job(selector)
    except RunHasEnded as error:
        folders = list(error.ended.folders)
        if not folders:
            raise
        where = f"its folder {folders[0]}" if len(folders) == 1 else f"its {len(folders)} folders on this host"
        page.note(f"the run {error.ended.run_id!r} has ended; reading {where}")
        return _show_folders(folders, choice, page)
    except NoSuchJob as error:
        if os.path.isdir(selector.run_id):
            raise NoSuchJob(f"{error}; for the folder, write ./{selector.run_id}") from error
        if os.sep in selector.run_id and not selector.endpoint:
            raise UsageError(f"no folder and no run {selector.run_id!r}") from error
        raise
    from tenax.cli.live_logs import Follower, recent

    with job:
        try:
            if follows:
                Follower(job, choice, page).run()
            else:
                recent(job, choice, page)
        except KeyboardInterrupt:
            page.end_line()
            raise
    return page.exit_code(0 if follows else 1)


def is_folder(arg: str) -> bool:
    """Return True if the argument is a folder rather than a run."""
    if not os.path.isdir(arg):
        return False
    is_path = os.sep in arg or arg in (os.curdir, os.pardir)
    return is_path or os.path.exists(os.path.join(arg, _JOURNAL))


# --- folders ----------------------------------------------------------------------------------------------------------


class _WorkerLog(msgspec.Struct, frozen=True):
    path: str
    generation: int
    rank: int
    local_rank: int
    stream: str

    @property
    def which(self) -> tuple[int, int, str, int]:
        return self.rank, self.local_rank, self.stream, self.generation


def _show_folders(folders: list[str], choice: LogsRequest, page: Page) -> int:
    """Show the chosen lines from these folders. Raises ``UsageError`` and ``NoSuchJob``."""
    logs = [log for folder in _run_folders(folders) for log in _logs_in(folder)]
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
    return page.exit_code(1)


def _run_folders(folders: list[str]) -> list[str]:
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
        if len({read_journal(os.path.join(each, _JOURNAL))[0].settings.run_id for each in inside}) > 1:
            named = some_of([os.path.basename(each) for each in inside])
            raise UsageError(f"{folder!r} has several runs; select one: {named}")
        found += inside
    return found


def _logs_in(folder: str) -> Iterator[_WorkerLog]:
    """Yield the log files in a run's folder by generation and rank. Raises ``JournalUnreadable``."""
    attempts: dict[int, int] = {}  # number of folders by restart count
    journals = 0
    # One for each run that has used the folder.
    while os.path.exists(journal := os.path.join(folder, f"journal.{journals}.jsonl" if journals else _JOURNAL)):
        journals += 1
        header, steps, _ = read_journal(journal)
        for command in (command for step in steps for command in step.commands):
            if not isinstance(command, StartWorkers):
                continue
            assignment = command.assignment
            number = attempts.get(assignment.restarts_used, 0)
            attempts[assignment.restarts_used] = number + 1
            attempt = f"attempt_{assignment.restarts_used}" + (f".{number}" if number else "")
            for local_rank in range(header.settings.local_world_size):
                for stream in STREAMS.values():
                    path = os.path.join(folder, attempt, str(local_rank), f"{stream}.log")
                    if os.path.isfile(path):
                        rank = assignment.first_global_rank + local_rank
                        yield _WorkerLog(path, assignment.generation, rank, local_rank, stream)


# --- command line -----------------------------------------------------------------------------------------------------


def choice_of(arguments: Arguments) -> LogsRequest:
    """Return the lines to show, as the request to a node that is not named yet. Raises ``UsageError``."""
    values = arguments.values
    ranks, stream = values.get("--rank", ""), values.get("--stream", "")
    try:
        RankSet(ranks)
    except InvalidRequest as error:
        raise UsageError(f"--rank: {error}") from None
    if stream and stream not in STREAMS.values():
        raise UsageError(f"--stream takes stdout or stderr, not {stream!r}")
    since = _since(values["--since"]) if "--since" in values else 0.0
    written = values.get("--last", values.get("-n", "all" if since else str(_DEFAULT_LAST)))
    return LogsRequest(
        "",
        ranks=ranks,
        generation=_number("--generation", values.get("--generation", "0")),
        stream=stream,
        containing=values.get("--grep", ""),
        last=_number("--last", written),
        since=since,
    )


def _number(flag: str, written: str) -> int:
    """Return the number, or -1 for ``all``."""
    if written == "all":
        return -1
    if not written.isdecimal() or len(written) > 9:
        raise UsageError(f"{flag} takes a number or 'all', not {written!r}")
    return int(written)


def _since(written: str) -> float:
    number, unit = (written[:-1], written[-1]) if written[-1:] in _UNITS else (written, "s")
    try:
        seconds = float(number) * _UNITS[unit]
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise UsageError(f"--since takes a time such as 30s, 10m, 2h or 1d, not {written!r}")
    return max(1.0, time.time() - seconds)


# --- output -----------------------------------------------------------------------------------------------------------


class Page:
    """Prints lines, and notes about missing ones."""

    def __init__(self, *, has_times: bool = False, begins_with_divider: bool = False) -> None:
        self._has_times = has_times
        self._generation = 0 if begins_with_divider else -1
        self._has_colours = allows_colour(sys.stdout)
        self._width = 1
        self._lines = 0
        self._left_out: dict[str, tuple[set[tuple[int, str, int]], int]] = {}
        self.is_closed = False  # the reader has closed the pipe, or printing failed
        self.if_nothing = "no such lines"
        self._is_failed = False

    def show(self, lines: Iterable[LogLine]) -> None:
        text: list[str] = []
        for line in lines:
            self._lines += 1
            if self._generation not in (-1, line.generation):
                text.append(f"--- generation {line.generation}\n")
            self._generation = line.generation
            rank = str(line.rank)
            self._width = max(self._width, len(rank))
            name = f"{self._time(line.at)}rank {rank:>{self._width}} |"
            if self._has_colours:
                name = f"\x1b[{_COLOURS[line.rank % len(_COLOURS)]}m{name}{_RESET}"
            # Escape here too: the text comes from a node and is untrusted.
            text.append(f"{name} {one_line(line.text)}".rstrip(" ") + "\n")
        if text:
            self._print("".join(text))

    def _print(self, text: str) -> None:
        """Print text, and set ``is_closed`` if no more output is possible."""
        # Checked first, because print_page ignores a closed pipe.
        is_gone = is_reader_gone()
        self._is_failed = not is_gone and bool(print_page(text, is_styled=True))
        self.is_closed = is_gone or self._is_failed

    def _time(self, at: float) -> str:
        if not self._has_times:
            return ""
        if not 0 < at < _MAX_TIME:  # unknown, or an invalid time from a node
            return " " * 23 + " "
        return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(at))}.{int(at % 1 * 1000):03d} "

    def note(self, message: str) -> None:
        print_stderr(f"tenax logs: {message}")

    def end_line(self) -> None:
        """Start a new line on the terminal, after the ``^C`` that it shows for Ctrl-C."""
        if is_terminal(sys.stdout):
            print_page("\n")
        elif is_terminal(sys.stderr):
            print_stderr("")

    def leave_out(self, left_out: Iterable[LeftOut]) -> None:
        """Collect lines that are missing, for ``note_left_out``."""
        for each in left_out:
            streams, count = self._left_out.get(each.why, (set(), 0))
            streams.add((each.rank, each.stream, each.generation))
            self._left_out[each.why] = (streams, count + each.bytes)

    def note_left_out(self) -> None:
        """Print the collected notes about missing lines, once."""
        for why, (streams, count) in self._left_out.items():
            rank, stream, generation = min(streams)
            whose = f"{stream} of rank {rank} in generation {generation}"
            whose += f" and {len(streams) - 1} more streams" if len(streams) > 1 else ""
            self.note(f"{f'{count} bytes' if count else 'some lines'} of {whose} {why}")
        self._left_out.clear()

    def exit_code(self, if_nothing: int) -> int:
        self.note_left_out()
        if self.is_closed:
            return int(self._is_failed)
        if not self._lines and if_nothing:
            self.note(self.if_nothing)
            return if_nothing
        return 0
