"""Live lines: what nodes of a running job answer to ``tenax logs``, merged.

Everything goes over one line to the coordinator, which passes it on. Nothing is asked again and again: who follows
waits at every node for the next line (``LogsRequest.wait_s``), and at the coordinator for nodes that come and go.
"""

from __future__ import annotations

import time
from contextlib import suppress
from heapq import merge

import msgspec

from tenax._core.bounds import DECODE_ERRORS
from tenax._core.requests import LogsRequest, StatusRequest
from tenax._engines.tcp import wire
from tenax._node.log_queries import START, RankSet
from tenax._view.log_lines import LogAnswer
from tenax._view.status import RunStatus
from tenax.cli.job import LineLost, NoSuchJob

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Any

    from tenax._core.requests import AnyRequest
    from tenax._view.log_lines import LogLine
    from tenax._view.status import NodeStatus
    from tenax.cli.job import Job
    from tenax.cli.logs import Choice, Page

_PATIENCE_S = 15.0  # for an answer that nobody makes wait
_WAIT_S = 20.0  # how long an answer may wait for the next line
_TOGETHER_S = 0.1  # what nodes answer within that time is merged
_LAST_WORDS_S = 5.0  # after the end: for what is still on its way
_AGAIN_S = 1.0  # after something could not be asked: nobody announces that it can be again
_NEVER = float("inf")
_MAX_FOLLOWED = 512  # nodes
_MAX_ASKED = 64  # at once


_AT_ITS_HOST = "what it kept in files is in its log folder on that host ('tenax logs FOLDER' shows it there)"


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
                frame = self._line.receive(until)
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
    if choice.ranks and choice.generation in (0, status.generation) and _are_ranks_known(status):
        if not RankSet(choice.ranks).meets(0, status.world_size):
            its = f"ranks 0 to {status.world_size - 1}" if status.world_size > 1 else "rank 0 only"
            raise NoSuchJob(f"generation {status.generation} has no rank {choice.ranks}; it has {its}")
        if gone := _ranks_that_are_gone(status, choice):
            told = f"the node of {gone} in generation {status.generation} is gone from the run; {_AT_ITS_HOST}"
            if not nodes:
                raise NoSuchJob(told)
            page.note(told)
    elif choice.ranks:
        page.if_nothing = f"there are no such lines; if the node of rank {choice.ranks} is gone, {_AT_ITS_HOST}"
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
        self._ask_status_at = 0.0  # never while it is asked
        self._cursors: dict[str, str] = {}
        self._asked: set[str] = set()
        self._behind: set[str] = set()  # who has said that there is more
        self._troubles: dict[str, _Trouble] = {}
        self._over: set[str] = set()  # of which nothing more will come

    def run(self) -> None:
        choice, page = self._choice, self._page
        nodes = _nodes(self._status, choice)
        if choice.last >= 0:
            answers = _ask_all(self._asker, nodes, _request(choice), page)
            lines = list(_merged([answer.lines for answer in answers.values()]))
            page.show(lines[max(0, len(lines) - choice.last) :])
            for node_id, answer in answers.items():
                self._note_end(node_id, answer)
        try:
            while not self._is_over and not page.is_closed:
                self._ask_status()
                self._ask_nodes()
                self._take_together(time.monotonic() + _WAIT_S + _PATIENCE_S)
        except LineLost:
            page.note("the line to the run was closed: it is over, or the node that was asked has left it")
            return
        if self._status.phase == "over":
            self._take_last_words()
        if self._status.phase == "over" and not page.is_closed:
            from tenax.cli.status import end_in_words

            if self._behind - self._over:
                page.note("the run ended before all of its lines were shown; what was kept in files is there")
            page.note(end_in_words(self._status))

    @property
    def _is_over(self) -> bool:
        if self._status.phase == "over":
            return True
        return self._choice.generation > 0 and bool(self._over) and not self._unfinished

    @property
    def _unfinished(self) -> set[str]:
        """Who may have more to say."""
        return {node.node_id for node in _nodes(self._status, self._choice)} - self._over

    def _ask_status(self) -> None:
        if time.monotonic() >= self._ask_status_at:
            self._ask_status_at = _NEVER
            self._asker.ask(None, StatusRequest(self._status.mark, _WAIT_S))

    def _ask_nodes(self) -> None:
        nodes = _nodes(self._status, self._choice)
        if len(nodes) > _MAX_FOLLOWED:
            raise NoSuchJob(f"{len(nodes)} nodes cannot be followed at once; choose ranks with --rank")
        now = time.monotonic()
        for node in nodes:
            trouble = self._troubles.get(node.node_id)
            if node.node_id not in self._asked | self._over and (trouble is None or now >= trouble.again_at):
                self._asked.add(node.node_id)
                cursor = self._cursors.get(node.node_id, START)
                self._asker.ask(node, _request(self._choice, node, cursor=cursor, wait_s=_WAIT_S))

    def _take_together(self, until: float) -> None:
        """Wait for an answer, and for those that come with it; show them in order. What was heard is shown also if
        the line is lost with it."""
        found: list[tuple[LogLine, ...]] = []
        again_at = [each.again_at for node_id, each in self._troubles.items() if node_id not in self._asked]
        until = min(until, self._ask_status_at, *again_at)
        try:
            while (heard := self._asker.hear(until)) is not None:
                node, value, error = heard
                if node is None:
                    self._take_status(value, error)
                    break
                self._asked.discard(node.node_id)
                if error:
                    self._have_trouble(node, error)
                    break
                self._troubles.pop(node.node_id, None)
                answer = _decoded(value, LogAnswer)
                self._note_end(node.node_id, answer)
                self._page.leave_out(answer.left_out)
                if not answer.lines:
                    break
                found.append(answer.lines)
                until = min(until, time.monotonic() + _TOGETHER_S)
        finally:
            self._page.show(_merged(found))
            self._page.tell_left_out()

    def _note_end(self, node_id: str, answer: LogAnswer) -> None:
        """Where the next answer begins, if there will be one."""
        self._cursors[node_id] = answer.cursor
        (self._behind.add if answer.is_more else self._behind.discard)(node_id)
        wanted = self._choice.generation
        # A node that was not in it, and the run is beyond it.
        is_too_late = answer.generation < wanted < self._status.generation and not answer.is_more
        if answer.is_over or is_too_late:
            self._over.add(node_id)

    def _take_status(self, value: msgspec.Raw, error: str) -> None:
        if error:  # whoever was asked lives, and looks for the coordinator
            self._ask_status_at = time.monotonic() + _AGAIN_S
            return
        self._ask_status_at = 0.0
        status = _decoded(value, RunStatus)
        if status.phase != "over":
            self._tell_troubles({node.node_id for node in status.nodes})
        self._status = status

    def _have_trouble(self, node: NodeStatus, error: str) -> None:
        """It is asked again a little later, and spoken of when the next status tells whether it has left."""
        before = self._troubles.get(node.node_id)
        told = before.told if before is not None else ""
        self._troubles[node.node_id] = _Trouble(node, error, told, time.monotonic() + _AGAIN_S)

    def _tell_troubles(self, present: set[str]) -> None:
        """Who could not be asked, once."""
        for node_id, trouble in list(self._troubles.items()):
            if node_id not in present:
                self._page.note(f"{trouble.node.name} has left the run")
                del self._troubles[node_id]
            elif trouble.told != trouble.error:
                self._page.note(f"{trouble.node.name}: {trouble.error}")
                trouble.told = trouble.error

    def _take_last_words(self) -> None:
        """The run is over: what nodes still say before they go."""
        until = time.monotonic() + _LAST_WORDS_S
        self._ask_status_at = _NEVER
        try:
            while (self._unfinished | self._asked) - self._over - self._troubles.keys():
                if self._page.is_closed or time.monotonic() >= until:
                    return
                with suppress(LineLost):  # what was said before it was closed can still be heard
                    self._ask_nodes()
                self._take_together(until)
        except LineLost:
            return


