"""Scenario files: readable transcripts of the agent machine that tests replay.

A scenario is text: events with their times, and indented below each event the machine's output. ``play_scenario`` runs
the events and returns the same text with the current output, so a test is ``play_scenario(text) == text``, a change of
behaviour is a diff, and writing the result back accepts it. (``tenax.testing.run_scenario`` does the same for the
coordinator machine.)

    scenario one worker fails, the other is stopped, and the node is ready for the next generation
    settings workers=2

    at 0 generation 1 up
        send ready
        start generation 1, restarts used 0
        new -> joining -> running
    at 5 worker 1 exited 3
        examine worker 1 of generation 1, pid 101: exited 3
        send failure of rank 1 (pid 101): exited 3
        signal generation 1 with SIGTERM: rank 1 failed
        running -> stopping
        deadlines: examine 7, grace 35

Lines that are not indented are the script; blank lines and lines that begin with ``#`` are comments.

``scenario TITLE``
    Starts a scenario with a new machine. A file may contain several.
``settings NAME=VALUE ...``
    Fields of ``AgentSettings``; ``workers`` is short for ``local_world_size``. Default: one worker.
``at TIME EVENT``
    One event. Times are seconds and never decrease. The events:

    - ``run requested``
    - ``generation 1 formed`` (``..., ranks from 4``) (``..., restarts used 2``), ``generation 1 ended: REASON``
      (``... ended, late: REASON``: the next generation is running already; ``... ended, stops: REASON``: held workers
      stop as well; ``... ended, rank 1 hung: REASON``: that worker is not held)
    - ``run ended: OUTCOME, WHY`` (``run ended, sent at TIME: ...``: with that time on the coordinator's clock).
      The verdict names the failures that this node sent or, if there are none and the outcome is ``failed``, one of
      another node.
    - ``join refused: REASON``, ``waiting: TEXT``, ``fenced: WHY``
    - ``leave requested: WHY``: an operator drains this node
    - ``leave noticed from HOST: WHY`` and ``notice: WHY``; ``, in 120 s`` may precede the colon
    - ``worker 0 opted in`` (``..., timeout 3 s``; default 5 s), ``worker 0 held`` (``... at step 9``),
      ``worker 0 opted out: WHY``; ``workers opted in`` is short for all of them
    - ``worker 0 started as PID``, ``worker 0 not started, EXITCODE: REASON``
    - ``worker 0 exited EXITCODE`` (``...: FAULT``), ``worker 0 killed by SIGNAL``; the colon may be preceded by
      ``, before the stop`` (the stop request had not reached it) and ``, error written`` (it left an error file)
    - ``worker 0 raised``: it is being stopped, and has written an uncaught exception to its error file
    - ``worker 0 examined`` (``..., raised at TIME``) (``..., with stacks``) (``...: MESSAGE``)
    - ``worker 0 did not leave SCOPE within SECONDS s, SIGNAL`` (without a signal: it is only reported), and
      ``worker 0 refused its stacks: WHY``
    - ``worker 0 at step 9`` (``worker 0 at steps 3 to 9``) (``..., in PHASE``): the progress it reported
    - ``quiet since TIME: WHY`` (``..., worker 0 is stopped: WHY``), ``movement``, ``hang found``, ``hang over``,
      ``stacks requested, suspicion 1: WHY``, ``stacks read, suspicion 1: worker 0 in FUNCTION; worker 1 in FUNCTION``
    - ``node cleared`` (``..., workers 0, 1 held``), ``signal SIGNAL`` (``..., grace SECONDS``), ``keeper lost:
      REASON``, ``tick``

    Events about a worker or the node are about the current generation unless ``of generation 1`` follows ``worker 0``,
    ``node cleared``, ``fenced`` or ``leave noticed``. ``generation 1 up`` is short for a normal start: the run is
    requested if it was not yet, the generation is formed, and each worker starts, rank 1 of generation 2 as process
    201; a survivor keeps its process.

The output is the commands, one per line (``send ...`` is a message to the coordinator), then what changed: the phase
and the deadlines. ``noted`` means that only other state changed, ``ignored`` that nothing changed. The machine's
invariants are checked after every step (``tenax.testing.agent_invariants``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from signal import Signals

import msgspec

from tenax._core import commands, events, messages
from tenax._core.agent import AgentMachine, AgentState, Phase, stopped_workers
from tenax._core.commands import AnyCommand
from tenax._core.events import AnyEvent
from tenax._core.model import AgentSettings, Assignment, Evidence, Failure, Outcome, Stopped, Verdict, by_cause
from tenax.testing.agent_invariants import InvariantBroken, InvariantChecker

__all__ = [
    "Scenario",
    "ScenarioError",
    "describe_command",
    "parse_event",
    "play_lines",
    "play_scenario",
    "split_scenarios",
]

_INDENT = "    "
_HOLD_S = 5.0


class ScenarioError(ValueError):
    """A line of a scenario is not valid."""


class Scenario(msgspec.Struct, frozen=True):
    """One scenario of a file. The joined texts of all scenarios are the file."""

    title: str
    text: str


def split_scenarios(text: str) -> list[Scenario]:
    """Return the scenarios of a file, in order. Text before the first one belongs to it."""
    starts = [match.start() for match in re.finditer(r"^scenario ", text, re.MULTILINE)]
    if not starts:
        raise ScenarioError("there is no scenario here; start one with a line 'scenario TITLE'")
    edges = [0, *starts[1:], len(text)]
    return [
        Scenario(text[start:].split("\n", 1)[0].removeprefix("scenario ").strip(), text[begin:end])
        for start, begin, end in zip(starts, edges[:-1], edges[1:], strict=True)
    ]


def play_lines(text: str, take: Callable[[str], list[str]]) -> str:
    """Return the script in ``text`` with each line followed by the output of ``take``; old output is dropped."""
    lines: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith((" ", "\t")):
            continue  # old output
        lines.append(line)
        if not line or line.startswith("#"):
            continue
        try:
            lines.extend(_INDENT + answer for answer in take(line.strip()))
        except (ScenarioError, InvariantBroken) as error:
            raise type(error)(f"line {number}: {error}") from error
    return "\n".join(lines) + "\n"


def play_scenario(text: str) -> str:
    """Run every scenario of ``text``; return it with the machine's current output."""
    return play_lines(text, _Player().take)


