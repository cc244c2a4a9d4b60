"""Scribe: the agent's hold on the process that takes the workers' output away (``scribe_main`` says how).

1. No call here waits for a device, and none but ``wait_for`` and ``finish`` waits at all; these two are bounded.
2. For every stream the agent keeps a duplicate of the pipe's read end, so that a worker can always write; when the
   scribe dies another one is started and given the same pipes with all that is in them.
3. What a dead scribe held in memory is lost, and that is said.

The owner's loop watches ``fileno()`` for reading, and for writing while ``wants_to_write``; it asks every time, because
another process may have taken over. Without a loop, ``wait_for`` runs a small one.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import time
from contextlib import suppress

import msgspec

from tenax._io.channel import Channel, ChannelClosed
from tenax._io.helper_process import HelperUnavailable, spawn_helper

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence
    from types import TracebackType
    from typing import Any

_PIPE_BYTES = 1 << 18  # more is no faster, and all pipes of a user share one allowance of the kernel
_MAX_QUEUED_BYTES = 4 << 20  # of our own lines, in a channel that the scribe does not read
_MAX_RESTARTS = 8
_SECOND_LOOK_S = 0.5  # how much longer than the scribe's own patience we wait for it


class LogWriterLost(HelperUnavailable):
    """The scribe died again and again. Nobody reads the workers' output any more."""


class Losses(msgspec.Struct, frozen=True):
    """What did not arrive, and where."""

    console_lines: int = 0
    console_bytes: int = 0
    file_bytes: dict[str, int] = {}  # by path
    own_lines: int = 0  # of the agent, dropped before they reached the scribe
    still_open: tuple[Any, ...] = ()  # streams that had not ended in time
    scribe_restarts: int = 0

    @property
    def is_complete(self) -> bool:
        """Whether everything that was written before is where it belongs."""
        return not (self.console_bytes or self.file_bytes or self.own_lines or self.still_open or self.scribe_restarts)


class _Stream(msgspec.Struct, frozen=True):
    read_end: int
    order: tuple[Any, ...]


