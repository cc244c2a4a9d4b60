"""Ports: the interfaces between the runtime and the outside world. Adapters and fakes implement them.

Events flow one way: an adapter gets a loop and an ``emit`` function when it is opened, and reports events through
``emit``. It makes no decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

from tenax._core.model import AgentSettings
from tenax._core.policy import RestartPolicy
from tenax._io.loop import Loop, Timer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import ParamSpec, TypeVar

    from tenax._core.commands import ExamineFailure
    from tenax._core.coordinator import AnyCoordinatorEvent, CoordinatorState, RunSettings, Step
    from tenax._core.events import AnyEvent, LastLinesRead
    from tenax._core.messages import FromNode, NodeInfo, WorkerProgress
    from tenax._core.model import Evidence
    from tenax._core.requests import AnyRequest, LogsRequest, OfNode
    from tenax._view.status import RunStatus

    P = ParamSpec("P")
    M = TypeVar("M")
    Emit = Callable[[AnyEvent], None]
    Reply = Callable[[Any, str], None]  # a value that can be encoded as JSON, or an error message
    RecordRun = Callable[[float, AnyCoordinatorEvent, Step, CoordinatorState], None]


class Watchable(Protocol):
    """Something with a descriptor that a loop can watch. A subclass that only reads needs just the first two.

    One that does not always read also has a property ``wants_to_read``.
    """

    def fileno(self) -> int: ...

    def on_readable(self) -> None: ...

    @property
    def wants_to_write(self) -> bool:
        return False

    def on_writable(self) -> None:
        """Write what is queued."""
        assert not self.wants_to_write


class Launch(msgspec.Struct, frozen=True):
    """How to start one worker."""

    env: dict[str, str]
    argv: list[str] | None = None  # None: the keeper forks and calls the function it holds
    cwd: str = ""  # empty: the agent's working directory
    cpus: tuple[int, ...] = ()  # empty: all CPUs
    # descriptor number in the worker -> the agent's descriptor; a negative number: any free number
    descriptors: dict[int, int] = {}


class Entrypoint(Protocol):
    """What workers run: a command or a function."""

    name: str
    can_survive: bool  # whether a worker can take part in more than one generation

    def launch(self, local_rank: int, env: dict[str, str]) -> Launch: ...

    def release(self, local_rank: int) -> None:
        """Close what was needed only to start the worker. Called after the start, successful or not."""

    def collect(self, local_rank: int, exit_code: int) -> str:
        """Take the result of a worker that exited. Return why exit code 0 is a failure nevertheless, or ""."""

    def end_wait(self) -> None:
        """Let finished workers exit instead of waiting for the node's other workers: all are being stopped."""

    def return_values(self) -> dict[int, Any]:
        """Return what the workers of the last generation returned, by local rank."""

    def close(self) -> None:
        """Close what is still open for workers whose exit was never reported. The run is over."""


class Processes(Watchable, Protocol):
    """Starts and stops the workers of a node. Results are reported as events."""

    def open(self, emit: Emit) -> None: ...

    def start(self, generation: int, local_rank: int, launch: Launch) -> None: ...

    def signal(self, generation: int, number: int) -> None: ...

    def dump_stacks(self, generation: int, local_rank: int) -> None:
        """Make one worker dump its stacks. Emits ``StacksRefused`` if the worker cannot be signalled, else nothing."""

    def end(self, generation: int, local_rank: int, number: int) -> None:
        """Send a signal to one worker, to end it. Its leftovers are treated as those of a crashed worker."""

    def clear(self, generation: int, held: tuple[int, ...] = (), number: int = 0) -> None:
        """End what exited workers left behind. Held workers (local ranks) and their descendants stay.

        The reply has the number of the last clear, or 0 after ``kill``.
        """

    def adopt(self, generation: int, local_rank: int, following: int) -> None:
        """Make a held worker one of the following generation.

        Emits ``WorkerStarted`` of that generation with the same pid, or ``WorkerExited`` if the worker has exited.
        """

    def kill(self, generation: int) -> None: ...

    def hold(self, seconds: float) -> None:
        """Kill all workers in ``seconds`` unless called again before. This covers an agent that is itself stopped."""

    def keep(self, name: str, descriptor: int) -> None:
        """Hold a copy of this connection, so that it stays open until every process that we started has exited."""

    def release(self, name: str) -> None:
        """Close that copy."""

    def close(self) -> None: ...


class RequestRefused(ValueError):
    """The user requested something that this machine cannot provide. Raised before any worker starts."""


EventLoop = Loop
Cancellable = Timer