class _Player:
    """Runs a script line by line and returns the machine's output."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._settings = _settings("")
        self._transcript: _Transcript | None = None

    def take(self, line: str) -> list[str]:
        keyword, _, rest = line.partition(" ")
        match keyword:
            case "scenario":
                self._begin()
                return []
            case "settings" if self._transcript is not None:
                raise ScenarioError("settings must come before the first event")
            case "settings":
                self._settings = _settings(rest)
                return []
            case "at":
                if self._transcript is None:
                    self._transcript = _Transcript(AgentMachine(self._settings))
                return self._transcript.step(rest)
        raise ScenarioError(f"{line!r} is not part of a scenario; write scenario, settings, at, or indent it")


class _Transcript:
    """One machine with its checker, and the time."""

    def __init__(self, machine: AgentMachine) -> None:
        self._machine = machine
        self._checker = InvariantChecker(machine.state)
        self._now = 0.0

    def step(self, text: str) -> list[str]:
        """Step the machine with an event such as ``5 worker 1 exited 3``; return its output."""
        when, _, what = text.strip().partition(" ")
        now = self._now = parse_time(when, self._now)
        state = self._machine.state
        before = msgspec.json.encode(state)
        deadlines = dict(state.deadlines)
        phases = [state.phase]
        answers: list[str] = []
        for event in self._events(what.strip()):
            issued = self._machine.step(event, now)
            self._checker.check(state, event, issued)
            for command in issued:
                answers.extend(describe_command(command))
            if state.phase is not phases[-1]:
                phases.append(state.phase)
        if len(phases) > 1:
            answers.append(" -> ".join(phase.value for phase in phases))
        if state.deadlines != deadlines and state.phase is not Phase.ENDED:
            standing = sorted((deadline.value, at) for deadline, at in state.deadlines.items())
            answers.append("deadlines: " + (", ".join(f"{name} {format_time(at)}" for name, at in standing) or "none"))
        return answers or ["ignored" if msgspec.json.encode(state) == before else "noted"]

    def _events(self, text: str) -> Iterator[AnyEvent]:
        state = self._machine.state
        if (over := _RUN_ENDED.fullmatch(text)) is not None:
            yield _run_ended(over["outcome"], over["why"], over["sent_at"], self._now, state)
            return
        if text == "workers opted in":
            yield from (events.WorkerOptedIn(state.generation, rank, _HOLD_S) for rank in state.workers)
            return
        short = re.fullmatch(rf"generation (?P<formed>\d+) up{_RESTARTS}", text)
        if short is None:
            yield parse_event(text, state.generation, state.settings.local_world_size)
            return
        if state.phase is Phase.NEW:
            yield events.RunRequested()
        pids = {rank: state.workers[rank].pid for rank in state.last.held()}
        generation, count = int(short["formed"]), state.settings.local_world_size
        yield events.GenerationFormed(_assignment(generation, 0, count, int(short["restarts"] or 0)))
        for rank in range(count):
            yield events.WorkerStarted(generation, rank, pids.get(rank, 100 * generation + rank))


def parse_time(text: str, now: float) -> float:
    """Parse the time after ``at``, which must not be before ``now``."""
    try:
        time = float(text)
    except ValueError:
        raise ScenarioError(f"{text!r} is not a time; write 'at SECONDS EVENT'") from None
    if time < now:
        raise ScenarioError(f"time went back from {now:g} to {time:g}")
    return time


# --- events -----------------------------------------------------------------------------------------------------------


def parse_event(text: str, generation: int = 1, local_world_size: int = 1) -> AnyEvent:
    """Parse an event of a scenario. ``generation`` applies if the text names none.

    ``run ended`` is not supported, because it depends on the messages before it.
    """
    for pattern, build in _GRAMMAR:
        match = pattern.fullmatch(text)
        if match is not None:
            fields = match.groupdict(default="")
            fields["generation"] = fields.get("generation") or str(generation)
            fields["workers"] = str(local_world_size)
            return build(fields)
    raise ScenarioError(f"{text!r} is not an event; the events are listed at the top of tenax.testing.scenario")


_Fields = dict[str, str]  # the named groups of a match; "" if a group is absent


def _formed(fields: _Fields) -> AnyEvent:
    first, restarts = int(fields["first"] or 0), int(fields["restarts"] or 0)
    return events.GenerationFormed(_assignment(int(fields["formed"]), first, int(fields["workers"]), restarts))


def _assignment(generation: int, first_global_rank: int, local_world_size: int, restarts_used: int) -> Assignment:
    world_size = first_global_rank + local_world_size
    return Assignment(
        generation,
        first_global_rank=first_global_rank,
        world_size=world_size,
        first_role_rank=first_global_rank,
        role_world_size=world_size,
        restarts_used=restarts_used,
    )


def _run_ended(outcome: str, why: str, sent_at: str | None, now: float, state: AgentState) -> AnyEvent:
    """Return what a coordinator would send that received only this node's messages."""
    if outcome not in {each.value for each in Outcome}:
        known = ", ".join(each.value for each in Outcome)
        raise ScenarioError(f"{outcome!r} is not an outcome; the outcomes are {known}")
    failures, stopped = sorted(state.failures, key=by_cause), stopped_workers(state)
    if outcome == Outcome.SUCCEEDED.value:
        failures, stopped = [], ()
    elif outcome == Outcome.FAILED.value and not failures:
        rank = state.settings.local_world_size  # the first rank of another node
        failures = [Failure(state.generation, 0, rank, 900, 1, now, host="elsewhere")]
    clock = now if sent_at is None else float(sent_at)
    verdict = Verdict(
        outcome=Outcome(outcome),
        why=why,
        failures=tuple(failure.shifted(clock - now) for failure in failures),
        stopped=stopped,
        restarts_used=state.restarts_used,
        generation=state.generation,
    )
    return events.RunEnded(verdict, clock)


