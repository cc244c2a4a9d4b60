"""The watchdog machine: bytes and facts in, scopes that were not left in time out. No pipe, no process, no clock."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenax._core import commands
from tenax._core import events as fact
from tenax._core.hang import Scopes
from tenax._core.model import Assignment, Outcome, Verdict
from tenax._core.watchdog import MAX_LINE, RequestLines, Watchdog

WALL = 1_700_000_000.0  # what the wall clock shows when the agent's shows 0
SIGKILL, SIGTERM = 9, 15


def acquire(pid: int, scope: str, expires_at: float, signal: int = SIGKILL) -> bytes:
    """A line as TorchElastic's client writes it; ``expires_at`` on the agent's clock."""
    return line(pid=pid, scope_id=scope, expiration_time=WALL + expires_at, signal=signal)


def release(pid: int, scope: str) -> bytes:
    return line(pid=pid, scope_id=scope, expiration_time=-1, signal=0)


def line(**fields: object) -> bytes:
    return json.dumps({"version": 1, **fields}).encode() + b"\n"


class Kennel:
    """A watchdog and the facts that it hears."""

    def __init__(self, workers: int = 2, generation: int = 1, *, are_started: bool = True) -> None:
        self.dog = Watchdog(workers)
        self.form(generation)
        if are_started:
            for rank in range(workers):
                self.start(rank, generation)

    def form(self, generation: int) -> None:
        assignment = Assignment(generation)
        self.dog.heard(fact.GenerationFormed(assignment), [commands.StartWorkers(assignment)])

    def start(self, rank: int, generation: int = 1) -> None:
        self.dog.heard(fact.WorkerStarted(generation, rank, 100 * generation + rank), [])

    def take(self, *lines: bytes, now: float = 0.0, wall: float | None = None) -> None:
        self.dog.take(b"".join(lines), now, WALL + now if wall is None else wall)

    def late(self, now: float) -> list[tuple[int, str]]:
        return [(expired.local_rank, expired.scope) for expired in self.dog.expired(now)]


def test_a_scope_that_is_not_left_in_time_is_said_once() -> None:
    """With everything that somebody who must act on it, or tell of it, wants to know."""
    kennel = Kennel()
    kennel.take(acquire(101, "step", 60.0, SIGTERM), now=0.25)
    assert kennel.dog.next_deadline() == pytest.approx(60.0)
    assert kennel.late(59.9) == []
    (expired,) = kennel.dog.expired(60.1)
    assert expired == fact.ScopeExpired(1, 1, 101, "step", 59.75, WALL + 60, SIGTERM)
    assert kennel.late(1e6) == []
    assert kennel.dog.next_deadline() is None


def test_a_scope_that_is_left_is_forgotten() -> None:
    """So is one of which the release arrives together with the acquisition."""
    kennel = Kennel()
    kennel.take(acquire(100, "a", 1.0))
    kennel.take(release(100, "a"))
    kennel.take(acquire(101, "b", 1.0), release(101, "b"))
    assert kennel.dog.next_deadline() is None
    assert kennel.late(1e6) == []


def test_a_scope_belongs_to_the_process_that_entered_it() -> None:
    """A worker does not leave another one's, though it has the same name."""
    kennel = Kennel()
    kennel.take(acquire(100, "step", 1.0), acquire(101, "step", 1.0), release(101, "step"))
    assert kennel.late(2.0) == [(0, "step")]


def test_a_scope_that_is_entered_again_has_the_new_deadline() -> None:
    kennel = Kennel()
    kennel.take(acquire(100, "step", 1.0))
    kennel.take(acquire(100, "step", 5.0))
    assert kennel.late(4.0) == []
    assert kennel.late(5.0) == [(0, "step")]


def test_entering_and_leaving_a_scope_are_beats() -> None:
    """W6: of living workers of this generation; a scope that has expired is not one that somebody is in."""
    kennel = Kennel()
    kennel.take(acquire(100, "step", 9.0, signal=0), now=1.0)
    kennel.take(release(100, "step"), acquire(100, "step", 9.0, signal=0), acquire(999, "of nobody", 9.0), now=3.0)
    assert kennel.dog.scopes() == {0: Scopes(3, 1.0, 3.0, is_in_one=True)}
    assert kennel.late(10.0) == [(0, "step")]
    assert kennel.dog.scopes() == {0: Scopes(3, 1.0, 3.0, is_in_one=False)}
    kennel.form(2)
    assert kennel.dog.scopes() == {}


