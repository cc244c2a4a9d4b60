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
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from itertools import groupby
from signal import Signals
from typing import Any, TypeVar

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

Made = TypeVar("Made")
MadeStruct = TypeVar("MadeStruct", bound=msgspec.Struct)
Rule = TypeVar("Rule")

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


class Player:
    """Runs a script line by line and returns the output of machines."""

    def __init__(self, open_transcript: Callable[..., Transcript], **directives: Callable[[str], object]) -> None:
        """``directives``: how lines before the first event are parsed, by their keyword; "" is the default."""
        self._open = open_transcript
        self._directives = directives
        self._begin()

    def _begin(self) -> None:
        self._given = {keyword: parse("") for keyword, parse in self._directives.items()}
        self._transcript: Transcript | None = None

    def take(self, line: str) -> list[str]:
        keyword, _, rest = line.partition(" ")
        if keyword == "at":
            self._transcript = self._transcript or self._open(**self._given)
            return self._transcript.play(rest)
        if keyword == "scenario":
            self._begin()
        elif keyword not in self._directives:
            known = ", ".join(("scenario", *self._directives))
            raise ScenarioError(f"{line!r} is not part of a scenario; write {known}, at, or indent it")
        elif self._transcript is not None:
            raise ScenarioError(f"{keyword} must come before the first event")
        else:
            self._given[keyword] = self._directives[keyword](rest)
        return []


class Transcript(ABC):
    """One machine with its checker, and the time."""

    state: Any
    now = 0.0

    @property
    def counts(self) -> str:
        """The counters of the state, as text."""
        return ""

    def prepare(self, text: str) -> None:  # noqa: B027 - optional
        """Runs before the events of a line."""

    @abstractmethod
    def events(self, text: str) -> Iterable[Any]:
        """Parse the events of a line. Each may depend on the state after the one before."""

    @abstractmethod
    def step(self, event: Any) -> Iterable[str]:
        """Step the machine, check its invariants, and describe its output."""

    def play(self, text: str) -> list[str]:
        """Play an event such as ``5 worker 1 exited 3``; return the machine's output."""
        when, _, what = text.strip().partition(" ")
        self.now = _parse_time(when, self.now)
        self.prepare(what.strip())
        before, counts, phases = deepcopy(self.state), self.counts, [self.state.phase.name.lower()]
        answers: list[str] = []
        for event in self.events(what.strip()):
            answers += self.step(event)
            phases.append(self.state.phase.name.lower())
        if self.counts != counts:
            answers.append(self.counts)
        if len(path := [name for name, _ in groupby(phases)]) > 1:
            answers.append(" -> ".join(path))
        if self.state.deadlines != before.deadlines and self.state.verdict is None:
            standing = sorted((deadline.value, at) for deadline, at in self.state.deadlines.items())
            answers.append("deadlines: " + (", ".join(f"{name} {format_time(at)}" for name, at in standing) or "none"))
        return answers or ["ignored" if self.state == before else "noted"]


def _parse_time(text: str, now: float) -> float:
    """Parse the time after ``at``, which must not be before ``now``."""
    try:
        time = float(text)
    except ValueError:
        raise ScenarioError(f"{text!r} is not a time; write 'at SECONDS EVENT'") from None
    if time < now:
        raise ScenarioError(f"time went back from {now:g} to {time:g}")
    return time


def play_scenario(text: str) -> str:
    """Run every scenario of ``text``; return it with the machine's current output."""
    return play_lines(text, Player(_AgentTranscript, settings=_settings).take)


