"""Scenario files: conversations with the agent machine that a person can read, and a test can repeat.

A scenario is text. It tells the machine what happened and when; indented below each fact stands what the machine
answered. ``play_scenario`` repeats the conversation and returns the same text with the answers of today's machine, so a
test is ``play_scenario(text) == text``, a change of behaviour is a diff, and writing the result back accepts it.
(``tenax.testing.run_scenario`` does the same for the coordinator machine.)

    scenario one worker fails, the other is stopped, and the node is ready for the next generation
    settings workers=2

    at 0 generation 1 up
        tell ready
        start generation 1, restarts used 0
        new -> joining -> running
    at 5 worker 1 exited 3
        examine worker 1 of generation 1, pid 101: exited 3
        tell failure of rank 1 (pid 101): exited 3
        signal generation 1 with SIGTERM: rank 1 failed
        running -> stopping
        deadlines: examine 7, grace 35

Lines that begin in the first column are the script; blank lines and those that begin with ``#`` are for the reader.

``scenario TITLE``
    Begins a conversation with a new machine. A file may hold many.
``settings NAME=VALUE ...``
    Fields of ``AgentSettings``; ``workers`` is short for ``local_world_size``. Unsaid: one worker.
``at TIME FACT``
    One event. Times are seconds and never decrease. The facts:

    - ``run requested``
    - ``generation 1 formed`` (``..., ranks from 4``) (``..., restarts used 2``), ``generation 1 ended: REASON``
      (``... ended, late: REASON``: the next is at work already)
    - ``run ended: OUTCOME, WHY`` (``run ended, sent at TIME: ...``: on a coordinator's clock that shows that time).
      The verdict names the failures that this node told of, or if there are none and the outcome is ``failed``, one of
      another node.
    - ``join refused: REASON``, ``waiting: TEXT``, ``fenced: WHY``
    - ``leave requested: WHY``: an operator wants this node to leave
    - ``leave noticed from HOST: WHY`` and ``notice: WHY``; before the colon may stand ``, in 120 s``
    - ``worker 0 started as PID``, ``worker 0 not started, EXITCODE: REASON``
    - ``worker 0 exited EXITCODE`` (``...: FAULT``), ``worker 0 killed by SIGNAL``; before the colon may stand
      ``, unasked`` (our request to end had not reached it) and ``, error written`` (it left an error file)
    - ``worker 0 examined`` (``..., raised at TIME``) (``..., with stacks``) (``...: MESSAGE``)
    - ``worker 0 did not leave SCOPE within SECONDS s, SIGNAL`` (without a signal: it only wants it to be said), and
      ``worker 0 refused its stacks: WHY``
    - ``worker 0 at step 9`` (``worker 0 at steps 3 to 9``) (``..., in PHASE``): what it has written down
    - ``quiet since TIME: WHY`` (``..., worker 0 is stopped: WHY``), ``movement``, ``stacks wanted, suspicion 1: WHY``,
      ``stacks read, suspicion 1: worker 0 in FUNCTION; worker 1 in FUNCTION``, ``hang found``, ``hang over``
    - ``node cleared``, ``signal SIGNAL`` (``..., grace SECONDS``), ``keeper lost: REASON``, ``time passed``

    Facts about a worker or the node mean the machine's current generation unless they say ``of generation 1`` after
    ``worker 0``, ``node cleared``, ``fenced`` or ``leave noticed``. ``generation 1 up`` is short for an uneventful
    start: the run is requested, if it was not yet, the generation forms, and each of its workers starts, rank 1 of
    generation 2 as process 201.

An answer is the orders, one per line (``tell ...`` is what the coordinator is told), then what changed: the phase, and
the deadlines that stand now. ``noted`` means that the machine only remembered something, ``ignored`` that it did not
even do that. The promises of the machine are checked after every step (``tenax.testing.agent_invariants``).
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


def play_lines(text: str, take: Callable[[str], list[str]]) -> str:
    """The script in ``text``, each of its lines followed by what ``take`` answers to it; old answers are dropped."""
    lines: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith((" ", "\t")):
            continue  # what was answered when this was written
        lines.append(line)
        if not line or line.startswith("#"):
            continue
        try:
            lines.extend(_INDENT + answer for answer in take(line.strip()))
        except (ScenarioError, InvariantBroken) as error:
            raise type(error)(f"line {number}: {error}") from error
    return "\n".join(lines) + "\n"


def play_scenario(text: str) -> str:
    """Repeat every conversation of ``text``; return it with what the machine answers now."""
    return play_lines(text, _Player().take)


class _Player:
    """Takes the script line by line and says what the machine answered."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._settings = _settings("")
        self._conversation: _Conversation | None = None

    def take(self, line: str) -> list[str]:
        keyword, _, rest = line.partition(" ")
        match keyword:
            case "scenario":
                self._begin()
                return []
            case "settings" if self._conversation is not None:
                raise ScenarioError("settings must stand before the first fact")
            case "settings":
                self._settings = _settings(rest)
                return []
            case "at":
                if self._conversation is None:
                    self._conversation = _Conversation(AgentMachine(self._settings))
                return self._conversation.hear(rest)
        raise ScenarioError(f"{line!r} is no part of a scenario; write scenario, settings, at, or indent it")