def _started(fields: _Fields) -> AnyEvent:
    return events.WorkerStarted(int(fields["generation"]), int(fields["rank"]), int(fields["pid"]))


def _opted_in(fields: _Fields) -> AnyEvent:
    timeout_s = float(fields["timeout_s"]) if fields["timeout_s"] else _HOLD_S
    return events.WorkerOptedIn(int(fields["generation"]), int(fields["rank"]), timeout_s)


def _at_step(fields: _Fields) -> AnyEvent:
    rank, first, last = int(fields["rank"]), int(fields["first"] or fields["last"]), int(fields["last"])
    progress = messages.WorkerProgress(rank, first, last, 1.0, 2.0, fields["phase"])
    return events.ProgressSeen(int(fields["generation"]), (progress,))


def _not_started(fields: _Fields) -> AnyEvent:
    return events.WorkerStartFailed(
        int(fields["generation"]), int(fields["rank"]), fields["reason"], int(fields["code"])
    )


def _exited(fields: _Fields) -> AnyEvent:
    return _ended(fields, int(fields["code"]), fields["fault"])


def _killed(fields: _Fields) -> AnyEvent:
    return _ended(fields, -parse_signal(fields["signal"]), "")


def _ended(fields: _Fields, exit_code: int, fault: str) -> AnyEvent:
    before_stop, wrote_error = bool(fields["before_stop"]), bool(fields["wrote_error"])
    return events.WorkerExited(
        int(fields["generation"]), int(fields["rank"]), exit_code, fault, before_stop, wrote_error
    )