class _AgentTranscript(Transcript):
    def __init__(self, settings: AgentSettings) -> None:
        self._machine = AgentMachine(settings)
        self.state = self._machine.state
        self._checker = InvariantChecker(self.state)

    def step(self, event: AnyEvent) -> Iterator[str]:
        self._checker.expect(self.state, event)
        issued = self._machine.step(event, self.now)
        self._checker.check(self.state, event, issued)
        for command in issued:
            yield from describe_command(command)

    def events(self, text: str) -> Iterator[AnyEvent]:
        state: AgentState = self.state
        if (over := _RUN_ENDED.fullmatch(text)) is not None:
            yield _run_ended(over["outcome"], over["why"], over["sent_at"], self.now, state)
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
        yield _formed(short.groupdict(default="") | {"first": "", "local_world_size": count})
        for rank in range(count):
            yield events.WorkerStarted(generation, rank, pids.get(rank, _pid(generation, rank)))


# --- events -----------------------------------------------------------------------------------------------------------

Fields = dict[str, Any]  # the named groups of a match; "" if a group is absent


def match_any(grammar: Iterable[tuple[str, Rule]], text: str, what: str) -> tuple[Rule, Fields]:
    """Return the first rule whose pattern matches the text, and the groups of the match. ``what`` a rule describes."""
    for pattern, rule in grammar:
        if (found := re.fullmatch(pattern, text)) is not None:
            return rule, found.groupdict(default="")
    raise ScenarioError(f"{text!r} {what}")


def make(kind: type[Made], fields: Fields, **others: object) -> Made:
    """Return a struct of the fields that are not empty, converted to their types; ``others`` are the defaults."""
    given = {name: name in _FLAGS or value for name, value in fields.items() if value != ""}
    try:
        return msgspec.convert(others | given, kind, strict=False)
    except msgspec.ValidationError as error:
        raise ScenarioError(f"{kind.__name__}: {error}") from None


_FLAGS = frozenset({"is_late", "stops", "before_stop", "wrote_error", "is_agent_store", "was_cut_off"})


def parse_event(text: str, generation: int = 1, local_world_size: int = 1) -> AnyEvent:
    """Parse an event of a scenario. ``generation`` applies if the text names none.

    ``run ended`` is not supported, because it depends on the messages before it.
    """
    unknown = "is not an event; the events are listed at the top of tenax.testing.scenario"
    rule, fields = match_any(_GRAMMAR, text, unknown)
    of, rank = int(fields.get("generation") or generation), int(fields.get("local_rank") or 0)
    fields = {name: _PARSERS[name](text) if text and name in _PARSERS else text for name, text in fields.items()}
    fields |= {"generation": of, "local_world_size": local_world_size}
    if not isinstance(rule, type):
        return rule(fields)
    return make(rule, fields, pid=_pid(of, rank), timeout_s=_HOLD_S, expiration_time=1e9)


def _pid(generation: int, rank: int) -> int:
    """Return the process of a rank, as in ``generation 1 up``."""
    return 100 * generation + rank


