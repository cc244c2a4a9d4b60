"""The nursery: the keeper's side of warm workers. A template that forks, and standbys that wait to be workers.

It lives in the keeper, from the standard library alone, and decides nothing but one thing: a worker that cannot be had
from here is started cold, at once, and somebody is told why. What the template does is in ``warm/tenax_template.py``.

    preparing -> ready -> gone        the template imports, forks on demand, and may die as any process may
         '----> gone                  nothing that could be forked was left to import

Standbys are bred when workers wait for one, and otherwise a moment after the last start: while workers come up, the
cores are theirs. No wait is without end: for an import a minute, for a birth ten seconds, then workers start cold.
"""

from __future__ import annotations

import marshal
import os
import signal
import socket
import time
from contextlib import suppress

from tenax._io.channel import Channel, ChannelClosed
from tenax._processes.descendants import descendants

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_CALM_S = 0.5  # after the last start, before standbys are bred for the next one
_MARSHAL_VERSION = 2  # the worker's Python may be another one
_MAX_AT_ONCE = 200  # sockets in a message
_TELL_AFTER_S = 10.0
_LONGEST_BIRTH_S = 10.0
_LONGEST_IMPORT_S = 60.0
_MAX_SAID = 4096
_MAX_LOST = 10  # standbys, besides as many as are wanted twice over
_SIGNALLED = 128  # more than this, as an exit code: the process below died of that signal


def _how_it_ended(exit_code: int) -> str:
    number = -exit_code if exit_code < 0 else exit_code - _SIGNALLED
    try:
        return f"was killed by {signal.Signals(number).name}"
    except ValueError:  # no signal, or one without a name
        return f"ended with exit code {exit_code}" if exit_code >= 0 else f"was killed by signal {number}"


