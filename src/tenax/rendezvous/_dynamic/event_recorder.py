"""Records what a node does in its rendezvous as events, and describes changes of the shared state for them.

Without an event handler nothing is created. With one, events are delivered in a separate thread: a slow handler must
not delay the heartbeats, and one that raises must not end the rendezvous.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from tenax._io.background_queue import BackgroundQueue
from tenax.events._recording import has_rendezvous_receiver, present_traceback, record_rdzv_event
from tenax.events.api import NodeState, RdzvEvent
from tenax.rendezvous._dynamic.state import Standing, State, first_names
from tenax.rendezvous.api import RendezvousParameters

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
        self, where: str, text: str, *, state: str = RUNNING, rank: int | None = None, master_endpoint: str = ""
    ) -> None:
        """Record one event. The node's name is put before the text."""
        self._record(where, f"{self._who} {text}", state, rank, master_endpoint)

    def record_changes(self, where: str, before: State | None, after: State) -> None:
        """Record what this node is about to write."""
        if has_rendezvous_receiver():
            for text, state in changes(before, after, self._node_id):
                self.record(where, text, state=state)

    @contextmanager
    def errors_of(self, where: str) -> Iterator[None]:
        """Record an error that the block raises."""
        try:
            yield
        except Exception as error:  # not KeyboardInterrupt or SystemExit
            self._record(where, f"{type(error).__name__}: {error}", FAILED)
            raise

    def close(self) -> None:
        """Wait briefly for the delivery of the last events. Another event reopens it."""
        queue, self._queue = self._queue, None
        lost = queue.close() if queue is not None else ""
        if lost:
            warnings.warn(f"lost rendezvous events: {lost}", RuntimeWarning, stacklevel=2)

    def _record(self, where: str, message: str, state: str, rank: int | None = None, master_endpoint: str = "") -> None:
        if not has_rendezvous_receiver():
            return
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


@contextmanager
def recorder_of(params: RendezvousParameters, where: str) -> Iterator[EventRecorder]:
    """Yield the recorder for a function that creates a handler or a backend. Records an error that the block raises."""
    recorder = EventRecorder(params.run_id, params.local_addr or os.uname().nodename)
    try:
        with recorder.errors_of(where):
            yield recorder
    finally:
        recorder.close()


# --- changes of the shared state as text: two states in, texts out ----------------------------------------------------


def changes(before: State | None, after: State, node_id: str) -> Iterator[tuple[str, str]]:
    """Describe what it means that this node replaces ``before`` by ``after``: texts, each with the state to record.

    The node's name is put before each text.
    """
    was, now = _position(before, node_id), _position(after, node_id)
    if was is not None and (now is None or was[0] != now[0]):
        yield f"leaves the {was[0]} of round {was[1]}", RUNNING
    if now is not None and was != now:
        yield f"joins the {now[0]} of round {now[1]}", RUNNING
    still_there = {node.id for node in after.nodes} | {node_id}
    gone = [node for node in (before.nodes if before is not None else ()) if node.id not in still_there]
    if gone:  # another node is removed only if it is silent or did not join in time
        names = first_names([f"{node.addr} ({node.id[:8]})" for node in gone])
        yield f"removes {names}: no heartbeat, or not joined in time", RUNNING
    if after.complete and not (before is not None and before.round == after.round and before.complete):
        nodes = "1 node" if len(after.members) == 1 else f"{len(after.members)} nodes"
        yield f"completes round {after.round} with {nodes}", SUCCEEDED
    if after.closed and not (before is not None and before.closed):
        yield f"closes the run: {after.closed}", SUCCEEDED


def _position(state: State | None, node_id: str) -> tuple[str, int] | None:
    node = state.node(node_id) if state is not None else None
    if state is None or node is None:
        return None
    match node.standing:
        case Standing.WAITING:
            return "wait list", state.round + 1 if state.complete else state.round
        case Standing.RUNNING if not state.complete:  # in the round before the gathering one
            return "participants", state.round - 1
        case _:
            return "participants", state.round