class _Trouble:
    """A node that could not be asked."""

    def __init__(self, node: NodeStatus, error: str, told: str, again_at: float) -> None:
        self.node = node
        self.error = error
        self.told = told  # what was said of it
        self.again_at = again_at


def _status(job: Job) -> RunStatus:
    return job.ask(StatusRequest(), RunStatus)


def _nodes(status: RunStatus, choice: Choice) -> list[NodeStatus]:
    """Who may have such lines. In the last generation it is known who has which rank."""
    if not choice.ranks or choice.generation not in (0, status.generation) or not _are_ranks_known(status):
        return list(status.nodes)
    ranks = RankSet(choice.ranks)
    return [node for node in status.nodes if node.first_rank >= 0 and ranks.meets(node.first_rank, node.slots)]


def _are_ranks_known(status: RunStatus) -> bool:
    """Between two generations nobody has one."""
    return any(node.first_rank >= 0 for node in status.nodes)


def _ranks_that_are_gone(status: RunStatus, choice: Choice) -> str:
    """Those of this generation whose node is not in the run any more, if some of them were chosen."""
    ranks = RankSet(choice.ranks)
    gaps: list[tuple[int, int]] = []
    first = 0
    present = sorted((node.first_rank, node.slots) for node in status.nodes if node.first_rank >= 0)
    for start, slots in [*present, (status.world_size, 0)]:
        if first < start and ranks.meets(first, start - first):
            gaps.append((first, start - 1))
        first = max(first, start + slots)
    return " and ".join(f"ranks {low} to {high}" if low < high else f"rank {low}" for low, high in gaps)


def _request(choice: Choice, node: NodeStatus | None = None, **more: Any) -> LogsRequest:
    return LogsRequest(
        node.node_id if node is not None else "",
        generation=choice.generation,
        stream=choice.stream,
        last=choice.last,
        ranks=choice.ranks,
        containing=choice.containing,
        since=choice.since,
        **more,
    )


def _ask_all(asker: Asker, nodes: list[NodeStatus], request: LogsRequest, page: Page) -> dict[str, LogAnswer]:
    """By node, what those answered that did."""
    answers: dict[str, LogAnswer] = {}
    left = list(nodes)
    while left or asker.asked:
        while left and asker.asked < _MAX_ASKED:
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
    except DECODE_ERRORS as error:
        raise LineLost(f"its answer is not ours ({error}); is that another version of tenax?") from error
