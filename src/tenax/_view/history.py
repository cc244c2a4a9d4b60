"""The history of a run: what became of it, from its journals, when it is over or while it goes on. Pure.

A coordinator's journal holds the facts that its machine was told: they are told to a machine again, and what that
machine knows after each of them is written down here. So a page made of a journal cannot disagree with the page that
was served while the run went on. An agent's journal adds what only that node saw: its workers, from start to end.

Laws (tests cite the numbers):

H1  Whatever is missing (a journal without an end, steps that were not written, a coordinator that was elsewhere) is
    said in ``missing``; what is there is shown.
H2  Times are seconds since the epoch. Hosts agree on them as well as their clocks do, and no better.
H3  The spans of one node do not overlap, and neither do those of one worker, nor hangs.
H4  How a run ended is taken from wherever it is known. A verdict that all were told is the end of the run; one that a
    node came to by itself, because it left, only if nobody was left behind.
"""

from __future__ import annotations

import msgspec

from tenax._core.ledger import Goodput, Mean
from tenax._core.model import Outcome, Verdict
from tenax._view.exit_summary import how_it_ended
from tenax._view.goodput_text import duration_in_words
from tenax._view.status import FailureStatus, GenerationStatus, Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from tenax._core.messages import HangReport


_SLACK_S = 60.0  # by which the clocks of two hosts, and the beginnings of two journals, may differ


class Span(Value, frozen=True):
    """What a node did for a while: joined, waiting, spare, starting, working, stopping, draining, done."""

    what: str
    since: float
    until: float
    generation: int = 0


class WorkerSpan(Value, frozen=True):
    """The life of one worker process, as its agent saw it."""

    generation: int
    local_rank: int
    rank: int
    pid: int
    since: float
    until: float
    exit_code: int | None = None  # None: its end is not in the journal
    ended: str = ""  # succeeded, failed, stopped


class HangSpan(Value, frozen=True):
    """Nothing moved on any node, and that was reported and nothing else: the workers were left alone."""

    generation: int
    since: float
    until: float  # something moved again, or the generation ended
    who: str = ""  # was elsewhere than the others, and where

    @property
    def in_words(self) -> str:
        who = f" ({self.who})" if self.who else ""
        return f"nothing moved for {duration_in_words(self.until - self.since)} in generation {self.generation}{who}"


def who_hung(report: HangReport) -> str:
    """Those at the rarest place, and where that is."""
    from tenax._core.hang_report import describe_location, format_ranks

    if not report.places:
        return ""
    odd = report.places[0]
    unsure = "" if report.is_odd or len(report.places) == 1 else "no rank stands out; "
    return f"{unsure}{format_ranks(odd.ranks)}{f' on {odd.host}' if odd.host else ''}: {describe_location(odd)}"


def one_by_one(hangs: Sequence[HangSpan]) -> tuple[HangSpan, ...]:
    """In order and apart: nodes say by their own clocks since when nothing moved (H3)."""
    found: list[HangSpan] = []
    for hang in sorted(hangs, key=lambda each: each.until):
        since = max(hang.since, found[-1].until) if found else hang.since
        if since < hang.until:
            found.append(msgspec.structs.replace(hang, since=since))
    return tuple(found)


class NodeHistory(Value, frozen=True):
    node_id: str
    name: str  # what people call it
    host: str
    slots: int
    came_at: float
    gone_at: float | None = None  # before the end of the run
    gone_how: str = ""  # lost, drained, left
    gone_why: str = ""
    times_lost: int = 0  # also if it came back
    spans: tuple[Span, ...] = ()
    workers: tuple[WorkerSpan, ...] = ()


class RunHistory(Value, frozen=True):
    """One run, or what one node or one coordinator knows of it."""

    run_id: str
    began_at: float
    ended_at: float  # or the last that is known
    nodes: tuple[NodeHistory, ...]
    generations: tuple[GenerationStatus, ...] = ()
    failures: tuple[FailureStatus, ...] = ()  # all, generation by generation, first cause first
    goodput: Goodput | None = None  # None: no coordinator's journal is here
    outcome: str = ""  # empty: not known
    why: str = ""
    min_nodes: int = 1
    max_nodes: int = 1
    restarts_used: int = 0
    max_restarts: int = 0
    membership_changes: int = 0
    drains: int = 0
    requests: int = 0
    missing: tuple[str, ...] = ()  # sentences
    hangs: tuple[HangSpan, ...] = ()  # that were only reported
    entrypoint: str = ""  # "train.py"; empty: no agent's journal is here
    folder: str = ""  # where its journals lie: the coordinator's, or else a node's
    sums_until: float | None = None  # what came later only agents saw, and no sum has it; None: until the end

    @property
    def duration_s(self) -> float:
        return max(0.0, self.ended_at - self.began_at)

    @property
    def first_cause(self) -> FailureStatus | None:
        """Of the generation that failed last: what ended the run, if it failed."""
        last = max((each.generation for each in self.failures), default=0)
        return next((each for each in self.failures if each.generation == last), None)


