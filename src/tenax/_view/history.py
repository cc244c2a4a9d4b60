"""The history of a run, ended or running, merged from its journals. Pure.

A coordinator's journal contains the events that its machine received. They are replayed, and the machine's states are
recorded, so a page made from a journal cannot disagree with the live page. An agent's journal adds the workers of its
node.

Invariants (tests cite the numbers):

H1  Everything that is missing (a journal without an end, steps that were not written, a coordinator on another host) is
    named in ``missing``; the rest is shown.
H2  Times are seconds since the epoch. Those of different hosts agree only as well as the hosts' clocks.
H3  The spans of one node do not overlap, nor do those of one worker, nor hangs.
H4  The outcome comes from any journal that has it. A verdict of the coordinator is final. The verdict of a node that
    left by itself counts only if no node stayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import msgspec

from tenax._core.hang_report import describe_location, format_ranks
from tenax._core.ledger import Goodput, Mean
from tenax._core.messages import HangReport
from tenax._core.model import Verdict
from tenax._core.text import format_duration
from tenax._view.status import FailureStatus, GenerationStatus, Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tenax._node.journal import Footer

_SLACK_S = 60.0  # maximum difference between two hosts' clocks, or between the starts of two journals


class Span(Value, frozen=True):
    """A period in one state of a node: joined, waiting, spare, starting, working, stopping, draining, done."""

    what: str
    since: float
    until: float
    generation: int = 0


class Spans:
    """Collects the consecutive states of one node. ``offset``: seconds since the epoch minus the journal's clock."""

    def __init__(self, offset: float) -> None:
        self.found: list[Span] = []
        self.what = ""  # the current state; empty: none
        self._offset = offset
        self._generation = 0
        self._since = 0.0

    def begin(self, what: str, generation: int, at: float) -> None:
        """Begin a state unless it is the current one."""
        if (what, generation) != (self.what, self._generation):
            self.end(at)
            self.what, self._generation, self._since = what, generation, at

    def end(self, at: float) -> None:
        if self.what and at > self._since:
            self.found.append(Span(self.what, self._since + self._offset, at + self._offset, self._generation))
        self.what = ""


class WorkerSpan(Value, frozen=True):
    """The lifetime of one worker process, as recorded by its agent."""

    generation: int
    local_rank: int
    rank: int
    pid: int
    since: float
    until: float
    exit_code: int | None = None  # None: its end is not in the journal
    ended: str = ""  # succeeded, failed, stopped


class HangSpan(Value, frozen=True):
    """A hang that was only reported: the workers were not restarted."""

    generation: int
    since: float
    until: float  # progress again, or the end of the generation
    who: str = ""  # ranks whose stacks differ from the others', and where they are

    @property
    def text(self) -> str:
        who = f" ({self.who})" if self.who else ""
        return f"no activity for {format_duration(self.until - self.since)} in generation {self.generation}{who}"


def odd_ranks(report: HangReport) -> str:
    """Return the ranks at the rarest location in the code, and that location."""
    if not report.locations:
        return ""
    odd = report.locations[0]
    unsure = "" if report.is_odd or len(report.locations) == 1 else "no rank stands out; "
    return f"{unsure}{format_ranks(odd.ranks)}{f' on {odd.host}' if odd.host else ''}: {describe_location(odd)}"


def without_overlaps(hangs: Sequence[HangSpan]) -> tuple[HangSpan, ...]:
    """Sort hangs and remove overlaps, which come from different clocks of nodes (H3)."""
    found: list[HangSpan] = []
    for hang in sorted(hangs, key=lambda each: each.until):
        since = max(hang.since, found[-1].until) if found else hang.since
        if since < hang.until:
            found.append(msgspec.structs.replace(hang, since=since))
    return tuple(found)


class NodeHistory(Value, frozen=True):
    node_id: str
    name: str  # for display
    host: str
    slots: int
    came_at: float
    gone_at: float | None = None  # before the end of the run
    gone_how: str = ""  # lost, drained, left
    gone_why: str = ""
    times_lost: int = 0  # including losses after which it came back
    spans: tuple[Span, ...] = ()
    workers: tuple[WorkerSpan, ...] = ()

    @property
    def left_text(self) -> str:
        how = self.gone_how if self.gone_how == "left" else f"was {self.gone_how}"
        return f"{self.name} {how}{f': {self.gone_why}' if self.gone_why else ''}"


