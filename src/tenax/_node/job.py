"""The description of a job: one frozen value, from which ``Node`` assembles this node's part of it.

It is made once: from the flags (``tenax.cli.options``), from a ``LaunchConfig`` and an entrypoint
(``tenax.launcher.api``), or from a ``WorkerSpec`` (``tenax.agent.server``). Its fields are named like theirs, so that
they are copied by name.
"""

from __future__ import annotations

import os

import msgspec

from tenax._core.model import AgentSettings
from tenax._core.text import concealed_repr
from tenax._node.signals import DEFAULT_SIGNALS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from tenax._core.policy import RestartPolicy
    from tenax._logs.specs import LogsSpecs
    from tenax.numa.binding import NumaOptions
    from tenax.rendezvous.api import RendezvousHandler, RendezvousParameters
    from tenax.scheduler import Allocation

TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT = "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT"
TORCHELASTIC_ENABLE_FILE_TIMER = "TORCHELASTIC_ENABLE_FILE_TIMER"
TORCHELASTIC_TIMER_FILE = "TORCHELASTIC_TIMER_FILE"
START_METHODS = ("spawn", "fork", "forkserver")
ON_HANG = ("off", "report", "restart")
DEFAULT_SHUTDOWN_TIMEOUT_S = 30
_DEFAULT_ABANDON_S = 10.0


class JobSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One job as requested, with this node's part. Nothing has to be looked up in the environment again."""

    # What each worker runs.
    entrypoint: Callable[..., Any] | str = ""  # a function, or the path of a program
    args: tuple[Any, ...] = ()
    name: str = ""  # of the entrypoint, for people; empty: derived from it
    start_method: str = "spawn"  # how processes of a function are created
    preload: str = "none"  # modules imported once, in a template that workers are forked from; auto: the script's
    standby_setup: str = ""  # MODULE:FUNCTION, called in each standby

    # How many there are, and where the nodes meet.
    min_nodes: int = 1
    max_nodes: int = 1
    nproc_per_node: int = 1
    run_id: str = ""  # empty: random, chosen before the start
    role: str = "default"
    rdzv_backend: str = "local"
    rdzv_endpoint: str = ""
    rdzv_configs: dict[str, Any] = {}
    local_addr: str | None = None

    # Restarts and stopping.
    max_restarts: int = 0
    restart_policy: RestartPolicy | None = None  # None: restart at once while restarts are left
    shutdown_timeout: int = DEFAULT_SHUTDOWN_TIMEOUT_S  # grace period, in seconds
    abandon_s: float = _DEFAULT_ABANDON_S  # how long a process may survive SIGKILL before it is abandoned
    signals_to_handle: str = DEFAULT_SIGNALS
    notice_signals: str = ""  # signals that announce preemption, none of those above
    notice_s: float | None = None  # time from the notice to preemption; None: unknown
    monitor_interval: float = 0.1  # of an agent with hooks, which are polled

    # Logs, events and metrics.
    logs_specs: LogsSpecs | None = None  # None: the default
    log_line_prefix_template: str | None = None
    duplicate_stdout_filters: Sequence[str] | None = ()
    duplicate_stderr_filters: Sequence[str] | None = ()
    event_log_handler: str = "null"
    metrics: str = ""  # metric handlers, by name
    live_line: bool = True  # if stderr is a terminal
    colours: bool = False  # likewise

    # Observers.
    dashboard: str = ""  # HOST:PORT; empty: no dashboard
    on_hang: str = "report"
    hang_after: float = 300.0
    trace: str = ""  # destination of the trace; empty: no trace

    # Placement.
    virtual_local_rank: bool = False
    numa_options: NumaOptions | None = None
    allocation: Allocation | None = None  # of the scheduler that started this process; None: there is none

    def __post_init__(self) -> None:
        check_ranges(self)

    __repr__ = concealed_repr

    @property
    def settings(self) -> AgentSettings:
        return AgentSettings(
            run_id=self.run_id,
            role=self.role,
            local_world_size=self.nproc_per_node,
            max_restarts=self.max_restarts,
            grace_s=float(self.shutdown_timeout),
            abandon_s=self.abandon_s,
            on_hang=self.on_hang,
            hang_after_s=self.hang_after,
        )

    @property
    def entrypoint_name(self) -> str:
        return self.name or entrypoint_name(self.entrypoint, self.args)

    @property
    def warm_modules(self) -> str:
        """The modules to preload; empty if there are none, or if only one worker would ever start."""
        is_useful = isinstance(self.entrypoint, str) and (self.nproc_per_node > 1 or self.may_start_again)
        return self.preload if is_useful and self.preload != "none" else ""

    @property
    def may_start_again(self) -> bool:
        """Whether there can be a second generation: after a failure, or because a node joins or leaves."""
        return self.max_restarts > 0 or self.max_nodes > 1


