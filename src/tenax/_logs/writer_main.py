"""The scribe: the process between the workers' output and everything that may refuse it.

It reads every worker's pipes, appends the bytes to files, shows lines on the console, and remembers the last of them
for a failure report and for whoever asks. It decides nothing about the run. Its laws:

1. A worker's print never fails and never waits for longer than ``stuck_after_s`` on a device that takes nothing.
2. A file gets the bytes as they were written. The console gets whole lines, each stream's in order, each once.
3. A slow device slows the workers; only a stuck one loses lines, and what is lost is counted and said.
4. It outlives the agent by less than a second, whatever the devices do.
5. Signals are for the agent: the scribe goes when the agent says so or is gone.
6. What it remembers is bounded: of each stream the last 64 KiB, and of streams that are over so much in all.

One thread runs the loop and never blocks on a device; each device has a ``DeviceThread``. Messages (see ``scribe``):

    from the agent:  settings, console, open (both with a descriptor), tail, recall, hurry, say, live, drain, forget,
                     finish
    to the agent:    tails, recalled, drained, flushing, finished, crashed
"""

from __future__ import annotations

import os
import select
import signal
import time
from contextlib import suppress

from tenax._io.channel import Channel, ChannelClosed
from tenax._logs.console import Console
from tenax._logs.device_thread import DeviceThread, allow_kicks
from tenax._logs.lines import LineCutter, lines_with, with_prefix
from tenax._logs.log_file import LogFile
from tenax._logs.tail import TAIL_BYTES, Tail

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any, NoReturn

    from tenax._logs.queries import LogQueries, Want

    Key = Any

PIPE_BYTES = 1 << 18  # what we ask the kernel to hold for each stream
_READ_BYTES = 1 << 18
_FORCED_BYTES = 1 << 26  # how far past its limit a lane may grow when a drain does not wait for it
_ORPHAN_DRAIN_S = 0.4  # the agent is gone: read what comes until then,
_ORPHAN_FLUSH_S = 0.55  # write it until then,
_ORPHAN_END_S = 0.65  # and let the kernel end us then, whatever blocks
_FLUSHING_EVERY_S = 0.2
_MAX_PAST_BYTES = 16 << 20  # of streams that are over,
_MAX_PASTS = 8  # and of so many generations


class Stream:
    """One worker's stdout or stderr, on its way."""

    def __init__(
        self,
        key: Key,
        descriptor: int,
        file: LogFile | None,
        console: Console | None,
        prefix: bytes,
        needles: list[bytes],
        filtered: LogFile | None,
        whole_lines: bool,
        is_resumed: bool = False,
    ) -> None:
        self.key = key
        self.descriptor = descriptor  # -1 when the stream has ended
        self.file = file
        self.console = console
        self.prefix = prefix
        self.needles = needles
        self.filtered = filtered
        self.whole_lines = whole_lines
        self.cutter = LineCutter()
        self.tail = Tail()
        self.is_resumed = is_resumed  # what came before was known to a scribe that has died
        self.is_watched = False


class Drain:
    """A request to be told when these streams have ended and are in their files."""

    def __init__(self, request: int, deadline: float, keys: set[Key] | None) -> None:
        self.request = request
        self.deadline = deadline
        self.keys = keys


