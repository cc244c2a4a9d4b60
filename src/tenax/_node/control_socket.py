"""The door: where people on this host find an agent. A socket in a folder that only its user can enter.

It costs a run nothing before the first worker is up: it is made a moment later, and what it takes to answer is imported
when somebody knocks. No port, no thread, no secret: the system checks who may enter. What is asked is answered by the
agent itself (``AgentRequest``) or by the coordinator, wherever that is.

A folder that cannot be made, or that is not ours alone, costs the door and not the run; that is said once.

    <folder>/<pid>.sock   the door of a living agent; of a dead one, until somebody knocks
    <folder>/<pid>.json   which run that is, and where its logs are; stays when the run is over, for the last few runs
"""

from __future__ import annotations

import errno
import os
import socket
from contextlib import suppress

import msgspec

from tenax._core.bounds import DECODE_ERRORS
from tenax._io.private_folder import check_private, make_private, private_folder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tenax._core.requests import AnyRequest
    from tenax._engines.tcp.link import Link
    from tenax._io.ports import Cancellable, EventLoop, Reply

_MAX_VISITORS = 32
_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_PAUSE_S = 1.0
_DOOR, _NOTE = ".sock", ".json"
_NOTES_KEPT = 64
_MAX_NOTE_BYTES = 64 << 10


class RunNote(msgspec.Struct, frozen=True):
    """What an agent has noted about its run."""

    run_id: str
    pid: int
    entrypoint: str = ""
    log_dir: str = ""
    coordinator: str = ""  # where it is, for people; empty: in that agent, and nowhere else
    since: float = 0.0  # when that was noted; known by who reads it

    @property
    def which_run(self) -> tuple[str, str]:
        return which_run(self.run_id, self.pid, self.coordinator)


def which_run(run_id: str, pid: int, coordinator: str) -> tuple[str, str]:
    """The same for all agents of one run on this host, although run ids may repeat."""
    if not coordinator:
        return run_id, str(pid)
    return run_id, coordinator if " at " in coordinator else ""  # who is elected may be another tomorrow


def socket_paths(environ: Mapping[str, str] = os.environ) -> list[str]:
    """The paths of all doors of this user, whether somebody is behind them or not. Raises OSError."""
    folder = private_folder(environ)
    if not os.path.lexists(folder):
        return []
    check_private(folder)
    return [os.path.join(folder, name) for name in sorted(os.listdir(folder)) if name.endswith(_DOOR)]


def last_runs(environ: Mapping[str, str] = os.environ) -> list[RunNote]:
    """Agents of this user on this host that have ended, the latest first. Raises OSError.

    One whose door is still there may live, even if it does not answer.
    """
    folder = private_folder(environ)
    if not os.path.lexists(folder):
        return []
    check_private(folder)
    over = (path for path in reversed(_notes(folder)) if not os.path.lexists(path.removesuffix(_NOTE) + _DOOR))
    return [note for note in map(_read_note, over) if note is not None]


def note_for(door: str) -> RunNote | None:
    """What the agent behind this door has noted, also if it does not answer."""
    return _read_note(door.removesuffix(_DOOR) + _NOTE)


def _read_note(path: str) -> RunNote | None:
    try:
        with open(path, "rb") as file:
            note = msgspec.json.decode(file.read(_MAX_NOTE_BYTES), type=RunNote)
            return msgspec.structs.replace(note, since=os.fstat(file.fileno()).st_mtime)
    except (OSError, *DECODE_ERRORS):
        return None


def _notes(folder: str) -> list[str]:
    """Their paths, the oldest first."""
    dated = []
    for name in os.listdir(folder):
        if name.endswith(_NOTE):
            path = os.path.join(folder, name)
            with suppress(OSError):  # removed meanwhile
                dated.append((os.stat(path).st_mtime_ns, path))
    return [path for _, path in sorted(dated)]