class RunHistory(Value, frozen=True):
    """One run, or the part of it in some of its journals."""

    run_id: str
    began_at: float
    ended_at: float  # or the last known time
    nodes: tuple[NodeHistory, ...]
    generations: tuple[GenerationStatus, ...] = ()
    failures: tuple[FailureStatus, ...] = ()  # by generation, first cause first
    stopped: int = 0  # workers that tenax stopped
    goodput: Goodput | None = None  # None: no coordinator's journal
    outcome: str = ""  # empty: unknown
    why: str = ""
    restarts_used: int = 0
    max_restarts: int = 0
    missing: tuple[str, ...] = ()  # messages about missing parts
    hangs: tuple[HangSpan, ...] = ()  # that were only reported
    entrypoint: str = ""  # "train.py"; empty: no agent's journal
    folder: str = ""  # of the coordinator's journal, or else of a node's
    sums_until: float | None = None  # goodput does not include later times, which only agents saw; None: the end

    @property
    def duration_s(self) -> float:
        return max(0.0, self.ended_at - self.began_at)

    @property
    def first_cause(self) -> FailureStatus | None:
        """The first cause of the last generation that failed."""
        return self.first_causes[-1] if self.first_causes else None

    @property
    def failed(self) -> int:
        """How many workers failed by themselves."""
        return sum(each.is_own for each in self.failures)

    @property
    def first_causes(self) -> list[FailureStatus]:
        """The first cause of each generation that failed, oldest first."""
        return [each for each in self.failures if each.role == "first"]


class RunPart(Value, frozen=True):
    """The content of one coordinator's journal, and what is needed to merge it with others of the same run."""

    history: RunHistory
    ranks: dict[tuple[int, int], str]  # generation and group rank -> node id
    has_predecessor: bool = False  # its goodput includes that of an earlier coordinator
    all_left: bool = False  # every node had left when the journal ended, so the run cannot have continued


class NodePart(Value, frozen=True):
    """The content of one agent's journal."""

    history: RunHistory  # of this node alone, without an outcome
    ranks: tuple[tuple[int, int], ...] = ()  # generation and group rank
    verdict: Verdict | None = None

    @property
    def node(self) -> NodeHistory:
        return self.history.nodes[0]


_NO_END = "the journal of {0} has no end: the run is still going, or the agent was killed"


def missing_end(whose: str, footer: Footer | None, verdict: Verdict | None) -> tuple[str, ...]:
    """Return a message if the end of a journal is missing (H1). ``footer``: its last line."""
    if footer is not None and footer.steps_not_written:
        return (f"the last {footer.steps_not_written} steps of {whose} were not written",)
    return (_NO_END.format(whose),) if footer is None and verdict is None else ()


def histories_of(runs: Sequence[RunPart], nodes: Sequence[NodePart]) -> list[RunHistory]:
    """Return all runs in these journals, oldest first. Consecutive runs may have the same id."""
    groups: list[tuple[list[RunPart], list[NodePart]]] = []
    for run in sorted(runs, key=lambda each: each.history.began_at):
        same = [of for of, _ in groups if of[-1].history.run_id == run.history.run_id]
        is_open = same and not same[-1][-1].history.outcome and not same[-1][-1].all_left
        if same and (is_open or run.has_predecessor):
            same[-1].append(run)
        else:
            groups.append(([run], []))
    for node in sorted(nodes, key=lambda each: each.history.began_at):
        near = [(_overlap_s(node, [*of, *its]), index) for index, (of, its) in enumerate(groups)]
        overlap_s, index = max(near, default=(-_SLACK_S, -1))
        if overlap_s > -_SLACK_S:
            groups[index][1].append(node)
        else:
            groups.append(([], [node]))
    return sorted((_merge(*group) for group in groups), key=lambda each: each.began_at)


def _overlap_s(node: NodePart, parts: Sequence[RunPart | NodePart]) -> float:
    """Return the time in which both ran; negative: the time between them, infinite between different runs."""
    one = node.history
    if parts[0].history.run_id != one.run_id:
        return float("-inf")
    others = [each.history for each in parts]
    return max(min(each.ended_at, one.ended_at) - max(each.began_at, one.began_at) for each in others)