class WarmPool:
    """One template and its standbys."""

    def __init__(self, pid: int, channel: Channel, output: int, standbys: int) -> None:
        """``pid``: the template's; ``output``: what it prints; ``standbys``: how many to keep ready."""
        self._pid = pid
        self._channel = channel
        self._output = output
        self._wanted = standbys
        self._is_ready = False
        self._standbys: dict[int, socket.socket] = {}  # by pid
        self._unborn: list[socket.socket] = []  # our ends of the sockets of those being bred
        self._births = 0  # orders to breed
        self._stillborn: set[int] = set()
        self._refill_at: float | None = None
        self._heard: list[tuple[Any, ...]] = []  # for the agent
        self._lost = 0  # standbys that died since one became a worker
        self._awaited_since: float | None = None
        self._has_told = False  # that the import takes long
        self._is_mute = False  # the template is ending, which we hear of as its parent
        self.is_open = True

    def prepare(self, modules: list[str], late: list[str], has_own_arguments: bool) -> None:
        self._channel.send(("prepare", modules, late, has_own_arguments))

    # --- what the keeper's loop needs -----------------------------------------------------------------------------

    def descriptors(self) -> list[int]:
        watched = [self._channel.fileno()] if self.is_open and not self._is_mute else []
        return watched + ([self._output] if self._output >= 0 else [])

    def next_moment(self) -> float | None:
        """When we must be looked after at the latest."""
        moments = [] if self._refill_at is None else [self._refill_at]
        if self._awaited_since is not None and self.is_coming:
            longest = _LONGEST_BIRTH_S if self._is_ready else _LONGEST_IMPORT_S
            moments += [self._awaited_since + limit for limit in (_TELL_AFTER_S, longest)]
            if self._has_told:
                moments.remove(self._awaited_since + _TELL_AFTER_S)
        return min(moments, default=None)

    def has_waited_too_long(self, now: float) -> bool:
        """Whether who waits for us should not any more."""
        if self._awaited_since is None or not self.is_coming:
            return False
        waited = now - self._awaited_since
        if self._is_ready:
            if waited >= _LONGEST_BIRTH_S:
                self._close("the process that forks them does not answer")
            return waited >= _LONGEST_BIRTH_S
        if waited >= _TELL_AFTER_S and not self._has_told:
            self._has_told = True
            self._heard.append(("slow", _TELL_AFTER_S, _LONGEST_IMPORT_S))
        return waited >= _LONGEST_IMPORT_S

    def is_awaited(self, by: int, now: float) -> None:
        """So many workers wait for a standby."""
        if not by:
            self._awaited_since = None
        elif self._awaited_since is None:
            self._awaited_since = now

    def refill(self, now: float) -> None:
        """If the moment has come: have as many ready as the next start will take."""
        if self._refill_at is None or now < self._refill_at:
            return
        self._refill_at = None
        if self._is_ready and not self._unborn:
            self._breed(self._wanted - len(self._standbys))

    def listen(self) -> None:
        """Take what the template has said so far."""
        self._read_output()
        if not self.is_open or self._is_mute:
            return
        try:
            self._channel.flush()
            for message, _ in self._channel.receive():
                self._hear(message)
                if not self.is_open:
                    return
        except ChannelClosed:
            self._is_mute = True

    def said(self) -> list[tuple[Any, ...]]:
        """What the agent should hear."""
        heard, self._heard = self._heard, []
        return heard

    # --- workers --------------------------------------------------------------------------------------------------

    def expect(self, count: int) -> None:
        """So many workers wait for a standby now."""
        missing = count - len(self._standbys) - len(self._unborn)
        if self._is_ready and missing > 0 and not self._unborn:
            self._breed(missing)

    @property
    def is_coming(self) -> bool:
        """Is it worth waiting for a standby?"""
        return self.is_open and (not self._is_ready or bool(self._unborn))

    def activate(self, spec: dict[str, Any], descriptors: list[int], complain: int) -> int:
        """Make a standby a worker; returns its pid, or 0 if there is none."""
        while self._standbys:
            pid = next(iter(self._standbys))
            with self._standbys.pop(pid) as sock:
                if self._hand_over(sock, spec, descriptors, complain):
                    self._lost = 0
                    self._refill_at = time.monotonic() + _CALM_S if self._wanted else None
                    return pid
        return 0

    @staticmethod
    def _hand_over(sock: socket.socket, spec: dict[str, Any], descriptors: list[int], complain: int) -> bool:
        page = -1
        try:
            page = os.memfd_create("tenax-order", os.MFD_CLOEXEC)
            order = {name: spec[name] for name in ("argv", "env", "cwd", "cpus", "numbers")}
            with open(page, "wb", closefd=False) as file:
                file.write(marshal.dumps(order, _MARSHAL_VERSION))
            socket.send_fds(sock, [b"!"], [complain, page, *descriptors])
        except OSError:  # it died while it waited; or we have too many open files, which a cold start will tell
            return False
        finally:
            if page >= 0:
                os.close(page)
        return True

    # --- family ---------------------------------------------------------------------------------------------------

    def has_died(self, pid: int, exit_code: int) -> None:
        """A child of the keeper that was no worker."""
        sock = self._standbys.pop(pid, None)
        if sock is not None:
            sock.close()
            self._lost += 1
            if self._lost > 2 * self._wanted + _MAX_LOST:
                self._close("processes that stand by die by themselves")
            elif self.is_open and self._wanted:
                self._refill_at = time.monotonic() + _CALM_S
        elif pid != self._pid:
            if self._unborn:  # perhaps one of those whose numbers we are about to hear
                self._stillborn.add(pid)
        else:
            self._pid = 0
            self.listen()
            self._close(f"the process that forks them {_how_it_ended(exit_code)}")

    def children(self) -> set[int]:
        """Children of the keeper that are no workers and left behind by none."""
        return {*self._standbys, *([self._pid] if self._pid else [])}

    def members(self) -> set[int]:
        """The same with everything below them."""
        return {*self.children(), *(descendants(self._pid) if self._pid else [])}

    # --- inside ---------------------------------------------------------------------------------------------------

    def _hear(self, message: tuple[Any, ...]) -> None:
        match message:
            case ("ready", seconds, names, left_out):
                self._is_ready = True
                self._heard.append(("warm", seconds, names, left_out))
                self._refill_at = time.monotonic()
            case ("refused", left_out):
                self._heard.append(("cold", left_out))
                self._close("")
            case ("bred", number, pids) if number == self._births and self._unborn:
                for pid, sock in zip(pids, self._unborn, strict=False):
                    if pid in self._stillborn:
                        sock.close()
                    else:
                        self._standbys[pid] = sock
                self._stillborn.clear()
                is_short = len(pids) < len(self._unborn)
                for sock in self._unborn[len(pids) :]:
                    sock.close()
                self._unborn = []
                if is_short:  # trying again and again would not help, and cold workers will say what is wrong
                    self._close("the template cannot fork any more; see the limit on processes (ulimit -u)")

    def _breed(self, count: int) -> None:
        count = min(count, _MAX_AT_ONCE)
        if count <= 0:
            return
        theirs = []
        try:
            for _ in range(count):
                ours, other = socket.socketpair()
                self._unborn.append(ours)
                theirs.append(other)
            self._births += 1
            self._channel.send(("breed", self._births), [sock.fileno() for sock in theirs])
        except (OSError, ChannelClosed):  # too many open files; or gone, which will be seen
            for sock in self._unborn:
                sock.close()
            self._unborn = []
        finally:
            for sock in theirs:
                sock.close()

    def _close(self, why: str) -> None:
        """No more standbys will come. Those that are here can still be workers."""
        if not self.is_open:
            return
        self.is_open = False
        self._is_ready = False
        self._refill_at = None
        self._channel.close()
        for sock in self._unborn:
            sock.close()
        self._unborn = []
        if why:
            self._heard.append(("cold", {"": why}))

    def _read_output(self) -> None:
        if self._output < 0:
            return
        with suppress(BlockingIOError):
            while data := os.read(self._output, 1 << 16):
                self._heard.append(("said", data.decode(errors="replace")[:_MAX_SAID]))
            os.close(self._output)
            self._output = -1
