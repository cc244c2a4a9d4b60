"""Lines of several streams: each once, in order, merged by time, within limits; what is missing is counted."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as some

from tenax._logs import query as log_query
from tenax._logs.log_file import LogFile
from tenax._logs.query import CUT, Query, QueryResult, Source, following, last
from tenax._logs.tail import TAIL_BYTES, Tail


def from_memory(tail: Tail, start: int = -1, *, is_open: bool = True, group: int = 0) -> Source:
    """Return a source as the log writer creates it."""
    return Source(
        group=group,
        data=tail.since(start),
        first=max(tail.first, start),
        marks=list(tail.marks),
        start=start,
        is_open=is_open,
    )


def filled(*pieces: tuple[float, bytes]) -> Tail:
    tail = Tail()
    for at, data in pieces:
        tail.add(data, at)
    return tail


def texts(found: QueryResult) -> list[bytes]:
    return [line.text for line in found.lines]


# --- the last lines ---------------------------------------------------------------------------------------------------


def test_the_last_lines_of_all_streams_are_merged() -> None:
    one = filled((1.0, b"a1\n"), (3.0, b"a3\n"), (5.0, b"a5\na5 too\n"))
    two = filled((2.0, b"b2\n"), (4.0, b"b4\n"), (6.0, b"b6\n"))
    found = last([from_memory(one), from_memory(two)], Query(last=5))
    assert texts(found) == [b"a3", b"b4", b"a5", b"a5 too", b"b6"]
    assert [line.at for line in found.lines] == [3.0, 4.0, 5.0, 5.0, 6.0]
    assert found.positions == [one.end, two.end]
    assert found.left_out == []


def test_an_unfinished_line_is_returned_on_request() -> None:
    tail = filled((1.0, b"whole\nnot yet"))
    assert texts(last([from_memory(tail)], Query(last=5))) == [b"whole"]
    found = last([from_memory(tail)], Query(last=5, unfinished=True))
    assert (texts(found), found.positions) == ([b"whole", b"not yet"], [6])
    found = last([from_memory(tail, is_open=False)], Query(last=5))
    assert (texts(found), found.positions) == ([b"whole", b"not yet"], [13])


def test_bytes_that_are_no_longer_in_memory_are_counted() -> None:
    tail = Tail()
    for number in range(4000):
        tail.add(b"%06d %s\n" % (number, b"z" * 92), float(number + 1))
    found = last([from_memory(tail)], Query(last=10_000))
    assert texts(found)[-1].startswith(b"003999 ")
    assert found.left_out == [(0, tail.first, log_query.FORGOTTEN)]
    assert texts(found)[0].startswith(CUT)
    assert last([from_memory(tail)], Query(last=10)).left_out == []


def test_lines_of_a_generation_stay_together() -> None:
    """Clocks of nodes differ and may be set back; generations do not mix."""
    old = filled((50.0, b"old\n"))
    new = filled((40.0, b"new\n"))
    found = last([from_memory(new, group=2), from_memory(old, group=1)], Query(last=9))
    assert texts(found) == [b"old", b"new"]


def test_lines_are_selected_by_text_and_time() -> None:
    tail = filled((1.0, b"loss 3\n"), (2.0, b"other\nloss 2\n"), (3.0, b"loss 1\n"))
    assert texts(last([from_memory(tail)], Query(last=9, needle=b"loss"))) == [b"loss 3", b"loss 2", b"loss 1"]
    assert texts(last([from_memory(tail)], Query(last=9, needle=b"loss", since=1.5))) == [b"loss 2", b"loss 1"]
    assert texts(last([from_memory(tail)], Query(last=9, since=2.5))) == [b"loss 1"]
    assert texts(last([from_memory(tail)], Query(last=9, needle=b"absent"))) == []


def test_a_huge_line_is_shortened_in_the_middle() -> None:
    tail = filled((1.0, b"before\n" + b"A" * 20_000 + b"B" * 20_000 + b"\nafter\n"))
    found = texts(last([from_memory(tail)], Query(last=9)))
    assert found[0] == b"before"
    assert found[2] == b"after"
    assert found[1].startswith(b"AAAA")
    assert found[1].endswith(b"BBBB")
    assert b"[... 23616 bytes left out ...]" in found[1]
    assert len(found[1]) < 17_000


# --- what follows -----------------------------------------------------------------------------------------------------


def test_following_returns_the_lines_after_a_position() -> None:
    tail = filled((1.0, b"one\ntwo\n"), (2.0, b"three\nfo"))
    found = following([from_memory(tail, 4)], Query())
    assert (texts(found), found.positions, found.is_more, found.is_over) == ([b"two", b"three"], [14], False, False)
    tail.add(b"ur\n", 3.0)
    found = following([from_memory(tail, 14, is_open=False)], Query())
    assert (texts(found), found.positions, found.is_over) == ([b"four"], [19], True)


def test_a_slow_reader_gets_the_number_of_bytes_that_it_missed() -> None:
    tail = Tail()
    for number in range(4000):
        tail.add(b"%06d %s\n" % (number, b"z" * 92), float(number + 1))
    found = following([from_memory(tail, 100)], Query())
    assert found.left_out == [(0, tail.first - 100, log_query.FORGOTTEN)]
    assert found.lines[0].text.startswith(CUT)


def pages(make: Callable[[list[int]], list[Source]], query: Query) -> Iterator[QueryResult]:
    """Return all answers to a reader that passes the positions back as long as there is more."""
    positions = [0] * len(make([0, 0, 0]))
    while True:
        found = following(make(positions), query)
        assert found.positions != positions or not found.is_more, "it promises more and does not move"
        yield found
        positions = found.positions
        if not found.is_more:
            return


def test_a_clock_that_is_set_back_loses_no_line() -> None:
    """Every answer makes progress, each line comes once and in order, with the time of that clock."""
    times = [1000.0 + number for number in range(300)] + [500.0 + number for number in range(300)]
    one, two = Tail(), Tail()
    for number, at in enumerate(times):
        one.add(b"one %03d\n" % number, at)
        two.add(b"two %03d\n" % number, 900.0 + number)
    collected: list[list[tuple[bytes, float]]] = [[], []]
    for found in pages(lambda at: [from_memory(one, at[0]), from_memory(two, at[1])], Query(max_bytes=5000)):
        for line in found.lines:
            collected[line.source].append((line.text, line.at))
    assert collected[0] == [(b"one %03d" % number, at) for number, at in enumerate(times)]
    assert collected[1] == [(b"two %03d" % number, 900.0 + number) for number in range(600)]
    since = following([from_memory(one, 0)], Query(since=1200.0, max_bytes=1 << 30))
    assert texts(since) == [b"one %03d" % number for number in range(200, 300)]


def test_an_unfinished_line_comes_once_at_the_end() -> None:
    """However many answers the rest takes, and even if it is larger than all of them."""
    prompt = filled((1.0, b"p" * 9000))
    other = filled((2.0, b"".join(b"line %04d\n" % number for number in range(800))))
    collected: list[list[bytes]] = [[], []]
    count = 0
    for found in pages(
        lambda at: [from_memory(prompt, at[0]), from_memory(other, at[1])], Query(unfinished=True, max_bytes=8000)
    ):
        count += 1
        for line in found.lines:
            collected[line.source].append(line.text)
        left_out = found.left_out
    assert count > 5
    assert collected[1] == [b"line %04d" % number for number in range(800)]
    assert collected[0] == [b"p" * 9000] or left_out == [(0, 9000, log_query.TOO_MUCH)]
    assert texts(following([from_memory(prompt, 0)], Query(unfinished=True, max_bytes=8000))) == [b"p" * 9000]


Pieces = some.lists(
    some.tuples(
        some.integers(0, 2),  # index of the stream
        some.sampled_from(
            [b"x\n", b"\n", b"half", b" a line\n", b"a\nb\nc\n", b"\xff\x00\n", b"\r\r", b"z" * 3000 + b"\n"]
        ),
    ),
    max_size=60,
)


@settings(deadline=None)
@given(pieces=Pieces, most=some.sampled_from([300, 2000, log_query.MAX_BYTES]), portion=some.integers(1, 20))
def test_each_line_comes_once_and_in_order(pieces: list[tuple[int, bytes]], most: int, portion: int) -> None:
    """Whatever is written, in whatever pieces, however often a reader asks and however little fits an answer."""
    tails = [Tail() for _ in range(3)]
    written = [b"", b"", b""]
    collected: list[list[bytes]] = [[], [], []]
    positions = [0, 0, 0]

    def look(is_open: bool) -> None:
        nonlocal positions
        while True:
            sources = [from_memory(tail, at, is_open=is_open) for tail, at in zip(tails, positions, strict=True)]
            found = following(sources, Query(max_bytes=most))
            assert found.left_out == []
            for line in found.lines:
                collected[line.source].append(line.text)
            assert found.positions != positions or not found.is_more, "it promises more and does not move"
            positions = found.positions
            if not found.is_more:
                return

    for number, (index, data) in enumerate(pieces):
        tails[index].add(data, 1.0 + number)
        written[index] += data
        if number % portion == 0:
            look(is_open=True)
    look(is_open=False)
    for index in range(3):
        expected = written[index].split(b"\n")
        assert collected[index] == (expected if expected[-1] else expected[:-1])


@settings(deadline=None)
@given(pieces=Pieces)
def test_lines_are_merged_by_time(pieces: list[tuple[int, bytes]]) -> None:
    tails = [Tail() for _ in range(3)]
    for number, (index, data) in enumerate(pieces):
        tails[index].add(data, 1.0 + number)
    for found in (
        last([from_memory(tail) for tail in tails], Query(last=10_000)),
        following([from_memory(tail, 0) for tail in tails], Query()),
    ):
        assert [line.at for line in found.lines] == sorted(line.at for line in found.lines)


# --- from files -------------------------------------------------------------------------------------------------------


@contextmanager
def kept(path: Path, tail: Tail, start: int, *, is_open: bool = True) -> Iterator[Source]:
    source = Source(
        data=tail.since(start),
        first=max(tail.first, start),
        marks=list(tail.marks),
        path=os.fsencode(path),
        start=start,
        is_open=is_open,
    )
    yield source


def write_both(path: Path, count: int) -> tuple[Tail, list[bytes]]:
    path.parent.mkdir(parents=True)
    tail, file, lines = Tail(), LogFile(os.fsencode(path)), []
    for number in range(count):
        line = b"%07d %s" % (number, b"y" * (number * 37 % 150))
        tail.add(line + b"\n", 1000.0 + number)
        file.append(line + b"\n", 1000.0 + number)
        lines.append(line)
    file.close()
    return tail, lines


def test_lines_are_read_across_the_border_of_file_and_memory(tmp_path: Path) -> None:
    """From the first line to the last, in several answers."""
    tail, lines = write_both(tmp_path / "attempt_0" / "0" / "stdout.log", 12_000)
    collected: list[bytes] = []
    position, is_more = 0, True
    while is_more:
        with kept(tmp_path / "attempt_0" / "0" / "stdout.log", tail, position) as source:
            found = following([source], Query())
        assert found.left_out == []
        assert sum(map(len, texts(found))) <= log_query.MAX_BYTES
        assert all(line.at == 1000.0 + int(line.text[:7]) for line in found.lines)
        collected += texts(found)
        (position,), is_more = found.positions, found.is_more
    assert collected == lines
    with kept(tmp_path / "attempt_0" / "0" / "stdout.log", tail, -1) as source:
        found = last([source], Query(last=1000))
    assert texts(found) == lines[-1000:]
    assert tail.first > 0
    assert found.lines[0].at == 1000.0 + 11_000


def test_a_file_is_searched_by_text_and_time(tmp_path: Path) -> None:
    tail, lines = write_both(tmp_path / "attempt_0" / "0" / "stdout.log", 12_000)
    wanted = [line for line in lines if b"99 " in line[:8]]
    with kept(tmp_path / "attempt_0" / "0" / "stdout.log", tail, -1) as source:
        found = last([source], Query(last=1000, needle=b"99 "))
    assert (texts(found), found.left_out) == (wanted, [])
    with kept(tmp_path / "attempt_0" / "0" / "stdout.log", tail, 0) as source:
        found = following([source], Query(needle=b"99 "))
    assert texts(found) == wanted
    with kept(tmp_path / "attempt_0" / "0" / "stdout.log", tail, 0) as source:
        found = following([source], Query(since=1000.0 + 11_995))
    assert texts(found) == lines[-5:]


def test_a_search_is_linear_in_the_size_of_the_file(tmp_path: Path) -> None:
    """It does not search the whole file for each line."""
    path = tmp_path / "log"
    path.write_bytes(b"".join(b"%d ok\n" % n if n % 10_000 else b"epoch %d\n" % n for n in range(400_000)))
    expected = [b"epoch %d" % number for number in range(0, 400_000, 10_000)]
    began = time.process_time()
    found = last([Source(path=os.fsencode(path), in_memory=False)], Query(last=100, needle=b"epoch"))
    collected = following([Source(path=os.fsencode(path), in_memory=False, start=0)], Query(needle=b"epoch"))
    assert (texts(found), texts(collected)) == (expected, expected)
    assert time.process_time() - began < 5.0


def test_the_last_lines_of_a_slow_worker_have_their_times(tmp_path: Path) -> None:
    """One short line a second, for hours: those of the last minutes are found."""
    path = tmp_path / "attempt_0" / "0" / "stdout.log"
    path.parent.mkdir(parents=True)
    file = LogFile(os.fsencode(path))
    for number in range(6000):
        file.append(b"step %05d\n" % number, 1000.0 + number)
    file.close()
    found = last([Source(path=os.fsencode(path), in_memory=False)], Query(last=500, since=1000.0 + 5900))
    assert [(line.text, line.at) for line in found.lines] == [(b"step %05d" % n, 1000.0 + n) for n in range(5900, 6000)]


def test_following_waits_for_a_file_that_is_behind(tmp_path: Path) -> None:
    """With a slow disk, bytes that are neither in memory nor in the file yet are not skipped."""
    path = tmp_path / "attempt_0" / "0" / "stdout.log"
    tail, lines = write_both(path, 4000)
    whole = path.read_bytes()
    path.write_bytes(whole[:1005])
    with kept(path, tail, 0) as source:
        found = following([source], Query())
    (position,) = found.positions
    collected = texts(found)
    assert b"".join(line + b"\n" for line in collected) == whole[:position]
    assert not found.is_more
    assert not found.is_over
    path.write_bytes(whole)
    with kept(path, tail, position, is_open=False) as source:
        found = following([source], Query(max_bytes=1 << 30))
    assert collected + texts(found) == lines
    path.write_bytes(whole[:1005])
    with kept(path, tail, -1) as source:
        found = last([source], Query(last=5))
        assert texts(found) == lines[-5:]
        assert found.left_out == [(0, tail.first - 1005, log_query.BEHIND)]


def test_a_line_larger_than_an_answer_is_shortened(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"first\n" + b"h" * (3 << 20) + b" needle " + b"t" * (3 << 20) + b"\nlast\n")
    for query, expected in ((Query(last=3), 3), (Query(last=3, needle=b"needle"), 1)):
        source = Source(path=os.fsencode(path), in_memory=False)
        found = last([source], query)
        assert len(found.lines) == expected
        assert any(b"bytes left out" in text and len(text) < 20_000 for text in texts(found))
    source = Source(path=os.fsencode(path), in_memory=False, start=0)
    found = following([source], Query())
    assert [text[:5] for text in texts(found)] == [b"first", b"hhhhh", b"last"]
    assert found.is_over


def test_an_unreadable_file_is_reported(tmp_path: Path) -> None:
    for path, why in ((tmp_path / "none", log_query.UNREADABLE), (tmp_path, log_query.UNREADABLE)):
        source = Source(path=os.fsencode(path), in_memory=False)
        found = last([source], Query(last=3))
        assert (found.lines, found.left_out) == ([], [(0, 0, why)])
    source = Source(in_memory=False)
    assert last([source], Query(last=3)).left_out == [(0, 0, log_query.FORGOTTEN)]


def test_a_progress_bar_without_newlines_is_one_line() -> None:
    tail = Tail()
    for number in range(10_000):
        tail.add(b"\r%d %% done, and so on" % number, float(number + 1))
    assert tail.end > 2 * TAIL_BYTES
    found = last([from_memory(tail)], Query(last=3, unfinished=True))
    assert len(found.lines) == 1
    assert found.lines[0].text.endswith(b"\r9999 % done, and so on")
