"""Who follows lines, and a run that answers as the test says: what is passing does not end it, and its end does."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from kit.jobs import PATIENCE_S
from tenax._core.ledger import Goodput
from tenax._core.requests import AnyRequest, LogsRequest, StatusRequest
from tenax._engines.tcp import wire
from tenax._engines.tcp.operator import connect_to_agent
from tenax._view.log_lines import LogAnswer, LogLine
from tenax._view.status import NodeStatus, RunStatus
from tenax.cli.job import Job
from tenax.cli.live_logs import follow
from tenax.cli.logs import Choice, Page

Told = tuple[object, str] | None  # a value, or why there is none; None: not yet
HANG_UP: Told = (None, "nothing more")


def status(mark: str, *nodes: str, phase: str = "running", generation: int = 1) -> RunStatus:
    return RunStatus(
        run_id="seen",
        now=0.0,
        phase=phase,
        doing="",
        generation=generation,
        world_size=len(nodes),
        min_nodes=1,
        max_nodes=len(nodes),
        restarts_used=0,
        max_restarts=0,
        membership_changes=0,
        drains=0,
        requests=0,
        nodes=tuple(
            NodeStatus(node, f"name of {node}", "host", "working", 0.0, rank=rank, first_rank=rank)
            for rank, node in enumerate(nodes)
        ),
        generations=(),
        generations_forgotten=0,
        failures=(),
        earlier=(),
        events=(),
        goodput=Goodput(),
        outcome="failed" if phase == "over" else "",
        mark=mark,
    )


def lines(cursor: str, *texts: str, is_over: bool = False, generation: int = 1) -> LogAnswer:
    told = tuple(LogLine(1.0, 0, 0, "stdout", 1, text) for text in texts)
    return LogAnswer(told, cursor, generation, is_over=is_over)


class ScriptedRun:
    """Behind a door: ``answer`` is called for each request in turn, and again for those that it has put off."""

    def __init__(self, path: Path, answer: Callable[[AnyRequest], Told]) -> None:
        self._answer = answer
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._listener.settimeout(PATIENCE_S)
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        visitor, _ = self._listener.accept()
        reader = wire.FrameReader()
        asked: list[wire.Ask] = []
        with visitor:
            visitor.settimeout(PATIENCE_S)
            while data := visitor.recv(1 << 16):
                frames = map(wire.decode_from_agent, reader.feed(data))
                asked += [frame for frame in frames if isinstance(frame, wire.Ask)]
                while answered := [(each, told) for each in asked if (told := self._answer(each.request)) is not None]:
                    for each, told in answered:
                        if told is HANG_UP:
                            return
                        asked.remove(each)
                        visitor.sendall(wire.encode_answer(each.number, *told))

    def close(self) -> None:
        self._thread.join(PATIENCE_S)
        self._listener.close()


Follow = Callable[[Choice, Callable[[AnyRequest], Told]], None]


@pytest.fixture
def follow_run(tmp_path: Path) -> Iterator[Follow]:
    """Follow a run that answers so, until the follower ends by itself."""
    runs: list[ScriptedRun] = []

    def follow_it(choice: Choice, answer: Callable[[AnyRequest], Told]) -> None:
        runs.append(ScriptedRun(tmp_path / "door", answer))
        with Job("seen", connect_to_agent(str(tmp_path / "door"))) as job:
            follow(job, choice, Page())

    yield follow_it
    for run in runs:
        run.close()


def test_a_coordinator_that_is_elsewhere_now(follow_run: Follow, capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever was asked does not know it just now: it is asked again, and lines come meanwhile."""
    told: list[str] = []

    def answer(request: AnyRequest) -> Told:
        match request:
            case StatusRequest(mark="") if not told:
                return status("1", "a"), ""
            case StatusRequest() if "declined" not in told:
                told.append("declined")
                return None, "the coordinator has just gone from here; ask again"
            case StatusRequest():
                return (status("2", "a", phase="over"), "") if "second" in told else None
            case LogsRequest(cursor=""):
                return lines("c1", "first"), ""
            case LogsRequest(cursor="c1") if "declined" in told:
                told.append("second")
                return lines("c2", "second"), ""
            case LogsRequest(cursor="c2"):
                return lines("c2", is_over=True), ""
        return None

    follow_run(Choice(), answer)
    shown = capsys.readouterr()
    assert shown.out == "rank 0 | first\nrank 0 | second\n"
    assert shown.err == "tenax logs: the run 'seen' failed\n"


