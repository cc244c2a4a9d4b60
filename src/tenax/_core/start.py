"""The machine of ``tenax start``: which hosts get an agent, and when. Events and the time in, commands out.

1. Named hosts are checked all at once, and no agent starts unless all of them pass. Hosts of a discovery script start
   one by one, as each passes.
2. An agent is *lost* if it was killed or its connection closed. It is started again after a delay that doubles, until
   ``max_restarts`` attempts in a row have failed. An agent that ran for a minute resets the count.
3. An agent that exits on its own is not started again. With exit code 0 or that of a worker it reports the end of the
   run: from then on no agent is started, and what remains 10 s later is stopped.
4. If fewer hosts remain than the run needs, the remaining agents are stopped.
5. The first signal is forwarded to the agents, which stop their workers. A second one is forwarded too, and kills them;
   connections that are still open 2 s later are closed, and 3 s after that their processes are killed.
6. There is an exit code only when every connection has ended.
"""

from __future__ import annotations

import msgspec

from tenax._core.model import assert_never
from tenax._core.text import format_seconds

_CHECK_S = 30.0  # a host must answer its check within
_SETTLE_S = 10.0  # after the end of the run, or with too few hosts, agents may exit on their own for
_KILL_S = 2.0  # agents that were killed may report that for
_CLOSE_S = 3.0  # the other side of a closed connection may take
_STABLE_S = 60.0
_MAX_DELAY_S = 30.0
_NEVER = float("inf")
_SIGTERM = 15
_BROKEN = 71
_SIGNAL_BASE = 128
# Exit codes of an agent that are not the verdict of the run.
_LEFT = frozenset({129, 130, 131, 143})  # a signal stopped this agent
_UNUSABLE = frozenset({2, 70, 71, 72})  # it could not work on this host


class Host(msgspec.Struct, frozen=True):
    name: str  # as ssh or srun takes it
    slots: int = 0  # workers on this host; 0: not given


class Event(msgspec.Struct, frozen=True, tag=True): ...


class HostsListed(Event, frozen=True):
    """The hosts of the command line, or of the discovery script."""

    hosts: tuple[Host, ...]


class Checked(Event, frozen=True):
    host: str
    problem: str = ""  # why no agent can be started there


class AgentExited(Event, frozen=True):
    host: str
    code: int  # negative: the signal that killed it


class Disconnected(Event, frozen=True):
    """A connection has ended, with its process on this host."""

    host: str
    why: str


class StopSignal(Event, frozen=True):
    number: int


class Tick(Event, frozen=True): ...


class Command(msgspec.Struct, frozen=True, tag=True): ...


class Connect(Command, frozen=True):
    host: Host
    order: int


class StartAgent(Command, frozen=True):
    host: str


class SignalAgent(Command, frozen=True):
    host: str
    number: int


class CloseConnection(Command, frozen=True):
    """Close the input of the connection: the other side then kills its agent."""

    host: str


class KillConnection(Command, frozen=True):
    host: str


class Print(Command, frozen=True):
    text: str


AnyEvent = HostsListed | Checked | AgentExited | Disconnected | StopSignal | Tick
AnyCommand = Connect | StartAgent | SignalAgent | CloseConnection | KillConnection | Print


class StartSettings(msgspec.Struct, frozen=True):
    min_nodes: int  # 0: all hosts
    max_restarts: int
    discovers: bool = False  # hosts may come and go


# The phases of a host. It has a connection in all but the first and the last.


class _Waiting(msgspec.Struct, frozen=True):
    until: float


class _Checking(msgspec.Struct, frozen=True):
    until: float


class _Ready(msgspec.Struct, frozen=True):
    """It passed its check."""


class _Running(msgspec.Struct, frozen=True):
    since: float
    is_stopping: bool = False
    until: float = _NEVER  # then its connection is closed


class _Over(msgspec.Struct, frozen=True):
    """Nothing runs there, and nothing will be started."""


class _Closing(msgspec.Struct, frozen=True):
    """The other side ends. At ``until`` the connection's process is killed."""

    until: float
    next: _Waiting | _Over


