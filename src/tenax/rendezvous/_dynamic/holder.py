"""The holder of the shared state: the one place that reads and writes it through a backend.

Every reading also goes through the watch, so that silence is measured whoever reads. Calls of several threads are
served one after the other; the last ``sight`` can be looked at without waiting for any of them.
"""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import msgspec

from tenax.rendezvous._dynamic.state import State, decode, encode
from tenax.rendezvous._dynamic.watch import View, Watch
from tenax.rendezvous.api import RendezvousTimeoutError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from tenax.rendezvous.dynamic_rendezvous import RendezvousBackend

_SHORTEST_PAUSE_S = 0.005
_LONGEST_PAUSE_S = 1.0
_PAUSE_PER_NODE_S = 0.001  # the more nodes ask, the less often each does


class Sight(msgspec.Struct, frozen=True):
    """One reading: the state, the backend's token for it, and what the watch makes of it."""

    state: State | None = None
    token: Any = None
    view: View = View()


class StateHolder:
    """``look`` reads, ``put`` writes if nobody else did, ``change`` writes until it is true."""

    def __init__(
        self,
        backend: RendezvousBackend,
        run_id: str,
        keep_alive_s: float,
        max_attempts: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock = clock
        self.sight = Sight()
        self.reached_at = clock()  # when the backend last answered
        self._backend = backend
        self._run_id = run_id
        self._watch = Watch(keep_alive_s, max_attempts)
        self._lock = threading.Lock()
        self._last: tuple[bytes, State] | None = None

    def look(self) -> Sight:
        with self._lock:
            return self._take_in(self._backend.get_state())

    def put(self, state: State, token: Any) -> tuple[Sight, bool]:
        """Write it in place of what ``token`` stands for. Returns what is there now, and whether that is ours."""
        with self._lock:
            answer = self._backend.set_state(encode(state), token)
            if answer is None:
                return self._take_in(None), False
            blob, new_token, is_ours = answer
            return self._take_in((blob, new_token)), bool(is_ours)

    def change(self, change: Callable[[State], State | None], timeout_s: float, first: State | None = None) -> Sight:
        """Apply a change to whatever the state is, until that holds; ``first`` is what to write if there is no state.

        None means that there is nothing to change.
        """
        give_up_at = self.clock() + timeout_s
        pause = Pause()
        sight = self.look()
        while True:
            changed = change(sight.state) if sight.state is not None else first
            if changed is None or changed == sight.state:
                return sight
            sight, is_done = self.put(changed, sight.token)
            if is_done:
                return sight
            if self.clock() >= give_up_at:
                raise RendezvousTimeoutError(
                    f"the state of the run {self._run_id!r} could not be changed within {timeout_s:g} s, because other "
                    "nodes change it all the time"
                )
            pause.after_a_lost_write(sight)

    def _take_in(self, found: tuple[bytes, Any] | None) -> Sight:
        self.reached_at = now = self.clock()
        state = token = None
        if found is not None:
            blob, token = found
            if self._last is None or self._last[0] != blob:
                self._last = (blob, decode(blob, self._run_id))
            state = self._last[1]
        self.sight = Sight(state, token, self._watch.look(state, now))
        return self.sight


class Pause:
    """How long to wait before the next look: short after a change, longer while nothing happens, never the same."""

    def __init__(self) -> None:
        self._seen: Any = None
        self._next_s = _SHORTEST_PAUSE_S

    def before_the_next_look(self, sight: Sight) -> None:
        # Heartbeats change the token all the time; what counts is where everybody stands.
        state = sight.state
        seen = state and (state.round, state.complete, [(node.id, node.standing) for node in state.nodes])
        if seen != self._seen:
            self._seen, self._next_s = seen, _SHORTEST_PAUSE_S
        self._sleep(sight)

    def after_a_lost_write(self, sight: Sight) -> None:
        self._sleep(sight)

    def _sleep(self, sight: Sight) -> None:
        nodes = len(sight.state.nodes) if sight.state is not None else 0
        longest = min(_LONGEST_PAUSE_S, 0.05 + _PAUSE_PER_NODE_S * nodes)
        time.sleep(random.uniform(0.5, 1.0) * min(self._next_s, longest))  # noqa: S311 - spreads nodes, hides nothing
        self._next_s = min(2 * self._next_s, longest)
