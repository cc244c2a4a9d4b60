"""The loop over generations, the block of each, and critical sections."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import TracebackType

from tenax import progress
from tenax.elastic import _agreement, _torch
from tenax.elastic._channel import VARIABLE, Channel
from tenax.elastic._failures import GenerationEnded, follows_end, is_lost_peer
from tenax.elastic._state import State
from tenax.elastic._worker import Worker, warn

_NUMBERS_PER_JOB_START = 1_000_000  # TENAX_GENERATION counts on from here after a restart of the whole job
# For the agent's announcement, after this process has lost a peer. A process with much memory takes seconds to exit.
_END_TIMEOUT_S = 20.0


class Generation:
    """One generation, as the process that takes part in it sees it.

    ``number``: from 1; the fencing token is ``tenax.preemption.generation()``.
    ``rank``, ``world_size``: of this process in this generation.
    ``why``: why the generation was formed.
    """

    def __init__(self, worker: Worker | None) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.number = worker.generation if worker else _number()
        self.why = os.environ.get("TENAX_GENERATION_REASON", "")
        self._worker = worker
        self._states: list[State] = []  # that were agreed on, the last one last
        self._has_ended = False
        self._gathered = 0

    def __repr__(self) -> str:
        return f"Generation({self.number}, rank {self.rank} of {self.world_size})"

    def agree(self, state: State, restore: Callable[[State], object] | None = None) -> None:
        """Bring all ranks to the same step. Every rank calls it, after its process group exists, before the first step.

        The ranks whose ``state.step`` is the greatest keep their state and send it to the ranks that are behind or new.
        If no rank has a state in memory, in the first generation or because all were interrupted in an update, every
        rank calls ``restore(state)``, which loads the last checkpoint, if there is one, and sets ``state.step``.

        The state is sent through torch's default process group; without one, through the workers' store.
        """
        if state in self._states:
            self._states.remove(state)
        self._states.append(state)
        _agreement.agree(self, state, restore)

    def completed(self, step: int) -> None:
        """Report that ``step`` is whole on this rank. If the generation has ended, this raises ``GenerationEnded``."""
        for state in self._states:
            _torch.keep_buffers(state)
        progress.step(step)
        if self._worker is not None:
            self._worker.completed()

    def __enter__(self) -> Generation:
        if self._worker is not None:
            self._excepthook = sys.excepthook  # init_process_group wraps it, each time
            self._worker.enter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if self._worker is None:
            return False
        self._worker.leave(is_torn=kind is not None)
        is_end = kind is None or kind is GenerationEnded
        # Cleanup often fails without the lost peer. But a request to exit is one, whatever it interrupts.
        is_after_end = not is_end and isinstance(error, Exception) and follows_end(error)
        if not is_end and not is_after_end and not is_lost_peer(error):
            return False
        if not self._worker.why_ended(0.0 if is_end or is_after_end else _END_TIMEOUT_S):
            return False
        if is_after_end:
            warn(f"this worker continues after an exception in its cleanup: {type(error).__name__}: {error}")
        self._has_ended = True
        sys.excepthook = self._excepthook
        _torch.destroy_groups()
        return True


def generations(*, timeout_s: float = 5.0) -> Iterator[Generation]:
    """Iterate over the generations that this process takes part in: one, unless tenax runs the process.

    The loop ends when a block is left without the generation having ended, or not entered. ``timeout_s``: how long the
    agent waits for this process to leave the block after the end of a generation; later, it is stopped and replaced.
    """
    if not 0 < timeout_s <= 3600:
        raise ValueError(f"timeout_s is {timeout_s}: it must be greater than 0 and at most 3600")
    worker = _open(timeout_s)
    while True:
        generation = Generation(worker)
        try:
            yield generation
        except GeneratorExit:
            if worker is not None:
                worker.finish()
            raise
        if worker is None:
            return
        if not generation._has_ended:
            break
        step = generation._states[-1].step if generation._states else -1
        worker.next_generation(step)
    worker.finish()


class _Critical:
    """A section that is not interrupted, on this process's worker; without one, it does nothing."""

    def __init__(self, worker: Worker | None) -> None:
        self._worker = worker

    def __enter__(self) -> None:
        if self._worker is not None:
            self._worker.enter_critical()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._worker is not None:
            self._worker.leave_critical(is_torn=kind is not None)


def critical() -> AbstractContextManager[None]:
    """Return a context manager for what must not be cut in two: an update of the state, writing a checkpoint.

    The end of a generation is raised after it, not in it. In other threads it keeps the process in the generation until
    the section is left. An exception that leaves it makes the state unknown: another rank's is used.
    """
    return _Critical(_worker)


_worker: Worker | None = None


def _open(timeout_s: float) -> Worker | None:
    """Return this process's worker, if an agent has passed it a channel."""
    global _worker  # noqa: PLW0603 - a process is one worker
    descriptor = os.environ.pop(VARIABLE, "")
    channel = Channel.inherited(int(descriptor)) if descriptor else None
    if channel is not None:
        _torch.configure()
        _worker = Worker(channel, _number(), timeout_s)
    elif _worker is not None and not _worker.resume(timeout_s):
        _worker = None
    return _worker


def _number() -> int:
    return int(os.environ.get("TENAX_GENERATION", "0")) % _NUMBERS_PER_JOB_START
