"""This process as a worker that has opted in: what the agent announced, and whether the script may be interrupted.

Invariants:

1. ``GenerationEnded`` is raised only in the thread that runs the block, only inside the block, and neither in a
   critical section, nor from the start of an optimizer step to ``completed``, nor in code of this package, nor by a
   signal or a critical section in cleanup: while the end or a lost peer is handled.
2. ``held`` is sent once per generation, after ``end``, and after everything of that generation has ended: the block,
   and the critical sections of all threads.
3. An exception that leaves a critical section or an optimizer step makes all states unknown (``State._is_torn``). Such
   a state is never sent to another rank, and never used.
4. A forked child has no channel.

The reader thread receives messages. At the end of a generation it ends the connections that the script may be blocked
in and interrupts the main thread with SIGURG, again and again until the block is left: a connection may have been
opened meanwhile, and an exception is lost if it is raised in a destructor.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

from tenax import progress
from tenax.elastic import _torch
from tenax.elastic._channel import Channel
from tenax.elastic._connections import end_connections, open_sockets
from tenax.elastic._failures import GenerationEnded, follows_end, is_lost_peer
from tenax.elastic._state import cut

_AGAIN_S = 0.02  # between two attempts to interrupt the script, doubled each time
_MAX_AGAIN_S = 0.5
_SIGNAL = signal.SIGURG  # ignored by default, and used by nothing else in a Python program
_PACKAGE = __name__.rpartition(".")[0]


class Worker:
    """The state that the main thread and the reader thread share."""

    def __init__(self, channel: Channel, generation: int, timeout_s: float) -> None:
        self.generation = generation
        self._channel = channel
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._ended = ""  # why this generation has ended
        self._begin: tuple[int, dict[str, str]] | None = None
        self._is_closed = False
        self._is_finished = False  # the loop is over: this process takes part in no other generation
        self._is_inside = False  # the block
        self._is_updating = False  # from the start of an optimizer step to completed()
        self._outside: BaseException | None = None  # what was handled when the block began
        self._depth = 0  # of critical sections in the thread that runs the block
        self._elsewhere = 0  # critical sections in other threads
        self._thread = threading.get_ident()
        self._sockets = open_sockets()
        self._is_interruptible = threading.current_thread() is threading.main_thread()
        self._previous = signal.signal(_SIGNAL, self._on_signal) if self._is_interruptible else None
        self._has_hooks = False
        os.register_at_fork(after_in_child=self._forget)
        channel.send(type="opt_in", generation=generation, timeout_s=timeout_s)
        threading.Thread(target=self._read, name="tenax-elastic", daemon=True).start()

    # --- the main thread ----------------------------------------------------------------------------------------------

    def enter(self) -> None:
        if not self._has_hooks:
            self._has_hooks = _torch.before_optimizer_steps(self.begin_update)
        self._outside = sys.exc_info()[1]
        self._is_inside = True

    def leave(self, *, is_torn: bool) -> None:
        self._is_inside = False
        self._outside = None
        if is_torn and self._is_updating:
            cut()
        self._is_updating = False
        self._depth = 0

    def begin_update(self) -> None:
        """An optimizer step begins: do not interrupt before ``completed``."""
        if self._is_inside and threading.get_ident() == self._thread:
            if not self._is_updating:
                _torch.wait_for_gradients()
                self.raise_if_ended()
            self._is_updating = True

    def completed(self) -> None:
        self._is_updating = False
        self.raise_if_ended()

    def raise_if_ended(self) -> None:
        if self._ended and self._is_inside and not self._depth and not self._is_updating:
            raise GenerationEnded(self._ended)

    def enter_critical(self) -> None:
        if threading.get_ident() == self._thread:
            if self._is_inside and not self._depth and not self._is_updating and not self._is_cleanup():
                _torch.wait_for_gradients()
                self.raise_if_ended()
            self._depth += 1
        else:
            with self._changed:
                self._elsewhere += 1

    def leave_critical(self, *, is_torn: bool) -> None:
        if is_torn:
            cut()
        if threading.get_ident() == self._thread:
            self._depth = max(0, self._depth - 1)
            if not is_torn and not self._is_cleanup():
                self.raise_if_ended()
        else:
            with self._changed:
                self._elsewhere -= 1
                self._changed.notify_all()

    def why_ended(self, timeout_s: float = 0.0) -> str:
        """Return why the generation has ended, waiting for that; empty: it has not."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._is_closed, timeout_s)
            return self._ended

    def next_generation(self, step: int) -> None:
        """Acknowledge the end of the generation, wait for the next one, and take over its variables."""
        with self._changed:
            self._changed.wait_for(lambda: not self._elsewhere)
            self._channel.send(type="held", generation=self.generation, step=step)
            ended, self._ended = self._ended, ""
            self._changed.notify_all()  # the reader does not interrupt any more
            self._changed.wait_for(lambda: self._begin is not None or self._is_closed)
            if self._begin is None:
                raise SystemExit(f"tenax: this worker takes part in no other generation (the last one ended: {ended})")
            (self.generation, env), self._begin = self._begin, None
            self._sockets = open_sockets()
        os.environ.update(env)
        _torch.configure()
        progress.begin_generation()

    def finish(self) -> None:
        """The loop is over. A worker that is busy with something else does not acknowledge an end."""
        with self._changed:
            self._is_finished = True
            if self._ended:
                self._channel.shut_down()
        if self._is_interruptible:
            signal.signal(_SIGNAL, self._previous)

    def resume(self, timeout_s: float) -> bool:
        """Begin another loop. Return False if the agent has closed the channel."""
        with self._changed:
            self._timeout_s, self._is_finished = timeout_s, self._is_closed
            if self._is_closed:
                return False
        if self._is_interruptible:
            self._previous = signal.signal(_SIGNAL, self._on_signal)
        return True

    # --- the reader thread --------------------------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            while message := self._channel.receive():
                if not self._take(message):
                    break
        finally:  # an exception must not leave the agent and the main thread waiting
            with self._changed:
                self._is_closed = True
                self._changed.notify_all()
            self._channel.shut_down()

    def _take(self, message: dict[str, Any]) -> bool:
        with self._changed:
            if message["type"] == "begin":
                if message["generation"] <= self.generation or self._ended or self._begin is not None:
                    return False
                self._begin = (message["generation"], message["env"])
                # Not later, by the main thread: the next failure may come before that runs.
                self._channel.send(type="opt_in", generation=message["generation"], timeout_s=self._timeout_s)
                self._changed.notify_all()
                return True
            if self._begin is not None:  # and that generation has ended already
                self._changed.wait_for(lambda: self._begin is None or self._is_finished)
            if message["generation"] != self.generation or self._is_finished:
                return False
            self._ended = message["why"] or "the generation ended"
            self._changed.notify_all()
        self._interrupt()
        return True

    def _interrupt(self) -> None:
        """Until the main thread has left the block, make it leave."""
        again_s = _AGAIN_S
        self._send_signal()
        _torch.abort_groups()  # once: it waits until they are aborted
        peers = 0  # at first: few are blocked without a connection
        with self._changed:
            while self._ended and not self._is_finished:
                end_connections(self._sockets, int(os.environ.get("MASTER_PORT", "0")), peers)
                peers = int(os.environ.get("WORLD_SIZE", "0"))
                if not self._changed.wait_for(lambda: not self._ended or self._is_finished, again_s):
                    self._send_signal()
                    again_s = min(2 * again_s, _MAX_AGAIN_S)

    def _send_signal(self) -> None:
        if self._is_interruptible:
            signal.pthread_kill(self._thread, _SIGNAL)

    # --- anywhere -----------------------------------------------------------------------------------------------------

    def _on_signal(self, _: int, frame: FrameType | None) -> None:
        """Interrupt the block, unless this is code of the package: that checks itself, or is interrupted later."""
        is_own = frame is not None and str(frame.f_globals.get("__name__")).startswith(_PACKAGE)
        if not is_own and not self._is_cleanup():
            self.raise_if_ended()

    def _is_cleanup(self) -> bool:
        """Return whether the block is being left already, and a ``finally``, a handler or an ``__exit__`` runs."""
        error = sys.exc_info()[1]
        return error is not self._outside and (follows_end(error) or is_lost_peer(error))

    def _forget(self) -> None:
        """In a forked child: leave the channel to the parent, and interrupt nothing."""
        self._channel.close()
        self._is_inside = self._is_updating = False
        self._ended = ""
        self._depth = self._elsewhere = 0
        self._changed = threading.Condition()
        self._is_closed = self._is_finished = True


def warn(message: str) -> None:
    sys.stderr.write(f"tenax: {message}\n")
