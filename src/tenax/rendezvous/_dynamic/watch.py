"""The watch: what one node has seen of the others, measured on its own clock.

Clocks of two hosts are never compared. A node is silent while its count does not change; silence is counted only as
long as the observer itself was looking, so that one that was stopped or slow does not accuse the others for it.
"""

from __future__ import annotations

import msgspec

from tenax.rendezvous._dynamic.state import Standing, State


class View(msgspec.Struct, frozen=True):
    """What follows from all looks so far."""

    dead: frozenset[str] = frozenset()
    gathering_s: float = 0.0  # how long the round that gathers has done so
    enough_s: float = 0.0  # how long that round has had the least number of nodes


class Watch:
    """``look(state, now)`` takes in one reading of the state."""

    def __init__(self, keep_alive_s: float, max_attempts: int) -> None:
        self._keep_alive_s = keep_alive_s
        self._silence_limit_s = keep_alive_s * max_attempts
        self._last_look: float | None = None
        self._silence: dict[str, tuple[int, float]] = {}  # id -> its count, and for how long it was that
        self._round = 0
        self._gathering_s = self._enough_s = 0.0
        self._had_enough = False

    def look(self, state: State | None, now: float) -> View:
        # A longer gap than a heartbeat's is our own slowness, not theirs.
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