class LogWriter:
    """One scribe process, started again when it dies."""

    def __init__(
        self,
        *,
        stuck_after_s: float = 1.0,
        queue_bytes: int = 8 << 20,
    ) -> None:
        self._settings = ("settings", stuck_after_s, queue_bytes)
        self._channel: Channel | None = None
        self.pid = 0
        self._streams: dict[Any, _Stream] = {}
        self._consoles: dict[int, int] = {}  # those of ``open_console``: number -> descriptor
        self._requests: dict[int, tuple[tuple[Any, ...], Callable[[Any], None]]] = {}
        self._last_request = 0
        self._asked_again: set[int] = set()  # of the scribe that came after the one that was asked first
        self._live = ""
        self._dropped_lines = 0
        self._restarts = 0
        self._crash = ""
        self._unreaped: list[int] = []
        self._losses = Losses()
        self._heard_at = 0.0
        self._finish_order: tuple[Any, ...] | None = None
        self._is_finished = False

    def __enter__(self) -> LogWriter:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish(1.0)

    def start(self) -> None:
        assert self._channel is None, "a scribe is started once"
        self.pid, self._channel = spawn_helper("tenax._logs.writer_main", "tenax-logs")
        self._send((*self._settings, self._restarts))

    # -- streams

    def open_console(self, number: int, descriptor: int) -> None:
        """Allow streams to be shown at this descriptor, as console ``number`` (from 3 on). It stays the caller's."""
        self._consoles[number] = descriptor
        self._send(("console", number), [descriptor])

    def open_stream(
        self,
        key: Hashable,
        *,
        path: str | None = None,
        console: int = 0,
        prefix: str = "",
        filters: Sequence[str] = (),
        filter_path: str | None = None,
        whole_lines: bool = True,
    ) -> int:
        """A pipe for one worker's stdout or stderr; returns the end to write to, which the caller closes.

        ``path`` is the file for the bytes, ``console`` 1 or 2 to show the lines there (0: nowhere; from 3 on: one of
        ``open_console``). Lines that contain one of the ``filters`` are also collected in ``filter_path``. Without
        ``whole_lines``, for a worker that has the console to itself, half a line is shown at once: a prompt. The key is
        made of plain values.
        """
        assert console in (0, 1, 2, *self._consoles)
        assert key not in self._streams, f"stream {key!r} is open already"
        read_end, write_end = os.pipe()
        _enlarge(read_end)
        needles = [needle.encode("utf-8", "surrogateescape") for needle in filters]
        order = (
            "open",
            key,
            _file_or_none(path),
            console,
            prefix.encode("utf-8", "surrogateescape"),
            needles,
            _file_or_none(filter_path) if needles else None,
            whole_lines,
        )
        self._streams[key] = _Stream(read_end, order)
        self._send((*order, False), [read_end])
        return write_end

    def close_stream_duplicates(self, keys: Iterable[Hashable]) -> None:
        """These streams are over: the scribe may forget them, and what is still in their pipes is taken now."""
        known = [key for key in keys if key in self._streams]
        if known:
            self._send(("forget", known))
        for key in known:
            os.close(self._streams.pop(key).read_end)

    def tail(self, keys: Iterable[Hashable], callback: Callable[[dict[Any, bytes]], None]) -> None:
        """Ask for the last 64 KiB of these streams, with all that is readable in their pipes at that moment."""
        self._request("tail", [list(keys)], callback)

    def recall(
        self,
        wants: Sequence[tuple[Hashable, str, int, int]],
        callback: Callable[[dict[str, Any]], None],
        *,
        incarnation: int = 0,
        wait_s: float = 0.0,
        until_over: bool = False,
        **query: Any,
    ) -> int:
        """Ask for lines. Returns the number of the request.

        ``wants``: the stream, its file if it has one, its group (``recall.Source``), and the position to go on from, as
        the scribe of this ``incarnation`` has told it; -1: the last lines are wanted. ``query`` is that of
        ``recall.Query``. The answer has lines (index in ``wants``, time, bytes), positions, left_out (index, bytes,
        why), is_more, is_over and incarnation; or it has an error. It waits for lines; with ``until_over`` also that
        the streams have ended is worth an answer.
        """
        asked = [(key, os.fsencode(path), group, start) for key, path, group, start in wants]
        how = {**query, "wait_s": wait_s, "until_over": until_over}
        return self._request("recall", [asked, how, incarnation], callback)

    def hurry(self, *requests: int) -> None:
        """Whoever waits for lines is answered now; or only these."""
        self._send(("hurry", *requests))

    def recall_now(
        self, wants: Sequence[tuple[Hashable, str, int, int]], timeout_s: float, **query: Any
    ) -> dict[str, Any]:
        """``recall`` for users without a loop; empty when there is no answer in time."""
        answers: list[dict[str, Any]] = []
        self.recall(wants, answers.append, **query)
        self.wait_for(lambda: bool(answers), timeout_s)
        return answers[0] if answers else {}

    def drain(
        self, timeout_s: float, callback: Callable[[Losses], None], keys: Iterable[Hashable] | None = None
    ) -> None:
        """Ask to be told when the streams (all, or these) have ended and are in their files, or time is up."""
        self._request("drain", [timeout_s, None if keys is None else list(keys)], callback)

    # -- our own lines

    def say(self, text: str, *, after_output: bool = False) -> None:
        """Write the agent's own lines to standard error.

        By default they are shown at once, above what workers write in answer to them. With ``after_output`` everything
        that was written before is shown and flushed first: to standard output, to standard error and to the log files.
        A device that is stuck is not waited for.
        """
        if self._channel is not None and self._channel.queued_bytes > _MAX_QUEUED_BYTES:
            self._dropped_lines += text.count("\n") + 1
            return
        if self._dropped_lines:
            text = f"tenax: {self._dropped_lines} of tenax's own lines were not shown: they came too fast\n{text}"
            self._losses = msgspec.structs.replace(self._losses, own_lines=self._losses.own_lines + self._dropped_lines)
            self._dropped_lines = 0
        self._send(("say", text, after_output))

    def live(self, text: str) -> None:
        """The one live line at the bottom of a terminal; empty for none."""
        if text != self._live:
            self._live = text
            if self._channel is not None and self._channel.queued_bytes <= _MAX_QUEUED_BYTES:
                self._send(("live", text))

    # -- the loop's handle

    def fileno(self) -> int:
        return self._channel.fileno() if self._channel is not None else -1

    @property
    def wants_to_write(self) -> bool:
        return self._channel is not None and self._channel.wants_to_write

    def on_writable(self) -> None:
        try:
            if self._channel is not None:
                self._channel.flush()
        except ChannelClosed:
            self._start_again()

    def on_readable(self) -> None:
        """Take the scribe's answers. Raises LogWriterLost when it has died too often."""
        try:
            if self._channel is not None:
                for message, _ in self._channel.receive():
                    self._on_message(message)
        except ChannelClosed:
            if self._is_finished:
                self._disconnect()
            else:
                self._start_again()

    def wait_for(self, is_done: Callable[[], bool], timeout_s: float) -> bool:
        """Serve the channel until the condition holds, for users without a loop. Returns whether it does."""
        deadline = time.monotonic() + timeout_s
        while not is_done():
            left_s = deadline - time.monotonic()
            if left_s <= 0 or self._channel is None:
                return False
            self._serve(left_s)
        return True

    def tail_now(self, keys: Iterable[Hashable], timeout_s: float) -> dict[Any, bytes]:
        """``tail`` for users without a loop; empty when there is no answer in time."""
        answers: list[dict[Any, bytes]] = []
        self.tail(keys, answers.append)
        self.wait_for(lambda: bool(answers), timeout_s)
        return answers[0] if answers else {}

    def drain_now(self, timeout_s: float, keys: Iterable[Hashable] | None = None) -> Losses:
        """``drain`` for users without a loop."""
        answers: list[Losses] = []
        self.drain(timeout_s, answers.append, keys)
        self.wait_for(lambda: bool(answers), timeout_s + _SECOND_LOOK_S)
        return answers[0] if answers else msgspec.structs.replace(self._losses, still_open=tuple(self._streams))

    # -- the end

    def finish(self, timeout_s: float, hurry_descriptor: int = -1) -> Losses:
        """Let the scribe write all it has and go; a device that takes nothing for ``timeout_s`` is not waited for.

        When ``hurry_descriptor`` becomes readable (a second Ctrl-C), it gets as long as one whose agent died: less than
        a second, which is enough for the last words on every console that moves.
        """
        hurried = False
        if self._channel is not None:
            self._live = ""
            if self._dropped_lines:
                self.say("")
            self._finish_order = ("finish", timeout_s)
            self._send(self._finish_order)
            self._heard_at = time.monotonic()
            while self._channel is not None and not hurried:
                left_s = self._heard_at + 3 * timeout_s + _SECOND_LOOK_S - time.monotonic()
                if left_s <= 0:
                    break
                hurried = self._serve(left_s, hurry_descriptor)
            self._disconnect(kill=self._channel is not None and not hurried)
        self._reap(wait=True)
        for stream in self._streams.values():
            os.close(stream.read_end)
        self._streams.clear()
        return self._losses

    # -- inside

    def _request(self, order: str, values: list[Any], callback: Callable[[Any], None]) -> int:
        self._last_request += 1
        number = self._last_request
        message = (order, number, *values)
        self._requests[number] = (message, callback)
        self._send(message)
        return number

    def _send(self, message: tuple[Any, ...], descriptors: Sequence[int] = ()) -> None:
        if self._channel is None:  # it could not be started again, and whoever tried was told
            return
        try:
            self._channel.send(message, descriptors)
        except ChannelClosed:
            # Streams and requests are sent again by the new start; only what leaves no trace here has to be repeated.
            self._start_again()
            if message[0] in ("say", "forget"):
                self._send(message)

    def _on_message(self, message: tuple[Any, ...]) -> None:
        self._heard_at = time.monotonic()
        kind, *values = message
        if kind == "tails":
            request, tails = values
            self._answer(request, dict(tails))
        elif kind == "recalled":
            self._answer(*values)
        elif kind == "drained":
            request, still_open, losses = values
            self._take_losses(losses)
            self._answer(request, msgspec.structs.replace(self._losses, still_open=tuple(still_open)))
        elif kind == "finished":
            self._take_losses(values[0])
            self._is_finished = True
        elif kind == "crashed":
            self._crash = values[0]

    def _answer(self, request: int, answer: Any) -> None:
        _, callback = self._requests.pop(request, (None, None))
        self._asked_again.discard(request)
        if callback is not None:  # else it was given up
            callback(answer)

    def _take_losses(self, losses: dict[str, Any]) -> None:
        self._losses = Losses(
            console_lines=losses["console_lines"],
            console_bytes=losses["console_bytes"],
            file_bytes={os.fsdecode(path): count for path, count in losses["file_bytes"].items()},
            own_lines=self._losses.own_lines,
            scribe_restarts=self._restarts,
        )

    def _serve(self, timeout_s: float, hurry_descriptor: int = -1) -> bool:
        """One round of a small loop. Returns whether there is reason to hurry."""
        assert self._channel is not None
        waiter = select.poll()
        waiter.register(self.fileno(), select.POLLIN | (select.POLLOUT if self.wants_to_write else 0))
        if hurry_descriptor >= 0:
            waiter.register(hurry_descriptor, select.POLLIN)
        ready = dict(waiter.poll(max(0.0, timeout_s * 1000 + 1)))
        events = ready.pop(self.fileno(), 0)
        if events & select.POLLOUT:
            self.on_writable()
        if events & ~select.POLLOUT:
            self.on_readable()
        return bool(ready)

    def _start_again(self) -> None:
        assert self._channel is not None
        self._disconnect()
        self._restarts += 1
        self._losses = msgspec.structs.replace(self._losses, scribe_restarts=self._restarts)
        if self._restarts > _MAX_RESTARTS:
            raise LogWriterLost(
                f"the process that writes the logs died {self._restarts} times{self._why_it_died()}; "
                "look at the limits on processes and memory (ulimit -u, the container's limits)"
            )
        self.start()
        for number, descriptor in self._consoles.items():
            self._send(("console", number), [descriptor])
        for stream in self._streams.values():
            self._send((*stream.order, True), [stream.read_end])
        self._send(("live", self._live))
        self._send(("say", self._restart_notice(), False))
        for number, (message, _) in list(self._requests.items()):
            if number not in self._requests:
                continue  # answered meanwhile: this one may have died, too
            if message[0] == "recall" and number in self._asked_again:  # it may be what it dies of
                self._answer(number, {"error": "the process that writes the logs died while it looked for these lines"})
            else:
                self._asked_again.add(number)
                self._send(message)
        if self._finish_order is not None:
            self._send(self._finish_order)

    def _restart_notice(self) -> str:
        return (
            f"tenax: the process that writes the logs died{self._why_it_died()} and was started again; "
            "lines it held in memory are lost"
        )

    def _why_it_died(self) -> str:
        """What it could still say: of its traceback, the line that names the error."""
        said, self._crash = self._crash.strip().rpartition("\n")[2], ""
        return f" ({said})" if said else ""

    def _disconnect(self, *, kill: bool = False) -> None:
        """This scribe is gone, or told to be."""
        if self._channel is None:
            return
        self._channel.close()
        self._channel = None
        if kill:
            os.kill(self.pid, signal.SIGKILL)
        self._unreaped.append(self.pid)
        self._reap(wait=False)

    def _reap(self, *, wait: bool) -> None:
        self._unreaped = [pid for pid in self._unreaped if not _is_collected(pid, wait)]


def _is_collected(pid: int, wait: bool) -> bool:
    """Collect a process that is dead, or, having closed its channel, nearly so."""
    try:
        if wait and hasattr(os, "pidfd_open"):  # bounded: a process stuck in the kernel is left to whoever comes after
            pidfd = os.pidfd_open(pid)
            waiter = select.poll()
            waiter.register(pidfd, select.POLLIN)
            waiter.poll(_SECOND_LOOK_S * 1000)
            os.close(pidfd)
            wait = False
        done, _ = os.waitpid(pid, 0 if wait else os.WNOHANG)
    except (ChildProcessError, ProcessLookupError):  # somebody else collects this process's children
        return True
    return bool(done)


def _file_or_none(path: str | None) -> bytes | None:
    return None if not path or path == os.devnull else os.fsencode(path)


def _enlarge(pipe: int) -> None:
    """Ask for a big pipe, so that a burst does not wait for us. The system may allow less."""
    if not hasattr(fcntl, "F_SETPIPE_SZ"):
        return
    with suppress(OSError):
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
