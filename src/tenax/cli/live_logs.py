"""Log lines of a running job, fetched from its nodes and merged by time.

All requests use one connection to the coordinator, which forwards them. ``--follow`` does not poll: it keeps one
waiting request at every node (``LogsRequest.wait_s``), and one at the coordinator for nodes that come and go.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from heapq import merge
from itertools import islice
from typing import Any

import msgspec
from msgspec.structs import replace

from tenax._core.link import wire
from tenax._core.requests import AnyRequest, LogsRequest, StatusRequest
from tenax._engines.tcp.operator import ConnectionLost
from tenax._node.log_queries import START, RankSet
from tenax._view.log_lines import LogAnswer, LogLine
from tenax._view.status import NodeStatus, RunStatus
from tenax.cli.command import NoSuchJob
from tenax.cli.job import Job, decode
from tenax.cli.logs import Page
from tenax.cli.status import outcome_message

_TIMEOUT_S = 15.0  # for an answer, beyond the time it may wait for lines
_WAIT_S = 20.0  # how long a node may wait for the next line before it answers
_MERGE_S = 0.1  # answers that arrive within this time are merged
_DRAIN_S = 5.0  # after the end of the run, for lines still in transit
_RETRY_S = 1.0  # after a failed request: there is no event for a node becoming reachable
_NEVER = float("inf")
_MAX_FOLLOWED = 512  # nodes
_MAX_REQUESTS = 64  # in flight
_AT_ITS_HOST = "its log files are on that host ('tenax logs FOLDER' shows them)"


class Requests:
    """Requests in flight over one connection. Answers arrive in any order."""

    def __init__(self, job: Job) -> None:
        self._line = job.line
        self._keys: dict[int, Any] = {}

    def send(self, key: Any, request: AnyRequest) -> None:
        """Send a request. ``key`` identifies its answer."""
        self._keys[self._line.send(request)] = key

    @property
    def in_flight(self) -> int:
        return len(self._keys)

    def receive(self, until: float) -> tuple[Any, msgspec.Raw, str] | None:
        """Return key, value and error of the next answer; None if none arrives in time. Raises ``ConnectionLost``."""
        while True:
            try:
                frame = self._line.receive(until)
            except ConnectionLost as error:
                if isinstance(error.__cause__, TimeoutError):
                    return None
                raise
            if isinstance(frame, wire.Answer) and frame.number in self._keys:
                return self._keys.pop(frame.number), frame.value, frame.error


def recent(job: Job, choice: LogsRequest, page: Page) -> None:
    status = job.ask(StatusRequest(), RunStatus)
    nodes = _nodes(status, choice)
    if choice.generation > status.generation:
        raise NoSuchJob(f"no generation {choice.generation} yet; the run is in generation {status.generation}")
    if choice.ranks and choice.generation in (0, status.generation) and _are_ranks_known(status):
        if not RankSet(choice.ranks).overlaps(0, status.world_size):
            its = f"ranks 0 to {status.world_size - 1}" if status.world_size > 1 else "rank 0 only"
            raise NoSuchJob(f"generation {status.generation} has no rank {choice.ranks}; it has {its}")
        if gone := _ranks_of_lost_nodes(status, choice):
            text = f"the node of {gone} in generation {status.generation} has left the run; {_AT_ITS_HOST}"
            if not nodes:
                raise NoSuchJob(text)
            page.note(text)
    elif choice.ranks:
        page.if_nothing = f"no such lines; if the node of rank {choice.ranks} has left the run, {_AT_ITS_HOST}"
    requests = Requests(job)
    if choice.last >= 0:
        _show_last(requests, nodes, replace(choice, unfinished=True), page)
        return
    lines = _merged([_all_lines(requests, node, choice, page) for node in nodes])
    while not page.is_closed and (batch := list(islice(lines, 1000))):
        page.show(batch)


class _Followed(msgspec.Struct):
    node: NodeStatus
    cursor: str = START
    is_asked: bool = False  # a request is in flight
    is_behind: bool = False  # it has more lines than the last answer had
    is_over: bool = False  # without further lines
    error: str = ""  # of the last request; empty: it was answered
    reported: str = ""  # the last error that was printed
    again_at: float = 0.0  # when to ask again after an error


class Follower:
    """Shows the lines that exist now, then new ones until the run ends."""

    def __init__(self, job: Job, choice: LogsRequest, page: Page) -> None:
        self._requests = Requests(job)
        self._choice = choice
        self._page = page
        self._status = job.ask(StatusRequest(), RunStatus)
        self._ask_status_at = 0.0  # _NEVER while a request is in flight
        self._known: dict[str, _Followed] = {}  # by node id, including nodes that have left

    def run(self) -> None:
        choice, page = self._choice, self._page
        nodes = _nodes(self._status, choice)
        if choice.last >= 0:
            answers = _show_last(self._requests, nodes, choice, page)
            for each in self._followed:
                if (answer := answers.get(each.node.node_id)) is not None:
                    self._note_end(each, answer)
        try:
            while not self._is_over and not page.is_closed:
                if time.monotonic() >= self._ask_status_at:
                    self._ask_status_at = _NEVER
                    self._requests.send(None, StatusRequest(self._status.mark, _WAIT_S))
                self._ask_nodes()
                self._receive_batch(time.monotonic() + _WAIT_S + _TIMEOUT_S)
        except ConnectionLost:
            page.note("connection closed: the run has ended, or the node that served this command has left it")
            return
        if self._status.phase != "over":
            return
        self._receive_rest()
        if not page.is_closed:
            if any(each.is_behind and not each.is_over for each in self._known.values()):
                page.note("the run ended before all lines were shown; the rest is in its log files, if it wrote any")
            page.note(outcome_message(self._status))

    @property
    def _followed(self) -> list[_Followed]:
        """The nodes of the run that may have the chosen lines."""
        nodes = _nodes(self._status, self._choice)
        return [self._known.setdefault(node.node_id, _Followed(node)) for node in nodes]

    @property
    def _is_over(self) -> bool:
        if self._status.phase == "over":
            return True
        has_ended = any(each.is_over for each in self._known.values())
        return self._choice.generation > 0 and has_ended and all(each.is_over for each in self._followed)

    def _ask_nodes(self) -> None:
        followed = self._followed
        if len(followed) > _MAX_FOLLOWED:
            limit = f"(maximum {_MAX_FOLLOWED}); select ranks with --rank"
            raise NoSuchJob(f"cannot follow {len(followed)} nodes at once {limit}")
        now = time.monotonic()
        for each in followed:
            if not each.is_asked and not each.is_over and now >= each.again_at:
                each.is_asked = True
                request = replace(self._choice, node=each.node.node_id, cursor=each.cursor, wait_s=_WAIT_S)
                self._requests.send(each, request)

    def _receive_batch(self, until: float) -> None:
        """Wait for an answer and those that follow closely, and show their lines in order, even if the connection is
        lost meanwhile."""
        found: list[tuple[LogLine, ...]] = []
        again_at = [each.again_at for each in self._known.values() if each.error and not each.is_asked]
        until = min(until, self._ask_status_at, *again_at)
        try:
            while (received := self._requests.receive(until)) is not None:
                each, value, error = received
                if each is None:
                    self._update_status(value, error)
                    break
                each.is_asked = False
                if error:  # reported once the next status shows whether the node has left
                    each.error, each.again_at = error, time.monotonic() + _RETRY_S
                    break
                each.error = each.reported = ""
                answer = decode(value, LogAnswer)
                self._note_end(each, answer)
                self._page.leave_out(answer.left_out)
                if not answer.lines:
                    break
                found.append(answer.lines)
                until = min(until, time.monotonic() + _MERGE_S)
        finally:
            self._page.show(_merged(found))
            self._page.note_left_out()

    def _note_end(self, each: _Followed, answer: LogAnswer) -> None:
        """Store where the next answer starts, or that there will be none."""
        each.cursor, each.is_behind = answer.cursor, answer.is_more
        chosen = self._choice.generation
        # The node was not in the chosen generation, and the run is past it.
        is_too_late = answer.generation < chosen < self._status.generation and not answer.is_more
        each.is_over = each.is_over or answer.is_over or is_too_late

    def _update_status(self, value: msgspec.Raw, error: str) -> None:
        if error:  # the agent runs, but has lost its coordinator
            self._ask_status_at = time.monotonic() + _RETRY_S
            return
        self._ask_status_at = 0.0
        self._status = decode(value, RunStatus)
        if self._status.phase == "over":
            return
        present = {node.node_id for node in self._status.nodes}
        for node_id, each in self._known.items():  # report each error once
            if each.error and node_id not in present:
                self._page.note(f"{each.node.name} has left the run")
                each.error = each.reported = ""
            elif each.error != each.reported:
                self._page.note(f"{each.node.name}: {each.error}")
                each.reported = each.error

    def _receive_rest(self) -> None:
        """After the end of the run, show the lines that nodes send before they exit."""
        until = time.monotonic() + _DRAIN_S
        self._ask_status_at = _NEVER
        with suppress(ConnectionLost):
            while not self._page.is_closed and time.monotonic() < until:
                asked = [each for each in self._known.values() if each.is_asked]
                if all(each.is_over or each.error for each in (*self._followed, *asked)):
                    return
                with suppress(ConnectionLost):  # answers sent before the connection was closed can still be received
                    self._ask_nodes()
                self._receive_batch(until)


def _nodes(status: RunStatus, choice: LogsRequest) -> list[NodeStatus]:
    """Return the nodes that may have the chosen lines. Only the last generation's ranks are known."""
    if not choice.ranks or choice.generation not in (0, status.generation) or not _are_ranks_known(status):
        return list(status.nodes)
    ranks = RankSet(choice.ranks)
    return [node for node in status.nodes if node.first_rank >= 0 and ranks.overlaps(node.first_rank, node.slots)]


