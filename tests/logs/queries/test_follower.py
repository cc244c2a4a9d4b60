"""Followers of lines, with a scripted run: temporary errors do not end them, and the end of the run does."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from kit.jobs import TIMEOUT_S
from tenax._core.ledger import Goodput
from tenax._core.link import wire
from tenax._core.requests import AnyRequest, LogsRequest, StatusRequest
from tenax._engines.tcp.operator import connect_to_agent
from tenax._view.log_lines import LogAnswer, LogLine
from tenax._view.status import NodeStatus, RunStatus
from tenax.cli.job import Job
from tenax.cli.live_logs import Follower
from tenax.cli.logs import Page

Answer = tuple[object, str] | None  # a value, or an error; None: not yet
CLOSE: Answer = (None, "nothing more")


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
    found = tuple(LogLine(1.0, 0, 0, "stdout", 1, text) for text in texts)
    return LogAnswer(found, cursor, generation, is_over=is_over)


class ScriptedRun:
    """A control socket: ``answer`` is called for each request in turn, and again for those without an answer."""

    def __init__(self, path: Path, answer: Callable[[AnyRequest], Answer]) -> None:
        self._answer = answer
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._listener.settimeout(TIMEOUT_S)
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        client, _ = self._listener.accept()
        reader = wire.FrameReader()
        asked: list[wire.Ask] = []
        with client:
            client.settimeout(TIMEOUT_S)
            while data := client.recv(1 << 16):
                frames = map(wire.decode_from_agent, reader.feed(data))
                asked += [frame for frame in frames if isinstance(frame, wire.Ask)]
                while answered := [
                    (each, answer) for each in asked if (answer := self._answer(each.request)) is not None
                ]:
                    for each, answer in answered:
                        if answer is CLOSE:
                            return
                        asked.remove(each)
                        client.sendall(wire.encode_answer(each.number, *answer))

    def close(self) -> None:
        self._thread.join(TIMEOUT_S)
        self._listener.close()


Follow = Callable[[LogsRequest, Callable[[AnyRequest], Answer]], None]


@pytest.fixture
def follow_run(tmp_path: Path) -> Iterator[Follow]:
    """Follow a run with these answers until the follower returns."""
    runs: list[ScriptedRun] = []

    def follow_until_end(choice: LogsRequest, answer: Callable[[AnyRequest], Answer]) -> None:
        runs.append(ScriptedRun(tmp_path / "control_socket", answer))
        with Job(connect_to_agent(str(tmp_path / "control_socket"))) as job:
            Follower(job, choice, Page()).run()

    yield follow_until_end
    for run in runs:
        run.close()


def test_a_follower_retries_while_the_coordinator_moves(follow_run: Follow, capsys: pytest.CaptureFixture[str]) -> None:
    """Lines come meanwhile."""
    steps: list[str] = []

    def answer(request: AnyRequest) -> Answer:
        match request:
            case StatusRequest(mark="") if not steps:
                return status("1", "a"), ""
            case StatusRequest() if "declined" not in steps:
                steps.append("declined")
                return None, "the coordinator is no longer on this node; try again"
            case StatusRequest():
                return (status("2", "a", phase="over"), "") if "second" in steps else None
            case LogsRequest(cursor=""):
                return lines("c1", "first"), ""
            case LogsRequest(cursor="c1") if "declined" in steps:
                steps.append("second")
                return lines("c2", "second"), ""
            case LogsRequest(cursor="c2"):
                return lines("c2", is_over=True), ""
        return None

    follow_run(LogsRequest(""), answer)
    shown = capsys.readouterr()
    assert shown.out == "rank 0 | first\nrank 0 | second\n"
    assert shown.err == "tenax logs: the run 'seen' failed\n"


def test_a_follower_retries_after_a_temporary_error_of_a_node(
    follow_run: Follow, capsys: pytest.CaptureFixture[str]
) -> None:
    """The status of the run stays the same."""
    steps: list[str] = []

    def answer(request: AnyRequest) -> Answer:
        match request:
            case StatusRequest(mark=""):
                return status("1", "a"), ""
            case StatusRequest():
                return (status("2", "a", phase="over"), "") if "second" in steps else None
            case LogsRequest(cursor=""):
                return lines("c1", "first"), ""
            case LogsRequest(cursor="c1") if "error" not in steps:
                steps.append("error")
                return None, "that node is not connected"
            case LogsRequest(cursor="c1"):
                steps.append("second")
                return lines("c2", "second"), ""
            case LogsRequest(cursor="c2"):
                return lines("c2", is_over=True), ""
        return None

    follow_run(LogsRequest(""), answer)
    shown = capsys.readouterr()
    assert shown.out == "rank 0 | first\nrank 0 | second\n"
    assert shown.err == "tenax logs: the run 'seen' failed\n"


def test_a_generation_is_over_when_all_its_nodes_are_done(
    follow_run: Follow, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not with the first of them, although no other request is waiting at that moment."""

    def answer(request: AnyRequest) -> Answer:
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

    follow_run(LogsRequest("", generation=1), answer)
    shown = capsys.readouterr()
    assert sorted(shown.out.splitlines()) == ["rank 0 | more of b", "rank 0 | of a", "rank 0 | of b"]
    assert shown.err == ""


def test_a_follower_does_not_wait_for_a_node_outside_the_generation(
    follow_run: Follow, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once the next generation has begun."""
    steps: list[str] = []

    def answer(request: AnyRequest) -> Answer:
        match request:
            case StatusRequest(mark=""):
                return status("1", "a", "spare"), ""
            case StatusRequest(mark="1") if "a" in steps:
                steps.append("the next")
                return status("2", "a", "spare", generation=2), ""
            case LogsRequest(cursor=""):
                return lines("c0", generation=0 if request.node == "spare" else 1), ""
            case LogsRequest("a", cursor="c0"):
                steps.append("a")
                return lines("c1", "of a", is_over=True), ""
            case LogsRequest("spare") if "the next" in steps:
                return lines("c0", generation=0), ""
        return None

    follow_run(LogsRequest("", generation=1), answer)
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("rank 0 | of a\n", "")


def test_lines_that_arrive_with_the_end_of_the_connection_are_shown(
    follow_run: Follow, capsys: pytest.CaptureFixture[str]
) -> None:
    has_ended = False

    def answer(request: AnyRequest) -> Answer:
        nonlocal has_ended
        match request:
            case StatusRequest(mark=""):
                return status("1", "a"), ""
            case LogsRequest(cursor=""):
                return lines("c1", "first"), ""
            case LogsRequest(cursor="c1"):
                has_ended = True
                return lines("c2", "last line"), ""
            case StatusRequest() if has_ended:
                return CLOSE
        return None

    follow_run(LogsRequest(""), answer)
    shown = capsys.readouterr()
    assert shown.out == "rank 0 | first\nrank 0 | last line\n"
    assert "connection closed: the run has ended" in shown.err


def test_scripted_answers_can_be_decoded() -> None:
    """The statuses and lines of these tests have the format of the wire."""
    for value in (status("1", "a"), lines("c", "text")):
        assert msgspec.json.decode(msgspec.json.encode(value), type=type(value)) == value
