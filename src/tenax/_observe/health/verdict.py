"""Judgement: from what is known of an agent to whether it is alive, and whether it is ready.

Pure. *Alive* is the agent itself: it makes progress, whatever its workers do and however long it waits for nodes; who
is not alive should be killed. *Ready* is its work: workers of a generation are running, or the run is over; who is not
ready should be waited for.
"""

from __future__ import annotations

import msgspec

from tenax._core.agent import Phase
from tenax._core.model import WorkerPhase

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from tenax._core.agent import AgentState

_OVER = (Phase.CLOSING, Phase.DONE, Phase.ENDED)


class Signs(msgspec.Struct, frozen=True):
    """What is known at one moment. None: nobody says."""

    phase: str = ""
    generation: int = 0
    is_ready: bool = False
    loop_age_s: float | None = None
    waits_for: str = ""  # what the agent waits for in somebody else's code, where no progress can be seen
    watchdog_age_s: float | None = None  # since a worker told the watchdog of its timers
    callback_age_s: float | None = None  # of the alive_callback
    trouble: str = ""  # what makes it unhealthy whatever its progress is


class HealthVerdict(msgspec.Struct, frozen=True):
    """An answer: good or not, and a sentence."""

    is_good: bool
    why: str


def liveness(signs: Signs, timeout_s: float) -> HealthVerdict:
    """Whether everything that should make progress has made some within ``timeout_s``."""
    if signs.trouble:
        return HealthVerdict(False, signs.trouble)
    # The watchdog is not judged: it lives in the loop, and what it has heard last is the workers' progress.
    for what, age_s in {"the agent": signs.callback_age_s, "the agent's loop": signs.loop_age_s}.items():
        if age_s is not None and age_s > timeout_s:
            return HealthVerdict(False, f"{what} has made no progress for {age_s:.0f} s; {timeout_s:g} s are allowed")
    return HealthVerdict(True, f"alive, waiting for {signs.waits_for}" if signs.waits_for else "alive")


def readiness(signs: Signs, timeout_s: float) -> HealthVerdict:
    """Whether workers run, or need not any more."""
    alive = liveness(signs, timeout_s)
    if not alive.is_good:
        return alive
    if not signs.phase:
        return HealthVerdict(True, "alive; nothing is known of workers")
    return HealthVerdict(signs.is_ready, f"{'ready' if signs.is_ready else 'not ready'}: {signs.phase}")


def details(judged: HealthVerdict, signs: Signs, timeout_s: float) -> dict[str, Any]:
    """The same for a program. Nothing of the environment, and not the run id: every network can read it."""
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
    """Whether this node does what it is here for: every worker of a generation is there, or the run is over for it."""
    if state.phase in _OVER:
        return True
    started = all(worker.phase is not WorkerPhase.REQUESTED for worker in state.workers.values())
    return state.phase is Phase.RUNNING and bool(state.workers) and started


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)