class _Conversation:
    """One machine, watched, and the time."""

    def __init__(self, machine: AgentMachine) -> None:
        self._machine = machine
        self._checker = InvariantChecker(machine.state)
        self._now = 0.0

    def hear(self, sentence: str) -> list[str]:
        """``5 worker 1 exited 3``: step the machine and say what it answered."""
        when, _, what = sentence.strip().partition(" ")
        now = self._now = parse_time(when, self._now)
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
            answers.append("deadlines: " + (", ".join(f"{name} {say_time(at)}" for name, at in standing) or "none"))
        return answers or ["ignored" if msgspec.json.encode(state) == before else "noted"]

    def _events(self, sentence: str) -> Iterator[AnyEvent]:
        state = self._machine.state
        if (over := _RUN_ENDED.fullmatch(sentence)) is not None:
            yield _run_ended(over["outcome"], over["why"], over["sent_at"], self._now, state)
            return
        short = re.fullmatch(rf"generation (?P<formed>\d+) up{_RESTARTS}", sentence)
        if short is None:
            yield parse_event(sentence, state.generation, state.settings.local_world_size)
            return
        if state.phase is Phase.NEW:
            yield events.RunRequested()
        generation, count = int(short["formed"]), state.settings.local_world_size
        yield events.GenerationFormed(_assignment(generation, 0, count, int(short["restarts"] or 0)))
        for rank in range(count):
            yield events.WorkerStarted(generation, rank, 100 * generation + rank)


def parse_time(word: str, now: float) -> float:
    """The time that stands after ``at``, which is not before ``now``."""
    try:
        time = float(word)
    except ValueError:
        raise ScenarioError(f"{word!r} is no time; write 'at SECONDS FACT'") from None
    if time < now:
        raise ScenarioError(f"time went back from {now:g} to {time:g}")
    return time


# --- facts ------------------------------------------------------------------------------------------------------------


def parse_event(sentence: str, generation: int = 1, local_world_size: int = 1) -> AnyEvent:
    """The event that a sentence of a scenario speaks of. ``generation`` is meant where the sentence names none.

    ``run ended`` is not among them: what it means depends on what was told before.
    """
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
    first, restarts = int(said["first"] or 0), int(said["restarts"] or 0)
    return events.GenerationFormed(_assignment(int(said["formed"]), first, int(said["workers"]), restarts))


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
    """What a coordinator would say that has heard of this node what it told, and nothing else."""
    if outcome not in {each.value for each in Outcome}:
        known = ", ".join(each.value for each in Outcome)
        raise ScenarioError(f"{outcome!r} is no outcome; there are {known}")
    failures, stopped = sorted(state.failures, key=by_cause), stopped_workers(state)
    if outcome == Outcome.SUCCEEDED.value:
        failures, stopped = [], ()
    elif outcome == Outcome.FAILED.value and not failures:
        rank = state.settings.local_world_size  # the first that is not ours
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


def _started(said: _Said) -> AnyEvent:
    return events.WorkerStarted(int(said["generation"]), int(said["rank"]), int(said["pid"]))


def _at_step(said: _Said) -> AnyEvent:
    rank, first, last = int(said["rank"]), int(said["first"] or said["last"]), int(said["last"])
    progress = messages.WorkerProgress(rank, first, last, 1.0, 2.0, said["phase"])
    return events.ProgressSeen(int(said["generation"]), (progress,))


