"""The coordinator host: one event at a time, messages in the order of the decisions, and every deadline kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kit.processes import leaving_nothing
from tenax._core import events
from tenax._core.coordinator import (
    AnyCoordinatorEvent,
    CancelRequested,
    CoordinatorState,
    Gathering,
    NodeLost,
    Opened,
    Received,
    Resumed,
    Running,
    RunPhase,
    RunSettings,
    Send,
    Step,
    Tick,
)
from tenax._core.messages import NodeInfo, NodeJoined, NodeReady
from tenax._engines.coordinator_host import CoordinatorHost
from tenax._io.loop import Loop
from tenax.testing.clock import FakeClock


class Harness:
    """A coordinator host on a fake clock, with its messages and its records."""

    def __init__(self, **settings: Any) -> None:
        self.clock = FakeClock(1000.0)
        self.loop = Loop(self.clock, selector=self.clock.selector())
        self.sent: list[tuple[float, Send]] = []
        self.recorded: list[tuple[float, AnyCoordinatorEvent, list[Send]]] = []
        self.interrupt: Callable[[Send], None] = lambda _: None
        self.settings = RunSettings("run", **{"min_nodes": 2, "max_nodes": 2, **settings})
        self.host = CoordinatorHost(self.settings, None, self.loop, self._deliver, self._record)

    def _deliver(self, send: Send) -> None:
        self.sent.append((self.clock() - 1000.0, send))
        self.interrupt(send)

    def _record(self, now: float, event: AnyCoordinatorEvent, step: Step, state: CoordinatorState) -> None:
        assert state is self.host.state
        self.recorded.append((now - 1000.0, event, step.sends))

    def ready(self, node_id: str) -> None:
        info = NodeInfo(node_id, node_id, min_nodes=self.settings.min_nodes, max_nodes=self.settings.max_nodes)
        self.host.step(Received(node_id, NodeJoined(info)))
        self.host.step(Received(node_id, NodeReady(0)))

    def wait_until(self, moment: float) -> None:
        assert self.loop.next_event(lambda: 1000.0 + moment) is None

    def kinds(self, *kinds: type) -> list[tuple[float, str, tuple[str, ...]]]:
        chosen = kinds or (object,)
        return [(at, type(send.event).__name__, send.to) for at, send in self.sent if isinstance(send.event, chosen)]


@pytest.fixture
def make_harness() -> Iterator[Callable[..., Harness]]:
    made: list[Harness] = []

    def make(**settings: Any) -> Harness:
        made.append(Harness(**settings))
        return made[-1]

    with leaving_nothing():
        yield make
        for each in made:
            each.host.close()
            each.loop.close()


def test_an_event_during_delivery_waits_until_all_messages_are_delivered(make_harness: Callable[..., Harness]) -> None:
    """A link breaks on write: both nodes receive the generation before any node receives its end."""
    harness = make_harness()
    harness.host.step(Opened())
    harness.ready("a")

    def break_the_link(send: Send) -> None:
        if isinstance(send.event, events.GenerationFormed) and send.to == ("a",):
            harness.host.step(NodeLost("b", "connection closed"))

    harness.interrupt = break_the_link
    harness.ready("b")
    assert harness.kinds(events.GenerationFormed, events.GenerationEnded) == [
        (0, "GenerationFormed", ("a",)),
        (0, "GenerationFormed", ("b",)),
        (0, "GenerationEnded", ("a",)),
    ]
    *_, (_, formed, first), (_, lost, then) = harness.recorded
    assert (formed, lost) == (Received("b", NodeReady(0)), NodeLost("b", "connection closed"))
    assert [type(send.event) for send in first[:2]] == [events.GenerationFormed] * 2
    assert [type(send.event) for send in then] == [events.GenerationEnded]


def test_events_raised_during_delivery_keep_their_order(make_harness: Callable[..., Harness]) -> None:
    """Also events raised while those are processed."""
    harness = make_harness(min_nodes=3, max_nodes=3)
    harness.host.step(Opened())
    for name in "ab":
        harness.ready(name)

    def lose_them(send: Send) -> None:
        match send.event:
            case events.GenerationFormed() if send.to == ("a",):
                harness.host.step(NodeLost("a", "first"))
                harness.host.step(NodeLost("b", "second"))
            case events.GenerationEnded():
                harness.host.step(NodeLost("c", "third"))

    harness.interrupt = lose_them
    harness.ready("c")
    assert [event.why for _, event, _ in harness.recorded if isinstance(event, NodeLost)] == [
        "first",
        "second",
        "third",
    ]
    assert harness.host.state.nodes == {}


def test_an_exception_in_delivery_does_not_block_later_events(make_harness: Callable[..., Harness]) -> None:
    """The caller gets the exception, and the next event is processed as usual."""
    harness = make_harness()
    harness.host.step(Opened())

    def fail(_: Send) -> None:
        raise ConnectionError("connection refused")

    harness.interrupt = fail
    with pytest.raises(ConnectionError):
        harness.ready("a")
    harness.interrupt = lambda _: None
    harness.ready("b")
    assert isinstance(harness.host.state.phase, Running)


def test_deadlines_are_kept_until_the_run_is_over(make_harness: Callable[..., Harness]) -> None:
    """A waiting node gets the reason every 10 s, and the end of the run; after that no timer is set."""
    harness = make_harness(join_timeout_s=25.0)
    harness.host.step(Opened())
    harness.ready("a")
    harness.wait_until(500.0)
    assert harness.kinds() == [
        (0, "Waiting", ("a",)),
        (10, "Waiting", ("a",)),
        (20, "Waiting", ("a",)),
        (25, "RunEnded", ("a",)),
    ]
    assert [at for at, event, _ in harness.recorded if isinstance(event, Tick)] == [10, 20, 25]


def test_a_nearer_deadline_moves_the_timer(make_harness: Callable[..., Harness]) -> None:
    """The last call ends before the next message to waiting nodes."""
    harness = make_harness(min_nodes=1, last_call_s=5.0)
    harness.host.step(Opened())
    harness.clock.advance(2.0)
    harness.ready("a")
    harness.wait_until(500.0)
    assert harness.kinds(events.GenerationFormed) == [(7, "GenerationFormed", ("a",))]
    assert [at for at, event, _ in harness.recorded if isinstance(event, Tick)] == [7]


def test_a_deadline_that_was_dropped_does_not_fire(make_harness: Callable[..., Harness]) -> None:
    """The last node joins during the last call, which then need not end."""
    harness = make_harness(min_nodes=1, last_call_s=5.0)
    harness.host.step(Opened())
    harness.ready("a")
    harness.clock.advance(3.0)
    harness.ready("b")
    assert harness.kinds(events.GenerationFormed) == [
        (3, "GenerationFormed", ("a",)),
        (3, "GenerationFormed", ("b",)),
    ]
    harness.wait_until(500.0)
    assert not [event for _, event, _ in harness.recorded if isinstance(event, Tick)]


def test_a_later_deadline_moves_the_timer(make_harness: Callable[..., Harness]) -> None:
    """A node that is lost during the last call ends it: the others wait as before."""
    harness = make_harness(min_nodes=2, max_nodes=3, last_call_s=5.0, join_timeout_s=100.0)
    harness.host.step(Opened())
    harness.ready("a")
    harness.ready("b")
    harness.clock.advance(1.0)
    harness.host.step(NodeLost("b", "connection closed"))
    harness.wait_until(45.0)
    assert [at for at, event, _ in harness.recorded if isinstance(event, Tick)] == [10, 20, 30, 40]
    assert harness.kinds(events.GenerationFormed) == []


def test_a_closed_host_has_no_timer(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness(join_timeout_s=25.0)
    harness.host.step(Opened())
    harness.ready("a")
    harness.host.close()
    harness.host.close()
    harness.wait_until(500.0)
    assert harness.kinds() == [(0, "Waiting", ("a",))]


def test_an_operators_cancellation_is_an_event_like_any_other(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness()
    harness.host.step(Opened())
    harness.ready("a")
    harness.host.step(CancelRequested("enough"))
    (ended,) = [send.event for _, send in harness.sent if isinstance(send.event, events.RunEnded)]
    assert (ended.verdict.why, ended.sent_at) == ("enough", 1000.0)


def test_recent_steps_are_kept(make_harness: Callable[..., Harness]) -> None:
    """Their number is bounded, and ticks without messages are left out."""
    harness = make_harness()
    harness.host.step(Opened())
    harness.ready("a")
    before = list(harness.host.recent)
    assert [event for _, event, _ in before] == [event for _, event, _ in harness.recorded]
    harness.host.step(Tick())
    assert list(harness.host.recent) == before
    for number in range(300):
        harness.host.step(NodeLost(f"unknown {number}", "lost"))
    assert len(harness.host.recent) == 256
    assert harness.host.recent[-1] == (1000.0, NodeLost("unknown 299", "lost"), [])


def test_watchers_are_called_after_every_step_once_all_messages_are_sent(make_harness: Callable[..., Harness]) -> None:
    """Also after a step without messages: the status may have changed."""
    harness = make_harness()
    seen: list[tuple[type[RunPhase], int]] = []

    def look() -> None:
        seen.append((type(harness.host.state.phase), len(harness.sent)))

    harness.host.watchers.append(look)
    harness.host.step(Opened())
    harness.ready("a")
    harness.ready("b")
    gathering, running = Gathering, Running
    assert seen == [(gathering, 0), (gathering, 0), (gathering, 1), (gathering, 1), (running, 3)]
    harness.host.watchers.remove(look)
    harness.host.step(CancelRequested("enough"))
    assert len(seen) == 5


def test_the_current_activity_is_described(make_harness: Callable[..., Harness]) -> None:
    """For operators: at any time, by the host's clock."""
    harness = make_harness()
    harness.host.step(Opened())
    harness.ready("a")
    assert harness.host.describe_activity() == "1 of 2 nodes ready (a); waiting up to 10 min for 1 more"
    harness.ready("b")
    assert harness.host.describe_activity() == "generation 1 is starting; waiting for the workers of a, b"
    harness.host.step(CancelRequested("enough"))
    assert harness.host.describe_activity() == "the run is over: enough"


def test_a_deadline_that_passed_during_a_freeze_is_extended(
    make_harness: Callable[..., Harness],
) -> None:
    """The missing node could not join meanwhile: the waiting one waits for another full period."""
    harness = make_harness(join_timeout_s=60.0, waiting_every_s=1000.0)
    harness.host.step(Opened())
    harness.ready("a")
    harness.clock.advance(90.0)
    harness.wait_until(91.0)
    assert [event for _, event, _ in harness.recorded if isinstance(event, Resumed)] == [Resumed(30.0)]
    assert harness.kinds(events.RunEnded) == []
    harness.wait_until(500.0)
    assert harness.kinds(events.RunEnded) == [(150.0, "RunEnded", ("a",))]


def test_a_deadline_that_fires_slightly_late_counts(make_harness: Callable[..., Harness]) -> None:
    """As on a busy machine."""
    harness = make_harness(join_timeout_s=60.0, waiting_every_s=1000.0)
    harness.host.step(Opened())
    harness.ready("a")
    harness.clock.advance(61.0)
    harness.wait_until(62.0)
    assert harness.kinds(events.RunEnded) == [(61.0, "RunEnded", ("a",))]
