"""Log specs: the log files of each worker, which streams are also shown on the console, and with which prefix.

``DefaultLogsSpecs`` chooses names and creates directories; it writes no output. The layout is
``<log_dir>/<run_id>_<4 random>/attempt_<restart count>/<local rank>/{stdout.log,stderr.log,error.json}``.

1. An earlier attempt's directory is never erased or shared: when ``attempt_0`` exists, the next is ``attempt_0.1``.
2. Any run id becomes one directory name below ``log_dir``.
3. No directory is created before it is needed.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import suppress
from enum import IntFlag
from itertools import count

import msgspec

_ENTRY_POINT_GROUP = "torchrun.logs_specs"
_CONSOLE = ""  # in LogsDest: this stream is not captured in a file
_MAX_RUN_NAME_LENGTH = 100
_ONE_FOR_ALL = r"[0-3]\Z"
_ONE_PER_RANK = r"[0-9]+:[0-3](?:,[0-9]+:[0-3])*\Z"


class Std(IntFlag):
    """Selects a worker's output streams: nothing, stdout, stderr, or both."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = 3

    @classmethod
    def from_str(cls, vm: str) -> Std | dict[int, Std]:
        """Parse ``"2"``, one value for all workers, or ``"0:1,12:3"``, one value per local rank."""
        if re.match(_ONE_FOR_ALL, vm):
            return cls(int(vm))
        if re.match(_ONE_PER_RANK, vm):
            pairs = (pair.split(":") for pair in vm.split(","))
            return {int(local_rank): cls(int(value)) for local_rank, value in pairs}
        raise ValueError(
            f"invalid streams {vm!r}; expected 0 (none), 1 (stdout), 2 (stderr) or 3 (both), "
            "or a list of local_rank:value such as 0:3,12:1"
        )


def to_map(val_or_map: Std | Mapping[int, Std], local_world_size: int) -> dict[int, Std]:
    """Return one value for every local rank; a rank missing in the map gets ``Std.NONE``."""
    if isinstance(val_or_map, Std):
        return dict.fromkeys(range(local_world_size), val_or_map)
    return {local_rank: val_or_map.get(local_rank, Std.NONE) for local_rank in range(local_world_size)}


class LogsDest(msgspec.Struct):
    """Where each local rank's streams go. An empty path is the console; a rank in ``tee_*`` is shown too."""

    stdouts: dict[int, str] = {}
    stderrs: dict[int, str] = {}
    tee_stdouts: dict[int, str] = {}
    tee_stderrs: dict[int, str] = {}
    error_files: dict[int, str] = {}
    filtered_stdout: str = ""
    filtered_stderr: str = ""


