"""A thread that sends this node's heartbeats and reads the state of the others.

Errors never vanish: the last one is kept in ``error`` until a heartbeat succeeds, and the owner raises it. The state is
read at least once a second, so the owner can query it without waiting for the backend.
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
_MAX_READ_INTERVAL_S = 1.0
_MAX_STOP_S = 5.0


class Heartbeat:
    """Runs from ``start`` to ``stop``. Holds no reference to its owner, which may be garbage-collected."""

    def __init__(
        self,
        holder: StateHolder,
        node_id: str,
        interval_s: float,
        timeout_s: float,
        recorder: EventRecorder | None = None,
    ) -> None:
        self.error: BaseException | None = None
        self._holder = holder
        self._node_id = node_id
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._recorder = recorder
        self._stop_requested = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"rendezvous-heartbeat-{node_id[:8]}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop. A thread that hangs in the backend is not waited for: it writes nothing any more."""
        self.request_stop()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(min(self._timeout_s, _MAX_STOP_S))

    def request_stop(self) -> None:
        self._stop_requested.set()

    def _run(self) -> None:
        next_beat_at = self._holder.clock()
        while not self._stop_requested.is_set():
            try:
                if self._holder.clock() >= next_beat_at:
                    self._holder.change(self._beat, self._timeout_s)
                    next_beat_at = self._holder.clock() + self._interval_s
                    self._record("sent a heartbeat")
                else:
                    self._holder.read()
                self.error = None
            except BaseException as error:  # kept for the owner to raise
                is_new = type(error) is not type(self.error)
                self.error = error
                if is_new:  # recorded once, not at every attempt
                    self._record("could not send a heartbeat: {}", type(error).__name__, state="FAILED")
            wait_s = random.uniform(0.5, 1.0) * min(_MAX_READ_INTERVAL_S, self._interval_s)  # noqa: S311 - spreads nodes
            self._stop_requested.wait(
                max(0.0, min(wait_s, next_beat_at - self._holder.clock())) if not self.error else wait_s
            )

    def _record(self, text: str, *values: object, state: str = "RUNNING") -> None:
        if self._recorder is not None and not self._stop_requested.is_set():
            self._recorder.record(_WHERE, text, *values, state=state)

    def _beat(self, state: State) -> State | None:
        return None if self._stop_requested.is_set() else decisions.with_heartbeat(state, self._node_id)
