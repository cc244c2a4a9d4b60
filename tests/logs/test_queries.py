"""Queries to the log writer: what it keeps in memory, what it waits for, and what it reports after a restart."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kit.processes import TIMEOUT_S
from tenax._logs import query as log_query
from tenax._logs.queries import LogQueries
from tenax._logs.writer import LogWriter
from tenax._logs.writer_main import Stream

from .conftest import Harness, kill, wait_until

pytestmark = pytest.mark.process


@pytest.fixture
def writer(harness: Harness) -> Iterator[LogWriter]:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    with harness.log_writer(nowhere, nowhere) as made:
        yield made


def stream(key: str, start: int = -1, path: str = "", group: int = 1) -> tuple[str, str, int, int]:
    return key, path, group, start


def query(writer: LogWriter, *streams: tuple[str, str, int, int], **query: Any) -> dict[str, Any]:
    answers: list[dict[str, Any]] = []
    writer.query(streams, answers.append, **query)
    assert writer.wait_for(lambda: bool(answers), TIMEOUT_S), "no answer in time"
    (answer,) = answers
    assert "error" not in answer, answer
    return answer


def texts(answer: dict[str, Any]) -> list[bytes]:
    return [text for _, _, text in answer["lines"]]


def let_time_pass() -> None:
    """Lines that arrive within one millisecond have the same time: wait until the next one."""
    now = time.time()
    wait_until(lambda: time.time() > now + 0.002)


def test_lines_of_open_streams_are_merged_by_time(writer: LogWriter) -> None:
    """Including what is still in the pipes at the request; one stream is silent."""
    ends = [writer.open_stream(f"1.{rank}.1") for rank in range(3)]
    for number in range(4):
        os.write(ends[number % 2], b"line %d\n" % number)
        query(writer, stream("1.0.1"), stream("1.1.1"), last=1)  # so that it is read before the next line comes
        let_time_pass()
    answer = query(writer, *(stream(f"1.{rank}.1") for rank in range(3)), last=10)
    assert texts(answer) == [b"line 0", b"line 1", b"line 2", b"line 3"]
    assert [source for source, _, _ in answer["lines"]] == [0, 1, 0, 1]
    assert answer["positions"] == [14, 14, 0]
    assert answer["left_out"] == []
    for end in ends:
        os.close(end)


def test_ended_streams_of_eight_generations_are_kept_in_memory(writer: LogWriter) -> None:
    """Earlier ones are reported as no longer in memory."""
    for generation in range(1, 12):
        end = writer.open_stream(f"{generation}.0.2")
        os.write(end, b"why %d ended\nno newline" % generation)
        os.close(end)
        writer.close_stream_duplicates([f"{generation}.0.2"])
    answer = query(writer, *(stream(f"{number}.0.2", group=number) for number in range(1, 12)), last=100)
    expected = [text for number in range(4, 12) for text in (b"why %d ended" % number, b"no newline")]
    assert texts(answer) == expected
    assert answer["left_out"] == [(index, 0, log_query.FORGOTTEN) for index in range(3)]


def test_memory_for_ended_streams_is_bounded_in_bytes(writer: LogWriter) -> None:
    """With many workers, fewer generations are kept."""
    for generation in range(1, 4):
        keys = [f"{generation}.{rank}.1" for rank in range(130)]
        for key in keys:
            end = writer.open_stream(key)
            os.write(end, b"x" * 65_000 + b"\n")
            os.close(end)
        writer.close_stream_duplicates(keys)
    streams = [stream(f"{generation}.{rank}.1") for generation in (1, 2, 3) for rank in (0, 129)]
    answer = query(writer, *streams, last=9)
    assert {source for source, _, _ in answer["lines"]} == {4, 5}
    assert {index for index, _, why in answer["left_out"] if why == log_query.FORGOTTEN} == {0, 1, 2, 3}


def test_a_query_waits_for_the_next_whole_line(writer: LogWriter) -> None:
    """A partial line is no result; the whole line comes once."""
    end = writer.open_stream("1.0.1")
    os.write(end, b"before\n")
    (position,) = query(writer, stream("1.0.1"), last=1)["positions"]
    answers: list[dict[str, Any]] = []
    writer.query([stream("1.0.1", position)], answers.append, wait_s=TIMEOUT_S)
    os.write(end, b"ha")
    query(writer, stream("1.0.1"), last=1)
    assert not answers
    os.write(end, b"lf\n")
    assert writer.wait_for(lambda: bool(answers), TIMEOUT_S)
    assert texts(answers[0]) == [b"half"]
    assert answers[0]["positions"] == [12]
    os.close(end)


def test_a_query_waits_for_a_line_with_a_text(writer: LogWriter) -> None:
    end = writer.open_stream("1.0.1")
    answers: list[dict[str, Any]] = []
    writer.query([stream("1.0.1", 0)], answers.append, wait_s=TIMEOUT_S, needle=b"loss")
    os.write(end, b"other\nstill other\n")
    query(writer, stream("1.0.1"), last=1)
    assert not answers
    os.write(end, b"the loss\nother\n")
    assert writer.wait_for(lambda: bool(answers), TIMEOUT_S)
    assert texts(answers[0]) == [b"the loss"]
    os.close(end)


def test_a_query_ends_with_its_timeout_on_request_or_with_the_stream(writer: LogWriter) -> None:
    end = writer.open_stream("1.0.1")
    answer = query(writer, stream("1.0.1", 0), wait_s=0.05)
    assert (texts(answer), answer["is_over"]) == ([], False)
    answers: list[dict[str, Any]] = []
    writer.query([stream("1.0.1", 0)], answers.append, wait_s=600.0)
    writer.query([], answers.append, wait_s=600.0)
    writer.answer_now()
    assert writer.wait_for(lambda: len(answers) == 2, TIMEOUT_S)
    writer.query([stream("1.0.1", 0)], answers.append, wait_s=600.0)
    os.write(end, b"last line")
    os.close(end)
    assert writer.wait_for(lambda: len(answers) == 3, TIMEOUT_S)
    assert (texts(answers[2]), answers[2]["is_over"]) == ([b"last line"], True)


def test_lines_that_are_not_in_memory_are_read_from_the_file(writer: LogWriter, tmp_path: Path) -> None:
    (tmp_path / "attempt_0" / "0").mkdir(parents=True)
    path = str(tmp_path / "attempt_0" / "0" / "stdout.log")
    end = writer.open_stream("1.0.1", path=path)
    expected = [b"%07d %s" % (number, b"w" * 90) for number in range(5000)]
    for line in expected:
        os.write(end, line + b"\n")
    os.close(end)
    writer.drain_now(TIMEOUT_S)
    answer_lines, position, is_more = [], 0, True
    while is_more:
        answer = query(writer, stream("1.0.1", position))
        answer_lines += texts(answer)
        (position,), is_more = answer["positions"], answer["is_more"]
        assert answer["left_out"] == []
        assert all(at > 0 for _, at, _ in answer["lines"])
    assert answer_lines == expected
    # And if nothing of it is in memory.
    answer = query(writer, stream("another", path=path), last=3)
    assert texts(answer) == expected[-3:]


def test_a_restarted_log_writer_reports_lost_lines(writer: LogWriter, tmp_path: Path) -> None:
    """Lines in memory are lost, those in a file are not; the new process answers waiting queries."""
    path = str(tmp_path / "log")
    memory, file = writer.open_stream("1.0.1"), writer.open_stream("1.1.1", path=path)
    os.write(memory, b"remembered\n")
    os.write(file, b"kept\n")
    before = query(writer, stream("1.0.1"), stream("1.1.1"), last=9)
    assert texts(before) == [b"remembered", b"kept"]
    wait_until(lambda: os.path.exists(path) and os.path.getsize(path) == 5)
    answers: list[dict[str, Any]] = []
    first, second = before["positions"]
    writer.query([stream("1.0.1", first), stream("1.1.1", second)], answers.append, wait_s=TIMEOUT_S)
    kill(writer.pid, signal.SIGKILL)
    assert writer.wait_for(lambda: bool(answers), TIMEOUT_S)
    assert answers[0]["left_out"] == [(0, 0, log_query.LOST), (1, 0, log_query.MAY_BE_LOST)]
    assert answers[0]["incarnation"] == 1
    os.write(memory, b"new\n")
    os.write(file, b"new, too\n")
    starts = answers[0]["positions"]
    answer_lines: list[bytes] = []
    while len(answer_lines) < 2:
        answer = query(writer, stream("1.0.1", starts[0]), stream("1.1.1", starts[1]), wait_s=TIMEOUT_S, incarnation=1)
        answer_lines += texts(answer)
        starts = answer["positions"]
        assert answer["left_out"] == []
    assert sorted(answer_lines) == [b"new", b"new, too"]
    answer = query(writer, stream("1.0.1"), stream("1.1.1"), last=9)
    assert sorted(texts(answer)) == [b"kept", b"new", b"new, too"]
    assert (0, 0, log_query.LOST) in answer["left_out"]
    os.close(memory)
    os.close(file)


def test_queries_do_not_undo_backpressure(harness: Harness, tmp_path: Path) -> None:
    """A slow console slows the worker down. Repeated queries do not make the log writer read further."""
    read_end, console = harness.pipe()
    with harness.log_writer(console, console, queue_bytes=1 << 16, stuck_after_s=600.0) as writer:
        end = writer.open_stream("1.0.1", console=1)
        os.set_blocking(end, False)
        line, written = b"y" * 999 + b"\n", 0

        def is_full() -> bool:
            nonlocal written
            try:
                while True:
                    written += os.write(end, line)
            except BlockingIOError:
                query(writer, stream("1.0.1"), last=1)  # a round of its loop
                try:
                    written += os.write(end, line)
                except BlockingIOError:
                    return True
                return False

        wait_until(is_full)
        for _ in range(20):
            answer = query(writer, stream("1.0.1"), last=1)
        assert answer["positions"][0] < written
        with pytest.raises(BlockingIOError):
            os.write(end, line * 8)
        os.close(end)
        reader = harness.reader(read_end)
        reader.wait_for(lambda data: len(data) == written, TIMEOUT_S)


def test_a_query_for_many_files_leaves_descriptors_for_workers(writer: LogWriter, tmp_path: Path) -> None:
    """All generations of a long run can be more files than a process may open."""
    streams = []
    for generation in range(1, 61):
        folder = tmp_path / f"attempt_{generation}" / "0"
        folder.mkdir(parents=True)
        (folder / "stdout.log").write_bytes(b"line %d\n" % generation)
        streams.append(stream(f"{generation}.0.1", path=str(folder / "stdout.log"), group=generation))
    limit = 48
    resource.prlimit(writer.pid, resource.RLIMIT_NOFILE, (limit, limit))
    answers: list[dict[str, Any]] = []
    writer.query(streams, answers.append, last=100)
    end = writer.open_stream("61.0.1", path=str(tmp_path / "new.log"))
    os.write(end, b"new\n")
    os.close(end)
    assert writer.wait_for(lambda: bool(answers), TIMEOUT_S)
    assert texts(answers[0]) == [b"line %d" % generation for generation in range(1, 61)]
    assert answers[0]["left_out"] == []
    assert writer.drain_now(TIMEOUT_S) == []
    assert (tmp_path / "new.log").read_bytes() == b"new\n"


def test_a_query_that_kills_the_log_writer_is_given_up(writer: LogWriter) -> None:
    """Otherwise it would kill every new one, and so end the run."""
    end = writer.open_stream("1.0.1")
    answers: list[dict[str, Any]] = []
    writer.query([stream("1.0.1")], answers.append, unknown_option=1)
    assert writer.wait_for(lambda: bool(answers), TIMEOUT_S)
    assert "the log writer died during this query" in answers[0]["error"]
    os.write(end, b"after\n")
    os.close(end)
    wait_until(lambda: texts(query(writer, stream("1.0.1"), last=9)) == [b"after"], TIMEOUT_S)
    assert len(answers) == 1


def test_a_query_waits_for_bytes_that_are_not_yet_in_the_file(tmp_path: Path) -> None:
    """The answer comes a moment later and contains them."""
    path = tmp_path / "stdout.log"
    path.write_bytes(b"")
    is_behind, woken = True, threading.Event()
    answers: list[dict[str, Any]] = []
    queries = LogQueries(lambda _: None, lambda _, answer: answers.append(answer), woken.set, 1, lambda: is_behind)
    queries.add(1, [("1.0.1", os.fsencode(path), 0, 0)], {"wait_s": 0.0}, 1, now=10.0)
    queries.update(10.0)
    assert 10.0 < queries.next_deadline < 11.0, "not at once again"
    path.write_bytes(b"one\ntwo\n")
    is_behind = False
    queries.update(queries.next_deadline)
    assert woken.wait(TIMEOUT_S)
    queries.update(10.5)
    assert texts(answers[0]) == [b"one", b"two"]


@pytest.mark.parametrize("needle", [b"", b"other"], ids=["all", "others"])
def test_lines_that_arrive_during_the_search_are_in_the_answer(needle: bytes) -> None:
    """The timeout passes while the thread still searches earlier bytes: it searches once more."""
    stream, woken = Stream("1.0.1", 0), threading.Event()
    answers: list[dict[str, Any]] = []
    queries = LogQueries(lambda _: stream, lambda _, answer: answers.append(answer), woken.set, 1)
    queries.add(1, [("1.0.1", b"", 0, 0)], {"wait_s": 60.0, "needle": needle}, 1, now=10.0)

    def search() -> None:
        queries.update(10.0)
        assert woken.wait(TIMEOUT_S)
        woken.clear()

    search()
    stream.tail.add(b"the end\n", 10.0)
    queries.answer_now(10.0)
    search()
    stream.tail.add(b"more\n", 10.0)
    queries.update(10.0)
    assert [texts(answer) for answer in answers] == ([[b"the end"]] if not needle else [[]])
