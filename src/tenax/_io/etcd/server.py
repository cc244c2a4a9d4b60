"""One etcd server process, as the agent sees it: start it, hear how it ended, stop it. It never outlives the agent.

Owns the guard (``server_guard``), which owns the server. Its owner is one loop; everything is answered by callbacks,
never from within the call. Only ``kill`` waits, about 2 s at most.
"""

from __future__ import annotations

import os
import select
import signal
import time
from contextlib import suppress

from tenax._io.channel import Channel, ChannelClosed
from tenax._io.etcd.server_guard import GRACE_S
from tenax._io.helper_process import spawn_helper

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tenax._io.ports import EventLoop

_MODULE = "tenax._io.etcd.server_guard"
_ASK_S = 10.0  # a busy host; the program itself takes milliseconds
_KILL_S = 1.8


class ServerProcess:
    """See the module.

    ``ended`` is told each time that a server which was started has ended: how, in words, and whether it did so by
    itself and was not killed.
    """

    def __init__(self, loop: EventLoop, ended: Callable[[str, bool], None]) -> None:
        self._loop = loop
        self._ended = ended
        self._told: Callable[[str], None] = lambda _: None
        self._channel: Channel | None = None
        self._guard = 0
        self._is_expected = False  # a server was started, or will be, and its end was not told yet
        self.pid = 0  # of the server; 0 while none runs

    @property
    def is_running(self) -> bool:
        """A server was started, and its end was not told yet."""
        return self._is_expected

    # --- orders -------------------------------------------------------------------------------------------------------

    def ask_version(self, program: str, environ: Mapping[str, str], told: Callable[[str], None]) -> None:
        """What the program prints when it is asked for its version; an empty text if it says nothing in time.

        Raises HelperUnavailable if the guard cannot be had.
        """
        self._told = told
        self._send(("ask", [os.fsencode(program), b"--version"], _as_bytes(environ), _ASK_S))

    def start(
        self,
        argv: Sequence[str],
        environ: Mapping[str, str],
        log: str,
        *,
        lock: int | None = None,
        output: int | None = None,
    ) -> None:
        """Start the server. It writes to ``log``, or to the descriptor ``output``; ``lock`` is held while it lives.

        Raises HelperUnavailable if the guard cannot be had.
        """
        assert not self._is_expected, "one server at a time"
        self._is_expected = True
        words = [os.fsencode(word) for word in argv]
        given = (lock is not None, output is not None)
        self._send(
            ("start", words, _as_bytes(environ), os.fsencode(log), *given),
            [descriptor for descriptor in (lock, output) if descriptor is not None],
        )

    def stop(self, grace_s: float = GRACE_S) -> None:
        """SIGTERM and, after the grace, SIGKILL. ``ended`` is told when it is over."""
        self._send(("stop", grace_s))

    def kill(self) -> None:
        """End server and guard at once. Returns when both are gone. Tells nobody."""
        channel, self._channel = self._channel, None
        self._told, self._is_expected = lambda _: None, False
        if channel is None:
            return
        self._loop.unwatch(self)
        with suppress(ChannelClosed):
            channel.send(("kill",))
        is_gone = _wait_for_its_end(channel, _KILL_S)
        channel.close()
        self._end_guard(has_ended_server=is_gone)

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
                self._hear(message)
                if self._channel is not channel:  # whoever heard it has ended us
                    return
        except ChannelClosed:
            self._lose_guard()

    def _hear(self, message: tuple[object, ...]) -> None:
        match message:
            case ("told", _, str(text)):
                told, self._told = self._told, lambda _: None
                told(text)
            case ("started", int(pid)):
                self.pid = pid
            case ("refused", str(text)):
                self._say_ended(f"it could not be started: {text}", by_itself=False)
            case ("ended", int(code)):
                self._say_ended(_in_words(code), by_itself=code >= 0)

    def _say_ended(self, how: str, *, by_itself: bool) -> None:
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
        told, self._told = self._told, lambda _: None
        told("")
        self._say_ended("the process that guarded it was killed, and so was it", by_itself=False)

    def _end_guard(self, *, has_ended_server: bool) -> None:
        """Reap it. One that was killed, or is stuck, could not end the server: then we do."""
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
        with suppress(ChannelClosed):  # its end is seen by on_readable
            self._channel.send(message, descriptors)


def _wait_for_its_end(channel: Channel, patience_s: float) -> bool:
    """Whether the guard went in time, which it does when the server is gone."""
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
    """Whether it has ended, or does so at once; reaped by us, or by whoever in this process reaps all children."""
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
    """The guard may read text in another encoding than we do."""
    return {os.fsencode(name): os.fsencode(value) for name, value in environ.items()}


def _in_words(code: int) -> str:
    if code >= 0:
        return f"it exited with code {code}"
    try:
        return f"it was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"it was killed by signal {-code}"
