"""The agent's end of the pipe through which workers report which scopes they enter and leave.

It passes bytes to the watchdog (``_core/watchdog.py``) and returns what has expired.
The pipe is open for reading and writing while it is watched, so it does not end when a worker closes its end, and
opening it never blocks. One read takes all that a pipe can hold, and one turn of the loop takes no more than that, so a
report that arrived in time is always read before scopes expire. A full pipe may have kept a worker from reporting that
it left a scope, so for a moment after that no scope expires.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from tenax._core.commands import AnyCommand, EndWorker, StartWorkers
from tenax._core.events import AnyEvent, ScopeExpired
from tenax._core.hang import Scopes
from tenax._core.watchdog import Watchdog
from tenax._io.interfaces import Watchable

_READ_BYTES = 1 << 16
_MAX_READS = 64  # per turn, of a pipe that is written to all the time
_MAX_WAIT_S = 86_400.0  # some systems do not support longer timeouts
_FULL_BYTES = _READ_BYTES // 2  # a pipe holds pages, and a line that does not fit into the rest of one starts a new one
_PAUSE_S = 1.0  # for workers that waited for room in the pipe
_PAUSE_EVERY_S = 10.0  # so that continuous input does not delay expiry further
_NAME = "timers"


class WatchdogPipe(Watchable):
    """The pipe at ``path``; empty: in a new private folder.

    ``on_event``: called with TorchElastic's name of each event and its subject, for agents without a journal.
    """

    def __init__(
        self,
        local_world_size: int,
        path: str = "",
        *,
        on_event: Callable[[str, ScopeExpired | EndWorker | None], None] = lambda *_: None,
    ) -> None:
        self.path = os.path.abspath(path) if path else ""  # workers may change their working directory
        self.watchdog = Watchdog(local_world_size)
        self._folder = ""
        self._inode = 0  # of the pipe that this object created
        self._on_event = on_event
        self._is_open = False
        self._now: Callable[[], float] = time.monotonic
        self._print: Callable[[str], None] = lambda _: None
        self._reader = self._writer = -1
        self._paused_until = float("-inf")

    def make(self) -> str:
        """Create the pipe and return its path, for the workers' environment. Raises ValueError if that fails."""
        if self.path:
            check_path(self.path)
        try:
            if not self.path:
                import tempfile

                self._folder = tempfile.mkdtemp(prefix="tenax-watchdog-")
                self.path = os.path.join(self._folder, _NAME)
            with suppress(FileNotFoundError):
                os.remove(self.path)  # left behind by an agent that was killed
            os.mkfifo(self.path, 0o600)
            # Open it at once: a pipe without a reader looks like a leftover of a dead agent.
            self._reader = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
            self._writer = os.open(self.path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
            self._inode = os.fstat(self._reader).st_ino
        except OSError as error:
            self.close()
            raise ValueError(
                f"could not create the watchdog's pipe at {self.path!r}: {error.strerror}; set "
                "TORCHELASTIC_TIMER_FILE to another path"
            ) from error
        return self.path

    def open(self, now: Callable[[], float], print_line: Callable[[str], None]) -> None:
        self._now = now
        self._print = print_line
        self._is_open = True
        self._on_event("watchdog started", None)

    def last_progress_time(self) -> float | None:
        """Epoch seconds of the last request of a worker; None before the first one."""
        return self.watchdog.last_request_at

    def scopes(self) -> Mapping[int, Scopes]:
        """Return the scopes of this generation by local rank."""
        return self.watchdog.scopes()

    # --- for the supervisor -------------------------------------------------------------------------------------------

    def on_step(self, event: AnyEvent, commands: list[AnyCommand]) -> None:
        """Take a step of the agent machine: it shows which workers run, and whether scopes are watched."""
        if any(isinstance(command, StartWorkers) for command in commands):
            self._empty()
        self.watchdog.on_step(event, commands)
        if isinstance(event, ScopeExpired):
            self._on_event("timer expired", event)
        for command in commands:
            if isinstance(command, EndWorker):
                self._on_event("kill worker process", command)

    def next_deadline(self) -> float | None:
        deadline = self.watchdog.next_deadline()
        if deadline is None:
            return None
        return min(max(deadline, self._paused_until), self._now() + _MAX_WAIT_S)

    def expired(self) -> list[ScopeExpired]:
        """Return the scopes that are overdue. Pending input is read first: the agent's own lag expires no scope."""
        self.on_readable()
        now = self._now()
        return self.watchdog.expired(now) if now >= self._paused_until else []

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._on_event("watchdog stopped", None)
        for descriptor in (self._reader, self._writer):
            if descriptor >= 0:
                os.close(descriptor)
        self._reader = self._writer = -1
        if self._inode:
            with suppress(FileNotFoundError):
                if os.stat(self.path).st_ino == self._inode:
                    os.remove(self.path)
            self._inode = 0
        if self._folder:
            with suppress(FileNotFoundError):
                os.rmdir(self._folder)
            self._folder = ""

    # --- watched by the loop ------------------------------------------------------------------------------------------

    def fileno(self) -> int:
        return self._reader

    def on_readable(self) -> None:
        data = self._read()
        if data:
            if len(data) >= _FULL_BYTES and self._now() >= self._paused_until + _PAUSE_EVERY_S:
                self._paused_until = self._now() + _PAUSE_S
            self.watchdog.take(data, self._now(), time.time())
            for note in self.watchdog.take_notes():
                self._print(note)

    def _read(self) -> bytes:
        try:
            return os.read(self._reader, _READ_BYTES) if self._reader >= 0 else b""
        except BlockingIOError:
            return b""

    def _empty(self) -> None:
        """Discard requests of earlier workers, whose pids may be reused."""
        for _ in range(_MAX_READS):
            data = self._read()
            if not data:
                return
            self.watchdog.discard(data)


def check_path(path: str) -> None:
    """Raise ValueError if the watchdog's pipe cannot be created at this path."""
    if problem := _path_problem(path):
        raise ValueError(f"TORCHELASTIC_TIMER_FILE is {path!r}{problem}")


def _path_problem(path: str) -> str:
    try:
        if not stat.S_ISFIFO(os.stat(path).st_mode):
            return ", which is not a pipe; choose an unused path"
    except FileNotFoundError:
        folder = os.path.dirname(path) or "."
        if not os.path.isdir(folder):
            return f": the folder {folder!r} does not exist; create it"
        is_writable = os.access(folder, os.W_OK | os.X_OK)
        return "" if is_writable else f": the folder {folder!r} is not writable; choose another path"
    except OSError as error:
        return f": {error.strerror}; choose another path"
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
    except OSError as error:
        if error.errno == errno.ENXIO:  # no reader; on other errors, do not replace it
            return ""
    return (
        ", and another process already reads from that pipe; give each agent its own path, or leave the variable unset"
    )
