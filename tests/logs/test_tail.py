"""The tail of a stream: which bytes it holds, when they came, and how much memory it takes."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as some

from tenax._logs.tail import MAX_MARKS, TAIL_BYTES, Tail


@settings(deadline=None)
@given(some.lists(some.sampled_from([1, 7, 1000, TAIL_BYTES - 1, TAIL_BYTES, 3 * TAIL_BYTES]), max_size=12))
def test_a_tail_holds_the_end_of_the_stream_without_gaps(sizes: list[int]) -> None:
    """Whatever the pieces: the bytes at each position are those that were written there."""
    tail, written = Tail(), b""
    for number, size in enumerate(sizes):
        data = (b"%07d" % len(written)) * (size // 7 + 1)
        data = data[:size]
        tail.add(data, 100.0 + number)
        written += data
        assert tail.end == len(written)
        assert bytes(tail.data) == written[tail.first :]
        assert min(len(written), TAIL_BYTES) <= len(tail.data) <= 2 * TAIL_BYTES
        assert tail.last_bytes() == written[-TAIL_BYTES:]
        assert tail.since(len(written) - 1) == written[-1:]
        assert tail.since(len(written)) == b""
        if tail.data:  # the oldest byte in memory has a time
            assert tail.marks[0][0] <= tail.first


def test_marks_record_when_bytes_arrived() -> None:
    tail = Tail()
    tail.add(b"one\n", 10.0)
    tail.add(b"two\n", 10.0001)  # too close to be a new mark
    tail.add(b"three\n", 11.0)
    tail.add(b"four\n", 9.0)  # the clock was set back: recorded as it is
    assert tail.marks == [(0, 10.0), (8, 11.0), (14, 9.0)]


def test_memory_is_bounded_whatever_the_pieces() -> None:
    """One byte at a time, each at a new time: there are fewer marks than bytes."""
    tail = Tail()
    for number in range(1, 20_001):
        tail.add(b"x", float(number))
    assert len(tail.marks) <= MAX_MARKS + 1
    assert tail.marks[0] == (0, 1.0)
    assert tail.marks[-1] == (19_999, 20_000.0)
    assert tail.marks == sorted(tail.marks)
    assert tail.size < 2 * TAIL_BYTES + 20 * MAX_MARKS


def test_trimming_removes_marks_of_dropped_bytes() -> None:
    tail = Tail()
    for number in range(200):
        tail.add(b"y" * 1000, number + 1.0)
    tail.trim()
    assert len(tail.data) == TAIL_BYTES
    assert tail.marks[0][0] <= tail.first < tail.marks[1][0]
