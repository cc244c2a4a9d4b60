"""Helper processes: small Python processes that serve this one, connected by a channel.

The keeper and the log writer are helpers. A helper is a fresh interpreter, isolated from the user's environment and
without site packages. It leads its own session, so that Ctrl-C in the terminal does not reach it, and inherits only
standard output, standard error and its end of the channel.
"""

from __future__ import annotations

import fcntl
import os
import sys
from abc import ABC, abstractmethod
from contextlib import suppress

from tenax._io.helper_channel import Channel, ChannelClosed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

SECRET_VARIABLES = ("TENAX_RDZV_TOKEN", "TENAX_ETCD_PASSWORD", "TENAX_DASHBOARD_KEY")  # no child process inherits them
_CHANNEL_DESCRIPTOR = 3
# Drop the current directory, which is the user's. Append tenax's folder, never prepend it: a package next to tenax must
# not shadow a module of the standard library.
_BOOTSTRAP = (
    "import sys; sys.path[0] or sys.path.pop(0); sys.path.append(sys.argv[2]); "
    "from tenax._io.helper_process import become_helper; become_helper()"
)


class HelperUnavailable(Exception):
    """A helper process cannot be started. The message gives the cause and the next step."""


class HelperHandle(ABC):
    """The channel of a helper process, as a loop watches it. Subclasses handle its messages and its end."""

    _channel: Channel | None = None  # None: there is no process

    @abstractmethod
    def _on_message(self, message: tuple[Any, ...]) -> None: ...

    @abstractmethod
    def _on_closed(self) -> None:
        """Handle the end of the process."""

    def fileno(self) -> int:
        return -1 if self._channel is None else self._channel.fileno()

    @property
    def wants_to_write(self) -> bool:
        return self._channel is not None and self._channel.wants_to_write

    def on_writable(self) -> None:
        if self._channel is not None:
            with suppress(ChannelClosed):  # on_readable handles it
                self._channel.flush()

    def on_readable(self) -> None:
        channel = self._channel
        if channel is None:
            return
        try:
            for message, _ in channel.receive():
                self._on_message(message)
                if self._channel is not channel:  # a callback has closed or replaced it
                    return
        except ChannelClosed:
            self._on_closed()


_started_ahead: dict[str, tuple[int, Channel]] = {}


def start_helper_ahead(module: str, name: str) -> None:
    """Start a helper early, so that it comes up while this process is still importing."""
    _started_ahead[module] = spawn_helper(module, name)


def discard_helper_ahead(module: str) -> None:
    """End a helper that was started early and is not needed, and wait for its end."""
    if module in _started_ahead:
        pid, channel = _started_ahead.pop(module)
        channel.close()
        os.kill(pid, 9)  # SIGKILL: it has done nothing yet, and `signal` is a slow import
        os.waitpid(pid, 0)


def inheritable_environ() -> dict[str, str]:
    """Return this process's environment without secrets, which only agents and operators need."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in SECRET_VARIABLES
        and not (name == "PET_RDZV_CONF" and ("token=" in value or "password=" in value))
    }


def spawn_helper(
    module: str, name: str, *, isolated: bool = True, extra_environ: Mapping[str, str] | None = None
) -> tuple[int, Channel]:
    """Start a process that calls ``main(descriptor)`` of ``module``. Return its pid and this end of the channel.

    The caller owns both: it reaps the process and closes the channel. Process listings show ``name``.
    With ``isolated=False`` the helper gets the user's site packages, the ``PYTHON*`` variables and ``extra_environ``.
    """
    if isolated and module in _started_ahead:
        return _started_ahead.pop(module)
    if not sys.executable:
        raise RuntimeError("sys.executable is empty, and tenax starts its helper processes with it")
    package_root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    flags = ["-I", "-S"] if isolated else []
    command = [sys.executable, *flags, "-c", _BOOTSTRAP, name, package_root, module]
    try:
        return _spawn(command, {**inheritable_environ(), **(extra_environ or {})})
    except OSError as error:
        raise HelperUnavailable(
            f"could not start the helper process {name}: {error.strerror}; "
            "raise the limits on processes and open files (ulimit -u, ulimit -n, the container's pids limit)"
        ) from error


def _spawn(command: list[str], environ: dict[str, str]) -> tuple[int, Channel]:
    ours, theirs = Channel.pair()
    # Move it to a high number first: dup2 onto the same number would leave the descriptor close-on-exec.
    their_descriptor = fcntl.fcntl(theirs, fcntl.F_DUPFD_CLOEXEC, 10)
    theirs.close()
    actions: list[Any] = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_DUP2, their_descriptor, _CHANNEL_DESCRIPTOR),
    ]
    try:
        pid = _spawn_in_new_session(command, environ, actions)
    except BaseException:
        ours.close()
        raise
    finally:
        os.close(their_descriptor)
    return pid, ours


def _spawn_in_new_session(command: list[str], environ: dict[str, str], actions: list[Any]) -> int:
    try:
        return os.posix_spawn(command[0], command, environ, file_actions=actions, setsid=True, setsigmask=())
    except NotImplementedError:  # become_helper calls setsid instead
        return os.posix_spawn(command[0], command, environ, file_actions=actions, setsigmask=())


def become_helper() -> None:
    """Set up a new helper process and run its module. Called in the child."""
    name, _package_root, module = sys.argv[1:4]
    if os.getsid(0) != os.getpid():
        os.setsid()
    _close_inherited_descriptors()
    _set_process_name(name)
    __import__(module)
    sys.modules[module].main(_CHANNEL_DESCRIPTOR)


def _close_inherited_descriptors() -> None:
    """Close what the agent's parent left inheritable. Open a missing standard stream before a file gets its number."""
    for entry in os.listdir("/dev/fd"):
        descriptor = int(entry)
        if descriptor > _CHANNEL_DESCRIPTOR:
            with suppress(OSError):  # the list contains listdir's own descriptor, which is closed by now
                os.close(descriptor)
    for descriptor in (1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            if null != descriptor:
                os.dup2(null, descriptor)
                os.close(null)
    os.set_inheritable(_CHANNEL_DESCRIPTOR, False)


def _set_process_name(name: str) -> None:
    with suppress(OSError), open("/proc/self/comm", "wb", buffering=0) as comm:  # Linux only; for process listings
        comm.write(name.encode()[:15])