def _not_started(said: _Said) -> AnyEvent:
    return events.WorkerStartFailed(int(said["generation"]), int(said["rank"]), said["reason"], int(said["code"]))


def _exited(said: _Said) -> AnyEvent:
    return _ended(said, int(said["code"]), said["fault"])


def _killed(said: _Said) -> AnyEvent:
    return _ended(said, -parse_signal(said["signal"]), "")


def _ended(said: _Said, exit_code: int, fault: str) -> AnyEvent:
    unasked, wrote_error = bool(said["unasked"]), bool(said["wrote_error"])
    return events.WorkerExited(int(said["generation"]), int(said["rank"]), exit_code, fault, unasked, wrote_error)


def _examined(said: _Said) -> AnyEvent:
    raised_at = float(said["raised_at"]) if said["raised_at"] else None
    found = evidence(said["message"], raised_at)
    if said["stacks"]:
        found = msgspec.structs.replace(found, stacks="Current thread (most recent call first): ...")
    return events.FailureExamined(int(said["generation"]), int(said["rank"]), found)


def _late(said: _Said) -> AnyEvent:
    generation, rank, after_s = int(said["generation"]), int(said["rank"]), float(said["after_s"])
    signal = parse_signal(said["signal"]) if said["signal"] else 0
    pid = 100 * generation + rank  # as ``generation 1 up`` has it
    return events.ScopeExpired(generation, rank, pid, said["scope"], after_s, 1e9, signal)


def _quiet(said: _Said) -> AnyEvent:
    stopped = (int(said["stopped"]),) if said["stopped"] else ()
    return events.QuietSeen(int(said["generation"]), float(said["since"]), said["why"], stopped)


def _stacks_read(said: _Said) -> AnyEvent:
    workers = []
    for each in said["workers_at"].split("; "):
        at = re.fullmatch(r"worker (\d+) in (\w+)", each)
        if at is None:
            raise ScenarioError(f"{each!r} says nothing of stacks; write 'worker 0 in FUNCTION'")
        dump = f'Current thread 0x1 (most recent call first):\n  File "train.py", line 1 in {at[2]}'
        workers.append(events.WorkerStacks(int(at[1]), dump))
    return events.StacksRead(int(said["generation"]), int(said["number"]), tuple(workers))


def _hang(generation: int) -> messages.HangReport:
    return messages.HangReport(generation, nodes=1, workers=1, quiet_s=60.0, why="no step", places=())


def evidence(message: str, raised_at: float | None) -> Evidence:
    """``RuntimeError: boom`` as what was found out."""
    return Evidence(
        error_type=message.partition(":")[0] if ":" in message else "", message=message, raised_at=raised_at
    )


def _signalled(said: _Said) -> AnyEvent:
    return events.SignalReceived(parse_signal(said["signal"]), _seconds(said["grace_s"]))


def _noticed(said: _Said) -> AnyEvent:
    return events.LeaveNoticed(int(said["generation"]), said["host"], said["why"], _seconds(said["in_s"]))


def _seconds(said: str) -> float | None:
    return float(said) if said else None


_OF = r"(?: of generation (?P<generation>\d+))?"
_WORKER = rf"worker (?P<rank>\d+){_OF}"
_HOW = r"(?P<unasked>, unasked)?(?P<wrote_error>, error written)?"
_IN = r"(?:, in (?P<in_s>[\d.]+) s)?"
_RESTARTS = r"(?:, restarts used (?P<restarts>\d+))?"
_RUN_ENDED = re.compile(r"run ended(?:, sent at (?P<sent_at>[\d.]+))?: (?P<outcome>\w+), (?P<why>.+)")

