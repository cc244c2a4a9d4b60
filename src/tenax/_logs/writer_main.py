"""The log writer process (``tenax-logs``): takes the workers' output to files and to the console.

It reads every worker's pipes, appends the bytes to files, shows lines on the console, and keeps the last ones in memory
for failure reports and log queries. It makes no decisions about the run. Invariants:

1. A worker's print never fails and never waits longer than ``stuck_after_s`` for a device that takes nothing.
2. A file gets the bytes as they were written. The console gets whole lines, each stream's in order, each once.
3. A slow device slows the workers; only a stuck one loses lines, and losses are counted and reported.
4. It outlives the agent by less than a second, whatever the devices do.
5. It ignores signals, which are for the agent, and exits on the agent's command or when the agent is gone.
6. Its memory is bounded: the last 64 KiB of each stream, and a fixed total for streams that have ended.

One thread runs the loop and never blocks on a device; each device has a ``DeviceThread``. Messages (see ``writer``):

    from the agent:  settings, console, open (both with a descriptor), tail, output_times, query, answer_now, print,
                     live, drain, forget, finish
    to the agent:    answer (to tail, output_times, query and drain), flushing, finished, crashed
"""

from __future__ import annotations

import os
import select
import signal
import time
from contextlib import suppress

from tenax._io.helper_channel import Channel, ChannelClosed
from tenax._logs.console import Console
from tenax._logs.device_thread import DeviceThread, install_interrupt_handler
from tenax._logs.lines import LineCutter, lines_with, with_prefix
from tenax._logs.log_file import LogFile
from tenax._logs.tail import TAIL_BYTES, Tail

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any, NoReturn

    from tenax._logs.live_step import LiveStep
    from tenax._logs.queries import LogQueries, StreamRequest

    Key = Any

PIPE_BYTES = 1 << 18  # requested size of each stream's pipe
_READ_BYTES = 1 << 18
_FORCED_BYTES = 1 << 26  # how much a device may queue beyond its limit during a drain
# After the agent's death:
_ORPHAN_DRAIN_S = 0.4  # read until then,
_ORPHAN_FLUSH_S = 0.55  # write until then,
_ORPHAN_END_S = 0.65  # and have the kernel kill this process then
_FLUSHING_EVERY_S = 0.2
_NEVER = float("inf")
_MAX_ENDED_BYTES = 16 << 20  # kept of ended streams
_MAX_ENDED_GENERATIONS = 8


class Stream:
    """One worker's stdout or stderr."""

    file: LogFile | None = None
    filtered: LogFile | None = None  # gets the lines with one of the needles
    console: Console | None = None
    prefix = b""
    whole_lines = True
    is_terminal = False  # a pseudo-terminal, not a pipe
    is_resumed = False  # an earlier log writer, which has died, read the first part
    is_watched = False

    def __init__(self, key: Key, descriptor: int) -> None:
        self.key = key
        self.descriptor = descriptor  # -1 when the stream has ended
        self.needles: list[bytes] = []
        self.cutter = LineCutter()
        self.tail = Tail()


