"""Worker logs: where each worker's output goes in each generation, and the evidence a failed worker leaves.

Connects three independent parts: the log specs (which files and tees), the log writer (which moves the bytes) and the
failure evidence (what the last lines of stderr show). Implements ``interfaces.Logs``.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time

import msgspec

from tenax._core.model import Evidence
from tenax._core.text import decoded, one_line, without_passwords
from tenax._io.interfaces import Output
from tenax._logs.specs import LogsDest, LogsSpecs, line_prefix
from tenax._logs.writer import LogWriter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TextIO

    from tenax._core.commands import ExamineFailure
    from tenax._core.events import LastLinesRead
    from tenax._core.messages import WorkerProgress
    from tenax._core.requests import LogsRequest
    from tenax._failures.out_of_memory import OutOfMemoryWatch
    from tenax._io.interfaces import Reply
    from tenax._logs.replaced_stream import ReplacedStream
    from tenax._node.log_queries import LogQueries

_STDOUT, _STDERR = 1, 2
_COLOURS = {"red": 31, "green": 32, "yellow": 33}
_REPLACED = 2  # added to the number of a stream whose object in ``sys`` was replaced
_TAIL_BYTES = 64 << 10  # what the log writer keeps of each stream
_SHORT_TAIL_BYTES = 4 << 10
_MAX_LAST_LINES_READ = 16  # workers of a node whose last lines are read when they are stopped ...
_MAX_STOPPED_LINES = 5  # ... and how many of each
_DRAIN_S = 5.0  # at the end: maximum time to write the last lines
_FINISH_S = 2.0  # ... and to wait for a console that does not accept them
_MTIME_RESOLUTION_S = 1.0  # of coarse file systems
_MAX_GENERATIONS = 256  # whose files can be queried
_IMPORTED_BYTES = 8  # at the end of a progress file
_MAX_READS = 8  # of a progress file: a read may overlap a write, but not eight times in a row
_LAST_LINES_S = 1.0  # for waiting log queries when the run ends


class LoggedGeneration(msgspec.Struct, frozen=True):
    """Where the output of one generation's workers is, by local rank."""

    ranks: dict[int, int]  # the global ranks
    destination: LogsDest
    origins: dict[int, int]  # the generation in which the process was started: it names the streams of a survivor


