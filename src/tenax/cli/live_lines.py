"""Live lines: what nodes of a running job answer to ``tenax logs``, merged.

Everything goes over one line to the coordinator, which passes it on. Nothing is asked again and again: who follows
waits at every node for the next line (``LogsWanted.wait_s``), and at the coordinator for nodes that come and go.
"""

from __future__ import annotations

import time
from heapq import merge

import msgspec

from tenax.cli.job import LineLost, NoSuchJob
from tenax.core.requests import LogsWanted, StatusWanted
from tenax.rendezvous.tcp import wire
from tenax.runtime.log_answers import START, RankSet
from tenax.view.log_lines import LogAnswer
from tenax.view.status import RunStatus

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Any

    from tenax.cli.job import Job
    from tenax.cli.logs import Choice, Page
    from tenax.core.requests import AnyRequest
    from tenax.view.log_lines import LogLine
    from tenax.view.status import NodeStatus

_PATIENCE_S = 15.0  # for an answer that nobody makes wait
_WAIT_S = 20.0  # how long an answer may wait for the next line
_TOGETHER_S = 0.1  # what nodes answer within that time is merged
_LAST_WORDS_S = 2.0  # after the end: for what is still on its way
_MOST_FOLLOWED = 512  # nodes
_MOST_ASKED = 64  # at once


class Asker:
    """Several requests at once over one line; answers come in any order."""

    def __init__(self, job: Job) -> None:
        self._line = job._line
        self._whose: dict[int, Any] = {}

    def ask(self, whose: Any, request: AnyRequest) -> None:
        self._whose[self._line.send(request)] = whose

    @property
    def asked(self) -> int:
        return len(self._whose)

    def hear(self, until: float) -> tuple[Any, msgspec.Raw, str] | None:
        """Whose answer comes next, and what it is, or why there is none; None: nothing until then. Raises LineLost."""
        while True:
            try:
                frame = self._line.hear(until)
            except LineLost as error:
                if isinstance(error.__cause__, TimeoutError):
                    return None
                raise
            if isinstance(frame, wire.Answer) and frame.number in self._whose:
                return self._whose.pop(frame.number), frame.value, frame.error


def recent(job: Job, choice: Choice, page: Page) -> None:
    """What there is now."""
    status = _status(job)
    nodes = _nodes(status, choice)
    if choice.generation > status.generation:
        raise NoSuchJob(f"there is no generation {choice.generation} yet; this run is at {status.generation}")
    if choice.ranks and not nodes and status.world_size:
        its = f"ranks 0 to {status.world_size - 1}" if status.world_size > 1 else "rank 0 only"
        raise NoSuchJob(f"generation {status.generation} has no rank {choice.ranks}; it has {its}")
    asker = Asker(job)
    if choice.last >= 0:
        answers = _ask_all(asker, nodes, _request(choice, unfinished=True), page)
        lines = list(_merged([answer.lines for answer in answers.values()]))
        page.show(lines[max(0, len(lines) - choice.last) :])
    else:
        _show_in_portions(_merged([_pages(asker, node, choice, page) for node in nodes]), page)


def follow(job: Job, choice: Choice, page: Page) -> None:
    """What there is now, and then all that comes, until the run is over."""
    Follower(job, choice, page).run()


