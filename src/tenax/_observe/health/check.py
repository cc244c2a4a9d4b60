"""HealthCheck: the health check server of one run of an agent.

The agent opens it before the rendezvous and closes it last. A port that cannot be used is rejected before any worker
starts. A server that raises affects only the health checks, never the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tenax._core.agent import AgentState
from tenax._io.interfaces import Cancellable, EventLoop, RequestRefused
from tenax._observe.health.liveness import AgentLiveness, has_running_workers

TORCHELASTIC_HEALTH_CHECK_PORT = "TORCHELASTIC_HEALTH_CHECK_PORT"
_MAX_PORT = 65535
BEAT_EVERY_S = 1.0
TIMEOUT_S = 60  # as in torch


class HealthCheck:
    """``server`` is a ``HealthCheckServer`` or a third-party equivalent, which does not read the ``signs``."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self.signs: AgentLiveness = getattr(server, "signs", None) or AgentLiveness()
        self._is_serving = False
        self._timer: Cancellable | None = None

    def open(self, warn: Callable[[str], None], inform: Callable[[str], None] = lambda _: None) -> None:
        """Start the server. Raises RequestRefused if the port cannot be used.

        ``warn`` is called if the server raises, ``inform`` with the port that it uses.
        """
        self.signs.begin()
        try:
            self._server.start()
        except Exception as error:  # a third-party server may raise anything
            port = getattr(self._server, "port", None)
            if isinstance(error, OSError) and port is not None:
                raise RequestRefused(
                    f"could not serve health checks on port {port}: {error.strerror or error}; "
                    f"set {TORCHELASTIC_HEALTH_CHECK_PORT} to another port, or to 0 for any free port"
                ) from error
            warn(f"could not start the health check server: start() raised {_line(error)}; the run continues")
            return
        self._is_serving = True
        port = getattr(self._server, "port", None)
        if port is not None:
            inform(f"serving health checks on port {port}")

    def watch(self, loop: EventLoop) -> None:
        """Record a beat of the loop every second from now on."""
        if not self._is_serving or not hasattr(self._server, "signs"):  # a third-party server does not read them
            return

        def beat() -> None:
            self.signs.beat()
            self._timer = loop.at(loop.now() + BEAT_EVERY_S, beat)

        beat()

    def ask_watchdog(self, last_progress: Callable[[], float | None]) -> None:
        """Include the progress that the run's watchdog has seen. Call after ``open``."""
        self.signs.ask_watchdog(last_progress)

    def observe(self, state: AgentState) -> None:
        """Record a step of the agent."""
        self.signs.note(state.phase.value, state.generation, is_ready=has_running_workers(state))

    def turn(self, phase: str, generation: int, *, is_ready: bool, waits_for: str) -> None:
        """Record a turn of an agent that polls. It beats here, not every second."""
        self.signs.note(phase, generation, is_ready=is_ready)
        if waits_for:
            self.signs.wait_for(waits_for)
        else:
            self.signs.beat()

    def close(self, warn: Callable[[str], None]) -> None:
        """Stop the server. ``warn`` is called if it raises."""
        if self._timer is not None:
            self._timer.cancel()
        if self._is_serving:
            self._is_serving = False
            try:
                self._server.stop()
            except Exception as error:  # a third-party server may raise anything
                warn(f"could not stop the health check server: stop() raised {_line(error)}")


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def health_check_of(server: Any, environ: Mapping[str, str]) -> HealthCheck | None:
    """Return a check with this server, or with tenax's own if the environment enables it. Raises ValueError."""
    if server is not None:
        return HealthCheck(server)
    port = health_check_port(environ)
    if port is None:
        return None
    from tenax._observe.health.server import HealthCheckServer

    signs = AgentLiveness()
    return HealthCheck(HealthCheckServer(signs.last_progress_time, port, TIMEOUT_S, signs=signs))


def health_check_port(environ: Mapping[str, str]) -> int | None:
    """Return the port, 0 for any free port, or None for no health checks. Raises ValueError with a message."""
    written = environ.get(TORCHELASTIC_HEALTH_CHECK_PORT, "").strip()
    if not written:
        return None
    if not (written.isascii() and written.isdecimal() and int(written) <= _MAX_PORT):
        raise ValueError(
            f"{TORCHELASTIC_HEALTH_CHECK_PORT} is {written!r}; expected a port from 0 to {_MAX_PORT}, "
            "or unset for no health checks"
        )
    return int(written)
