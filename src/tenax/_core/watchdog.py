"""The watchdog: which scopes the workers of this node must leave, and by when.

A worker enters a scope with a request (``tenax.timer.expires``) and releases it when it leaves. Requests are lines of
JSON in TorchElastic's format, on one pipe that all workers write to. This machine parses them, keeps the timers of live
workers, and returns the scopes that expired. The agent machine decides what follows.

Invariants:

W1  An invalid line affects no other line.
W2  A timer belongs to a live worker of the current generation. Requests of other processes are only counted.
W3  Memory is bounded, whatever is written to the pipe.
W4  The wall clock is used once, when a request arrives; later jumps have no effect.
W5  A worker is reported overdue with a signal at most once; after that its requests are ignored.
W6  Entering and leaving a scope counts as activity of a worker (``scopes``), for hang detection.

Both clocks are arguments: ``now`` (the agent's) and ``wall`` (seconds since the epoch, as in the requests).
"""

from __future__ import annotations

from math import ceil

import msgspec

from tenax._core import commands as command_types
from tenax._core import events
from tenax._core.bounds import DECODE_ERRORS, Pid, Text
from tenax._core.hang import Scopes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tenax._core.commands import AnyCommand
    from tenax._core.events import AnyEvent

MAX_LINE = 4096  # POSIX systems write this to a pipe atomically
_MIN_LINE = 40  # no request is shorter
_BEGIN = b'{"version"'  # the first bytes of every client's requests
_LAST_SIGNAL = 64
_MAX_TIMERS = 256  # per worker
_MAX_EARLY = 256  # requests of workers whose start is not confirmed yet
_MAX_WARNINGS = 100  # per worker and generation: expired scopes without a signal


class Request(msgspec.Struct, frozen=True):
    """One request. A negative expiration time releases the scope."""

    pid: Pid
    scope_id: Text
    expiration_time: float  # seconds since the epoch
    signal: int = 0  # 0 or less: only report it
    version: int = 1


_decode = msgspec.json.Decoder(Request).decode


class RequestLines:
    """Splits the bytes from the pipe into requests."""

    def __init__(self) -> None:
        self.malformed = 0  # lines, or beginnings of lines
        self._carry = b""

    def feed(self, data: bytes) -> Iterator[Request]:
        lines = (self._carry + data).split(b"\n")
        # A request is written atomically, so bytes before the last MAX_LINE belong to no request.
        self._carry = lines.pop()[-MAX_LINE:]
        for line in lines:
            request = self._parse(line[-MAX_LINE:])
            if request is not None:
                yield request

    def _parse(self, line: bytes) -> Request | None:
        if len(line) < _MIN_LINE:  # cheap, in case a process writes only newlines
            self.malformed += bool(line)
            return None
        request = _request(line)
        if request is None:
            self.malformed += 1
            # Another process may have written text without a newline before the request.
            begin = line.rfind(_BEGIN)
            request = _request(line[begin:]) if begin > 0 else None
        return request


def _request(line: bytes) -> Request | None:
    try:
        request = _decode(line)
    except DECODE_ERRORS:
        return None
    # kill() treats pids of 0 and below as groups of processes.
    is_valid = request.version == 1 and request.pid > 0 and request.signal <= _LAST_SIGNAL
    return request if is_valid else None


class _Timer(msgspec.Struct, frozen=True):
    due_at: float  # on the agent's clock
    after_s: float
    request: Request


