"""Channel: messages with file descriptors between an agent and its helper processes.

A channel is one end of a Unix socket pair that only the agent and one of its children hold. A message is a tuple of
plain values (numbers, text, bytes, lists, dicts), encoded with ``marshal``: it costs no import, and it is safe because
both ends run the same interpreter and no other process can reach the socket. Input from other processes is never
decoded this way.

The channel never blocks: data that the peer does not read yet is queued and sent when the socket is writable again.

The peer sees a close at once, even if copies of the descriptor exist: closing shuts the stream down, and a forked
process closes its copies first of all. Otherwise a child of the agent could hide the agent's death from its helpers.
"""

from __future__ import annotations

import _socket as socket  # `socket` itself is a slow import, and only adds what a channel does not use
import errno
import marshal
import os
import struct
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

_HEADER = struct.Struct("<IB")  # size of the body in bytes, number of descriptors
_READ_SIZE = 1 << 18
_MAX_DESCRIPTORS = 250  # Linux accepts 253
_ANCILLARY_SIZE = socket.CMSG_SPACE(_MAX_DESCRIPTORS * struct.calcsize("i"))
# Received descriptors must not leak into processes that the receiver starts: a worker would hold another worker's pipe
# open.
_CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


class ChannelClosed(Exception):
    """The peer has closed the channel or exited."""


class Channel:
    """One end of a channel. Not thread-safe: it belongs to one loop."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._received = bytearray()
        self._descriptors: list[int] = []
        # The first may be partly sent; its descriptors are gone then.
        self._outgoing: list[tuple[bytes, list[int]]] = []
        self.queued_bytes = 0
        _open_channels.add(self)

    @classmethod
    def pair(cls) -> tuple[Channel, socket.socket]:
        """Return this end, and the raw socket of the other end for a child process."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return cls(ours), theirs

    @classmethod
    def from_descriptor(cls, descriptor: int) -> Channel:
        return cls(socket.socket(fileno=descriptor))

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def wants_to_write(self) -> bool:
        return bool(self._outgoing)

    def send(self, message: tuple[Any, ...], descriptors: Sequence[int] = ()) -> None:
        """Queue a message and send what the socket accepts. Descriptors are duplicated; the caller keeps its own."""
        if len(descriptors) > _MAX_DESCRIPTORS:
            raise ValueError(f"a message carries at most {_MAX_DESCRIPTORS} descriptors, not {len(descriptors)}")
        body = marshal.dumps(message)
        packet = _HEADER.pack(len(body), len(descriptors)) + body
        copies: list[int] = []
        try:
            for descriptor in descriptors:
                copies.append(os.dup(descriptor))
        except OSError:
            for copy in copies:
                os.close(copy)
            raise
        self._outgoing.append((packet, copies))
        self.queued_bytes += len(packet)
        self.flush()

    def flush(self) -> None:
        """Send queued messages until the socket would block."""
        while self._outgoing:
            packet, descriptors = self._outgoing[0]
            try:
                sent = self._sock.sendmsg([packet], _ancillary(descriptors))
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno == errno.ETOOMANYREFS:  # too many descriptors in flight; the peer must receive some
                    return
                raise ChannelClosed(str(error)) from error
            for fd in descriptors:
                os.close(fd)
            self.queued_bytes -= sent
            if sent == len(packet):
                self._outgoing.pop(0)
            else:
                self._outgoing[0] = (packet[sent:], [])

    def receive(self) -> Iterator[tuple[tuple[Any, ...], list[int]]]:
        """Yield each complete message with its descriptors. Raises ChannelClosed at the end of the stream."""
        closed = False
        while True:
            try:
                data, ancillary, flags, _ = self._sock.recvmsg(_READ_SIZE, _ANCILLARY_SIZE, _CLOSE_ON_EXEC)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                closed = True
                break
            for level, kind, payload in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    self._descriptors.extend(_close_on_exec_descriptors(payload))
            if flags & socket.MSG_CTRUNC:
                raise ChannelClosed("descriptors were lost: this process has too many open files")
            if not data:
                closed = True
                break
            self._received += data
        yield from self._take_messages()
        if closed:
            raise ChannelClosed("the other end was closed")

    def _take_messages(self) -> Iterator[tuple[tuple[Any, ...], list[int]]]:
        while len(self._received) >= _HEADER.size:
            size, count = _HEADER.unpack_from(self._received)
            end = _HEADER.size + size
            if len(self._received) < end:
                return
            message = marshal.loads(bytes(self._received[_HEADER.size : end]))  # noqa: S302 - see the module's docstring
            del self._received[:end]
            descriptors = self._descriptors[:count]
            del self._descriptors[:count]
            yield message, descriptors

    def close(self) -> None:
        if self._sock.fileno() >= 0:
            with suppress(OSError):  # the peer is already gone
                self._sock.shutdown(socket.SHUT_RDWR)
        self._close_descriptors()

    def _close_descriptors(self) -> None:
        """Close this process's descriptors without a shutdown: in a forked process the parent still uses the stream."""
        _open_channels.discard(self)
        for _, descriptors in self._outgoing:
            for fd in descriptors:
                os.close(fd)
        self._outgoing.clear()
        for fd in self._descriptors:
            os.close(fd)
        self._descriptors.clear()
        self._sock.close()


_open_channels: set[Channel] = set()


def _close_copies() -> None:
    for channel in list(_open_channels):
        channel._close_descriptors()


os.register_at_fork(after_in_child=_close_copies)


def _ancillary(descriptors: list[int]) -> list[tuple[int, int, bytes]]:
    if not descriptors:
        return []
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(descriptors)}i", *descriptors))]


def _close_on_exec_descriptors(payload: bytes) -> tuple[int, ...]:
    count = len(payload) // struct.calcsize("i")
    descriptors = struct.unpack(f"{count}i", payload[: count * struct.calcsize("i")])
    if not _CLOSE_ON_EXEC:  # macOS lacks the flag
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
    return descriptors