def _merge(runs: Sequence[RunPart], nodes: Sequence[NodePart]) -> RunHistory:
    """Merge the parts of one run; at least one part."""
    runs = sorted(runs, key=lambda each: each.history.began_at)
    if not runs:
        return _merge_nodes(nodes)
    history = runs[0].history
    for later in runs[1:]:
        history = _append(history, later)
    ranks = {key: node_id for part in runs for key, node_id in part.ranks.items()}
    known = {node.node_id: node for node in history.nodes}
    unknown = []  # nodes that no coordinator's journal has
    unsure = {node.node_id for node in history.nodes if node.gone_at is None}  # nodes whose end is unknown
    for part in nodes:
        node_id = _node_of(part, ranks, known)
        if node_id:
            workers = sorted(
                (*known[node_id].workers, *part.node.workers), key=lambda each: (each.since, each.local_rank)
            )
            known[node_id] = msgspec.structs.replace(known[node_id], workers=tuple(workers))
        else:
            unknown.append(part.node)
        if part.verdict is not None:
            unsure.discard(node_id)
    if not history.outcome:
        history = _with_outcome(history, nodes, all_left=not unsure)
    missing = [*history.missing, *(each for part in nodes for each in part.history.missing)]
    if history.outcome:  # the run is over, so an agent whose journal has no end was killed
        missing = [each for each in missing if not each.startswith(_NO_END.partition("{")[0])]
        missing += [
            f"the journal of the agent on {part.node.host} has no end: the agent was killed"
            for part in nodes
            if part.history.missing and part.verdict is None
        ]
    else:
        missing += [
            f"for the agent on {part.node.host} the run {part.verdict.outcome.text}: {part.verdict.why}"
            for part in nodes
            if part.verdict is not None
        ]
        if not unsure and not nodes and history.nodes:
            last = max(history.nodes, key=lambda each: each.gone_at or 0.0)
            why = f", the last one because {last.gone_why}" if last.gone_why else ""
            outcome = f"for its outcome, see journal.jsonl on {last.host}"
            missing.append(f"every node left before there was a verdict{why}; {outcome}")
    ends = {each.number: each.settled_at or each.ended_at or history.ended_at for each in history.generations}
    return msgspec.structs.replace(
        history,
        nodes=tuple(_with_ends(node, ends, history.ended_at) for node in (*known.values(), *unknown)),
        missing=tuple(dict.fromkeys(missing)),
        entrypoint=next((part.history.entrypoint for part in nodes if part.history.entrypoint), ""),
    )


def _with_outcome(history: RunHistory, nodes: Sequence[NodePart], *, all_left: bool) -> RunHistory:
    """Add the outcome from the agents' journals if the coordinator's has none (H4)."""
    last_at = max((history.ended_at, *(part.history.ended_at for part in nodes)))
    if last_at > history.ended_at:
        history = msgspec.structs.replace(history, ended_at=last_at, sums_until=history.ended_at)
    verdict = _verdict_of(nodes, all_left=all_left)
    if verdict is None:
        return history
    generations = history.generations
    if generations and generations[-1].ended_by == "drain":  # no node replaced the drained one
        last = msgspec.structs.replace(generations[-1], ended_by=verdict.outcome.value, ended_why=verdict.why)
        generations = (*generations[:-1], last)
    return msgspec.structs.replace(
        history,
        outcome=verdict.outcome.value,
        why=verdict.why,
        generations=generations,
        goodput=verdict.goodput or history.goodput,
        restarts_used=max(history.restarts_used, verdict.restarts_used),
    )


def _verdict_of(nodes: Sequence[NodePart], *, all_left: bool) -> Verdict | None:
    """Return the coordinator's verdict, which has goodput, or the last node's if all nodes have left."""
    final = [part.verdict for part in nodes if part.verdict is not None and part.verdict.goodput is not None]
    if final:
        return final[0]
    if not all_left or any(part.verdict is None for part in nodes):
        return None
    return max(nodes, key=lambda part: part.history.ended_at).verdict if nodes else None


def _with_ends(node: NodeHistory, ends: dict[int, float], ended_at: float) -> NodeHistory:
    """Extend workers without a recorded end to the end of their generation, or until their node left."""
    workers: list[WorkerSpan] = []
    next_since: dict[int, float] = {}  # start of the next worker, by local rank
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


def _node_of(part: NodePart, ranks: dict[tuple[int, int], str], known: dict[str, NodeHistory]) -> str:
    """Return the node that this agent is, by its rank in a generation, or else by its host; empty if unknown."""
    for key in part.ranks:
        node = known.get(ranks.get(key, ""))
        if node is not None and node.host == part.node.host:
            return node.node_id
    same = [node.node_id for node in known.values() if node.host == part.node.host]
    return same[0] if len(same) == 1 else ""


