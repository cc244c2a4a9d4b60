"""FileStore: a store for the processes of one host, in one file (``_log_file`` defines its format).

A file does not announce changes, so waits poll it: after half a millisecond at first, every 20 milliseconds later. All
other operations cost one check of the file, or one record at its end.

A process may be killed at any moment without harm to the others. A process that is stopped (SIGSTOP) while it writes
blocks other writers until their timeout, but no readers. The file must be on a local file system: locks of network file
systems are not reliable enough.
"""

from __future__ import annotations

import os
import time

from tenax._core.text import format_seconds
from tenax.store._api import DEFAULT_TIMEOUT_S, StoreError, StoreTimeoutError
from tenax.store._local import LocalStore
from tenax.store._log_file import LogFile
from tenax.store._mutex import Busy, Mutex

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    from tenax.store._api import Timeout
    from tenax.store._table import Table

    T = TypeVar("T")

_FIRST_PAUSE_S = 0.0005
_LONGEST_PAUSE_S = 0.02
_CLOSED_KEY = b"closed"  # how often the store was closed; users' keys start with a slash


class FileStore(LocalStore):
    """Thread-safe, and usable after a fork."""

    def __init__(
        self, path: str | os.PathLike[str], world_size: int = -1, timeout: Timeout = DEFAULT_TIMEOUT_S
    ) -> None:
        """With a ``world_size``, the file is removed when that many handles have been closed."""
        super().__init__(timeout)
        self.path = os.fspath(path)
        self._world_size = world_size
        self._mutex = Mutex()
        self._process = os.getpid()
        self._is_closed = False
        try:
            self._file = LogFile(self.path)
        except OSError as error:
            raise StoreError(f"could not open the store {self.path!r}: {error.strerror}.") from error

    def __str__(self) -> str:
        return f"the store {self.path!r}"

    def clone(self) -> FileStore:
        """Return another handle, which does not count towards ``world_size`` when it is closed."""
        return FileStore(self.path, -1, self._timeout_s)

    def close(self) -> None:
        if self._is_closed:
            return
        world_size = self._world_size
        if world_size > 0:

            def leave(table: Table) -> None:
                if table.add(_CLOSED_KEY, 1) >= world_size:
                    os.unlink(self.path)  # processes that have it open start over with an empty store

            self._change(leave)
        self._is_closed = True
        self._file.close()

    def _change(self, change: Callable[[Table], T]) -> T:
        deadline = time.monotonic() + self._timeout_s

        def change_locked(file: LogFile) -> T:
            try:
                if not _poll(lambda: file.try_lock() or None, deadline):
                    raise StoreTimeoutError(
                        f"timed out after {format_seconds(self._timeout_s)}: another process has locked {self}."
                    )
                result = change(file.table)
                file.commit()
            except BaseException:
                file.reset()
                raise
            finally:
                file.unlock()
            return result

        return self._with_file(change_locked, deadline)

    def _read(self, read: Callable[[Table], T]) -> T:
        def read_file(file: LogFile) -> T:
            file.refresh()
            return read(file.table)

        return self._with_file(read_file, time.monotonic() + self._timeout_s)

    def _wait_until(self, read: Callable[[Table], T | None], deadline: float) -> T | None:
        result = self._read(read)
        if result is not None:
            return result
        return _poll(lambda: self._read(read) if self._file.has_changed() else None, deadline)

    def _with_file(self, function: Callable[[LogFile], T], deadline: float) -> T:
        """Call the function with the file, in one thread at a time."""
        if self._is_closed:
            raise StoreError(f"{self} is closed.")
        if self._process != os.getpid():  # a forked process shares its parent's lock until it reopens the file
            self._process = os.getpid()
            self._mutex = Mutex()
            self._file.close()
            self._file = LogFile(self.path)
        try:
            return self._mutex.run(lambda: function(self._file), deadline)
        except Busy:
            limit = format_seconds(self._timeout_s)
            raise StoreTimeoutError(f"timed out after {limit}: another thread uses {self}.") from None
        except StoreError:
            raise
        except OSError as error:
            raise StoreError(f"could not access {self}: {error.strerror}.") from error


def _poll(attempt: Callable[[], T | None], deadline: float) -> T | None:
    """Repeat ``attempt`` with growing pauses until it returns a result. Return None at the deadline."""
    pause_s = _FIRST_PAUSE_S
    while (result := attempt()) is None:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return None
        time.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    return result