_GRAMMAR: tuple[tuple[re.Pattern[str], Callable[[_Said], AnyEvent]], ...] = tuple(
    (re.compile(pattern), build)
    for pattern, build in (
        (r"run requested", lambda _: events.RunRequested()),
        (rf"generation (?P<formed>\d+) formed(?:, ranks from (?P<first>\d+))?{_RESTARTS}", _formed),
        (
            r"generation (?P<generation>\d+) ended(?P<late>, late)?: (?P<why>.+)",
            lambda said: events.GenerationEnded(int(said["generation"]), said["why"], bool(said["late"])),
        ),
        (r"join refused: (?P<reason>.+)", lambda said: events.JoinRefused(said["reason"])),
        (r"leave requested: (?P<why>.+)", lambda said: events.LeaveRequested(said["why"])),
        (r"waiting: (?P<why>.+)", lambda said: events.Waiting(said["why"])),
        (rf"fenced{_OF}: (?P<why>.+)", lambda said: events.Fenced(int(said["generation"]), said["why"])),
        (rf"leave noticed{_OF} from (?P<host>[^\s,:]+){_IN}: (?P<why>.+)", _noticed),
        (rf"notice{_IN}: (?P<why>.+)", lambda said: events.NoticeReceived(said["why"], _seconds(said["in_s"]))),
        (rf"{_WORKER} at step(?:s (?P<first>\d+) to)? (?P<last>\d+)(?:, in (?P<phase>.+))?", _at_step),
        (rf"{_WORKER} started as (?P<pid>\d+)", _started),
        (rf"{_WORKER} not started, (?P<code>\d+): (?P<reason>.+)", _not_started),
        (rf"{_WORKER} exited (?P<code>\d+){_HOW}(?:: (?P<fault>.+))?", _exited),
        (rf"{_WORKER} killed by (?P<signal>SIG\w+){_HOW}", _killed),
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
            lambda said: events.StacksRefused(int(said["generation"]), int(said["rank"]), said["why"]),
        ),
        (
            rf"quiet{_OF} since (?P<since>[\d.]+)(?:, worker (?P<stopped>\d+) is stopped)?: (?P<why>.+)",
            _quiet,
        ),
        (rf"movement{_OF}", lambda said: events.MovementSeen(int(said["generation"]))),
        (
            rf"stacks wanted{_OF}, suspicion (?P<number>\d+): (?P<why>.+)",
            lambda said: events.StacksRequested(int(said["generation"]), int(said["number"]), said["why"]),
        ),
        (rf"stacks read{_OF}, suspicion (?P<number>\d+): (?P<workers_at>.+)", _stacks_read),
        (rf"hang found{_OF}", lambda said: events.HangFound(int(said["generation"]), _hang(int(said["generation"])))),
        (rf"hang over{_OF}", lambda said: events.HangOver(int(said["generation"]))),
        (rf"node cleared{_OF}", lambda said: events.NodeCleared(int(said["generation"]))),
        (r"signal (?P<signal>SIG\w+)(?:, grace (?P<grace_s>[\d.]+))?", _signalled),
        (r"keeper lost: (?P<reason>.+)", lambda said: events.KeeperLost(said["reason"])),
        (r"time passed", lambda _: events.Tick()),
    )
)


def parse_signal(name: str) -> int:
    """The number of ``SIGTERM``."""
    if name not in Signals.__members__:
        raise ScenarioError(f"this system has no signal {name}")
    return Signals[name].value


def parse_settings(words: str) -> dict[str, str]:
    """``workers=2 grace_s=1`` as names and values."""
    said: dict[str, str] = {}
    for pair in words.split():
        name, equals, value = pair.partition("=")
        if not equals:
            raise ScenarioError(f"{pair!r} is no setting; write NAME=VALUE")
        said[name] = value
    return said


def _settings(words: str) -> AgentSettings:
    said = {"run_id": "run", "role": "trainer", "local_world_size": "1", "max_restarts": "0"}
    said |= {"local_world_size" if name == "workers" else name: value for name, value in parse_settings(words).items()}
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
        case commands.SendMessage(message):
            return list(_describe_message(message))
        case commands.StartWorkers(assignment):
            return [f"start generation {assignment.generation}, restarts used {assignment.restarts_used}"]
        case commands.ExamineFailure(generation=generation, local_rank=local_rank, pid=pid, exit_code=exit_code):
            return [f"examine worker {local_rank} of generation {generation}, pid {pid}: {say_end(exit_code)}"]
        case commands.SignalWorkers(generation=generation, signal=signal, why=why):
            return [f"signal generation {generation} with {Signals(signal).name}: {why}"]
        case commands.DumpStacks(generation=generation, local_rank=local_rank):
            return [f"dump the stacks of worker {local_rank} of generation {generation}"]
        case commands.ReadStacks(generation=generation, local_ranks=local_ranks):
            workers = "worker" if len(local_ranks) == 1 else "workers"
            ranks = ", ".join(map(str, local_ranks))
            return [f"read the stacks of {workers} {ranks} of generation {generation}"]
        case commands.ReportHang(generation=generation):
            return [f"report the hang of generation {generation}"]
        case commands.ReportMovement(generation=generation):
            return [f"report that generation {generation} moves again"]
        case commands.EndWorker(generation=generation, local_rank=local_rank, pid=pid, signal=signal, why=why):
            whom = f"worker {local_rank} of generation {generation}, pid {pid}"
            return [f"end {whom}, with {Signals(signal).name}: {why}"]
        case commands.ClearNode(generation=generation):
            return [f"clear generation {generation}"]
        case commands.KillNode(generation=generation, why=why):
            return [f"kill generation {generation}: {why}"]
        case commands.ForwardNotice(host=host, why=why, in_s=in_s):
            return [f"pass on notice{f' from {host}' if host else ''}{_soon(in_s)}: {why}"]
        case commands.Finish(verdict=verdict):
            return [f"finish: {verdict.outcome.value}, {verdict.why}", *describe_verdict(verdict)]


