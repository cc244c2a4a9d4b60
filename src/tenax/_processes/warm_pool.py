"""The warm pool: one template process that forks, and the standbys that wait to become workers.

Runs in the keeper with the standard library alone. If the pool cannot provide a worker, that worker starts cold at once
and the user gets the reason. ``warm/tenax_template.py`` is the template's side.

    preparing -> ready -> closed      the template imports, forks on demand, and may die at any time
         '----> closed                no module was left that is safe to fork

Standbys are forked when workers wait for one, and otherwise shortly after the last start, so that starting workers
have the cores to themselves. With a setup function, each of these is then set up for one local rank, and
becomes no other worker. Every wait is bounded: 1 min for imports, and 1 min for a fork, because a machine on which
that takes seconds is so busy that a cold start takes longer. Then workers start cold.
"""

from __future__ import annotations

import marshal
import os
import signal
import socket
import time
from contextlib import suppress

from tenax._io.helper_channel import Channel, ChannelClosed
from tenax._processes.descendants import descendants

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_REFILL_DELAY_S = 0.5  # after the last start, before standbys are forked for the next one
_MARSHAL_VERSION = 2  # any Python 3 reads it, and the worker's version may differ
_MAX_SOCKETS = 200  # per message
_REPORT_SLOW_AFTER_S = 10.0
_MAX_WAIT_S = 60.0  # for imports, and again for a fork
_MAX_OUTPUT = 4096
_MAX_LOST = 10  # standbys, in addition to twice the target
_SIGNALLED = 128  # an exit code above this: the template died of that signal
_NEVER = float("inf")


