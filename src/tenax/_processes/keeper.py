"""The agent's side of the keeper: sends commands, turns replies into events.

Owns the keeper process. If the keeper dies, the workers die with it (death signal) and the keeper is reported as lost.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from contextlib import suppress

from tenax._core import events
from tenax._io.helper_channel import Channel, ChannelClosed
from tenax._io.helper_process import HelperHandle, discard_helper_ahead, spawn_helper
from tenax._processes.descendants import is_zombie, marked_processes, wait_for_deaths

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from tenax._io.interfaces import Emit, Launch
    from tenax._processes.template import Template

MARK = "TENAX_KEEPER"
_PLAIN = "tenax._processes.keeper_main"
_DEATH_TIMEOUT_S = 1.0
# The exit codes that a shell would use for these errors: not found, not executable.
_SHELL_CODES = {errno.ENOENT: 127, errno.ENOTDIR: 127, errno.EACCES: 126, errno.ENOEXEC: 126, errno.EPERM: 126}


class KeeperProcess(HelperHandle):
    """Implements ``interfaces.Processes``."""

    def __init__(
        self,
        module: str = _PLAIN,
        call: Callable[[dict[str, Any]], None] | None = None,
        name: str = "tenax-keeper",
    ) -> None:
        """``module``: the helper to start. With ``call``, the keeper is a fork of this process and workers run that."""
        self._module = module
        self._name = name
        self._call = call
        # Every process of the job inherits this variable, so that they can be found if the keeper is lost.
        self._mark = os.urandom(8).hex()
        self.pid = 0
        self._pids: dict[tuple[int, int], int] = {}  # of living workers, by generation and local rank
        self._emit: Emit = lambda _: None
        self._notify: Callable[[str], None] = lambda _: None

    def open(self, emit: Emit) -> None:
        self._emit = emit
        if self._channel is None:
            self.spawn()

    def spawn(self) -> None:
        """Start the process. May be called before ``open``, so that it starts while the agent still prepares."""
        isolated = self._call is None and self._module == _PLAIN
        if not isolated:
            discard_helper_ahead(_PLAIN)
        if self._call is not None:
            self._fork_keeper()
        else:
            # /proc shows workers of a fork server with the server's environment, so that needs the mark too.
            extra_environ = {} if isolated else {MARK: self._mark}
            self.pid, self._channel = spawn_helper(
                self._module, self._name, isolated=isolated, extra_environ=extra_environ
            )

    def _fork_keeper(self) -> None:
        ours, theirs = Channel.pair()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()  # otherwise each worker would write it again
        pid = os.fork()
        if pid:
            theirs.close()
            self.pid, self._channel = pid, ours
            return
        try:
            from tenax._processes.keeper_main import Keeper

            os.setsid()
            signal.pthread_sigmask(signal.SIG_SETMASK, ())  # workers must not inherit the agent's mask
            Keeper(Channel(theirs), self._call).run()
        finally:
            os._exit(0)

    # --- commands -----------------------------------------------------------------------------------------------------

    def prepare(
        self, template: Template, notify: Callable[[str], None], setup: str = "", setups: Sequence[Launch] = ()
    ) -> None:
        """Fork workers from this template once it has imported. ``notify`` receives messages about that.

        ``setup``: MODULE:FUNCTION, called in each standby, with the environment of one of ``setups``.
        """
        self._notify = notify
        spec, descriptors = self._spec(template.launch)
        plan = {
            "modules": template.modules,
            "late": template.late,
            "has_own_arguments": template.has_own_arguments,
            "standbys": template.standbys,
            "setups": [{**self._spec(each)[0], "setup": setup} for each in setups],
        }
        self._send(("template", spec, plan), descriptors)

    def start(self, generation: int, local_rank: int, launch: Launch) -> None:
        spec, descriptors = self._spec(launch)
        self._send(("start", generation, local_rank, {**spec, "local_rank": local_rank}), descriptors)

    def _spec(self, launch: Launch) -> tuple[dict[str, Any], list[int]]:
        env = {**launch.env, MARK: self._mark}
        spec = {
            # As bytes: the keeper may use another text encoding.
            "argv": [os.fsencode(word) for word in launch.argv or ()],
            "env": {os.fsencode(name): os.fsencode(value) for name, value in env.items()},
            "cwd": os.fsencode(launch.cwd),
            "cpus": list(launch.cpus),
            "numbers": list(launch.descriptors),
        }
        return spec, list(launch.descriptors.values())

    def signal(self, generation: int, number: int) -> None:
        self._send(("signal", generation, int(number)))  # marshal does not take a signal.Signals

    def dump_stacks(self, generation: int, local_rank: int) -> None:
        from tenax._processes.stacks import stacks_signal

        self._send(("dump", generation, local_rank, stacks_signal()))

    def end(self, generation: int, local_rank: int, number: int) -> None:
        self._send(("end", generation, local_rank, int(number)))

    def adopt(self, generation: int, local_rank: int, following: int) -> None:
        pid = self._pids.pop((generation, local_rank), None)
        if pid is not None:
            self._pids[following, local_rank] = pid
        self._send(("adopt", generation, local_rank, following))

    def clear(self, generation: int, held: tuple[int, ...] = (), number: int = 0) -> None:
        self._send(("clear", generation, list(held), number))

    def kill(self, generation: int) -> None:
        self._send(("kill", generation))

    def hold(self, seconds: float) -> None:
        self._send(("hold", seconds))

    def stop_gently(self, grace_s: float) -> None:
        """If this process dies, stop the workers with SIGTERM and this grace period before SIGKILL."""
        self._send(("stop_gently", grace_s))

    def keep(self, name: str, descriptor: int) -> None:
        self._send(("keep", name), [descriptor])

    def release(self, name: str) -> None:
        self._send(("release", name))

    def _send(self, message: tuple[Any, ...], descriptors: list[int] | None = None) -> None:
        if self._channel is not None:  # otherwise the loss has been reported
            with suppress(ChannelClosed):  # on_readable reports the loss
                self._channel.send(message, descriptors or ())

    # --- events -------------------------------------------------------------------------------------------------------

    def _on_message(self, message: tuple[Any, ...]) -> None:
        match message:
            case ("started", generation, local_rank, pid):
                self._pids[generation, local_rank] = pid
                self._emit(events.WorkerStarted(generation, local_rank, pid))
            case ("start_failed", generation, local_rank, number, text, at):
                self._pids.pop((generation, local_rank), None)
                code = _SHELL_CODES.get(number, 1)
                self._emit(events.WorkerStartFailed(generation, local_rank, text, code, at))
            case ("exited", generation, local_rank, exit_code, requested, at):
                self._pids.pop((generation, local_rank), None)
                exited = events.WorkerExited(generation, local_rank, exit_code, before_stop=not requested, ended_at=at)
                self._emit(exited)
            case ("dump_refused", generation, local_rank, why):
                self._emit(events.StacksRefused(generation, local_rank, why))
            case ("cleared", generation, held, number):
                self._emit(events.NodeCleared(generation, tuple(held), number))
            case ("fenced", generation):
                reason = "this node was disconnected from the coordinator for too long"
                self._emit(events.Fenced(generation, reason))
            case _:
                from tenax._processes.template import texts_for_user

                for text in texts_for_user(message):
                    self._notify(text)

    def _on_closed(self) -> None:
        code = self._reap()
        self._kill_leftovers()
        from tenax._view.exit_text import signal_name

        how = f"it was killed by {signal_name(-code)}" if code < 0 else f"it exited with code {code}"
        self._emit(events.KeeperLost(how))

    def _kill_leftovers(self) -> None:
        """Kill what the workers had started; the workers themselves died with the keeper.

        Finds processes by the mark in their environment until none is left, or until none dies any more: a process
        that survives SIGKILL is stuck in the kernel.
        """
        wait_for_deaths(list(self._pids.values()), _DEATH_TIMEOUT_S)
        mark = f"{MARK}={self._mark}".encode()
        while found := [pid for pid in marked_processes(mark) if pid != os.getpid() and not is_zombie(pid)]:
            for pid in found:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            if not wait_for_deaths(found, _DEATH_TIMEOUT_S):
                return

    def close(self) -> None:
        """Close the channel: the keeper kills everything below it and exits. Returns when it is gone."""
        self._reap()

    def _reap(self) -> int:
        """Close the channel, wait until the keeper is gone, and return its exit code."""
        if self._channel is None:
            return 0
        self._channel.close()
        self._channel = None
        pid, self.pid = self.pid, 0
        with suppress(ChildProcessError):  # other code in this process reaped it
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return 0