def _examined(fields: _Fields) -> AnyEvent:
    raised_at = float(fields["raised_at"]) if fields["raised_at"] else None
    found = evidence(fields["message"], raised_at)
    if fields["stacks"]:
        found = msgspec.structs.replace(found, stacks="Current thread (most recent call first): ...")
    return events.FailureExamined(int(fields["generation"]), int(fields["rank"]), found)


def _late(fields: _Fields) -> AnyEvent:
    generation, rank, after_s = int(fields["generation"]), int(fields["rank"]), float(fields["after_s"])
    signal = parse_signal(fields["signal"]) if fields["signal"] else 0
    pid = 100 * generation + rank  # as after ``generation 1 up``
    return events.ScopeExpired(generation, rank, pid, fields["scope"], after_s, 1e9, signal)


def _quiet(fields: _Fields) -> AnyEvent:
    stopped = (int(fields["stopped"]),) if fields["stopped"] else ()
    return events.QuietSeen(int(fields["generation"]), float(fields["since"]), fields["why"], stopped)


def _stacks_read(fields: _Fields) -> AnyEvent:
    workers = []
    for each in fields["workers_at"].split("; "):
        at = re.fullmatch(r"worker (\d+) in (\w+)", each)
        if at is None:
            raise ScenarioError(f"{each!r} does not describe stacks; write 'worker 0 in FUNCTION'")
        dump = f'Current thread 0x1 (most recent call first):\n  File "train.py", line 1 in {at[2]}'
        workers.append(events.WorkerStacks(int(at[1]), dump))
    return events.StacksRead(int(fields["generation"]), int(fields["number"]), tuple(workers))


def _hang(generation: int) -> messages.HangReport:
    return messages.HangReport(generation, nodes=1, workers=1, quiet_s=60.0, why="no step", locations=())


def evidence(message: str, raised_at: float | None) -> Evidence:
    """Return evidence with a message such as ``RuntimeError: boom``."""
    return Evidence(
        error_type=message.partition(":")[0] if ":" in message else "", message=message, raised_at=raised_at
    )


def _signalled(fields: _Fields) -> AnyEvent:
    return events.SignalReceived(parse_signal(fields["signal"]), _seconds(fields["grace_s"]))


def _noticed(fields: _Fields) -> AnyEvent:
    return events.LeaveNoticed(int(fields["generation"]), fields["host"], fields["why"], _seconds(fields["in_s"]))


def _seconds(fields: str) -> float | None:
    return float(fields) if fields else None


_OF = r"(?: of generation (?P<generation>\d+))?"
_WORKER = rf"worker (?P<rank>\d+){_OF}"
_HOW = r"(?P<before_stop>, before the stop)?(?P<wrote_error>, error written)?"
_IN = r"(?:, in (?P<in_s>[\d.]+) s)?"
_RESTARTS = r"(?:, restarts used (?P<restarts>\d+))?"
_RUN_ENDED = re.compile(r"run ended(?:, sent at (?P<sent_at>[\d.]+))?: (?P<outcome>\w+), (?P<why>.+)")

