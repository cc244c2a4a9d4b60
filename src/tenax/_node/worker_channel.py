"""The channel to a worker that opts in: it is sent the end of its generation and the begin of the next one.

One JSON object per line (at most 64 KiB). The worker's text is untrusted: what is unknown, out of bounds or out
of turn closes the channel, and the worker cannot be held.

    worker                                                agent
      opt_in, generation, timeout_s    ->
                                       <-                   end, generation, why
      held, generation, step           ->
                                       <-                   begin, generation, env

The channel of a held worker that must stop is closed. The stop signal may only set a flag in its script, and then it
would wait for ``begin`` until it is killed.

A worker opts in once per generation. From ``begin`` on it counts as opted in, with its last timeout, so an ``end`` may
arrive before it has opted in again.
"""

from __future__ import annotations

import json
from typing import Annotated

import msgspec

from tenax._core import events
from tenax._core.bounds import DECODE_ERRORS, MAX_NUMBER, HoldTimeout, Number
from tenax._core.environment import GENERATIONS_PER_JOB_START
from tenax._core.text import one_line
from tenax._node.supervisor import WorkerSocket

_MAX_LINE = 1 << 16
_MAX_WHY = 4096
_READ_SIZE = 1 << 16


class OptIn(msgspec.Struct, tag="opt_in", tag_field="type", forbid_unknown_fields=True):
    generation: Number
    timeout_s: HoldTimeout = 5.0


class Held(msgspec.Struct, tag="held", tag_field="type", forbid_unknown_fields=True):
    generation: Number
    step: Annotated[int, msgspec.Meta(ge=-1, le=MAX_NUMBER)] = -1


_decode = msgspec.json.Decoder(OptIn | Held).decode


class WorkerChannel:
    def __init__(self, socket: WorkerSocket) -> None:
        self._socket = socket
        self._received = b""
        self.outgoing = b""
        self._opted_in: int = 0  # the last generation in which the worker opted in; 0: it never did
        self._ended: int = 0  # the generation whose end was sent and not acknowledged
        self._is_held = False
        self._is_stopping = False

    # --- to the worker ------------------------------------------------------------------------------------------------

    def end(self, generation: int, why: str) -> None:
        self._ended = generation
        self._send(type="end", generation=generation, why=one_line(why)[:_MAX_WHY])

    def begin(self, generation: int, env: dict[str, str]) -> bool:
        """Return whether the channel is open: else the worker waits for this in vain."""
        self._is_held = False
        self._send(type="begin", generation=generation, env=env)
        return self._socket.fileno() >= 0

    def stop(self) -> None:
        """Close the channel as soon as the worker is held: it takes part in no other generation."""
        self._is_stopping = True
        if self._is_held:
            self._socket.close()

    def _send(self, **message: object) -> None:
        # Not with msgspec: a variable, such as the path of a file, may have bytes that are not UTF-8.
        line = json.dumps(message).encode() + b"\n"
        if self._socket.fileno() < 0:
            return
        if len(line) > _MAX_LINE:
            self._close(f"the variables of its next generation have {len(line)} bytes, and {_MAX_LINE} are possible")
            return
        self.outgoing += line
        self.flush()

    def flush(self) -> None:
        try:
            self.outgoing = self.outgoing[self._socket.sock.send(self.outgoing) :]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            self._close(f"its channel failed: {error.strerror}")

    # --- from the worker ----------------------------------------------------------------------------------------------

    def on_readable(self) -> bool:
        """Handle what can be read now. Return whether there may be more."""
        try:
            data = self._socket.sock.recv(_READ_SIZE)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            self._close(f"its channel failed: {error.strerror}")
            return False
        if not data:
            self._close("it closed its channel")
            return False
        *lines, self._received = (self._received + data).split(b"\n")
        for line in lines:
            if problem := self._handle(line):
                self._close(f"it sent an invalid message: {problem}")
                return False
            if self._socket.fileno() < 0:
                return False
        if len(self._received) > _MAX_LINE:
            self._close("it sent a message that is too long")
        return True

    def _handle(self, line: bytes) -> str:
        """Handle one message; return why it is invalid, or an empty string."""
        if len(line) > _MAX_LINE:
            return "it is too long"
        try:
            message = _decode(line)
        except DECODE_ERRORS as error:
            return one_line(str(error))[:_MAX_WHY]
        generation, rank = self._socket.generation, self._socket.local_rank
        # A worker that was started in this generation knows it by its fencing token.
        if message.generation % GENERATIONS_PER_JOB_START != generation % GENERATIONS_PER_JOB_START:
            return f"it is about generation {message.generation}, not {generation}"
        if isinstance(message, OptIn):
            if self._opted_in == generation:
                return "it opted in twice"
            self._opted_in = generation
            self._socket.post(events.WorkerOptedIn(generation, rank, message.timeout_s))
        elif self._ended != generation:
            return "it acknowledged the end of a generation that has not ended"
        else:
            self._ended, self._is_held = 0, True
            self._socket.post(events.WorkerHeld(generation, rank, message.step))
            if self._is_stopping:
                self._socket.close()
        return ""

    def _close(self, why: str) -> None:
        self.outgoing = b""
        self._socket.close()
        if self._opted_in:
            self._socket.post(events.WorkerOptedOut(self._socket.generation, self._socket.local_rank, why))
