"""Scenario files of the coordinator: readable transcripts of the coordinator machine, one line per event.

The format is that of ``tenax.testing.scenario``; here the events are mostly messages of nodes, and the output is what
the coordinator sends them.

    scenario a worker of one node fails and all start again
    settings nodes=2 max_restarts=1

    at 0 nodes a, b up with 2 slots
        send to a: waiting: 1 of 2 nodes ready (a); waiting up to 10 min for 1 more
        send to a: generation 1 formed, node 0 of 2, ranks 0-1 of 4: first generation
        send to b: generation 1 formed, node 1 of 2, ranks 2-3 of 4: first generation
        gathering -> running
        deadlines: none
    at 9 node b failed: rank 3 exited 1
        send to a, b: generation 1 ended: rank 3 on b failed
        running -> ending

``scenario TITLE``
    Starts a scenario with a new machine. A file may contain several.
``settings NAME=VALUE ...``
    Fields of ``RunSettings``; ``nodes=2:4`` (or ``nodes=2``) is short for ``min_nodes`` and ``max_nodes``. Default: one
    node, no restarts.
``policy NAME``
    A restart policy that the caller of ``play_run_scenario`` provides. Default: ``budget``.
``at TIME EVENT``
    One event, or one for each of several nodes. Times are seconds and never decrease. The events:

    - ``opened`` (``..., recover 30 s``) (``..., dead rank 1``) (``..., generation 3``) (``..., restarts used 1``). If
      the first event is another one, the coordinator is opened just before it.
    - ``node a joined``, followed by any of ``with 2 slots``, ``on HOST``, ``named NAME``, ``asking for rank 1``,
      ``order KEY``, ``role ROLE``, ``for 2 to 4 nodes`` and ``clock 864000 ahead`` (or ``behind``), separated by
      commas; a node that reconnects may also have ``running generation 3 as 0 of 2``, ``done with generation 3 as
      0 of 2`` or ``after generation 3 as 0 of 2``, ``with its store at HOST:PORT`` and ``restarts used 1``. Default:
      one slot, on a host with the node's name, for the run's number of nodes, with the coordinator's clock and the
      store of its generation.
    - ``node a ready`` (``..., store at HOST:PORT``) (``..., served by the agent``) (``..., 2 held``: it holds workers);
      ``nodes a, b up`` is short for joined (with the same options) and ready
    - ``node a failed: rank 1 exited 3``, ``... rank 1 killed by SIGSEGV``; may be followed by ``, seen at TIME`` and
      ``, raised at TIME``, on the coordinator's clock, and ``, MESSAGE``
    - ``node a stopped`` (``..., cut off``: its lease expired); a colon may be followed by failures as above and
      ``rank 0 stopped`` or ``rank 0 held``, separated by semicolons
    - ``nodes a, b running`` (``..., 2 survived``): all their workers were started; ``node a at step 9`` (``node a at
      steps 3 to 9``); ``..., since 12`` and ``..., until 15`` are the times of the first and the last step on the
      coordinator's clock; default: now
    - ``nodes a, b stopped and ready``, ``node a succeeded``
    - ``node a quiet since TIME: WHY`` (on the coordinator's clock), ``node a busy: WHY``, ``node a sent stacks,
      suspicion 1: rank 0 in FUNCTION; rank 1 not known, WHY``
    - ``node a draining, grace 30: WHY``, ``node a will leave, in 120 s: WHY``, ``node a left: WHY`` (``left, not clear:
      ...``: a process survived; ``left, refused: ...``), ``node a lost: REASON``
    - ``cancel: WHY``, ``restart requested: WHY``, ``drain a requested: WHY``: requests of an operator
    - ``tick``, ``resumed after 30 s``: the coordinator's process was suspended for that long

    A node's message is about its last generation, unless ``of generation 1`` follows its name.

The output is what the coordinator sends, then what changed: the ledger, the phase, the deadlines; with the verdict, how
the time was spent, if workers were reported to be running. ``noted`` means that only other state changed, ``ignored``
that nothing changed. The state is encoded and decoded before every step, and the invariants are checked after it
(``tenax.testing.run_invariants``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

import msgspec

from tenax._core import coordinator as run
from tenax._core import events, messages
from tenax._core.coordinator import AnyCoordinatorEvent, CoordinatorMachine, CoordinatorState, RunSettings, Send
from tenax._core.ledger import Goodput, Spent
from tenax._core.model import Assignment, Failure, Stopped
from tenax._core.policy import BudgetPolicy, RestartPolicy
from tenax.testing.run_invariants import RunChecker
from tenax.testing.scenario import (
    EXIT,
    NUMBER,
    Fields,
    Player,
    ScenarioError,
    Transcript,
    describe_verdict,
    format_time,
    make,
    make_evidence,
    make_settings,
    match_any,
    parse_exit,
    parse_settings,
    play_lines,
)

__all__ = ["describe_send", "play_run_scenario"]

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(CoordinatorState).decode
_SIGTERM = 15


def play_run_scenario(text: str, policies: Mapping[str, RestartPolicy] | None = None) -> str:
    """Run every scenario of ``text``; return it with the coordinator's current output.

    ``policies`` are the restart policies that ``policy NAME`` may name, besides ``budget``.
    """
    known = {"budget": BudgetPolicy(), **(policies or {})}

    def policy(name: str) -> RestartPolicy:
        if name and name not in known:
            raise ScenarioError(f"there is no policy {name!r}; there are {', '.join(known)}")
        return known[name or "budget"]

    return play_lines(text, Player(_RunTranscript, settings=_settings, policy=policy).take)


class _RunTranscript(Transcript):
    def __init__(self, settings: RunSettings, policy: RestartPolicy) -> None:
        self._settings = settings
        self._policy = policy
        self.state = CoordinatorState(settings)
        self._checker = RunChecker(settings, decides_changes=hasattr(policy, "decide_change"))
        self._nodes: dict[str, _Node] = {}
        self._is_open = False

    def prepare(self, text: str) -> None:
        if not self._is_open and not text.startswith("opened"):
            self._step(run.Opened())
        self._is_open = True

    @property
    def counts(self) -> str:
        state: CoordinatorState = self.state
        requests = f", requests {state.requests}" if state.requests else ""
        changes = f"membership changes {state.membership_changes}, drains {state.drains}"
        return f"ledger: restarts {state.restarts_used}, {changes}{requests}"

    def step(self, event: AnyCoordinatorEvent) -> list[str]:
        return [line for send in self._step(event) for line in describe_send(send, self.state)]

    def _step(self, event: AnyCoordinatorEvent) -> list[Send]:
        machine = CoordinatorMachine(self._settings, self._policy, _decode(_encode(self.state)))
        self._checker.expect(machine.state, event)
        step = machine.step(event, self.now)
        self.state = machine.state
        self._checker.check(machine.state, event, step, self.now)
        for send in step.sends:
            if isinstance(send.event, events.GenerationFormed):
                for node_id in send.to:
                    self._nodes[node_id].part = send.event.assignment
        return step.sends

    # --- events -------------------------------------------------------------------------------------------------------

    def events(self, text: str) -> Iterator[AnyCoordinatorEvent]:
        of_node = _OF_NODE.fullmatch(text)
        if of_node is None:
            kind, fields = match_any(_GRAMMAR, text, _UNKNOWN)
            yield make(kind, fields)
        else:
            for name in of_node["names"].split(", "):
                yield from self._node_events(name, int(of_node["generation"] or -1), of_node["what"])

    def _node_events(self, name: str, generation: int, what: str) -> Iterator[AnyCoordinatorEvent]:
        short = _SHORT.fullmatch(what)
        if short is not None:
            first = "stopped" if short["first"] else f"joined{short['how']}"
            yield from self._node_events(name, generation, first)
            yield from self._node_events(name, -1, "ready")
            return
        if (joined := re.fullmatch(r"joined(?P<how>.*)", what)) is not None:
            node = self._nodes[name] = _Node(name, self._settings, self._nodes.get(name), joined["how"])
            yield run.Received(name, node.joined)
            return
        if what.startswith("lost: "):
            yield run.NodeLost(name, what.removeprefix("lost: "))
            return
        node = self._nodes.setdefault(name, _Node(name, self._settings, None, ""))
        yield run.Received(name, node.message(what, node.generation if generation < 0 else generation, self.now))


class _Node:
    """A node of the script: its identity, its clock, and its last assignment."""

    def __init__(self, name: str, settings: RunSettings, before: _Node | None, how: str) -> None:
        self.part: Assignment | None = before.part if before else None
        self.clock_ahead_s: float = before.clock_ahead_s if before else 0.0
        given: Fields = {}
        for clause in how.strip(", ").split(", ") if how.strip(", ") else []:
            given |= match_any(_CLAUSES, clause, "does not describe a node; see the top of tenax.testing.run_scenario")[
                1
            ]
        if "clock" in given:
            self.clock_ahead_s = float(given["clock"]) * (1 if given["way"] == "ahead" else -1)
        if "work" in given:
            given |= {"is_running": given["work"] == "running", "has_succeeded": given["work"] == "done with"}
            given.setdefault("store", self.part.store if self.part else "")
        if "min_nodes" in given:
            given["max_nodes"] = given["max_nodes"] or given["min_nodes"]
        own = {"node_id": name, "host": name, "min_nodes": settings.min_nodes, "max_nodes": settings.max_nodes}
        self.joined = make(messages.NodeJoined, given, node=make(messages.NodeInfo, given, **own))
        known = before.generation if before else 0
        self._least_generation = max(known, self.joined.generation)

    @property
    def generation(self) -> int:
        return max(self._least_generation, self.part.generation if self.part else 0)

    @property
    def _first_rank(self) -> int:
        return self.part.first_global_rank if self.part else 0

    def message(self, what: str, generation: int, now: float) -> messages.FromNode:
        rule, fields = match_any(_MESSAGES, what, _UNKNOWN)
        ahead = self.clock_ahead_s
        if isinstance(rule, type):
            pids = tuple(range(100 * generation, 100 * generation + self.joined.node.slots))
            if "since" in fields:
                fields["since"] = float(fields["since"]) + ahead
            return make(rule, fields, generation=generation, sent_at=now + ahead, pids=pids)
        return rule(self, fields, generation, now)

    def progress(self, fields: Fields, generation: int, now: float) -> messages.NodeProgress:
        """Report the progress of the first worker."""
        since, until = float(fields["since"] or now), float(fields["until"] or now)
        first, last = int(fields["first"] or fields["last"]), int(fields["last"])
        ahead = self.clock_ahead_s
        return messages.NodeProgress(
            generation, now + ahead, (messages.WorkerProgress(0, first, last, since + ahead, until + ahead),)
        )

    def stacks(self, fields: Fields, generation: int, _: float) -> messages.StacksTaken:
        locations = []
        for each in fields["locations"].split("; "):
            at = re.fullmatch(r"rank (\d+) (?:in (\w+)|not known, (.+))", each)
            if at is None:
                raise ScenarioError(
                    f"{each!r} is not a location; write 'rank 1 in FUNCTION' or 'rank 1 not known, WHY'"
                )
            rank, frames = int(at[1]), (f"train.py:1 in {at[2]}",) if at[2] else ()
            pid, stacks = 100 * generation + rank, "its stacks" if frames else ""
            local_rank = rank - self._first_rank
            locations.append(messages.StackLocation((rank,), frames, (), stacks, at[3] or "", local_rank, pid))
        return messages.StacksTaken(generation, int(fields["number"]), tuple(locations))

    def failed(self, fields: Fields, generation: int, now: float) -> messages.FailureSeen:
        return messages.FailureSeen(
            generation, self._failure(fields["failure"], generation, now), now + self.clock_ahead_s
        )

    def stopped(self, fields: Fields, generation: int, now: float) -> messages.NodeStopped:
        failures: list[Failure] = []
        stopped: list[Stopped] = []
        held: list[int] = []
        for end in fields["ends"].split("; ") if fields["ends"] else []:
            other = re.fullmatch(r"rank (\d+) (stopped|held)", end)
            if other is None:
                failures.append(self._failure(end, generation, now))
            elif other[2] == "held":
                held.append(int(other[1]))
            else:
                rank = int(other[1])
                stopped.append(Stopped(rank - self._first_rank, rank, 100 * generation + rank, -_SIGTERM))
        sent_at, was_cut_off = now + self.clock_ahead_s, bool(fields["was_cut_off"])
        return messages.NodeStopped(generation, sent_at, tuple(failures), tuple(stopped), was_cut_off, tuple(held))

    def left(self, fields: Fields, *_: object) -> messages.NodeLeft:
        return messages.NodeLeft(fields["why"], not fields["stuck"], bool(fields["refused"]))

    def _failure(self, text: str, generation: int, now: float) -> Failure:
        """Parse a failure, with its times on the node's clock."""
        fields = _FAILURE.fullmatch(text)
        if fields is None:
            raise ScenarioError(f"{text!r} is not a failure; write 'rank 1 exited 3' or 'rank 1 killed by SIGSEGV'")
        rank, seen_at = int(fields["rank"]), float(fields["seen_at"]) if fields["seen_at"] else now
        found = make_evidence(fields["message"] or "", fields["raised_at"] or "")
        local_rank, pid, exit_code = rank - self._first_rank, 100 * generation + rank, parse_exit(fields["exit_code"])
        failure = Failure(generation, local_rank, rank, pid, exit_code, seen_at, evidence=found)
        return failure.shifted(self.clock_ahead_s)