_AnyPhase = _Waiting | _Checking | _Ready | _Running | _Closing | _Over


class _HostState(msgspec.Struct):
    host: Host
    order: int
    phase: _AnyPhase
    attempts: int = 0  # that failed, in a row
    is_listed: bool = True

    @property
    def deadline(self) -> float:
        return getattr(self.phase, "until", _NEVER)


class StartMachine:
    def __init__(self, settings: StartSettings) -> None:
        self._settings = settings
        self._hosts: dict[str, _HostState] = {}
        self._commands: list[AnyCommand] = []
        self._verdict: int | None = None
        self._last_code = _BROKEN
        self._signal = 0  # the one that stops everything; 0: none
        self._is_refused = False  # a named host failed its check
        self._has_started = settings.discovers  # the agents of the named hosts
        self._settled_at = _NEVER  # then the remaining agents are stopped

    @property
    def exit_code(self) -> int | None:
        """None: not over."""
        if not (self._hosts or self._signal) or self._in(_Waiting, _Checking, _Ready, _Running, _Closing):
            return None
        if self._verdict is not None:
            return self._verdict
        if self._is_refused:
            return _BROKEN
        return _SIGNAL_BASE + self._signal if self._signal else self._last_code

    @property
    def deadline(self) -> float | None:
        moment = min([self._settled_at, *(each.deadline for each in self._hosts.values())])
        return moment if moment < _NEVER else None

    def step(self, event: AnyEvent, now: float) -> list[AnyCommand]:
        self._commands = []
        match event:
            case HostsListed():
                self._on_listed(event.hosts, now)
            case StopSignal():
                self._on_signal(event.number, now)
            case Checked():
                self._on_checked(self._hosts[event.host], event.problem, now)
            case AgentExited():
                self._on_exited(self._hosts[event.host], event.code, now)
            case Disconnected():
                self._on_disconnected(self._hosts[event.host], event.why, now)
            case Tick():
                pass
            case _:
                assert_never(event)
        for each in self._hosts.values():
            if now >= each.deadline:
                self._on_deadline(each, now)
        self._start_agents(now)
        self._stop_remaining(now)
        return self._commands

    @property
    def _is_ending(self) -> bool:
        return bool(self._signal) or self._is_refused or self._verdict is not None

    def _in(self, *phases: type) -> list[_HostState]:
        return [each for each in self._hosts.values() if isinstance(each.phase, phases)]

    def _on_listed(self, hosts: tuple[Host, ...], now: float) -> None:
        names = {host.name for host in hosts}
        for host in hosts:
            known = self._hosts.get(host.name)
            if known is None:
                self._hosts[host.name] = _HostState(host, len(self._hosts), _Waiting(now))
            elif not known.is_listed and isinstance(known.phase, _Over):
                self._hosts[host.name] = _HostState(host, known.order, _Waiting(now))
        for name, known in self._hosts.items():
            if known.is_listed and name not in names:
                known.is_listed = False
                self._print(f"{name} is no longer listed; its agent is stopped")
                self._stop(known, _SIGTERM, now)

    def _on_checked(self, each: _HostState, problem: str, now: float) -> None:
        if not isinstance(each.phase, _Checking):
            return
        if problem:
            self._close(each, self._after_failure(each, problem, now), now)
        else:
            each.phase = _Ready()

    def _on_exited(self, each: _HostState, code: int, now: float) -> None:
        if code < 0 and isinstance(each.phase, _Closing):
            return  # it was killed because its connection was closed
        if code < 0:
            each.phase = _Closing(now + _CLOSE_S, self._after_failure(each, f"signal {-code} killed its agent", now))
            return
        each.phase = _Closing(now + _CLOSE_S, _Over())
        self._last_code = code
        if code not in _LEFT | _UNUSABLE and self._verdict is None:
            self._verdict, self._settled_at = code, now + _SETTLE_S
        elif not self._is_ending and each.is_listed:
            self._print(f"{each.host.name}: its agent exited with code {code}")

    def _on_disconnected(self, each: _HostState, why: str, now: float) -> None:
        each.phase = each.phase.next if isinstance(each.phase, _Closing) else self._after_failure(each, why, now)

    def _after_failure(self, each: _HostState, why: str, now: float) -> _Waiting | _Over:
        """There is no agent on this host: report it, and return what follows."""
        is_stopping = isinstance(each.phase, _Running) and each.phase.is_stopping
        if is_stopping or (self._is_ending and self._has_started):
            return _Over()
        if not self._has_started:
            self._print(f"{each.host.name}: {why}")
            self._is_refused = not self._signal
            return _Over()
        if isinstance(each.phase, _Running) and now - each.phase.since >= _STABLE_S:
            each.attempts = 0
        each.attempts += 1
        if each.attempts > self._settings.max_restarts:
            self._print(f"{each.host.name}: {why}; giving up after {self._settings.max_restarts} restarts")
            return _Over()
        delay_s = min(_MAX_DELAY_S, 2.0 ** (each.attempts - 1))
        self._print(f"{each.host.name}: {why}; its agent is started again in {format_seconds(delay_s)}")
        return _Waiting(now + delay_s)

    def _on_deadline(self, each: _HostState, now: float) -> None:
        match each.phase:
            case _Waiting():
                each.phase = _Checking(now + _CHECK_S)
                self._commands.append(Connect(each.host, each.order))
            case _Checking():
                why = f"no answer within {format_seconds(_CHECK_S)}"
                self._close(each, self._after_failure(each, why, now), now)
            case _Running():
                self._close(each, _Over(), now)
            case _Closing(next=following):
                each.phase = _Closing(_NEVER, following)
                self._commands.append(KillConnection(each.host.name))

    def _start_agents(self, now: float) -> None:
        if self._is_ending or (not self._has_started and self._in(_Waiting, _Checking)):
            return
        for each in self._in(_Ready):
            self._has_started = True
            each.phase = _Running(now)
            self._commands.append(StartAgent(each.host.name))

    # --- stopping

    def _on_signal(self, number: int, now: float) -> None:
        is_second, self._signal = bool(self._signal), self._signal or number
        for each in self._hosts.values():
            self._stop(each, number, now, kill_at=now + _KILL_S if is_second else _NEVER)

    def _stop_remaining(self, now: float) -> None:
        """Stop what remains of a run that is over or cannot go on."""
        left = sum(getattr(each.phase, "next", each.phase) != _Over() for each in self._hosts.values())
        least = self._settings.min_nodes or len(self._hosts)
        can_go_on = left >= least or self._settings.discovers or not self._has_started
        if not can_go_on and not self._is_ending and self._settled_at == _NEVER:
            self._settled_at = now + _SETTLE_S
        if now >= self._settled_at:
            self._settled_at = _NEVER
            if self._verdict is None:
                self._verdict = self._last_code
                self._print(f"the run needs {least} hosts and has {left}; its agents are stopped")
            for each in self._in(_Running):
                self._stop(each, _SIGTERM, now)
        if self._is_ending and not (self._is_refused and self._in(_Checking)):  # every host is checked in any case
            for each in self._in(_Waiting, _Checking, _Ready):
                self._stop(each, _SIGTERM, now)

    def _stop(self, each: _HostState, number: int, now: float, kill_at: float = _NEVER) -> None:
        match each.phase:
            case _Waiting():
                each.phase = _Over()
            case _Checking() | _Ready():
                self._close(each, _Over(), now)
            case _Running():
                each.phase = _Running(each.phase.since, is_stopping=True, until=min(each.phase.until, kill_at))
                self._commands.append(SignalAgent(each.host.name, number))
            case _Closing():
                each.phase = _Closing(each.phase.until, _Over())

    def _close(self, each: _HostState, following: _Waiting | _Over, now: float) -> None:
        each.phase = _Closing(now + _CLOSE_S, following)
        self._commands.append(CloseConnection(each.host.name))

    def _print(self, text: str) -> None:
        self._commands.append(Print(text))
