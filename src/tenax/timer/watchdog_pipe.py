"""The agent's end of the pipe through which workers say which scopes they enter and leave.

Implements ``ports.ScopeWatch``: carries bytes to the watchdog (``core/watchdog.py``) and what has expired to whoever
asks. The pipe is open for reading and writing as long as it is watched, so it has no end when a worker closes its own,
and opening it never waits for anybody. One read takes all that a pipe can hold: more than that is not taken in one turn
of the loop, and nothing that had arrived in time is overlooked.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from contextlib import suppress

from tenax.core import commands as order
from tenax.core.watchdog import Watchdog

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from tenax.core.commands import AnyCommand
    from tenax.core.events import AnyEvent, ScopeExpired

_READ_BYTES = 1 << 16
_MOST_READS = 64  # to empty a pipe into which somebody keeps writing
_LONGEST_WAIT_S = 86_400.0  # more than some systems can wait at a stretch
_NAME = "timers"


class WatchdogPipe:
    """``path``: where the pipe is to be; empty: in a new folder that is only ours."""

    def __init__(self, local_world_size: int, path: str = "", *, wall: Callable[[], float] = time.time) -> None:
        self.path = os.path.abspath(path) if path else ""  # workers may change their folder
        self.watchdog = Watchdog(local_world_size)
        self._folder = ""
        self._is_made = False
        self._wall = wall
        self._now: Callable[[], float] = time.monotonic
        self._say: Callable[[str], None] = lambda _: None
        self._reader = self._writer = -1

    def make(self) -> str:
        """Make the pipe; returns its path, which workers may be told. Raises ValueError if there can be none."""
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
            self._is_made = True
        except OSError as error:
            self.close()
            raise ValueError(
                f"the watchdog's pipe cannot be made at {self.path!r}: {error.strerror}; set "
                "TORCHELASTIC_TIMER_FILE to a path where a pipe can be made"
            ) from error
        return self.path

    def open(self, now: Callable[[], float], say: Callable[[str], None]) -> None:
        """After the keeper was started, which may be a copy of this process: it has no part in this."""
        self._now = now
        self._say = say
        self._reader = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)
        self._writer = os.open(self.path, os.O_WRONLY | os.O_NONBLOCK)

    def last_progress_time(self) -> float | None:
        """Epoch seconds of the last request of a worker; None before the first one."""
        return self.watchdog.last_request_at

    # --- ports.ScopeWatch ---------------------------------------------------------------------------------------------

    def heard(self, event: AnyEvent, commands: list[AnyCommand]) -> None:
        if any(isinstance(command, order.StartWorkers) for command in commands):
            self._empty()
        self.watchdog.heard(event, commands)

    def next_deadline(self) -> float | None:
        deadline = self.watchdog.next_deadline()
        return None if deadline is None else min(deadline, self._now() + _LONGEST_WAIT_S)

    def expired(self) -> list[ScopeExpired]:
        self.on_readable()
        return self.watchdog.expired(self._now())

    def close(self) -> None:
        for descriptor in (self._reader, self._writer):
            if descriptor >= 0:
                os.close(descriptor)
        self._reader = self._writer = -1
        if self._is_made:
            self._is_made = False
            with suppress(FileNotFoundError):
                os.remove(self.path)
        if self._folder:
            with suppress(FileNotFoundError):
                os.rmdir(self._folder)
            self._folder = ""

    # --- watched by the loop ------------------------------------------------------------------------------------------

    def fileno(self) -> int:
        return self._reader

    @property
    def wants_to_write(self) -> bool:
        return False

    def on_writable(self) -> None:
        """There is nothing to write."""

    def on_readable(self) -> None:
        data = self._read()
        if data:
            self.watchdog.take(data, self._now(), self._wall())
            for note in self.watchdog.take_notes():
                self._say(note)

    def _read(self) -> bytes:
        try:
            return os.read(self._reader, _READ_BYTES) if self._reader >= 0 else b""
        except BlockingIOError:
            return b""

    def _empty(self) -> None:
        """The workers of an earlier generation are gone, and their numbers may become those of new ones."""
        for _ in range(_MOST_READS):
            data = self._read()
            if not data:
                return
            self.watchdog.discard(data)


def check_path(path: str) -> None:
    """Raises ValueError if the watchdog's pipe cannot be there."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        folder = os.path.dirname(path) or "."
        if not os.path.isdir(folder):
            raise ValueError(f"TORCHELASTIC_TIMER_FILE is {path!r}: there is no folder {folder!r}; make it") from None
        if not os.access(folder, os.W_OK | os.X_OK):
            raise ValueError(
                f"TORCHELASTIC_TIMER_FILE is {path!r}: {folder!r} may not be written to; name another path"
            ) from None
        return
    except OSError as error:
        raise ValueError(f"TORCHELASTIC_TIMER_FILE is {path!r}: {error.strerror}; name another path") from error
    if not stat.S_ISFIFO(mode):
        raise ValueError(f"TORCHELASTIC_TIMER_FILE is {path!r}, which is no pipe; name a path that is free")
    if _has_reader(path):
        raise ValueError(
            f"TORCHELASTIC_TIMER_FILE is {path!r}, and somebody reads from that pipe already; give each agent its own "
            "path, or leave the variable unset"
        )


def _has_reader(path: str) -> bool:
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
    except OSError as error:
        return error.errno != errno.ENXIO  # not ours to judge: then it is not ours to take either
    return True
