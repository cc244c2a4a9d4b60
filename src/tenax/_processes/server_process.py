"""A server process, such as etcd, that never outlives this process: the only worker of a keeper of its own.

It belongs to one loop. Results arrive through callbacks, never within the call. Only ``kill`` blocks, for about 2 s at
most.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from tenax._core import events
from tenax._io.interfaces import Cancellable, EventLoop, Launch
from tenax._io.loop import NO_TIMER
from tenax._processes.keeper import KeeperProcess
from tenax._view.exit_text import signal_name

GRACE_S = 2.0
_VERSION_S = 10.0  # for a busy host; the program itself takes milliseconds
_MAX_OUTPUT = 4096


class ServerProcess:
    """See the module.

    ``ended`` is called each time a started server and all that it started have exited, with a description and whether
    it exited by itself instead of being killed.
    """

    def __init__(self, loop: EventLoop, ended: Callable[[str, bool], None]) -> None:
        self._loop = loop
        self._ended = ended
        self._keeper: KeeperProcess | None = None
        self._starts = 0  # for the keeper, each start is a generation
        self._on_end: Callable[[str, bool], None] | None = None  # None: nothing runs, not even ``--version``
        self._end = ("", False)  # of the process, before what it started has exited
        self._timer: Cancellable = NO_TIMER
        self._output = -1  # the pipe of ``--version``
        self.is_running = False  # True from ``start`` until the server's end is reported
        self.pid = 0  # of the server; 0 while none runs

    def query_version(self, program: str, environ: Mapping[str, str], done: Callable[[str], None]) -> None:
        """Run ``program --version``. ``done`` gets the output, empty if there is none in time.

        Raises HelperUnavailable if the keeper cannot be started.
        """
        self._output, writer = os.pipe()
        os.set_blocking(self._output, False)
        try:
            self._run([program, "--version"], environ, writer, lambda *_: done(self._take_output()))
        finally:
            os.close(writer)
        self._kill_in(_VERSION_S)

    def _take_output(self) -> str:
        """Return what the program printed, and close the pipe."""
        output, self._output = self._output, -1
        text = b""
        if output >= 0:
            with suppress(BlockingIOError):
                text = os.read(output, _MAX_OUTPUT)
            os.close(output)
        return text.decode(errors="replace")

    def start(
        self,
        argv: Sequence[str],
        environ: Mapping[str, str],
        log: str,
        *,
        lock: int | None = None,
        output: int | None = None,
    ) -> None:
        """Start the server. It writes to ``log``, or to the descriptor ``output``. ``lock`` is held while it runs.

        Raises HelperUnavailable if the keeper cannot be started.
        """
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            descriptor = os.dup(output) if output is not None else os.open(log, flags, 0o600)
        except OSError as error:
            reason = f"could not be started: {error.strerror}: {log}"
            self._loop.soon(lambda: self._ended(reason, False))
            return
        try:
            self._run(argv, environ, descriptor, self._ended, lock)
            self.is_running = True
        finally:
            os.close(descriptor)

    def _run(
        self,
        argv: Sequence[str],
        environ: Mapping[str, str],
        output: int,
        on_end: Callable[[str, bool], None],
        lock: int | None = None,
    ) -> None:
        assert self._on_end is None, "one process at a time"
        keeper = self._keeper
        if keeper is None:
            keeper = KeeperProcess(name="tenax-etcd")
            keeper.open(self._on_event)
            self._loop.watch(keeper)
            self._keeper = keeper
            keeper.stop_gently(GRACE_S)
        self._starts += 1
        self._on_end = on_end
        if lock is not None:
            keeper.keep("lock", lock)
        launch = Launch(env=dict(environ), argv=list(argv), cwd="/", descriptors={1: output, 2: output})
        keeper.start(self._starts, 0, launch)

    def stop(self, grace_s: float = GRACE_S) -> None:
        """Stop the server: SIGTERM, grace period, SIGKILL. ``ended`` is called when it has exited."""
        if self._keeper is not None and self.is_running:
            self._keeper.signal(self._starts, signal.SIGTERM)
            self._kill_in(grace_s)

    def _kill_in(self, seconds: float) -> None:
        self._timer.cancel()
        starts = self._starts

        def kill() -> None:
            if self._keeper is not None and self._on_end is not None:
                self._keeper.kill(starts)

        self._timer = self._loop.at(self._loop.now() + seconds, kill)

    def kill(self) -> None:
        """Kill the server and the keeper, and wait until both are gone. No callbacks."""
        keeper, self._keeper = self._keeper, None
        self._on_end, self.is_running, self.pid = None, False, 0
        self._timer.cancel()
        self._take_output()
        if keeper is not None:
            self._loop.unwatch(keeper)
            keeper.stop_gently(0.0)
            keeper.close()

    def _on_event(self, event: events.AnyEvent) -> None:
        keeper = self._keeper
        if keeper is None:
            return
        match event:
            case events.WorkerStarted(_, _, pid) if self.is_running:
                self.pid = pid
            case events.WorkerStartFailed(_, _, reason):
                self._end = (f"could not be started: {reason}", False)
                keeper.clear(self._starts)
            case events.WorkerExited(_, _, code):
                how = f"exited with code {code}" if code >= 0 else f"was killed by {signal_name(-code)}"
                self._end = (how, code >= 0)
                keeper.clear(self._starts)
            case events.NodeCleared(generation) if generation == self._starts:
                keeper.release("lock")
                self._report_end()
            case events.KeeperLost():
                self._loop.unwatch(keeper)
                self._keeper = None
                self._end = ("was killed together with its keeper process", False)
                self._report_end()

    def _report_end(self) -> None:
        self._timer.cancel()
        on_end, self._on_end = self._on_end, None
        self.is_running, self.pid = False, 0
        if on_end is not None:
            on_end(*self._end)