def test_the_wall_clock_may_jump_after_the_request() -> None:
    """W4: it is looked at once."""
    kennel = Kennel()
    kennel.take(acquire(100, "step", 10.0), now=0.0, wall=WALL)
    kennel.take(acquire(101, "other", 10.0), now=1.0, wall=WALL - 3600)  # it was set back an hour
    assert kennel.late(10.0) == [(0, "step")]


def test_a_request_that_arrives_too_late_expires_at_once() -> None:
    kennel = Kennel()
    kennel.take(acquire(100, "step", -5.0))
    (expired,) = kennel.dog.expired(0.0)
    assert expired.after_s == 0.0


@pytest.mark.parametrize(
    ("after_s", "on_the_way_s", "said"),
    [
        (60, 0.09, 60.0),
        (0.5, 0.003, 0.5),
        (0.3, 0.03, 0.3),
        (3600, 0.02, 3600.0),
        (1.25, 0.001, 1.25),
        (1.1, 0.0, 1.1),
        (86_400.0, 0.04, 86_400.0),
        (60, 4.2, 55.8),
    ],
)
def test_the_sentence_has_the_number_that_was_written(after_s: float, on_the_way_s: float, said: float) -> None:
    """What the request spent on its way to us is not held against the reader."""
    kennel = Kennel()
    kennel.take(acquire(100, "step", after_s), now=on_the_way_s)
    (expired,) = kennel.dog.expired(after_s + 1)
    assert expired.after_s == said


# --- whose ------------------------------------------------------------------------------------------------------------


def test_a_stranger_is_counted_and_ignored() -> None:
    """W2: whatever process it names, nothing comes of it; a person hears of it once."""
    kennel = Kennel()
    for pid in (4711, 1, 4712):
        kennel.take(acquire(pid, "step", 0.0))
    assert kennel.dog.next_deadline() is None
    assert kennel.dog.strangers == 3
    (note,) = kennel.dog.take_notes()
    assert "process 4711" in note
    assert "no worker of this node" in note


def test_a_worker_may_be_faster_than_the_news_of_its_start() -> None:
    """Its requests wait for the news, in order, and count from when they arrived."""
    kennel = Kennel(2, are_started=False)
    kennel.take(acquire(100, "step", 10.0), acquire(101, "load", 10.0), release(101, "load"), now=0.0)
    kennel.take(acquire(4711, "step", 0.0))
    assert kennel.dog.next_deadline() is None
    kennel.start(0)
    assert kennel.dog.next_deadline() == pytest.approx(10.0)
    assert kennel.dog.strangers == 0
    kennel.start(1)
    assert kennel.late(1e6) == [(0, "step")]
    assert kennel.dog.strangers == 1


def test_a_worker_that_could_not_be_started_is_not_waited_for() -> None:
    kennel = Kennel(2, are_started=False)
    kennel.start(0)
    kennel.dog.heard(fact.WorkerStartFailed(1, 1, "no such file"), [])
    kennel.take(acquire(101, "step", 0.0))
    assert kennel.dog.strangers == 1


def test_the_timers_of_a_worker_die_with_it() -> None:
    """What it wrote before, and comes late, is neither done nor called strange."""
    kennel = Kennel()
    kennel.take(acquire(100, "step", 1.0))
    kennel.dog.heard(fact.WorkerExited(1, 0, 0), [])
    kennel.take(acquire(100, "step", 1.0))
    assert kennel.late(1e6) == []
    assert kennel.dog.strangers == 0
    assert kennel.dog.take_notes() == []


@pytest.mark.parametrize(
    "command",
    [
        commands.SignalWorkers(1, SIGTERM, "rank 1 failed"),
        commands.KillNode(1, "cut off"),
        commands.ClearNode(1),
        commands.Finish(Verdict(Outcome.BROKEN, "the keeper was lost")),
    ],
    ids=lambda command: type(command).__name__,
)
def test_who_is_being_ended_is_not_watched(command: commands.AnyCommand) -> None:
    """The kill ladder is at work: a scope that expires now says nothing new."""
    kennel = Kennel()
    kennel.take(acquire(100, "step", 1.0))
    kennel.dog.heard(fact.Tick(), [command])
    kennel.take(acquire(101, "step", 1.0))
    assert kennel.dog.next_deadline() is None
    assert kennel.late(1e6) == []


