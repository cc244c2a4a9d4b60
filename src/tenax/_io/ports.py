"""Ports: what the runtime needs from the world, as interfaces. Adapters implement them; fakes implement them too.

Facts flow one way: an adapter is given a loop and an ``emit`` function when it is opened, and calls it with events. It
never calls back into decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

from tenax._core.model import AgentSettings
from tenax._core.policy import RestartPolicy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tenax._core.commands import AnyCommand, ExamineFailure
    from tenax._core.coordinator import AnyCoordinatorEvent, CoordinatorState, RunSettings, Send
    from tenax._core.events import AnyEvent, ScopeExpired
    from tenax._core.messages import FromNode, NodeInfo, WorkerProgress
    from tenax._core.model import Evidence
    from tenax._core.requests import AnyRequest, LogsRequest, OfNode
    from tenax._view.status import RunStatus

    Emit = Callable[[AnyEvent], None]
    Reply = Callable[[Any, str], None]  # a value that can be written as JSON, or a sentence that says why there is none
    RecordRun = Callable[[float, AnyCoordinatorEvent, list[Send], CoordinatorState], None]


class Watchable(Protocol):
    """Something with a descriptor that a loop can watch."""

    def fileno(self) -> int: ...

    @property
    def wants_to_write(self) -> bool: ...

    def on_readable(self) -> None: ...

    def on_writable(self) -> None: ...


class Launch(msgspec.Struct, frozen=True):
    """How to start one worker."""

    env: dict[str, str]
    argv: list[str] | None = None  # None: the keeper forks and calls the function it holds
    cwd: str = ""  # empty: where the agent was started
    cpus: tuple[int, ...] = ()  # empty: anywhere
    # number in the worker -> our descriptor; a negative one: any number that is free there
    descriptors: dict[int, int] = {}


class Entrypoint(Protocol):
    """What workers run: a command or a function."""

    name: str

    def launch(self, local_rank: int, env: dict[str, str]) -> Launch: ...

    def release(self, local_rank: int) -> None:
        """The worker was started (or could not be): close what was only needed for that."""

    def collect(self, local_rank: int, exit_code: int) -> str:
        """The worker ended. Returns why this is a failure although the exit code is 0, or nothing."""

    def end_wait(self) -> None:
        """Let workers exit that have done their work and wait for the others of this node: all are being stopped."""

    def return_values(self) -> dict[int, Any]:
        """What the workers of the last generation returned, by local rank."""

    def close(self) -> None:
        """The run is over: close what is still held for workers of which nothing was heard any more."""


class Processes(Watchable, Protocol):
    """Starts and ends the workers of a node. Answers come as events."""

    def open(self, emit: Emit) -> None: ...

    def start(self, generation: int, local_rank: int, launch: Launch) -> None: ...

    def signal(self, generation: int, number: int) -> None: ...

    def dump_stacks(self, generation: int, local_rank: int) -> None:
        """Make one worker write down its stacks. Is answered only if it cannot be asked (``StacksRefused``)."""

    def end(self, generation: int, local_rank: int, number: int) -> None:
        """Send a signal to one worker, to end it. What it leaves behind is treated as that of one that crashed."""

    def clear(self, generation: int) -> None: ...

    def kill(self, generation: int) -> None: ...

    def hold(self, seconds: float) -> None:
        """Kill everything that long from now, unless this is said again before: should the agent itself be stopped."""

    def keep(self, name: str, descriptor: int) -> None:
        """Hold a copy of this connection, so that it is not closed before everything that we started is gone."""

    def release(self, name: str) -> None:
        """Let go of that copy."""

    def close(self) -> None: ...


class ScopeWatch(Watchable, Protocol):
    """Watches the scopes that workers must leave in time."""

    def open(self, now: Callable[[], float], say: Callable[[str], None]) -> None: ...

    def heard(self, event: AnyEvent, commands: list[AnyCommand]) -> None:
        """A step of the agent machine: who lives, and whether anybody is being watched at all."""

    def next_deadline(self) -> float | None: ...

    def expired(self) -> list[ScopeExpired]:
        """What is due. Whatever has arrived by now is read first: lateness of ours is nobody's."""

    def close(self) -> None: ...