_UNKNOWN = "is not an event; the events are listed at the top of tenax.testing.run_scenario"
_NAME = r"[\w.-]+"
# In all grammars, a pattern comes with the struct of which its groups are fields, or with what returns it.
_GRAMMAR: tuple[tuple[str, type[AnyCoordinatorEvent]], ...] = (
    (r"tick", run.Tick),
    (rf"resumed after (?P<absent_s>{NUMBER}) s", run.Resumed),
    (r"cancel: (?P<why>.*)", run.CancelRequested),
    (r"restart requested: (?P<why>.+)", run.RestartRequested),
    (rf"drain (?P<node_id>{_NAME}) requested: (?P<why>.+)", run.DrainRequested),
    (
        rf"opened(?:, recover (?P<recover_s>{NUMBER}) s)?(?:, dead rank (?P<dead_rank>\d+))?"
        r"(?:, generation (?P<generation>\d+))?(?:, restarts used (?P<restarts_used>\d+))?",
        run.Opened,
    ),
)
_OF_NODE = re.compile(rf"nodes? (?P<names>{_NAME}(?:, {_NAME})*)(?: of generation (?P<generation>\d+))? (?P<what>.+)")
_SHORT = re.compile(r"(?:up(?P<how>.*)|(?P<first>stopped) and ready)")
_FAILURE = re.compile(
    rf"rank (?P<rank>\d+) {EXIT}"
    rf"(?:, seen at (?P<seen_at>{NUMBER}))?(?:, raised at (?P<raised_at>{NUMBER}))?(?:, (?P<message>.+))?"
)
_CLAUSES = tuple(
    (pattern, None)
    for pattern in (
        r"with (?P<slots>\d+) slots?",
        r"asking for rank (?P<rank>\d+)",
        rf"on (?P<host>{_NAME})",
        rf"named (?P<name>{_NAME})",
        r"order (?P<order>\S+)",
        rf"role (?P<role>{_NAME})",
        r"for (?P<min_nodes>\d+)(?: to (?P<max_nodes>\d+))? nodes?",
        rf"clock (?P<clock>{NUMBER}) (?P<way>ahead|behind)",
        r"restarts used (?P<restarts_used>\d+)",
        r"with its store at (?P<store>\S+)",
        r"(?P<work>running|done with|after) generation (?P<generation>\d+)"
        r"(?: as (?P<group_rank>\d+) of (?P<group_world_size>\d+))?",
    )
)
_MESSAGES: tuple[
    tuple[str, type[messages.FromNode] | Callable[[_Node, Fields, int, float], messages.FromNode]], ...
] = (
    (
        rf"ready(?:, store at (?P<store_addr>{_NAME}):(?P<store_port>\d+))?"
        r"(?P<is_agent_store>, served by the agent)?(?:, (?P<held>\d+) held)?",
        messages.NodeReady,
    ),
    (r"running(?:, (?P<survivors>\d+) survived)?", messages.WorkersRunning),
    (
        rf"at step(?:s (?P<first>\d+) to)? (?P<last>\d+)(?:, since (?P<since>{NUMBER}))?"
        rf"(?:, until (?P<until>{NUMBER}))?",
        _Node.progress,
    ),
    (r"failed: (?P<failure>.+)", _Node.failed),
    (r"stopped(?P<was_cut_off>, cut off)?(?:: (?P<ends>.+))?", _Node.stopped),
    (r"succeeded", messages.NodeSucceeded),
    (rf"quiet since (?P<since>{NUMBER}): (?P<why>.+)", messages.NodeQuiet),
    (r"busy: (?P<why>.+)", messages.NodeBusy),
    (r"sent stacks, suspicion (?P<number>\d+): (?P<locations>.+)", _Node.stacks),
    (rf"draining, grace (?P<grace_s>{NUMBER}): (?P<why>.+)", messages.NodeDraining),
    (rf"will leave(?:, in (?P<in_s>{NUMBER}) s)?: (?P<why>.+)", messages.NodeWillLeave),
    (r"left(?P<stuck>, not clear)?(?P<refused>, refused)?: (?P<why>.+)", _Node.left),
)