def test_an_error_of_a_node_that_passes(follow_run: Follow, capsys: pytest.CaptureFixture[str]) -> None:
    """The status of the run stays the same, and the node is asked again."""
    told: list[str] = []

    def answer(request: AnyRequest) -> Told:
        match request:
            case StatusRequest(mark=""):
                return status("1", "a"), ""
            case StatusRequest():
                return (status("2", "a", phase="over"), "") if "second" in told else None
            case LogsRequest(cursor=""):
                return lines("c1", "first"), ""
            case LogsRequest(cursor="c1") if "error" not in told:
                told.append("error")
                return None, "that node is not linked just now"
            case LogsRequest(cursor="c1"):
                told.append("second")
                return lines("c2", "second"), ""
            case LogsRequest(cursor="c2"):
                return lines("c2", is_over=True), ""
        return None

    follow_run(Choice(), answer)
    shown = capsys.readouterr()
    assert shown.out == "rank 0 | first\nrank 0 | second\n"
    assert shown.err == "tenax logs: the run 'seen' failed\n"


def test_one_generation_is_over_when_all_nodes_are_done_with_it(
    follow_run: Follow, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not with the first of them, although nobody is waited for in that moment."""

    def answer(request: AnyRequest) -> Told:
        match request:
            case StatusRequest(mark=""):
                return status("1", "a", "b"), ""
            case LogsRequest(cursor=""):
                return lines("c0"), ""
            case LogsRequest("a", cursor="c0"):
                return lines("c1", "of a", is_over=True), ""
            case LogsRequest("b", cursor="c0"):
                return lines("c1", "of b"), ""
            case LogsRequest("b", cursor="c1"):
                return lines("c2", "more of b", is_over=True), ""
        return None

    follow_run(Choice(generation=1), answer)
    shown = capsys.readouterr()
    assert sorted(shown.out.splitlines()) == ["rank 0 | more of b", "rank 0 | of a", "rank 0 | of b"]
    assert shown.err == ""


def test_a_node_that_was_not_in_a_generation_is_not_waited_for(
    follow_run: Follow, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once the run is beyond that generation."""
    told: list[str] = []

    def answer(request: AnyRequest) -> Told:
        match request:
            case StatusRequest(mark=""):
                return status("1", "a", "spare"), ""
            case StatusRequest(mark="1") if "a" in told:
                told.append("the next")
                return status("2", "a", "spare", generation=2), ""
            case LogsRequest(cursor=""):
                return lines("c0", generation=0 if request.node == "spare" else 1), ""
            case LogsRequest("a", cursor="c0"):
                told.append("a")
                return lines("c1", "of a", is_over=True), ""
            case LogsRequest("spare") if "the next" in told:
                return lines("c0", generation=0), ""
        return None

    follow_run(Choice(generation=1), answer)
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("rank 0 | of a\n", "")


def test_what_comes_with_the_end_of_the_line_is_shown(follow_run: Follow, capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever said it is gone in the same moment."""
    has_ended = False

    def answer(request: AnyRequest) -> Told:
        nonlocal has_ended
        match request:
            case StatusRequest(mark=""):
                return status("1", "a"), ""
            case LogsRequest(cursor=""):
                return lines("c1", "first"), ""
            case LogsRequest(cursor="c1"):
                has_ended = True
                return lines("c2", "last words"), ""
            case StatusRequest() if has_ended:
                return HANG_UP
        return None

    follow_run(Choice(), answer)
    shown = capsys.readouterr()
    assert shown.out == "rank 0 | first\nrank 0 | last words\n"
    assert "connection closed: the run has ended" in shown.err


def test_its_answers_are_as_they_travel() -> None:
    """This test's statuses and lines can be read by who asks."""
    for value in (status("1", "a"), lines("c", "text")):
        assert msgspec.json.decode(msgspec.json.encode(value), type=type(value)) == value
