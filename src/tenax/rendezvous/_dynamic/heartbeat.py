"""The heart: one thread that shows the others that this node lives, and sees how they are.

It never dies in silence: whatever goes wrong is kept in ``error`` until a beat succeeds, and the owner raises it. It
looks at least once a second, so that its owner can be asked about the others without waiting for the backend.
"""

from __future__ import annotations

import random
import threading

from tenax.rendezvous._dynamic import decisions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tenax.rendezvous._dynamic.event_recorder import EventRecorder
    from tenax.rendezvous._dynamic.holder import StateHolder
    from tenax.rendezvous._dynamic.state import State

_WHERE = "heartbeat.py:Heartbeat._run"
_LONGEST_LOOK_S = 1.0
_LONGEST_STOP_S = 5.0


class Heartbeat:
    """Runs from ``start`` to ``stop``. Holds no reference to its owner, which may be forgotten meanwhile."""

    def __init__(
        self,
        holder: StateHolder,
        node_id: str,
        interval_s: float,
        timeout_s: float,
        teller: EventRecorder | None = None,
    ) -> None:
        self.error: BaseException | None = None
        self._holder = holder
        self._node_id = node_id
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._teller = teller
        self._must_stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"rendezvous-heart-{node_id[:8]}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """No beat begins after this. A thread that hangs in a backend is not waited for: it can do nothing any more."""
        self.ask_to_stop()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(min(self._timeout_s, _LONGEST_STOP_S))

    def ask_to_stop(self) -> None:
        self._must_stop.set()

    def _run(self) -> None:
        beats_at = self._holder.clock()
        while not self._must_stop.is_set():
            try:
                if self._holder.clock() >= beats_at:
                    self._holder.change(self._beat, self._timeout_s)
                    beats_at = self._holder.clock() + self._interval_s
                    self._tell("has sent a heartbeat")
                else:
                    self._holder.look()
                self.error = None
            except BaseException as error:  # the owner raises it; a thread that ends here would be death in silence
                is_new = type(error) is not type(self.error)
                self.error = error
                if is_new:  # told once, not at every attempt
                    self._tell("could not send a heartbeat, because of a {}", type(error).__name__, state="FAILED")
            look_s = random.uniform(0.5, 1.0) * min(_LONGEST_LOOK_S, self._interval_s)  # noqa: S311 - spreads nodes
            self._must_stop.wait(max(0.0, min(look_s, beats_at - self._holder.clock())) if not self.error else look_s)

    def _tell(self, text: str, *values: object, state: str = "RUNNING") -> None:
        if self._teller is not None and not self._must_stop.is_set():
            self._teller.say(_WHERE, text, *values, state=state)

    def _beat(self, state: State) -> State | None:
        return None if self._must_stop.is_set() else decisions.beaten(state, self._node_id)
