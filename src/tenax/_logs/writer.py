"""The agent's handle of the log writer process (see ``writer_main``).

1. No call here waits for a device. Only ``finish``, ``wait_for`` and ``drain_now`` wait; all are bounded.
2. For every stream the agent keeps a duplicate of the pipe's read end, so that a worker can always write. If the log
   writer dies, a new one gets the same pipes with everything that is in them.
3. What a dead log writer held in memory is lost, which is reported to the user.

The owner's loop watches ``fileno()`` for reading, and for writing while ``wants_to_write``; it reads ``fileno()`` every
time, because a restart changes it. Without a loop, ``wait_for`` runs a small one.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from tenax._io.helper_channel import ChannelClosed
from tenax._io.helper_process import HelperHandle, HelperUnavailable, spawn_helper

_PIPE_BYTES = 1 << 18  # more is not faster, and all pipes of a user share one kernel limit
_MAX_QUEUED_BYTES = 4 << 20  # of the agent's own lines, while the log writer does not read its channel
_MAX_RESTARTS = 8
_EXTRA_WAIT_S = 0.5  # beyond the log writer's own timeout


class LogWriterLost(HelperUnavailable):
    """The log writer died too often. The workers' output is not read any more."""


class LogWriter(HelperHandle):
    """One log writer process, restarted when it dies."""

    def __init__(self, *, stuck_after_s: float = 1.0, queue_bytes: int = 8 << 20) -> None:
        self._settings = ("settings", stuck_after_s, queue_bytes)
        self.pid = 0
        self._streams: dict[Any, tuple[int, tuple[Any, ...]]] = {}  # read end, and the message that opens it
        self._consoles: dict[int, int] = {}  # of ``open_console``: number -> descriptor
        self._requests: dict[int, tuple[tuple[Any, ...], Callable[[Any], None]]] = {}
        self._last_request = 0
        self._resent: set[int] = set()  # requests sent again after a restart
        self._live: tuple[Any, ...] = ("live", "", None, None, "")
        self._dropped_lines = 0
        self._restarts = 0
        self._crash = ""
        self._unreaped: list[int] = []
        self._last_message_at = 0.0
        self._finish_message: tuple[Any, ...] | None = None
        self._is_finished = False

    def start(self) -> None:
        assert self._channel is None, "a log writer is started once"
        self.pid, self._channel = spawn_helper("tenax._logs.writer_main", "tenax-logs")
        self._send((*self._settings, self._restarts))

    # -- streams

    def open_console(self, number: int, descriptor: int) -> None:
        """Register this descriptor as console ``number`` (from 3 on). The caller keeps and closes it."""
        self._consoles[number] = descriptor
        self._send(("console", number), [descriptor])

    def open_stream(
        self,
        key: Hashable,
        *,
        path: str = "",
        console: int = 0,
        prefix: str = "",
        filters: Sequence[str] = (),
        filter_path: str = "",
        whole_lines: bool = True,
        as_terminal: bool = False,
    ) -> int:
        """Open a pipe for one worker's stdout or stderr. Return the write end, which the caller closes.

        ``path`` is the log file, if any; ``console`` is 1 or 2 to show the lines there (0: not shown; from 3 on: one of
        ``open_console``). Lines that contain one of the ``filters`` are also written to ``filter_path``. Without
        ``whole_lines``, for a worker that has the console to itself, partial lines such as prompts are shown at once.
        With ``as_terminal``, the worker gets a pseudo-terminal of the size of the console instead of a pipe. The key
        must be a marshal value.
        """
        assert console in (0, 1, 2, *self._consoles)
        assert key not in self._streams, f"stream {key!r} is already open"
        if as_terminal:
            from tenax._logs.pseudo_terminal import open_pseudo_terminal

            read_end, write_end = open_pseudo_terminal(console)
        else:
            read_end, write_end = os.pipe()
            if hasattr(fcntl, "F_SETPIPE_SZ"):
                with suppress(OSError):  # a burst should not block the worker; the system may allow less
                    fcntl.fcntl(read_end, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        text, *needles = (text.encode("utf-8", "surrogateescape") for text in (prefix, *filters))
        files = os.fsencode(path), os.fsencode(filter_path if needles else "")
        message = ("open", key, *files, console, text, needles, whole_lines, as_terminal)
        self._streams[key] = (read_end, message)
        self._send((*message, False), [read_end])
        return write_end

    def close_stream_duplicates(self, keys: Iterable[Hashable]) -> None:
        """Close ended streams. The log writer reads what is still in their pipes first."""
        known = [key for key in keys if key in self._streams]
        if known:
            self._send(("forget", known))
        for key in known:
            os.close(self._streams.pop(key)[0])

    def tail(self, keys: Iterable[Hashable], callback: Callable[[dict[Any, bytes]], None]) -> None:
        """Request the last 64 KiB of these streams, including what is in their pipes."""
        self._request("tail", [list(keys)], callback)

    def output_times(self, keys: Iterable[Hashable], callback: Callable[[dict[Any, float]], None]) -> None:
        """Request when each of these streams was last read, in seconds since the epoch; those that were."""
        self._request("output_times", [list(keys)], callback)

    def query(
        self,
        streams: Sequence[tuple[Hashable, str, int, int]],
        callback: Callable[[dict[str, Any]], None],
        *,
        incarnation: int = 0,
        wait_s: float = 0.0,
        until_over: bool = False,
        **options: Any,
    ) -> int:
        """Request lines. Return the number of the request.

        ``streams``: for each, its key, its file if it has one, its group (``query.Source``), and the position to
        continue from, as returned by the log writer of this ``incarnation``; -1 requests the last lines. ``options``
        are those of ``query.Query``. The result has lines (index in ``streams``, time, bytes), positions, left_out
        (index, bytes, why), is_more, is_over and incarnation; or it has an error. Waits up to ``wait_s`` for lines;
        with ``until_over``, the end of all streams ends the wait too.
        """
        encoded = [(key, os.fsencode(path), group, start) for key, path, group, start in streams]
        options = {**options, "wait_s": wait_s, "until_over": until_over}
        return self._request("query", [encoded, options, incarnation], callback)

    def answer_now(self, *requests: int) -> None:
        """Answer these waiting queries now, or all of them."""
        self._send(("answer_now", *requests))

    def drain(
        self, timeout_s: float, callback: Callable[[list[Any]], None], keys: Iterable[Hashable] | None = None
    ) -> None:
        """Call back when the streams (all, or these) have ended and are in their files, or time is up.

        The callback gets the keys of the streams that are still open.
        """
        self._request("drain", [timeout_s, None if keys is None else list(keys)], callback)

    # -- the agent's own lines

    def print(self, text: str, *, after_output: bool = False) -> None:
        """Write the agent's own lines to standard error.

        By default they are shown at once. With ``after_output``, everything written before is first shown and flushed
        to standard output, standard error and the log files, without waiting for a stuck device.
        """
        if self._channel is not None and self._channel.queued_bytes > _MAX_QUEUED_BYTES:
            self._dropped_lines += text.count("\n") + 1
            return
        if self._dropped_lines:
            text = f"tenax: {self._dropped_lines} of tenax's own lines were not shown: too many at once\n{text}"
            self._dropped_lines = 0
        self._send(("print", text, after_output))

    def live(self, text: str, since: float | None = None, until: float | None = None, progress: str = "") -> None:
        """Set the live line at the bottom of a terminal; empty for none. It ends with the step in the file ``progress``
        and the time since then, or until SIGKILL (``time.monotonic``), which the log writer keeps up to date."""
        message = ("live", text, since, until, progress)
        if message != self._live:
            self._live = message
            if self._channel is not None and self._channel.queued_bytes <= _MAX_QUEUED_BYTES:
                self._send(message)

    # -- the process

    def _on_closed(self) -> None:
        """Restart the log writer. Raises LogWriterLost when it has died too often."""
        if self._is_finished:
            self._disconnect()
        else:
            self._restart()

    def wait_for(self, is_done: Callable[[], bool], timeout_s: float) -> bool:
        """Serve the channel until the condition holds, for users without a loop. Return whether it does."""
        deadline = time.monotonic() + timeout_s
        while not is_done():
            left_s = deadline - time.monotonic()
            if left_s <= 0 or self._channel is None:
                return False
            self._serve(left_s)
        return True

    def drain_now(self, timeout_s: float, keys: Iterable[Hashable] | None = None) -> list[Any]:
        """``drain`` for users without a loop. Return the keys of the streams that are still open."""
        answers: list[list[Any]] = []
        self.drain(timeout_s, answers.append, keys)
        self.wait_for(lambda: bool(answers), timeout_s + _EXTRA_WAIT_S)
        return answers[0] if answers else list(self._streams)

    # -- the end

    def finish(self, timeout_s: float, interrupt_descriptor: int = -1) -> None:
        """Let the log writer flush and exit. It gives up on a device that takes nothing for ``timeout_s``.

        When ``interrupt_descriptor`` becomes readable (a second Ctrl-C), it gets as long as after the agent's death:
        less than a second, enough for the last lines on every console that makes progress.
        """
        interrupted = False
        if self._channel is not None:
            self._live = ("live", "", None, None, "")
            if self._dropped_lines:
                self.print("")
            self._finish_message = ("finish", timeout_s)
            self._send(self._finish_message)
            self._last_message_at = time.monotonic()
            while self._channel is not None and not interrupted:
                left_s = self._last_message_at + 3 * timeout_s + _EXTRA_WAIT_S - time.monotonic()
                if left_s <= 0:
                    break
                interrupted = self._serve(left_s, interrupt_descriptor)
            self._disconnect(kill=self._channel is not None and not interrupted)
        self._reap(wait=True)
        for read_end, _ in self._streams.values():
            os.close(read_end)
        self._streams.clear()

    # -- requests and restarts

    def _request(self, kind: str, values: list[Any], callback: Callable[[Any], None]) -> int:
        self._last_request += 1
        number = self._last_request
        message = (kind, number, *values)
        self._requests[number] = (message, callback)
        self._send(message)
        return number

    def _send(self, message: tuple[Any, ...], descriptors: Sequence[int] = ()) -> None:
        if self._channel is None:  # it could not be restarted, and LogWriterLost was raised
            return
        try:
            self._channel.send(message, descriptors)
        except ChannelClosed:
            # The restart resends streams and requests, which are kept here; only other messages must be repeated.
            self._restart()
            if message[0] in ("print", "forget"):
                self._send(message)

    def _on_message(self, message: tuple[Any, ...]) -> None:
        self._last_message_at = time.monotonic()
        match message:
            case ("answer", request, answer):
                self._answer(request, answer)
            case ("finished",):
                self._is_finished = True
            case ("crashed", traceback):
                self._crash = traceback

    def _answer(self, request: int, answer: Any) -> None:
        _, callback = self._requests.pop(request, (None, None))
        self._resent.discard(request)
        if callback is not None:  # otherwise it was already answered
            callback(answer)

    def _serve(self, timeout_s: float, interrupt_descriptor: int = -1) -> bool:
        """Run one round of a small loop. Return whether ``interrupt_descriptor`` is readable."""
        assert self._channel is not None
        waiter = select.poll()
        waiter.register(self.fileno(), select.POLLIN | (select.POLLOUT if self.wants_to_write else 0))
        if interrupt_descriptor >= 0:
            waiter.register(interrupt_descriptor, select.POLLIN)
        ready = dict(waiter.poll(max(0.0, timeout_s * 1000 + 1)))
        events = ready.pop(self.fileno(), 0)
        if events & select.POLLOUT:
            self.on_writable()
        if events & ~select.POLLOUT:
            self.on_readable()
        return bool(ready)

    def _restart(self) -> None:
        assert self._channel is not None
        self._disconnect()
        self._restarts += 1
        if self._restarts > _MAX_RESTARTS:
            raise LogWriterLost(
                f"the log writer died {self._restarts} times{self._why_it_died()}; "
                "check the limits on processes and memory (ulimit -u, the container's limits)"
            )
        restarts = self._restarts
        what = f"the log writer died{self._why_it_died()} and was restarted"
        messages = [
            *((("console", number), [descriptor]) for number, descriptor in self._consoles.items()),
            *(((*message, True), [read_end]) for read_end, message in self._streams.values()),
            (self._live, []),
            (("print", f"tenax: {what}; lines that it held in memory are lost", False), []),
        ]
        self.start()
        for message, descriptors in messages:
            if self._restarts == restarts:  # otherwise it has died again, and that restart has sent everything
                self._send(message, descriptors)
        for number, (message, _) in list(self._requests.items()):
            if self._restarts != restarts:
                return
            if message[0] == "query" and number in self._resent:  # this query may be what kills it
                self._answer(number, {"error": "the log writer died during this query"})
            else:
                self._resent.add(number)
                self._send(message)
        if self._finish_message is not None and self._restarts == restarts:
            self._send(self._finish_message)

    def _why_it_died(self) -> str:
        """Return the last line of its traceback, if it sent one."""
        error, self._crash = self._crash.strip().rpartition("\n")[2], ""
        return f" ({error})" if error else ""

    def _disconnect(self, *, kill: bool = False) -> None:
        """Close the channel, which ends the log writer if it still runs."""
        if self._channel is None:
            return
        self._channel.close()
        self._channel = None
        if kill:
            os.kill(self.pid, signal.SIGKILL)
        self._unreaped.append(self.pid)
        self._reap(wait=False)

    def _reap(self, *, wait: bool) -> None:
        self._unreaped = [pid for pid in self._unreaped if not _is_reaped(pid, wait)]


def _is_reaped(pid: int, wait: bool) -> bool:
    """Reap a process that is dead or exiting. Return whether it is gone."""
    try:
        if wait and hasattr(os, "pidfd_open"):  # bounded: a process stuck in the kernel is left to init
            pidfd = os.pidfd_open(pid)
            waiter = select.poll()
            waiter.register(pidfd, select.POLLIN)
            waiter.poll(_EXTRA_WAIT_S * 1000)
            os.close(pidfd)
            wait = False
        done, _ = os.waitpid(pid, 0 if wait else os.WNOHANG)
    except (ChildProcessError, ProcessLookupError):  # other code in this process reaped it
        return True
    return bool(done)
