"""The guard: a small process between the agent and its etcd server, so that the server never outlives the agent.

The agent may die at any moment and by any signal. Then its end of the channel closes, and the guard stops the server
and exits. If the guard itself is killed, the kernel kills the server (PR_SET_PDEATHSIG, on Linux), and so does the
agent when it sees the channel closed. The guard makes no decisions. It has one thread, because the parent death signal
is tied to the thread that forked.

Commands from the agent                                 Replies
  run, argv, environ, timeout_s                           output, exit code, text
  start, argv, environ, log path, has_lock, has_output    started, pid
    + lock, + output                                      refused, text
  stop, grace_s                                           ended, exit code
  kill                                                    (none: the guard exits, which closes the channel)

"start" may carry two descriptors: the lock of the data directory, which the guard holds while the server may be
running, and the server's output, which replaces the log path. "stop" means SIGTERM, a grace period, then SIGKILL, to
the server's process group, since the program may be a script. The exit of the agent counts as "stop", too.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time
from contextlib import suppress

from tenax._io.helper_channel import Channel, ChannelClosed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

GRACE_S = 2.0
_KILL_S = 2.0  # how long to wait for a process after SIGKILL
_PR_SET_PDEATHSIG = 1
_MAX_OUTPUT = 4096


class ServerGuard:
    """The whole process: one poll over the agent's channel, exits of children, and the output of "run"."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._server_pid = 0
        self._command_pid = 0  # the program that "run" started
        self._printed = b""
        self._output = -1
        self._command_until = 0.0
        self._kill_at: float | None = None
        self._is_killed = False
        self._lock = -1
        self._is_orphan = False
        self._is_leaving = False
        self._pid = os.getpid()
        self._prctl: Any = _prctl()

    def run(self) -> None:
        for number in _CATCHABLE:
            signal.signal(number, signal.SIG_IGN)  # the guard exits when the agent does
        child_exits, wakeup = os.pipe()
        os.set_blocking(child_exits, False)
        os.set_blocking(wakeup, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        while self._server_pid or not (self._is_orphan or self._is_leaving):
            ready = self._wait(child_exits)
            if child_exits in ready:
                with suppress(BlockingIOError):
                    while os.read(child_exits, 4096):
                        pass
            if self._output >= 0 and self._output in ready:
                self._read_output()
            self._reap()
            self._check_deadlines()
            if not self._is_orphan and self._channel.fileno() in ready:
                self._serve()
        if self._command_pid:
            _signal_group(self._command_pid, signal.SIGKILL)

    def _wait(self, child_exits: int) -> set[int]:
        poll = select.poll()
        poll.register(child_exits, select.POLLIN)
        if self._output >= 0:
            poll.register(self._output, select.POLLIN)
        if not self._is_orphan:
            writes = select.POLLOUT if self._channel.wants_to_write else 0
            poll.register(self._channel.fileno(), select.POLLIN | writes)
        moments = [self._kill_at] if self._kill_at is not None else []
        if self._command_pid:
            moments.append(self._command_until)
        timeout_ms = max(0.0, min(moments) - time.monotonic()) * 1000 + 1 if moments else None
        return {descriptor for descriptor, _ in poll.poll(timeout_ms)}

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        if self._kill_at is not None and now >= self._kill_at:
            if self._is_killed and self._is_orphan:
                os._exit(1)  # the server is stuck in the kernel; init will reap it
            self._stop(0.0)
        if self._command_pid and now >= self._command_until:
            _signal_group(self._command_pid, signal.SIGKILL)
            self._command_until = now + _KILL_S

    # --- commands -----------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            self._channel.flush()
            for message, descriptors in self._channel.receive():
                match message:
                    case ("run", argv, environ, timeout_s):
                        self._run_command(argv, environ, timeout_s)
                    case ("start", argv, environ, log, has_lock, has_output):
                        self._release_lock()
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
        """Stop the server: the agent is gone."""
        self._is_orphan = True
        self._channel.close()
        self._stop(GRACE_S)

    def _run_command(self, argv: list[bytes], environ: dict[bytes, bytes], timeout_s: float) -> None:
        self._output, writer = os.pipe()
        self._printed = b""
        try:
            self._command_pid = self._fork(argv, environ, writer)
        finally:
            os.close(writer)
        self._command_until = time.monotonic() + timeout_s

    def _read_output(self) -> None:
        data = os.read(self._output, _MAX_OUTPUT)
        self._printed = (self._printed + data)[:_MAX_OUTPUT]
        if not data:
            os.close(self._output)
            self._output = -1

    def _start(self, argv: list[bytes], environ: dict[bytes, bytes], log: bytes, output: int) -> None:
        try:
            if output < 0:
                output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                self._server_pid = self._fork(argv, environ, output)
            finally:
                os.close(output)
        except OSError as error:
            self._release_lock()
            self._send(("refused", os.strerror(error.errno or 0)))
            return
        self._kill_at, self._is_killed = None, False
        self._send(("started", self._server_pid))

    def _stop(self, grace_s: float) -> None:
        if not self._server_pid or self._is_killed:
            return
        self._is_killed = grace_s <= 0
        _signal_group(self._server_pid, signal.SIGKILL if self._is_killed else signal.SIGTERM)
        _signal_group(self._server_pid, signal.SIGCONT)  # a stopped process does not handle SIGTERM
        kill_at = time.monotonic() + (_KILL_S if self._is_killed else grace_s)
        self._kill_at = kill_at if self._kill_at is None or self._is_killed else min(self._kill_at, kill_at)

    def _send(self, message: tuple[Any, ...]) -> None:
        if not self._is_orphan:
            with suppress(ChannelClosed):  # _serve handles it
                self._channel.send(message)

    # --- exits --------------------------------------------------------------------------------------------------------

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            if pid == self._server_pid:
                _signal_group(pid, signal.SIGKILL)  # processes that a script left behind
                self._server_pid, self._kill_at = 0, None
                self._release_lock()
                self._send(("ended", code))
            elif pid == self._command_pid:
                _signal_group(pid, signal.SIGKILL)
                self._command_pid = 0
                while self._output >= 0 and select.select([self._output], [], [], 0)[0]:
                    self._read_output()
                if self._output >= 0:  # another process holds the write end; stop reading
                    os.close(self._output)
                    self._output = -1
                self._send(("output", code, self._printed.decode(errors="replace")))

    def _release_lock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    # --- in the child -------------------------------------------------------------------------------------------------

    def _fork(self, argv: list[bytes], environ: dict[bytes, bytes], output: int) -> int:
        # The guard ignores signals that the server must receive. Block them until the child has restored the defaults.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            pid = os.fork()
            if pid == 0:
                self._exec(argv, environ, output)
            with suppress(OSError):  # parent and child both do it, so that the group exists before it is signalled
                os.setpgid(pid, pid)
            return pid
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, ())

    def _exec(self, argv: list[bytes], environ: dict[bytes, bytes], output: int) -> None:
        """Execute the program, in the child. Never returns."""
        try:
            with suppress(OSError):
                os.setpgid(0, 0)
            if self._prctl is not None:
                self._prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
                if os.getppid() != self._pid:
                    os._exit(1)  # the guard died before prctl took effect
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
    """Run the helper process."""
    ServerGuard(Channel.from_descriptor(descriptor)).run()
    os._exit(0)  # skip the interpreter's teardown: the agent may be waiting for the exit


_CATCHABLE = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2]


def _signal_group(pid: int, number: int) -> None:
    if pid:
        with suppress(ProcessLookupError, PermissionError):  # macOS raises it for a group of zombies
            os.killpg(pid, number)


def _prctl() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    return getattr(ctypes.CDLL(None, use_errno=True), "prctl", None)
