"""The coordinator's seat: one fact at a time, everything said in the order decided, and every deadline kept."""

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
    NodeLost,
    Opened,
    Received,
    Resumed,
    RunPhase,
    RunSettings,
    Send,
    Tick,
)
from tenax._core.messages import NodeInfo, NodeJoined, NodeReady
from tenax._engines.coordinator_host import CoordinatorHost
from tenax._io.loop import Loop
from tenax.testing.clock import FakeClock


class Table:
    """A seat on a fake clock; what is said and what is recorded lies here."""

    def __init__(self, **settings: Any) -> None:
        self.clock = FakeClock(1000.0)
        self.loop = Loop(self.clock, selector=self.clock.selector())
        self.said: list[tuple[float, Send]] = []
        self.recorded: list[tuple[float, AnyCoordinatorEvent, list[Send]]] = []
        self.interrupt: Callable[[Send], None] = lambda _: None
        self.settings = RunSettings("run", **{"min_nodes": 2, "max_nodes": 2, **settings})
        self.seat = CoordinatorHost(self.settings, None, self.loop, self._deliver, self._record)

    def _deliver(self, say: Send) -> None:
        self.said.append((self.clock() - 1000.0, say))
        self.interrupt(say)

    def _record(self, now: float, event: AnyCoordinatorEvent, says: list[Send], state: CoordinatorState) -> None:
        assert state is self.seat.state
        self.recorded.append((now - 1000.0, event, says))

    def ready(self, node_id: str) -> None:
        info = NodeInfo(node_id, node_id, min_nodes=self.settings.min_nodes, max_nodes=self.settings.max_nodes)
        self.seat.step(Received(node_id, NodeJoined(info)))
        self.seat.step(Received(node_id, NodeReady(0)))

    def wait_until(self, moment: float) -> None:
        assert self.loop.next_event(lambda: 1000.0 + moment) is None

    def kinds(self, *kinds: type) -> list[tuple[float, str, tuple[str, ...]]]:
        chosen = kinds or (object,)
        return [(at, type(say.event).__name__, say.to) for at, say in self.said if isinstance(say.event, chosen)]


@pytest.fixture
def table() -> Iterator[Callable[..., Table]]:
    made: list[Table] = []

    def make(**settings: Any) -> Table:
        made.append(Table(**settings))
        return made[-1]

    with leaving_nothing():
        yield make
        for each in made:
            each.seat.close()
            each.loop.close()


def test_what_happens_while_words_are_delivered_waits_until_they_are_out(table: Callable[..., Table]) -> None:
    """A link breaks when it is written to: both nodes hear of the generation before anybody hears of its end."""
    made = table()
    made.seat.step(Opened())
    made.ready("a")

    def break_the_link(say: Send) -> None:
        if isinstance(say.event, events.GenerationFormed) and say.to == ("a",):
            made.seat.step(NodeLost("b", "connection closed"))

    made.interrupt = break_the_link
    made.ready("b")
    assert made.kinds(events.GenerationFormed, events.GenerationEnded) == [
        (0, "GenerationFormed", ("a",)),
        (0, "GenerationFormed", ("b",)),
        (0, "GenerationEnded", ("a",)),
    ]
    *_, (_, formed, first), (_, lost, then) = made.recorded
    assert (formed, lost) == (Received("b", NodeReady(0)), NodeLost("b", "connection closed"))
    assert [type(say.event) for say in first[:2]] == [events.GenerationFormed] * 2
    assert [type(say.event) for say in then] == [events.GenerationEnded]


def test_facts_that_arise_meanwhile_keep_their_order(table: Callable[..., Table]) -> None:
    """Several of them, and those that arise while they are taken: first come, first taken."""
    made = table(min_nodes=3, max_nodes=3)
    made.seat.step(Opened())
    for name in "ab":
        made.ready(name)

    def lose_them(say: Send) -> None:
        match say.event:
            case events.GenerationFormed() if say.to == ("a",):
                made.seat.step(NodeLost("a", "first"))
                made.seat.step(NodeLost("b", "second"))
            case events.GenerationEnded():
                made.seat.step(NodeLost("c", "third"))

    made.interrupt = lose_them
    made.ready("c")
    assert [event.why for _, event, _ in made.recorded if isinstance(event, NodeLost)] == ["first", "second", "third"]
    assert made.seat.state.nodes == {}


def test_a_deliverer_that_fails_does_not_block_the_seat(table: Callable[..., Table]) -> None:
    """Its exception is the caller's; the next fact is taken as ever."""
    made = table()
    made.seat.step(Opened())

    def fail(_: Send) -> None:
        raise ConnectionError("nobody listens")

    made.interrupt = fail
    with pytest.raises(ConnectionError):
        made.ready("a")
    made.interrupt = lambda _: None
    made.ready("b")
    assert made.seat.state.phase is RunPhase.RUNNING


def test_deadlines_are_kept(table: Callable[..., Table]) -> None:
    """Who waits hears why every ten seconds, and is told when nobody will come; after the end nobody is woken."""
    made = table(join_timeout_s=25.0)
    made.seat.step(Opened())
    made.ready("a")
    made.wait_until(500.0)
    assert made.kinds() == [
        (0, "Waiting", ("a",)),
        (10, "Waiting", ("a",)),
        (20, "Waiting", ("a",)),
        (25, "RunEnded", ("a",)),
    ]
    assert [at for at, event, _ in made.recorded if isinstance(event, Tick)] == [10, 20, 25]


