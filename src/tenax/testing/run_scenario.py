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
      ...``: a process survived), ``node a lost: REASON``
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
from collections.abc import Iterator, Mapping

import msgspec

from tenax._core import coordinator as run
from tenax._core import events, messages
from tenax._core.coordinator import (
    AnyCoordinatorEvent,
    CoordinatorMachine,
    CoordinatorState,
    Over,
    RunSettings,
    Send,
)
from tenax._core.ledger import Goodput, Spent
from tenax._core.model import Failure, Stopped
from tenax._core.policy import BudgetPolicy, RestartPolicy
from tenax.testing.run_invariants import RunChecker
from tenax.testing.scenario import (
    ScenarioError,
    describe_verdict,
    evidence,
    format_time,
    parse_settings,
    parse_signal,
    parse_time,
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
    return play_lines(text, _Player({"budget": BudgetPolicy(), **(policies or {})}).take)


class _Player:
    """Runs a script line by line and returns the machine's output."""

    def __init__(self, policies: Mapping[str, RestartPolicy]) -> None:
        self._policies = policies
        self._begin()

    def _begin(self) -> None:
        self._settings = _settings("")
        self._policy = self._policies["budget"]
        self._transcript: _Transcript | None = None

    def take(self, line: str) -> list[str]:
        keyword, _, rest = line.partition(" ")
        match keyword:
            case "scenario":
                self._begin()
                return []
            case "settings" | "policy" if self._transcript is not None:
                raise ScenarioError(f"{keyword} must come before the first event")
            case "settings":
                self._settings = _settings(rest)
                return []
            case "policy":
                if rest not in self._policies:
                    raise ScenarioError(f"there is no policy {rest!r}; there are {', '.join(self._policies)}")
                self._policy = self._policies[rest]
                return []
            case "at":
                if self._transcript is None:
                    self._transcript = _Transcript(self._settings, self._policy)
                return self._transcript.step(rest)
        raise ScenarioError(f"{line!r} is not part of a scenario; write scenario, settings, policy, at, or indent it")


class _Transcript:
    """One coordinator with its checker, and the time."""

    def __init__(self, settings: RunSettings, policy: RestartPolicy) -> None:
        self._settings = settings
        self._policy = policy
        self._state = CoordinatorState(settings)
        self._checker = RunChecker(settings, decides_changes=hasattr(policy, "decide_change"))
        self._nodes: dict[str, _Node] = {}
        self._now = 0.0
        self._is_open = False

    def step(self, text: str) -> list[str]:
        """Step the machine with an event such as ``9 node b failed: rank 3 exited 1``; return its output."""
        when, _, what = text.strip().partition(" ")
        self._now = parse_time(when, self._now)
        what = what.strip()
        if not self._is_open:
            self._is_open = True
            if not what.startswith("opened"):
                self._step(run.Opened())
        before, ledger, deadlines = _encode(self._state), _ledger(self._state), self._state.deadlines
        phases = [self._state.phase.name]
        answers: list[str] = []
        for event in self._events(what):
            answers += [line for send in self._step(event) for line in describe_send(send, self._state)]
            if self._state.phase.name != phases[-1]:
                phases.append(self._state.phase.name)
        state = self._state
        if _ledger(state) != ledger:
            answers.append(f"ledger: {_ledger(state)}")
        if len(phases) > 1:
            answers.append(" -> ".join(phases))
        if state.deadlines != deadlines and not isinstance(state.phase, Over):
            standing = sorted((deadline.value, at) for deadline, at in state.deadlines.items())
            answers.append("deadlines: " + (", ".join(f"{name} {format_time(at)}" for name, at in standing) or "none"))
        return answers or ["ignored" if _decode(before) == state else "noted"]

    def _step(self, event: AnyCoordinatorEvent) -> list[Send]:
        machine = CoordinatorMachine(self._settings, self._policy, _decode(_encode(self._state)))
        step = machine.step(event, self._now)
        self._state = machine.state
        self._checker.check(machine.state, event, step, self._now)
        for send in step.sends:
            if isinstance(send.event, events.GenerationFormed):
                part = send.event.assignment
                for node_id in send.to:
                    self._nodes[node_id].generation = part.generation
                    self._nodes[node_id].first_rank = part.first_global_rank
                    self._nodes[node_id].store = part.store
        return step.sends

    # --- events -------------------------------------------------------------------------------------------------------

    def _events(self, text: str) -> Iterator[AnyCoordinatorEvent]:
        if text == "tick":
            yield run.Tick()
        elif (resumed := _RESUMED.fullmatch(text)) is not None:
            yield run.Resumed(float(resumed["seconds"]))
        elif text.startswith("cancel: "):
            yield run.CancelRequested(text.removeprefix("cancel: "))
        elif (requested := _REQUESTED.fullmatch(text)) is not None:
            name, why = requested["name"], requested["why"]
            yield run.DrainRequested(name, why) if name else run.RestartRequested(why)
        elif (opened := _OPENED.fullmatch(text)) is not None:
            given = opened.groupdict(default="")
            rank, generation, used = int(given["rank"] or -1), int(given["generation"] or 0), int(given["used"] or 0)
            yield run.Opened(float(given["recover"] or 0), rank, generation, used)
        elif (of_node := _OF_NODE.fullmatch(text)) is not None:
            for name in of_node["names"].split(", "):
                yield from self._node_events(name, int(of_node["generation"] or -1), of_node["what"])
        else:
            raise _unknown_event(text)

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
        yield run.Received(name, node.message(what, node.generation if generation < 0 else generation, self._now))


class _Node:
    """A node of the script: its identity, its clock, and its last generation."""

    def __init__(self, name: str, settings: RunSettings, before: _Node | None, how: str) -> None:
        self.generation: int = before.generation if before else 0
        self.first_rank: int = before.first_rank if before else 0
        self.clock_ahead_s: float = before.clock_ahead_s if before else 0.0
        self.store: str = before.store if before else ""
        info: dict[str, str | int] = {"node_id": name, "host": name}
        info |= {"min_nodes": settings.min_nodes, "max_nodes": settings.max_nodes}
        work: dict[str, int | bool | str] = {}
        for clause in how.strip(", ").split(", ") if how.strip(", ") else []:
            self._take(clause, info, work)
        self.joined = messages.NodeJoined(msgspec.convert(info, messages.NodeInfo), **work)  # type: ignore[arg-type]
        self.generation = max(self.generation, self.joined.generation)

    def _take(self, clause: str, info: dict[str, str | int], work: dict[str, int | bool | str]) -> None:
        matched = _matching(_CLAUSES, clause)
        if matched is None:
            raise ScenarioError(f"{clause!r} does not describe a node; see the top of tenax.testing.run_scenario")
        kind, found = matched
        match kind:
            case "slots" | "rank":
                info[kind] = int(found["value"])
            case "host" | "name" | "order" | "role":
                info[kind] = found["value"]
            case "span":
                info["min_nodes"], info["max_nodes"] = int(found["least"]), int(found["most"] or found["least"])
            case "clock":
                self.clock_ahead_s = float(found["value"]) * (1 if found["way"] == "ahead" else -1)
            case "restarts":
                work["restarts_used"] = int(found["value"])
            case "store":
                work["store"] = found["value"]
            case "work":
                work["generation"] = int(found["generation"])
                work.setdefault("store", self.store)
                work["is_running"], work["has_succeeded"] = found["how"] == "running", found["how"] == "done with"
                if found["rank"]:
                    work["group_rank"], work["group_world_size"] = int(found["rank"]), int(found["size"])

    def message(self, what: str, generation: int, now: float) -> messages.FromNode:
        matched = _matching(_MESSAGES, what)
        if matched is None:
            raise _unknown_event(what)
        kind, fields = matched
        match kind:
            case "ready":
                port = int(fields["port"] or 0)
                held = int(fields["held"] or 0)
                return messages.NodeReady(generation, fields["host"], port, bool(fields["agent"]), held=held)
            case "running":
                pids = range(100 * generation, 100 * generation + self.joined.node.slots)
                return messages.WorkersRunning(generation, tuple(pids), int(fields["survivors"] or 0))
            case "step":
                return self._progress(fields, generation, now)
            case "failed":
                failure = self._failure(fields["failure"], generation, now)
                return messages.FailureSeen(generation, failure, now + self.clock_ahead_s)
            case "stopped":
                return self._stopped(fields["ends"], bool(fields["cut_off"]), generation, now)
            case "succeeded":
                return messages.NodeSucceeded(generation)
            case "quiet":
                ahead = self.clock_ahead_s
                return messages.NodeQuiet(generation, now + ahead, float(fields["since"]) + ahead, fields["why"])
            case "busy":
                return messages.NodeBusy(generation, fields["activity"])
            case "stacks":
                return self._stacks(fields, generation)
            case "draining":
                return messages.NodeDraining(generation, float(fields["grace"]), fields["why"])
            case "will leave":
                return messages.NodeWillLeave(
                    generation, fields["why"], float(fields["soon"]) if fields["soon"] else None
                )
        return messages.NodeLeft(fields["why"], is_clear=not fields["stuck"])

    def _progress(self, fields: _Fields, generation: int, now: float) -> messages.NodeProgress:
        """Report the progress of the first worker."""
        since, until = float(fields["since"] or now), float(fields["until"] or now)
        first, last = int(fields["first"] or fields["last"]), int(fields["last"])
        ahead = self.clock_ahead_s
        return messages.NodeProgress(
            generation, now + ahead, (messages.WorkerProgress(0, first, last, since + ahead, until + ahead),)
        )

    def _stacks(self, fields: _Fields, generation: int) -> messages.StacksTaken:
        locations = []
        for each in fields["locations"].split("; "):
            at = re.fullmatch(r"rank (\d+) (?:in (\w+)|not known, (.+))", each)
            if at is None:
                raise ScenarioError(
                    f"{each!r} is not a location; write 'rank 1 in FUNCTION' or 'rank 1 not known, WHY'"
                )
            rank, frames = int(at[1]), (f"train.py:1 in {at[2]}",) if at[2] else ()
            pid, stacks = 100 * generation + rank, "its stacks" if frames else ""
            local_rank = rank - self.first_rank
            locations.append(messages.StackLocation((rank,), frames, (), stacks, at[3] or "", local_rank, pid))
        return messages.StacksTaken(generation, int(fields["number"]), tuple(locations))

    def _stopped(self, ends: str, was_cut_off: bool, generation: int, now: float) -> messages.NodeStopped:
        failures: list[Failure] = []
        stopped: list[Stopped] = []
        held: list[int] = []
        for end in ends.split("; ") if ends else []:
            other = re.fullmatch(r"rank (\d+) (stopped|held)", end)
            if other is None:
                failures.append(self._failure(end, generation, now))
            elif other[2] == "held":
                held.append(int(other[1]))
            else:
                rank = int(other[1])
                stopped.append(Stopped(rank - self.first_rank, rank, 100 * generation + rank, -_SIGTERM))
        sent_at = now + self.clock_ahead_s
        return messages.NodeStopped(generation, sent_at, tuple(failures), tuple(stopped), was_cut_off, tuple(held))

    def _failure(self, text: str, generation: int, now: float) -> Failure:
        """Parse a failure, with its times on the node's clock."""
        fields = _FAILURE.fullmatch(text)
        if fields is None:
            raise ScenarioError(f"{text!r} is not a failure; write 'rank 1 exited 3' or 'rank 1 killed by SIGSEGV'")
        rank = int(fields["rank"])
        exit_code = -parse_signal(fields["signal"]) if fields["signal"] else int(fields["code"])
        seen_at = float(fields["seen_at"]) if fields["seen_at"] else now
        raised_at = float(fields["raised_at"]) if fields["raised_at"] else None
        found = evidence(fields["message"] or "", raised_at)
        local_rank, pid = rank - self.first_rank, 100 * generation + rank
        failure = Failure(generation, local_rank, rank, pid, exit_code, seen_at, evidence=found)
        return failure.shifted(self.clock_ahead_s)


_Fields = dict[str, str]  # the named groups of a match; "" if a group is absent

_NAME = r"[\w.-]+"
_NUMBER = r"[\d.]+"
_OPENED = re.compile(
    rf"opened(?:, recover (?P<recover>{_NUMBER}) s)?(?:, dead rank (?P<rank>\d+))?"
    r"(?:, generation (?P<generation>\d+))?(?:, restarts used (?P<used>\d+))?"
)
_RESUMED = re.compile(rf"resumed after (?P<seconds>{_NUMBER}) s")
_REQUESTED = re.compile(rf"(?:restart|drain (?P<name>{_NAME})) requested: (?P<why>.+)")
_OF_NODE = re.compile(rf"nodes? (?P<names>{_NAME}(?:, {_NAME})*)(?: of generation (?P<generation>\d+))? (?P<what>.+)")
_SHORT = re.compile(r"(?:up(?P<how>.*)|(?P<first>stopped) and ready)")
_FAILURE = re.compile(
    r"rank (?P<rank>\d+) (?:exited (?P<code>\d+)|killed by (?P<signal>SIG\w+))"
    rf"(?:, seen at (?P<seen_at>{_NUMBER}))?(?:, raised at (?P<raised_at>{_NUMBER}))?(?:, (?P<message>.+))?"
)
_CLAUSES = {
    "slots": r"with (?P<value>\d+) slots?",
    "rank": r"asking for rank (?P<value>\d+)",
    "host": rf"on (?P<value>{_NAME})",
    "name": rf"named (?P<value>{_NAME})",
    "order": r"order (?P<value>\S+)",
    "role": rf"role (?P<value>{_NAME})",
    "span": r"for (?P<least>\d+)(?: to (?P<most>\d+))? nodes?",
    "clock": rf"clock (?P<value>{_NUMBER}) (?P<way>ahead|behind)",
    "restarts": r"restarts used (?P<value>\d+)",
    "store": r"with its store at (?P<value>\S+)",
    "work": r"(?P<how>running|done with|after) generation (?P<generation>\d+)(?: as (?P<rank>\d+) of (?P<size>\d+))?",
}
_MESSAGES = {
    "ready": rf"ready(?:, store at (?P<host>{_NAME}):(?P<port>\d+))?(?P<agent>, served by the agent)?"
    r"(?:, (?P<held>\d+) held)?",
    "running": r"running(?:, (?P<survivors>\d+) survived)?",
    "step": rf"at step(?:s (?P<first>\d+) to)? (?P<last>\d+)(?:, since (?P<since>{_NUMBER}))?"
    rf"(?:, until (?P<until>{_NUMBER}))?",
    "failed": r"failed: (?P<failure>.+)",
    "stopped": r"stopped(?P<cut_off>, cut off)?(?:: (?P<ends>.+))?",
    "succeeded": r"succeeded",
    "quiet": rf"quiet since (?P<since>{_NUMBER}): (?P<why>.+)",
    "busy": r"busy: (?P<activity>.+)",
    "stacks": r"sent stacks, suspicion (?P<number>\d+): (?P<locations>.+)",
    "draining": rf"draining, grace (?P<grace>{_NUMBER}): (?P<why>.+)",
    "will leave": rf"will leave(?:, in (?P<soon>{_NUMBER}) s)?: (?P<why>.+)",
    "left": r"left(?P<stuck>, not clear)?: (?P<why>.+)",
}


def _matching(grammar: Mapping[str, str], text: str) -> tuple[str, _Fields] | None:
    for kind, pattern in grammar.items():
        match = re.fullmatch(pattern, text)
        if match is not None:
            return kind, match.groupdict(default="")
    return None


def _unknown_event(text: str) -> ScenarioError:
    return ScenarioError(f"{text!r} is not an event; the events are listed at the top of tenax.testing.run_scenario")


def _settings(text: str) -> RunSettings:
    given = {"run_id": "run"}
    for name, value in parse_settings(text).items():
        if name == "nodes":
            minimum, _, maximum = value.partition(":")
            given |= {"min_nodes": minimum, "max_nodes": maximum or minimum}
        else:
            given[name] = value
    try:
        return msgspec.convert(given, RunSettings, strict=False)
    except msgspec.ValidationError as error:
        raise ScenarioError(f"{error}; the settings are nodes, {', '.join(RunSettings.__struct_fields__)}") from None


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
    seconds = {name: getattr(goodput.spent, name) for name in _SPENT}
    parts = [f"{name.removesuffix('_s')} {format_time(s)} s" for name, s in seconds.items() if s or name != "hung_s"]
    if goodput.lost_steps:
        parts.append(f"lost steps {goodput.lost_steps}")
    for what, mean in (("detected", goodput.to_detect), ("recovered", goodput.to_recover)):
        if mean.seconds is not None:
            parts.append(f"{what} within {format_time(mean.seconds)} s")
    return [f"    spent: {', '.join(parts)}"]


_SPENT = Spent.__struct_fields__


def _ledger(state: CoordinatorState) -> str:
    changes, drains = state.membership_changes, state.drains
    requests = f", requests {state.requests}" if state.requests else ""
    return f"restarts {state.restarts_used}, membership changes {changes}, drains {drains}{requests}"
