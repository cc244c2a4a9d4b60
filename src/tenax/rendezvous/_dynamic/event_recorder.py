"""The teller: tells what a node does in its rendezvous, as events, to whoever listens.

If nobody does, nothing is made. If somebody does, it is handed over in a thread apart: a handler that is slow must not
hold up the heartbeats by which the others know that we live, and one that raises must not end a rendezvous.
"""

from __future__ import annotations

import os

from tenax._io.delivery import Delivery
from tenax.events._recording import is_rendezvous_heard, present_traceback, record_rdzv_event
from tenax.rendezvous._dynamic.changes import changes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType

    from tenax.rendezvous._dynamic.state import State

INIT, RUNNING, SUCCEEDED, FAILED = "INIT", "RUNNING", "SUCCEEDED", "FAILED"


class EventRecorder:
    """Speaks for one node. ``where`` is always the file, the class and the method that tell."""

    def __init__(self, run_id: str, host: str, node_id: str = "") -> None:
        self._run_id = run_id
        self._host = host
        self._node_id = node_id
        self._who = f"{host} ({node_id[:8]})" if node_id else host
        self._delivery: Delivery | None = None

    def say(
        self,
        where: str,
        text: str,
        *values: object,
        state: str = RUNNING,
        rank: int | None = None,
        master_endpoint: str = "",
    ) -> None:
        """One event. ``values`` are put into the text only if somebody listens. The node's name goes before it."""
        if is_rendezvous_heard():
            message = f"{self._who} {text.format(*values) if values else text}"
            self._record(where, message, state, rank, master_endpoint)

    def say_changes(self, where: str, before: State | None, after: State) -> None:
        """What this node is about to write."""
        if is_rendezvous_heard():
            for change in changes(before, after, self._node_id):
                self.say(where, "{}", change.text, state=SUCCEEDED if change.is_achieved else RUNNING)

    def failed(self, where: str, error: BaseException) -> None:
        """To be called while the error is being handled."""
        if is_rendezvous_heard():
            self._record(where, f"{type(error).__name__}: {error}", FAILED)

    def errors_of(self, where: str) -> _Errors:
        """``with`` this: an error on its way through is told."""
        return _Errors(self, where)

    def close(self) -> None:
        """Wait a little for what was told last. Another word opens it again."""
        delivery, self._delivery = self._delivery, None
        lost = delivery.close() if delivery is not None else ""
        if lost:
            import warnings

            warnings.warn(f"events of the rendezvous were lost: {lost}", RuntimeWarning, stacklevel=2)

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
        if self._delivery is None:
            self._delivery = Delivery("a handler of rendezvous events", record_rdzv_event)
        self._delivery.put(event)


class _Errors:
    def __init__(self, teller: EventRecorder, where: str) -> None:
        self._teller = teller
        self._where = where

    def __enter__(self) -> None:
        return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):  # not a signal or a Ctrl-C: that is no fault of the rendezvous
            self._teller.failed(self._where, error)
