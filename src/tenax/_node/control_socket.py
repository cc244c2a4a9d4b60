"""The control socket: how operators on this host reach an agent. A socket in a folder that only its user can enter.

It does not delay the first worker: it is opened later, and imports what it needs when the first client connects. No
port, no thread, no secret: the file system checks permissions. Requests are answered by the agent itself
(``AgentRequest``) or by the coordinator, wherever that runs.

If the folder cannot be created, or is not private to this user, the run continues without the socket and prints one
warning.

    <folder>/<pid>.sock   the socket of a running agent; one of a dead agent is removed by the next client
    <folder>/<pid>.json   a note about the run, which outlives it (``run_notes.py``)
"""

from __future__ import annotations

import errno
import os
import socket
from contextlib import suppress

from tenax._io.interfaces import Watchable
from tenax._io.private_folder import make_private, private_folder
from tenax._node.run_notes import SOCKET, private_paths

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from tenax._core.requests import AnyRequest
    from tenax._engines.tcp.link import Link
    from tenax._io.interfaces import EventLoop, Reply

_MAX_CLIENTS = 32
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_ACCEPT_PAUSE_S = 1.0


def socket_paths() -> list[str]:
    """Return the paths of all control sockets of this user, including those of dead agents. Raises OSError."""
    return private_paths(SOCKET)


class ControlSocket(Watchable):
    """Watched by the agent's loop once it is open. ``answer`` gets each request and must reply exactly once."""

    def __init__(
        self,
        answer: Callable[[AnyRequest, Reply], None],
        warn: Callable[[str], None],
        write_note: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._answer = answer
        self._write_note = write_note  # about the run; gets the path of the socket
        self._warn = warn
        self._listener: socket.socket | None = None
        self._loop: EventLoop
        self._clients: set[Link] = set()
        self.followers: set[Link] = set()  # clients that follow logs; they disconnect after the last line of the run
        self._is_paused = False  # there is no descriptor for another client
        self._has_warned = False
        self.path = ""

    def open(self, loop: EventLoop) -> None:
        self._loop = loop
        try:
            folder = private_folder()
            make_private(folder)
            self.path = _free_path(folder)
            self._write_note(self.path)  # before the socket: clients read both
            self._listener = _listen(self.path)
        except OSError as error:
            reason = error.strerror or error
            self._warn(f"could not open the control socket: {reason}; 'tenax status' will not find this run")
            return
        loop.watch(self)

    # --- watched by the loop ------------------------------------------------------------------------------------------

    def fileno(self) -> int:
        return self._listener.fileno() if self._listener is not None and not self._is_paused else -1

    def on_readable(self) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if error.errno in _OUT_OF_DESCRIPTORS:  # the client stays in the queue: pause instead of spinning
                self._is_paused = True
                self._loop.at(self._loop.now() + _ACCEPT_PAUSE_S, self._end_pause)
            return  # else the client has disconnected
        if len(self._clients) >= _MAX_CLIENTS:
            sock.close()
            return
        try:
            self._accept(sock)
        except Exception as error:  # tenax may have been upgraded on disk since this process started
            sock.close()
            if not self._has_warned:
                self._has_warned = True
                self._warn(f"could not answer a request: {type(error).__name__}: {error}; the job is not affected")

    def _end_pause(self) -> None:
        self._is_paused = False

    def _accept(self, sock: socket.socket) -> None:
        from tenax._core.link import wire
        from tenax._core.requests import LogsRequest, answer_safely
        from tenax._engines.tcp.link import Link

        def on_body(body: bytes) -> None:
            frame = wire.decode_from_agent(body)
            if not isinstance(frame, wire.Ask):
                raise wire.WireError("only requests are accepted here")
            if isinstance(frame.request, LogsRequest) and frame.request.wait_s > 0:
                self.followers.add(link)

            def reply(value: object, error: str) -> None:
                if link in self._clients:
                    link.send(wire.encode_answer(frame.number, value, error))

            answer_safely(self._answer, frame.request, reply)

        def on_closed(why: str, was_told: bool) -> None:  # noqa: ARG001 - the link's signature
            if link in self._clients:
                self._clients.discard(link)
                self.followers.discard(link)
                self._loop.unwatch(link)

        link = Link(sock, on_body, on_closed, is_server=True)
        self._clients.add(link)
        self._loop.watch(link)

    def close(self) -> None:
        if self._listener is None:
            return
        self._loop.unwatch(self)
        self._listener.close()
        self._listener = None
        with suppress(OSError):
            os.unlink(self.path)
        for link in list(self._clients):
            link.flush(0.0)
            link.close()


def _free_path(folder: str) -> str:
    """Return a path for our socket: that of a dead agent with our pid is reused, that of a live one is not.

    A live one is in another container that shares this folder.
    """
    path = os.path.join(folder, f"{os.getpid()}{SOCKET}")
    return os.path.join(folder, f"{os.getpid()}-{os.urandom(4).hex()}{SOCKET}") if _is_alive(path) else path


def _listen(path: str) -> socket.socket:
    """Listen under another name and rename: clients remove a socket that refuses connections. Raises OSError."""
    hidden = f"{path}.new"
    with suppress(FileNotFoundError):
        os.unlink(hidden)
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(hidden)
        listener.listen()
        listener.setblocking(False)
        os.rename(hidden, path)
    except OSError:
        listener.close()
        raise
    return listener


def _is_alive(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.setblocking(False)
        try:
            sock.connect(path)
        except OSError as error:  # any other: its queue is full
            return not isinstance(error, ConnectionRefusedError | FileNotFoundError)
    return True