def _settings(text: str) -> RunSettings:
    given = {"run_id": "run", **parse_settings(text)}
    if "nodes" in given:
        given["min_nodes"], _, maximum = given.pop("nodes").partition(":")
        given["max_nodes"] = maximum or given["min_nodes"]
    return make_settings(RunSettings, given, "nodes")


# --- output -----------------------------------------------------------------------------------------------------------


def describe_send(send: Send, state: CoordinatorState) -> list[str]:
    """Describe what is sent, and to which nodes, in one line, and a verdict in more, indented ones."""
    to = f"send to {', '.join(send.to)}: "
    match send.event:
        case events.GenerationFormed():
            return [to + _describe_formed(send.event, state.nodes[send.to[0]].info.slots)]
        case events.GenerationEnded(generation, why, is_late, stops=stops, hung=hung):
            # Only nodes that hold workers can tell the difference.
            is_shown = stops and any(state.nodes[each].offer.held for each in send.to if each in state.nodes)
            how = f"{', late' if is_late else ''}{', stops' if is_shown else ''}"
            how += f", rank {hung} hung" if hung is not None else ""
            return [f"{to}generation {generation} ended{how}: {why}"]
        case events.RunEnded(verdict):
            details = [*describe_verdict(verdict), *_describe_goodput(verdict.goodput)]
            return [f"{to}run ended: {verdict.outcome.value}, {verdict.why}", *details]
        case events.JoinRefused(reason):
            return [f"{to}refused: {reason}"]
        case events.Waiting(why):
            return [f"{to}waiting: {why}"]
        case events.StacksRequested(generation, number, why):
            return [f"{to}stacks requested, suspicion {number}, of generation {generation}: {why}"]
        case events.HangFound(_, report):
            from tenax._core.hang_report import format_report

            return [f"{to}hang found", *(f"    {line}" for line in format_report(report))]
        case events.HangOver(generation, why):
            return [f"{to}generation {generation} is active again: {why}"]
        case events.LeaveRequested(why):
            return [f"{to}leave requested: {why}"]
        case events.LeaveNoticed(_, host, why, in_s):
            return [f"{to}{host} will leave{f', in {in_s:g} s' if in_s is not None else ''}: {why}"]


