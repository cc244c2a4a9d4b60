"""Scenario files: conversations with the agent machine that a person can read, and a test can repeat.

A scenario is text. It tells the machine what happened and when; indented below each fact stands what the machine
answered. ``play_scenario`` repeats the conversation and returns the same text with the answers of today's machine, so a
test is ``play_scenario(text) == text``, a change of behaviour is a diff, and writing the result back accepts it.

    scenario one worker fails, the other is stopped, and both start again
    settings workers=2 max_restarts=1

    at 0 generation 1 up
        join generation 1: first generation
        start generation 1, restarts used 0
        new -> joining -> running
    at 5 worker 1 exited 3
        examine worker 1 of generation 1, pid 101: exited 3
        signal generation 1 with SIGTERM: rank 1 failed
        running -> stopping
        deadlines: examine 7, grace 35

Lines that begin in the first column are the script; blank lines and those that begin with ``#`` are for the reader.

``scenario TITLE``
    Begins a conversation with a new machine. A file may hold many.
``settings NAME=VALUE ...``
    Fields of ``AgentSettings``; ``workers`` is short for ``local_world_size``. Unsaid: one worker, no restarts.
``policy NAME``
    A restart policy that the caller of ``play_scenario`` provides. Unsaid: ``budget``.
``at TIME FACT``
    One event. Times are seconds and never decrease. The facts:

    - ``run requested``
    - ``generation 1 formed`` (``..., ranks from 4``), ``join refused: REASON``
    - ``worker 0 started as PID``, ``worker 0 not started, EXITCODE: REASON``
    - ``worker 0 exited EXITCODE`` (``...: FAULT``), ``worker 0 killed by SIGNAL``; before the colon may stand
      ``, unasked`` (our request to end had not reached it) and ``, error written`` (it left an error file)
    - ``worker 0 examined`` (``..., raised at TIME``) (``...: MESSAGE``)
    - ``node cleared``, ``signal SIGNAL`` (``..., grace SECONDS``), ``keeper lost: REASON``, ``time passed``

    Facts about a worker or the node mean the machine's current generation unless they say ``of generation 1`` after
    ``worker 0`` or ``node cleared``. ``generation 1 up`` is short for an uneventful start: the run is requested, if it
    was not yet, the generation forms, and each of its workers starts, rank 1 of generation 2 as process 201.

An answer is the orders, one per line, then what changed: the phase, and the deadlines that stand now. ``noted`` means
that the machine only remembered something, ``ignored`` that it did not even do that. The promises of the machine are
checked after every step (``tenax.core.invariants``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from signal import Signals

import msgspec

from tenax.core import commands as order
from tenax.core import events as fact
from tenax.core.agent import AgentMachine, Phase
from tenax.core.commands import AnyCommand
from tenax.core.events import AnyEvent
from tenax.core.invariants import InvariantBroken, InvariantChecker
from tenax.core.model import AgentSettings, Assignment, Evidence, Verdict
from tenax.core.policy import BudgetPolicy, RestartPolicy

__all__ = ["Scenario", "ScenarioError", "describe_command", "parse_event", "play_scenario", "split_scenarios"]

_INDENT = "    "


class ScenarioError(ValueError):
    """A line of a scenario that cannot be understood."""


class Scenario(msgspec.Struct, frozen=True):
    """One conversation of a file. The texts of all of them, joined, are the file."""

    title: str
    text: str


def split_scenarios(text: str) -> list[Scenario]:
    """The conversations of a file, in order. What stands before the first belongs to the first."""
    starts = [match.start() for match in re.finditer(r"^scenario ", text, re.MULTILINE)]
    if not starts:
        raise ScenarioError("there is no scenario here; begin one with a line 'scenario TITLE'")
    edges = [0, *starts[1:], len(text)]
    return [
        Scenario(text[start:].split("\n", 1)[0].removeprefix("scenario ").strip(), text[begin:end])
        for start, begin, end in zip(starts, edges[:-1], edges[1:], strict=True)
    ]


def play_scenario(text: str, policies: Mapping[str, RestartPolicy] | None = None) -> str:
    """Repeat every conversation of ``text``; return it with what the machine answers now.

    ``policies`` are the restart policies that ``policy NAME`` may name, besides ``budget``.
    """
    known = {"budget": BudgetPolicy(), **(policies or {})}
    player = _Player(known)
    lines: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith((" ", "\t")):
            continue  # what was answered when this was written
        lines.append(line)
        try:
            lines.extend(_INDENT + answer for answer in player.take(line))
        except (ScenarioError, InvariantBroken) as error:
            raise type(error)(f"line {number}: {error}") from error
    return "\n".join(lines) + "\n"


class _Player:
    """Takes the script line by line and says what the machine answered."""

    def __init__(self, policies: Mapping[str, RestartPolicy]) -> None:
        self._policies = policies
        self._begin()

    def _begin(self) -> None:
        self._settings = _settings("")
        self._policy = self._policies["budget"]
        self._conversation: _Conversation | None = None

    def take(self, line: str) -> list[str]:
        if not line or line.startswith("#"):
            return []
        keyword, _, rest = line.strip().partition(" ")
        match keyword:
            case "scenario":
                self._begin()
                return []
            case "settings" | "policy" if self._conversation is not None:
                raise ScenarioError(f"{keyword} must stand before the first fact")
            case "settings":
                self._settings = _settings(rest)
                return []
            case "policy":
                if rest not in self._policies:
                    raise ScenarioError(f"there is no policy {rest!r}; there are {', '.join(self._policies)}")
                self._policy = self._policies[rest]
                return []
            case "at":
                if self._conversation is None:
                    self._conversation = _Conversation(AgentMachine(self._settings, self._policy))
                return self._conversation.hear(rest)
        raise ScenarioError(f"{line!r} is no part of a scenario; write scenario, settings, policy, at, or indent it")


class _Conversation:
    """One machine, watched, and the time."""

    def __init__(self, machine: AgentMachine) -> None:
        self._machine = machine
        self._checker = InvariantChecker(machine.state)
        self._now = 0.0

    def hear(self, sentence: str) -> list[str]:
        """``5 worker 1 exited 3``: step the machine and say what it answered."""
        when, _, what = sentence.strip().partition(" ")
        now = self._now = self._time(when)
        state = self._machine.state
        before = msgspec.json.encode(state)
        deadlines = dict(state.deadlines)
        phases = [state.phase]
        answers: list[str] = []
        for event in self._events(what.strip()):
            commands = self._machine.step(event, now)
            self._checker.check(state, event, commands)
            for command in commands:
                answers.extend(describe_command(command))
            if state.phase is not phases[-1]:
                phases.append(state.phase)
        if len(phases) > 1:
            answers.append(" -> ".join(phase.value for phase in phases))
        if state.deadlines != deadlines and state.phase is not Phase.ENDED:
            standing = sorted((deadline.value, at) for deadline, at in state.deadlines.items())
            answers.append("deadlines: " + (", ".join(f"{name} {_time(at)}" for name, at in standing) or "none"))
        return answers or ["ignored" if msgspec.json.encode(state) == before else "noted"]

    def _time(self, word: str) -> float:
        try:
            now = float(word)
        except ValueError:
            raise ScenarioError(f"{word!r} is no time; write 'at SECONDS FACT'") from None
        if now < self._now:
            raise ScenarioError(f"time went back from {self._now:g} to {now:g}")
        return now

    def _events(self, sentence: str) -> Iterator[AnyEvent]:
        short = re.fullmatch(r"generation (\d+) up", sentence)
        if short is None:
            state = self._machine.state
            yield parse_event(sentence, state.generation, state.settings.local_world_size)
            return
        if self._machine.state.phase is Phase.NEW:
            yield fact.RunRequested()
        generation = int(short[1])
        count = self._machine.state.settings.local_world_size
        yield fact.GenerationFormed(_assignment(generation, 0, count))
        for rank in range(count):
            yield fact.WorkerStarted(generation, rank, 100 * generation + rank)


# --- facts ------------------------------------------------------------------------------------------------------------


def parse_event(sentence: str, generation: int = 1, local_world_size: int = 1) -> AnyEvent:
    """The event that a sentence of a scenario speaks of. ``generation`` is meant where the sentence names none."""
    for pattern, build in _GRAMMAR:
        match = pattern.fullmatch(sentence)
        if match is not None:
            said = match.groupdict(default="")
            said["generation"] = said.get("generation") or str(generation)
            said["workers"] = str(local_world_size)
            return build(said)
    raise ScenarioError(f"{sentence!r} is no fact; the facts are listed at the top of tenax.testing.scenario")


_Said = dict[str, str]  # the named parts of a sentence; one that was left unsaid is ""


def _formed(said: _Said) -> AnyEvent:
    return fact.GenerationFormed(_assignment(int(said["formed"]), int(said["first"] or 0), int(said["workers"])))


def _assignment(generation: int, first_global_rank: int, local_world_size: int) -> Assignment:
    world_size = first_global_rank + local_world_size
    return Assignment(
        generation,
        first_global_rank=first_global_rank,
        world_size=world_size,
        first_role_rank=first_global_rank,
        role_world_size=world_size,
    )


def _started(said: _Said) -> AnyEvent:
    return fact.WorkerStarted(int(said["generation"]), int(said["rank"]), int(said["pid"]))


def _not_started(said: _Said) -> AnyEvent:
    return fact.WorkerStartFailed(int(said["generation"]), int(said["rank"]), said["reason"], int(said["code"]))


def _exited(said: _Said) -> AnyEvent:
    return _ended(said, int(said["code"]), said["fault"])


def _killed(said: _Said) -> AnyEvent:
    return _ended(said, -_signal(said["signal"]), "")


def _ended(said: _Said, exit_code: int, fault: str) -> AnyEvent:
    unasked, wrote_error = bool(said["unasked"]), bool(said["wrote_error"])
    return fact.WorkerExited(int(said["generation"]), int(said["rank"]), exit_code, fault, unasked, wrote_error)


def _examined(said: _Said) -> AnyEvent:
    message = said["message"]
    evidence = Evidence(
        error_type=message.partition(":")[0] if ":" in message else "",
        message=message,
        raised_at=float(said["raised_at"]) if said["raised_at"] else None,
    )
    return fact.FailureExamined(int(said["generation"]), int(said["rank"]), evidence)


def _signalled(said: _Said) -> AnyEvent:
    return fact.SignalReceived(_signal(said["signal"]), float(said["grace_s"]) if said["grace_s"] else None)


_OF = r"(?: of generation (?P<generation>\d+))?"
_WORKER = rf"worker (?P<rank>\d+){_OF}"
_HOW = r"(?P<unasked>, unasked)?(?P<wrote_error>, error written)?"

_GRAMMAR: tuple[tuple[re.Pattern[str], Callable[[_Said], AnyEvent]], ...] = tuple(
    (re.compile(pattern), build)
    for pattern, build in (
        (r"run requested", lambda _: fact.RunRequested()),
        (r"generation (?P<formed>\d+) formed(?:, ranks from (?P<first>\d+))?", _formed),
        (r"join refused: (?P<reason>.+)", lambda said: fact.JoinRefused(said["reason"])),
        (rf"{_WORKER} started as (?P<pid>\d+)", _started),
        (rf"{_WORKER} not started, (?P<code>\d+): (?P<reason>.+)", _not_started),
        (rf"{_WORKER} exited (?P<code>\d+){_HOW}(?:: (?P<fault>.+))?", _exited),
        (rf"{_WORKER} killed by (?P<signal>SIG\w+){_HOW}", _killed),
        (rf"{_WORKER} examined(?:, raised at (?P<raised_at>[\d.]+))?(?:: (?P<message>.+))?", _examined),
        (rf"node cleared{_OF}", lambda said: fact.NodeCleared(int(said["generation"]))),
        (r"signal (?P<signal>SIG\w+)(?:, grace (?P<grace_s>[\d.]+))?", _signalled),
        (r"keeper lost: (?P<reason>.+)", lambda said: fact.KeeperLost(said["reason"])),
        (r"time passed", lambda _: fact.TimePassed()),
    )
)


def _signal(name: str) -> int:
    if name not in Signals.__members__:
        raise ScenarioError(f"this system has no signal {name}")
    return Signals[name].value


def _settings(words: str) -> AgentSettings:
    """``workers=2 max_restarts=1``"""
    said: dict[str, str] = {"run_id": "run", "role": "trainer", "local_world_size": "1", "max_restarts": "0"}
    for word in words.split():
        name, equals, value = word.partition("=")
        if not equals:
            raise ScenarioError(f"{word!r} is no setting; write NAME=VALUE")
        said["local_world_size" if name == "workers" else name] = value
    try:
        return msgspec.convert(said, AgentSettings, strict=False)
    except msgspec.ValidationError as error:
        raise ScenarioError(
            f"{error}; the settings are workers, {', '.join(AgentSettings.__struct_fields__)}"
        ) from None


# --- answers ----------------------------------------------------------------------------------------------------------


def describe_command(command: AnyCommand) -> list[str]:
    """An order in words: one line, and for a verdict some more, indented."""
    match command:
        case order.Join(generation=generation, why=why):
            return [f"join generation {generation}: {why}"]
        case order.StartWorkers(assignment=assignment, restarts_used=restarts_used):
            return [f"start generation {assignment.generation}, restarts used {restarts_used}"]
        case order.ExamineFailure(generation=generation, local_rank=local_rank, pid=pid, exit_code=exit_code):
            return [f"examine worker {local_rank} of generation {generation}, pid {pid}: {_end(exit_code)}"]
        case order.SignalWorkers(generation=generation, signal=signal, why=why):
            return [f"signal generation {generation} with {Signals(signal).name}: {why}"]
        case order.ClearNode(generation=generation):
            return [f"clear generation {generation}"]
        case order.KillNode(generation=generation, why=why):
            return [f"kill generation {generation}: {why}"]
        case order.Finish(verdict=verdict):
            return list(_describe_verdict(verdict))


def _describe_verdict(verdict: Verdict) -> Iterator[str]:
    yield f"finish: {verdict.outcome.value}, {verdict.why}"
    for failure in verdict.failures:
        evidence = failure.evidence
        parts = [f"rank {failure.global_rank} (pid {failure.pid}) failed: {_end(failure.exit_code)}"]
        parts.append(f"seen at {_time(failure.seen_at)}")
        if evidence.raised_at is not None:
            parts.append(f"raised at {_time(evidence.raised_at)}")
        parts.extend(text for text in (failure.reason, evidence.message) if text)
        yield _INDENT + ", ".join(parts)
    for stopped in verdict.stopped:
        yield f"{_INDENT}rank {stopped.global_rank} (pid {stopped.pid}) stopped by us: {_end(stopped.exit_code)}"
    if verdict.stuck_pids:
        yield f"{_INDENT}stuck: {', '.join(map(str, verdict.stuck_pids))}"
    by = f", by {Signals(verdict.signal).name}" if verdict.signal else ""
    yield f"{_INDENT}generation {verdict.generation}, restarts used {verdict.restarts_used}{by}"


def _end(exit_code: int) -> str:
    return f"killed by {Signals(-exit_code).name}" if exit_code < 0 else f"exited {exit_code}"


def _time(seconds: float) -> str:
    return f"{seconds:.9g}"
