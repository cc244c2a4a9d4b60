"""Signals as events: during a run, the chosen signals become events in the loop's mailbox.

No exception is raised at an arbitrary line. The previous handlers and wake-up descriptor are restored afterwards, so an
agent inside another program leaves no trace. Notice signals announce that the scheduler will stop this node later. A
signal that was ignored at startup stays ignored, as ``nohup`` requires. Outside the main thread Python allows no
handlers, so signals are left to the host program.
"""

from __future__ import annotations

import os
import signal

from tenax._core.events import NoticeReceived, SignalReceived
from tenax._io.interfaces import Watchable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from tenax._io.loop import Loop

DEFAULT_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"


def parse_signals(names: str) -> list[signal.Signals]:
    """Return the signals in a list such as ``"SIGTERM,SIGINT"``. Raises ValueError."""
    chosen: list[signal.Signals] = []
    for name in filter(None, (part.strip() for part in names.split(","))):
        number = getattr(signal, name, None)
        if not isinstance(number, signal.Signals):
            raise ValueError(f"unknown signal {name!r}; use names such as {DEFAULT_SIGNALS}")
        if number in (signal.SIGKILL, signal.SIGSTOP):
            raise ValueError(f"{name} cannot be caught; remove it")
        if number not in chosen:
            chosen.append(number)
    return chosen


class SignalSource(Watchable):
    """A context manager around the loop, which watches it for received signals."""

    def __init__(
        self,
        loop: Loop,
        numbers: list[signal.Signals],
        *,
        notices: list[signal.Signals] | None = None,
        notice_s: float | None = None,
        ask_notice_s: Callable[[], float | None] | None = None,
        exits_afterwards: bool = False,
    ) -> None:
        """``notices``: signals after which the node must leave in ``notice_s`` seconds (None: unknown).

        ``ask_notice_s``: returns them if they are not given. Called in a thread, because it may wait for a scheduler.

        ``exits_afterwards``: ignore the signals after the run, so that a late one cannot change the exit code.
        """
        self._loop = loop
        self._notices = frozenset(notices or ())
        self._numbers = [*numbers, *self._notices]
        self._notice_s = notice_s
        self._ask_notice_s = ask_notice_s
        self._exits_afterwards = exits_afterwards
        self._before: dict[signal.Signals, Any] = {}
        self._wakeup_before = -1
        self._reader = self._writer = -1

    def __enter__(self) -> SignalSource:
        self._reader, self._writer = os.pipe()
        for descriptor in (self._reader, self._writer):
            os.set_blocking(descriptor, False)
        try:
            # The descriptor first: a signal between handler and descriptor would be lost.
            self._wakeup_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        except ValueError:  # this is not the main thread
            self._close()
            return self
        _open_sources.add(self)
        for number in dict.fromkeys(self._numbers):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, lambda *_: None)
        return self

    def __exit__(self, *_: object) -> None:
        if self._reader < 0:
            return
        for number, handler in self._before.items():
            after = signal.SIG_IGN if self._exits_afterwards else handler
            signal.signal(number, after if after is not None else signal.SIG_DFL)
        signal.set_wakeup_fd(self._wakeup_before)
        self.take()
        self._close()

    def _end_in_child(self) -> None:
        """Restore the host's handlers in a forked process. The pipe is the agent's: it must not get these signals."""
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._close()

    def _close(self) -> None:
        _open_sources.discard(self)
        os.close(self._reader)
        os.close(self._writer)
        self._reader = self._writer = -1

    def take(self) -> bytes:
        """Take the signals received so far, and forward the host program's own ones. Returns their numbers."""
        if self._reader < 0:
            return b""
        try:
            received = os.read(self._reader, 4096)
        except BlockingIOError:
            return b""
        if self._wakeup_before >= 0 and (others := bytes(number for number in received if number not in self._before)):
            os.write(self._wakeup_before, others)
        return received

    def fileno(self) -> int:
        return self._reader

    def on_readable(self) -> None:
        for number in self.take():
            if number in self._notices and number in self._before:
                self._post_notice(f"its agent received {signal.Signals(number).name}")
            elif number in self._before:
                self._loop.post(SignalReceived(number))

    def _post_notice(self, why: str) -> None:
        ask = self._ask_notice_s
        if self._notice_s is not None or ask is None:
            self._loop.post(NoticeReceived(why, self._notice_s))
            return

        def post_answer() -> None:
            notice = NoticeReceived(why, ask())
            self._loop.soon(lambda: self._loop.post(notice))

        import threading

        threading.Thread(target=post_answer, daemon=True).start()


_open_sources: set[SignalSource] = set()


def _end_copies() -> None:
    for source in list(_open_sources):
        source._end_in_child()


os.register_at_fork(after_in_child=_end_copies)
