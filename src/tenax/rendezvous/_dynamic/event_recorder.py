"""Records what a node does in its rendezvous as events.

Without an event handler nothing is created. With one, events are delivered in a separate thread: a slow handler must
not delay the heartbeats, and one that raises must not end the rendezvous.
"""

from __future__ import annotations

import os

from tenax._io.background_queue import BackgroundQueue
from tenax.events._recording import has_rendezvous_receiver, present_traceback, record_rdzv_event
from tenax.rendezvous._dynamic.changes import changes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType

    from tenax.rendezvous._dynamic.state import State

INIT, RUNNING, SUCCEEDED, FAILED = "INIT", "RUNNING", "SUCCEEDED", "FAILED"


class EventRecorder:
    """Records the events of one node. ``where`` names the file, the class and the method."""

    def __init__(self, run_id: str, host: str, node_id: str = "") -> None:
        self._run_id = run_id
        self._host = host
        self._node_id = node_id
        self._who = f"{host} ({node_id[:8]})" if node_id else host
        self._queue: BackgroundQueue | None = None

    def record(
        self,
        where: str,
        text: str,
        *values: object,
        state: str = RUNNING,
        rank: int | None = None,
        master_endpoint: str = "",
    ) -> None:
        """Record one event. The node's name is put before the text, which is formatted only if there is a handler."""
        if has_rendezvous_receiver():
            message = f"{self._who} {text.format(*values) if values else text}"
            self._record(where, message, state, rank, master_endpoint)

    def record_changes(self, where: str, before: State | None, after: State) -> None:
        """Record what this node is about to write."""
        if has_rendezvous_receiver():
            for change in changes(before, after, self._node_id):
                self.record(where, "{}", change.text, state=SUCCEEDED if change.is_achieved else RUNNING)

    def failed(self, where: str, error: BaseException) -> None:
        """Record an error. Call this while it is being handled."""
        if has_rendezvous_receiver():
            self._record(where, f"{type(error).__name__}: {error}", FAILED)

    def errors_of(self, where: str) -> _Errors:
        """Return a context manager that records errors that pass through it."""
        return _Errors(self, where)

    def close(self) -> None:
        """Wait briefly for the delivery of the last events. Another event reopens it."""
        queue, self._queue = self._queue, None
        lost = queue.close() if queue is not None else ""
        if lost:
            import warnings

            warnings.warn(f"lost rendezvous events: {lost}", RuntimeWarning, stacklevel=2)

    def _record(self, where: str, message: str, state: str, rank: int | None = None, master_endpoint: str = "") -> None:
        from tenax.events.api import NodeState, RdzvEvent

        event = RdzvEvent(
            name=where,
            run_id=self._run_id,
            message=message,
            hostname=self._host,
            pid=os.getpid(),
            node_state=NodeState(state),
            master_endpoint=master_endpoint,
            rank=rank,
            error_trace=present_traceback() if state == FAILED else "",
        )
        if self._queue is None:
            self._queue = BackgroundQueue("a handler of rendezvous events", record_rdzv_event)
        self._queue.put(event)


class _Errors:
    def __init__(self, recorder: EventRecorder, where: str) -> None:
        self._recorder = recorder
        self._where = where

    def __enter__(self) -> None:
        return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):  # not KeyboardInterrupt or SystemExit
            self._recorder.failed(self._where, error)