def test_a_nearer_deadline_moves_the_timer(table: Callable[..., Table]) -> None:
    """The last call ends before the next word to those who wait."""
    made = table(min_nodes=1, last_call_s=5.0)
    made.seat.step(Opened())
    made.clock.advance(2.0)
    made.ready("a")
    made.wait_until(500.0)
    assert made.kinds(events.GenerationFormed) == [(7, "GenerationFormed", ("a",))]
    assert [at for at, event, _ in made.recorded if isinstance(event, Tick)] == [7]


def test_a_deadline_that_is_gone_wakes_nobody(table: Callable[..., Table]) -> None:
    """The last node comes during the last call: there is nothing left to wait for."""
    made = table(min_nodes=1, last_call_s=5.0)
    made.seat.step(Opened())
    made.ready("a")
    made.clock.advance(3.0)
    made.ready("b")
    assert made.kinds(events.GenerationFormed) == [
        (3, "GenerationFormed", ("a",)),
        (3, "GenerationFormed", ("b",)),
    ]
    made.wait_until(500.0)
    assert not [event for _, event, _ in made.recorded if isinstance(event, Tick)]


def test_a_farther_deadline_moves_the_timer_too(table: Callable[..., Table]) -> None:
    """A node that goes during the last call ends it: the others wait as before."""
    made = table(min_nodes=2, max_nodes=3, last_call_s=5.0, join_timeout_s=100.0)
    made.seat.step(Opened())
    made.ready("a")
    made.ready("b")
    made.clock.advance(1.0)
    made.seat.step(NodeLost("b", "connection closed"))
    made.wait_until(45.0)
    assert [at for at, event, _ in made.recorded if isinstance(event, Tick)] == [10, 20, 30, 40]
    assert made.kinds(events.GenerationFormed) == []


def test_a_closed_seat_keeps_no_deadline(table: Callable[..., Table]) -> None:
    """Nobody is woken for a run that nobody holds any more."""
    made = table(join_timeout_s=25.0)
    made.seat.step(Opened())
    made.ready("a")
    made.seat.close()
    made.seat.close()
    made.wait_until(500.0)
    assert made.kinds() == [(0, "Waiting", ("a",))]


def test_an_operator_is_heard_like_any_other_fact(table: Callable[..., Table]) -> None:
    made = table()
    made.seat.step(Opened())
    made.ready("a")
    made.seat.step(CancelRequested("enough"))
    (ended,) = [say.event for _, say in made.said if isinstance(say.event, events.RunEnded)]
    assert (ended.verdict.why, ended.sent_at) == ("enough", 1000.0)


def test_the_last_steps_are_kept_for_whoever_asks(table: Callable[..., Table]) -> None:
    """Bounded; without those in which only time passed and nothing was said."""
    made = table()
    made.seat.step(Opened())
    made.ready("a")
    before = list(made.seat.recent)
    assert [event for _, event, _ in before] == [event for _, event, _ in made.recorded]
    made.seat.step(Tick())
    assert list(made.seat.recent) == before
    for number in range(300):
        made.seat.step(NodeLost(f"stranger {number}", "who is that?"))
    assert len(made.seat.recent) == 256
    assert made.seat.recent[-1] == (1000.0, NodeLost("stranger 299", "who is that?"), [])


def test_whoever_watches_is_called_after_every_step_when_all_is_said(table: Callable[..., Table]) -> None:
    """Also a step in which nothing was said: what is shown may have changed."""
    made = table()
    seen: list[tuple[RunPhase, int]] = []

    def look() -> None:
        seen.append((made.seat.state.phase, len(made.said)))

    made.seat.watchers.append(look)
    made.seat.step(Opened())
    made.ready("a")
    made.ready("b")
    gathering, running = RunPhase.GATHERING, RunPhase.RUNNING
    assert seen == [(gathering, 0), (gathering, 0), (gathering, 1), (gathering, 1), (running, 3)]
    made.seat.watchers.remove(look)
    made.seat.step(CancelRequested("enough"))
    assert len(seen) == 5


def test_what_the_run_does_is_said_in_words(table: Callable[..., Table]) -> None:
    """For an operator: at every moment, on the seat's own clock."""
    made = table()
    made.seat.step(Opened())
    made.ready("a")
    assert made.seat.describe_activity() == "1 of 2 nodes ready (a); waiting up to 600 s for 1 more"
    made.ready("b")
    assert made.seat.describe_activity() == "generation 1 is starting; waiting for the workers of a, b"
    made.seat.step(CancelRequested("enough"))
    assert made.seat.describe_activity() == "the run is over: enough"


def test_a_deadline_that_passed_while_the_process_was_frozen_is_not_acted_on(table: Callable[..., Table]) -> None:
    """The missing node could not be heard: the one that waits goes on waiting, for a full period."""
    made = table(join_timeout_s=60.0, waiting_every_s=1000.0)
    made.seat.step(Opened())
    made.ready("a")
    made.clock.advance(90.0)
    made.wait_until(91.0)
    assert [event for _, event, _ in made.recorded if isinstance(event, Resumed)] == [Resumed(30.0)]
    assert made.kinds(events.RunEnded) == []
    made.wait_until(500.0)
    assert made.kinds(events.RunEnded) == [(150.0, "RunEnded", ("a",))]


def test_a_deadline_that_is_noticed_a_little_late_is_acted_on(table: Callable[..., Table]) -> None:
    """A busy machine is late now and then."""
    made = table(join_timeout_s=60.0, waiting_every_s=1000.0)
    made.seat.step(Opened())
    made.ready("a")
    made.clock.advance(61.0)
    made.wait_until(62.0)
    assert made.kinds(events.RunEnded) == [(61.0, "RunEnded", ("a",))]
