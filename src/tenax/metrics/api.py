"""TorchElastic's metrics API: values with a name and a group.

Each group has one handler. Groups without one use the default handler, which drops values until another is configured.
``put_metric`` calls the handler directly, and its exceptions reach the caller. The agent's own metrics do not use this
module; see ``tenax._io.background_queue``.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, NamedTuple, TypeVar

from tenax._io.handler_names import close_all

F = TypeVar("F", bound=Callable[..., Any])

__all__ = [
    "ConsoleMetricHandler",
    "MetricData",
    "MetricHandler",
    "MetricStream",
    "MetricsConfig",
    "NullMetricHandler",
    "configure",
    "getStream",
    "get_elapsed_time_ms",
    "handler_in_use",
    "prof",
    "profile",
    "publish_metric",
    "put_metric",
]

TORCHELASTIC = "torchelastic"  # the group of TorchElastic's own names


class MetricData(NamedTuple):
    """One value. ``timestamp`` is in seconds since 1970."""

    timestamp: float
    group_name: str
    name: str
    value: float


class MetricsConfig:
    """The configuration of ``initialize_metrics``: ``params["handlers"]`` is a list of handlers."""

    __slots__ = ("params",)

    def __init__(self, params: dict[str, str] | None = None) -> None:
        self.params: dict[str, str] = {} if params is None else params


class MetricHandler(ABC):
    """Receives values."""

    @abstractmethod
    def emit(self, metric_data: MetricData) -> None:
        """Receive one value."""

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """Release resources. No value will follow."""


class ConsoleMetricHandler(MetricHandler):
    """Prints a line on stdout for each value.

    An agent with a console of its own sets ``print_line``, so that lines do not mix with the workers' output.
    """

    print_line: Callable[[str], None] | None = None

    def emit(self, metric_data: MetricData) -> None:
        at, group, name, value = metric_data
        line = f"[{at}][{group}]: {name}={value}"
        if self.print_line is not None:
            self.print_line(line)
        else:
            print(line, flush=True)  # noqa: T201


class NullMetricHandler(MetricHandler):
    """Drops everything."""

    def emit(self, metric_data: MetricData) -> None:
        pass


class FanOutMetricHandler(MetricHandler):
    """Passes each value to all ``handlers``, even if some raise. The first exception is raised afterwards."""

    def __init__(self, handlers: Iterable[MetricHandler]) -> None:
        self.handlers = tuple(handlers)

    def emit(self, metric_data: MetricData) -> None:
        errors = []
        for handler in self.handlers:
            try:
                handler.emit(metric_data)
            except Exception as error:  # raised below, after the other handlers
                errors.append(error)
        if errors:
            raise errors[0]

    def close(self) -> None:
        if errors := close_all(self.handlers):
            raise errors[0]


class MetricStream:
    """A group and its handler."""

    def __init__(self, group_name: str, handler: MetricHandler) -> None:
        self.group_name = group_name
        self.handler = handler

    def add_value(self, metric_name: str, metric_value: float) -> None:
        """Pass a value to the handler, with the current time."""
        self.handler.emit(MetricData(time.time(), self.group_name, metric_name, metric_value))


_handlers: dict[str | None, MetricHandler] = {None: NullMetricHandler()}  # by group; None: of all other groups


def configure(handler: MetricHandler, group: str | None = None) -> None:
    """Set the handler of ``group``; without a group, of all groups that have none."""
    if not callable(getattr(handler, "emit", None)) or isinstance(handler, type):
        raise TypeError(
            f"{handler!r} is not a metric handler; expected an object with emit(metric_data), such as a MetricHandler"
        )
    _handlers[group] = handler


def getStream(group: str) -> MetricStream:
    """Return the stream to the current handler of ``group``."""
    return MetricStream(group, _handlers.get(group) or _handlers[None])


def handler_in_use(group: str) -> MetricHandler | None:
    """Return the handler of ``group``; None if its values are dropped."""
    handler = getStream(group).handler
    return None if isinstance(handler, NullMetricHandler) else handler


def put_metric(metric_name: str, metric_value: float, metric_group: str = TORCHELASTIC) -> None:
    """Pass a value to the group's handler."""
    getStream(metric_group).add_value(metric_name, metric_value)


def prof(fn: F | None = None, group: str = TORCHELASTIC) -> Any:
    """Measure each call of a function: ``@prof``, or ``@prof(group="mine")``.

    ``NAME.success`` or ``NAME.failure`` is 1, ``NAME.duration.ms`` is how long it took. NAME is ``Class.method``, or
    ``module.function`` with the last part of the module's name.
    """
    if fn is not None:
        return _measured(fn, _get_metric_name(fn), group)
    return lambda function: _measured(function, _get_metric_name(function), group)


def profile(group: str | None = None) -> Callable[[F], F]:
    """The old ``prof``: NAME is the bare name of the function."""
    _warn("profile is deprecated; use @prof")
    return lambda function: _measured(function, function.__name__, group)


def publish_metric(metric_group: str, metric_name: str, metric_value: float) -> None:
    """The old ``put_metric``, with the group first."""
    _warn("publish_metric is deprecated; use put_metric(name, value, group)")
    put_metric(metric_name, metric_value, metric_group)


def get_elapsed_time_ms(start_time_in_seconds: float) -> int:
    """Return the whole milliseconds since a time of ``time.time()``."""
    return int(1000 * (time.time() - start_time_in_seconds))


def _measured(function: F, name: str, group: str | None) -> F:
    def put(what: str, value: int) -> None:
        # As in TorchElastic, `profile` passes on a group of None.
        put_metric(f"{name}.{what}", value, group)  # type: ignore[arg-type]

    @wraps(function)
    def measured(*args: Any, **kwargs: Any) -> Any:
        began = time.monotonic()  # never negative durations, even if the wall clock is set meanwhile
        try:
            result = function(*args, **kwargs)
        except Exception:
            put("failure", 1)
            raise
        else:
            put("success", 1)
            return result
        finally:
            put("duration.ms", int(1000 * (time.monotonic() - began)))

    return measured  # type: ignore[return-value]


def _get_metric_name(fn: Callable[..., Any]) -> str:
    """Return the name of a function in metrics. TorchElastic's name: launchers based on its own import it."""
    qualified = fn.__qualname__
    if "." in qualified or not fn.__module__:
        return qualified
    return f"{fn.__module__.rpartition('.')[2]}.{qualified}"


def _warn(message: str) -> None:
    import warnings

    warnings.warn(message, FutureWarning, stacklevel=3)
