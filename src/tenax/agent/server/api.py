"""TorchElastic's agent API: worker spec, worker group, run result and the base agents.

``SimpleElasticAgent`` is the adapter for TorchElastic's hooks: the polling loop below runs a subclass that overrides
``_start_workers``, ``_stop_workers``, ``_monitor_workers``, ``_shutdown`` and so on. The hooks can only be polled.
``LocalElasticAgent`` uses this loop only if one of its hooks is overridden.

An agent with hooks has no steps from which its events and metrics could be derived (``tenax._node.sinks``): the hooks
record them. Nothing is built without a handler, and no handler can block or fail the agent: each runs behind a sink.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from tenax._core.model import MAX_EARLIER, Evidence, Failure
from tenax._core.policy import (
    BudgetPolicy,
    Change,
    GiveUp,
    History,
    Keep,
    Restart,
    RestartPolicy,
    Wait,
    ask_policy,
    first_cause_first,
)
from tenax._core.text import one_line
from tenax._logs.specs import Std
from tenax._node.signals import DEFAULT_SIGNALS, parse_signals
from tenax._node.sinks import Sinks
from tenax.multiprocessing.api import SignalException, signals_as_exceptions
from tenax.rendezvous.api import RendezvousGracefulExitError, RendezvousHandler

if TYPE_CHECKING:
    from tenax._core.commands import EndWorker
    from tenax._core.events import ScopeExpired
    from tenax.events import Event, EventSource
    from tenax.events._status import Moment, Origin
    from tenax.multiprocessing.errors import ProcessFailure
    from tenax.numa.binding import NumaOptions

__all__ = [
    "ElasticAgent",
    "RunResult",
    "SimpleElasticAgent",
    "Worker",
    "WorkerGroup",
    "WorkerSpec",
    "WorkerState",
]

_EXCHANGE_TIMEOUT_S = 300.0  # for the nodes of a group to exchange their roles
_POLL_INTERVAL_S = 1.0
DEFAULT_ROLE = "default"
_Hook = TypeVar("_Hook", bound=Callable[..., Any])


@dataclass
class WorkerSpec:
    """What the workers of one node run, and how many of them.

    ``role``: role of the workers, in their environment and in the prefix of their lines.
    ``local_world_size``: number of workers.
    ``rdzv_handler``: the rendezvous. None: a single node.
    ``entrypoint``: a function, or the path of a program. ``fn`` is its old name.
    ``args``: its arguments; ``${local_rank}`` in a program's argument becomes the worker's local rank.
    ``max_restarts``: maximum number of restarts after failures.
    ``monitor_interval``: seconds between two polls of a subclass with its own hooks. Otherwise unused.
    ``master_addr``, ``master_port``: where rank 0 hosts the store; None: chosen for each generation.
    ``local_addr``: the address of this node.
    ``event_log_handler``: names of event handlers, besides configured ones: ``"console,jsonl:PATH"``.
    ``numa_options``: how workers are bound to CPUs.
    ``duplicate_stdout_filters``, ``duplicate_stderr_filters``: teed lines that contain one of these texts are copied
    to one file per node.
    ``virtual_local_rank``: every worker gets LOCAL_RANK=0 and only its own GPU.
    ``redirects``, ``tee``: where output goes, for a ``LocalElasticAgent`` without ``logs_specs``.
    """

    role: str = DEFAULT_ROLE
    local_world_size: int = 1
    rdzv_handler: RendezvousHandler | None = None
    fn: Callable[..., Any] | None = None
    entrypoint: Callable[..., Any] | str | None = None
    args: tuple[Any, ...] = ()
    max_restarts: int = 3
    monitor_interval: float = 0.1
    master_port: int | None = None
    master_addr: str | None = None
    local_addr: str | None = None
    event_log_handler: str = "null"
    numa_options: NumaOptions | None = None
    duplicate_stdout_filters: list[str] | None = None
    duplicate_stderr_filters: list[str] | None = None
    virtual_local_rank: bool = False
    redirects: Std | dict[int, Std] = Std.NONE
    tee: Std | dict[int, Std] = Std.NONE

    def __post_init__(self) -> None:
        if self.local_world_size < 1:
            raise AssertionError(f"local_world_size is {self.local_world_size}; expected at least 1 worker")
        if self.monitor_interval <= 0:
            raise AssertionError(f"monitor_interval is {self.monitor_interval}; expected a positive number of seconds")
        if self.fn is not None:
            warnings.warn(
                "WorkerSpec.fn is the old name of WorkerSpec.entrypoint; use entrypoint",
                DeprecationWarning,
                stacklevel=3,
            )
            self.entrypoint = self.fn
        if not self.entrypoint:
            raise AssertionError("WorkerSpec needs an entrypoint: a function or the path of a program")

    def get_entrypoint_name(self) -> str:
        """Return the function's name, or the last part of the program's path."""
        if isinstance(self.entrypoint, str):
            return self.entrypoint.rpartition("/")[2]
        return getattr(self.entrypoint, "__qualname__", type(self.entrypoint).__name__)


class Worker:
    """One worker of a group. The agent chooses its ``id``; a local agent uses the pid."""

    __slots__ = ("global_rank", "id", "local_rank", "role_rank", "role_world_size", "world_size")

    def __init__(
        self,
        local_rank: int,
        global_rank: int = -1,
        role_rank: int = -1,
        world_size: int = -1,
        role_world_size: int = -1,
    ) -> None:
        self.id: Any = None
        self.local_rank = local_rank
        self.global_rank = global_rank
        self.role_rank = role_rank
        self.world_size = world_size
        self.role_world_size = role_world_size

    def __str__(self) -> str:
        names = ("local_rank", "global_rank", "role_rank", "world_size", "role_world_size")
        return ",".join(f"{name}={getattr(self, name)}" for name in names)

    __repr__ = __str__


class WorkerState(str, Enum):
    """The state of a group of workers."""

    UNKNOWN = "UNKNOWN"
    INIT = "INIT"
    HEALTHY = "HEALTHY"
    UNHEALTHY = "UNHEALTHY"
    STOPPED = "STOPPED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"

    @staticmethod
    def is_running(state: WorkerState) -> bool:
        """Return whether processes of the group are alive."""
        return state in (WorkerState.HEALTHY, WorkerState.UNHEALTHY)


class WorkerGroup:
    """The workers that one agent manages, as one unit."""

    __slots__ = ("group_rank", "group_world_size", "master_addr", "master_port", "spec", "state", "store", "workers")

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.workers = [Worker(local_rank=rank) for rank in range(spec.local_world_size)]
        self.store: Any = None
        self.group_rank: int | None = None
        self.group_world_size: int | None = None
        self.master_addr: str | None = None
        self.master_port: int | None = None
        self.state = WorkerState.INIT


@dataclass
class RunResult:
    """The result of a run. ``return_values`` and ``failures`` are keyed by global rank; exactly one of them is set."""

    state: WorkerState
    return_values: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, ProcessFailure] = field(default_factory=dict)

    def is_failed(self) -> bool:
        """Return True unless the run succeeded, also if a worker could not be killed."""
        return self.state in (WorkerState.FAILED, WorkerState.UNHEALTHY)


class _RoleInstanceInfo(msgspec.Struct, eq=False):
    """The workers of one agent, as sent to the other agents. Third-party launchers that assign ranks use it."""

    role: str
    rank: int
    local_world_size: int

    def serialize(self) -> bytes:
        return msgspec.json.encode(self)

    @staticmethod
    def deserialize(data: bytes) -> _RoleInstanceInfo:
        return msgspec.json.decode(data, type=_RoleInstanceInfo)

    @staticmethod
    def compare(obj1: _RoleInstanceInfo, obj2: _RoleInstanceInfo) -> int:
        """Compare by role, then by rank; return -1, 0 or 1."""
        one, other = (obj1.role, obj1.rank), (obj2.role, obj2.rank)
        return (one > other) - (one < other)

    @staticmethod
    def find_role_boundaries(roles_infos: list[_RoleInstanceInfo], role: str) -> tuple[int, int]:
        """Return the first and last index of this role in a sorted list; (-1, -2) if it is missing."""
        found = [index for index, info in enumerate(roles_infos) if info.role == role]
        return (found[0], found[-1]) if found else (-1, -2)


def measured(hook: _Hook, name: str = "") -> _Hook:
    """Emit metrics for each call of this hook, under its name or another: success or failure, and the duration."""
    name = name or hook.__qualname__

    @wraps(hook)
    def timed(self: SimpleElasticAgent, *args: Any, **kwargs: Any) -> Any:
        began_at = time.monotonic()
        end = "failure"
        try:
            result = hook(self, *args, **kwargs)
            end = "success"
            return result
        finally:
            self._measure(f"{name}.{end}", 1)
            self._measure(f"{name}.duration.ms", int((time.monotonic() - began_at) * 1000))

    return timed  # type: ignore[return-value]


class _GroupChanged(Exception):
    """A node joined or left while ranks were being assigned."""


class ElasticAgent(ABC):
    """A process that runs a group of workers."""

    @abstractmethod
    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run to the end. Returns a result when workers succeed or fail; raises when the agent itself fails."""

    @abstractmethod
    def get_worker_group(self, role: str = DEFAULT_ROLE) -> WorkerGroup:
        """Return the group, which changes while the agent runs."""