class RunPart(Value, frozen=True):
    """What one coordinator's journal says, and what is needed to put it together with others of the same run."""

    history: RunHistory
    ranks: dict[tuple[int, int], str]  # generation and group rank -> the id of the node
    is_heir: bool = False  # its sums go on from those of an earlier coordinator
    is_left: bool = False  # everybody had left when its journal ended: nobody can have gone on with this run


class NodePart(Value, frozen=True):
    """What one agent's journal says."""

    run_id: str
    node: NodeHistory
    began_at: float
    ended_at: float
    ranks: tuple[tuple[int, int], ...] = ()  # generation and group rank
    failures: tuple[FailureStatus, ...] = ()
    verdict: Verdict | None = None
    missing: tuple[str, ...] = ()
    hangs: tuple[HangSpan, ...] = ()
    entrypoint: str = ""
    folder: str = ""


NO_END = "the journal of {0} has no end: the run goes on, or the agent was killed"


# --- all of one run together ------------------------------------------------------------------------------------------


def histories_of(runs: Sequence[RunPart], nodes: Sequence[NodePart]) -> list[RunHistory]:
    """All runs of these journals, oldest first. Two runs may have been given the same id, one after the other."""
    groups: list[tuple[list[RunPart], list[NodePart]]] = []
    for run in sorted(runs, key=lambda each: each.history.began_at):
        same = [of for of, _ in groups if of[-1].history.run_id == run.history.run_id]
        is_open = same and not same[-1][-1].history.outcome and not same[-1][-1].is_left
        if same and (is_open or run.is_heir):
            same[-1].append(run)
        else:
            groups.append(([run], []))
    for node in sorted(nodes, key=lambda each: each.began_at):
        near = [(_overlap_s(node, group), place) for place, group in enumerate(groups) if _run_id(group) == node.run_id]
        overlap_s, place = max(near, default=(-_SLACK_S, -1))
        if overlap_s > -_SLACK_S:
            groups[place][1].append(node)
        else:
            groups.append(([], [node]))
    return sorted((put_together(*group) for group in groups), key=lambda each: each.began_at)


def _run_id(group: tuple[list[RunPart], list[NodePart]]) -> str:
    return group[0][0].history.run_id if group[0] else group[1][0].run_id


def _overlap_s(node: NodePart, group: tuple[list[RunPart], list[NodePart]]) -> float:
    """Negative: how long after or before it was."""
    spans = [(each.history.began_at, each.history.ended_at) for each in group[0]]
    spans += [(each.began_at, each.ended_at) for each in group[1]]
    return max(min(until, node.ended_at) - max(since, node.began_at) for since, until in spans)


def put_together(runs: Sequence[RunPart], nodes: Sequence[NodePart]) -> RunHistory:
    """The history of one run, of which some coordinators' and some agents' journals are here; at least one."""
    runs = sorted(runs, key=lambda each: each.history.began_at)
    if not runs:
        return _of_nodes(nodes)
    history = runs[0].history
    for later in runs[1:]:
        history = _followed_by(history, later)
    ranks = {key: node_id for part in runs for key, node_id in part.ranks.items()}
    known = {node.node_id: node for node in history.nodes}
    strangers = []
    unsure = {node.node_id for node in history.nodes if node.gone_at is None}  # whose end is not known
    for part in nodes:
        node_id = _node_of(part, ranks, known)
        if node_id:
            known[node_id] = msgspec.structs.replace(
                known[node_id], workers=tuple(sorted((*known[node_id].workers, *part.node.workers), key=_when))
            )
        else:
            strangers.append(part.node)
        if part.verdict is not None:
            unsure.discard(node_id)
    if not history.outcome:
        history = _ended_as(history, nodes, is_left=not unsure)
    missing = dict.fromkeys([*history.missing, *(each for part in nodes for each in part.missing)])
    if history.outcome:  # it is known how the run ended, and an agent that has no end has ended all the same
        missing = {each: None for each in missing if not each.startswith(NO_END.partition("{")[0])}
        missing.update(_killed(nodes))
    else:
        missing.update(_ended_alone(nodes))
        if not unsure and not nodes and history.nodes:
            missing[_left(max(history.nodes, key=lambda each: each.gone_at or 0.0))] = None
    ends = {each.number: each.settled_at or each.ended_at or history.ended_at for each in history.generations}
    return msgspec.structs.replace(
        history,
        nodes=tuple(_with_ends(node, ends, history.ended_at) for node in (*known.values(), *strangers)),
        missing=tuple(missing),
        entrypoint=next((part.entrypoint for part in nodes if part.entrypoint), ""),
    )