class Watchdog:
    """The watchdog of one run. Follows the agent machine's events and commands to know which workers are alive."""

    def __init__(self, local_world_size: int) -> None:
        self._local_world_size = local_world_size
        self._lines = RequestLines()
        self._generation = 0
        self._is_ending = True  # there are no workers, or they are being stopped
        self._rank_of: dict[int, int] = {}  # of live workers, by pid
        self._settled: set[int] = set()  # local ranks that started or failed to start
        self._past: set[int] = set()  # pids of exited workers, whose requests may arrive late
        self._timers: dict[int, dict[str, _Timer]] = {}  # by local rank and scope
        self._is_late: set[int] = set()  # local ranks that are being ended because of a scope
        self._beats: dict[int, tuple[int, float, float]] = {}  # by local rank: count, first and last time
        self._warnings: dict[int, int] = {}
        self._early: list[tuple[Request, float, float]] = []
        self._next: float | None = None
        self._is_next_known = True
        self._notes: list[str] = []
        self._noted: set[str] = set()
        self.taken = 0
        self.unknown_senders = 0  # requests of processes that are not workers of this node
        self.too_many = 0  # timers beyond the limit per worker
        self.last_request_at: float | None = None  # wall time

    @property
    def malformed(self) -> int:
        return self._lines.malformed

    # --- live workers -------------------------------------------------------------------------------------------------

    def on_step(self, event: AnyEvent, commands: Sequence[AnyCommand]) -> None:
        """Follow a step of the agent machine."""
        match event:
            case events.WorkerStarted(generation, local_rank, pid) if generation == self._generation:
                if not self._is_ending:
                    self._on_started(local_rank, pid)
            case events.WorkerExited(generation, local_rank) | events.WorkerStartFailed(generation, local_rank):
                if generation == self._generation:
                    self._on_ended(local_rank)
        for command in commands:
            match command:
                case command_types.StartWorkers(assignment):
                    self._begin(assignment.generation)
                case (
                    command_types.SignalWorkers()
                    | command_types.ClearNode()
                    | command_types.KillNode()
                    | command_types.Finish()
                ):
                    self._end()

    def _begin(self, generation: int) -> None:
        self._end()
        self._generation = generation
        self._past = set()
        self._settled = set()
        self._is_late = set()
        self._beats = {}
        self._warnings = {}
        self._is_ending = False

    def _end(self) -> None:
        """Drop all timers: they end with their generation."""
        self._is_ending = True
        self._past.update(self._rank_of)
        self._rank_of = {}
        self._timers = {}
        self._early = []
        self._is_next_known = False

    def _on_started(self, local_rank: int, pid: int) -> None:
        self._rank_of[pid] = local_rank
        self._settled.add(local_rank)
        early, self._early = self._early, []
        for request, now, wall in early:
            self._take(request, now, wall)

    def _on_ended(self, local_rank: int) -> None:
        self._settled.add(local_rank)
        self._past.update(pid for pid, rank in self._rank_of.items() if rank == local_rank)
        self._rank_of = {pid: rank for pid, rank in self._rank_of.items() if rank != local_rank}
        self._forget(local_rank)

    def _forget(self, local_rank: int) -> None:
        self._timers.pop(local_rank, None)
        self._is_next_known = False

    # --- requests -----------------------------------------------------------------------------------------------------

    def take(self, data: bytes, now: float, wall: float) -> None:
        """Handle bytes read from the pipe."""
        malformed = self.malformed
        for request in self._lines.feed(data):
            self._take(request, now, wall)
        if self.malformed > malformed:
            self._note("ignored an invalid request on the watchdog's pipe")

    def discard(self, data: bytes) -> None:
        """Count and drop bytes read from the pipe while no worker is alive."""
        for _ in self._lines.feed(data):
            self.unknown_senders += 1

    def _take(self, request: Request, now: float, wall: float) -> None:
        local_rank = self._rank_of.get(request.pid)
        if local_rank is None:
            self._take_from_unknown_process(request, now, wall)
            return
        self.taken += 1
        self.last_request_at = wall
        if local_rank in self._is_late:
            return
        count, first_at, _ = self._beats.get(local_rank, (0, now, now))
        self._beats[local_rank] = (count + 1, first_at, now)
        timers = self._timers.setdefault(local_rank, {})
        if request.expiration_time < 0:
            if timers.pop(request.scope_id, None) is not None:
                self._is_next_known = False
        elif len(timers) < _MAX_TIMERS or request.scope_id in timers:
            after_s = request.expiration_time - wall
            timers[request.scope_id] = _Timer(now + after_s, after_s, request)
            self._is_next_known = False
        else:
            self.too_many += 1
            self._note(f"process {request.pid} has more than {_MAX_TIMERS} scopes; the watchdog ignores the others")

    def _take_from_unknown_process(self, request: Request, now: float, wall: float) -> None:
        if self._is_ending or request.pid in self._past:
            return
        if len(self._settled) < self._local_world_size and len(self._early) < _MAX_EARLY:
            self._early.append((request, now, wall))  # a request may arrive before WorkerStarted
            return
        self.unknown_senders += 1
        self._note(
            f"the watchdog ignores process {request.pid}: it is not a worker of this node (scopes are for workers, not "
            "for processes that they start)"
        )

    def scopes(self) -> Mapping[int, Scopes]:
        """Return the use of scopes in this generation, by local rank."""
        return {
            local_rank: Scopes(count, first_at, last_at, is_in_one=bool(self._timers.get(local_rank)))
            for local_rank, (count, first_at, last_at) in self._beats.items()
        }

    # --- time ---------------------------------------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """Return when the next scope expires."""
        if not self._is_next_known:
            due = (timer.due_at for timers in self._timers.values() for timer in timers.values())
            self._next = min(due, default=None)
            self._is_next_known = True
        return self._next

    def expired(self, now: float) -> list[events.ScopeExpired]:
        """Return the scopes that expired, in the order of their expiry. Each is returned once."""
        due = [
            (timer.due_at, local_rank, timer)
            for local_rank, timers in self._timers.items()
            for timer in timers.values()
            if timer.due_at <= now
        ]
        due.sort(key=lambda each: each[:2])
        return [event for _, local_rank, timer in due if (event := self._expire(local_rank, timer)) is not None]

    def _expire(self, local_rank: int, timer: _Timer) -> events.ScopeExpired | None:
        request = timer.request
        if local_rank in self._is_late:
            return None
        del self._timers[local_rank][request.scope_id]
        self._is_next_known = False
        if request.signal > 0:
            self._is_late.add(local_rank)
            self._forget(local_rank)
        else:
            self._warnings[local_rank] = self._warnings.get(local_rank, 0) + 1
            if self._warnings[local_rank] > _MAX_WARNINGS:
                return None
        return events.ScopeExpired(
            generation=self._generation,
            local_rank=local_rank,
            pid=request.pid,
            scope=request.scope_id,
            after_s=_round_up(timer.after_s),
            expiration_time=request.expiration_time,
            signal=max(0, request.signal),
        )

    # --- notes --------------------------------------------------------------------------------------------------------

    def take_notes(self) -> list[str]:
        """Return new warnings for the console. Each kind is returned once per run."""
        notes, self._notes = self._notes, []
        return notes

    def _note(self, text: str) -> None:
        kind = text.translate(_NO_DIGITS)
        if kind not in self._noted:
            self._noted.add(kind)
            self._notes.append(text)


_NO_DIGITS = {ord(digit): None for digit in "0123456789"}


def _round_up(after_s: float) -> float:
    """Return the timeout that the script most likely set: a little of it passed before the request arrived."""
    written = _up_to(after_s, 0.5)
    if written - after_s > 0.1:
        written = _up_to(after_s, 0.05)
    return max(0.0, written)


def _up_to(number: float, step: float) -> float:
    return round(ceil(number / step - 1e-6) * step, 2)
