"""The process that ``tenax start`` opens on each host: it checks the host, starts the agent, and ends with its input.

It runs over a connection of ssh or srun, whose two sides are its standard input and output. It reads lines of JSON:

1. ``{"marker", "folder", "endpoint", "silence_s"}``: answered with the marker and what was found on this host.
2. ``{"argv", "folder", "env"}``: starts the agent, which shares the standard output and error.
3. A number: sent to the agent as a signal. An empty line: the starter still runs.

When the agent has exited, it writes the marker and the exit code. When the input ends, or nothing arrives for
``silence_s``, the agent gets SIGTERM and a second later SIGKILL, after which the keeper kills the workers. If this
process is killed, the kernel kills the agent. Standard library only.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time

import tenax

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_GRACE_S = 1.0
_PR_SET_PDEATHSIG = 1
_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def main() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for number in _IGNORED:  # a scheduler sends them to the agent too
        signal.signal(number, signal.SIG_IGN)
    lines = _Lines(reader)
    if request := lines.next_request():
        marker, lines.silence_s = request["marker"], request["silence_s"]
        _write(f"{marker} {json.dumps(_examine(request['folder'], request['endpoint']))}\n")
        if start := lines.next_request():
            _write(f"{marker} {_serve(start, lines)}\n")


def _examine(folder: str, endpoint: str) -> dict[str, Any]:
    unresolved = ""
    try:
        if endpoint:
            socket.getaddrinfo(endpoint, None)
    except OSError:
        unresolved = endpoint
    version = ".".join(map(str, sys.version_info[:3]))
    found = {"tenax": tenax.__version__, "python": version, "has_folder": os.path.isdir(folder)}
    return {**found, "unresolved": unresolved, "time": time.time()}


def _serve(start: dict[str, Any], lines: _Lines) -> int:
    """Run the agent. Return its exit code, negative for a signal."""
    agent = _start_agent(start)
    kill_at = None
    while True:
        ended, status = os.waitpid(agent, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if kill_at is None:
            line = lines.next()
            if line is None:
                os.kill(agent, signal.SIGTERM)
                kill_at = time.monotonic() + _GRACE_S
            elif line.strip():
                os.kill(agent, int(line))
        elif (left_s := kill_at - time.monotonic()) > 0:
            lines.wait(left_s)
        else:
            os.kill(agent, signal.SIGKILL)
            return os.waitstatus_to_exitcode(os.waitpid(agent, 0)[1])


def _start_agent(start: dict[str, Any]) -> int:
    guard = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        if sys.platform == "linux":
            import ctypes

            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != guard:
                os._exit(1)
        signal.set_wakeup_fd(-1)
        for number in (*_IGNORED, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(start["folder"])
        os.execvpe(start["argv"][0], start["argv"], {**os.environ, **start["env"]})
    except OSError as error:
        os.write(2, f"tenax start: cannot start the agent: {error}\n".encode())
    finally:
        os._exit(71)


class _Lines:
    """The lines of standard input. Waiting for one also ends when a signal arrives at ``wakeup``."""

    def __init__(self, wakeup: int) -> None:
        self.silence_s: float | None = None  # None: unlimited
        self._wakeup = wakeup
        self._poll = select.poll()
        self._poll.register(0, select.POLLIN)
        self._poll.register(wakeup, select.POLLIN)
        self._data = b""

    def next_request(self) -> dict[str, Any] | None:
        while (line := self.next()) == b"":
            pass
        return json.loads(line) if line else None

    def wait(self, timeout_s: float) -> None:
        if select.select([self._wakeup], [], [], timeout_s)[0]:
            os.read(self._wakeup, 4096)

    def next(self) -> bytes | None:
        """Return the next line; empty if a signal came first; None at the end of the input or after a long silence."""
        timeout_ms = None if self.silence_s is None else self.silence_s * 1000
        while b"\n" not in self._data:
            ready = dict(self._poll.poll(timeout_ms))
            if self._wakeup in ready:
                os.read(self._wakeup, 4096)
                return b""
            data = os.read(0, 1 << 16) if ready else b""
            if not data:
                return None
            self._data += data
        line, _, self._data = self._data.partition(b"\n")
        return line


def _write(text: str) -> None:
    try:
        os.write(1, text.encode())
    except BrokenPipeError:
        sys.exit(1)  # the starter is gone


if __name__ == "__main__":
    main()