class WorkerLogs:
    def __init__(
        self,
        specs: LogsSpecs,
        *,
        role: str,
        prefix_template: str | None = None,
        prefixes: dict[int, str] | None = None,
        stdout_filters: list[str] | None = None,
        stderr_filters: list[str] | None = None,
        show_messages: bool = True,
        live_line: bool = True,
        colours: bool = False,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._specs = specs
        self._role = role
        self._template = prefix_template
        self._prefixes = prefixes
        self._filters = {_STDOUT: stdout_filters or [], _STDERR: stderr_filters or []}
        self._show_messages = show_messages
        self._live_line = show_messages and live_line
        self._has_colours = colours and os.isatty(_STDERR)
        self._has_one_console = _is_same_file(_STDOUT, _STDERR)
        self._is_terminal = os.isatty(_STDOUT)
        self._now = now
        self._writer = writer = LogWriter()
        self.fileno, self.on_readable, self.on_writable = writer.fileno, writer.on_readable, writer.on_writable
        self.destination = LogsDest()  # of the latest generation
        self._memory: OutOfMemoryWatch | None = None
        self._open_keys: list[str] = []
        self._is_open = False
        self._replaced: dict[int, ReplacedStream] = {}
        self._is_shared = False  # more than one worker writes to the console
        self._generations: dict[int, LoggedGeneration] = {}  # oldest first
        self._origins: dict[int, int] = {}  # of the latest generation
        self._queries: LogQueries | None = None  # created by the first query

    def open(self) -> None:
        self._writer.start()
        self._is_open = True
        for number in (_STDOUT, _STDERR):
            stream = _replaced(number)
            if stream is not None:
                from tenax._logs.replaced_stream import ReplacedStream

                self._replaced[number] = ReplacedStream(stream)
                self._writer.open_console(_REPLACED + number, self._replaced[number].descriptor)

    # --- output of workers --------------------------------------------------------------------------------------------

    def prepare(
        self, generation: int, envs: dict[int, dict[str, str]], survivors: tuple[int, ...] = ()
    ) -> dict[int, Output]:
        """Open the streams of a new generation. All processes of the previous one are gone, except the survivors."""
        kept = [self._key(rank, number) for rank in survivors for number in (_STDOUT, _STDERR)]
        self._writer.close_stream_duplicates([key for key in self._open_keys if key not in kept])
        self._open_keys = [key for key in self._open_keys if key in kept]
        self._remove_empty_stacks(survivors)
        before, self.destination = self.destination, self._choose_destination(envs)
        for rank in survivors:
            _keep_destination(before, self.destination, rank)
        self._origins = {rank: self._origins[rank] if rank in survivors else generation for rank in envs}
        self._is_shared = sum(map(self._is_shown, envs)) > 1
        ranks = {local_rank: int(env.get("RANK", local_rank)) for local_rank, env in envs.items()}
        self._generations[generation] = LoggedGeneration(ranks, self.destination, self._origins)
        if len(self._generations) > _MAX_GENERATIONS:
            del self._generations[next(iter(self._generations))]
        if self._memory is None:
            from tenax._failures.out_of_memory import OutOfMemoryWatch

            self._memory = OutOfMemoryWatch()
        else:
            self._memory.rebase()
        started = [rank for rank in envs if rank not in survivors]
        streams: dict[tuple[int, int], int] = {}
        try:
            for rank in started:
                stdout = streams[rank, _STDOUT] = self._open_stream(generation, rank, _STDOUT, envs[rank])
                is_one = self._is_one_stream(rank)
                streams[rank, _STDERR] = (
                    os.dup(stdout) if is_one else self._open_stream(generation, rank, _STDERR, envs[rank])
                )
        except OSError:  # too many open files; the caller reports it
            for descriptor in streams.values():
                os.close(descriptor)
            raise
        if self._queries is not None:
            self._queries.on_generation()
        files = self.destination.error_files
        env = {rank: {"TORCHELASTIC_ERROR_FILE": files.get(rank, "")} for rank in started}
        return {rank: Output(streams[rank, _STDOUT], streams[rank, _STDERR], env[rank]) for rank in started}

    def _key(self, rank: int, number: int) -> str:
        return f"{self._origins.get(rank, 0)}.{rank}.{number}"

    def _is_shown(self, rank: int) -> bool:
        """Whether a stream of this worker goes to the console."""
        to = self.destination
        streams = ((to.stdouts, to.tee_stdouts), (to.stderrs, to.tee_stderrs))
        return any(teed.get(rank) or not files.get(rank) for files, teed in streams)

    def _is_one_stream(self, rank: int) -> bool:
        """Whether stdout and stderr of this worker only go to the same console: then one pipe keeps their order."""
        to = self.destination
        goes_elsewhere = (to.stdouts, to.stderrs, to.tee_stdouts, to.tee_stderrs)
        return self._has_one_console and not any(each.get(rank) for each in goes_elsewhere)

    def _choose_destination(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Create the log files' directories. If that fails, the run continues without log files."""
        try:
            return self._specs.reify(envs)
        except OSError as error:
            self._writer.print(f"tenax: could not create log files: {error.strerror}: {error.filename!r}")
            return LogsDest()

    def _open_stream(self, generation: int, rank: int, number: int, env: dict[str, str]) -> int:
        to = self.destination
        files, teed, filtered = (
            (to.stdouts, to.tee_stdouts, to.filtered_stdout)
            if number == _STDOUT
            else (to.stderrs, to.tee_stderrs, to.filtered_stderr)
        )
        path = files.get(rank, "")
        is_teed = bool(teed.get(rank))
        # As in TorchElastic, teed lines go to an object that replaced ``sys.stdout``.
        console = _REPLACED + number if is_teed and number in self._replaced else number
        key = self._key(rank, number)
        self._open_keys.append(key)
        return self._writer.open_stream(
            key,
            path=path if path != os.devnull else "",
            # Not redirected: console only. Redirected: file only. Teed: both.
            console=console if is_teed or not path else 0,
            prefix=self._prefix(generation, rank, env) if is_teed else "",
            filters=self._filters[number] if is_teed else [],
            filter_path=filtered if is_teed else "",
            whole_lines=is_teed or self._is_shared,
            as_terminal=self._is_terminal and not self._is_shared and self._is_one_stream(rank),
        )

    def _prefix(self, generation: int, rank: int, env: dict[str, str]) -> str:
        if self._prefixes is not None:
            return self._prefixes.get(rank, "")
        fields = {"rank": int(env.get("RANK", rank)), "local_rank": rank, "generation": generation}
        return line_prefix(self._template, role_name=self._role, host=os.uname().nodename, **fields)

    # --- evidence -----------------------------------------------------------------------------------------------------

    def error_files(self) -> dict[int, str]:
        return {rank: path for rank, path in self.destination.error_files.items() if path}

    def has_error_file(self, local_rank: int) -> bool:
        return os.path.exists(self.destination.error_files.get(local_rank, ""))

    def progress(self) -> tuple[WorkerProgress, ...]:
        files = {rank: _progress_file(path) for rank, path in self.error_files().items()}
        found = (read_progress(path, rank) for rank, path in files.items() if os.path.exists(path))
        return tuple(each for each in found if each is not None)

    def output_times(self, done: Callable[[dict[int, float]], None]) -> None:
        by_key = {key: int(key.split(".")[1]) for key in self._open_keys}

        def answer(times: dict[str, float]) -> None:
            to_agent_clock = self._now() - time.time()
            in_order = sorted(times.items(), key=lambda each: each[1])  # the last of its streams counts
            done({by_key[key]: at + to_agent_clock for key, at in in_order})

        self._writer.output_times(list(by_key), answer)

    def answer(self, request: LogsRequest, reply: Reply) -> None:
        if self._queries is None:
            from tenax._node.log_queries import LogQueries

            self._queries = LogQueries(self._writer, self._generations)
        self._queries.answer(request, reply)

    def answer_final_requests(self) -> Callable[[], float] | None:
        queries = self._queries
        if queries is None or not self._is_open:
            return None
        self._writer.drain(_LAST_LINES_S, lambda _: queries.end(), self._open_keys)
        return queries.followed_for

    def examine(self, command: ExamineFailure, done: Callable[[Evidence], None]) -> None:
        """Fetch the last lines of stderr and pass the evidence to ``done``."""
        if command.was_stopped and not self.has_error_file(command.local_rank):
            done(self._stacks_only(command))
            return
        number = _STDOUT if self._is_one_stream(command.local_rank) else _STDERR
        key = self._key(command.local_rank, number)
        self._writer.tail([key], lambda tails: done(self._evidence(command, tails.get(key, b""))))

    def read_last_lines(self, generation: int, post: Callable[[LastLinesRead], None]) -> None:
        """Read the last lines of each worker: of stdout, or if that is empty, of stderr."""
        to = self.destination
        logged = self._generations.get(generation)
        ranks = list(logged.ranks)[:_MAX_LAST_LINES_READ] if logged is not None else []
        keys = {(rank, number): self._key(rank, number) for rank in ranks for number in (_STDOUT, _STDERR)}

        def done(tails: dict[str, bytes]) -> None:
            from tenax._core.events import LastLinesRead
            from tenax._failures.evidence import last_lines

            for rank in ranks:
                stdout, stderr = (tails.get(keys[rank, number], b"") for number in (_STDOUT, _STDERR))
                lines = last_lines(decoded((stdout or stderr)[-_SHORT_TAIL_BYTES:]), cut=True)[-_MAX_STOPPED_LINES:]
                log_file = (to.stdouts if stdout or not stderr else to.stderrs).get(rank, "")
                if lines:
                    post(LastLinesRead(generation, rank, lines, log_file if log_file != os.devnull else ""))

        self._writer.tail(list(keys.values()), done)

    def _evidence(self, command: ExamineFailure, tail: bytes) -> Evidence:
        from tenax._failures.evidence import gather

        local_rank = command.local_rank
        return gather(
            last_lines_of="output" if self._is_one_stream(local_rank) else "stderr",
            pid=command.pid,
            exit_code=command.exit_code,
            error_file=self.destination.error_files.get(local_rank, ""),
            stderr_tail=tail,
            log_file=self.destination.stderrs.get(local_rank, ""),
            stacks_file=self._stacks_file(local_rank, command.started_at),
            tail_is_cut=len(tail) >= _TAIL_BYTES,
            out_of_memory=self._memory,
            wall_to_agent_clock=self._now() - time.time(),
            started_at=command.started_at,
            seen_at=command.ended_at,
        )

    def _stacks_only(self, command: ExamineFailure) -> Evidence:
        """Return the stacks of a worker that did not fail: they may explain why another one hung."""
        path = self._stacks_file(command.local_rank, command.started_at)
        if not path:
            return Evidence()
        from tenax._failures.evidence import stacks_in

        return Evidence(stacks=stacks_in(path))

    def _stacks_file(self, local_rank: int, started_at: float) -> str:
        """Return the path if the file was written by this worker: third-party log specs may reuse a directory."""
        from tenax._processes.stacks import stacks_file

        error_file = self.destination.error_files.get(local_rank, "")
        path = stacks_file(error_file) if error_file else ""
        began = time.time() - (self._now() - started_at)
        with contextlib.suppress(OSError):  # there is none
            return path if path and os.stat(path).st_mtime >= began - _MTIME_RESOLUTION_S else ""
        return ""

    def _remove_empty_stacks(self, survivors: tuple[int, ...] = ()) -> None:
        """Remove the files that workers opened for dumps of their stacks and never wrote."""
        from tenax._processes.stacks import stacks_file

        files = self.error_files().items()
        for path in [stacks_file(error_file) for rank, error_file in files if rank not in survivors]:
            with contextlib.suppress(OSError):  # there is none, or the directory is gone
                if not os.stat(path).st_size:
                    os.unlink(path)

    # --- the agent's own lines ----------------------------------------------------------------------------------------

    def print_line(self, text: str, *, after_output: bool = False, colour: str = "") -> None:
        """Print a line of the agent. With ``after_output``, all workers are gone and their output is written first."""
        if after_output:  # even if another process holds one of the pipes open
            self._writer.close_stream_duplicates(self._open_keys)
        if self._show_messages:
            text = one_line(without_passwords(text))
            coloured = f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m" if colour and self._has_colours else text
            self._writer.print(coloured, after_output=after_output)

    def live(self, text: str, since: float | None = None, until: float | None = None) -> None:
        if not self._live_line:
            return
        if not text or not _is_in_foreground():
            self._writer.live("")
            return
        error_file = min(self.error_files().values(), default="")
        progress = _progress_file(error_file) if since is not None and until is None and error_file else ""
        self._writer.live(one_line(text), since, until, progress)

    def close(self, final_text: str = "", interrupt_descriptor: int = -1) -> None:
        """Write all pending output, then ``final_text``, and end the log writer.

        Stop waiting for a slow console when ``interrupt_descriptor`` becomes readable.
        """
        if not self._is_open:
            return
        self._is_open = False
        self._remove_empty_stacks()
        self._writer.close_stream_duplicates(self._open_keys)
        self._writer.drain_now(_DRAIN_S)
        if final_text:
            self._writer.print(final_text, after_output=True)
        self._writer.finish(_FINISH_S, interrupt_descriptor)
        for replaced in self._replaced.values():
            replaced.close(_FINISH_S)
        self._replaced = {}
        if self._memory is not None:
            self._memory.close()

    @property
    def wants_to_write(self) -> bool:
        return self._writer.wants_to_write


def _keep_destination(before: LogsDest, destination: LogsDest, rank: int) -> None:
    for name in ("stdouts", "stderrs", "tee_stdouts", "tee_stderrs", "error_files"):
        old, new = getattr(before, name), getattr(destination, name)
        new.pop(rank, None)
        if rank in old:
            new[rank] = old[rank]


def _is_same_file(one: int, other: int) -> bool:
    try:
        return os.path.samestat(os.fstat(one), os.fstat(other))
    except OSError:  # one is closed
        return False


def _replaced(number: int) -> TextIO | None:
    """Return the object that replaced ``sys.stdout`` (1) or ``sys.stderr`` (2), or None."""
    stream = sys.stdout if number == _STDOUT else sys.stderr
    if stream is None:
        return None
    try:
        descriptor = stream.fileno()
        if descriptor == number or os.path.samestat(os.fstat(descriptor), os.fstat(number)):
            return None
    except (AttributeError, OSError, ValueError):  # not a file, or the descriptor was closed
        pass
    return stream


def _progress_file(error_file: str) -> str:
    return os.path.join(os.path.dirname(error_file), "progress")


def read_progress(path: str, local_rank: int) -> WorkerProgress | None:
    """Return what a worker wrote with ``tenax.progress``, and the hook after it (``_failures/hook``).

    None if that is nothing or invalid. Never raises.
    """
    from tenax._core.bounds import MAX_SECONDS
    from tenax._core.messages import WorkerProgress
    from tenax.progress import LAYOUT, MAGIC, MAX_STEP

    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        for _ in range(_MAX_READS):
            data = os.pread(descriptor, LAYOUT.size + _IMPORTED_BYTES, 0)
            if len(data) < LAYOUT.size:
                return None
            imported_at = int.from_bytes(data[LAYOUT.size :], "little") / 1e9
            if imported_at and not any(data[: LAYOUT.size]):  # it has reported nothing else so far
                return WorkerProgress(local_rank, -1, -1, 0.0, 0.0, imported_at=min(imported_at, MAX_SECONDS))
            magic, first, last, first_at, last_at, count, phase = LAYOUT.unpack(data[: LAYOUT.size])
            # Any process may write this file. Drop values out of bounds: a peer closes the link on such a frame.
            in_bounds = all(-MAX_STEP <= step <= MAX_STEP for step in (first, last)) and all(
                -MAX_SECONDS <= at <= MAX_SECONDS for at in (first_at, last_at, imported_at)
            )
            if magic != MAGIC or not in_bounds:
                return None
            if os.pread(descriptor, LAYOUT.size + _IMPORTED_BYTES, 0) == data:
                name = phase.rstrip(b"\0").decode("utf-8", "replace")
                is_known = count or name or imported_at
                found = WorkerProgress(local_rank, first, last, first_at, last_at, name, imported_at=imported_at)
                return found if is_known else None
    except OSError:  # the file system is gone
        return None
    finally:
        os.close(descriptor)
    return None


def _is_in_foreground() -> bool:
    """Return False for a background job of a shell, which must not overwrite its prompt."""
    try:
        return os.tcgetpgrp(_STDERR) == os.getpgrp()
    except OSError:  # no controlling terminal, so no prompt
        return True