class LogsSpecs(ABC):
    """Base class of plug-ins that choose the destinations (entry-point group ``torchrun.logs_specs``)."""

    def __init__(
        self,
        log_dir: str | None = None,
        redirects: Std | dict[int, Std] = Std.NONE,
        tee: Std | dict[int, Std] = Std.NONE,
        local_ranks_filter: set[int] | None = None,
    ) -> None:
        self._root_log_dir = log_dir
        self._redirects = redirects
        self._tee = tee
        self._local_ranks_filter = local_ranks_filter

    @abstractmethod
    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return the destinations of the workers with these environments, by local rank from 0."""

    @property
    @abstractmethod
    def root_log_dir(self) -> str:
        """The directory that holds all runs."""


class DefaultLogsSpecs(LogsSpecs):
    """The default layout. ``tee`` also writes the stream to a file; ``log_dir=os.devnull`` writes no files.

    With a ``local_ranks_filter``, other ranks are not shown; ``redirects`` and ``tee`` still write their files.
    """

    def __init__(
        self,
        log_dir: str | None = None,
        redirects: Std | dict[int, Std] = Std.NONE,
        tee: Std | dict[int, Std] = Std.NONE,
        local_ranks_filter: set[int] | None = None,
    ) -> None:
        if log_dir and log_dir != os.devnull and os.path.exists(log_dir) and not os.path.isdir(log_dir):
            raise NotADirectoryError(f"the log directory {log_dir} is a file; choose another path")
        super().__init__(log_dir or None, redirects, tee, local_ranks_filter)
        self.chosen_log_dir = log_dir or ""  # empty: a temporary one
        self._run_log_dir: str | None = None

    @property
    def root_log_dir(self) -> str:
        """The directory that holds all runs; without ``log_dir``, a temporary one, created on first use."""
        if self._root_log_dir is None:
            self._root_log_dir = _new_temporary_directory()
        return self._root_log_dir

    @property
    def keeps_nothing(self) -> bool:
        return self._root_log_dir == os.devnull

    @property
    def run_log_dir(self) -> str:
        """The directory of this run, created on first use; empty if no files are written."""
        return self.open_run_log_dir("run")

    def open_run_log_dir(self, run_id: str) -> str:
        """Return ``run_log_dir``; named after the run if it is created now."""
        if self.keeps_nothing:
            return ""
        if self._run_log_dir is None:
            os.makedirs(self.root_log_dir, exist_ok=True)
            # Any run id becomes one safe name.
            name = re.sub(r"[^\w.+=@-]+", "_", run_id, flags=re.ASCII).lstrip(".")[:_MAX_RUN_NAME_LENGTH] or "run"
            first = os.path.join(self.root_log_dir, name)
            self._run_log_dir = _new_directory(f"{first}_{os.urandom(2).hex()}" for _ in count())
        return self._run_log_dir

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Create the next attempt's directories, and set each worker's error file in its environment."""
        first = envs.get(0, {})
        attempt_dir = self._new_attempt_dir(
            first.get("TORCHELASTIC_RUN_ID", "run"), first.get("TORCHELASTIC_RESTART_COUNT", "0")
        )
        destinations = LogsDest()
        if attempt_dir:
            destinations.filtered_stdout = os.path.join(attempt_dir, "filtered_stdout.log")
            destinations.filtered_stderr = os.path.join(attempt_dir, "filtered_stderr.log")
        redirects, tees = to_map(self._redirects, len(envs)), to_map(self._tee, len(envs))
        for local_rank in range(len(envs)):
            worker_dir = attempt_dir and os.path.join(attempt_dir, str(local_rank))
            if worker_dir:
                os.mkdir(worker_dir)
            error_file = worker_dir and os.path.join(worker_dir, "error.json")
            destinations.error_files[local_rank] = envs[local_rank]["TORCHELASTIC_ERROR_FILE"] = error_file
            redirect, tee = redirects[local_rank], tees[local_rank]
            is_visible = not self._local_ranks_filter or local_rank in self._local_ranks_filter
            for std, name, files, shown in (
                (Std.OUT, "stdout.log", destinations.stdouts, destinations.tee_stdouts),
                (Std.ERR, "stderr.log", destinations.stderrs, destinations.tee_stderrs),
            ):
                elsewhere = _CONSOLE if is_visible else os.devnull
                is_kept = worker_dir and (redirect | tee) & std
                files[local_rank] = os.path.join(worker_dir, name) if is_kept else elsewhere
                if tee & std and is_visible:
                    shown[local_rank] = files[local_rank] or os.devnull
        return destinations

    def _new_attempt_dir(self, run_id: str, restart_count: str) -> str:
        run_dir = self.open_run_log_dir(run_id)
        if not run_dir:
            return ""
        first = os.path.join(run_dir, f"attempt_{restart_count}")
        return _new_directory(f"{first}.{number}" if number else first for number in count())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DefaultLogsSpecs):
            return NotImplemented
        return self._identity() == other._identity()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"DefaultLogsSpecs({', '.join(f'{name}={value!r}' for name, value in self._identity().items())})"

    def _identity(self) -> dict[str, object]:
        names = ("root_log_dir", "redirects", "tee", "local_ranks_filter")
        return {name: getattr(self, f"_{name}") for name in names}


def line_prefix(
    template: str | None,
    *,
    role_name: str,
    rank: int,
    local_rank: int,
    generation: int | None = None,
    host: str | None = None,
) -> str:
    """Return ``[role0]:`` by default, otherwise the template with its macros (``${role_name}`` etc.) substituted.

    An unknown macro stays as written, so that a typo shows in the output.
    """
    if template is None:
        return f"[{role_name}{local_rank}]:"
    from string import Template

    macros = {"role_name": role_name, "rank": rank, "local_rank": local_rank, "generation": generation, "host": host}
    return Template(template).safe_substitute({name: value for name, value in macros.items() if value is not None})


def load_logs_specs(name: str | None) -> type[LogsSpecs]:
    """Return the class registered under this name; ``None`` and ``default`` need no search."""
    if name is None or name == "default":
        return DefaultLogsSpecs
    from importlib.metadata import entry_points

    found = {point.name: point for point in entry_points(group=_ENTRY_POINT_GROUP)}
    if name not in found:
        known = ", ".join(sorted({*found, "default"}))
        raise ValueError(f"unknown logs specs {name!r}; known in the entry-point group {_ENTRY_POINT_GROUP}: {known}")
    try:
        loaded: type[LogsSpecs] = found[name].load()
    except Exception as error:
        raise ValueError(
            f"could not load the logs specs {name!r} from {found[name].value!r}: {type(error).__name__}: {error}"
        ) from error
    return loaded


def _new_directory(paths: Iterator[str]) -> str:
    """Create the first of these directories that does not exist, with the user's umask."""
    while True:
        path = next(paths)
        with suppress(FileExistsError):
            os.mkdir(path)
            return path


def _new_temporary_directory(environment: Mapping[str, str] = os.environ) -> str:
    """Do what tempfile.mkdtemp does, whose import would take a third of the startup time."""
    configured = [environment.get(name, "") for name in ("TMPDIR", "TEMP", "TMP")]
    for parent in [*configured, "/tmp", "/var/tmp", os.getcwd()]:
        if parent and os.path.isdir(parent) and os.access(parent, os.W_OK | os.X_OK):
            path = os.path.join(os.path.abspath(parent), "tenax_" + os.urandom(4).hex())
            os.mkdir(path, 0o700)
            return path
    raise FileNotFoundError("no temporary directory is writable; set TMPDIR, or pass a log directory")
