"""HealthCheck: the health check of one run of an agent. The agent's thread records its liveness, any other judges it.

*Alive*: the agent makes progress, whatever its workers do and however long it waits for nodes. An agent that is not
alive should be killed. *Ready*: the workers of a generation are running, or the run is over.

Every field of the record is replaced as a whole, so there is no lock that a stuck agent could hold. Ages are measured
on a monotonic clock.

The agent opens the server before the rendezvous and closes it last. A port that cannot be used is rejected before any
worker starts. A server that raises affects only the health checks, never the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from tenax._core.agent import AgentState, Phase
from tenax._core.model import WorkerPhase
from tenax._core.text import format_duration, format_seconds
from tenax._io.interfaces import Cancellable, EventLoop, RequestRefused
from tenax._io.loop import NO_TIMER

TORCHELASTIC_HEALTH_CHECK_PORT = "TORCHELASTIC_HEALTH_CHECK_PORT"
_MAX_PORT = 65535
BEAT_EVERY_S = 1.0
TIMEOUT_S = 60  # as in torch
_OVER = (Phase.CLOSING, Phase.DONE, Phase.ENDED)


class Signs(msgspec.Struct, frozen=True):
    """A snapshot of the agent's liveness. None: unknown."""

    phase: str = ""
    generation: int = 0
    is_ready: bool = False
    loop_age_s: float | None = None
    waits_for: str = ""  # what the agent waits for in third-party code, where progress is invisible
    watchdog_age_s: float | None = None  # since a worker last contacted the watchdog
    callback_age_s: float | None = None  # of the alive_callback
    trouble: str = ""  # a reason for being unhealthy, whatever the progress


class AgentLiveness:
    """Records when the agent's loop last ran (``beat``) and what the agent does. The reader judges it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._now = clock
        self._state = Signs()
        self._beat_at: float | None = None  # None: no beat is expected now
        self._waits_for = ""
        self._watchdog: Callable[[], float | None] | None = None

    def begin(self) -> None:
        """Reset for a new run."""
        self._state = Signs("starting")
        self._beat_at, self._waits_for, self._watchdog = None, "", None

    def beat(self) -> None:
        """Record that the loop runs. From now on beats are expected."""
        self._beat_at = self._now()
        self._waits_for = ""

    def wait_for(self, what: str) -> None:
        """Expect no beats while the agent waits in third-party code. The next beat ends this."""
        self._waits_for = what
        self._beat_at = None

    def note(self, phase: str, generation: int, *, is_ready: bool) -> None:
        self._state = Signs(phase, generation, is_ready)

    def ask_watchdog(self, last_progress: Callable[[], float | None]) -> None:
        """Set a callback for the time, since the epoch, when a worker last contacted the watchdog, or None."""
        self._watchdog = last_progress

    def last_progress_time(self) -> int:
        """Return when the loop last ran, in seconds since the epoch. Serves as an ``alive_callback``."""
        beat_at = self._beat_at
        return int(time.time() - (0.0 if beat_at is None else self._now() - beat_at))

    def read(self) -> Signs:
        beat_at, watchdog = self._beat_at, self._watchdog
        watched_at = None if watchdog is None else watchdog()
        return msgspec.structs.replace(
            self._state,
            loop_age_s=None if beat_at is None else max(0.0, self._now() - beat_at),
            waits_for=self._waits_for,
            watchdog_age_s=None if watched_at is None else max(0.0, time.time() - watched_at),
        )


class HealthVerdict(msgspec.Struct, frozen=True):
    is_good: bool
    why: str


def liveness(signs: Signs, timeout_s: float) -> HealthVerdict:
    """Check that everything that should make progress has done so within ``timeout_s``."""
    if signs.trouble:
        return HealthVerdict(False, signs.trouble)
    # The watchdog is not judged: it runs in the loop, and its age is that of the workers' progress.
    for what, age_s in {"the agent": signs.callback_age_s, "the agent's loop": signs.loop_age_s}.items():
        if age_s is not None and age_s > timeout_s:
            return HealthVerdict(
                False, f"{what} has made no progress for {format_duration(age_s)} (limit {format_seconds(timeout_s)})"
            )
    return HealthVerdict(True, f"alive, waiting for {signs.waits_for}" if signs.waits_for else "alive")


def readiness(signs: Signs, timeout_s: float) -> HealthVerdict:
    """Check that workers run, or that the run is over."""
    alive = liveness(signs, timeout_s)
    if not alive.is_good:
        return alive
    if not signs.phase:
        return HealthVerdict(True, "alive; the state of the workers is unknown")
    return HealthVerdict(signs.is_ready, f"{'ready' if signs.is_ready else 'not ready'}: {signs.phase}")


def details(judged: HealthVerdict, signs: Signs, timeout_s: float) -> dict[str, Any]:
    """Return the verdict and the snapshot for JSON. Contains no run id or environment: any peer can read it."""
    return {
        "ok": judged.is_good,
        "why": judged.why,
        "phase": signs.phase,
        "generation": signs.generation,
        "ready": readiness(signs, timeout_s).is_good,
        "seconds_since_loop_progress": _rounded(signs.loop_age_s),
        "seconds_since_watchdog_progress": _rounded(signs.watchdog_age_s),
        "timeout_s": timeout_s,
    }


def has_running_workers(state: AgentState) -> bool:
    """Return True if every worker of a generation has started, or the run is over for this node."""
    if state.phase in _OVER:
        return True
    started = all(worker.phase is not WorkerPhase.REQUESTED for worker in state.workers.values())
    return state.phase is Phase.RUNNING and bool(state.workers) and started


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


class HealthCheck:
    """``server`` is a ``HealthCheckServer`` or a third-party equivalent, which does not read the ``signs``."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self.signs: AgentLiveness = getattr(server, "signs", None) or AgentLiveness()
        self._is_serving = False
        self._timer: Cancellable = NO_TIMER

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

    def observe(self, state: AgentState) -> None:
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
