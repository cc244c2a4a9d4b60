"""The watchdog machine: bytes and events in, expired scopes out. No pipe, no process, no clock."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenax._core import commands, events
from tenax._core.hang import Scopes
from tenax._core.model import Assignment, Outcome, Verdict
from tenax._core.watchdog import MAX_LINE, RequestLines, Watchdog

WALL = 1_700_000_000.0  # what the wall clock shows when the agent's shows 0
SIGKILL, SIGTERM = 9, 15


def acquire(pid: int, scope: str, expires_at: float, signal: int = SIGKILL) -> bytes:
    """Return a line as TorchElastic's client writes it; ``expires_at`` on the agent's clock."""
    return line(pid=pid, scope_id=scope, expiration_time=WALL + expires_at, signal=signal)


def release(pid: int, scope: str) -> bytes:
    return line(pid=pid, scope_id=scope, expiration_time=-1, signal=0)


def line(**fields: object) -> bytes:
    return json.dumps({"version": 1, **fields}).encode() + b"\n"


class Harness:
    """A watchdog with helpers for its events."""

    def __init__(self, workers: int = 2, generation: int = 1, *, are_started: bool = True) -> None:
        self.watchdog = Watchdog(workers)
        self.form(generation)
        if are_started:
            for rank in range(workers):
                self.start(rank, generation)

    def form(self, generation: int) -> None:
        assignment = Assignment(generation)
        self.watchdog.on_step(events.GenerationFormed(assignment), [commands.StartWorkers(assignment)])

    def start(self, rank: int, generation: int = 1) -> None:
        self.watchdog.on_step(events.WorkerStarted(generation, rank, 100 * generation + rank), [])

    def take(self, *lines: bytes, now: float = 0.0, wall: float | None = None) -> None:
        self.watchdog.take(b"".join(lines), now, WALL + now if wall is None else wall)

    def late(self, now: float) -> list[tuple[int, str]]:
        return [(expired.local_rank, expired.scope) for expired in self.watchdog.expired(now)]


def test_an_expired_scope_is_reported_once() -> None:
    """With all fields that the machine and the report need."""
    harness = Harness()
    harness.take(acquire(101, "step", 60.0, SIGTERM), now=0.25)
    assert harness.watchdog.next_deadline() == pytest.approx(60.0)
    assert harness.late(59.9) == []
    (expired,) = harness.watchdog.expired(60.1)
    assert expired == events.ScopeExpired(1, 1, 101, "step", 59.75, WALL + 60, SIGTERM)
    assert harness.late(1e6) == []
    assert harness.watchdog.next_deadline() is None


def test_a_released_scope_does_not_expire() -> None:
    """Also if the release arrives together with the acquisition."""
    harness = Harness()
    harness.take(acquire(100, "a", 1.0))
    harness.take(release(100, "a"))
    harness.take(acquire(101, "b", 1.0), release(101, "b"))
    assert harness.watchdog.next_deadline() is None
    assert harness.late(1e6) == []


def test_a_scope_belongs_to_the_worker_that_entered_it() -> None:
    """A worker does not release another one's scope of the same name."""
    harness = Harness()
    harness.take(acquire(100, "step", 1.0), acquire(101, "step", 1.0), release(101, "step"))
    assert harness.late(2.0) == [(0, "step")]


def test_a_scope_that_is_entered_again_has_the_new_deadline() -> None:
    harness = Harness()
    harness.take(acquire(100, "step", 1.0))
    harness.take(acquire(100, "step", 5.0))
    assert harness.late(4.0) == []
    assert harness.late(5.0) == [(0, "step")]


def test_entering_and_leaving_a_scope_count_as_progress() -> None:
    """W6: of live workers of this generation; an expired scope is not open."""
    harness = Harness()
    harness.take(acquire(100, "step", 9.0, signal=0), now=1.0)
    harness.take(release(100, "step"), acquire(100, "step", 9.0, signal=0), acquire(999, "of no worker", 9.0), now=3.0)
    assert harness.watchdog.scopes() == {0: Scopes(3, 1.0, 3.0, is_in_one=True)}
    assert harness.late(10.0) == [(0, "step")]
    assert harness.watchdog.scopes() == {0: Scopes(3, 1.0, 3.0, is_in_one=False)}
    harness.form(2)
    assert harness.watchdog.scopes() == {}


def test_a_jump_of_the_wall_clock_after_the_request_has_no_effect() -> None:
    """W4: it is read once."""
    harness = Harness()
    harness.take(acquire(100, "step", 10.0), now=0.0, wall=WALL)
    harness.take(acquire(101, "other", 10.0), now=1.0, wall=WALL - 3600)  # it was set back an hour
    assert harness.late(10.0) == [(0, "step")]


