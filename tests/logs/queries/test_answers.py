"""The answers of a node to ``LogsRequest``: real pipes and a real log writer, without an agent."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, cast

import msgspec
import pytest

from kit.processes import TIMEOUT_S
from tenax._core.requests import LogsRequest
from tenax._logs.query import MAX_BYTES
from tenax._logs.specs import DefaultLogsSpecs, LogsDest
from tenax._node.log_queries import Cursor, InvalidRequest, LogQueries, RankSet
from tenax._node.worker_logs import LoggedGeneration, WorkerLogs
from tenax._view.log_lines import LogAnswer

pytestmark = pytest.mark.process

if TYPE_CHECKING:
    from tenax._logs.writer import LogWriter


class Node:
    """The logs of a node, served as its loop would."""

    def __init__(self) -> None:
        self.logs = WorkerLogs(
            DefaultLogsSpecs(os.devnull, local_ranks_filter={99}), role="default", show_messages=False
        )
        self.logs.open()
        self.outputs: dict[tuple[int, int], int] = {}

    def begin(self, generation: int, ranks: list[int]) -> None:
        for descriptor in self.outputs.values():
            os.close(descriptor)
        envs = {local_rank: {"RANK": str(rank)} for local_rank, rank in enumerate(ranks)}
        made = self.logs.prepare(generation, envs)
        self.outputs = {(rank, 1): output.stdout for rank, output in made.items()}
        self.outputs |= {(rank, 2): output.stderr for rank, output in made.items()}

    def write(self, local_rank: int, data: bytes, number: int = 1) -> None:
        os.write(self.outputs[local_rank, number], data)

    def request(self, **wanted: object) -> list[tuple[object, str]]:
        """Send a request without waiting. The returned list fills when the answer comes."""
        answers: list[tuple[object, str]] = []
        request = msgspec.convert({"request": "LogsRequest", "node": "here", **wanted}, LogsRequest)
        self.logs.answer(request, lambda value, error: answers.append((value, error)))
        return answers

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert select.select([self.logs.fileno()], [], [], deadline - time.monotonic())[0], "no answer in time"
            self.logs.on_readable()

    def answer(self, **wanted: object) -> LogAnswer:
        answers = self.request(**wanted)
        self.until(lambda: bool(answers))
        ((value, error),) = answers
        assert not error
        # As on the wire.
        return msgspec.json.decode(msgspec.json.encode(value), type=LogAnswer)

    def error(self, **wanted: object) -> str:
        ((value, error),) = self.request(**wanted)
        assert value is None
        return error

    def close(self) -> None:
        for descriptor in self.outputs.values():
            os.close(descriptor)
        self.logs.close()


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node()
    yield made
    made.close()


def texts(answer: LogAnswer) -> list[str]:
    return [line.text for line in answer.lines]


def test_a_line_has_rank_stream_generation_and_time(node: Node) -> None:
    node.begin(3, [4, 5])
    node.write(1, b"hello\n", number=2)
    (line,) = node.answer().lines
    assert (line.rank, line.local_rank, line.stream, line.generation, line.text) == (5, 1, "stderr", 3, "hello")
    assert abs(line.at - time.time()) < TIMEOUT_S
    assert texts(node.answer(ranks="4")) == []
    assert texts(node.answer(local_rank=1)) == ["hello"]
    assert texts(node.answer(local_rank=0)) == []
    assert texts(node.answer(stream="stdout")) == []


def test_invalid_requests_are_rejected(node: Node) -> None:
    assert node.error(stream="both") == "unknown stream 'both'; use stdout or stderr"
    assert node.error(ranks="1-") == "invalid ranks '1-'; write them as 0,3-5"
    for cursor in ("x", "0:1", "0:1:zz", "0:1:2:3", "::"):
        assert "invalid cursor" in node.error(cursor=cursor)


def test_a_node_without_workers_has_no_lines(node: Node) -> None:
    """A follower of a spare gets the lines of its first generation."""
    answer = node.answer()
    assert (answer.lines, answer.generation, answer.is_over) == ((), 0, False)
    answers = node.request(cursor=answer.cursor, wait_s=TIMEOUT_S)
    node.begin(2, [0])
    node.write(0, b"begun\n")
    node.until(lambda: bool(answers))
    received = answers[0][0]
    assert isinstance(received, LogAnswer)
    assert received.is_more
    assert texts(node.answer(cursor=received.cursor, wait_s=TIMEOUT_S)) == ["begun"]


def test_each_line_comes_once_across_generations(node: Node) -> None:
    """A follower that passes the cursor back misses nothing, even if two generations pass between its requests."""
    node.begin(1, [0, 1])
    node.write(0, b"one\n")
    answer = node.answer()
    assert texts(answer) == ["one"]
    node.write(1, b"one more, unfinished")
    node.begin(2, [1, 0])
    node.write(0, b"two\n")
    node.begin(5, [0])
    node.write(0, b"five\n")
    received = []
    while len(received) < 3:
        answer = node.answer(cursor=answer.cursor, wait_s=TIMEOUT_S)
        received += [(line.generation, line.rank, line.text) for line in answer.lines]
        assert not answer.is_over
    assert received == [(1, 1, "one more, unfinished"), (2, 1, "two"), (5, 0, "five")]
    assert not answer.is_more
    answer = node.answer(cursor="start", generation=2)
    assert (texts(answer), answer.is_over) == (["two"], True)
    answer = node.answer(generation=-1)
    assert texts(answer) == ["one", "one more, unfinished", "two", "five"]


def test_an_answer_is_bounded(node: Node) -> None:
    """The rest is in the next answer, or reported as left out."""
    node.begin(1, list(range(16)))
    for rank in range(16):
        node.write(rank, b"".join(b"%06d %s\n" % (number, b"b" * 92) for number in range(600)))
    answer = node.answer(last=100_000)
    assert sum(len(text) for text in texts(answer)) <= MAX_BYTES
    assert sum(each.bytes for each in answer.left_out) + sum(len(text) + 1 for text in texts(answer)) == 16 * 600 * 100
    received: dict[int, list[int]] = {rank: [] for rank in range(16)}
    answer = node.answer(cursor="start")
    while True:
        for line in answer.lines:
            received[line.rank].append(int(line.text[:6]))
        assert answer.left_out == ()
        if not answer.is_more:
            break
        answer = node.answer(cursor=answer.cursor)
    assert received == {rank: list(range(600)) for rank in range(16)}


def test_the_number_of_waiting_requests_is_limited(node: Node) -> None:
    """One more ends the first of them with an empty answer; requests that do not wait are always answered."""
    node.begin(1, [0])
    cursor = node.answer().cursor
    waiting = [node.request(cursor=cursor, wait_s=1e9) for _ in range(32)]
    assert texts(node.answer(cursor=cursor)) == []
    assert not any(waiting)
    waiting.append(node.request(cursor=cursor, wait_s=1e9))
    node.until(lambda: bool(waiting[0]))
    assert isinstance(waiting[0][0][0], LogAnswer)
    assert not any(waiting[1:])
    node.write(0, b"something\n")
    node.until(lambda: all(waiting))


def test_all_followers_get_all_lines_at_the_end_of_the_run(node: Node) -> None:
    """Also those that ask once more; then the node waits for none."""
    node.begin(1, [0])
    cursor = node.answer().cursor
    waiting = [node.request(cursor=cursor, wait_s=1e9) for _ in range(3)]
    node.write(0, b"the end")
    for descriptor in node.outputs.values():
        os.close(descriptor)
    node.outputs = {}
    followed_for = node.logs.answer_final_requests()
    assert followed_for is not None
    assert followed_for() > 0
    received: list[str] = []
    while waiting:
        answers = waiting.pop()
        node.until(lambda answers=answers: bool(answers))  # type: ignore[misc]
        ((answer, error),) = answers
        assert isinstance(answer, LogAnswer), error
        received += texts(answer)
        if not answer.is_over:  # it was sent before the node knew that this was the end
            waiting.append(node.request(cursor=answer.cursor, wait_s=1e9))
    assert received == ["the end"] * 3
    assert followed_for() == 0


def test_the_node_waits_only_for_followers(node: Node) -> None:
    """Not if there was no request, or only one for existing lines."""
    assert node.logs.answer_final_requests() is None
    node.begin(1, [0])
    node.answer()
    followed_for = node.logs.answer_final_requests()
    assert followed_for is not None
    assert followed_for() == 0


class SlowLogWriter:
    """A log writer whose thread has copied streams that were still open, and takes its time to search them."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[tuple[object, ...]], Callable[[dict[str, object]], None]]] = []

    def query(self, streams: list[tuple[object, ...]], answer: Callable[[dict[str, object]], None], **_: object) -> int:
        self.asked.append((streams, answer))
        return len(self.asked)

    def answer_now(self, *_: int) -> None:
        pass


