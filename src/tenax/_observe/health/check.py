"""HealthCheck: a health check server in the hands of one run of an agent.

The agent opens it before it meets anybody and closes it last. A port that cannot be used is refused before any worker
starts. A server that breaks in its own code costs the health checks, never the run.
"""

from __future__ import annotations

from tenax._io.ports import RequestRefused
from tenax._observe.health.port import TORCHELASTIC_HEALTH_CHECK_PORT, health_check_port
from tenax._observe.health.verdict import has_running_workers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from tenax._core.agent import AgentState
    from tenax._io.ports import Cancellable, EventLoop
    from tenax._observe.health.liveness import AgentLiveness

BEAT_EVERY_S = 1.0
TIMEOUT_S = 60  # as in torch


class HealthCheck:
    """``server`` is a ``HealthCheckServer`` or what somebody has made like it; only ours can be told of the run."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self.signs: AgentLiveness | None = getattr(server, "signs", None)
        self._is_serving = False
        self._timer: Cancellable | None = None

    def open(self, warn: Callable[[str], None], tell: Callable[[str], None] = lambda _: None) -> None:
        """Start to serve. Raises RequestRefused if the port cannot be used.

        ``warn`` is called if the server's own code fails, ``tell`` with where it serves.
        """
        if self.signs is not None:
            self.signs.begin()
        try:
            self._server.start()
        except Exception as error:  # the server may be somebody else's, and raise what it likes
            port = getattr(self._server, "port", None)
            if isinstance(error, OSError) and port is not None:
                raise RequestRefused(
                    f"port {port} for health checks cannot be used ({error.strerror or error}); "
                    f"choose another with {TORCHELASTIC_HEALTH_CHECK_PORT}, or 0 for any that is free"
                ) from error
            warn(f"health checks are not answered: its start() raised {_line(error)}; the run goes on without")
            return
        self._is_serving = True
        port = getattr(self._server, "port", None)
        if port is not None:
            tell(f"health checks are answered at port {port}")

    def watch(self, loop: EventLoop) -> None:
        """From now on the loop must come round to us."""
        signs = self.signs
        if signs is None or not self._is_serving:
            return

        def beat() -> None:
            signs.beat()
            self._timer = loop.at(loop.now() + BEAT_EVERY_S, beat)

        beat()

    def ask_watchdog(self, last_progress: Callable[[], float | None]) -> None:
        """This run has a watchdog; see ``AgentLiveness``. After ``open``."""
        if self.signs is not None:
            self.signs.ask_watchdog(last_progress)

    def observe(self, state: AgentState) -> None:
        """The agent has made a step."""
        if self.signs is not None:
            self.signs.note(state.phase.value, state.generation, is_ready=has_running_workers(state))

    def turn(self, phase: str, generation: int, *, is_ready: bool, waits_for: str) -> None:
        """The same of an agent with a loop of another kind, which beats here and not every second."""
        if self.signs is not None:
            self.signs.note(phase, generation, is_ready=is_ready)
            if waits_for:
                self.signs.wait_for(waits_for)
            else:
                self.signs.beat()

    def close(self, warn: Callable[[str], None]) -> None:
        """Nobody answers any more. ``warn`` hears that the server has broken in the end."""
        if self._timer is not None:
            self._timer.cancel()
        if self._is_serving:
            self._is_serving = False
            try:
                self._server.stop()
            except Exception as error:  # as in open; what the workers did stays done
                warn(f"the health check server did not stop well: its stop() raised {_line(error)}")


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def health_check_of(server: Any, environ: Mapping[str, str]) -> HealthCheck | None:
    """With the server that was passed, or with one of ours if the environment asks for it. Raises ValueError."""
    if server is not None:
        return HealthCheck(server)
    port = health_check_port(environ)
    if port is None:
        return None
    from tenax._observe.health.liveness import AgentLiveness
    from tenax._observe.health.server import HealthCheckServer

    signs = AgentLiveness()
    return HealthCheck(HealthCheckServer(signs.last_progress_time, port, TIMEOUT_S, signs=signs))
