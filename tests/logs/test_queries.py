"""The scribe asked for lines: what it remembers, what it waits for, and what it says of itself when it was lost."""

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

from tenax._logs import query as recall
from tenax._logs.queries import LogQueries
from tenax._logs.writer import LogWriter
from tenax._logs.writer_main import Stream

from .conftest import Stage, kill, wait_until

pytestmark = pytest.mark.process

PATIENCE_S = 30.0


@pytest.fixture
def scribe(stage: Stage) -> Iterator[LogWriter]:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    with stage.scribe(nowhere, nowhere) as made:
        yield made


def want(key: str, start: int = -1, path: str = "", group: int = 1) -> tuple[str, str, int, int]:
    return key, path, group, start


def ask(scribe: LogWriter, *wants: tuple[str, str, int, int], **query: Any) -> dict[str, Any]:
    answer = scribe.recall_now(wants, PATIENCE_S, **query)
    assert answer, "the scribe did not answer"
    assert "error" not in answer, answer
    return answer


def texts(answer: dict[str, Any]) -> list[bytes]:
    return [text for _, _, text in answer["lines"]]


def let_time_pass() -> None:
    """Times are exact to a millisecond: what comes within it has the same."""
    now = time.time()
    wait_until(lambda: time.time() > now + 0.002)


def test_lines_of_living_streams_by_time(scribe: LogWriter) -> None:
    """Also what is still in the pipes when it is asked, and a stream that is silent."""
    ends = [scribe.open_stream(f"1.{rank}.1") for rank in range(3)]
    for number in range(4):
        os.write(ends[number % 2], b"line %d\n" % number)
        ask(scribe, want("1.0.1"), want("1.1.1"), last=1)  # it has read this before the next comes
        let_time_pass()
    answer = ask(scribe, *(want(f"1.{rank}.1") for rank in range(3)), last=10)
    assert texts(answer) == [b"line 0", b"line 1", b"line 2", b"line 3"]
    assert [source for source, _, _ in answer["lines"]] == [0, 1, 0, 1]
    assert answer["positions"] == [14, 14, 0]
    assert answer["left_out"] == []
    for end in ends:
        os.close(end)


def test_streams_that_are_over_are_remembered_for_a_while(scribe: LogWriter) -> None:
    """Of eight generations; what came before is said to be gone."""
    for generation in range(1, 12):
        end = scribe.open_stream(f"{generation}.0.2")
        os.write(end, b"why %d ended\nno newline" % generation)
        os.close(end)
        scribe.close_stream_duplicates([f"{generation}.0.2"])
    answer = ask(scribe, *(want(f"{number}.0.2", group=number) for number in range(1, 12)), last=100)
    expected = [text for number in range(4, 12) for text in (b"why %d ended" % number, b"no newline")]
    assert texts(answer) == expected
    assert answer["left_out"] == [(index, 0, recall.FORGOTTEN) for index in range(3)]


def test_what_is_remembered_is_bounded_in_bytes(scribe: LogWriter) -> None:
    """Generations with many workers: fewer of them."""
    for generation in range(1, 4):
        keys = [f"{generation}.{rank}.1" for rank in range(130)]
        for key in keys:
            end = scribe.open_stream(key)
            os.write(end, b"x" * 65_000 + b"\n")
            os.close(end)
        scribe.close_stream_duplicates(keys)
    wants = [want(f"{generation}.{rank}.1") for generation in (1, 2, 3) for rank in (0, 129)]
    answer = ask(scribe, *wants, last=9)
    assert {source for source, _, _ in answer["lines"]} == {4, 5}
    assert {index for index, _, why in answer["left_out"] if why == recall.FORGOTTEN} == {0, 1, 2, 3}


def test_waiting_for_the_next_line(scribe: LogWriter) -> None:
    """Half a line is nothing yet; the answer comes with the whole one, once."""
    end = scribe.open_stream("1.0.1")
    os.write(end, b"before\n")
    (position,) = ask(scribe, want("1.0.1"), last=1)["positions"]
    answers: list[dict[str, Any]] = []
    scribe.recall([want("1.0.1", position)], answers.append, wait_s=PATIENCE_S)
    os.write(end, b"ha")
    ask(scribe, want("1.0.1"), last=1)
    assert not answers
    os.write(end, b"lf\n")
    assert scribe.wait_for(lambda: bool(answers), PATIENCE_S)
    assert texts(answers[0]) == [b"half"]
    assert answers[0]["positions"] == [12]
    os.close(end)


