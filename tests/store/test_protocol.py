"""The protocol without sockets: any fragmentation, any bytes, limits and wakeups. (P1 to P6: _protocol.py)"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from store import requests as ask
from tenax.store._key_values import KeyValues, Limits
from tenax.store._protocol import Session

SMALL = Limits(
    key_bytes=16,
    value_bytes=64,
    keys_per_request=8,
    request_bytes=1200,
    answer_bytes=500,
    total_keys=20,
    total_bytes=20_000,
    unread_bytes=100,
    waiting_keys=4,
)
STOP, CANCELED, READY, NOT_READY = b"\x00", b"\x01", b"\x00", b"\x01"


def greeted(table: KeyValues) -> Session:
    session = Session(table)
    assert session.receive(ask.GREETING) == b""
    return session


def sessions(count: int, limits: Limits | None = None) -> list[Session]:
    table = KeyValues(limits or Limits())
    return [greeted(table) for _ in range(count)]


def woken(session: Session) -> list[Session]:
    """Return the sessions that a request has woken."""
    found = list(session._table.woken)
    session._table.woken.clear()
    return found


# --- the greeting -----------------------------------------------------------------------------------------------------


def test_the_greeting_may_arrive_byte_by_byte() -> None:
    """P1"""
    session = Session(KeyValues(Limits()))
    for byte in ask.GREETING:
        assert not session.has_greeted
        assert session.receive(bytes([byte])) == b""
    assert session.has_greeted
    assert session.receive(ask.ping(b"abcd")) == b"abcd"


@pytest.mark.parametrize(
    "greeting",
    [b"GET / HTTP/1.1\r\n", ask.set_(b"/k", b"v"), b"\x00\x3c\x85\xf7\xce", b"\x00\xce\xf7\x85\x3d", b"\xff"],
    ids=["http", "a request", "big-endian", "wrong number", "noise"],
)
def test_a_wrong_greeting_is_refused_at_the_first_wrong_byte(greeting: bytes) -> None:
    """P1, P2: later input is ignored."""
    table = KeyValues(Limits())
    session = Session(table)
    for byte in greeting:
        session.receive(bytes([byte]))
    assert session.fault
    assert session.receive(ask.GREETING + ask.set_(b"/k", b"v")) == b""
    assert not table.values


def test_a_second_greeting_is_refused() -> None:
    (session,) = sessions(1)
    session.receive(ask.GREETING)
    assert session.fault


def test_an_unknown_command_is_refused_after_the_answers_before_it() -> None:
    """P2"""
    (session,) = sessions(1)
    assert session.receive(ask.add(b"/n", 2) + b"\x13" + ask.add(b"/n", 2)) == ask.number(2)
    assert "0x13" in session.fault
    assert session._table.values == {b"/n": b"2"}


# --- any cut, any bytes -----------------------------------------------------------------------------------------------

keys = st.sampled_from([b"/a", b"/b", b"/c", b"", b"/long key"])
values = st.sampled_from([b"", b"1", b"-20", b"text", bytes(range(60))])
pairs = st.lists(st.tuples(keys, values), max_size=4)
one_request = st.one_of(
    st.builds(ask.set_, keys, values),
    st.builds(ask.compare_set, keys, values, values),
    st.builds(ask.get, keys),
    st.builds(ask.add, keys, st.integers(-(1 << 63), (1 << 63) - 1)),
    st.lists(keys, max_size=4).map(lambda names: ask.check(*names)),
    st.lists(keys, max_size=4).map(lambda names: ask.wait(*names)),
    st.just(ask.COUNT_KEYS),
    st.builds(ask.delete, keys),
    st.builds(ask.append, keys, values),
    st.lists(keys, max_size=4).map(lambda names: ask.multi_get(*names)),
    pairs.map(lambda items: ask.multi_set(*items)),
    st.just(ask.CANCEL_WAIT),
    st.binary(min_size=4, max_size=4).map(ask.ping),
    st.builds(ask.push, keys, values),
    st.builds(ask.pop, keys),
    st.builds(ask.queue_length, keys),
    st.just(ask.LIST_KEYS),
    st.builds(ask.barrier, keys, st.integers(-1, 3)),
)


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({cut % (len(data) + 1) for cut in cuts})
    return [data[start:end] for start, end in zip([0, *places], [*places, len(data)], strict=True)]


@given(st.lists(one_request, max_size=30), st.lists(st.integers(0, 1 << 20), max_size=40))
def test_answers_do_not_depend_on_fragmentation(requests: list[bytes], cuts: list[int]) -> None:
    """P3, P5"""
    data = ask.GREETING + b"".join(requests)
    whole, cut = Session(KeyValues(Limits())), Session(KeyValues(Limits()))
    expected = whole.receive(data)
    assert b"".join(cut.receive(piece) for piece in pieces(data, cuts)) == expected
    assert cut.fault == whole.fault
    assert cut._table.values == whole._table.values
    assert cut._table.queues == whole._table.queues
    assert cut._table.used_bytes == whole._table.used_bytes


@given(st.lists(st.tuples(st.integers(0, 2), one_request), max_size=60))
def test_accounted_memory_is_released(conversation: list[tuple[int, bytes]]) -> None:
    """After any requests of three clients, when all keys are deleted and all clients closed."""
    peers = sessions(3)
    table = peers[0]._table
    for who, request in conversation:
        peers[who].receive(request)
    for session in peers:
        session.close()
    assert not table.waiters
    for key in list(table.values):
        table.drop(key)
    for key in list(table.queues):
        while key in table.queues:
            table.pop(key)
    assert (table.used_bytes, table.held_bytes) == (0, 0)


@given(st.lists(st.binary(max_size=64), max_size=20))
def test_noise_is_refused_or_incomplete(noise: list[bytes]) -> None:
    """P2, P4"""
    (session,) = sessions(1, SMALL)
    for data in noise:
        session.receive(data)
    assert session.held_bytes <= SMALL.request_bytes + 64
    assert session._table.used_bytes <= SMALL.total_bytes


@given(st.lists(st.tuples(one_request, st.binary(max_size=3), st.integers(0, 1 << 10)), max_size=10))
@settings(max_examples=200)
def test_damaged_requests_never_pass_a_limit(damaged: list[tuple[bytes, bytes, int]]) -> None:
    """Valid requests with replaced bytes get further than noise."""
    (session,) = sessions(1, SMALL)
    for request, splinter, place in damaged:
        at = place % len(request)
        session.receive(request[:at] + splinter + request[at + len(splinter) :])
    assert session.held_bytes <= SMALL.request_bytes + SMALL.value_bytes * 4
    assert len(session._table.values) <= SMALL.total_keys
    assert session._table.used_bytes <= SMALL.total_bytes


# --- runs of SETs: those that look alike are taken together ----------------------------------------------------------

SETS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from([b"a", b"b", b"cc"]), st.sampled_from([b"", b"1", b"2", b"33"])).map(
            lambda pair: [ask.set_(*pair)]
        ),
        st.tuples(st.sampled_from([b"a", b"b"]), st.integers(1, 12)).map(
            lambda run: [ask.set_(run[0], b"%02d" % number) for number in range(run[1])]
        ),
        st.sampled_from([b"a", b"cc"]).map(lambda key: [ask.get(key)]),
        # As long as a SET of one byte each, with the same lengths in the same places.
        st.just([b"\x09" + ask.set_(b"a", b"1")[1:]]),
    ),
    max_size=20,
).map(lambda lists: [request for run in lists for request in run])


@settings(max_examples=300)
@given(SETS, st.lists(st.integers(0, 2000), max_size=4))
def test_a_run_of_sets_equals_single_sets(requests: list[bytes], cuts: list[int]) -> None:
    """P3, P5: in one piece, in several, and one request at a time: the same table and answers."""
    (alone,) = sessions(1)
    answers = b"".join(alone.receive(request) for request in requests)
    data = b"".join(requests)
    for parts in ([data], pieces(data, cuts)):
        (session,) = sessions(1)
        assert b"".join(session.receive(part) for part in parts) == answers
        assert session._table.values == alone._table.values
        assert session._table.used_bytes == alone._table.used_bytes
        assert not session.fault
        assert session.held_bytes == 0


@pytest.mark.parametrize(
    "other",
    [
        ask.append(b"a", b"2"),
        ask.set_(b"a" + ask.number(1), b"2"),  # another key, with the length of the value where it is in the others
        ask.set_(b"a", b"22"),
        ask.get(b"a"),
    ],
)
def test_a_run_of_sets_ends_at_a_different_request(other: bytes) -> None:
    """Another command, or other lengths."""
    requests = [ask.set_(b"a", b"1")] * 6 + [other] + [ask.set_(b"b", b"1")] * 6
    alone, together = sessions(1) + sessions(1)
    answers = b"".join(alone.receive(request) for request in requests)
    assert together.receive(b"".join(requests)) == answers
    assert together._table.values == alone._table.values


def test_a_run_of_sets_wakes_a_waiter_once() -> None:
    """However often and wherever the key is set in it."""
    first, second, setter = sessions(3)
    first.receive(ask.wait(b"k7"))
    second.receive(ask.wait(b"k7", b"k9"))
    setter.receive(b"".join(ask.set_(b"k%d" % (number % 10), b"v") for number in range(30)))
    assert woken(setter) == [first, second]
    assert first.take() == second.take() == STOP
    setter.receive(b"".join(ask.set_(b"k%d" % (number % 10), b"v") for number in range(30)))
    assert woken(setter) == []


def test_a_run_of_sets_is_refused_from_where_the_store_is_full() -> None:
    """P2: earlier sets take effect, later ones do not."""
    (session,) = sessions(1, SMALL)
    session.receive(b"".join(ask.set_(b"%02d" % number, b"v") for number in range(30)))
    assert "20 keys" in session.fault
    assert sorted(session._table.values) == [b"%02d" % number for number in range(20)]
    assert session.receive(ask.get(b"00")) == b""


def test_a_long_list_may_arrive_byte_by_byte() -> None:
    """P5"""
    (session,) = sessions(1)
    request = ask.multi_set(*((b"/%d" % number, b"x" * 10) for number in range(2000)))
    for at in range(len(request) - 1):
        session.receive(request[at : at + 1])
    assert not session._table.values
    session.receive(request[-1:])
    assert len(session._table.values) == 2000
    assert session.held_bytes == 0


# --- limits -----------------------------------------------------------------------------------------------------------

HUGE = (1 << 63) + 5


@pytest.mark.parametrize(
    "request_",
    [
        b"\x01" + HUGE.to_bytes(8, "little"),
        b"\x01" + ask.text(b"/k") + HUGE.to_bytes(8, "little"),
        b"\x03" + HUGE.to_bytes(8, "little"),
        b"\x05" + HUGE.to_bytes(8, "little"),
        b"\x06" + (1).to_bytes(8, "little") + HUGE.to_bytes(8, "little"),
        b"\x06" + (2).to_bytes(8, "little") + HUGE.to_bytes(8, "little"),
        b"\x0b" + HUGE.to_bytes(8, "little"),
        b"\x0b" + ask.number(-1),
        b"\x0e" + ask.text(b"/k") + HUGE.to_bytes(8, "little"),
        ask.set_(b"k" * 17, b""),
        ask.set_(b"/k", b"x" * 65),
        ask.compare_set(b"/k", b"x" * 65, b""),
        ask.append(b"/k", b"x" * 40) + ask.append(b"/k", b"x" * 40),
        ask.check(*[b"/k"] * 9),
        ask.wait(*[b"/%d" % number for number in range(5)]),
        ask.multi_set(*[(b"/%d" % number, b"x" * 64) for number in range(8)]),
        b"".join(ask.set_(b"/%d" % number, b"") for number in range(21)),
        ask.multi_set(*[(b"/%d" % number, b"") for number in range(8)])
        + ask.multi_set(*[(b"/x%d" % number, b"") for number in range(8)])
        + ask.multi_set(*[(b"/y%d" % number, b"") for number in range(8)]),
        b"".join(ask.push(b"/q", b"x" * 60) for _ in range(300)),
        ask.set_(b"/k", b"x" * 64) + ask.multi_get(*[b"/k"] * 8),
    ],
)
def test_more_than_the_limits_is_refused(request_: bytes) -> None:
    """P4: at the announced length, before memory is used."""
    (session,) = sessions(1, SMALL)
    session.receive(request_)
    assert session.fault
    assert session.held_bytes == 0


def test_a_refused_change_has_no_effect() -> None:
    """P3: of a list that does not fit, not even the first key is stored."""
    (session,) = sessions(1, Limits(total_bytes=2000))
    session.receive(ask.set_(b"/old", b"1"))
    used = session._table.used_bytes
    session.receive(ask.multi_set((b"/new", b"1"), (b"/big", b"x" * 2000)))
    assert session.fault
    assert session._table.values == {b"/old": b"1"}
    assert session._table.used_bytes == used


def test_waiting_keys_are_accounted() -> None:
    table = KeyValues(Limits(total_bytes=10_000))
    faults = 0
    for number in range(200):
        session = greeted(table)
        session.receive(ask.wait(b"/%d" % number))
        faults += bool(session.fault)
    assert 0 < faults < 200
    assert table.used_bytes <= 10_000


def test_a_session_with_long_answers_pauses_until_it_is_resumed() -> None:
    """P4: many small requests for a large value do not queue as many large answers."""
    (session,) = sessions(1, Limits(unread_bytes=1000))
    session.receive(ask.set_(b"/big", b"x" * 400))
    answer = session.receive(ask.get(b"/big") * 100 + ask.add(b"/n", 1))
    assert session.is_paused
    total = len(answer)
    assert total == 3 * 408
    session.receive(ask.add(b"/n", 1))
    while session.is_paused:
        answer = session.resume()
        assert len(answer) <= 3 * 408 + 16
        total += len(answer)
    assert total == 100 * 408 + 2 * 8
    assert session._table.values[b"/n"] == b"2"


# --- who is woken -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        ask.set_(b"/k", b"v"),
        ask.add(b"/k", 1),
        ask.append(b"/k", b"v"),
        ask.compare_set(b"/k", b"", b"v"),
        ask.multi_set((b"/other", b""), (b"/k", b"v")),
        ask.push(b"/k", b"v"),
    ],
    ids=["set", "add", "append", "compare_set", "multi_set", "push"],
)
def test_a_wait_ends_when_the_key_appears(change: bytes) -> None:
    waiting, other = sessions(2)
    assert waiting.receive(ask.wait(b"/k")) == b""
    other.receive(change)
    assert woken(other) == [waiting]
    assert waiting.take() == STOP
    assert not other._table.waiters


def test_a_compare_set_that_stores_nothing_wakes_no_waiter() -> None:
    waiting, other = sessions(2)
    waiting.receive(ask.wait(b"/k"))
    other.receive(ask.compare_set(b"/k", b"something", b"v"))
    assert woken(other) == []


def test_an_awaited_key_counts_once_even_if_it_is_deleted_again() -> None:
    waiting, other = sessions(2)
    waiting.receive(ask.wait(b"/a", b"/b", b"/a"))
    other.receive(ask.set_(b"/a", b"") + ask.delete(b"/a") + ask.set_(b"/a", b""))
    assert woken(other) == []
    other.receive(ask.delete(b"/a") + ask.set_(b"/b", b""))
    assert woken(other) == [waiting]


def test_a_pushed_value_wakes_the_first_waiter_that_it_completes() -> None:
    """A waiter with more keys counts the queue once."""
    needs_more, first, second, other = sessions(4)
    needs_more.receive(ask.wait(b"/q", b"/key"))
    first.receive(ask.wait(b"/q"))
    second.receive(ask.wait(b"/q"))
    other.receive(ask.push(b"/q", b"1"))
    assert woken(other) == [first]
    other.receive(ask.push(b"/q", b"2"))
    assert woken(other) == [second]
    other.receive(ask.push(b"/q", b"3"))
    assert woken(other) == []
    other.receive(ask.set_(b"/key", b""))
    assert woken(other) == [needs_more]


def test_a_wait_that_was_cancelled_or_closed_is_forgotten() -> None:
    cancelled, closed, other = sessions(3)
    cancelled.receive(ask.wait(b"/a", b"/b"))
    closed.receive(ask.wait(b"/a", b"/b"))
    assert cancelled.receive(ask.CANCEL_WAIT) == CANCELED
    closed.close()
    other.receive(ask.multi_set((b"/a", b""), (b"/b", b"")))
    assert woken(other) == []
    assert cancelled.take() == b""


def test_a_later_wait_replaces_an_earlier_one() -> None:
    """P6"""
    waiting, other = sessions(2)
    waiting.receive(ask.wait(b"/a") + ask.wait(b"/b"))
    other.receive(ask.set_(b"/a", b""))
    assert woken(other) == []
    other.receive(ask.set_(b"/b", b""))
    assert woken(other) == [waiting]


def test_a_barrier_answers_all_when_the_last_one_arrives() -> None:
    first, second, third = sessions(3)
    assert first.receive(ask.barrier(b"/b", 3)) == b""
    assert second.receive(ask.barrier(b"/b", 3)) == b""
    assert third.receive(ask.barrier(b"/b", 3)) == STOP
    assert woken(first) == [first, second]
    assert third.receive(ask.get(b"/b")) == ask.text(b"3")


def test_nothing_of_a_list_is_visible_before_its_last_byte() -> None:
    """P3"""
    writer, reader = sessions(2)
    request = ask.multi_set((b"/a", b"new"), (b"/b", b"new"))
    reader.receive(ask.set_(b"/a", b"old"))
    writer.receive(request[:-1])
    assert reader.receive(ask.check(b"/b") + ask.get(b"/a")) == NOT_READY + ask.text(b"old")
    writer.receive(request[-1:])
    assert reader.receive(ask.check(b"/b") + ask.get(b"/a")) == READY + ask.text(b"new")


def test_limits_are_frozen_and_positive() -> None:
    limits = Limits(connections=3)
    with pytest.raises(AttributeError):
        limits.connections = 4
    with pytest.raises(ValueError, match="handshake_s"):
        Limits(handshake_s=0)
    assert "connections=3" in repr(limits)