class ControlSocket:
    """Watched by the agent's loop once it is open. ``answer`` gets each request, and answers once."""

    def __init__(self, answer: Callable[[AnyRequest, Reply], None], say: Callable[[str], None]) -> None:
        self._answer = answer
        self._say = say
        self._listener: socket.socket | None = None
        self._loop: EventLoop
        self._visitors: set[Link] = set()
        self._followers: set[Link] = set()  # those of them who wait for lines of workers, and go by themselves
        self._pause: Cancellable | None = None  # while there is no descriptor for another visitor
        self._has_complained = False
        self.path = ""

    def open(self, loop: EventLoop) -> None:
        self._loop = loop
        try:
            folder = private_folder()
            make_private(folder)
            self.path = _free_path(folder)
            from tenax._core.requests import AgentRequest

            self._answer(AgentRequest(), self._write_note)  # first: whoever finds the door finds it too
            self._listener = _listen(self.path)
        except OSError as error:
            self._say(f"'tenax status' will not find this run by its id: {error.strerror or error}")
            return
        loop.watch(self)

    def _write_note(self, who_we_are: object, error: str) -> None:  # noqa: ARG002 - there is none
        """Found when the run is over: where its logs are. Only a help for people; without it all goes on."""
        with suppress(OSError, UnicodeError, msgspec.ValidationError):
            run = msgspec.convert(who_we_are, RunNote)
            path = self.path.removesuffix(_DOOR) + _NOTE
            with open(path, "wb") as file:
                file.write(msgspec.json.encode(run))
            for old in _notes(os.path.dirname(path))[:-_NOTES_KEPT]:
                os.unlink(old)

    @property
    def has_followers(self) -> bool:
        """Whether somebody is here to see lines as they come. When the run is over and all are told, they go."""
        return bool(self._followers)

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
        except OSError as error:
            if error.errno in _FULL:  # who knocks stays there: without a pause we would do nothing but look
                self._loop.unwatch(self)
                self._pause = self._loop.at(self._loop.now() + _PAUSE_S, self._watch_again)
            return  # else it is gone already
        if len(self._visitors) >= _MAX_VISITORS:
            sock.close()
            return
        try:
            self._welcome(sock)
        except Exception as error:  # tenax may have been replaced meanwhile: what we import is not what we are
            sock.close()
            if not self._has_complained:
                self._has_complained = True
                self._say(f"this run cannot be asked any more: {type(error).__name__}: {error}; it is not affected")

    def _watch_again(self) -> None:
        self._pause = None
        self._loop.watch(self)

    def _welcome(self, sock: socket.socket) -> None:
        from tenax._core.requests import LogsRequest, answer_safely
        from tenax._engines.tcp import wire
        from tenax._engines.tcp.link import Link

        def on_body(body: bytes) -> None:
            frame = wire.decode_from_agent(body)
            if not isinstance(frame, wire.Ask):
                raise wire.WireError("only requests are taken here")
            if isinstance(frame.request, LogsRequest) and frame.request.wait_s > 0:
                self._followers.add(link)

            def reply(value: object, error: str) -> None:
                if link in self._visitors:
                    link.send(wire.encode_answer(frame.number, value, error))

            answer_safely(self._answer, frame.request, reply)

        def on_closed(why: str, was_told: bool) -> None:  # noqa: ARG001 - nobody asks
            if link in self._visitors:
                self._visitors.discard(link)
                self._followers.discard(link)
                self._loop.unwatch(link)

        link = Link(sock, on_body, on_closed, is_server=True)
        self._visitors.add(link)
        self._loop.watch(link)

    def close(self) -> None:
        if self._listener is None:
            return
        if self._pause is not None:
            self._pause.cancel()
        else:
            self._loop.unwatch(self)
        self._listener.close()
        self._listener = None
        with suppress(OSError):
            os.unlink(self.path)
        for link in list(self._visitors):
            link.flush(0.0)
            link.close()


def _free_path(folder: str) -> str:
    """Of one that was killed and had our number the path may be taken; of one that lives not: it may be of another
    container that shares this folder."""
    path = os.path.join(folder, f"{os.getpid()}{_DOOR}")
    return os.path.join(folder, f"{os.getpid()}-{os.urandom(4).hex()}{_DOOR}") if _is_answered(path) else path


def _listen(path: str) -> socket.socket:
    """Raises OSError. Seen only when somebody listens there: who is refused at a door takes it for that of a dead one
    and removes it."""
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


def _is_answered(path: str) -> bool:
    if not os.path.lexists(path):
        return False
    with socket.socket(socket.AF_UNIX) as sock:
        sock.setblocking(False)
        try:
            sock.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:  # its queue is full
            return True
    return True