class RequestRefused(ValueError):
    """The user explicitly asked for something that this machine cannot provide. Raised before any worker starts."""


class Cancellable(Protocol):
    def cancel(self) -> None: ...


class EventLoop(Protocol):
    """What an adapter may ask of the loop it lives in."""

    @property
    def now(self) -> Callable[[], float]: ...

    def watch(self, thing: Watchable) -> None: ...

    def unwatch(self, thing: Watchable) -> None: ...

    def at(self, when: float, call: Callable[[], None]) -> Cancellable: ...

    def soon(self, call: Callable[[], None]) -> None: ...


class Control(Protocol):
    """The way to the coordinator. What it says comes as events (``events.FromCoordinator``, ``events.Fenced``)."""

    def open(self, loop: EventLoop, emit: Emit, node: ControlledNode) -> None: ...

    def tell(self, message: FromNode) -> None: ...

    def cancel(self, why: str) -> None:
        """An operator's wish: end the run for every node. From any thread; after the end it means nothing."""

    def ask(self, request: AnyRequest, reply: Reply) -> None:
        """An operator's request, to wherever the coordinator is. Is answered exactly once, in the loop."""

    @property
    def where(self) -> str:
        """Where the coordinator is, for people; empty: in this process, and nowhere else."""

    def stays_for_others(self) -> bool:
        """This node has its verdict. Must its agent stay all the same, because others depend on it?"""

    def close(self) -> None: ...


class OperatorApi(Protocol):
    """Next to the coordinator: shows what it knows, and takes what is wanted of it."""

    def watch(self, on_step: Callable[[], None]) -> None: ...

    def unwatch(self, on_step: Callable[[], None]) -> None: ...

    def status(self) -> RunStatus: ...

    def ask(self, request: AnyRequest, reply: Reply) -> None: ...


class ControlledNode(msgspec.Struct, frozen=True):
    """What an engine must know of its node."""

    settings: AgentSettings
    policy: RestartPolicy | None  # for the coordinator, should it live here
    # Everything that a coordinator must know of us at this moment; said at the beginning of every connection.
    words: Callable[[NodeInfo], list[FromNode]]
    hold: Callable[[float], None]  # how many seconds from now the workers may live, whatever becomes of this agent
    keep: Callable[[str, int], None]  # hold a copy of a connection until nothing that this agent started is alive
    release: Callable[[str], None]
    say: Callable[[str], None]  # a line for the person at the console
    record_run: Callable[[RunSettings], RecordRun] = lambda _: lambda *_: None  # for the journal of a coordinator here
    answer: Callable[[OfNode, Reply], None] = lambda _, reply: reply(None, "this node answers nothing")
    # The coordinator is here now, with a desk where it can be asked, made on demand; None: not any more.
    serves: Callable[[Callable[[], OperatorApi] | None], None] = lambda _: None


class Output(msgspec.Struct, frozen=True):
    """Where one worker's output went in one generation."""

    stdout: int  # descriptors for the worker; the runtime closes them once it was started
    stderr: int
    env: Mapping[str, str] = {}


class Logs(Watchable, Protocol):
    """Where lines go."""

    def open(self) -> None: ...

    def prepare(self, generation: int, envs: dict[int, dict[str, str]]) -> dict[int, Output]: ...

    def has_error_file(self, local_rank: int) -> bool:
        """Whether this worker of the last generation left one."""

    def progress(self) -> tuple[WorkerProgress, ...]:
        """What the workers of the last generation have written down about their steps."""

    def answer(self, request: LogsRequest, generation: int, reply: Reply) -> None:
        """Whoever wants to see lines. ``generation`` is the current one."""

    def answer_the_last(self) -> Callable[[], float] | None:
        """The run is over: whoever follows lines gets what there is, and hears that this is all. Does not wait;
        returns how to know for how many seconds somebody may still be there (0: nobody is), if anybody has asked."""

    def examine(self, command: ExamineFailure, done: Callable[[Evidence], None]) -> None: ...

    def say(self, text: str, *, after_output: bool = False) -> None:
        """Show a line of the agent; with ``after_output``, below everything that the workers wrote."""

    def live(self, text: str) -> None: ...

    def close(self, last_words: str = "") -> None: ...