@pytest.mark.parametrize("cursor", ["", "1:1:a"], ids=["the last lines", "what follows"])
def test_a_follower_leaves_a_generation_only_after_its_last_line(cursor: str) -> None:
    """The streams were open when they were copied; before the answer came they got more lines, and ended."""
    generations = {1: LoggedGeneration({0: 0}, LogsDest(), {0: 1})}
    log_writer = SlowLogWriter()
    answers = LogQueries(cast("LogWriter", log_writer), generations)
    received: list[LogAnswer] = []

    def request(cursor: str) -> None:
        answers.answer(LogsRequest("here", cursor=cursor, wait_s=20.0), lambda value, _: received.append(value))

    found = {"lines": [], "positions": [20, 0], "left_out": [], "is_more": False, "is_over": False, "incarnation": 1}
    request(cursor)
    generations[2] = LoggedGeneration({0: 0}, LogsDest(), {0: 2})
    log_writer.asked[-1][1](found)
    assert (received[-1].cursor, received[-1].is_more) == ("1:1:14", True)
    request(received[-1].cursor)
    assert [stream[0] for stream in log_writer.asked[-1][0]] == ["1.0.1", "1.0.2"]
    log_writer.asked[-1][1]({**found, "positions": [30, 0], "is_over": True})
    assert (received[-1].cursor, received[-1].is_more) == ("1:2:", True)
    request(received[-1].cursor)
    assert [stream[0] for stream in log_writer.asked[-1][0]] == ["2.0.1", "2.0.2"]


