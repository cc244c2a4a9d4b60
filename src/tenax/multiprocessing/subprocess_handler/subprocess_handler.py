"""SubprocessHandler: one program in one process, for callers that manage processes themselves.

tenax does not use it for its own workers, which the keeper starts.
"""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import ExitStack, suppress
from typing import IO, TYPE_CHECKING, Any

from tenax._io.helper_process import inheritable_environ

if TYPE_CHECKING:
    from tenax.numa.binding import NumaOptions

__all__ = ["SubprocessHandler"]


class SubprocessHandler:
    """Starts the program at once, in its own session. ``proc`` is the ``subprocess.Popen``."""

    def __init__(
        self,
        entrypoint: str,
        args: tuple[Any, ...],
        env: dict[str, str],
        stdout: str | None,
        stderr: str | None,
        local_rank_id: int,
        numa_options: NumaOptions | None = None,
    ) -> None:
        self.local_rank_id = local_rank_id
        cpus = self._cpus(env, numa_options)
        self._files = ExitStack()
        try:
            self._stdout, self._stderr = self._open(stdout), self._open(stderr)
            self.proc = subprocess.Popen(
                [entrypoint, *map(str, args)],
                env={**inheritable_environ(), **env},
                stdout=self._stdout,
                stderr=self._stderr,
                start_new_session=True,
            )
            if cpus:
                os.sched_setaffinity(self.proc.pid, cpus)
        except BaseException:
            self._files.close()
            raise

    def _open(self, path: str | None) -> IO[bytes] | None:
        return self._files.enter_context(open(path, "wb")) if path else None

    def _cpus(self, env: dict[str, str], numa_options: NumaOptions | None) -> tuple[int, ...]:
        """Return the CPUs to bind the program to; none: do not bind it. Raises ValueError."""
        if numa_options is None:
            return ()
        from tenax._node.workers import decide_placements

        size = env.get("LOCAL_WORLD_SIZE", str(self.local_rank_id + 1))
        if not size.isdecimal() or int(size) <= self.local_rank_id:
            raise ValueError(f"LOCAL_WORLD_SIZE must be larger than the local rank {self.local_rank_id}, not {size!r}")
        placement = decide_placements(numa_options, int(size)).placement
        return placement.bindings[self.local_rank_id].cpus if placement is not None and placement.bindings else ()

    def close(self, death_sig: signal.Signals | None = None) -> None:
        """Signal the process group (by default SIGTERM) and close the files."""
        with suppress(ProcessLookupError):
            os.killpg(self.proc.pid, death_sig or signal.SIGTERM)
        self._files.close()