class Follower:
    def __init__(self, job: Job, choice: Choice, page: Page) -> None:
        self._asker = Asker(job)
        self._choice = choice
        self._page = page
        self._status = _status(job)
        self._cursors: dict[str, str] = {}
        self._asked: set[str] = set()
        self._troubles: dict[str, tuple[NodeStatus, str]] = {}  # told with the next status: has it left?
        self._over: set[str] = set()  # of which nothing more will come

    def run(self) -> None:
        choice, page = self._choice, self._page
        nodes = _nodes(self._status, choice)
        if choice.last >= 0:
            answers = _ask_all(self._asker, nodes, _request(choice), page)
            lines = list(_merged([answer.lines for answer in answers.values()]))
            page.show(lines[max(0, len(lines) - choice.last) :])
            self._cursors = {node_id: answer.cursor for node_id, answer in answers.items()}
            self._over = {node_id for node_id, answer in answers.items() if answer.is_over}
        self._asker.ask(None, StatusWanted(self._status.mark, _WAIT_S))
        while not self._is_over and not page.is_closed:
            self._ask_nodes()
            try:
                self._take_together(time.monotonic() + _WAIT_S + _PATIENCE_S)
            except LineLost:
                page.note("the line to the run was closed: it is over, or the node that was asked has left it")
                return
        self._take_last_words()
        if self._status.phase == "over" and not page.is_closed:
            from tenax.cli.status import end_in_words

            page.note(end_in_words(self._status))

    @property
    def _is_over(self) -> bool:
        if self._status.phase == "over":
            return True
        return self._choice.generation > 0 and not self._asked - self._over and bool(self._over)

    def _ask_nodes(self) -> None:
        nodes = _nodes(self._status, self._choice)
        if len(nodes) > _MOST_FOLLOWED:
            raise NoSuchJob(f"{len(nodes)} nodes cannot be followed at once; choose ranks with --rank")
        for node in nodes:
            if node.node_id not in self._asked | self._over | self._troubles.keys():
                self._asked.add(node.node_id)
                cursor = self._cursors.get(node.node_id, START)
                self._asker.ask(node, _request(self._choice, node, cursor=cursor, wait_s=_WAIT_S))

    def _take_together(self, until: float) -> None:
        """Wait for an answer, and for those that come with it; show them in order."""
        found: list[tuple[LogLine, ...]] = []
        while (heard := self._asker.hear(until)) is not None:
            node, value, error = heard
            if node is None:
                self._take_status(value, error)
                break
            self._asked.discard(node.node_id)
            if error:
                self._troubles[node.node_id] = (node, error)
                break
            answer = _decoded(value, LogAnswer)
            self._cursors[node.node_id] = answer.cursor
            if answer.is_over:
                self._over.add(node.node_id)
            self._page.leave_out(answer.left_out)
            if answer.lines:
                found.append(answer.lines)
                until = min(until, time.monotonic() + _TOGETHER_S)
            else:
                break
        self._page.show(_merged(found))
        self._page.tell_left_out()

    def _take_status(self, value: msgspec.Raw, error: str) -> None:
        if error:
            raise LineLost(error)
        status = _decoded(value, RunStatus)
        self._tell_troubles({node.node_id for node in status.nodes})
        if status.mark != self._status.mark:
            self._troubles.clear()  # things have changed: they may answer now
        self._status = status
        if status.phase != "over":
            self._asker.ask(None, StatusWanted(status.mark, _WAIT_S))

    def _tell_troubles(self, present: set[str]) -> None:
        """Who could not be asked, once."""
        for node_id, (node, error) in self._troubles.items():
            if error:
                self._page.note(f"{node.name}: {error}" if node_id in present else f"{node.name} has left the run")
                self._troubles[node_id] = (node, "")

    def _take_last_words(self) -> None:
        """The run is over: what nodes still say before they go."""
        until = time.monotonic() + _LAST_WORDS_S
        try:
            while self._asked and not self._page.is_closed and time.monotonic() < until:
                self._take_together(until)
        except LineLost:
            return


def _status(job: Job) -> RunStatus:
    return job.ask(StatusWanted(), RunStatus)


def _nodes(status: RunStatus, choice: Choice) -> list[NodeStatus]:
    """Who may have such lines. In the last generation it is known who has which rank."""
    if not choice.ranks or choice.generation not in (0, status.generation):
        return list(status.nodes)
    ranks = RankSet(choice.ranks)
    return [node for node in status.nodes if node.first_rank >= 0 and ranks.meets(node.first_rank, node.slots)]


def _request(choice: Choice, node: NodeStatus | None = None, **more: Any) -> LogsWanted:
    return LogsWanted(
        node.node_id if node is not None else "",
        generation=choice.generation,
        stream=choice.stream,
        last=choice.last,
        ranks=choice.ranks,
        containing=choice.containing,
        since=choice.since,
        **more,
    )


def _ask_all(asker: Asker, nodes: list[NodeStatus], request: LogsWanted, page: Page) -> dict[str, LogAnswer]:
    """By node, what those answered that did."""
    answers: dict[str, LogAnswer] = {}
    left = list(nodes)
    while left or asker.asked:
        while left and asker.asked < _MOST_ASKED:
            node = left.pop(0)
            asker.ask(node, msgspec.structs.replace(request, node=node.node_id))
        heard = asker.hear(time.monotonic() + _PATIENCE_S)
        if heard is None:
            page.note(f"{asker.asked + len(left)} nodes did not answer in time")
            break
        node, value, error = heard
        if error:
            page.note(f"{node.name}: {error}")
        else:
            answers[node.node_id] = _decoded(value, LogAnswer)
            page.leave_out(answers[node.node_id].left_out)
    return answers


def _pages(asker: Asker, node: NodeStatus, choice: Choice, page: Page) -> Iterator[LogLine]:
    """All lines of one node, from the oldest on; fetched as they are needed."""
    cursor, is_more = START, True
    while is_more:
        request = _request(choice, node, cursor=cursor, unfinished=True)
        answer = _ask_all(asker, [node], request, page).get(node.node_id)
        if answer is None:
            return
        yield from answer.lines
        cursor, is_more = answer.cursor, answer.is_more


def _merged(parts: Iterable[Iterable[LogLine]]) -> Iterator[LogLine]:
    return merge(*parts, key=lambda line: (line.generation, line.at))


def _show_in_portions(lines: Iterator[LogLine], page: Page) -> None:
    from itertools import islice

    while not page.is_closed and (portion := list(islice(lines, 1000))):
        page.show(portion)


def _decoded(value: msgspec.Raw, kind: Any) -> Any:
    try:
        return msgspec.json.decode(value, type=kind)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise LineLost(f"its answer is not ours ({error}); is that another version of tenax?") from error