def test_waiting_for_a_line_with_a_text(scribe: LogWriter) -> None:
    end = scribe.open_stream("1.0.1")
    answers: list[dict[str, Any]] = []
    scribe.recall([want("1.0.1", 0)], answers.append, wait_s=PATIENCE_S, needle=b"loss")
    os.write(end, b"other\nstill other\n")
    ask(scribe, want("1.0.1"), last=1)
    assert not answers
    os.write(end, b"the loss\nother\n")
    assert scribe.wait_for(lambda: bool(answers), PATIENCE_S)
    assert texts(answers[0]) == [b"the loss"]
    os.close(end)


def test_waiting_ends_with_time_a_hurry_or_the_stream(scribe: LogWriter) -> None:
    end = scribe.open_stream("1.0.1")
    answer = ask(scribe, want("1.0.1", 0), wait_s=0.05)
    assert (texts(answer), answer["is_over"]) == ([], False)
    answers: list[dict[str, Any]] = []
    scribe.recall([want("1.0.1", 0)], answers.append, wait_s=600.0)
    scribe.recall([], answers.append, wait_s=600.0)
    scribe.hurry()
    assert scribe.wait_for(lambda: len(answers) == 2, PATIENCE_S)
    scribe.recall([want("1.0.1", 0)], answers.append, wait_s=600.0)
    os.write(end, b"last words")
    os.close(end)
    assert scribe.wait_for(lambda: len(answers) == 3, PATIENCE_S)
    assert (texts(answers[2]), answers[2]["is_over"]) == ([b"last words"], True)


def test_a_file_gives_what_memory_has_lost(scribe: LogWriter, tmp_path: Path) -> None:
    (tmp_path / "attempt_0" / "0").mkdir(parents=True)
    path = str(tmp_path / "attempt_0" / "0" / "stdout.log")
    end = scribe.open_stream("1.0.1", path=path)
    expected = [b"%07d %s" % (number, b"w" * 90) for number in range(5000)]
    for line in expected:
        os.write(end, line + b"\n")
    os.close(end)
    scribe.drain_now(PATIENCE_S)
    told, position, is_more = [], 0, True
    while is_more:
        answer = ask(scribe, want("1.0.1", position))
        told += texts(answer)
        (position,), is_more = answer["positions"], answer["is_more"]
        assert answer["left_out"] == []
        assert all(at > 0 for _, at, _ in answer["lines"])
    assert told == expected
    # And when memory knows nothing of it at all.
    answer = ask(scribe, want("another", path=path), last=3)
    assert texts(answer) == expected[-3:]


def test_a_scribe_that_died_says_what_it_does_not_know(scribe: LogWriter, tmp_path: Path) -> None:
    """What was in memory is lost and said to be; what was in a file is not; who waits is answered by the new one."""
    path = str(tmp_path / "log")
    memory, file = scribe.open_stream("1.0.1"), scribe.open_stream("1.1.1", path=path)
    os.write(memory, b"remembered\n")
    os.write(file, b"kept\n")
    before = ask(scribe, want("1.0.1"), want("1.1.1"), last=9)
    assert texts(before) == [b"remembered", b"kept"]
    wait_until(lambda: os.path.exists(path) and os.path.getsize(path) == 5)
    answers: list[dict[str, Any]] = []
    first, second = before["positions"]
    scribe.recall([want("1.0.1", first), want("1.1.1", second)], answers.append, wait_s=PATIENCE_S)
    kill(scribe.pid, signal.SIGKILL)
    assert scribe.wait_for(lambda: bool(answers), PATIENCE_S)
    assert answers[0]["left_out"] == [(0, 0, recall.LOST), (1, 0, recall.MAY_BE_LOST)]
    assert answers[0]["incarnation"] == 1
    os.write(memory, b"new\n")
    os.write(file, b"new, too\n")
    starts = answers[0]["positions"]
    told: list[bytes] = []
    while len(told) < 2:
        answer = ask(scribe, want("1.0.1", starts[0]), want("1.1.1", starts[1]), wait_s=PATIENCE_S, incarnation=1)
        told += texts(answer)
        starts = answer["positions"]
        assert answer["left_out"] == []
    assert sorted(told) == [b"new", b"new, too"]
    answer = ask(scribe, want("1.0.1"), want("1.1.1"), last=9)
    assert sorted(texts(answer)) == [b"kept", b"new", b"new, too"]
    assert (0, 0, recall.LOST) in answer["left_out"]
    os.close(memory)
    os.close(file)