def _are_ranks_known(status: RunStatus) -> bool:
    """Return False between two generations, when no node has ranks."""
    return any(node.first_rank >= 0 for node in status.nodes)


def _ranks_of_lost_nodes(status: RunStatus, choice: LogsRequest) -> str:
    """Return the chosen ranks of this generation whose node has left the run."""
    ranks = RankSet(choice.ranks)
    gaps: list[tuple[int, int]] = []
    first = 0
    present = sorted((node.first_rank, node.slots) for node in status.nodes if node.first_rank >= 0)
    for start, slots in [*present, (status.world_size, 0)]:
        if first < start and ranks.overlaps(first, start - first):
            gaps.append((first, start - 1))
        first = max(first, start + slots)
    return " and ".join(f"ranks {low} to {high}" if low < high else f"rank {low}" for low, high in gaps)


def _ask_all(requests: Requests, nodes: list[NodeStatus], request: LogsRequest, page: Page) -> dict[str, LogAnswer]:
    """Send a request to all nodes and return the answers by node id. Errors are printed as notes."""
    answers: dict[str, LogAnswer] = {}
    left = list(nodes)
    while left or requests.in_flight:
        while left and requests.in_flight < _MAX_REQUESTS:
            node = left.pop(0)
            requests.send(node, replace(request, node=node.node_id))
        received = requests.receive(time.monotonic() + _TIMEOUT_S)
        if received is None:
            page.note(f"{requests.in_flight + len(left)} nodes did not answer in time")
            break
        node, value, error = received
        if error:
            page.note(f"{node.name}: {error}")
        else:
            answers[node.node_id] = decode(value, LogAnswer)
            page.leave_out(answers[node.node_id].left_out)
    return answers


def _show_last(requests: Requests, nodes: list[NodeStatus], choice: LogsRequest, page: Page) -> dict[str, LogAnswer]:
    """Show the last lines of all nodes together, and return the answers by node id."""
    answers = _ask_all(requests, nodes, choice, page)
    lines = list(_merged([answer.lines for answer in answers.values()]))
    page.show(lines[max(0, len(lines) - choice.last) :])
    return answers


def _all_lines(requests: Requests, node: NodeStatus, choice: LogsRequest, page: Page) -> Iterator[LogLine]:
    """Yield all lines of one node, oldest first, fetching them as needed."""
    cursor, is_more = START, True
    while is_more:
        request = replace(choice, cursor=cursor, unfinished=True)
        answer = _ask_all(requests, [node], request, page).get(node.node_id)
        if answer is None:
            return
        yield from answer.lines
        cursor, is_more = answer.cursor, answer.is_more


def _merged(parts: Iterable[Iterable[LogLine]]) -> Iterator[LogLine]:
    return merge(*parts, key=lambda line: (line.generation, line.at))