class Control(Protocol):
    """The connection to the coordinator. Its messages arrive as events (``FromCoordinator``, ``Fenced``)."""

    def open(self, loop: EventLoop, emit: Emit, node: ControlledNode) -> None: ...

    def send(self, message: FromNode) -> None: ...

    def cancel(self, why: str) -> None:
        """End the run for every node, for an operator. Call it in any thread. Does nothing after the end of the run."""

    def submit(self, request: AnyRequest, reply: Reply) -> None:
        """Forward an operator's request to the coordinator. ``reply`` is called exactly once, in the loop."""

    @property
    def where(self) -> str:
        """The coordinator's address, for display; empty if the coordinator runs in this process only."""

    def stays_for_others(self) -> bool:
        """Return True if this agent must keep running after its verdict because other nodes depend on it."""

    def close(self) -> None: ...


class OperatorService(Protocol):
    """Answers operators' requests in the process that runs the coordinator."""

    def watch(self, on_step: Callable[[], None]) -> None: ...

    def unwatch(self, on_step: Callable[[], None]) -> None: ...

    def status(self) -> RunStatus: ...

    def submit(self, request: AnyRequest, reply: Reply) -> None: ...


class CreateMachine(Protocol):
    """Creates a machine, and may record its calls."""

    def __call__(self, make: Callable[P, M], /, *args: P.args, **kwargs: P.kwargs) -> M: ...


def create_machine(make: Callable[P, M], /, *args: P.args, **kwargs: P.kwargs) -> M:
    """Create a machine that is not recorded."""
    return make(*args, **kwargs)


class ControlledNode(Protocol):
    """A node as its engine sees it."""

    @property
    def settings(self) -> AgentSettings: ...

    @property
    def policy(self) -> RestartPolicy | None:
        """For the coordinator, if it runs in this process."""

    def messages_on_connecting(self, node: NodeInfo) -> list[FromNode]:
        """Return the node's full current state as messages, sent at the start of every connection."""

    def hold(self, seconds: float) -> None:
        """Kill the workers in that many seconds unless called again, even without the agent."""

    def keep(self, name: str, descriptor: int) -> None:
        """Hold a copy of a connection until every process that this agent started is gone."""

    def release(self, name: str) -> None: ...

    def print_line(self, text: str) -> None: ...

    def record_run(self, settings: RunSettings) -> RecordRun:
        """Open the journal of a coordinator that starts in this process."""

    @property
    def create(self) -> CreateMachine:
        """For the machines of links and leadership. Their calls are recorded in a journal, if there is one."""

    def answer(self, request: OfNode, reply: Reply) -> None:
        """Answer a request that the coordinator forwarded to this node."""

    def set_operator_api(self, make_operator_api: Callable[[], OperatorService] | None) -> None:
        """Learn that the coordinator starts in this process, with a factory for its operator API, or stops (None)."""


class Output(msgspec.Struct, frozen=True):
    """Where one worker's output goes in one generation."""

    stdout: int  # descriptors for the worker; the runtime closes them after the start
    stderr: int
    env: Mapping[str, str] = {}


class Logs(Watchable, Protocol):
    """The workers' output and the agent's console lines."""

    def open(self) -> None: ...

    def prepare(
        self, generation: int, envs: dict[int, dict[str, str]], survivors: tuple[int, ...] = ()
    ) -> dict[int, Output]:
        """Open the streams of a new generation. Survivors (local ranks) keep theirs, and their files."""

    def error_files(self) -> dict[int, str]:
        """Return where each worker of the last generation writes an uncaught exception, by local rank."""

    def has_error_file(self, local_rank: int) -> bool:
        """Return True if this worker of the last generation wrote an error file."""

    def progress(self) -> tuple[WorkerProgress, ...]:
        """Return the steps that the workers of the last generation have recorded."""

    def output_times(self, done: Callable[[dict[int, float]], None]) -> None:
        """Pass to ``done`` when each worker last wrote something, by local rank. Does not wait."""

    def answer(self, request: LogsRequest, reply: Reply) -> None:
        """Answer a request for log lines."""

    def answer_final_requests(self) -> Callable[[], float] | None:
        """Answer all followers of log lines for the last time: the run is over. Does not wait.

        Return None if there were no requests, else a function that returns for how many more seconds followers may
        still be connected; 0 if none are left.
        """

    def examine(self, command: ExamineFailure, done: Callable[[Evidence], None]) -> None: ...

    def read_last_lines(self, generation: int, post: Callable[[LastLinesRead], None]) -> None:
        """Read the last lines of the generation's workers that run. Does not wait."""

    def print_line(self, text: str, *, after_output: bool = False, colour: str = "") -> None:
        """Print a line of the agent; with ``after_output``, after all output of the workers."""

    def live(self, text: str, since: float | None = None, until: float | None = None) -> None:
        """Set the live line of a terminal, with the time since then, or until SIGKILL."""

    def close(self, final_text: str = "") -> None: ...