def test_timers_die_with_their_generation() -> None:
    """The next generation's workers are others, and an old one's request is nobody's."""
    kennel = Kennel()
    kennel.take(acquire(100, "step", 1.0))
    kennel.form(2)
    kennel.start(0, 2)
    kennel.start(0, 1)  # an echo
    kennel.start(1, 2)
    assert kennel.late(1e6) == []
    kennel.take(acquire(100, "step", 1.0), acquire(200, "step", 1.0))
    (expired,) = kennel.dog.expired(2.0)
    assert (expired.generation, expired.pid) == (2, 200)


# --- how --------------------------------------------------------------------------------------------------------------


def test_a_worker_is_late_once() -> None:
    """W5: the first scope with a signal, in the order of expiry, says it all."""
    kennel = Kennel()
    kennel.take(acquire(100, "later", 2.0), acquire(100, "first", 1.0, SIGTERM), acquire(101, "other", 3.0))
    assert kennel.late(10.0) == [(0, "first"), (1, "other")]
    kennel.take(acquire(100, "again", 1.0))
    assert kennel.late(1e6) == []


@pytest.mark.parametrize("signal", [0, -1])
def test_a_scope_without_a_signal_is_only_said(signal: int) -> None:
    """The worker lives on, and so do its other scopes."""
    kennel = Kennel()
    kennel.take(acquire(100, "soft", 1.0, signal), acquire(100, "hard", 2.0))
    (soft,) = kennel.dog.expired(1.0)
    assert (soft.scope, soft.signal) == ("soft", 0)
    assert kennel.late(2.0) == [(0, "hard")]


def test_the_last_request_is_remembered_for_health_checks() -> None:
    """Of a worker, that is: strangers prove nothing."""
    kennel = Kennel()
    assert kennel.dog.last_request_at is None
    kennel.take(acquire(4711, "step", 1.0), now=1.0)
    assert kennel.dog.last_request_at is None
    kennel.take(release(100, "step"), now=2.0)
    assert kennel.dog.last_request_at == WALL + 2.0


# --- garbage ----------------------------------------------------------------------------------------------------------

GOOD = acquire(100, "step", 1.0)


@pytest.mark.parametrize(
    "garbage",
    [
        b"no json at all, but long enough to look like some\n",
        b"{" * 60 + b"\n",
        b"x\n",
        b"\xff\xfe\x00" * 30 + b"\n",
        GOOD[:-20] + b"\n",
        GOOD.replace(b"100", b'"100"'),
        GOOD.replace(b'"pid"', b'"dip"'),
        GOOD.replace(b'"signal": 9', b'"signal": 99'),
        GOOD.replace(b'"signal": 9', b'"signal": "SIGKILL"'),
        GOOD.replace(b'"version": 1', b'"version": 2'),
        line(pid=100, scope_id="step", expiration_time=float("nan"), signal=9),
        line(pid=100, scope_id="step", expiration_time=float("inf"), signal=9),
        line(pid=0, scope_id="step", expiration_time=0, signal=9),
        line(pid=-1, scope_id="step", expiration_time=0, signal=9),
        line(pid=10**400, scope_id="step", expiration_time=0, signal=9),
        line(pid=100, scope_id="x" * MAX_LINE, expiration_time=0, signal=9),
        json.dumps([1] * 30).encode() + b"\n",
    ],
)
def test_a_line_that_is_no_request_costs_only_itself(garbage: bytes) -> None:
    """W1: what stands before and after it in the same read counts."""
    kennel = Kennel()
    kennel.take(acquire(101, "left", 1.0), garbage, release(101, "left"), GOOD)
    assert kennel.dog.malformed >= 1
    assert kennel.late(1e6) == [(0, "step")]
    (note,) = kennel.dog.take_notes()
    assert "no request" in note


@pytest.mark.parametrize("length", [1, 50, MAX_LINE - 1, MAX_LINE, 10 * MAX_LINE])
def test_what_is_written_without_a_newline_does_not_spoil_the_next_request(length: int) -> None:
    kennel = Kennel()
    kennel.take(b"x" * length)
    kennel.take(GOOD)
    assert kennel.late(1e6) == [(0, "step")]
    assert kennel.dog.malformed == 1


def test_newlines_alone_are_nothing() -> None:
    kennel = Kennel()
    kennel.take(b"\n" * 65536, GOOD)
    assert kennel.dog.malformed == 0
    assert kennel.late(1e6) == [(0, "step")]