class LogWriterProcess:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._streams: dict[Key, Stream] = {}
        self._by_descriptor: dict[int, Stream] = {}
        self._files: dict[bytes, LogFile] = {}
        # Requests to be answered at a deadline, or when these streams (None: all) have ended and are in their files.
        self._drains: list[tuple[int, float, set[Key] | None]] = []
        self._lost_in_files: dict[str, tuple[int, str]] = {}  # bytes and why, by path
        self._reported_reasons: set[str] = set()
        self._held: set[DeviceThread] = set()
        self._is_forcing = False
        self._orphaned_at: float | None = None
        self._ended: list[dict[Key, Stream]] = []  # by generation, the oldest first
        self._waiting_lines: list[str] = []  # the agent's, until all output before them is delivered
        self._queries: LogQueries | None = None  # created by the first query
        self._incarnation = 0
        self._poll = select.poll()
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_reader, False)
        os.set_blocking(self._wake_writer, False)
        self._poll.register(self._wake_reader, select.POLLIN)
        self._poll.register(channel.fileno(), select.POLLIN)
        self._is_configured = False
        # Text, the time since which or until which it counts, and the progress file of the worker whose step it shows.
        self._live: list[Any] = ["", None, None, ""]
        self._step: tuple[str, LiveStep] | None = None
        self._live_at = _NEVER  # when to draw it again

    def _configure(self, stuck_after_s: float, queue_bytes: int, incarnation: int = 0) -> None:
        self._incarnation = incarnation
        self._limits: dict[str, Any] = {"limit_bytes": queue_bytes, "stuck_after_s": stuck_after_s}
        self._file_device = DeviceThread(self._write_to_files, self._wake, **self._limits)
        self._devices = [self._file_device]
        self._consoles: dict[int, Console] = {}  # by number
        self._open_console(1, 1)
        # One console behind both descriptors has one DeviceThread; otherwise their lines would mix.
        if not os.path.samestat(os.fstat(1), os.fstat(2)):
            self._open_console(2, 2)
        self._err = self._consoles.get(2, self._consoles[1])
        self._is_configured = True

    def _open_console(self, descriptor: int, number: int) -> None:
        """Open a console. From number 3 on, it is a pipe to the agent, which writes to a replaced stream."""
        self._consoles[number] = Console(descriptor, self._wake, **self._limits)
        self._devices.append(self._consoles[number].device)

    @property
    def _output_devices(self) -> list[DeviceThread]:
        """All devices but standard error."""
        return [device for device in self._devices if device is not self._err.device]

    # -- the loop

    def run(self) -> NoReturn:
        while True:
            for descriptor, _ in self._poll.poll(self._timeout_ms()):
                if descriptor == self._wake_reader:
                    os.read(descriptor, 4096)
                elif descriptor == self._channel.fileno():
                    self._on_channel()
                elif descriptor in self._by_descriptor:
                    self._read(self._by_descriptor[descriptor])
            self._settle()

    def _settle(self) -> None:
        """After every round: update the devices, report losses, answer drains and queries, pause streams."""
        if not self._is_configured:
            return
        now = time.monotonic()
        if now >= self._live_at:
            self._draw_live(now)
        for device in self._devices:
            device.update(now)
        self._report_new_losses()
        self._answer_drains(now)
        if self._waiting_lines and not self._undelivered(now):
            self._print_waiting_lines()
        if self._queries is not None:
            self._queries.update(now)
        if self._orphaned_at is not None and (not self._by_descriptor or now >= self._orphaned_at + _ORPHAN_DRAIN_S):
            self._end(_ORPHAN_FLUSH_S, until=self._orphaned_at + _ORPHAN_FLUSH_S)
        self._update_watched()

    def _draw_live(self, now: float) -> None:
        """Draw the live line, and again every second if it counts and is on a terminal."""
        text, since, until, progress = self._live
        if progress and self._err.is_terminal and (step := self._live_step(progress)):
            text += f", {step}"
        if until is not None:
            text += f", SIGKILL in {max(0.0, until - now):.0f} s"
        elif since is not None:
            text += f", {_clock(now - since)}"
        self._err.set_live(text)
        counts = text != self._live[0] and self._err.is_terminal and not self._err.is_gone
        self._live_at = now + 1.0 - ((now - (until or since or now)) % 1.0) if counts else _NEVER

    def _live_step(self, progress: str) -> str:
        if self._step is None or self._step[0] != progress:
            try:
                from tenax._logs.live_step import LiveStep
            except Exception:  # tenax may have been upgraded meanwhile; the log writer must not crash
                return ""
            self._step = progress, LiveStep(progress)
        return self._step[1].text()

    def _timeout_ms(self) -> float | None:
        deadlines = [self._live_at, *(deadline for _, deadline, _ in self._drains)]
        if self._is_configured:
            deadlines += [device.deadline for device in self._devices if device.deadline is not None]
        if self._waiting_lines:
            deadlines += [
                device.window_deadline for device in self._output_devices if device.pending and not device.stuck
            ]
        if self._queries is not None:
            deadlines.append(self._queries.next_deadline)
        if self._orphaned_at is not None:
            deadlines.append(self._orphaned_at + _ORPHAN_DRAIN_S)
        first = min(deadlines)
        return max(0.0, (first - time.monotonic()) * 1000 + 1) if first < _NEVER else None

    def _wake(self) -> None:
        """Wake the loop; called by the device threads."""
        with suppress(BlockingIOError):  # full: a wakeup is already pending
            os.write(self._wake_writer, b"!")

    def _update_watched(self) -> None:
        """Watch only the streams whose devices keep up."""
        limit = _FORCED_BYTES if self._is_forcing else 0
        held = {device for device in self._devices if device.holding and device.pending > limit}
        if held != self._held:
            self._held = held
            for stream in self._by_descriptor.values():
                self._watch(stream)

    def _watch(self, stream: Stream) -> None:
        should = not (
            (stream.console is not None and stream.console.device in self._held)
            or ((stream.file or stream.filtered) is not None and self._file_device in self._held)
        )
        if should and not stream.is_watched:
            self._poll.register(stream.descriptor, select.POLLIN)
        elif stream.is_watched and not should:
            self._poll.unregister(stream.descriptor)
        stream.is_watched = should

    # -- streams

    def _read(self, stream: Stream) -> int:
        """Read once. Return the number of bytes."""
        try:
            data = os.read(stream.descriptor, _READ_BYTES)
        except BlockingIOError:
            return 0
        except OSError:
            if not stream.is_terminal:
                raise
            data = b""  # EIO: all writers of a pseudo-terminal are gone
        if data:
            if stream.is_terminal:  # keep its size up to date: the worker reads it whenever it draws
                from tenax._logs.pseudo_terminal import copy_size

                copy_size(1, stream.descriptor)
            self._deliver(stream, data)
        else:
            self._end_stream(stream)
        return len(data)

    def _read_available(self, stream: Stream) -> None:
        """Read what is in the pipe now, and not much more if the worker keeps writing."""
        left = PIPE_BYTES
        while stream.descriptor >= 0 and left >= 0:  # >=: after a full pipe, read once more for its end
            count = self._read(stream)
            if not count:
                return
            left -= count

    def _deliver(self, stream: Stream, data: bytes) -> None:
        at = time.time()
        stream.tail.add(data, at)
        if stream.file is not None:
            self._append(stream.file, data, at)
        if not stream.whole_lines:
            self._show(stream, data)
        elif stream.console is not None or stream.needles:
            at_returns = stream.console is not None and stream.console.at_returns
            self._show(stream, stream.cutter.cut(data, at_returns=at_returns))

    def _show(self, stream: Stream, text: bytes) -> None:
        if stream.console is not None:
            stream.console.show(stream, stream.prefix, text)
        if stream.filtered is not None and stream.needles:
            found = lines_with(text, stream.needles)
            if found:
                self._append(stream.filtered, with_prefix(found, stream.prefix))

    def _end_stream(self, stream: Stream) -> None:
        """Flush the unfinished line and close: all writers are gone, or the stream is being closed."""
        rest = stream.cutter.end()
        if rest:
            self._show(stream, rest + b"\n")
        if stream.is_watched:
            self._poll.unregister(stream.descriptor)
            stream.is_watched = False
        del self._by_descriptor[stream.descriptor]
        os.close(stream.descriptor)
        stream.descriptor = -1
        if stream.console is not None:
            stream.console.sources -= 1
        for file in (stream.file, stream.filtered):
            if file is not None:
                self._release(file)

    # -- files

    def _use(self, path: bytes) -> LogFile | None:
        if not path:
            return None
        file = self._files.get(path)
        if file is None:
            file = self._files[path] = LogFile(path)
            self._hand_over(file)
        file.users += 1
        file.had_more_users |= file.users > 1
        return file

    def _append(self, file: LogFile, data: bytes, at: float = 0.0) -> None:
        if self._file_device.drops:
            file.not_handed_over += len(data)
        else:
            self._hand_over(file, data, at=at)

    def _release(self, file: LogFile) -> None:
        file.users -= 1
        if not file.users:
            del self._files[file.path]
            self._hand_over(file, is_last=True)

    def _hand_over(self, file: LogFile, data: bytes = b"", *, is_last: bool = False, at: float = 0.0) -> None:
        skipped, file.not_handed_over = file.not_handed_over, 0
        self._file_device.put((file, data, skipped, is_last, at), len(data) or 1)  # 1: opening counts as pending

    def _write_to_files(self, batch: list[tuple[LogFile, bytes, int, bool, float]]) -> None:
        """Runs in the file device's thread."""
        for file, data, skipped, is_last, at in batch:
            if skipped:
                file.skip(skipped, "the disk was too slow")
            if data:
                file.append(data, at)
                self._file_device.on_written(len(data))
            elif not is_last:
                file.open()
            if is_last:
                file.close()
            if file.reason:
                path, lost = file.path.decode("utf-8", "backslashreplace"), (file.lost_bytes, file.reason)
                if self._lost_in_files.get(path) != lost:
                    self._lost_in_files[path] = lost
                    self._wake()

    # -- losses

    def _report_new_losses(self) -> None:
        for console in self._consoles.values():
            console.report_loss()
            if console.device.stuck and console is not self._err and not console.is_announced_stuck:
                console.is_announced_stuck = True
                self._err.write_line(
                    "tenax: stdout is blocked: its lines are dropped and counted until it accepts output again"
                )
        for path, (_, reason) in self._file_losses() if self._lost_in_files else ():
            if reason not in self._reported_reasons:
                self._reported_reasons.add(reason)
                self._err.write_line(
                    f"tenax: could not write {path}: {reason}; the workers continue, and lost bytes are counted"
                )

    def _report_final_losses(self) -> None:
        lost = [(path, count, reason) for path, (count, reason) in self._file_losses() if count]
        if lost:
            where, _, reason = lost[0]
            where += f" and {len(lost) - 1} more" if len(lost) > 1 else ""
            self._err.write_line(f"tenax: {sum(count for _, count, _ in lost)} bytes are missing in {where}: {reason}")
        for console in self._consoles.values():
            if console is not self._err or console.refused_reason:
                loss = console.unreported_loss()
                if loss:
                    self._err.write_line(loss)

    def _file_losses(self) -> list[tuple[str, tuple[int, str]]]:
        return list(self._lost_in_files.items())  # a copy: the file thread adds to it

    # -- messages

    def _on_channel(self) -> None:
        try:
            self._channel.flush()
            for message, descriptors in self._channel.receive():
                self._on_message(message, descriptors)
            if self._orphaned_at is None:  # an answer did not fail
                writes = select.POLLOUT if self._channel.wants_to_write else 0
                self._poll.modify(self._channel.fileno(), select.POLLIN | writes)
        except ChannelClosed:
            self._on_orphaned()

    def _send(self, message: tuple[Any, ...]) -> None:
        try:
            self._channel.send(message)
            if self._channel.wants_to_write:
                self._poll.modify(self._channel.fileno(), select.POLLIN | select.POLLOUT)
        except ChannelClosed:
            self._on_orphaned()

    def _answer(self, request: int, answer: Any) -> None:
        self._send(("answer", request, answer))

    def _on_orphaned(self) -> None:
        """The agent is gone: drain, flush and exit within the limits above."""
        if self._orphaned_at is None:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, _ORPHAN_END_S)
            if not self._is_configured:
                os._exit(0)
            self._orphaned_at = time.monotonic()
            self._is_forcing = True
            self._poll.unregister(self._channel.fileno())

    def _on_message(self, message: tuple[Any, ...], descriptors: list[int]) -> None:
        kind, *values = message
        if kind == "settings":
            self._configure(*values)
        elif kind == "open":
            self._open_stream(descriptors[0], *values)
        elif kind == "console":
            self._open_console(descriptors[0], *values)
        elif kind == "print":
            self._print(*values)
        elif kind == "live":
            self._live, self._live_at = values, 0.0
        elif kind == "tail":
            self._send_tails(*values)
        elif kind == "output_times":
            request, keys = values
            streams = [self._streams[key] for key in keys if key in self._streams]
            self._answer(request, {stream.key: stream.tail.last_at for stream in streams if stream.tail.last_at})
        elif kind == "query":
            self._query(*values)
        elif kind == "answer_now":
            if self._queries is not None:
                self._queries.answer_now(time.monotonic(), values)
        elif kind == "drain":
            request, timeout_s, keys = values
            self._drains.append((request, time.monotonic() + timeout_s, None if keys is None else set(keys)))
            self._is_forcing = self._file_device.wake_when_empty = True
        elif kind == "forget":
            self._forget(values[0])
        elif kind == "finish":
            self._end(values[0])
        else:
            raise ValueError(f"unknown message to the log writer: {kind!r}")

    def _open_stream(self, descriptor: int, key: Key, *values: Any) -> None:
        os.set_blocking(descriptor, False)
        stream = Stream(key, descriptor)
        path, filter_path, console, stream.prefix, stream.needles, *flags = values
        stream.whole_lines, stream.is_terminal, stream.is_resumed = flags
        stream.file, stream.filtered = self._use(path), self._use(filter_path)
        if console:
            stream.console = self._err if console == 2 else self._consoles[console]
            stream.console.sources += 1
        if stream.is_resumed and path:
            stream.tail = _end_of_file(path)
        self._streams[key] = stream
        self._by_descriptor[descriptor] = stream
        self._watch(stream)

    def _send_tails(self, request: int, keys: Iterable[Key]) -> None:
        streams = [self._streams[key] for key in keys if key in self._streams]
        for stream in streams:
            self._read_available(stream)
        self._answer(request, {stream.key: stream.tail.last_bytes() for stream in streams})

    # -- the agent's own lines

    def _print(self, text: str, after_output: bool) -> None:
        """Show the agent's lines at once, or after all output so far."""
        if after_output:
            for stream in list(self._by_descriptor.values()):
                self._read_available(stream)
            for device in self._output_devices if not self._waiting_lines else ():
                device.wake_when_empty = True
                if not device.holding:  # otherwise its window has begun
                    device.begin_window(time.monotonic())
        if after_output or self._waiting_lines:
            self._waiting_lines.append(text)  # shown by _settle
        else:
            self._err.write_line(text)

    def _undelivered(self, now: float) -> bool:
        """Return whether a device other than standard error has pending data and is not stuck."""
        # A list, not a generator: every device's window must be checked.
        return any(
            [device.pending and not device.stuck and not device.is_stalled(now) for device in self._output_devices]
        )

    def _print_waiting_lines(self) -> None:
        lines, self._waiting_lines = self._waiting_lines, []
        for device in self._output_devices:
            device.wake_when_empty = False
        for line in lines:
            self._err.write_line(line)

    def _query(self, request: int, streams: list[StreamRequest], asked: dict[str, Any], incarnation: int) -> None:
        if self._queries is None:
            try:
                from tenax._logs.queries import LogQueries
            except Exception as error:  # tenax may have been upgraded meanwhile; the log writer must not crash
                self._answer(request, {"error": f"log queries are not available: {type(error).__name__}: {error}"})
                return
            self._queries = LogQueries(
                self._find, self._answer, self._wake, self._incarnation, lambda: self._file_device.pending > 0
            )
        for key, *_ in streams:
            stream = self._streams.get(key)
            if stream is not None and stream.is_watched:  # a paused one stays paused
                self._read_available(stream)
        self._queries.add(request, streams, asked, incarnation, time.monotonic())

    def _find(self, key: Key) -> Stream | None:
        return next((streams[key] for streams in (self._streams, *self._ended[::-1]) if key in streams), None)

    def _forget(self, keys: Iterable[Key]) -> None:
        """Close these streams, and keep the ends of the most recent ones for queries."""
        ended: dict[Key, Stream] = {}
        for key in keys:
            stream = self._streams.pop(key, None)
            if stream is not None:
                self._read_available(stream)
                if stream.descriptor >= 0:
                    self._end_stream(stream)
                stream.tail.trim()
                ended[key] = stream
        if ended:
            self._ended.append(ended)
        sizes = [sum(stream.tail.size for stream in streams.values()) for streams in self._ended]
        while len(sizes) > _MAX_ENDED_GENERATIONS or sum(sizes) > _MAX_ENDED_BYTES:
            del self._ended[0], sizes[0]

    def _answer_drains(self, now: float) -> None:
        waiting = []
        for request, deadline, keys in self._drains:
            open_keys = [stream.key for stream in self._by_descriptor.values()]
            still_open = [key for key in open_keys if keys is None or key in keys]
            if (still_open or self._file_device.pending) and now < deadline:
                waiting.append((request, deadline, keys))
            else:
                self._answer(request, still_open)
        self._drains = waiting
        self._is_forcing = bool(waiting) or self._orphaned_at is not None
        self._file_device.wake_when_empty = bool(waiting) or bool(self._waiting_lines)

    # -- the end

    def _end(self, timeout_s: float, until: float = _NEVER) -> NoReturn:
        """Read what is left in the pipes, flush while the devices make progress, and exit."""
        for stream in list(self._by_descriptor.values()):
            self._read_available(stream)
            if stream.descriptor >= 0:
                self._end_stream(stream)
        self._err.set_live("")
        self._live_at = _NEVER
        for console in self._consoles.values():
            console.report_loss()
        # Files and standard output first: the losses of both are reported on standard error.
        self._flush(self._file_device, timeout_s, until)
        for console in self._consoles.values():
            if console is not self._err:
                self._flush(console.device, timeout_s, until)
                console.give_up()
        self._print_waiting_lines()
        self._report_final_losses()
        self._flush(self._err.device, timeout_s, until)
        self._err.give_up()
        self._send(("finished",))
        os._exit(0)

    def _flush(self, device: DeviceThread, timeout_s: float, until: float) -> None:
        """Wait until this device is empty or stalled. Report progress of any device to the agent regularly."""
        now = time.monotonic()
        device.stuck_after_s = timeout_s
        device.begin_window(now)
        device.wake_when_empty = True
        reported, report_at = sum(each.written for each in self._devices), now + _FLUSHING_EVERY_S
        while now < until and device.pending and not device.is_stalled(now):
            if now >= report_at:
                report_at = now + _FLUSHING_EVERY_S
                written = sum(each.written for each in self._devices)
                if written != reported:
                    reported = written
                    self._send(("flushing",))
            if self._orphaned_at is not None:
                until = min(until, self._orphaned_at + _ORPHAN_FLUSH_S)
            self._wait_for_devices(min(until, report_at, device.window_deadline) - now)
            now = time.monotonic()

    def _wait_for_devices(self, timeout_s: float) -> None:
        """Wait until a device wakes this loop. After ``finish``, only the agent's death matters of its messages."""
        waiter = select.poll()
        waiter.register(self._wake_reader, select.POLLIN)
        if self._orphaned_at is None:
            waiter.register(self._channel.fileno(), select.POLLIN)
        for descriptor, _ in waiter.poll(max(0.0, timeout_s * 1000 + 1)):
            if descriptor == self._wake_reader:
                os.read(self._wake_reader, 4096)
            else:
                try:
                    list(self._channel.receive())
                except ChannelClosed:
                    self._on_orphaned()


def _end_of_file(path: bytes) -> Tail:
    """Return the last bytes of a log that an earlier log writer began."""
    tail = Tail()
    with suppress(OSError), open(path, "rb") as file:  # otherwise start empty
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - TAIL_BYTES))
        tail.data += file.read(TAIL_BYTES)
        tail.end = file.tell()
    return tail


def _clock(seconds: float) -> str:
    """Return a time as ``0:07``, ``12:30`` or ``1:02:30``."""
    minutes, rest = divmod(int(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def main(descriptor: int) -> NoReturn:
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGTTOU", "SIGTSTP", "SIGUSR2"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    install_interrupt_handler()
    channel = Channel.from_descriptor(descriptor)
    try:
        LogWriterProcess(channel).run()
    except BaseException:
        import traceback

        try:
            channel.send(("crashed", traceback.format_exc()))
        finally:
            os._exit(70)
