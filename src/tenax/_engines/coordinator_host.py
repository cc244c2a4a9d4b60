"""Runs the coordinator machine inside an agent's event loop: events in, messages out, deadlines kept.

It decides nothing. Invariants:

- Events are processed one at a time. An event raised while messages are being delivered (a link that breaks on write)
  waits until all of them are delivered, so every node receives messages in the order in which they were decided.
- If a deadline fires so late that this process cannot have been running, the machine gets ``Resumed`` instead of the
  deadline (C10).
"""

from __future__ import annotations

from collections import deque

from tenax._core.coordinator import CoordinatorMachine, Received, Resumed, Tick
from tenax._core.messages import NodeProgress
from tenax._io.interfaces import create_machine
from tenax._io.loop import DeadlineTimer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from tenax._core.coordinator import AnyCoordinatorEvent, CoordinatorState, RunSettings, Send
    from tenax._core.policy import RestartPolicy
    from tenax._io.interfaces import CreateMachine, EventLoop, RecordRun

_FREEZE_S = 2.5  # equals ``LeaseTerms.freeze_s`` of the default lease; for engines without a lease
_RECENT_KEPT = 256  # steps, shown as recent events in the status


class CoordinatorHost:
    """One coordinator. Not thread-safe: it belongs to one event loop."""

    def __init__(
        self,
        settings: RunSettings,
        policy: RestartPolicy | None,
        loop: EventLoop,
        deliver: Callable[[Send], None],
        record: RecordRun = lambda *_: None,
        freeze_s: float = _FREEZE_S,
        create: CreateMachine = create_machine,
    ) -> None:
        self._freeze_s = freeze_s
        self._machine = create(CoordinatorMachine, settings, policy)
        self._loop = loop
        self._deliver = deliver
        self._record = record
        self._timer = DeadlineTimer(loop, self._on_deadline)
        self._events: deque[AnyCoordinatorEvent] = deque()
        self._is_busy = False
        self.recent: deque[tuple[float, AnyCoordinatorEvent, list[Send]]] = deque(maxlen=_RECENT_KEPT)
        self.watchers: list[Callable[[], None]] = []  # called after every step

    @property
    def state(self) -> CoordinatorState:
        return self._machine.state

    def describe_activity(self) -> str:
        """Describe what the run does now and which nodes it waits for."""
        return self._machine.describe_activity(self._loop.now())

    def step(self, event: AnyCoordinatorEvent) -> None:
        self._events.append(event)
        if self._is_busy:
            return
        self._is_busy = True
        try:
            while self._events:
                self._process(self._events.popleft())
        finally:
            self._is_busy = False
        self._timer.set(self._machine.state.next_deadline())

    def _process(self, event: AnyCoordinatorEvent) -> None:
        now = self._loop.now()
        step = self._machine.step(event, now)
        self._record(now, event, step, self._machine.state)
        is_progress = isinstance(event, Received) and isinstance(event.message, NodeProgress)
        if step.sends or not (is_progress or isinstance(event, Tick)):  # too frequent to be kept
            self.recent.append((now, event, step.sends))
        for send in step.sends:
            self._deliver(send)
        for watch in list(self.watchers):
            watch()

    def _on_deadline(self, deadline: float) -> None:
        late_s = self._loop.now() - deadline
        self.step(Resumed(late_s) if late_s > self._freeze_s else Tick())

    def close(self) -> None:
        self._timer.cancel()