_GRAMMAR: tuple[tuple[re.Pattern[str], Callable[[_Fields], AnyEvent]], ...] = tuple(
    (re.compile(pattern), build)
    for pattern, build in (
        (r"run requested", lambda _: events.RunRequested()),
        (rf"generation (?P<formed>\d+) formed(?:, ranks from (?P<first>\d+))?{_RESTARTS}", _formed),
        (
            r"generation (?P<generation>\d+) ended(?P<late>, late)?(?P<stops>, stops)?"
            r"(?:, rank (?P<hung>\d+) hung)?: (?P<why>.+)",
            lambda fields: events.GenerationEnded(
                int(fields["generation"]),
                fields["why"],
                bool(fields["late"]),
                stops=bool(fields["stops"]),
                hung=int(fields["hung"]) if fields["hung"] else None,
            ),
        ),
        (r"join refused: (?P<reason>.+)", lambda fields: events.JoinRefused(fields["reason"])),
        (r"leave requested: (?P<why>.+)", lambda fields: events.LeaveRequested(fields["why"])),
        (r"waiting: (?P<why>.+)", lambda fields: events.Waiting(fields["why"])),
        (rf"fenced{_OF}: (?P<why>.+)", lambda fields: events.Fenced(int(fields["generation"]), fields["why"])),
        (rf"leave noticed{_OF} from (?P<host>[^\s,:]+){_IN}: (?P<why>.+)", _noticed),
        (rf"notice{_IN}: (?P<why>.+)", lambda fields: events.NoticeReceived(fields["why"], _seconds(fields["in_s"]))),
        (rf"{_WORKER} at step(?:s (?P<first>\d+) to)? (?P<last>\d+)(?:, in (?P<phase>.+))?", _at_step),
        (rf"{_WORKER} started as (?P<pid>\d+)", _started),
        (rf"{_WORKER} opted in(?:, timeout (?P<timeout_s>[\d.]+) s)?", _opted_in),
        (
            rf"{_WORKER} opted out: (?P<why>.+)",
            lambda fields: events.WorkerOptedOut(int(fields["generation"]), int(fields["rank"]), fields["why"]),
        ),
        (
            rf"{_WORKER} held(?: at step (?P<step>\d+))?",
            lambda fields: events.WorkerHeld(int(fields["generation"]), int(fields["rank"]), int(fields["step"] or -1)),
        ),
        (rf"{_WORKER} not started, (?P<code>\d+): (?P<reason>.+)", _not_started),
        (rf"{_WORKER} exited (?P<code>\d+){_HOW}(?:: (?P<fault>.+))?", _exited),
        (rf"{_WORKER} killed by (?P<signal>SIG\w+){_HOW}", _killed),
        (
            rf"{_WORKER} raised",
            lambda fields: events.WorkerRaised(int(fields["generation"]), int(fields["rank"])),
        ),
        (
            rf"{_WORKER} examined(?:, raised at (?P<raised_at>[\d.]+))?(?P<stacks>, with stacks)?"
            r"(?:: (?P<message>.+))?",
            _examined,
        ),
        (
            rf"{_WORKER} did not leave (?P<scope>\S+) within (?P<after_s>[\d.]+) s(?:, (?P<signal>SIG\w+))?",
            _late,
        ),
        (
            rf"{_WORKER} refused its stacks: (?P<why>.+)",
            lambda fields: events.StacksRefused(int(fields["generation"]), int(fields["rank"]), fields["why"]),
        ),
        (
            rf"quiet{_OF} since (?P<since>[\d.]+)(?:, worker (?P<stopped>\d+) is stopped)?: (?P<why>.+)",
            _quiet,
        ),
        (
            rf"movement{_OF}: worker (?P<worker>\d+) (?P<what>.+)",
            lambda fields: events.MovementSeen(int(fields["generation"]), int(fields["worker"]), fields["what"]),
        ),
        (
            rf"stacks requested{_OF}, suspicion (?P<number>\d+): (?P<why>.+)",
            lambda fields: events.StacksRequested(int(fields["generation"]), int(fields["number"]), fields["why"]),
        ),
        (rf"stacks read{_OF}, suspicion (?P<number>\d+): (?P<workers_at>.+)", _stacks_read),
        (
            rf"hang found{_OF}",
            lambda fields: events.HangFound(int(fields["generation"]), _hang(int(fields["generation"]))),
        ),
        (
            rf"hang over{_OF}: (?P<why>.+)",
            lambda fields: events.HangOver(int(fields["generation"]), fields["why"]),
        ),
        (
            rf"node cleared{_OF}(?:, workers? (?P<held>[\d, and]+) held)?",
            lambda fields: events.NodeCleared(
                int(fields["generation"]), tuple(int(rank) for rank in re.findall(r"\d+", fields["held"]))
            ),
        ),
        (r"signal (?P<signal>SIG\w+)(?:, grace (?P<grace_s>[\d.]+))?", _signalled),
        (r"keeper lost: (?P<reason>.+)", lambda fields: events.KeeperLost(fields["reason"])),
        (r"tick", lambda _: events.Tick()),
    )
)