def _ended_as(history: RunHistory, nodes: Sequence[NodePart], *, is_left: bool) -> RunHistory:
    """The end that the coordinator's journal does not have, if agents know it (H4)."""
    last_at = max((history.ended_at, *(part.ended_at for part in nodes)))
    if last_at > history.ended_at:
        history = msgspec.structs.replace(history, ended_at=last_at, sums_until=history.ended_at)
    verdict = _verdict_of(nodes, is_left=is_left)
    if verdict is None:
        return history
    why = _why(verdict)
    generations = history.generations
    if generations and generations[-1].ended_by == "drain":  # nobody came after the node that was asked to leave
        last = msgspec.structs.replace(generations[-1], ended_by=verdict.outcome.value, ended_why=why)
        generations = (*generations[:-1], last)
    return msgspec.structs.replace(
        history,
        outcome=verdict.outcome.value,
        why=why,
        generations=generations,
        goodput=verdict.goodput or history.goodput,
        restarts_used=max(history.restarts_used, verdict.restarts_used),
    )


def _verdict_of(nodes: Sequence[NodePart], *, is_left: bool) -> Verdict | None:
    """``is_left``: of every node it is known that it left."""
    told = next((part.verdict for part in nodes if part.verdict is not None and part.verdict.goodput is not None), None)
    if told is not None:
        return told
    if not is_left or any(part.verdict is None for part in nodes):
        return None
    return max(nodes, key=lambda part: part.ended_at).verdict if nodes else None


def _why(verdict: Verdict) -> str:
    if verdict.outcome is not Outcome.CANCELLED or not verdict.signal:
        return verdict.why
    by = how_it_ended(-verdict.signal)
    return f"{by}: {verdict.why}" if verdict.why else by


def _with_ends(node: NodeHistory, ends: dict[int, float], ended_at: float) -> NodeHistory:
    """Workers whose end nobody wrote lasted as long as their generation, or until their node was gone."""
    workers: list[WorkerSpan] = []
    next_since: dict[int, float] = {}  # of the next one of that local rank
    for worker in reversed(node.workers):
        if worker.exit_code is None:
            until = min(
                ends.get(worker.generation, ended_at),
                ended_at if node.gone_at is None else node.gone_at,
                next_since.get(worker.local_rank, ended_at),
            )
            worker = msgspec.structs.replace(worker, until=max(worker.until, until))  # noqa: PLW2901
        next_since[worker.local_rank] = worker.since
        workers.append(worker)
    return msgspec.structs.replace(node, workers=tuple(reversed(workers)))


def _killed(nodes: Sequence[NodePart]) -> dict[str, None]:
    return {
        f"the journal of the agent on {part.node.host} has no end: the agent was killed": None
        for part in nodes
        if part.missing and part.verdict is None
    }


def _ended_alone(nodes: Sequence[NodePart]) -> dict[str, None]:
    """What became of nodes that knew no more of the run."""
    ends = [(part.node.host, part.verdict) for part in nodes if part.verdict is not None]
    return {f"for the agent on {host} the run {each.outcome.in_words}: {_why(each)}": None for host, each in ends}


def _left(last: NodeHistory) -> str:
    why = f", the last one because {last.gone_why}" if last.gone_why else ""
    return (
        f"every node left before there was a verdict{why}; "
        f"how that ended is in its own journal (journal.jsonl on {last.host})"
    )


def _when(span: WorkerSpan) -> tuple[float, int]:
    return span.since, span.local_rank


def _node_of(part: NodePart, ranks: dict[tuple[int, int], str], known: dict[str, NodeHistory]) -> str:
    """Which of the coordinator's nodes this agent is: it had the same rank in the same generation."""
    for key in part.ranks:
        node = known.get(ranks.get(key, ""))
        if node is not None and node.host == part.node.host:
            return node.node_id
    same = [node.node_id for node in known.values() if node.host == part.node.host]
    return same[0] if len(same) == 1 else ""