def _describe_formed(formed: events.GenerationFormed, slots: int) -> str:
    part = formed.assignment
    parts = [f"generation {part.generation} formed", f"node {part.group_rank} of {part.group_world_size}"]
    parts.append(f"{_ranks(part.first_global_rank, slots)} of {part.world_size}")
    if part.role_world_size != part.world_size:
        parts.append(f"role {_ranks(part.first_role_rank, slots)} of {part.role_world_size}")
    if part.restarts_used:
        parts.append(f"restarts used {part.restarts_used}")
    if part.master_addr:
        by = " (the agent's)" if part.use_agent_store else ""
        parts.append(f"store at {part.master_addr}:{part.master_port}{by}")
    if part.coordinator_rank >= 0:
        parts.append(f"coordinator on node {part.coordinator_rank}")
    return f"{', '.join(parts)}: {part.why}"


def _ranks(first: int, count: int) -> str:
    return f"rank {first}" if count == 1 else f"ranks {first}-{first + count - 1}"


def _describe_goodput(goodput: Goodput | None) -> list[str]:
    """Describe how the time was spent, if workers were reported to be running."""
    if goodput is None or not goodput.spent.training_s + goodput.spent.lost_s + goodput.spent.hung_s:
        return []
    seconds = {name: getattr(goodput.spent, name) for name in Spent.__struct_fields__}
    parts = [f"{name.removesuffix('_s')} {format_time(s)} s" for name, s in seconds.items() if s or name != "hung_s"]
    if goodput.lost_steps:
        parts.append(f"lost steps {goodput.lost_steps}")
    for what, mean in (("detected", goodput.to_detect), ("recovered", goodput.to_recover)):
        if mean.seconds is not None:
            parts.append(f"{what} within {format_time(mean.seconds)} s")
    return [f"    spent: {', '.join(parts)}"]