def parse_signal(name: str) -> int:
    """Return the number of a signal such as ``SIGTERM``."""
    if name not in Signals.__members__:
        raise ScenarioError(f"this system has no signal {name}")
    return Signals[name].value


def parse_settings(text: str) -> dict[str, str]:
    """Parse ``workers=2 grace_s=1`` into names and values."""
    settings: dict[str, str] = {}
    for pair in text.split():
        name, equals, value = pair.partition("=")
        if not equals:
            raise ScenarioError(f"{pair!r} is not a setting; write NAME=VALUE")
        settings[name] = value
    return settings


def _settings(text: str) -> AgentSettings:
    given = {"run_id": "run", "role": "trainer", "local_world_size": "1", "max_restarts": "0"}
    given |= {"local_world_size" if name == "workers" else name: value for name, value in parse_settings(text).items()}
    try:
        return msgspec.convert(given, AgentSettings, strict=False)
    except msgspec.ValidationError as error:
        raise ScenarioError(
            f"{error}; the settings are workers, {', '.join(AgentSettings.__struct_fields__)}"
        ) from None


# --- output -----------------------------------------------------------------------------------------------------------


def describe_command(command: AnyCommand) -> list[str]:
    """Describe a command in one line, and a verdict in more, indented ones."""
    match command:
        case commands.SendMessage(message):
            return list(_describe_message(message))
        case commands.StartWorkers(assignment, survivors):
            start = f"start generation {assignment.generation}, restarts used {assignment.restarts_used}"
            return [start + (f", {_workers(survivors)} {_continue(survivors)}" if survivors else "")]
        case commands.HoldWorkers(generation=generation, local_ranks=local_ranks, why=why):
            return [f"hold {_workers(local_ranks)} of generation {generation}: {why}"]
        case commands.StopWorker(generation=generation, local_rank=local_rank, pid=pid, signal=signal, why=why):
            worker = f"worker {local_rank} of generation {generation}, pid {pid}"
            return [f"stop {worker}, with {Signals(signal).name}: {why}"]
        case commands.ExamineFailure(generation=generation, local_rank=local_rank, pid=pid, exit_code=exit_code):
            return [f"examine worker {local_rank} of generation {generation}, pid {pid}: {format_exit(exit_code)}"]
        case commands.SignalWorkers(generation=generation, signal=signal, why=why):
            return [f"signal generation {generation} with {Signals(signal).name}: {why}"]
        case commands.DumpStacks(generation=generation, local_rank=local_rank):
            return [f"dump the stacks of worker {local_rank} of generation {generation}"]
        case commands.ReadStacks(generation=generation, local_ranks=local_ranks):
            return [f"read the stacks of {_workers(local_ranks)} of generation {generation}"]
        case commands.ReportHang(generation=generation):
            return [f"report the hang of generation {generation}"]
        case commands.ReportMovement(generation=generation, why=why):
            return [f"report that generation {generation} is active again: {why}"]
        case commands.EndWorker(generation=generation, local_rank=local_rank, pid=pid, signal=signal, why=why):
            worker = f"worker {local_rank} of generation {generation}, pid {pid}"
            return [f"end {worker}, with {Signals(signal).name}: {why}"]
        case commands.ClearNode(generation=generation, held=held):
            return [f"clear generation {generation}{f', {_workers(held)} held' if held else ''}"]
        case commands.KillNode(generation=generation, why=why):
            return [f"kill generation {generation}: {why}"]
        case commands.ForwardNotice(host=host, why=why, in_s=in_s):
            return [f"forward notice{f' from {host}' if host else ''}{_soon(in_s)}: {why}"]
        case commands.Finish(verdict=verdict):
            return [f"finish: {verdict.outcome.value}, {verdict.why}", *describe_verdict(verdict)]


def _workers(local_ranks: tuple[int, ...]) -> str:
    return f"{'worker' if len(local_ranks) == 1 else 'workers'} {', '.join(map(str, local_ranks))}"


def _continue(local_ranks: tuple[int, ...]) -> str:
    return "continues" if len(local_ranks) == 1 else "continue"