def test_who_asks_does_not_undo_holding_back(stage: Stage, tmp_path: Path) -> None:
    """A console that is slow slows the worker. Whoever asks again and again does not make the scribe read on."""
    read_end, console = stage.pipe()
    with stage.scribe(console, console, queue_bytes=1 << 16, stuck_after_s=600.0) as scribe:
        end = scribe.open_stream("1.0.1", console=1)
        os.set_blocking(end, False)
        line, written = b"y" * 999 + b"\n", 0

        def is_full() -> bool:
            nonlocal written
            try:
                while True:
                    written += os.write(end, line)
            except BlockingIOError:
                ask(scribe, want("1.0.1"), last=1)  # a round of its loop
                try:
                    written += os.write(end, line)
                except BlockingIOError:
                    return True
                return False

        wait_until(is_full)
        for _ in range(20):
            answer = ask(scribe, want("1.0.1"), last=1)
        assert answer["positions"][0] < written
        with pytest.raises(BlockingIOError):
            os.write(end, line * 8)
        os.close(end)
        reader = stage.reader(read_end)
        reader.wait_for(lambda data: len(data) == written, PATIENCE_S)


def test_however_many_files_are_asked_for_the_scribe_keeps_its_descriptors(scribe: LogWriter, tmp_path: Path) -> None:
    """All generations of a long run are more files than a process may open. Workers must be served meanwhile."""
    wants = []
    for generation in range(1, 61):
        folder = tmp_path / f"attempt_{generation}" / "0"
        folder.mkdir(parents=True)
        (folder / "stdout.log").write_bytes(b"line %d\n" % generation)
        wants.append(want(f"{generation}.0.1", path=str(folder / "stdout.log"), group=generation))
    limit = 48
    resource.prlimit(scribe.pid, resource.RLIMIT_NOFILE, (limit, limit))
    answers: list[dict[str, Any]] = []
    scribe.recall(wants, answers.append, last=100)
    end = scribe.open_stream("61.0.1", path=str(tmp_path / "new.log"))
    os.write(end, b"new\n")
    os.close(end)
    assert scribe.wait_for(lambda: bool(answers), PATIENCE_S)
    assert texts(answers[0]) == [b"line %d" % generation for generation in range(1, 61)]
    assert answers[0]["left_out"] == []
    assert scribe.drain_now(PATIENCE_S).is_complete
    assert (tmp_path / "new.log").read_bytes() == b"new\n"


def test_a_request_that_a_scribe_dies_of_is_given_up(scribe: LogWriter) -> None:
    """Whoever asks must never be the end of the run: a scribe that dies too often is."""
    end = scribe.open_stream("1.0.1")
    answers: list[dict[str, Any]] = []
    scribe.recall([want("1.0.1")], answers.append, nobody_knows_this=1)
    assert scribe.wait_for(lambda: bool(answers), PATIENCE_S)
    assert "died while it looked for these lines" in answers[0]["error"]
    os.write(end, b"after\n")
    os.close(end)
    wait_until(lambda: texts(ask(scribe, want("1.0.1"), last=9)) == [b"after"], PATIENCE_S)
    assert len(answers) == 1


def test_what_is_on_its_way_to_a_file_is_waited_for(tmp_path: Path) -> None:
    """Asked for all of a file whose bytes are still to be written: the answer has them, and comes a moment later."""
    path = tmp_path / "stdout.log"
    path.write_bytes(b"")
    is_behind, woken = True, threading.Event()
    answers: list[dict[str, Any]] = []
    recalls = LogQueries(lambda _: None, lambda _, answer: answers.append(answer), woken.set, 1, lambda: is_behind)
    recalls.add(1, [("1.0.1", os.fsencode(path), 0, 0)], {"wait_s": 0.0}, 1, now=10.0)
    recalls.update(10.0)
    assert recalls.next_deadline is not None
    assert 10.0 < recalls.next_deadline < 11.0, "not at once again"
    path.write_bytes(b"one\ntwo\n")
    is_behind = False
    recalls.update(recalls.next_deadline)
    assert woken.wait(PATIENCE_S)
    recalls.update(10.5)
    assert texts(answers[0]) == [b"one", b"two"]


@pytest.mark.parametrize("needle", [b"", b"other"], ids=["all", "others"])
def test_what_comes_while_nothing_is_found_is_in_the_answer(needle: bytes) -> None:
    """Its time is up while the thread still looks at what was there before: it looks again, once."""
    stream, woken = Stream("1.0.1", 0, None, None, b"", [], None, whole_lines=True), threading.Event()
    answers: list[dict[str, Any]] = []
    recalls = LogQueries(lambda _: stream, lambda _, answer: answers.append(answer), woken.set, 1)
    recalls.add(1, [("1.0.1", b"", 0, 0)], {"wait_s": 60.0, "needle": needle}, 1, now=10.0)

    def look() -> None:
        recalls.update(10.0)
        assert woken.wait(PATIENCE_S)
        woken.clear()

    look()
    stream.tail.add(b"the end\n", 10.0)
    recalls.answer_now(10.0)
    look()
    stream.tail.add(b"more\n", 10.0)
    recalls.update(10.0)
    assert [texts(answer) for answer in answers] == ([[b"the end"]] if not needle else [[]])