class SimpleElasticAgent(ElasticAgent):
    """An agent for one role; a subclass provides the hooks."""

    def __init__(
        self,
        spec: WorkerSpec,
        exit_barrier_timeout: float = 300,
        shutdown_timeout: int = 30,
        *,
        restart_policy: RestartPolicy | None = None,
        signals_to_handle: str = DEFAULT_SIGNALS,
        sinks: Sinks | None = None,
        records_end: bool = False,
    ) -> None:
        """``sinks``: where metrics and events go; None: ``spec.event_log_handler`` and the configured handlers.

        ``records_end``: whether to record the end of this agent as an event; a launcher may do that itself.
        """
        self._sinks = sinks
        self._at_exit: weakref.finalize[..., Any] | None = None
        self._records_end = records_end
        self._began_at = time.monotonic()
        self._worker_group = WorkerGroup(spec)
        self._signals = signals_to_handle
        self._remaining_restarts = spec.max_restarts
        self._store: Any = None
        self._exit_barrier_timeout = exit_barrier_timeout
        self._shutdown_timeout = shutdown_timeout
        self._policy = restart_policy or BudgetPolicy()
        self._earlier: list[Failure] = []
        self._generations = 0
        self._formed_at = self._longest_s = 0.0  # of the current generation; of the longest earlier one

    def get_worker_group(self, role: str = DEFAULT_ROLE) -> WorkerGroup:  # noqa: ARG002 - one role
        return self._worker_group

    # --- hooks that a subclass provides -------------------------------------------------------------------------------

    @abstractmethod
    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start the workers. Returns their ids by local rank."""

    @abstractmethod
    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """Stop the workers. Must not fail if some have exited already."""

    @abstractmethod
    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Return the state of the workers without blocking."""

    @abstractmethod
    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        """Release all resources. Called once at the end of ``run``, with the signal that stopped it, if any."""

    # --- hooks with a default -----------------------------------------------------------------------------------------

    @measured
    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Join the other nodes and assign ranks. Repeat if a node is lost meanwhile."""
        while True:
            try:
                self._join_group(worker_group)
            except _GroupChanged:
                continue
            return

    def _join_group(self, worker_group: WorkerGroup) -> None:
        spec = worker_group.spec
        with self.record_duration("RENDEZVOUS"):
            info = self._handler(spec).next_rendezvous()
        bootstrap = None
        if isinstance(info, tuple) and len(info) == 3:  # the older form: (store, rank, world size)
            store, group_rank, group_world_size = info
        elif hasattr(info, "world_size"):
            store, group_rank, group_world_size = info.store, info.rank, info.world_size
            bootstrap = info.bootstrap_store_info
        else:
            raise TypeError(
                f"next_rendezvous() of {type(spec.rdzv_handler).__name__} returned {info!r}; expected a RendezvousInfo "
                "or (store, rank, world_size)"
            )
        self._store = worker_group.store = store
        worker_group.group_rank = group_rank
        worker_group.group_world_size = group_world_size
        with self.record_duration("ASSIGN_WORKER_RANKS"):
            worker_group.workers = self._assign_worker_ranks(store, group_rank, group_world_size, spec)
        if bootstrap is None:
            bootstrap = self._agree_on_master(store, group_rank, group_world_size, spec)
        worker_group.master_addr = spec.master_addr or bootstrap.master_addr
        worker_group.master_port = spec.master_port or bootstrap.master_port

    @staticmethod
    def _agree_on_master(store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec) -> Any:
        from tenax.rendezvous.api import RendezvousStoreInfo

        if group_world_size == 1:  # no other node connects, so no name lookup is needed
            from tenax._engines.free_port import free_port
            from tenax._engines.local import LOOPBACK

            return RendezvousStoreInfo(spec.local_addr or LOOPBACK, free_port())
        return RendezvousStoreInfo.build(group_rank, store, spec.local_addr)

    def _handler(self, spec: WorkerSpec) -> RendezvousHandler:
        if spec.rdzv_handler is None:
            from tenax.rendezvous._engine_handler import LocalRendezvousHandler

            spec.rdzv_handler = LocalRendezvousHandler(f"{spec.role}-{time.time_ns():x}")
        return spec.rdzv_handler

    @measured
    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """Assign global ranks in the order of group ranks; role ranks count only workers of the same role."""
        own = _RoleInstanceInfo(spec.role, group_rank, spec.local_world_size)
        infos = [own]
        if group_world_size > 1:
            key = "torchelastic/role_info/"
            store.set(f"{key}{group_rank}", own.serialize())
            values = (self._await(store, f"{key}{rank}", spec) for rank in range(group_world_size))
            infos = [_RoleInstanceInfo.deserialize(value) for value in values]
        before = infos[:group_rank]
        same_role = [info for info in infos if info.role == spec.role]
        first_rank = sum(info.local_world_size for info in before)
        first_role_rank = sum(info.local_world_size for info in before if info.role == spec.role)
        return [
            Worker(
                local_rank=local_rank,
                global_rank=first_rank + local_rank,
                role_rank=first_role_rank + local_rank,
                world_size=sum(info.local_world_size for info in infos),
                role_world_size=sum(info.local_world_size for info in same_role),
            )
            for local_rank in range(spec.local_world_size)
        ]

    def _await(self, store: Any, key: str, spec: WorkerSpec) -> bytes:
        """Return the value that another node sets. Raises _GroupChanged if a node died and the others rejoin."""
        from datetime import timedelta

        deadline = time.monotonic() + _EXCHANGE_TIMEOUT_S
        while time.monotonic() < deadline:
            try:
                store.wait([key], timedelta(seconds=_POLL_INTERVAL_S))
            except (RuntimeError, TimeoutError, LookupError):  # stores differ in what they raise for a missing key
                if self._handler(spec).num_nodes_waiting() > 0:
                    raise _GroupChanged from None
                continue
            break
        value: bytes = store.get(key)  # if it is still missing, the store raises its own error
        return value

    @measured
    def _initialize_workers(self, worker_group: WorkerGroup) -> None:
        self._rendezvous(worker_group)
        ids = self._start_workers(worker_group)
        for local_rank, worker_id in ids.items():
            worker = worker_group.workers[local_rank]
            worker.id = worker_id
            self._record(partial(self._construct_event, "START", "WORKER", worker))
        worker_group.state = WorkerState.HEALTHY

    @measured
    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        self._stop_workers(worker_group)
        worker_group.state = WorkerState.STOPPED
        self._initialize_workers(worker_group)

    def _exit_barrier(self) -> None:
        """Wait for the other nodes before leaving, so that a store in use stays up."""
        group = self._worker_group
        if self._store is None or group.group_world_size in (None, 1):
            return
        from tenax.utils.store import barrier

        try:
            barrier(
                self._store, group.group_world_size, "torchelastic/agent/terminal_state", self._exit_barrier_timeout
            )
        except SignalException:
            raise
        except Exception as error:  # a missing peer is not a failure of this node
            warnings.warn(f"the other nodes did not reach the exit barrier: {error}", RuntimeWarning, stacklevel=2)

    # --- the loop -----------------------------------------------------------------------------------------------------

    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        self._open_sinks()
        try:
            result = self._run_and_shut_down(role)
            if self._records_end:
                self._record_end_of_agent(result)
            return result
        except Exception:
            if self._records_end:
                self._record(self.get_event_failed)
            raise
        finally:
            if (sinks := self._forget_sinks()) is not None:
                self._warn(*sinks.close())

    @partial(measured, name="SimpleElasticAgent.run")
    def _run_and_shut_down(self, role: str) -> RunResult:
        is_shut_down = False
        try:
            with signals_as_exceptions(parse_signals(self._signals)):
                result = self._invoke_run(role)
            self._record_metrics(result)
            self._record_worker_events(result)
            return result
        except SignalException as caught:
            self._shutdown(caught.sigval, self._shutdown_timeout)
            is_shut_down = True
            raise
        except RendezvousGracefulExitError:  # the other nodes do not need this one: not a failure
            return RunResult(WorkerState.SUCCEEDED)
        finally:
            if not is_shut_down:
                self._shutdown(timeout=self._shutdown_timeout)

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:  # noqa: ARG002 - one role
        group = self._worker_group
        spec = group.spec
        self._report_health("the other nodes")
        self._start_generation(self._initialize_workers, 0.0)
        while True:
            time.sleep(spec.monitor_interval)  # these hooks can only be polled
            result = self._monitor_workers(group)
            ran_s = time.monotonic() - self._formed_at
            group.state = result.state
            self._report_health("" if result.state is WorkerState.HEALTHY else "the other nodes")
            self._measure(f"workers.{spec.role}.remaining_restarts", self._remaining_restarts)
            self._measure(f"workers.{spec.role}.{result.state.value.lower()}", 1)
            match result.state:
                case WorkerState.SUCCEEDED:
                    self._exit_barrier()
                    return result
                case WorkerState.FAILED | WorkerState.UNHEALTHY:
                    if not self._may_restart(result):
                        self._stop_workers(group)
                        group.state = WorkerState.FAILED
                        return RunResult(WorkerState.FAILED, failures=result.failures)
                    self._start_generation(self._restart_workers, ran_s)
                case WorkerState.HEALTHY:
                    waiting = self._handler(spec).num_nodes_waiting()
                    if waiting > 0 and self._may_admit(waiting, ran_s):
                        self._report_health("the other nodes")
                        self._start_generation(self._restart_workers, ran_s)
                case _:
                    raise RuntimeError(f"[{spec.role}] unexpected state of the workers: {result.state.value}")

    def _start_generation(self, hook: Callable[[WorkerGroup], None], last_ran_s: float) -> None:
        self._longest_s = max(self._longest_s, last_ran_s)
        hook(self._worker_group)
        self._generations += 1
        self._formed_at = time.monotonic()

    def _report_health(self, waits_for: str = "") -> None:
        """Report to the health check that the loop makes progress, or is about to wait for ``waits_for``."""

    def _history(self, lived_s: float, failures: tuple[Failure, ...] = ()) -> History:
        spec = self._worker_group.spec
        used = spec.max_restarts - self._remaining_restarts
        world_size = self._worker_group.workers[0].world_size
        return History(used, spec.max_restarts, tuple(self._earlier), failures, world_size, lived_s, self._longest_s)

    def _may_admit(self, waiting: int, ran_s: float) -> bool:
        """Call the restart policy because nodes wait to be admitted, and count the restart if it charges one."""
        change = Change("join", (), f"{waiting} node{'s' * (waiting > 1)} joined")
        decision = ask_policy(self._policy, change, self._history(ran_s), reraise=(SignalException,))
        if isinstance(decision, GiveUp):
            raise RuntimeError(decision.why)
        self._remaining_restarts -= isinstance(decision, Restart)
        return not isinstance(decision, Keep)

    def _may_restart(self, result: RunResult) -> bool:
        """Call the restart policy with what is known on this node, and count the restart that it grants."""
        failures = first_cause_first(_as_core_failures(result, self._generations), self._formed_at)
        history = self._history(failures[0].lived_s, tuple(failures))
        decision = ask_policy(self._policy, failures[0], history, reraise=(SignalException,))
        if isinstance(decision, GiveUp):
            if type(self._policy) is not BudgetPolicy:
                self._warn(f"giving up: {decision.why}")
            return False
        if isinstance(decision, Wait):
            time.sleep(decision.seconds)
        self._remaining_restarts -= 1
        self._earlier = [*self._earlier[-MAX_EARLIER + 1 :], failures[0].brief()]
        return True

    # --- sinks --------------------------------------------------------------------------------------------------------

    def _open_sinks(self) -> Sinks:
        """Open the sinks on first use. If a subclass's ``run`` never closes them, the interpreter's exit does."""
        if self._sinks is None:
            self._sinks = Sinks(self._worker_group.spec.event_log_handler)
            self._at_exit = weakref.finalize(self, self._sinks.close)
        return self._sinks

    def _forget_sinks(self) -> Sinks | None:
        sinks, self._sinks = self._sinks, None
        if self._at_exit is not None:
            self._at_exit.detach()
        return sinks

    def _warn(self, *lines: str) -> None:
        """Print warnings; an agent with hooks has no console messages of its own."""
        for line in lines:
            sys.stderr.write(f"tenax: {one_line(line)}\n")

    def _measure(self, name: str, value: int) -> None:
        sinks = self._open_sinks()
        if sinks.has_metrics:
            from tenax.metrics import MetricData

            sinks.emit(MetricData(time.time(), "torchelastic", name, value))
            self._warn(*sinks.new_errors())

    def _record(self, make: Callable[[], Event]) -> None:
        sinks = self._open_sinks()
        if sinks.has_events:
            sinks.record(make())
            self._warn(*sinks.new_errors())

    # --- events -------------------------------------------------------------------------------------------------------

    def get_event_succeeded(self) -> Event:
        """Return the event that this agent succeeded, for a launcher to record."""
        return self._construct_event("SUCCEEDED", "AGENT")

    @property
    def _total_execution_time(self) -> int:
        """Seconds since this agent was created."""
        return int(time.monotonic() - self._began_at)

    def _record_end_of_agent(self, result: RunResult) -> None:
        if result.is_failed():
            from tenax._failures.process_failure import by_cause

            first = min(result.failures.values(), key=by_cause, default=None)
            why = "" if first is None else str(first.message)
            self._record(lambda: self._construct_event("FAILED", "AGENT", raw_error=why))
        else:
            self._record(self.get_event_succeeded)

    def get_event_failed(self) -> Event:
        """Return the event that this agent failed, with the exception being handled, for a launcher to record."""
        import traceback

        return self._construct_event("FAILED", "AGENT", raw_error=traceback.format_exc())

    @contextmanager
    def record_duration(self, state: str) -> Iterator[None]:
        """Record an event with the duration of the block, also when it raises."""
        began_at = time.perf_counter()
        try:
            yield
        finally:
            duration_ms = (time.perf_counter() - began_at) * 1000
            self._record(lambda: self._construct_event(state, "AGENT", duration_ms=duration_ms))

    def _construct_event(
        self,
        state: str,
        source: EventSource | str,
        worker: Worker | None = None,
        raw_error: str | None = None,
        duration_ms: float | None = None,
        exit_code: int | None = None,
        worker_pid: int | None = None,
    ) -> Event:
        """Return an event in TorchElastic's form. ``source`` is ignored: it follows from ``worker``."""
        del source
        from tenax.events._status import WorkerOfGroup, status_event

        which = None
        if worker is not None:
            which = WorkerOfGroup(
                local_rank=worker.local_rank,
                global_rank=worker.global_rank,
                role_rank=worker.role_rank,
                role_world_size=worker.role_world_size,
                worker_id=None if worker.id is None else str(worker.id),
                pid=worker_pid,
                exit_code=exit_code,
            )
        return status_event(state, *self._where_and_when(), which, raw_error=raw_error, duration_ms=duration_ms)

    def _where_and_when(self) -> tuple[Origin, Moment]:
        from tenax.events._status import Moment, Origin

        group = self._worker_group
        spec = group.spec
        handler = spec.rdzv_handler
        origin = Origin(
            run_id=handler.get_run_id() if handler is not None else "",
            role=spec.role,
            hostname=os.uname().nodename,
            rdzv_backend=self._backend_name(),
            entry_point=spec.get_entrypoint_name(),
        )
        moment = Moment(
            timestamp_ms=int(time.time() * 1000),
            total_run_time_s=self._total_execution_time,
            group_rank=group.group_rank,
            group_world_size=group.group_world_size,
            restarts_used=spec.max_restarts - self._remaining_restarts,
        )
        return origin, moment

    def _record_watchdog(self, name: str, about: ScopeExpired | EndWorker | None) -> None:
        """Record an event of the watchdog. Called in the thread that watches the workers."""

        def make() -> Event:
            from tenax.events._status import status_event
            from tenax.events._view import watchdog_details

            return status_event("RUNNING", *self._where_and_when(), name=name, more=watchdog_details(name, about))

        self._record(make)

    def _backend_name(self) -> str:
        """Return the backend's name; a third-party handler may have none."""
        get_backend = getattr(self._worker_group.spec.rdzv_handler, "get_backend", None)
        return str(get_backend()) if get_backend is not None else ""

    def _record_worker_events(self, result: RunResult) -> None:
        for worker in self._worker_group.workers:
            failure = result.failures.get(worker.global_rank)
            state = "TERMINATED" if result.failures and failure is None else result.state.value
            how: dict[str, Any] = {} if result.failures else {"exit_code": 0}
            if failure is not None:
                error = json.dumps(failure.error_file_data)
                how = {"raw_error": error, "exit_code": failure.exitcode, "worker_pid": failure.pid}
            self._record(partial(self._construct_event, state, "WORKER", worker, **how))

    # --- metrics ------------------------------------------------------------------------------------------------------

    def _record_metrics(self, result: RunResult) -> None:
        spec = self._worker_group.spec
        has_failed, has_retried = result.is_failed(), self._remaining_restarts < spec.max_restarts
        self._record_flakiness_metric(has_failed)
        self._measure(f"workers.{spec.role}.run_total", 1)
        for end, is_so in (("success", not has_failed), ("failed", has_failed)):
            self._measure(f"workers.{spec.role}.run_{end}_with_retries", int(is_so and has_retried))
            self._measure(f"workers.{spec.role}.run_{end}_no_retries", int(is_so and not has_retried))

    def _record_flakiness_metric(self, is_failed: bool = False) -> None:
        """Emit flakiness: 0 without restarts, 100 for a failed run."""
        spec = self._worker_group.spec
        flakiness = 100 - 100 * (self._remaining_restarts + 1) / (spec.max_restarts + 1)
        self._measure(f"workers.{spec.role}.flakiness", 100 if is_failed else int(flakiness))


def _as_core_failures(result: RunResult, generation: int) -> list[Failure]:
    from tenax._failures.evidence import gather

    now, here = time.monotonic(), os.uname().nodename
    to_agent_clock = now - time.time()
    if not result.failures:
        return [Failure(generation, 0, 0, 0, 1, now, reason="the workers are unhealthy", host=here)]
    found = []
    for rank, each in result.failures.items():  # torch's own class has fewer attributes
        evidence = getattr(each, "evidence", Evidence())
        if evidence == Evidence():
            evidence = gather(
                pid=each.pid,
                exit_code=each.exitcode,
                error_file=each.error_file,
                wall_to_agent_clock=to_agent_clock,
                seen_at=now,
            )
        seen_at = min(now, getattr(each, "raised_at", each.timestamp) + to_agent_clock)
        host = getattr(each, "host", "") or here
        found.append(
            Failure(generation, each.local_rank, rank, each.pid, each.exitcode, seen_at, evidence=evidence, host=host)
        )
    return found


def _get_fq_hostname() -> str:
    """Return the full name of this host. torch.distributed.checkpoint imports it, also under ``tenax.compat``."""
    import socket

    return socket.getfqdn(socket.gethostname())
