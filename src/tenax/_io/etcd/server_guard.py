"""The guard: a small process between the agent and the etcd server it runs, so that the server is never an orphan.

The agent may die at any moment and by any signal. Its end of the channel is then closed, the guard ends the server
and leaves. Should the guard itself be killed, the kernel kills the server (PR_SET_PDEATHSIG, where there is such a
thing), and the agent, which sees the channel closed, kills it too. The guard decides nothing, and it has one thread:
the death signal is tied to the thread that forked.

Orders from the agent                                   Answers
  ask, argv, environ, patience_s                          told, exit code, text
  start, argv, environ, log path, has_lock, has_output    started, pid
    + lock, + output                                      refused, text
  stop, grace_s                                           ended, exit code
  kill                                                    (none: we leave, and the channel is closed)

Two descriptors may come with "start": the lock of the data directory, which we hold as long as the server may live, and
what the server writes to instead of the log path. "Stop" is SIGTERM and, after the grace, SIGKILL, to the whole
process group of the server: the program may be a script that starts it. The agent's end means "stop" as well.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time
from contextlib import suppress

from tenax._io.channel import Channel, ChannelClosed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

GRACE_S = 2.0
_STUBBORN_S = 2.0  # how long a process that SIGKILL does not end may hold us
_PR_SET_PDEATHSIG = 1
_MAX_TOLD = 4096


class ServerGuard:
    """The whole process: one poll over the agent's channel, the deaths of children, and what a short one prints."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._server = 0
        self._asked = 0  # a program that was started to be asked something
        self._said = b""
        self._saying = -1
        self._ask_until = 0.0
        self._kill_at: float | None = None
        self._is_killed = False
        self._lock = -1
        self._is_orphan = False
        self._is_leaving = False
        self._pid = os.getpid()
        self._prctl: Any = _prctl()

    def run(self) -> None:
        for number in _CATCHABLE:
            signal.signal(number, signal.SIG_IGN)  # we go when the agent does
        deaths, wakeup = os.pipe()
        os.set_blocking(deaths, False)
        os.set_blocking(wakeup, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        while self._server or not (self._is_orphan or self._is_leaving):
            ready = self._wait(deaths)
            if deaths in ready:
                with suppress(BlockingIOError):
                    while os.read(deaths, 4096):
                        pass
            if self._saying >= 0 and self._saying in ready:
                self._hear()
            self._reap()
            self._keep_time()
            if not self._is_orphan and self._channel.fileno() in ready:
                self._serve()
        if self._asked:
            _signal_group(self._asked, signal.SIGKILL)

    def _wait(self, deaths: int) -> set[int]:
        poll = select.poll()
        poll.register(deaths, select.POLLIN)
        if self._saying >= 0:
            poll.register(self._saying, select.POLLIN)
        if not self._is_orphan:
            writes = select.POLLOUT if self._channel.wants_to_write else 0
            poll.register(self._channel.fileno(), select.POLLIN | writes)
        moments = [self._kill_at] if self._kill_at is not None else []
        if self._asked:
            moments.append(self._ask_until)
        patience_ms = max(0.0, min(moments) - time.monotonic()) * 1000 + 1 if moments else None
        return {descriptor for descriptor, _ in poll.poll(patience_ms)}

    def _keep_time(self) -> None:
        now = time.monotonic()
        if self._kill_at is not None and now >= self._kill_at:
            if self._is_killed and self._is_orphan:
                os._exit(1)  # the server is stuck in the kernel; init will have it
            self._stop(0.0)
        if self._asked and now >= self._ask_until:
            _signal_group(self._asked, signal.SIGKILL)
            self._ask_until = now + _STUBBORN_S

    # --- orders -------------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            self._channel.flush()
            for message, descriptors in self._channel.receive():
                match message:
                    case ("ask", argv, environ, patience_s):
                        self._ask(argv, environ, patience_s)
                    case ("start", argv, environ, log, has_lock, has_output):
                        self._let_go_of_lock()
                        self._lock = descriptors.pop(0) if has_lock else -1
                        self._start(argv, environ, log, descriptors.pop(0) if has_output else -1)
                    case ("stop", grace_s):
                        self._stop(grace_s)
                    case ("kill",):
                        self._is_leaving = True
                        self._stop(0.0)
        except ChannelClosed:
            self._orphaned()

    def _orphaned(self) -> None:
        """The agent is gone: what it started must not outlive it."""
        self._is_orphan = True
        self._channel.close()
        self._stop(GRACE_S)

    def _ask(self, argv: list[bytes], environ: dict[bytes, bytes], patience_s: float) -> None:
        self._saying, writer = os.pipe()
        self._said = b""
        try:
            self._asked = self._fork(argv, environ, writer)
        finally:
            os.close(writer)
        self._ask_until = time.monotonic() + patience_s

    def _hear(self) -> None:
        data = os.read(self._saying, _MAX_TOLD)
        self._said = (self._said + data)[:_MAX_TOLD]
        if not data:
            os.close(self._saying)
            self._saying = -1

    def _start(self, argv: list[bytes], environ: dict[bytes, bytes], log: bytes, output: int) -> None:
        try:
            if output < 0:
                output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                self._server = self._fork(argv, environ, output)
            finally:
                os.close(output)
        except OSError as error:
            self._let_go_of_lock()
            self._say(("refused", os.strerror(error.errno or 0)))
            return
        self._kill_at, self._is_killed = None, False
        self._say(("started", self._server))

    def _stop(self, grace_s: float) -> None:
        if not self._server or self._is_killed:
            return
        self._is_killed = grace_s <= 0
        _signal_group(self._server, signal.SIGKILL if self._is_killed else signal.SIGTERM)
        _signal_group(self._server, signal.SIGCONT)  # a stopped process could not obey
        kill_at = time.monotonic() + (_STUBBORN_S if self._is_killed else grace_s)
        self._kill_at = kill_at if self._kill_at is None or self._is_killed else min(self._kill_at, kill_at)

    def _say(self, message: tuple[Any, ...]) -> None:
        if not self._is_orphan:
            with suppress(ChannelClosed):  # its end is seen by _serve
                self._channel.send(message)

    # --- deaths -------------------------------------------------------------------------------------------------------

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            if pid == self._server:
                _signal_group(pid, signal.SIGKILL)  # what a script of that name has left
                self._server, self._kill_at = 0, None
                self._let_go_of_lock()
                self._say(("ended", code))
            elif pid == self._asked:
                _signal_group(pid, signal.SIGKILL)
                self._asked = 0
                while self._saying >= 0 and select.select([self._saying], [], [], 0)[0]:
                    self._hear()
                if self._saying >= 0:  # somebody holds the other end; what was said was said
                    os.close(self._saying)
                    self._saying = -1
                self._say(("told", code, self._said.decode(errors="replace")))

    def _let_go_of_lock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    # --- in the child -------------------------------------------------------------------------------------------------

    def _fork(self, argv: list[bytes], environ: dict[bytes, bytes], output: int) -> int:
        # We ignore what the server must hear. Until it has changed that for itself, signals to it wait.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            pid = os.fork()
            if pid == 0:
                self._become(argv, environ, output)
            with suppress(OSError):  # the child does it too; whoever is first makes the group exist before we signal it
                os.setpgid(pid, pid)
            return pid
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, ())

    def _become(self, argv: list[bytes], environ: dict[bytes, bytes], output: int) -> None:
        """After fork, in the child. Never returns."""
        try:
            with suppress(OSError):
                os.setpgid(0, 0)
            if self._prctl is not None:
                self._prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
                if os.getppid() != self._pid:
                    os._exit(1)  # the guard died before the line above took effect
            signal.set_wakeup_fd(-1)
            for number in (*_CATCHABLE, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_DFL)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.chdir("/")
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            os.execve(argv[0], argv, environ)
        except BaseException as error:
            text = os.strerror(error.errno or 0) if isinstance(error, OSError) else str(error)
            os.write(2, f"{os.fsdecode(argv[0])}: {text}\n".encode(errors="replace"))
        finally:
            os._exit(127)


def main(descriptor: int) -> None:
    """Entry of the helper process."""
    ServerGuard(Channel.from_descriptor(descriptor)).run()
    os._exit(0)  # nothing is left to tear down, and the agent may wait for our end


_CATCHABLE = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2]


def _signal_group(pid: int, number: int) -> None:
    if pid:
        with suppress(ProcessLookupError, PermissionError):  # macOS says so of a group of zombies
            os.killpg(pid, number)


def _prctl() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    return getattr(ctypes.CDLL(None, use_errno=True), "prctl", None)