def _append(earlier: RunHistory, later: RunPart) -> RunHistory:
    """Append the part of a coordinator that replaced a lost one."""
    after = later.history
    generations = {each.number: each for each in earlier.generations}
    for each in after.generations:
        if (found := generations.get(each.number)) is not None:  # it continued under the later coordinator
            each = msgspec.structs.replace(  # noqa: PLW2901
                each,
                why=found.why,
                formed_at=found.formed_at,
                running_at=found.running_at or each.running_at,
                workers=max(found.workers, each.workers),
                spent=found.spent + each.spent if found.ended_at is None else each.spent,
            )
        generations[each.number] = each
    nodes = {node.node_id: node for node in earlier.nodes}
    for node in after.nodes:
        if (before := nodes.get(node.node_id)) is not None:
            node = msgspec.structs.replace(  # noqa: PLW2901
                node,
                came_at=before.came_at,
                times_lost=before.times_lost + node.times_lost,
                spans=_join_spans(before.spans, node.spans),
            )
        nodes[node.node_id] = node
    failures = {(each.generation, each.rank): each for each in (*earlier.failures, *after.failures)}
    missing = [*(each for each in earlier.missing if "has no end" not in each), *after.missing]
    goodput = after.goodput
    if not later.has_predecessor:
        parts = [each for each in (earlier.goodput, after.goodput) if each is not None]
        goodput = reduce(plus, parts) if parts else None
        missing.append("the coordinator was started again without a record: the time in between is not counted")
    return msgspec.structs.replace(
        after,
        began_at=min(earlier.began_at, after.began_at),
        nodes=tuple(nodes.values()),
        generations=tuple(generations[number] for number in sorted(generations)),
        failures=tuple(sorted(failures.values(), key=lambda each: each.generation)),
        goodput=goodput,
        restarts_used=max(earlier.restarts_used, after.restarts_used),
        outcome=after.outcome or earlier.outcome,
        why=after.why or earlier.why,
        hangs=without_overlaps((*earlier.hangs, *after.hangs)),
        folder=after.folder or earlier.folder,
        missing=tuple(dict.fromkeys(missing)),
    )


def _join_spans(before: tuple[Span, ...], after: tuple[Span, ...]) -> tuple[Span, ...]:
    """Join spans from two hosts. Where their clocks make them overlap, the later host's win (H3)."""
    if not before or not after:
        return before or after
    first = after[0].since
    cut = [msgspec.structs.replace(each, until=min(each.until, first)) for each in before if each.since < first]
    return (*cut, *after)


def plus(one: Goodput, other: Goodput) -> Goodput:
    def mean(first: Mean, second: Mean) -> Mean:
        return Mean(first.count + second.count, first.sum_s + second.sum_s)

    return Goodput(
        one.spent + other.spent,
        mean(one.to_detect, other.to_detect),
        mean(one.to_recover, other.to_recover),
        one.lost_steps + other.lost_steps,
        one.survivors + other.survivors,
    )


def with_one_first(failures: Sequence[FailureStatus]) -> list[FailureStatus]:
    """Return failures from several sources: of several first causes of a generation, the earliest stays one."""
    found: list[FailureStatus] = []
    seen: set[int] = set()  # generations with a first cause
    for each in sorted(
        failures, key=lambda each: (each.generation, each.role != "first", each.is_consequence, each.at)
    ):
        role = each.role
        if role == "first" and each.generation in seen:
            role = "consequence" if each.is_consequence else "independent"
        if role == "first":
            seen.add(each.generation)
        found.append(msgspec.structs.replace(each, role=role))
    return found


def _merge_nodes(parts: Sequence[NodePart]) -> RunHistory:
    histories = [part.history for part in parts]
    verdict = _verdict_of(parts, all_left=True)
    found = [each for history in histories for each in history.failures]
    # The verdict's failures are those of all nodes, so they replace what each node knows alone.
    own = [each for each in found if verdict is None or each.generation != verdict.generation]
    final = next((part.history.failures for part in parts if part.verdict is verdict), ())
    of_all = [each for each in final if verdict is not None and each.generation == verdict.generation]
    failures = {(each.generation, each.rank): each for each in (*with_one_first(own), *of_all)}
    missing = [each for history in histories for each in history.missing]
    missing.append(
        "only what these nodes observed is shown, because the coordinator's journal is missing: coordinator.jsonl, on "
        "the host of the coordinator"
    )
    merged = msgspec.structs.replace(
        histories[0],
        began_at=min(each.began_at for each in histories),
        nodes=tuple(msgspec.structs.replace(part.node, node_id=f"agent {n}") for n, part in enumerate(parts)),
        failures=tuple(sorted(failures.values(), key=lambda each: each.generation)),
        ended_at=max(each.ended_at for each in histories),
        missing=tuple(dict.fromkeys(missing)),
        hangs=max((each.hangs for each in histories), key=len),  # all nodes receive the same reports
    )
    return _with_outcome(merged, parts, all_left=True)
