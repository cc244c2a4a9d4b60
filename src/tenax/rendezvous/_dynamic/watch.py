"""What one node has observed of the others, measured on its own clock.

Clocks of two hosts are never compared. A node is silent while its heartbeat counter does not change. Silence counts
only while the observer itself was reading, so an observer that was stopped or slow does not declare others dead.
"""

from __future__ import annotations

import msgspec

from tenax.rendezvous._dynamic.state import Standing, State


class View(msgspec.Struct, frozen=True):
    """The conclusions from all readings so far."""

    dead: frozenset[str] = frozenset()
    gathering_s: float = 0.0  # how long the current round has been gathering
    enough_s: float = 0.0  # how long it has had at least ``min_nodes``


class Watch:
    """Call ``look(state, now)`` with every reading of the state."""

    def __init__(self, keep_alive_s: float, max_attempts: int) -> None:
        self._keep_alive_s = keep_alive_s
        self._silence_limit_s = keep_alive_s * max_attempts
        self._last_look: float | None = None
        self._silence: dict[str, tuple[int, float]] = {}  # id -> its counter, and how long it has not changed
        self._round = 0
        self._gathering_s = self._enough_s = 0.0
        self._had_enough = False

    def look(self, state: State | None, now: float) -> View:
        # A gap longer than a heartbeat interval is the observer's own lag, not silence.
        elapsed = 0.0 if self._last_look is None else min(max(now - self._last_look, 0.0), self._keep_alive_s)
        self._last_look = now
        if state is None:
            self._silence, self._round = {}, 0
            return View()
        self._silence = {node.id: (node.beat, self._silence_of(node.id, node.beat, elapsed)) for node in state.nodes}
        dead = frozenset(each for each, (_, silent_s) in self._silence.items() if silent_s >= self._silence_limit_s)
        if state.complete:
            self._round = 0
            return View(dead)
        self._time_gathering(state, dead, elapsed)
        return View(dead, self._gathering_s, self._enough_s)

    def _silence_of(self, node_id: str, beat: int, elapsed: float) -> float:
        known_beat, silent_s = self._silence.get(node_id, (None, 0.0))
        return silent_s + elapsed if known_beat == beat else 0.0

    def _time_gathering(self, state: State, dead: frozenset[str], elapsed: float) -> None:
        if self._round != state.round:
            self._round, self._gathering_s, self._enough_s, elapsed = state.round, 0.0, 0.0, 0.0
            self._had_enough = False
        self._gathering_s += elapsed
        has_enough = sum(node.id not in dead for node in state.with_standing(Standing.JOINED)) >= state.min_nodes
        self._enough_s = self._enough_s + elapsed if has_enough and self._had_enough else 0.0
        self._had_enough = has_enough
