"""A console: the terminal, pipe or file behind standard output or standard error.

1. Lines of different sources never mix within a line. If a source has left its line open (a progress bar, a line too
   long to wait for), another source closes it first.
2. The console never slows the loop (see ``device_thread``); what it did not take is counted and reported.
3. A console that is gone (no reader, terminal hung up) takes nothing.
4. The live line is the last line of a terminal: erased before other output, redrawn after it, at most one row.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import stat
from collections.abc import Callable
from contextlib import suppress
from itertools import accumulate

from tenax._logs.device_thread import DeviceThread
from tenax._logs.lines import with_prefix

_ERASE_ROW = b"\r\x1b[K"
_GONE = {errno.EPIPE, errno.EIO, errno.EBADF, errno.ENXIO, errno.ECONNRESET, errno.ENOTCONN}


class Console:
    def __init__(
        self, descriptor: int, wake_loop: Callable[[], None], *, limit_bytes: int, stuck_after_s: float
    ) -> None:
        self._descriptor = descriptor
        self.is_terminal = os.isatty(descriptor)
        self.sources = 0  # streams shown here; set by the loop
        self.is_gone = False
        self.is_announced_stuck = False  # set by the loop
        self.refused_reason = ""  # error of the last failed write
        self._open_source: object = None  # the source of the unfinished line
        self._open_at_start = False  # it ended with a carriage return
        # Lines and bytes not shown:
        self._dropped = (0, 0)  # by the loop
        self._refused = (0, 0)  # counted by the device thread
        self._reported = (0, 0)
        self._live = b""
        self._live_waits = False
        self._drawn = b""
        self._unwritten = memoryview(b"")  # of the batch that is being written
        self._row_is_free = True  # the cursor is at the start of a line
        self.device = DeviceThread(
            self._write_batch,
            wake_loop,
            limit_bytes=limit_bytes,
            stuck_after_s=stuck_after_s,
            waiting_in_device=self._waiting_in_device,
        )

    # -- the loop's side

    @property
    def at_returns(self) -> bool:
        """Whether to show text up to a carriage return: only where it cannot break lines of another source."""
        return self.is_terminal or self.sources == 1

    def show(self, source: object, prefix: bytes, text: bytes) -> None:
        """Queue text that ``LineCutter`` returned."""
        if not text:
            return
        if self.is_gone or self.device.drops:
            self._dropped = _plus(self._dropped, text)
            return
        self.report_loss()
        at_returns = self.at_returns
        continues = self._open_source is source and not self._open_at_start
        shown = self._turn_to(source) + with_prefix(text, prefix, continues=continues, at_returns=at_returns)
        if text.endswith(b"\n"):
            self._open_source = None
        else:
            self._open_source, self._open_at_start = source, at_returns and text.endswith(b"\r")
        self.device.put(shown, len(shown))

    def write_line(self, text: str) -> None:
        """Queue whole lines of tenax itself."""
        self.show(self, b"", (text if text.endswith("\n") else text + "\n").encode("utf-8", "replace"))

    def set_live(self, text: str) -> None:
        """Set the live line; empty for none. Only a terminal has one."""
        if self.is_terminal:
            self._live = text.encode("utf-8", "replace")
            if not self._live_waits:
                self._live_waits = True
                self.device.put(b"", 1)  # size 1: redrawing counts as pending

    def report_loss(self) -> None:
        """Write a line where lines are missing, once the device makes progress again."""
        if self._dropped[1] > self._reported[1] and not self.is_gone and not self.device.drops:
            line = self._turn_to(None) + self.unreported_loss().encode() + b"\n"
            self._open_source = None
            self.device.put(line, len(line))

    def unreported_loss(self) -> str:
        """Return the message about losses that were not reported yet, or an empty string. Marks them as reported."""
        lost = self._dropped[0] + self._refused[0], self._dropped[1] + self._refused[1]
        lines, size = lost[0] - self._reported[0], lost[1] - self._reported[1]
        self._reported = lost
        if not size:
            return ""
        count = f"1 line ({size} bytes) was" if lines <= 1 else f"{lines} lines ({size} bytes) were"
        return f"tenax: {count} not shown: {self.refused_reason or 'the terminal did not accept them'}"

    def give_up(self) -> None:
        """At exit: count what the device has not taken, including a queued loss report, as not shown."""
        unshown = b"".join([bytes(self._unwritten), *self.device.withdraw()])
        if unshown:
            self._dropped = _plus(self._dropped, unshown)
            self._reported = (0, 0)

    def _turn_to(self, source: object) -> bytes:
        """Return what must be written before this source may start a line."""
        if self._open_source is None or self._open_source is source:
            return b""
        return _ERASE_ROW if self._open_at_start and self.is_terminal else b"\n"

    def _waiting_in_device(self) -> int:
        """Return how much the kernel holds for the reader: constant while that takes nothing."""
        import termios

        is_pipe = stat.S_ISFIFO(os.fstat(self._descriptor).st_mode)
        answer = b""
        with suppress(OSError):
            answer = fcntl.ioctl(self._descriptor, termios.FIONREAD if is_pipe else termios.TIOCOUTQ, b"\0\0\0\0")
        return int.from_bytes(answer, "little")

    # -- the thread's side

    def _write_batch(self, batch: list[bytes]) -> None:
        text = batch[0] if len(batch) == 1 else b"".join(batch)
        if not self.is_terminal:
            self._write(text)
            return
        self._live_waits = False
        live = self._live_row()
        if not text and live == self._drawn:
            return
        erase = _ERASE_ROW if self._drawn else b""
        if text:
            self._row_is_free = text.endswith(b"\n")
        self._drawn = live if self._row_is_free else b""
        self._write(erase + text + self._drawn)

    def _live_row(self) -> bytes:
        if not self._live:
            return b""
        try:
            width = os.get_terminal_size(self._descriptor).columns or 80
        except OSError:
            width = 80
        return _first_columns(self._live.decode("utf-8", "replace"), width - 1).encode()

    def _write(self, text: bytes) -> None:
        view = self._unwritten = memoryview(text)
        while view and not self.is_gone:
            try:
                count = os.write(self._descriptor, view)
            except BlockingIOError:  # another process that shares it made it non-blocking
                waiter = select.poll()
                waiter.register(self._descriptor, select.POLLOUT)
                waiter.poll()
            except OSError as error:
                # A pipe without a reader or a hung-up terminal is gone permanently; a full disk may recover.
                self.is_gone = error.errno in _GONE
                self.refused_reason = error.strerror or "the write failed"
                break
            else:
                view = self._unwritten = view[count:]
                self.device.on_written(count)
        if view:
            self._refused = _plus(self._refused, bytes(view))
            self._unwritten = memoryview(b"")
            self.device.on_written(len(view))


def _plus(lost: tuple[int, int], text: bytes) -> tuple[int, int]:
    return lost[0] + text.count(b"\n"), lost[1] + len(text)


def _first_columns(text: str, width: int) -> str:
    """Return as much of the text as fits into one row; East Asian characters take two columns."""
    used = accumulate(2 if character >= "\u1100" else 1 for character in text)
    return text[: sum(columns <= width for columns in used)]
