"""Helper process: start a small Python process that works for this one, with a channel between the two.

The keeper and the scribe are started this way. A helper is a fresh interpreter that has seen nothing of the user's
environment (isolated, without site packages), leads its own session, so that a Ctrl-C in the terminal does not reach
it, and inherits only standard output, standard error and its end of the channel. What it does with them is its own
module's matter; this one knows neither.
"""

from __future__ import annotations

import fcntl
import os
import sys
from contextlib import suppress

from tenax._io.channel import Channel

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

SECRET_VARIABLES = ("TENAX_RDZV_TOKEN", "TENAX_ETCD_PASSWORD", "TENAX_DASHBOARD_KEY")  # no child process inherits them
_CHANNEL_DESCRIPTOR = 3
# Without the current directory, which is the user's; and our place is appended, not prepended: a package next to tenax
# must never stand in for a module of the standard library.
_BOOTSTRAP = (
    "import sys; sys.path[0] or sys.path.pop(0); sys.path.append(sys.argv[2]); "
    "from tenax._io.helper_process import become_helper; become_helper()"
)


class HelperUnavailable(Exception):
    """One of our own processes cannot be had. The sentence says why and what to do."""


_started_ahead: dict[str, tuple[int, Channel]] = {}


def start_helper_ahead(module: str, name: str) -> None:
    """Start a helper that is going to be needed, so that it comes up while this process is still importing."""
    _started_ahead[module] = spawn_helper(module, name)


def inheritable_environ() -> dict[str, str]:
    """Return the environment for child processes: this one's without secrets, which only agents and operators need."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in SECRET_VARIABLES
        and not (name == "PET_RDZV_CONF" and ("token=" in value or "password=" in value))
    }


def spawn_helper(
    module: str, name: str, *, isolated: bool = True, extra_environ: Mapping[str, str] | None = None
) -> tuple[int, Channel]:
    """Start a process that calls ``main(descriptor)`` of ``module``; returns its pid and our end of the channel.

    The caller owns both: it reaps the process and closes the channel. ``name`` is what process listings show.
    With ``isolated=False`` the helper sees the user's site packages and ``PYTHON*`` variables, and ``extra_environ``.
    """
    if isolated and module in _started_ahead:
        return _started_ahead.pop(module)
    if not sys.executable:
        raise RuntimeError(
            "tenax starts its helpers with sys.executable, which is empty here: use a normal interpreter."
        )
    place = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    flags = ["-I", "-S"] if isolated else []
    command = [sys.executable, *flags, "-c", _BOOTSTRAP, name, place, module]
    try:
        return _spawn(command, {**inheritable_environ(), **(extra_environ or {})})
    except OSError as error:
        raise HelperUnavailable(
            f"the helper process {name} cannot be started: {error.strerror}; "
            "raise the limits on processes and open files (ulimit -u, ulimit -n, the container's pids limit)"
        ) from error


def _spawn(command: list[str], environ: dict[str, str]) -> tuple[int, Channel]:
    ours, theirs = Channel.pair()
    # Moved out of the way first: duplicating a descriptor onto its own number would leave it closed on exec.
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
    except NotImplementedError:  # then the helper makes its session itself, see become_helper
        return os.posix_spawn(command[0], command, environ, file_actions=actions, setsigmask=())


def become_helper() -> None:
    """What a new helper process does first, in the child."""
    name, _place, module = sys.argv[1:4]
    if os.getsid(0) != os.getpid():
        os.setsid()
    _close_strange_descriptors()
    _show_name(name)
    __import__(module)
    sys.modules[module].main(_CHANNEL_DESCRIPTOR)


def _close_strange_descriptors() -> None:
    """Close what the agent's parent left inheritable; fill a missing standard stream before a file takes its number."""
    for entry in os.listdir("/dev/fd"):
        descriptor = int(entry)
        if descriptor > _CHANNEL_DESCRIPTOR:
            with suppress(OSError):  # the listing's own descriptor is in the list, and closed by now
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


def _show_name(name: str) -> None:
    with suppress(OSError), open("/proc/self/comm", "wb", buffering=0) as comm:  # Linux only; nothing depends on it
        comm.write(name.encode()[:15])
