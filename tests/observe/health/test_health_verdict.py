"""The verdicts: the agent is alive, its workers are ready. No clock, no sockets."""

from __future__ import annotations

import msgspec
import pytest

from tenax._core.agent import AgentState, Phase
from tenax._core.model import AgentSettings, WorkerPhase, WorkerRecord
from tenax._observe.health.check import (
    AgentLiveness,
    Signs,
    details,
    has_running_workers,
    health_check_port,
    liveness,
    readiness,
)


@pytest.mark.parametrize("source", ["loop_age_s", "callback_age_s"])
def test_missing_progress_is_not_alive(source: str) -> None:
    """One source older than the timeout is enough; an unknown one does not count."""
    assert liveness(Signs(**{source: 60.0}), 60).is_good  # type: ignore[arg-type]
    judged = liveness(Signs(**{source: 61.0}), 60)  # type: ignore[arg-type]
    assert not judged.is_good
    assert "1 min 1 s (limit 1 min)" in judged.why


def test_the_age_of_the_watchdog_is_shown_but_not_judged() -> None:
    """A job that uses no timers for an hour is alive."""
    signs = Signs(watchdog_age_s=3600.0)
    assert liveness(signs, 60).is_good
    assert details(liveness(signs, 60), signs, 60)["seconds_since_watchdog_progress"] == 3600


def test_an_agent_without_known_progress_is_alive() -> None:
    assert liveness(Signs(), 60).is_good
    assert readiness(Signs(), 60).is_good


def test_trouble_has_priority_over_progress() -> None:
    judged = liveness(Signs(loop_age_s=0.0, trouble="GPU 3: the node must be rebooted"), 60)
    assert (judged.is_good, judged.why) == (False, "GPU 3: the node must be rebooted")


def test_ready_requires_running_workers_and_a_live_agent() -> None:
    """Not ready while it waits, ready when they run, not ready when the agent is stuck."""
    assert not readiness(Signs(phase="joining"), 60).is_good
    running = Signs(phase="running", is_ready=True, loop_age_s=1.0)
    assert readiness(running, 60).why == "ready: running"
    assert not readiness(msgspec.structs.replace(running, loop_age_s=61.0), 60).is_good


def test_details_contain_nothing_else() -> None:
    """All that an unauthenticated peer can read."""
    signs = Signs("running", 3, True, 0.12345, "", None, 5.0)
    assert details(liveness(signs, 60), signs, 60) == {
        "ok": True,
        "why": "alive",
        "phase": "running",
        "generation": 3,
        "ready": True,
        "seconds_since_loop_progress": 0.123,
        "seconds_since_watchdog_progress": None,
        "timeout_s": 60,
    }


def test_an_agent_is_ready_when_all_workers_have_started_or_the_run_is_over() -> None:
    """In no other phase, and not while a worker is being started."""
    state = AgentState(AgentSettings(run_id="r", role="default", local_world_size=2, max_restarts=0))
    state.last.workers = {0: WorkerRecord(0, WorkerPhase.RUNNING), 1: WorkerRecord(1, WorkerPhase.RUNNING)}
    ready = set()
    for phase in Phase:
        state.phase = phase
        if has_running_workers(state):
            ready.add(phase)
    assert ready == {Phase.RUNNING, Phase.CLOSING, Phase.DONE, Phase.ENDED}
    state.phase = Phase.RUNNING
    state.workers[1].phase = WorkerPhase.REQUESTED
    assert not has_running_workers(state)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_beats_are_expected_except_while_waiting() -> None:
    """From the first beat on; but not while the agent waits in third-party code."""
    clock = Clock()
    signs = AgentLiveness(clock)
    signs.begin()
    clock.now += 500
    assert signs.read().loop_age_s is None
    signs.beat()
    clock.now += 61
    assert signs.read().loop_age_s == 61
    signs.wait_for("the other nodes")
    clock.now += 1000
    assert signs.read().loop_age_s is None
    assert liveness(signs.read(), 60).why == "alive, waiting for the other nodes"
    signs.beat()
    assert signs.read() == Signs("starting", 0, False, 0.0)


def test_the_watchdog_is_read_every_time() -> None:
    """It returns seconds since the epoch, or None before its first contact."""
    signs = AgentLiveness()
    last_contact: list[float | None] = [None]
    signs.ask_watchdog(lambda: last_contact[0])
    assert signs.read().watchdog_age_s is None
    last_contact[0] = 0.0
    assert (signs.read().watchdog_age_s or 0) > 1e9


def test_the_port_is_checked() -> None:
    """Unset or empty: none. Anything but a port is rejected with a message."""
    name = "TORCHELASTIC_HEALTH_CHECK_PORT"
    assert health_check_port({}) is None
    assert health_check_port({name: " "}) is None
    assert [health_check_port({name: text}) for text in ("0", "8080", " 65535 ")] == [0, 8080, 65535]
    for wrong in ("x", "-1", "65536", "80.0", "٣", "1e3"):
        with pytest.raises(ValueError, match=f"{name} is .*; expected a port from 0 to 65535"):
            health_check_port({name: wrong})
