"""The feed: a page receives what has changed, and nothing else."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenax._core.ledger import Goodput, Spent
from tenax._io.http.message import as_json
from tenax._observe.dashboard.feed import Change, change
from tenax._view.status import EventStatus, FailureStatus, GenerationStatus, NodeStatus, RunStatus

pytestmark = pytest.mark.unit

NODES = tuple(NodeStatus(f"id-{number}", f"host-{number}", f"host-{number}", "working", 100.0) for number in range(3))
FIRST = GenerationStatus(1, "first generation", 3, 3, 100.0, 101.0, spent=Spent(1.0, 1.0, 5.0))
EVENTS = (EventStatus(100.0, "it began", 10.0), EventStatus(101.0, "it runs", 11.0))


def status(**fields: Any) -> RunStatus:
    defaults = {
        "run_id": "run",
        "now": 110.0,
        "phase": "running",
        "doing": "generation 1 is running",
        "generation": 1,
        "world_size": 3,
        "min_nodes": 1,
        "max_nodes": 3,
        "restarts_used": 0,
        "max_restarts": 3,
        "membership_changes": 0,
        "drains": 0,
        "requests": 0,
        "nodes": NODES,
        "generations": (FIRST,),
        "generations_forgotten": 0,
        "failures": (),
        "earlier": (),
        "events": EVENTS,
        "goodput": Goodput(Spent(1.0, 1.0, 5.0)),
    }
    return RunStatus(**{**defaults, **fields})


def applied(before: RunStatus, update: Change | None) -> RunStatus:
    """Return the state of a page after the change."""
    if update is None:
        return before
    nodes = {node.node_id: node for node in before.nodes} | {node.node_id: node for node in update.nodes}
    for gone in update.gone:
        del nodes[gone]
    entries = {entry.number: entry for entry in (*before.generations, *update.generations)}
    kept = tuple(entry for number, entry in sorted(entries.items()) if number >= update.oldest_generation)
    return msgspec.structs.replace(
        before,
        **update.run,
        now=update.now,
        goodput=update.goodput,
        nodes=tuple(nodes.values()),
        generations=kept,
        failures=before.failures if update.failures is None else update.failures,
        earlier=before.earlier if update.earlier is None else update.earlier,
        events=(*before.events, *update.events)[-100:],
    )


def test_passing_time_is_not_a_change() -> None:
    """F3: neither the clock nor the time spent by the current generation."""
    later = msgspec.structs.replace(FIRST, spent=Spent(1.0, 1.0, 15.0))
    assert change(status(), status(now=120.0, generations=(later,), goodput=Goodput(Spent(1.0, 1.0, 15.0)))) is None


def test_only_changed_nodes_are_sent() -> None:
    """F2."""
    changed = msgspec.structs.replace(NODES[1], state="stopping", since=111.0)
    update = change(status(), status(nodes=(NODES[0], changed, NODES[2])))
    assert update is not None
    assert (update.nodes, update.gone, update.run, update.generations, update.events) == ((changed,), (), {}, (), ())


def test_a_lost_node_is_sent_by_id() -> None:
    update = change(status(), status(nodes=NODES[:2]))
    assert update is not None
    assert (update.nodes, update.gone) == ((), ("id-2",))


def test_small_clock_differences_are_not_a_change() -> None:
    """F2: the wall clock may have been read a little later."""
    ahead = 0.02
    shifted = status(
        nodes=tuple(msgspec.structs.replace(node, since=node.since + ahead) for node in NODES),
        generations=(msgspec.structs.replace(FIRST, formed_at=100.0 + ahead, running_at=101.0 + ahead),),
        events=tuple(msgspec.structs.replace(event, at=event.at + ahead) for event in EVENTS),
    )
    assert change(status(), shifted) is None
    assert change(shifted, status()) is None


def test_an_event_soon_after_the_last_is_new_whatever_the_clock_does() -> None:
    """F1: also if the wall clock was set back."""
    for ahead in (-3600.0, -0.05, 0.0, 0.05):
        events = tuple(msgspec.structs.replace(event, at=event.at + ahead) for event in EVENTS)
        new = [EventStatus(101.0 + ahead + late, "the next", 11.0 + late) for late in (1e-6, 0.0003, 0.003)]
        entry = msgspec.structs.replace(FIRST, formed_at=100.0 + ahead, running_at=101.0 + ahead)
        update = change(status(), status(generations=(entry,), events=(*events, *new)))
        assert update is not None
        assert update.events == tuple(new)


def test_the_duration_of_a_hang_is_not_a_change() -> None:
    """F3: its start and the location are sent once; the page computes the duration."""
    first = status(hang="still for 10 s; rank 0", doing="still for 10 s; rank 0", hang_since=100.0, hang_where="rank 0")
    later = status(hang="still for 38 s; rank 0", doing="still for 38 s; rank 0", hang_since=100.1, hang_where="rank 0")
    update = change(status(), first)
    assert update is not None
    assert update.run == {"hang_since": 100.0, "hang_where": "rank 0"}
    assert change(first, later) is None
    over = change(later, status())
    assert over is not None
    assert over.run == {"doing": "generation 1 is running", "hang_since": None, "hang_where": ""}


def test_lost_time_of_a_settled_generation_is_a_change() -> None:
    """The time spent by a settled generation does not grow by itself."""
    over = msgspec.structs.replace(FIRST, ended_at=108.0, settled_at=109.0, ended_by="failure", ended_why="boom")
    charged = msgspec.structs.replace(over, spent=Spent(1.0, 1.0, 2.0, lost_s=3.0))
    update = change(status(generations=(over,)), status(generations=(charged,)))
    assert update is not None
    assert update.generations == (charged,)


def test_forgotten_generations_are_removed() -> None:
    """F1."""
    before = status(generations=tuple(msgspec.structs.replace(FIRST, number=number) for number in (1, 2, 3)))
    after = status(
        generations=tuple(msgspec.structs.replace(FIRST, number=number) for number in (2, 3, 4)),
        generations_forgotten=1,
    )
    update = change(before, after)
    assert update is not None
    assert (update.oldest_generation, update.run) == (2, {"generations_forgotten": 1})
    assert applied(before, update) == after


def test_a_change_is_much_smaller_than_the_full_status() -> None:
    """One node of a thousand takes a few hundred bytes."""
    nodes = tuple(NodeStatus(f"id-{n}", f"host-{n}", f"host-{n}", "working", 100.0, 8) for n in range(1000))
    changed = (msgspec.structs.replace(nodes[0], state="done"), *nodes[1:])
    update = change(status(nodes=nodes), status(nodes=changed))
    assert update is not None
    assert len(as_json(update)) < 1000 < 50_000 < len(as_json(status(nodes=nodes)))


_failures = st.lists(
    st.builds(
        FailureStatus,
        rank=st.integers(0, 3),
        local_rank=st.just(0),
        host=st.just("h"),
        generation=st.integers(1, 3),
        exit_code=st.integers(-9, 1),
        at=st.sampled_from([100.0, 105.0]),
        what=st.sampled_from(["exit code 1", "SIGKILL"]),
    ),
    max_size=2,
).map(tuple)
_nodes = st.dictionaries(
    st.sampled_from([f"id-{n}" for n in range(5)]), st.tuples(st.sampled_from(["working", "done"]), st.integers(0, 9))
).map(lambda found: tuple(NodeStatus(each, each, "h", state, float(at)) for each, (state, at) in found.items()))
_statuses = st.builds(
    lambda nodes, failures, earlier, length, number, doing: status(
        nodes=nodes,
        failures=failures,
        earlier=earlier,
        doing=doing,
        events=tuple(EventStatus(100.0 + n, f"event {n}", float(n)) for n in range(max(0, length - 100), length)),
        generations=tuple(msgspec.structs.replace(FIRST, number=n) for n in range(max(1, number - 4), number + 1)),
    ),
    _nodes,
    _failures,
    _failures,
    st.integers(0, 150),
    st.integers(0, 9),
    st.sampled_from(["this", "that"]),
)


@settings(max_examples=50)
@given(_statuses, _statuses)
def test_applying_a_change_gives_the_next_status(before: RunStatus, after: RunStatus) -> None:
    """F1, for statuses in which events and generations are only added."""
    if len(after.events) and len(before.events) and after.events[-1].at < before.events[-1].at:
        before, after = after, before
    if not after.events:
        after = msgspec.structs.replace(after, events=before.events)
    if max((entry.number for entry in before.generations), default=0) > max(
        (entry.number for entry in after.generations), default=0
    ):
        after = msgspec.structs.replace(after, generations=before.generations)
    result = applied(before, change(before, after))
    by_id = {node.node_id: node for node in result.nodes}
    assert by_id == {node.node_id: node for node in after.nodes}
    overlapping = [event for event in result.events if event.at >= after.events[0].at] if after.events else []
    assert overlapping == list(after.events)
    first = after.generations[0].number if after.generations else 0
    assert [entry for entry in result.generations if entry.number >= first] == list(after.generations)
    assert (result.failures, result.earlier, result.doing) == (after.failures, after.earlier, after.doing)


def test_the_data_is_a_single_line() -> None:
    """As server-sent events require, whatever a traceback contains."""
    failure = FailureStatus(0, 0, "h", 1, 1, 100.0, "a\nb", traceback="one\r\ntwo\u2028three")
    update = change(status(), status(failures=(failure,)))
    assert update is not None
    for data in (as_json(update), as_json(status(failures=(failure,)))):
        assert b"\n" not in data
        assert b"\r" not in data


def test_invalid_text_can_be_sent() -> None:
    """Run ids and workers' messages may contain any bytes."""
    failure = FailureStatus(0, 0, "h", 1, 1, 100.0, "boom \udcff")
    after = status(run_id="run \udc80", failures=(failure,))
    update = change(status(), after)
    assert update is not None
    for data in (as_json(update), as_json(after)):
        assert b"\\\\udcff" in data
        assert b"\\\\udc80" in data
        msgspec.json.decode(data)
