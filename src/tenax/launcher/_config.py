"""LaunchConfig: the description of a launch, with TorchElastic's fields.

It behaves like TorchElastic's dataclass: ``dataclasses.replace``, ``fields``, ``asdict`` and ``is_dataclass`` work on
it, and a user's ``@dataclass`` can inherit from it. It is written by hand, because importing ``dataclasses`` and
generating methods would slow down the start of every job; the dataclass attributes are created on first access.

It validates each field and starts nothing. It reads one environment variable, ``TORCH_ELASTIC_SHUTDOWN_TIMEOUT``, if
``shutdown_timeout`` is None.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dataclasses import Field
    from typing import Any, ClassVar

    from tenax._core.policy import RestartPolicy
    from tenax.numa.binding import NumaOptions

__all__ = ["LaunchConfig"]

_START_METHODS = ("spawn", "fork", "forkserver")
_DEFAULT_RENDEZVOUS_TIMEOUT_S = 900
_DEFAULT_SHUTDOWN_TIMEOUT_S = 30
_DICT_FIELDS = ("rdzv_configs", "metrics_cfg")  # None in the signature, a new dict in the value


class _DataclassAttribute:
    """Creates the attributes that ``dataclasses`` reads on first access, and replaces itself with them."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> Any:
        import dataclasses

        init = LaunchConfig.__init__
        kinds = [(name, kind) for name, kind in init.__annotations__.items() if name != "return"]
        defaults = init.__defaults__ or ()
        required = len(kinds) - len(defaults)
        fields: list[Any] = [(name, kind) for name, kind in kinds[:required]]
        for (name, kind), default in zip(kinds[required:], defaults, strict=True):
            field = (
                dataclasses.field(default_factory=dict) if name in _DICT_FIELDS else dataclasses.field(default=default)
            )
            fields.append((name, kind, field))
        model = dataclasses.make_dataclass("LaunchConfig", fields)
        for name in ("__dataclass_fields__", "__dataclass_params__"):
            setattr(LaunchConfig, name, getattr(model, name))
        return getattr(LaunchConfig, self._name)


