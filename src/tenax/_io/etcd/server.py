"""The agent's handle of one etcd server process, which never outlives the agent.

It owns the guard (``server_guard``), which owns the server. It belongs to one loop. Results arrive through callbacks,
never within the call. Only ``kill`` blocks, for about 2 s at most.
"""

from __future__ import annotations

import os
import select
import signal
import time
from contextlib import suppress

from tenax._io.etcd.server_guard import GRACE_S
from tenax._io.helper_channel import Channel, ChannelClosed
from tenax._io.helper_process import spawn_helper

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tenax._io.interfaces import EventLoop

_MODULE = "tenax._io.etcd.server_guard"
_VERSION_S = 10.0  # for a busy host; the program itself takes milliseconds
_KILL_S = 1.8


class ServerProcess:
    """See the module.

    ``ended`` is called each time a started server has exited, with a description and whether it exited by itself
    instead of being killed.
    """

    def __init__(self, loop: EventLoop, ended: Callable[[str, bool], None]) -> None:
        self._loop = loop
        self._ended = ended
        self._version_received: Callable[[str], None] = lambda _: None
        self._channel: Channel | None = None
        self._guard = 0
        self._is_expected = False  # a server was requested and its end was not reported yet
        self.pid = 0  # of the server; 0 while none runs

    @property
    def is_running(self) -> bool:
        """True from ``start`` until the server's end is reported."""
        return self._is_expected

    # --- commands -----------------------------------------------------------------------------------------------------

    def query_version(self, program: str, environ: Mapping[str, str], done: Callable[[str], None]) -> None:
        """Run ``program --version``. ``done`` gets the output, empty if there is none in time.

        Raises HelperUnavailable if the guard cannot be started.
        """
        self._version_received = done
        self._send(("run", [os.fsencode(program), b"--version"], _as_bytes(environ), _VERSION_S))

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

        Raises HelperUnavailable if the guard cannot be started.
        """
        assert not self._is_expected, "one server at a time"
        self._is_expected = True
        arguments = [os.fsencode(argument) for argument in argv]
        given = (lock is not None, output is not None)
        self._send(
            ("start", arguments, _as_bytes(environ), os.fsencode(log), *given),
            [descriptor for descriptor in (lock, output) if descriptor is not None],
        )

    def stop(self, grace_s: float = GRACE_S) -> None:
        """Stop the server: SIGTERM, grace period, SIGKILL. ``ended`` is called when it has exited."""
        self._send(("stop", grace_s))

    def kill(self) -> None:
        """Kill the server and the guard, and wait until both are gone. No callbacks."""
        channel, self._channel = self._channel, None
        self._version_received, self._is_expected = lambda _: None, False
        if channel is None:
            return
        self._loop.unwatch(self)
        with suppress(ChannelClosed):
            channel.send(("kill",))
        has_exited = _wait_for_exit(channel, _KILL_S)
        channel.close()
        self._end_guard(has_ended_server=has_exited)

    # --- the loop's handle --------------------------------------------------------------------------------------------

    def fileno(self) -> int:
        return self._channel.fileno() if self._channel is not None else -1

    @property
    def wants_to_write(self) -> bool:
        return self._channel is not None and self._channel.wants_to_write

    def on_writable(self) -> None:
        if self._channel is not None:
            with suppress(ChannelClosed):
                self._channel.flush()

    def on_readable(self) -> None:
        channel = self._channel
        if channel is None:
            return
        try:
            for message, _ in channel.receive():
                self._handle(message)
                if self._channel is not channel:  # a callback has called ``kill``
                    return
        except ChannelClosed:
            self._lose_guard()

    def _handle(self, message: tuple[object, ...]) -> None:
        match message:
            case ("output", _, str(text)):
                done, self._version_received = self._version_received, lambda _: None
                done(text)
            case ("started", int(pid)):
                self.pid = pid
            case ("refused", str(text)):
                self._report_end(f"could not be started: {text}", by_itself=False)
            case ("ended", int(code)):
                self._report_end(_describe_exit(code), by_itself=code >= 0)

    def _report_end(self, how: str, *, by_itself: bool) -> None:
        self.pid = 0
        if self._is_expected:
            self._is_expected = False
            self._ended(how, by_itself)

    def _lose_guard(self) -> None:
        assert self._channel is not None
        self._channel.close()
        self._channel = None
        self._loop.unwatch(self)
        self._end_guard(has_ended_server=False)
        done, self._version_received = self._version_received, lambda _: None
        done("")
        self._report_end("was killed together with its guard process", by_itself=False)

    def _end_guard(self, *, has_ended_server: bool) -> None:
        """Reap the guard. If it could not end the server because it was killed or is stuck, kill the server."""
        guard, self._guard = self._guard, 0
        server, self.pid = self.pid, 0
        if guard and not _is_reaped(guard):
            with suppress(ProcessLookupError):
                os.kill(guard, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(guard, 0)
        if server and not has_ended_server:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(server, signal.SIGKILL)

    # --- the guard ----------------------------------------------------------------------------------------------------

    def _send(self, message: tuple[object, ...], descriptors: Sequence[int] = ()) -> None:
        if self._channel is None:
            self._guard, self._channel = spawn_helper(_MODULE, "tenax-etcd")
            self._loop.watch(self)
        with suppress(ChannelClosed):  # on_readable handles it
            self._channel.send(message, descriptors)


def _wait_for_exit(channel: Channel, patience_s: float) -> bool:
    """Wait for the guard to exit, which it does after the server. Return False on a timeout."""
    deadline = time.monotonic() + patience_s
    poll = select.poll()
    while (left_s := deadline - time.monotonic()) > 0:
        poll.register(channel.fileno(), select.POLLIN | (select.POLLOUT if channel.wants_to_write else 0))
        if not poll.poll(left_s * 1000):
            return False
        try:
            channel.flush()
            for _ in channel.receive():
                pass
        except ChannelClosed:
            return True
    return False


def _is_reaped(pid: int) -> bool:
    """Return True if the process has exited and was reaped, here or elsewhere in this process."""
    if hasattr(os, "pidfd_open"):
        with suppress(OSError):
            handle = os.pidfd_open(pid)
            try:
                select.select([handle], [], [], 0.2)
            finally:
                os.close(handle)
    try:
        return os.waitpid(pid, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return True


def _as_bytes(environ: Mapping[str, str]) -> dict[bytes, bytes]:
    """Encode the environment: the guard may use another file system encoding."""
    return {os.fsencode(name): os.fsencode(value) for name, value in environ.items()}


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