def test_a_follower_continues_with_a_survivor_where_it_was() -> None:
    """Local rank 0 keeps its process and its streams in generation 2, which does not wait for their end."""
    generations = {1: LoggedGeneration({0: 0, 1: 1}, LogsDest(), {0: 1, 1: 1})}
    log_writer = SlowLogWriter()
    answers = LogQueries(cast("LogWriter", log_writer), generations)
    received: list[LogAnswer] = []

    def request(cursor: str) -> list[tuple[object, ...]]:
        answers.answer(LogsRequest("here", cursor=cursor, wait_s=20.0), lambda value, _: received.append(value))
        return [(stream[0], stream[3]) for stream in log_writer.asked[-1][0]]

    found = {"lines": [], "left_out": [], "is_more": False, "is_over": False, "incarnation": 1}
    request("1:1:")
    generations[2] = LoggedGeneration({0: 0, 1: 1}, LogsDest(), {0: 1, 1: 2})
    log_writer.asked[-1][1]({**found, "positions": [20, 0, 30, 0]})
    assert request(received[-1].cursor) == [("1.1.1", 30), ("1.1.2", 0)]
    log_writer.asked[-1][1]({**found, "positions": [40, 0], "is_over": True})
    assert request(received[-1].cursor) == [("1.0.1", 20), ("1.0.2", 0), ("2.1.1", 0), ("2.1.2", 0)]


def test_ended_streams_alone_do_not_answer_a_follower_of_the_run(node: Node) -> None:
    """The next answer comes with the next generation. A follower of this generation only is answered at once."""
    node.begin(1, [0])
    node.write(0, b"done\n")
    for descriptor in node.outputs.values():
        os.close(descriptor)
    node.outputs = {}
    cursor = node.answer(cursor="start").cursor
    answers = node.request(cursor=cursor, wait_s=TIMEOUT_S)
    answer = node.answer(cursor=cursor, generation=1, wait_s=TIMEOUT_S)
    assert (texts(answer), answer.is_over) == ([], True)
    node.answer(cursor=cursor)
    assert not answers
    node.begin(2, [0])
    node.until(lambda: bool(answers))
    received = answers[0][0]
    assert isinstance(received, LogAnswer)
    assert (texts(received), received.is_more, received.is_over) == ([], True, False)


def test_cursors_are_encoded_and_decoded() -> None:
    for cursor in (Cursor(0, 0), Cursor(3, 17, (1, 0, 255)), Cursor(0, 2, (0, 0, 0, 9))):
        assert Cursor.decode(cursor.encode()) == cursor
    assert len(Cursor(1, 99, (1 << 40,) * 256).encode()) < 3500  # the maximum of an unauthenticated peer's frame


def test_rank_sets_are_parsed() -> None:
    some = RankSet("0,3-5, 7")
    assert [rank for rank in range(10) if rank in some] == [0, 3, 4, 5, 7]
    assert some.overlaps(1, 3)
    assert not some.overlaps(1, 2)
    assert not some.overlaps(8, 100)
    assert 12345 in RankSet("")
    for text in ("a", "1,", "-1", "3-1", "1-2-3", "²", "9" * 30):
        with pytest.raises(InvalidRequest):
            RankSet(text)