def _describe_message(message: messages.FromNode) -> Iterator[str]:
    match message:
        case messages.NodeReady(generation, held=held):
            ready = f"send ready after generation {generation}" if generation else "send ready"
            yield ready + (f", {held} held" if held else "")
        case messages.WorkersRunning(_, pids, survivors):
            yield f"send running: {', '.join(map(str, pids))}{f', {survivors} survived' if survivors else ''}"
        case messages.NodeProgress(_, _, workers):
            for each in workers:
                steps = f"steps {each.first_step} to {each.last_step}"
                yield f"send progress of worker {each.local_rank}: {steps}{f', in {each.phase}' if each.phase else ''}"
        case messages.FailureSeen(_, failure):
            yield f"send failure of rank {failure.global_rank} (pid {failure.pid}): {format_exit(failure.exit_code)}"
        case messages.NodeStopped(_, _, failures, stopped, was_cut_off, held):
            ranks = f", ranks {', '.join(map(str, held))} held" if held else ""
            yield f"send stopped{', cut off' if was_cut_off else ''}{ranks}"
            yield from describe_failures(failures, stopped)
        case messages.NodeSucceeded():
            yield "send succeeded"
        case messages.NodeQuiet(_, _, since, why):
            yield f"send quiet since {since:g}: {why}"
        case messages.NodeBusy(_, why):
            yield f"send busy: {why}"
        case messages.StacksTaken(_, _, locations):
            yield "send stacks"
            for location in locations:
                yield f"{_INDENT}ranks {', '.join(map(str, location.ranks))}: {location.why or location.frames[0]}"
        case messages.NodeDraining(_, grace_s, why):
            yield f"send draining, grace {grace_s:g}: {why}"
        case messages.NodeWillLeave(_, why, in_s):
            yield f"send will leave{_soon(in_s)}: {why}"
        case messages.NodeLeft(why, is_clear):
            yield f"send left{'' if is_clear else ', not clear'}: {why}"
        case messages.NodeJoined(node):
            yield f"send joined: {node.node_id}"


def _soon(in_s: float | None) -> str:
    return f", in {in_s:g} s" if in_s is not None else ""


def describe_verdict(verdict: Verdict) -> Iterator[str]:
    """Describe a verdict in the indented lines below its outcome and reason."""
    yield from describe_failures(verdict.failures, verdict.stopped)
    if verdict.stuck_pids:
        yield f"{_INDENT}stuck: {', '.join(map(str, verdict.stuck_pids))}"
    for failure in verdict.earlier:
        where = f" on {failure.host}" if failure.host else ""
        end = format_exit(failure.exit_code)
        yield f"{_INDENT}earlier, in generation {failure.generation}: rank {failure.global_rank}{where} {end}"
    counts = [f"generation {verdict.generation}", f"restarts used {verdict.restarts_used}"]
    if verdict.membership_changes:
        counts.append(f"membership changes {verdict.membership_changes}")
    if verdict.drains:
        counts.append(f"drains {verdict.drains}")
    if verdict.requests:
        counts.append(f"requests {verdict.requests}")
    if verdict.signal:
        counts.append(f"by {Signals(verdict.signal).name}")
    yield _INDENT + ", ".join(counts)


def describe_failures(failures: tuple[Failure, ...], stopped: tuple[Stopped, ...]) -> Iterator[str]:
    """Describe failed and stopped workers in indented lines."""
    for failure in failures:
        found = failure.evidence
        where = f" on {failure.host}" if failure.host else ""
        parts = [f"rank {failure.global_rank}{where} (pid {failure.pid}) failed: {format_exit(failure.exit_code)}"]
        parts.append(f"seen at {format_time(failure.seen_at)}")
        if found.raised_at is not None:
            parts.append(f"raised at {format_time(found.raised_at)}")
        parts.extend(text for text in (failure.reason, found.message) if text)
        yield _INDENT + ", ".join(parts)
    for each in stopped:
        stacks = ", with its stacks" if each.stacks else ""
        yield f"{_INDENT}rank {each.global_rank} (pid {each.pid}) stopped: {format_exit(each.exit_code)}{stacks}"


def format_exit(exit_code: int) -> str:
    """Describe how a process exited."""
    return f"killed by {Signals(-exit_code).name}" if exit_code < 0 else f"exited {exit_code}"


def format_time(seconds: float) -> str:
    """Format a time without unnecessary digits."""
    return f"{seconds:.9g}"