class LaunchConfig:
    """One launch: nodes and workers, rendezvous, restarts, output.

    ``min_nodes``, ``max_nodes``: number of nodes. Several nodes meet at ``rdzv_endpoint``.
    ``nproc_per_node``: workers on each node.
    ``logs_specs``: where output goes. None: ``DefaultLogsSpecs()``, which creates a temporary folder.
    ``run_id``: the job's id. Empty: a random one.
    ``role``: role of the workers, in their environment and in the prefix of their lines.
    ``rdzv_endpoint``, ``rdzv_backend``, ``rdzv_configs``, ``rdzv_timeout``: the rendezvous of the nodes; unused by a
    single node. ``rdzv_timeout`` (seconds, -1: 900) becomes ``rdzv_configs["timeout"]``.
    ``max_restarts``: maximum number of restarts after failures, counted once for all nodes.
    ``monitor_interval``: no effect; exits are detected at once.
    ``start_method``: how processes of a function are created: spawn, fork or forkserver.
    ``log_line_prefix_template``: prefix of a worker's line, with ``${role_name}``, ``${rank}``, ``${local_rank}``.
    ``metrics_cfg``: ``{"handlers": "prometheus:9400,statsd"}`` names metric handlers, besides configured ones.
    ``local_addr``: the address at which other nodes and workers reach this node.
    ``event_log_handler``: names of event handlers, besides configured ones: ``"console,jsonl:PATH"``.
    ``numa_options``: how to bind workers to CPUs. None: no binding.
    ``signals_to_handle``: names of the signals that stop the job gracefully.
    ``duplicate_stdout_filters``, ``duplicate_stderr_filters``: lines that contain one of these texts are copied to one
    file per node.
    ``virtual_local_rank``: every worker gets LOCAL_RANK=0 and only its own GPU.
    ``shutdown_timeout``: grace period in seconds between SIGTERM and SIGKILL. None: the variable
    ``TORCH_ELASTIC_SHUTDOWN_TIMEOUT``, or 30.

    TorchElastic has none of the following fields:

    ``restart_policy``: decides what follows a failure: a policy, or its name as for ``--restart-policy``. None: restart
    at once while restarts are left. With several nodes, the policy of the coordinator's node decides for all.
    ``notice_signals``: names of the signals with which a scheduler announces that it will take this node.
    ``notice_s``: how many seconds after the notice it does. None: unknown.
    ``preload``: modules imported once on each node, ``"torch,numpy"``, in a template that workers are forked from.
    ``"auto"``: the script's imports. ``"none"``: no template. For Python scripts only.
    ``dashboard``: address of the dashboard on the coordinator's node, ``"127.0.0.1:8080"``. Empty: no dashboard.
    ``on_hang``: what follows when no worker makes progress for ``hang_after`` seconds: ``"report"``, ``"restart"``, or
    ``"off"``.
    ``trace``: destination of the trace, ``"otel"`` or ``"otel:URL"``. Empty: no trace.
    """

    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    else:
        __dataclass_fields__ = _DataclassAttribute("__dataclass_fields__")
        __dataclass_params__ = _DataclassAttribute("__dataclass_params__")

    def __init__(
        self,
        min_nodes: int,
        max_nodes: int,
        nproc_per_node: int,
        logs_specs: Any = None,
        run_id: str = "",
        role: str = "default_role",
        rdzv_endpoint: str = "",
        rdzv_backend: str = "etcd",
        rdzv_configs: dict[str, Any] | None = None,
        rdzv_timeout: int = -1,
        max_restarts: int = 3,
        monitor_interval: float = 0.1,
        start_method: str = "spawn",
        log_line_prefix_template: str | None = None,
        metrics_cfg: dict[str, str] | None = None,
        local_addr: str | None = None,
        event_log_handler: str = "null",
        numa_options: NumaOptions | None = None,
        signals_to_handle: str = "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        duplicate_stdout_filters: list[str] | None = None,
        duplicate_stderr_filters: list[str] | None = None,
        virtual_local_rank: bool = False,
        shutdown_timeout: int | None = None,
        restart_policy: RestartPolicy | str | None = None,
        notice_signals: str = "",
        notice_s: float | None = None,
        preload: str = "none",
        dashboard: str = "",
        on_hang: str = "off",
        hang_after: float = 300.0,
        trace: str = "",
    ) -> None:
        self.min_nodes = min_nodes
        self.max_nodes = max_nodes
        self.nproc_per_node = nproc_per_node
        self.logs_specs = logs_specs
        self.run_id = run_id
        self.role = role
        self.rdzv_endpoint = rdzv_endpoint
        self.rdzv_backend = rdzv_backend
        self.rdzv_configs: dict[str, Any] = {} if rdzv_configs is None else rdzv_configs
        self.rdzv_timeout = rdzv_timeout
        self.max_restarts = max_restarts
        self.monitor_interval = monitor_interval
        self.start_method = start_method
        self.log_line_prefix_template = log_line_prefix_template
        self.metrics_cfg: dict[str, str] = {} if metrics_cfg is None else metrics_cfg
        self.local_addr = local_addr
        self.event_log_handler = event_log_handler
        self.numa_options = numa_options
        self.signals_to_handle = signals_to_handle
        self.duplicate_stdout_filters = duplicate_stdout_filters
        self.duplicate_stderr_filters = duplicate_stderr_filters
        self.virtual_local_rank = virtual_local_rank
        self.shutdown_timeout = shutdown_timeout
        self.restart_policy: Any = restart_policy
        self.notice_signals = notice_signals
        self.notice_s = notice_s
        self.preload = preload
        self.dashboard = dashboard
        self.on_hang = on_hang
        self.hang_after = hang_after
        self.trace = trace
        self.__post_init__()

    def __post_init__(self) -> None:
        """Validate the fields and fill in defaults. A subclass's ``@dataclass`` calls it too."""
        self._check()
        self.rdzv_configs = dict(self.rdzv_configs)  # do not change the caller's dict
        if self.rdzv_timeout != -1:
            self.rdzv_configs["timeout"] = self.rdzv_timeout
        else:
            self.rdzv_configs.setdefault("timeout", _DEFAULT_RENDEZVOUS_TIMEOUT_S)
        self.shutdown_timeout = _shutdown_timeout(self.shutdown_timeout)
        if isinstance(self.restart_policy, str):
            from tenax.policy import load_policy

            self.restart_policy = load_policy(self.restart_policy)

    def _check(self) -> None:
        if not 1 <= self.min_nodes <= self.max_nodes:
            raise ValueError(
                f"min_nodes={self.min_nodes} and max_nodes={self.max_nodes} are invalid; expected 1 <= min_nodes <= "
                "max_nodes"
            )
        if self.nproc_per_node < 1:
            raise ValueError(f"nproc_per_node must be at least 1, not {self.nproc_per_node}")
        if self.max_restarts < 0:
            raise ValueError(f"max_restarts must be at least 0, not {self.max_restarts}")
        if self.monitor_interval <= 0:
            raise ValueError(f"monitor_interval must be more than 0 seconds, not {self.monitor_interval}")
        if self.start_method not in _START_METHODS:
            raise ValueError(f"start_method must be spawn, fork or forkserver, not {self.start_method!r}")
        if self.notice_s is not None and not 0 < self.notice_s < float("inf"):
            raise ValueError(f"notice_s must be more than 0 seconds, not {self.notice_s}")
        if self.on_hang not in ("off", "report", "restart"):
            raise ValueError(f"on_hang must be off, report or restart, not {self.on_hang!r}")
        if not 0 < self.hang_after < float("inf"):
            raise ValueError(f"hang_after must be more than 0 seconds, not {self.hang_after}")
        for name in self.preload.split(","):
            if not all(part.isidentifier() for part in name.strip().split(".")):
                raise ValueError(f"preload must be 'auto', 'none' or modules separated by commas, not {self.preload!r}")

    @property
    def preloads(self) -> str:
        """The modules to preload; empty if there are none, or if only one worker would ever start."""
        if self.preload == "none" or (self.nproc_per_node == 1 and not self.may_start_again):
            return ""
        return self.preload

    @property
    def may_start_again(self) -> bool:
        """Whether there can be a second generation: after a failure, or because a node joins or leaves."""
        return self.max_restarts > 0 or self.max_nodes > 1

    def __replace__(self, /, **changes: Any) -> LaunchConfig:
        """Support ``copy.replace`` of Python 3.13 and later."""
        import dataclasses

        return dataclasses.replace(self, **changes)

    def __repr__(self) -> str:
        from tenax._core.text import conceal

        fields = ", ".join(f"{name}={conceal(name, value)!r}" for name, value in vars(self).items())
        return f"{type(self).__qualname__}({fields})"

    def __eq__(self, other: object) -> bool:
        if other.__class__ is not self.__class__:
            return NotImplemented
        return vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]  # mutable


def _shutdown_timeout(given: int | None) -> int:
    if given is None:
        import os

        text = os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT") or str(_DEFAULT_SHUTDOWN_TIMEOUT_S)
        name, value = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", int(text) if text.strip().isdecimal() else -1
    else:
        text, name, value = str(given), "shutdown_timeout", given
    if value < 0:
        raise ValueError(f"{name} must be a whole number of seconds, at least 0, not {text!r}")
    return value