def check_ranges(job: Any) -> None:
    """Raise ValueError for a field that is out of range. ``LaunchConfig`` has these fields, too."""
    if not 1 <= job.min_nodes <= job.max_nodes:
        raise ValueError(
            f"min_nodes={job.min_nodes} and max_nodes={job.max_nodes} are invalid; expected 1 <= min_nodes <= max_nodes"
        )
    for name, least in (("nproc_per_node", 1), ("max_restarts", 0)):
        if getattr(job, name) < least:
            raise ValueError(f"{name} must be at least {least}, not {getattr(job, name)}")
    for name in ("monitor_interval", "notice_s", "hang_after"):
        seconds = getattr(job, name)
        if seconds is not None and not 0 < seconds < float("inf"):
            raise ValueError(f"{name} must be more than 0 seconds, not {seconds}")
    for name, choices in (("start_method", START_METHODS), ("on_hang", ON_HANG)):
        if getattr(job, name) not in choices:
            raise ValueError(f"{name} must be {choices[0]}, {choices[1]} or {choices[2]}, not {getattr(job, name)!r}")
    for module in job.preload.split(",") if job.preload else ():
        if not all(part.isidentifier() for part in module.strip().split(".")):
            raise ValueError(f"preload must be 'auto', 'none' or modules separated by commas, not {job.preload!r}")


def entrypoint_name(entrypoint: Callable[..., Any] | str | None, args: Sequence[Any]) -> str:
    """Return a name for people: the script rather than its interpreter."""
    if not isinstance(entrypoint, str):
        return getattr(entrypoint, "__qualname__", type(entrypoint).__name__)
    if os.path.basename(entrypoint).startswith("python"):
        return next((arg for arg in args if isinstance(arg, str) and not arg.startswith("-")), entrypoint)
    return entrypoint


def new_run_id() -> str:
    return os.urandom(4).hex()


def rendezvous_parameters(job: JobSpec) -> RendezvousParameters:
    from tenax.rendezvous.api import RendezvousParameters

    where = (job.rdzv_backend, job.rdzv_endpoint, job.run_id)
    return RendezvousParameters(*where, job.min_nodes, job.max_nodes, job.local_addr, **job.rdzv_configs)


def rendezvous_handler(job: JobSpec) -> RendezvousHandler:
    """Return the rendezvous handler of the job. Raises ValueError, or what a third-party backend raises."""
    from tenax.rendezvous.registry import get_rendezvous_handler

    return get_rendezvous_handler(rendezvous_parameters(job))


# --- settings that only the environment has ---------------------------------------------------------------------------


def abandon_s_from(environ: Mapping[str, str], given: float | None = None) -> float:
    """Return ``given``, else the variable, else 10 s. Raises ValueError.

    As in TorchElastic, a value of 0 or less counts as not given.
    """
    if given is not None and given > 0:
        return given
    written = environ.get(TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT, "")
    try:
        seconds = float(written or 0)
    except ValueError:
        seconds = float("nan")
    if seconds <= 0:
        return _DEFAULT_ABANDON_S
    if not seconds < float("inf"):
        raise ValueError(f"{TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT} is {written!r}; expected a number of seconds")
    return seconds


def watchdog_file(environ: Mapping[str, str]) -> str | None:
    """Return the path of the watchdog's pipe (empty: a temporary one); None if it is off. Raises ValueError."""
    if environ.get(TORCHELASTIC_ENABLE_FILE_TIMER) != "1":
        return None
    # In a worker, the variable names the pipe of the parent agent, which this nested agent must not use.
    timer_file = "" if "TENAX_GENERATION" in environ else environ.get(TORCHELASTIC_TIMER_FILE, "")
    if timer_file:
        from tenax.timer._watchdog_pipe import check_path

        check_path(timer_file)
    return timer_file


def watchdog_note(environ: Mapping[str, str]) -> str:
    """Return a warning if the variable is set to a value that does not enable the watchdog, else ""."""
    value = environ.get(TORCHELASTIC_ENABLE_FILE_TIMER, "")
    if value.strip().lower() in ("", "0", "1", "false", "no", "off") and value.strip() == value:
        return ""
    return (
        f"{TORCHELASTIC_ENABLE_FILE_TIMER} is {value[:40]!r}; only '1' enables the watchdog, so scopes are not watched"
    )
