"""The door: where people on this host find an agent. A socket in a folder that only its user can enter.

It costs a run nothing before the first worker is up: it is made a moment later, and what it takes to answer is imported
when somebody knocks. No port, no thread, no secret: the system checks who may enter. What is asked is answered by the
agent itself (``AgentWanted``) or by the coordinator, wherever that is.

A folder that cannot be made, or that is not ours alone, costs the door and not the run; that is said once.
"""

from __future__ import annotations

import os
import socket
import stat
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from tenax.core.requests import AnyRequest
    from tenax.ports import EventLoop, Reply
    from tenax.rendezvous.tcp.link import Link

FOLDER_VARIABLE = "TENAX_DOORS"
_MOST_VISITORS = 32


def doors_folder(environ: os._Environ[str] | dict[str, str] = os.environ) -> str:
    """Where the doors of this user's agents are. Not below TMPDIR, which may be another in every shell."""
    return environ.get(FOLDER_VARIABLE) or f"/tmp/tenax-{os.getuid()}"


class Door:
    """Watched by the agent's loop once it is open. ``answer`` gets each request, and answers once."""

    def __init__(self, answer: Callable[[AnyRequest, Reply], None], say: Callable[[str], None]) -> None:
        self._answer = answer
        self._say = say
        self._listener: socket.socket | None = None
        self._loop: EventLoop
        self._visitors: set[Link] = set()
        self.path = ""

    def open(self, loop: EventLoop) -> None:
        self._loop = loop
        try:
            folder = doors_folder()
            _make_private(folder)
            path = os.path.join(folder, f"{os.getpid()}.sock")
            with suppress(FileNotFoundError):  # of one that was killed and had our number
                os.unlink(path)
            listener = socket.socket(socket.AF_UNIX)
            try:
                listener.bind(path)
                listener.listen()
                listener.setblocking(False)
            except OSError:
                listener.close()
                raise
        except OSError as error:
            self._say(f"'tenax status' will not find this run by its id: {error.strerror or error}")
            return
        self.path, self._listener = path, listener
        loop.watch(self)

    # --- watched by the loop ------------------------------------------------------------------------------------------

    def fileno(self) -> int:
        return self._listener.fileno() if self._listener is not None else -1

    @property
    def wants_to_write(self) -> bool:
        return False

    def on_writable(self) -> None:
        """Nothing is written here."""

    def on_readable(self) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except OSError:  # it is gone already
            return
        if len(self._visitors) >= _MOST_VISITORS:
            sock.close()
            return
        self._welcome(sock)

    def _welcome(self, sock: socket.socket) -> None:
        from tenax.rendezvous.tcp import wire
        from tenax.rendezvous.tcp.link import Link

        def on_body(body: bytes) -> None:
            frame = wire.decode_from_agent(body)
            if not isinstance(frame, wire.Ask):
                raise wire.WireError("only requests are taken here")

            def reply(value: object, error: str) -> None:
                if link in self._visitors:
                    link.send(wire.encode_answer(frame.number, value, error))

            self._answer(frame.request, reply)

        def on_closed(why: str, was_told: bool) -> None:  # noqa: ARG001 - nobody asks
            if link in self._visitors:
                self._visitors.discard(link)
                self._loop.unwatch(link)

        link = Link(sock, on_body, on_closed, is_server=True)
        self._visitors.add(link)
        self._loop.watch(link)

    def close(self) -> None:
        if self._listener is None:
            return
        self._loop.unwatch(self)
        self._listener.close()
        self._listener = None
        with suppress(OSError):
            os.unlink(self.path)
        for link in list(self._visitors):
            link.flush(0.0)
            link.close()


def _make_private(folder: str) -> None:
    """Only this user may enter; a folder that somebody else has made there is not used."""
    with suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} must be a folder that only this user can enter (or set {FOLDER_VARIABLE})")