def test_a_scope_with_odd_characters_is_a_scope() -> None:
    """Also one that looks like a request."""
    scopes = ["", "a\nb", "\u2603", '{"version": 1}', "\\", "\x00"]
    kennel = Kennel()
    kennel.take(*(acquire(100, scope, 1.0, 0) for scope in scopes))
    assert sorted(scope for _, scope in kennel.late(2.0)) == sorted(scopes)


@given(st.lists(st.sampled_from([GOOD, acquire(101, "a", 9.0), release(101, "a")]), max_size=20), st.data())
@settings(max_examples=50, deadline=None, derandomize=True, database=None)
def test_it_does_not_matter_how_the_bytes_are_cut(lines: list[bytes], data: st.DataObject) -> None:
    """Requests are the same in one piece, in bytes, and in anything between."""
    whole = b"".join(lines)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=10)))
    pieces = [whole[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    one, many = RequestLines(), RequestLines()
    assert [request for piece in pieces for request in many.feed(piece)] == list(one.feed(whole))
    assert many.malformed == one.malformed == 0


pids = st.sampled_from([100, 101, 102, 7])
requests = st.one_of(
    st.builds(acquire, pids, st.sampled_from("abc"), st.floats(-5, 50), st.sampled_from([0, 9, 15])),
    st.builds(release, pids, st.sampled_from("abc")),
    st.binary(max_size=80),
    st.binary(max_size=80).map(lambda data: data + b"\n"),
)
events = st.one_of(
    st.builds(fact.WorkerStarted, st.integers(0, 2), st.integers(0, 1), pids),
    st.builds(fact.WorkerExited, st.integers(0, 2), st.integers(0, 1), st.just(0)),
)


@given(st.lists(st.tuples(requests | events, st.floats(0, 5)), max_size=60))
@settings(max_examples=100, deadline=None, derandomize=True, database=None)
def test_promises_hold_whatever_comes(soup) -> None:
    """W2, W5: what expires belongs to a worker that lives then, each worker is late once, and nothing ever raises."""
    kennel = Kennel(2, are_started=False)
    living: dict[int, set[int]] = {}  # by rank
    late: set[int] = set()
    now = 0.0
    for thing, later in soup:
        now += later
        if isinstance(thing, bytes):
            kennel.take(thing, now=now)
        else:
            kennel.dog.heard(thing, [])
            if thing.generation == 1:
                alive = living.setdefault(thing.local_rank, set())
                if isinstance(thing, fact.WorkerStarted):
                    alive.add(thing.pid)
                else:
                    alive.clear()
        due = kennel.dog.next_deadline()
        for expired in kennel.dog.expired(now):
            assert due is not None
            assert due <= now
            assert expired.pid in living[expired.local_rank]
            assert expired.local_rank not in late
            if expired.signal:
                late.add(expired.local_rank)
        after = kennel.dog.next_deadline()
        assert after is None or after > now


# --- floods -----------------------------------------------------------------------------------------------------------


def test_the_timers_of_one_worker_are_bounded() -> None:
    """W3: beyond the limit they are counted and said once; those that are there go on, and so do other workers."""
    kennel = Kennel()
    kennel.take(*(acquire(100, f"scope {number}", 50.0 + number) for number in range(1_000)))
    kennel.take(acquire(101, "step", 1.0), acquire(100, "scope 0", 2.0))
    assert kennel.dog.too_many == 1_000 - 256
    assert kennel.late(2.0) == [(1, "step"), (0, "scope 0")]
    assert len(kennel.dog.take_notes()) == 1


def test_what_waits_for_news_is_bounded() -> None:
    kennel = Kennel(1, are_started=False)
    kennel.take(*(acquire(7, f"scope {number}", 50.0) for number in range(1_000)))
    assert kennel.dog.strangers == 1_000 - 256


def test_expiries_without_a_signal_are_bounded() -> None:
    """A worker cannot fill the journal with warnings."""
    kennel = Kennel()
    said = 0
    for number in range(1_000):
        kennel.take(acquire(100, f"scope {number}", 0.0, 0))
        said += len(kennel.late(1.0))
    assert said == 100


def test_a_beginning_that_never_ends_is_bounded() -> None:
    lines = RequestLines()
    for _ in range(100):
        assert list(lines.feed(b"x" * 65536)) == []
    assert len(lines._carry) <= MAX_LINE