class LogWriterProcess:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._streams: dict[Key, Stream] = {}
        self._by_descriptor: dict[int, Stream] = {}
        self._files: dict[bytes, LogFile] = {}
        self._drains: list[Drain] = []
        self._lost_in_files: dict[bytes, tuple[int, str]] = {}
        self._told_reasons: set[str] = set()
        self._held: set[DeviceThread] = set()
        self._is_forcing = False
        self._orphaned_at: float | None = None
        self._past: dict[Key, Stream] = {}  # over, the oldest first
        self._past_keys: list[list[Key]] = []  # those that were over together
        self._past_bytes = 0
        self._waiting_lines: list[bytes] = []  # the agent's, until all output before them is delivered
        self._recalls: LogQueries | None = None  # made when somebody asks
        self._incarnation = 0
        self._poll = select.poll()
        self._wake_end, self._wake_start = os.pipe()
        os.set_blocking(self._wake_end, False)
        os.set_blocking(self._wake_start, False)
        self._poll.register(self._wake_end, select.POLLIN)
        self._poll.register(channel.fileno(), select.POLLIN)
        self._is_configured = False

    def _configure(self, stuck_after_s: float, queue_bytes: int, incarnation: int = 0) -> None:
        self._incarnation = incarnation
        self._file_lane = DeviceThread(
            self._write_to_files, self._wake, limit_bytes=queue_bytes, stuck_after_s=stuck_after_s
        )
        self._out = Console(1, self._wake, limit_bytes=queue_bytes, stuck_after_s=stuck_after_s)
        self._err = self._out
        if not os.path.samestat(os.fstat(1), os.fstat(2)):
            # One console behind both descriptors has one lane, or their lines would mix.
            self._err = Console(2, self._wake, limit_bytes=queue_bytes, stuck_after_s=stuck_after_s)
        self._consoles = [self._out] if self._err is self._out else [self._out, self._err]
        self._lanes = [self._file_lane, *(console.lane for console in self._consoles)]
        self._output_lanes = [lane for lane in self._lanes if lane is not self._err.lane]
        self._by_number: dict[int, Console | None] = {0: None, 1: self._out, 2: self._err}
        self._limits = (queue_bytes, stuck_after_s)
        self._is_configured = True

    # -- the loop

    def run(self) -> NoReturn:
        while True:
            for descriptor, _ in self._poll.poll(self._timeout_ms()):
                if descriptor == self._wake_end:
                    os.read(descriptor, 4096)
                elif descriptor == self._channel.fileno():
                    self._on_channel()
                elif descriptor in self._by_descriptor:
                    self._read(self._by_descriptor[descriptor])
            self._settle()

    def _settle(self) -> None:
        """After every round: who must pause, who waits for an answer, what is to be said."""
        if not self._is_configured:
            return
        now = time.monotonic()
        for lane in self._lanes:
            lane.judge(now)
        self._say_new_losses()
        self._answer_drains(now)
        if self._waiting_lines and not self._undelivered(now):
            self._say_waiting_lines()
        if self._recalls is not None:
            self._recalls.look(now)
        if self._orphaned_at is not None and (not self._by_descriptor or now >= self._orphaned_at + _ORPHAN_DRAIN_S):
            self._end(_ORPHAN_FLUSH_S, until=self._orphaned_at + _ORPHAN_FLUSH_S)
        self._hold_back()

    def _timeout_ms(self) -> float | None:
        deadlines = [drain.deadline for drain in self._drains]
        if self._is_configured:
            deadlines += [lane.deadline for lane in self._lanes if lane.deadline is not None]
        if self._waiting_lines:
            deadlines += [lane.window_deadline for lane in self._output_lanes if lane.pending and not lane.stuck]
        if self._recalls is not None and (look_at := self._recalls.next_deadline) is not None:
            deadlines.append(look_at)
        if self._orphaned_at is not None:
            deadlines.append(self._orphaned_at + _ORPHAN_DRAIN_S)
        if not deadlines:
            return None
        return max(0.0, (min(deadlines) - time.monotonic()) * 1000 + 1)

    def _wake(self) -> None:
        """Called by the lanes' threads."""
        with suppress(BlockingIOError):  # full: it is awake enough
            os.write(self._wake_start, b"!")

    def _hold_back(self) -> None:
        """Watch exactly the streams whose devices keep up."""
        limit = _FORCED_BYTES if self._is_forcing else 0
        held = {lane for lane in self._lanes if lane.holding and lane.pending > limit}
        if held != self._held:
            self._held = held
            for stream in self._by_descriptor.values():
                self._watch(stream)

    def _watch(self, stream: Stream) -> None:
        should = not (
            (stream.console is not None and stream.console.lane in self._held)
            or ((stream.file or stream.filtered) is not None and self._file_lane in self._held)
        )
        if should and not stream.is_watched:
            self._poll.register(stream.descriptor, select.POLLIN)
        elif stream.is_watched and not should:
            self._poll.unregister(stream.descriptor)
        stream.is_watched = should

    # -- streams

    def _read(self, stream: Stream) -> int:
        """Read once. Returns how much there was."""
        try:
            data = os.read(stream.descriptor, _READ_BYTES)
        except BlockingIOError:
            return 0
        if data:
            self._deliver(stream, data)
        else:
            self._end_stream(stream)
        return len(data)

    def _read_what_is_there(self, stream: Stream) -> None:
        """All that was in the pipe when this was called, and, if the worker goes on writing, not much more."""
        left = PIPE_BYTES
        while stream.descriptor >= 0 and left >= 0:  # a full pipe is followed by its end, if that was there too
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
        """The last process that could write to it is gone, or we are."""
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

    def _use(self, path: bytes | None) -> LogFile | None:
        if path is None:
            return None
        file = self._files.get(path)
        if file is None:
            file = self._files[path] = LogFile(path)
            self._file_lane.put((file, b"", 0, False, 0.0), 1)  # not 0: an order is pending, too
        file.users += 1
        file.had_more_users |= file.users > 1
        return file

    def _append(self, file: LogFile, data: bytes, at: float = 0.0) -> None:
        if self._file_lane.drops:
            file.not_handed_over += len(data)
            return
        skipped, file.not_handed_over = file.not_handed_over, 0
        self._file_lane.put((file, data, skipped, False, at), len(data))

    def _release(self, file: LogFile) -> None:
        file.users -= 1
        if not file.users:
            del self._files[file.path]
            skipped, file.not_handed_over = file.not_handed_over, 0
            self._file_lane.put((file, b"", skipped, True, 0.0), 1)

    def _write_to_files(self, batch: list[tuple[LogFile, bytes, int, bool, float]]) -> None:
        """In the file lane's thread."""
        for file, data, skipped, is_last, at in batch:
            if skipped:
                file.skip(skipped, "the disk did not take them in time")
            if data:
                file.append(data, at)
                self._file_lane.moved_by(len(data))
            elif not is_last:
                file.open()
            if is_last:
                file.close()
            if file.reason and (file.lost_bytes, file.reason) != self._lost_in_files.get(file.path):
                self._lost_in_files[file.path] = (file.lost_bytes, file.reason)
                self._wake()

    # -- what was lost

    def _say_new_losses(self) -> None:
        for console in self._consoles:
            console.tell_of_loss()
            if console.lane.stuck and console is not self._err and not console.is_announced_stuck:
                console.is_announced_stuck = True
                self._err.say(b"tenax: standard output takes no more: its lines are dropped and counted until it does.")
        for path, (_, reason) in self._file_losses() if self._lost_in_files else ():
            if reason not in self._told_reasons:
                self._told_reasons.add(reason)
                self._err.say(
                    f"tenax: cannot write {_text(path)}: {reason}. The workers go on; "
                    "what cannot be kept is counted.".encode()
                )

    def _say_final_losses(self) -> None:
        lost = [(path, count, reason) for path, (count, reason) in self._file_losses() if count]
        if lost:
            first, _, reason = lost[0]
            where = _text(first) + (f" and {len(lost) - 1} more" if len(lost) > 1 else "")
            self._err.say(
                f"tenax: {sum(count for _, count, _ in lost)} bytes are missing in {where}: {reason}.".encode()
            )
        for console in self._consoles:
            if console is not self._err or console.refused_reason:
                told = console.untold_loss()
                if told:
                    self._err.say(told.encode())

    def _file_losses(self) -> list[tuple[bytes, tuple[int, str]]]:
        return list(self._lost_in_files.items())  # a copy: the file lane's thread adds to it

    def _losses(self) -> dict[str, Any]:
        lines = sum(console.lost[0] for console in self._consoles)
        size = sum(console.lost[1] for console in self._consoles)
        files = {path: count for path, (count, _) in self._file_losses() if count}
        return {"console_lines": lines, "console_bytes": size, "file_bytes": files}

    # -- messages

    def _on_channel(self) -> None:
        try:
            self._channel.flush()
            for message, descriptors in self._channel.receive():
                self._obey(message, descriptors)
            self._poll.modify(
                self._channel.fileno(), select.POLLIN | (select.POLLOUT if self._channel.wants_to_write else 0)
            )
        except ChannelClosed:
            self._on_orphaned()

    def _tell(self, message: tuple[Any, ...]) -> None:
        try:
            self._channel.send(message)
            if self._channel.wants_to_write:
                self._poll.modify(self._channel.fileno(), select.POLLIN | select.POLLOUT)
        except ChannelClosed:
            self._on_orphaned()

    def _on_orphaned(self) -> None:
        """The agent is gone. So are we, in a moment."""
        if self._orphaned_at is None:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, _ORPHAN_END_S)
            if not self._is_configured:
                os._exit(0)
            self._orphaned_at = time.monotonic()
            self._is_forcing = True
            self._poll.unregister(self._channel.fileno())

    def _obey(self, message: tuple[Any, ...], descriptors: list[int]) -> None:
        order, *values = message
        if order == "settings":
            self._configure(*values)
        elif order == "open":
            self._open_stream(descriptors[0], *values)
        elif order == "console":
            self._open_console(descriptors[0], *values)
        elif order == "say":
            self._say(values[0].encode("utf-8", "replace"), after_output=values[1])
        elif order == "live":
            self._err.set_live(values[0])
        elif order == "tail":
            self._send_tails(*values)
        elif order == "recall":
            self._recall(*values)
        elif order == "hurry":
            if self._recalls is not None:
                self._recalls.hurry(time.monotonic(), values)
        elif order == "drain":
            request, timeout_s, keys = values
            self._drains.append(Drain(request, time.monotonic() + timeout_s, None if keys is None else set(keys)))
            self._is_forcing = self._file_lane.wake_when_empty = True
        elif order == "forget":
            self._forget(values[0])
        elif order == "finish":
            self._end(values[0])
        else:
            raise ValueError(f"The scribe got an order that it does not know: {order!r}.")

    def _open_console(self, descriptor: int, number: int) -> None:
        """A pipe to the agent, which writes the lines to an object of its own."""
        queue_bytes, stuck_after_s = self._limits
        console = Console(descriptor, self._wake, limit_bytes=queue_bytes, stuck_after_s=stuck_after_s)
        self._by_number[number] = console
        self._consoles.append(console)
        self._lanes.append(console.lane)
        self._output_lanes.append(console.lane)

    def _open_stream(
        self,
        descriptor: int,
        key: Key,
        path: bytes | None,
        console: int,
        prefix: bytes,
        needles: list[bytes],
        filter_path: bytes | None,
        whole_lines: bool,
        is_resumed: bool,
    ) -> None:
        os.set_blocking(descriptor, False)
        shown = self._by_number[console]
        file, filtered = self._use(path), self._use(filter_path)
        stream = Stream(key, descriptor, file, shown, prefix, needles, filtered, whole_lines, is_resumed)
        if shown is not None:
            shown.sources += 1
        if is_resumed and path is not None:
            stream.tail = _end_of_file(path)
        self._streams[key] = stream
        self._by_descriptor[descriptor] = stream
        self._watch(stream)

    def _send_tails(self, request: int, keys: Iterable[Key]) -> None:
        tails: list[tuple[Key, bytes]] = []
        for key in keys:
            stream = self._streams.get(key)
            if stream is not None:
                self._read_what_is_there(stream)
                tails.append((key, stream.tail.last_bytes()))
        self._tell(("tails", request, tails))

    # -- the agent's own lines

    def _say(self, text: bytes, *, after_output: bool) -> None:
        """Show the agent's lines: at once, above what workers answer to them; or below all output up to now."""
        if after_output:
            for stream in list(self._by_descriptor.values()):
                self._read_what_is_there(stream)
            if not self._waiting_lines:
                self._watch_output_lanes(time.monotonic())
        if after_output or self._waiting_lines:
            self._waiting_lines.append(text)  # shown by _settle
        else:
            self._err.say(text)

    def _watch_output_lanes(self, now: float) -> None:
        for lane in self._output_lanes:
            lane.wake_when_empty = True
            if not lane.holding:  # else its window has begun
                lane.begin_window(now)

    def _undelivered(self, now: float) -> bool:
        """Return whether a device other than standard error has yet to take something, and is not stuck."""
        # All of them, so that no window that has passed is left unjudged.
        return any([lane.pending and not lane.stuck and not lane.stands_still(now) for lane in self._output_lanes])

    def _say_waiting_lines(self) -> None:
        lines, self._waiting_lines = self._waiting_lines, []
        for lane in self._output_lanes:
            lane.wake_when_empty = False
        for line in lines:
            self._err.say(line)

    def _recall(self, request: int, wants: list[Want], asked: dict[str, Any], incarnation: int) -> None:
        if self._recalls is None:
            try:
                from tenax._logs.queries import LogQueries
            except Exception as error:  # tenax may have been replaced meanwhile; the workers' lines are worth more
                self._send_recalled(request, {"error": f"lines cannot be shown: {type(error).__name__}: {error}"})
                return
            self._recalls = LogQueries(
                self._find, self._send_recalled, self._wake, self._incarnation, lambda: self._file_lane.pending > 0
            )
        for key, *_ in wants:
            stream = self._streams.get(key)
            if stream is not None and stream.is_watched:  # one that is held back stays so
                self._read_what_is_there(stream)
        self._recalls.add(request, wants, asked, incarnation, time.monotonic())

    def _find(self, key: Key) -> Stream | None:
        return self._streams.get(key) or self._past.get(key)

    def _send_recalled(self, request: int, answer: dict[str, Any]) -> None:
        self._tell(("recalled", request, answer))

    def _forget(self, keys: Iterable[Key]) -> None:
        """They are over. What is remembered of them is remembered for a while."""
        over: list[Key] = []
        for key in keys:
            stream = self._streams.pop(key, None)
            if stream is not None:
                self._read_what_is_there(stream)
                if stream.descriptor >= 0:
                    self._end_stream(stream)
                stream.tail.trim()
                self._past[key] = stream
                self._past_bytes += stream.tail.size
                over.append(key)
        if over:
            self._past_keys.append(over)
        while len(self._past_keys) > _MAX_PASTS or self._past_bytes > _MAX_PAST_BYTES:
            for key in self._past_keys.pop(0):
                self._past_bytes -= self._past.pop(key).tail.size

    def _answer_drains(self, now: float) -> None:
        waiting = []
        for drain in self._drains:
            still_open = [
                stream.key for stream in self._by_descriptor.values() if drain.keys is None or stream.key in drain.keys
            ]
            if (still_open or self._file_lane.pending) and now < drain.deadline:
                waiting.append(drain)
            else:
                self._tell(("drained", drain.request, still_open, self._losses()))
        self._drains = waiting
        self._is_forcing = bool(waiting) or self._orphaned_at is not None
        self._file_lane.wake_when_empty = bool(waiting) or bool(self._waiting_lines)

    # -- the end

    def _end(self, patience_s: float, until: float = float("inf")) -> NoReturn:
        """Take what is left in the pipes, write as long as the devices take something, and go."""
        for stream in list(self._by_descriptor.values()):
            self._read_what_is_there(stream)
            if stream.descriptor >= 0:
                self._end_stream(stream)
        self._err.set_live("")
        for console in self._consoles:
            console.tell_of_loss()
        self._flush(
            [self._file_lane], patience_s, until
        )  # first, so that what is said of lost bytes is the whole truth
        for console in self._consoles:  # before standard error, which tells what the others did not take
            if console is not self._err:
                self._flush([console.lane], patience_s, until)
                console.give_up()
        self._say_waiting_lines()
        self._say_final_losses()
        self._flush([self._err.lane], patience_s, until)
        self._err.give_up()
        self._tell(("finished", self._losses()))
        os._exit(0)

    def _flush(self, lanes: list[DeviceThread], patience_s: float, until: float) -> None:
        """Wait until these lanes are empty, or stand still for too long; tell the agent now and then that they move."""
        now = time.monotonic()
        for lane in lanes:
            lane.stuck_after_s = patience_s
            lane.begin_window(now)
            lane.wake_when_empty = True
        moved, tell_at = sum(lane.moved for lane in self._lanes), now + _FLUSHING_EVERY_S
        while now < until:
            lanes = [lane for lane in lanes if lane.pending and not lane.stands_still(now)]
            if not lanes:
                return
            if now >= tell_at:
                tell_at = now + _FLUSHING_EVERY_S
                if sum(lane.moved for lane in self._lanes) != moved:
                    moved = sum(lane.moved for lane in self._lanes)
                    self._tell(("flushing", sum(lane.pending for lane in lanes)))
            if self._orphaned_at is not None:
                until = min(until, self._orphaned_at + _ORPHAN_FLUSH_S)
            self._wait_for_lanes(min(until, tell_at, *(lane.window_deadline for lane in lanes)) - now)
            now = time.monotonic()

    def _wait_for_lanes(self, timeout_s: float) -> None:
        waiter = select.poll()
        waiter.register(self._wake_end, select.POLLIN)
        if self._orphaned_at is None:
            waiter.register(self._channel.fileno(), select.POLLIN)
        for descriptor, _ in waiter.poll(max(0.0, timeout_s * 1000 + 1)):
            if descriptor == self._wake_end:
                os.read(self._wake_end, 4096)
            else:
                self._ignore_orders()

    def _ignore_orders(self) -> None:
        """After the order to finish only one thing may still come: the agent's end."""
        try:
            for _ in self._channel.receive():
                pass
        except ChannelClosed:
            self._on_orphaned()


def _end_of_file(path: bytes) -> Tail:
    """The last bytes of a log that an earlier scribe has begun."""
    tail = Tail()
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - TAIL_BYTES))
            tail.data += file.read(TAIL_BYTES)
            tail.end = file.tell()
    except OSError:
        pass  # then it begins here
    return tail


def _text(path: bytes) -> str:
    return path.decode("utf-8", "backslashreplace")


def main(descriptor: int) -> NoReturn:
    """The life of the process."""
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
        signal.SIGQUIT,
        signal.SIGTTOU,
        signal.SIGTSTP,
        signal.SIGUSR1,
        signal.SIGUSR2,
    ):
        signal.signal(number, signal.SIG_IGN)
    allow_kicks()
    channel = Channel.from_descriptor(descriptor)
    try:
        LogWriterProcess(channel).run()
    except BaseException:
        import traceback

        try:
            channel.send(("crashed", traceback.format_exc()))
        finally:
            os._exit(70)