class WarmPool:
    def __init__(self, pid: int, channel: Channel, output: int, plan: dict[str, Any]) -> None:
        """``pid``: the template's; ``output``: pipe with its output; ``plan``: see ``KeeperProcess.prepare``."""
        self._pid = pid
        self._channel = channel
        self._output = output
        self._target: int = plan["standbys"]  # to keep ready
        self._setups: list[dict[str, Any]] = plan["setups"]  # what a standby calls, by local rank; empty: nothing
        self._set_up_for: dict[int, int] = {}  # local rank by pid of a standby
        self._is_ready = False
        self._standbys: dict[int, socket.socket] = {}  # by pid
        self._forking: list[socket.socket] = []  # sockets of the standbys being forked
        self._fork_requests = 0  # sent so far
        self._dead_early: set[int] = set()  # pids that died before the template announced them
        self._refill_at = _NEVER
        self._messages: list[tuple[Any, ...]] = []  # for the agent
        self._lost = 0  # standbys that died since one became a worker
        self._waiting_since: float | None = None
        self._has_reported_slow = False
        self._is_channel_closed = False  # the template is exiting; the keeper reaps it
        self.is_open = True
        with suppress(ChannelClosed):  # it has exited already, and the keeper reaps it
            channel.send(("prepare", plan["modules"], plan["late"], plan["has_own_arguments"]))

    # --- what the keeper's loop needs -----------------------------------------------------------------------------

    def descriptors(self) -> list[int]:
        watched = [self._channel.fileno()] if self.is_open and not self._is_channel_closed else []
        return watched + ([self._output] if self._output >= 0 else [])

    def next_deadline(self) -> float:
        if self._waiting_since is None or not self.is_worth_waiting:
            return self._refill_at
        wait_s = _MAX_WAIT_S if self._has_reported_slow else _REPORT_SLOW_AFTER_S
        return min(self._refill_at, self._waiting_since + wait_s)

    def has_timed_out(self, now: float) -> bool:
        """Return whether the waiting workers should start cold now."""
        if self._waiting_since is None or not self.is_worth_waiting:
            return False
        waited = now - self._waiting_since
        if waited >= _REPORT_SLOW_AFTER_S and not self._has_reported_slow:
            self._has_reported_slow = True
            self._messages.append(("slow", _REPORT_SLOW_AFTER_S, _MAX_WAIT_S))
        if waited >= _MAX_WAIT_S and self._is_ready:
            self._close("the template does not respond")
        return waited >= _MAX_WAIT_S

    def set_waiting(self, count: int, now: float) -> None:
        if not count:
            self._waiting_since = None
        elif self._waiting_since is None:
            self._waiting_since = now

    def refill(self, now: float) -> None:
        """If due, fork as many standbys as the next start needs."""
        if now < self._refill_at:
            return
        self._refill_at = _NEVER
        if self._is_ready and not self._forking:
            self._fork_standbys(self._target - len(self._standbys))

    def receive(self) -> None:
        """Process what the template has sent and printed so far."""
        self._read_output()
        if not self.is_open or self._is_channel_closed:
            return
        try:
            self._channel.flush()
            for message, _ in self._channel.receive():
                self._on_message(message)
                if not self.is_open:
                    return
        except ChannelClosed:
            self._is_channel_closed = True

    def take_messages(self) -> list[tuple[Any, ...]]:
        messages, self._messages = self._messages, []
        return messages

    # --- workers --------------------------------------------------------------------------------------------------

    def request(self, count: int) -> None:
        """Fork the standbys that ``count`` waiting workers lack."""
        missing = count - len(self._standbys.keys() - self._set_up_for.keys()) - len(self._forking)
        if self._is_ready and missing > 0 and not self._forking:
            self._fork_standbys(missing)

    @property
    def is_worth_waiting(self) -> bool:
        """Whether a standby may still come."""
        return self.is_open and (not self._is_ready or bool(self._forking))

    def activate(self, spec: dict[str, Any], descriptors: list[int], error_writer: int) -> int:
        """Turn a standby into a worker. Return its pid, or 0 if there is none."""
        local_rank = spec["local_rank"]
        usable = [pid for pid in self._standbys if self._set_up_for.get(pid, local_rank) == local_rank]
        for pid in sorted(usable, key=self._set_up_for.__contains__, reverse=True):
            self._set_up_for.pop(pid, None)
            with self._standbys.pop(pid) as sock:
                if self._hand_over(sock, spec, error_writer, *descriptors):
                    self._lost = 0
                    self._refill_at = time.monotonic() + _REFILL_DELAY_S if self._target else _NEVER
                    return pid
        return 0

    def _set_up_standbys(self) -> None:
        """Let each standby that no worker waits for be set up for a local rank that has none."""
        missing = set(range(len(self._setups))).difference(self._set_up_for.values())
        free = self._standbys.keys() - self._set_up_for.keys()
        for pid, local_rank in zip(sorted(free), sorted(missing), strict=False):
            self._set_up_for[pid] = local_rank
            self._hand_over(self._standbys[pid], self._setups[local_rank])

    @staticmethod
    def _hand_over(sock: socket.socket, spec: dict[str, Any], *descriptors: int) -> bool:
        sent = {name: spec.get(name) for name in ("argv", "env", "cwd", "cpus", "numbers", "setup")}
        try:
            with open(os.memfd_create("tenax-spec", os.MFD_CLOEXEC), "wb") as file:
                file.write(marshal.dumps(sent, _MARSHAL_VERSION))
                file.flush()
                socket.send_fds(sock, [b"!"], [file.fileno(), *descriptors])
        except OSError:  # the standby died, or there are too many open files, which the cold start will report
            return False
        return True

    # --- children -------------------------------------------------------------------------------------------------

    def on_child_death(self, pid: int, exit_code: int) -> None:
        """Handle the death of a child of the keeper that was not a worker."""
        sock = self._standbys.pop(pid, None)
        self._set_up_for.pop(pid, None)
        if sock is not None:
            sock.close()
            self._lost += 1
            if self._lost > 2 * self._target + _MAX_LOST:
                self._close("too many standbys exited")
            elif self.is_open and self._target:
                self._refill_at = time.monotonic() + _REFILL_DELAY_S
        elif pid != self._pid:
            if self._forking:  # perhaps a standby that the template has not announced yet
                self._dead_early.add(pid)
        else:
            self._pid = 0
            self.receive()
            number = -exit_code if exit_code < 0 else exit_code - _SIGNALLED
            try:
                how = f"was killed by {signal.Signals(number).name}"
            except ValueError:  # not a signal, or one without a name
                how = f"exited with code {exit_code}" if exit_code >= 0 else f"was killed by signal {number}"
            self._close(f"the template {how}")

    def children(self) -> set[int]:
        """Return the template and the standbys: children of the keeper that no worker left behind."""
        return {*self._standbys, self._pid} - {0}

    def members(self) -> set[int]:
        """Return the same with their descendants: a setup function may start processes."""
        found = self.children()
        return found.union(*map(descendants, found))

    # --- the template ---------------------------------------------------------------------------------------------

    def _on_message(self, message: tuple[Any, ...]) -> None:
        match message:
            case ("ready", seconds, names, left_out):
                self._is_ready = True
                self._messages.append(("warm", seconds, names, left_out))
                self._refill_at = time.monotonic()
                if self._waiting_since is not None:  # the limit for a fork begins now: the imports had their own
                    self._waiting_since = self._refill_at
            case ("refused", left_out):
                self._messages.append(("cold", left_out))
                self._close("")
            case ("forked", number, pids) if number == self._fork_requests and self._forking:
                is_short = len(pids) < len(self._forking)
                for pid, sock in zip(pids, self._forking, strict=False):
                    if pid in self._dead_early:
                        sock.close()
                    else:
                        self._standbys[pid] = sock
                self._dead_early.clear()
                del self._forking[: len(pids)]
                self._close_forking()
                if self._waiting_since is None:
                    self._set_up_standbys()
                if is_short:  # retrying would not help, and cold starts will report the error
                    self._close("the template cannot fork more processes; check the limit (ulimit -u)")

    def _fork_standbys(self, count: int) -> None:
        count = min(count, _MAX_SOCKETS)
        if count <= 0:
            return
        theirs = []
        try:
            for _ in range(count):
                ours, other = socket.socketpair()
                self._forking.append(ours)
                theirs.append(other)
            self._fork_requests += 1
            self._channel.send(("fork", self._fork_requests), [sock.fileno() for sock in theirs])
        except (OSError, ChannelClosed):  # too many open files; or the template is gone, which its death reports
            self._close_forking()
        finally:
            for sock in theirs:
                sock.close()

    def _close_forking(self) -> None:
        for sock in self._forking:
            sock.close()
        self._forking = []

    def _close(self, why: str) -> None:
        """Fork no more standbys. Existing ones can still become workers."""
        if not self.is_open:
            return
        self.is_open = False
        self._is_ready = False
        self._refill_at = _NEVER
        self._channel.close()
        self._close_forking()
        if why:
            self._messages.append(("cold", {"": why}))

    def _read_output(self) -> None:
        if self._output < 0:
            return
        with suppress(BlockingIOError):
            while data := os.read(self._output, 1 << 16):
                self._messages.append(("printed", data.decode(errors="replace")[:_MAX_OUTPUT]))
            os.close(self._output)
            self._output = -1