def _describe_message(message: messages.FromNode) -> Iterator[str]:
    match message:
        case messages.NodeReady(generation):
            yield f"tell ready after generation {generation}" if generation else "tell ready"
        case messages.WorkersRunning(_, pids):
            yield f"tell running: {', '.join(map(str, pids))}"
        case messages.NodeProgress(_, _, workers):
            for each in workers:
                steps = f"steps {each.first_step} to {each.last_step}"
                yield f"tell progress of worker {each.local_rank}: {steps}{f', in {each.phase}' if each.phase else ''}"
        case messages.FailureSeen(_, failure):
            yield f"tell failure of rank {failure.global_rank} (pid {failure.pid}): {say_end(failure.exit_code)}"
        case messages.NodeStopped(_, _, failures, stopped, was_cut_off):
            yield f"tell stopped{', cut off' if was_cut_off else ''}"
            yield from describe_failures(failures, stopped)
        case messages.NodeSucceeded():
            yield "tell succeeded"
        case messages.NodeQuiet(_, _, since, why):
            yield f"tell quiet since {since:g}: {why}"
        case messages.NodeBusy():
            yield "tell busy"
        case messages.StacksTaken(_, _, places):
            yield "tell where workers are"
            for place in places:
                yield f"{_INDENT}ranks {', '.join(map(str, place.ranks))}: {place.why or place.frames[0]}"
        case messages.NodeDraining(_, grace_s, why):
            yield f"tell draining, grace {grace_s:g}: {why}"
        case messages.NodeWillLeave(_, why, in_s):
            yield f"tell will leave{_soon(in_s)}: {why}"
        case messages.NodeLeft(why, is_clear):
            yield f"tell left{'' if is_clear else ', not clear'}: {why}"
        case messages.NodeJoined(node):
            yield f"tell joined: {node.node_id}"


def _soon(in_s: float | None) -> str:
    return f", in {in_s:g} s" if in_s is not None else ""


def describe_verdict(verdict: Verdict) -> Iterator[str]:
    """What stands below the outcome and its reason, indented."""
    yield from describe_failures(verdict.failures, verdict.stopped)
    if verdict.stuck_pids:
        yield f"{_INDENT}stuck: {', '.join(map(str, verdict.stuck_pids))}"
    for failure in verdict.earlier:
        where = f" on {failure.host}" if failure.host else ""
        end = say_end(failure.exit_code)
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
    """Who failed and whom we ended, indented."""
    for failure in failures:
        found = failure.evidence
        where = f" on {failure.host}" if failure.host else ""
        parts = [f"rank {failure.global_rank}{where} (pid {failure.pid}) failed: {say_end(failure.exit_code)}"]
        parts.append(f"seen at {say_time(failure.seen_at)}")
        if found.raised_at is not None:
            parts.append(f"raised at {say_time(found.raised_at)}")
        parts.extend(text for text in (failure.reason, found.message) if text)
        yield _INDENT + ", ".join(parts)
    for each in stopped:
        stacks = ", with its stacks" if each.stacks else ""
        yield f"{_INDENT}rank {each.global_rank} (pid {each.pid}) stopped by us: {say_end(each.exit_code)}{stacks}"


def say_end(exit_code: int) -> str:
    """How a process ended."""
    return f"killed by {Signals(-exit_code).name}" if exit_code < 0 else f"exited {exit_code}"


def say_time(seconds: float) -> str:
    """A time as a person would write it."""
    return f"{seconds:.9g}"
