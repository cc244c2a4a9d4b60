"""Reads and writes the shared state through a backend: on demand, and in the thread of the heartbeats.

Every reading also goes through the watch, so that silence is measured whichever thread reads. Calls from several
threads are serialized; the last ``snapshot`` is available without waiting.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from tenax._core.text import format_seconds
from tenax.rendezvous._dynamic import decisions
from tenax.rendezvous._dynamic.decisions import View, Watch
from tenax.rendezvous._dynamic.event_recorder import EventRecorder
from tenax.rendezvous._dynamic.state import State, decode, encode
from tenax.rendezvous.api import RendezvousTimeoutError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tenax.rendezvous.dynamic_rendezvous import RendezvousBackend, RendezvousSettings

_MIN_PAUSE_S = 0.005
_MAX_PAUSE_S = 1.0
_PAUSE_PER_NODE_S = 0.001  # the more nodes poll, the less often each one does
_WHERE = "holder.py:Heartbeat._run"
_MAX_READ_INTERVAL_S = 1.0
_MAX_STOP_S = 5.0


class Snapshot(msgspec.Struct, frozen=True):
    """One reading: the state, the backend's token for it, and the view of the watch."""

    state: State | None = None
    token: Any = None
    view: View = View()


class StateHolder:
    """``read`` reads, ``put`` writes if the state has not changed, ``change`` retries until a change is written."""

    def __init__(self, backend: RendezvousBackend, settings: RendezvousSettings) -> None:
        self.snapshot = Snapshot()
        self.reached_at = time.monotonic()  # when the backend last answered
        self._backend = backend
        self._run_id = settings.run_id
        self._watch = Watch(settings.keep_alive_interval.total_seconds(), settings.keep_alive_max_attempt)
        self._lock = threading.Lock()
        self._last: tuple[bytes, State] | None = None

    def read(self) -> Snapshot:
        with self._lock:
            return self._update(self._backend.get_state())

    def put(self, state: State, token: Any) -> tuple[Snapshot, bool]:
        """Replace the state with this token. Return the state stored now, and whether it is the one just written."""
        with self._lock:
            answer = self._backend.set_state(encode(state), token)
            if answer is None:
                return self._update(None), False
            blob, new_token, is_written = answer
            return self._update((blob, new_token)), bool(is_written)

    def change(
        self, change: Callable[[State], State | None], timeout_s: float, first: State | None = None
    ) -> State | None:
        """Apply ``change`` to the current state until it is written. Return the state that was replaced, if any.

        ``change`` returns None if there is nothing to change. ``first`` is written if there is no state.
        """
        give_up_at = time.monotonic() + timeout_s
        pause = Pause()
        snapshot = self.read()
        while True:
            before = snapshot.state
            changed = change(before) if before is not None else first
            if changed is None or changed == before:
                return None
            snapshot, is_done = self.put(changed, snapshot.token)
            if is_done:
                return before
            if time.monotonic() >= give_up_at:
                raise RendezvousTimeoutError(
                    f"could not write the state of the run {self._run_id!r} within {format_seconds(timeout_s)}, "
                    "because other nodes kept changing it"
                )
            pause.sleep(snapshot)

    def _update(self, found: tuple[bytes, Any] | None) -> Snapshot:
        self.reached_at = now = time.monotonic()
        state = token = None
        if found is not None:
            blob, token = found
            if self._last is None or self._last[0] != blob:
                self._last = (blob, decode(blob, self._run_id))
            state = self._last[1]
        self.snapshot = Snapshot(state, token, self._watch.look(state, now))
        return self.snapshot


class Pause:
    """Sleeps between readings: briefly after a change, then with backoff and jitter."""

    def __init__(self) -> None:
        self._seen: Any = None
        self._next_s = _MIN_PAUSE_S

    def before_next_read(self, snapshot: Snapshot) -> None:
        # Heartbeats change the token all the time: compare the standing of the nodes instead.
        state = snapshot.state
        seen = state and (state.round, state.complete, [(node.id, node.standing) for node in state.nodes])
        if seen != self._seen:
            self._seen, self._next_s = seen, _MIN_PAUSE_S
        self.sleep(snapshot)

    def sleep(self, snapshot: Snapshot) -> None:
        nodes = len(snapshot.state.nodes) if snapshot.state is not None else 0
        longest = min(_MAX_PAUSE_S, 0.05 + _PAUSE_PER_NODE_S * nodes)
        time.sleep(random.uniform(0.5, 1.0) * min(self._next_s, longest))  # noqa: S311 - spreads nodes, hides nothing
        self._next_s = min(2 * self._next_s, longest)


class Heartbeat:
    """A thread that sends this node's heartbeats and reads the state of the others, until ``stop``.

    Errors never vanish: the last one is kept in ``error`` until a heartbeat succeeds, and the owner raises it. The
    state is read at least once a second, so the owner can query it without waiting for the backend. Holds no reference
    to its owner, which may be garbage-collected.
    """

    def __init__(
        self, holder: StateHolder, node_id: str, settings: RendezvousSettings, recorder: EventRecorder
    ) -> None:
        self.error: BaseException | None = None
        self.stop_requested = threading.Event()
        self._holder = holder
        self._node_id = node_id
        self._interval_s = settings.keep_alive_interval.total_seconds()
        self._timeout_s = settings.timeout.heartbeat.total_seconds()
        self._recorder = recorder
        self._thread = threading.Thread(target=self._run, name=f"rendezvous-heartbeat-{node_id[:8]}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop. A thread that hangs in the backend is not waited for: it writes nothing any more."""
        self.stop_requested.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(min(self._timeout_s, _MAX_STOP_S))

    def _run(self) -> None:
        next_beat_at = time.monotonic()
        while not self.stop_requested.is_set():
            try:
                if time.monotonic() >= next_beat_at:
                    self._holder.change(self._beat, self._timeout_s)
                    next_beat_at = time.monotonic() + self._interval_s
                    self._record("sent a heartbeat")
                else:
                    self._holder.read()
                self.error = None
            except BaseException as error:  # kept for the owner to raise
                is_new = type(error) is not type(self.error)
                self.error = error
                if is_new:  # recorded once, not at every attempt
                    self._record(f"could not send a heartbeat: {type(error).__name__}", state="FAILED")
            wait_s = random.uniform(0.5, 1.0) * min(_MAX_READ_INTERVAL_S, self._interval_s)  # noqa: S311 - spreads nodes
            self.stop_requested.wait(
                max(0.0, min(wait_s, next_beat_at - time.monotonic())) if not self.error else wait_s
            )

    def _record(self, text: str, state: str = "RUNNING") -> None:
        if not self.stop_requested.is_set():
            self._recorder.record(_WHERE, text, state=state)

    def _beat(self, state: State) -> State | None:
        return None if self.stop_requested.is_set() else decisions.with_heartbeat(state, self._node_id)