def _followed_by(earlier: RunHistory, later: RunPart) -> RunHistory:
    """A coordinator was lost, and another one went on."""
    after = later.history
    generations = {each.number: each for each in earlier.generations}
    for each in after.generations:
        found = generations.get(each.number)
        if found is None:
            generations[each.number] = each
        else:  # that generation went on under the later one
            generations[each.number] = msgspec.structs.replace(
                each,
                why=found.why,
                formed_at=found.formed_at,
                running_at=found.running_at or each.running_at,
                workers=max(found.workers, each.workers),
                spent=found.spent + each.spent if found.ended_at is None else each.spent,
            )
    nodes = {node.node_id: node for node in earlier.nodes}
    for node in after.nodes:
        before = nodes.get(node.node_id)
        nodes[node.node_id] = (
            node
            if before is None
            else msgspec.structs.replace(
                node,
                came_at=before.came_at,
                times_lost=before.times_lost + node.times_lost,
                spans=_one_after_other(before.spans, node.spans),
            )
        )
    failures = {(each.generation, each.rank): each for each in (*earlier.failures, *after.failures)}
    missing = [*(each for each in earlier.missing if "has no end" not in each), *after.missing]
    goodput = after.goodput if later.is_heir else _sum(earlier.goodput, after.goodput)
    if not later.is_heir:
        missing.append("the coordinator was started again without a record: the time in between is in no sum")
    return msgspec.structs.replace(
        after,
        began_at=min(earlier.began_at, after.began_at),
        nodes=tuple(nodes.values()),
        generations=tuple(generations[number] for number in sorted(generations)),
        failures=tuple(sorted(failures.values(), key=lambda each: each.generation)),
        goodput=goodput,
        restarts_used=max(earlier.restarts_used, after.restarts_used),
        membership_changes=max(earlier.membership_changes, after.membership_changes),
        drains=max(earlier.drains, after.drains),
        requests=max(earlier.requests, after.requests),
        outcome=after.outcome or earlier.outcome,
        why=after.why or earlier.why,
        hangs=one_by_one((*earlier.hangs, *after.hangs)),
        folder=after.folder or earlier.folder,
        missing=tuple(dict.fromkeys(missing)),
    )


def _one_after_other(before: tuple[Span, ...], after: tuple[Span, ...]) -> tuple[Span, ...]:
    """Two hosts' clocks may differ: what the earlier one says of later moments gives way (H3)."""
    if not before or not after:
        return before or after
    first = after[0].since
    cut = [msgspec.structs.replace(each, until=min(each.until, first)) for each in before if each.since < first]
    return (*cut, *after)


def _sum(first: Goodput | None, second: Goodput | None) -> Goodput | None:
    return plus(first, second) if first is not None and second is not None else first or second


def plus(one: Goodput, other: Goodput) -> Goodput:
    """Of two pieces of time together."""

    def mean(first: Mean, second: Mean) -> Mean:
        return Mean(first.count + second.count, first.sum_s + second.sum_s)

    return Goodput(
        one.spent + other.spent,
        mean(one.to_detect, other.to_detect),
        mean(one.to_recover, other.to_recover),
        one.lost_steps + other.lost_steps,
    )


def _of_nodes(parts: Sequence[NodePart]) -> RunHistory:
    """No coordinator's journal is here: only what these nodes saw."""
    verdict = _verdict_of(parts, is_left=True)
    nodes = tuple(msgspec.structs.replace(part.node, node_id=f"agent {n}") for n, part in enumerate(parts))
    failures = {(each.generation, each.rank): each for part in parts for each in part.failures}
    missing = [each for part in parts for each in part.missing]
    missing.append(
        "the coordinator's journal (coordinator.jsonl) is not here, so only what these nodes saw themselves is shown; "
        "it lies on the host that served the coordinator"
    )
    return RunHistory(
        run_id=parts[0].run_id,
        began_at=min(part.began_at for part in parts),
        ended_at=max(part.ended_at for part in parts),
        nodes=nodes,
        failures=tuple(sorted(failures.values(), key=_by_cause)),
        goodput=verdict.goodput if verdict is not None else None,
        outcome=verdict.outcome.value if verdict is not None else "",
        why=_why(verdict) if verdict is not None else "",
        restarts_used=verdict.restarts_used if verdict is not None else 0,
        membership_changes=verdict.membership_changes if verdict is not None else 0,
        drains=verdict.drains if verdict is not None else 0,
        requests=verdict.requests if verdict is not None else 0,
        missing=tuple(dict.fromkeys(missing)),
        hangs=max((part.hangs for part in parts), key=len),  # all were told the same
        entrypoint=parts[0].entrypoint,
        folder=parts[0].folder,
    )


def _by_cause(failure: FailureStatus) -> tuple[int, bool, float]:
    """Generation by generation; causes before what follows from another's, and the earlier before the later."""
    return failure.generation, failure.is_consequence, failure.at