def test_a_request_that_arrives_too_late_expires_at_once() -> None:
    harness = Harness()
    harness.take(acquire(100, "step", -5.0))
    (expired,) = harness.watchdog.expired(0.0)
    assert expired.after_s == 0.0


@pytest.mark.parametrize(
    ("after_s", "transit_s", "expected_s"),
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
def test_the_message_has_the_requested_timeout(after_s: float, transit_s: float, expected_s: float) -> None:
    """Without the time that the request took to arrive."""
    harness = Harness()
    harness.take(acquire(100, "step", after_s), now=transit_s)
    (expired,) = harness.watchdog.expired(after_s + 1)
    assert expired.after_s == expected_s


# --- whose ------------------------------------------------------------------------------------------------------------


def test_requests_of_other_processes_are_counted_and_ignored() -> None:
    """W2: whatever pid they contain; one warning is printed."""
    harness = Harness()
    for pid in (4711, 1, 4712):
        harness.take(acquire(pid, "step", 0.0))
    assert harness.watchdog.next_deadline() is None
    assert harness.watchdog.unknown_senders == 3
    (note,) = harness.watchdog.take_notes()
    assert "process 4711" in note
    assert "not a worker of this node" in note


def test_requests_before_the_workers_start_is_known_wait_for_it() -> None:
    """In order; they count from their arrival."""
    harness = Harness(2, are_started=False)
    harness.take(acquire(100, "step", 10.0), acquire(101, "load", 10.0), release(101, "load"), now=0.0)
    harness.take(acquire(4711, "step", 0.0))
    assert harness.watchdog.next_deadline() is None
    harness.start(0)
    assert harness.watchdog.next_deadline() == pytest.approx(10.0)
    assert harness.watchdog.unknown_senders == 0
    harness.start(1)
    assert harness.late(1e6) == [(0, "step")]
    assert harness.watchdog.unknown_senders == 1


def test_requests_do_not_wait_for_a_worker_that_could_not_be_started() -> None:
    harness = Harness(2, are_started=False)
    harness.start(0)
    harness.watchdog.on_step(events.WorkerStartFailed(1, 1, "no such file"), [])
    harness.take(acquire(101, "step", 0.0))
    assert harness.watchdog.unknown_senders == 1


def test_the_timers_of_a_worker_end_with_it() -> None:
    """Its late requests are ignored without a warning."""
    harness = Harness()
    harness.take(acquire(100, "step", 1.0))
    harness.watchdog.on_step(events.WorkerExited(1, 0, 0), [])
    harness.take(acquire(100, "step", 1.0))
    assert harness.late(1e6) == []
    assert harness.watchdog.unknown_senders == 0
    assert harness.watchdog.take_notes() == []


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
def test_a_worker_that_is_being_stopped_is_not_watched(command: commands.AnyCommand) -> None:
    """Its expired scopes are not reported."""
    harness = Harness()
    harness.take(acquire(100, "step", 1.0))
    harness.watchdog.on_step(events.Tick(), [command])
    harness.take(acquire(101, "step", 1.0))
    assert harness.watchdog.next_deadline() is None
    assert harness.late(1e6) == []


def test_timers_end_with_their_generation() -> None:
    """A late request of an old worker is ignored."""
    harness = Harness()
    harness.take(acquire(100, "step", 1.0))
    harness.form(2)
    harness.start(0, 2)
    harness.start(0, 1)  # an echo
    harness.start(1, 2)
    assert harness.late(1e6) == []
    harness.take(acquire(100, "step", 1.0), acquire(200, "step", 1.0))
    (expired,) = harness.watchdog.expired(2.0)
    assert (expired.generation, expired.pid) == (2, 200)


# --- how --------------------------------------------------------------------------------------------------------------


def test_a_worker_is_late_once() -> None:
    """W5: only the first expired scope with a signal is reported."""
    harness = Harness()
    harness.take(acquire(100, "later", 2.0), acquire(100, "first", 1.0, SIGTERM), acquire(101, "other", 3.0))
    assert harness.late(10.0) == [(0, "first"), (1, "other")]
    harness.take(acquire(100, "again", 1.0))
    assert harness.late(1e6) == []


@pytest.mark.parametrize("signal", [0, -1])
def test_a_scope_without_a_signal_is_only_reported(signal: int) -> None:
    """The worker and its other scopes continue."""
    harness = Harness()
    harness.take(acquire(100, "soft", 1.0, signal), acquire(100, "hard", 2.0))
    (soft,) = harness.watchdog.expired(1.0)
    assert (soft.scope, soft.signal) == ("soft", 0)
    assert harness.late(2.0) == [(0, "hard")]


def test_the_time_of_the_last_request_is_kept_for_health_checks() -> None:
    """Only requests of workers count."""
    harness = Harness()
    assert harness.watchdog.last_request_at is None
    harness.take(acquire(4711, "step", 1.0), now=1.0)
    assert harness.watchdog.last_request_at is None
    harness.take(release(100, "step"), now=2.0)
    assert harness.watchdog.last_request_at == WALL + 2.0


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
def test_an_invalid_line_is_ignored_alone(garbage: bytes) -> None:
    """W1: requests before and after it in the same read count."""
    harness = Harness()
    harness.take(acquire(101, "left", 1.0), garbage, release(101, "left"), GOOD)
    assert harness.watchdog.malformed >= 1
    assert harness.late(1e6) == [(0, "step")]
    (note,) = harness.watchdog.take_notes()
    assert "invalid request" in note


@pytest.mark.parametrize("length", [1, 50, MAX_LINE - 1, MAX_LINE, 10 * MAX_LINE])
def test_a_line_without_a_newline_does_not_damage_the_next_request(length: int) -> None:
    harness = Harness()
    harness.take(b"x" * length)
    harness.take(GOOD)
    assert harness.late(1e6) == [(0, "step")]
    assert harness.watchdog.malformed == 1


def test_empty_lines_are_ignored() -> None:
    harness = Harness()
    harness.take(b"\n" * 65536, GOOD)
    assert harness.watchdog.malformed == 0
    assert harness.late(1e6) == [(0, "step")]


def test_a_scope_with_odd_characters_is_a_scope() -> None:
    """Also if the name looks like a request."""
    scopes = ["", "a\nb", "\u2603", '{"version": 1}', "\\", "\x00"]
    harness = Harness()
    harness.take(*(acquire(100, scope, 1.0, 0) for scope in scopes))
    assert sorted(scope for _, scope in harness.late(2.0)) == sorted(scopes)


@given(st.lists(st.sampled_from([GOOD, acquire(101, "a", 9.0), release(101, "a")]), max_size=20), st.data())
@settings(max_examples=50, deadline=None, derandomize=True, database=None)
def test_requests_do_not_depend_on_fragmentation(lines: list[bytes], data: st.DataObject) -> None:
    """In one piece, byte by byte, and anything between."""
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
any_event = st.one_of(
    st.builds(events.WorkerStarted, st.integers(0, 2), st.integers(0, 1), pids),
    st.builds(events.WorkerExited, st.integers(0, 2), st.integers(0, 1), st.just(0)),
)


@given(st.lists(st.tuples(requests | any_event, st.floats(0, 5)), max_size=60))
@settings(max_examples=100, deadline=None, derandomize=True, database=None)
def test_invariants_hold_for_any_input(inputs) -> None:
    """W2, W5: expired scopes belong to live workers, each worker is late once, and nothing raises."""
    harness = Harness(2, are_started=False)
    living: dict[int, set[int]] = {}  # by rank
    late: set[int] = set()
    now = 0.0
    for thing, later in inputs:
        now += later
        if isinstance(thing, bytes):
            harness.take(thing, now=now)
        else:
            harness.watchdog.on_step(thing, [])
            if thing.generation == 1:
                alive = living.setdefault(thing.local_rank, set())
                if isinstance(thing, events.WorkerStarted):
                    alive.add(thing.pid)
                else:
                    alive.clear()
        due = harness.watchdog.next_deadline()
        for expired in harness.watchdog.expired(now):
            assert due is not None
            assert due <= now
            assert expired.pid in living[expired.local_rank]
            assert expired.local_rank not in late
            if expired.signal:
                late.add(expired.local_rank)
        after = harness.watchdog.next_deadline()
        assert after is None or after > now


# --- floods -----------------------------------------------------------------------------------------------------------


def test_the_timers_of_one_worker_are_bounded() -> None:
    """W3: beyond the limit they are counted and reported once; existing ones and other workers continue."""
    harness = Harness()
    harness.take(*(acquire(100, f"scope {number}", 50.0 + number) for number in range(1_000)))
    harness.take(acquire(101, "step", 1.0), acquire(100, "scope 0", 2.0))
    assert harness.watchdog.too_many == 1_000 - 256
    assert harness.late(2.0) == [(1, "step"), (0, "scope 0")]
    assert len(harness.watchdog.take_notes()) == 1


def test_requests_that_wait_for_a_start_are_bounded() -> None:
    harness = Harness(1, are_started=False)
    harness.take(*(acquire(7, f"scope {number}", 50.0) for number in range(1_000)))
    assert harness.watchdog.unknown_senders == 1_000 - 256


def test_expiries_without_a_signal_are_bounded() -> None:
    """A worker cannot fill the journal with warnings."""
    harness = Harness()
    reported = 0
    for number in range(1_000):
        harness.take(acquire(100, f"scope {number}", 0.0, 0))
        reported += len(harness.late(1.0))
    assert reported == 100


def test_an_unfinished_line_is_bounded() -> None:
    lines = RequestLines()
    for _ in range(100):
        assert list(lines.feed(b"x" * 65536)) == []
    assert len(lines._carry) <= MAX_LINE
