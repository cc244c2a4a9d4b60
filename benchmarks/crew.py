"""Crew: processes that each do a part of a measurement, controlled through pipes.

Each member runs one function with its end of a pipe and its own arguments. Every wait has a timeout; remaining members
are ended by pid.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

from benchmarks.running import FOREIGN_VARIABLES, NO_NAME_SERVER


class CrewFailed(Exception):
    """A member did not answer, or has exited; the message names it."""


class Crew:
    """One process for each tuple of arguments."""

    def __init__(self, work: Callable[..., None], arguments: Iterable[tuple[Any, ...]]) -> None:
        context = multiprocessing.get_context("spawn")
        self._members = []
        for own in arguments:
            ours, theirs = context.Pipe()
            process = context.Process(target=_member, args=(work, theirs, *own), daemon=True)
            self._members.append((process, ours))
            process.start()
            theirs.close()

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for _, pipe in self._members:
            pipe.close()  # the command to exit
        deadline = time.monotonic() + 5
        for process, _ in self._members:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()

    def __len__(self) -> int:
        return len(self._members)

    def send(self, *message: Any, only: Sequence[int] | None = None) -> None:
        """Send this to these members, or to all."""
        for number in range(len(self)) if only is None else only:
            self._members[number][1].send(message)

    def send_each(self, message: Sequence[tuple[Any, ...]]) -> None:
        """Send each member its own command."""
        for (_, pipe), own in zip(self._members, message, strict=True):
            pipe.send(own)

    def receive(self, timeout_s: float, only: Sequence[int] | None = None) -> list[Any]:
        """Return one reply of each of these members, or of all."""
        deadline = time.monotonic() + timeout_s
        answers = []
        for number in range(len(self)) if only is None else only:
            pipe = self._members[number][1]
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                raise CrewFailed(f"member {number} of {len(self)} did not answer within {timeout_s:g} s")
            try:
                answers.append(pipe.recv())
            except EOFError:
                raise CrewFailed(f"member {number} of {len(self)} ended early") from None
        return answers


def shares(number: int, processes: int) -> list[int]:
    """Return how many each process gets, as evenly as possible."""
    return [number // processes + (index < number % processes) for index in range(processes)]


def _member(work: Callable[..., None], pipe: Connection, *arguments: Any) -> None:
    """Run in the new process. Exits at once when done, whatever threads it has."""
    for name in [name for name in os.environ if name.startswith(FOREIGN_VARIABLES)]:
        del os.environ[name]
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", **NO_NAME_SERVER}
    try:
        work(pipe, *arguments)
    except EOFError:
        pass  # the command to exit
    except BaseException:
        import traceback

        traceback.print_exc()
    sys.stderr.flush()
    os._exit(0)


def many_descriptors() -> None:
    """Raise the limit of open connections to the system's maximum."""
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