def _formed(fields: Fields) -> AnyEvent:
    first, count = int(fields["first"] or 0), int(fields["local_world_size"])
    return events.GenerationFormed(
        Assignment(
            int(fields["formed"]),
            first_global_rank=first,
            world_size=first + count,
            first_role_rank=first,
            role_world_size=first + count,
            restarts_used=int(fields["restarts"] or 0),
        )
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


def _at_step(fields: Fields) -> AnyEvent:
    first, last = int(fields["first"] or fields["last"]), int(fields["last"])
    progress = messages.WorkerProgress(int(fields["local_rank"]), first, last, 1.0, 2.0, fields["phase"])
    return events.ProgressSeen(fields["generation"], (progress,))


def _examined(fields: Fields) -> AnyEvent:
    found = make_evidence(fields["message"], fields["raised_at"])
    if fields["stacks"]:
        found = msgspec.structs.replace(found, stacks="Current thread (most recent call first): ...")
    return events.FailureExamined(fields["generation"], int(fields["local_rank"]), found)


def make_evidence(message: str, raised_at: str) -> Evidence:
    """Return evidence with a message such as ``RuntimeError: boom``."""
    error_type = message.partition(":")[0] if ":" in message else ""
    return Evidence(error_type, message, raised_at=float(raised_at) if raised_at else None)


def _hang_found(fields: Fields) -> AnyEvent:
    report = messages.HangReport(fields["generation"], nodes=1, workers=1, quiet_s=60.0, why="no step", locations=())
    return events.HangFound(fields["generation"], report)


def _parse_ranks(text: str) -> list[str]:
    return re.findall(r"\d+", text)


def _parse_stacks(text: str) -> list[events.WorkerStacks]:
    workers = []
    for each in text.split("; "):
        at = re.fullmatch(r"worker (\d+) in (\w+)", each)
        if at is None:
            raise ScenarioError(f"{each!r} does not describe stacks; write 'worker 0 in FUNCTION'")
        dump = f'Current thread 0x1 (most recent call first):\n  File "train.py", line 1 in {at[2]}'
        workers.append(events.WorkerStacks(int(at[1]), dump))
    return workers


def parse_signal(name: str) -> int:
    """Return the number of a signal such as ``SIGTERM``."""
    if name not in Signals.__members__:
        raise ScenarioError(f"this system has no signal {name}")
    return Signals[name].value


def parse_exit(text: str) -> int:
    """Return the exit code in ``exited 3`` or ``killed by SIGSEGV``."""
    how = text.rpartition(" ")[2]
    return -parse_signal(how) if how.startswith("SIG") else int(how)


_PARSERS: dict[str, Callable[[str], object]] = {  # of the fields that are not numbers or texts
    "exit_code": parse_exit,
    "signal": parse_signal,
    "held": _parse_ranks,
    "stopped": _parse_ranks,
    "workers": _parse_stacks,
}
EXIT = r"(?P<exit_code>exited \d+|killed by SIG\w+)"
NUMBER = r"[\d.]+"
_OF = r"(?: of generation (?P<generation>\d+))?"
_WORKER = rf"worker (?P<local_rank>\d+){_OF}"
_HOW = r"(?P<before_stop>, before the stop)?(?P<wrote_error>, error written)?"
_IN = rf"(?:, in (?P<in_s>{NUMBER}) s)?"
_RESTARTS = r"(?:, restarts used (?P<restarts>\d+))?"
_RUN_ENDED = re.compile(rf"run ended(?:, sent at (?P<sent_at>{NUMBER}))?: (?P<outcome>\w+), (?P<why>.+)")

# Patterns, and the event of which the groups are fields, or what returns it.
_GRAMMAR: tuple[tuple[str, type[AnyEvent] | Callable[[Fields], AnyEvent]], ...] = (
    (r"run requested", events.RunRequested),
    (rf"generation (?P<formed>\d+) formed(?:, ranks from (?P<first>\d+))?{_RESTARTS}", _formed),
    (
        r"generation (?P<generation>\d+) ended(?P<is_late>, late)?(?P<stops>, stops)?(?:, rank (?P<hung>\d+) hung)?"
        r": (?P<why>.+)",
        events.GenerationEnded,
    ),
    (r"join refused: (?P<reason>.+)", events.JoinRefused),
    (r"leave requested: (?P<why>.+)", events.LeaveRequested),
    (r"waiting: (?P<why>.+)", events.Waiting),
    (rf"fenced{_OF}: (?P<why>.+)", events.Fenced),
    (rf"leave noticed{_OF} from (?P<host>[^\s,:]+){_IN}: (?P<why>.+)", events.LeaveNoticed),
    (rf"notice{_IN}: (?P<why>.+)", events.NoticeReceived),
    (rf"{_WORKER} at step(?:s (?P<first>\d+) to)? (?P<last>\d+)(?:, in (?P<phase>.+))?", _at_step),
    (rf"{_WORKER} started as (?P<pid>\d+)", events.WorkerStarted),
    (rf"{_WORKER} opted in(?:, timeout (?P<timeout_s>{NUMBER}) s)?", events.WorkerOptedIn),
    (rf"{_WORKER} opted out: (?P<why>.+)", events.WorkerOptedOut),
    (rf"{_WORKER} held(?: at step (?P<step>\d+))?", events.WorkerHeld),
    (rf"{_WORKER} not started, (?P<exit_code>\d+): (?P<reason>.+)", events.WorkerStartFailed),
    (rf"{_WORKER} {EXIT}{_HOW}(?:: (?P<fault>.+))?", events.WorkerExited),
    (rf"{_WORKER} raised", events.WorkerRaised),
    (
        rf"{_WORKER} examined(?:, raised at (?P<raised_at>{NUMBER}))?(?P<stacks>, with stacks)?(?:: (?P<message>.+))?",
        _examined,
    ),
    (
        rf"{_WORKER} did not leave (?P<scope>\S+) within (?P<after_s>{NUMBER}) s(?:, (?P<signal>SIG\w+))?",
        events.ScopeExpired,
    ),
    (rf"{_WORKER} refused its stacks: (?P<why>.+)", events.StacksRefused),
    (
        rf"quiet{_OF} since (?P<since>{NUMBER})(?:, worker (?P<stopped>\d+) is stopped)?: (?P<why>.+)",
        events.QuietSeen,
    ),
    (rf"movement{_OF}: worker (?P<local_rank>\d+) (?P<what>.+)", events.MovementSeen),
    (rf"stacks requested{_OF}, suspicion (?P<number>\d+): (?P<why>.+)", events.StacksRequested),
    (rf"stacks read{_OF}, suspicion (?P<number>\d+): (?P<workers>.+)", events.StacksRead),
    (rf"hang found{_OF}", _hang_found),
    (rf"hang over{_OF}: (?P<why>.+)", events.HangOver),
    (rf"node cleared{_OF}(?:, workers? (?P<held>[\d, and]+) held)?", events.NodeCleared),
    (rf"signal (?P<signal>SIG\w+)(?:, grace (?P<grace_s>{NUMBER}))?", events.SignalReceived),
    (r"keeper lost: (?P<reason>.+)", events.KeeperLost),
    (r"tick", events.Tick),
)


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
    return make_settings(AgentSettings, given, "workers")


def make_settings(kind: type[MadeStruct], given: dict[str, str], short: str) -> MadeStruct:
    """Return the settings; ``short`` is the name that is short for one of them."""
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        known = ", ".join(field.name for field in msgspec.structs.fields(kind))
        raise ScenarioError(f"{error}; the settings are {short}, {known}") from None


# --- output -----------------------------------------------------------------------------------------------------------


def describe_command(command: AnyCommand) -> list[str]:
    """Describe a command in one line, and a verdict in more, indented ones."""
    match command:
        case commands.SendMessage(message):
            return list(_describe_message(message))
        case commands.StartWorkers(assignment, survivors):
            start = f"start generation {assignment.generation}, restarts used {assignment.restarts_used}"
            goes_on = "continues" if len(survivors) == 1 else "continue"
            return [start + (f", {_workers(survivors)} {goes_on}" if survivors else "")]
        case commands.HoldWorkers(generation=generation, local_ranks=local_ranks, why=why):
            return [f"hold {_workers(local_ranks)} of generation {generation}: {why}"]
        case commands.StopWorker() | commands.EndWorker():
            verb = "stop" if isinstance(command, commands.StopWorker) else "end"
            worker = f"worker {command.local_rank} of generation {command.generation}, pid {command.pid}"
            return [f"{verb} {worker}, with {Signals(command.signal).name}: {command.why}"]
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
        case messages.NodeLeft(why, is_clear, was_refused):
            yield f"send left{'' if is_clear else ', not clear'}{', refused' if was_refused else ''}: {why}"
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
    others = ("membership_changes", "drains", "requests")
    counts += [f"{name.replace('_', ' ')} {count}" for name in others if (count := getattr(verdict, name))]
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
