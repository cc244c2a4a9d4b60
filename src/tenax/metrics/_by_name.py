"""Metric handlers by name, for ``initialize_metrics`` and ``tenax run --metrics``.

    console                     lines on stdout
    null                        nothing
    jsonl[:PATH]                a file of JSON lines; without a path, metrics.jsonl
    prometheus[:[HOST:]PORT]    a page for a Prometheus server
    statsd[:HOST[:PORT]]        datagrams; dogstatsd: with tags
    otel[:ENDPOINT]             OTLP over HTTP; without an endpoint, that of OpenTelemetry's variables or of the program

Installed packages can provide more, in the entry point group ``tenax.metric_handlers``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TypeVar

import msgspec

from tenax._core.text import hide_passwords
from tenax._io import handler_names
from tenax._io.handler_names import UnknownHandler
from tenax._io.json_lines import JsonLinesFile
from tenax.metrics._reading import number
from tenax.metrics.api import ConsoleMetricHandler, MetricData, MetricHandler, NullMetricHandler

T = TypeVar("T")
Make = Callable[[str], MetricHandler]

GROUP = "tenax.metric_handlers"
_KIND = "metric handler"
_MAX_PORT = 65535


class JsonLinesMetricHandler(MetricHandler):
    """Appends ``{"timestamp":…,"group":…,"name":…,"value":…}``, with ``labels`` if there are any. Raises OSError."""

    def __init__(self, path: str, labels: Mapping[str, str] | None = None) -> None:
        self.where = path
        self._labels = dict(labels or {})
        self._encode = msgspec.json.Encoder().encode
        self._file = JsonLinesFile(path)

    def emit(self, metric_data: MetricData) -> None:
        line = {
            "timestamp": metric_data.timestamp,
            "group": metric_data.group_name,
            "name": metric_data.name,
            "value": number(metric_data),
        }
        if self._labels:
            line["labels"] = self._labels
        self._file.append(self._encode(line))

    def close(self) -> None:
        self._file.close()


def make_handlers(
    text: str, labels: Mapping[str, str] | None = None, env: Mapping[str, str] | None = None
) -> list[MetricHandler]:
    """Create the handlers of this list. Raises ``UnknownHandler`` with a message, and then leaves none open.

    ``labels`` are added to every value, such as the run id, by built-in handlers that support labels.
    """
    makers = _own_makers(labels or {}, os.environ if env is None else env)
    made: list[MetricHandler] = handler_names.make_handlers(text, _KIND, makers, GROUP, "emit")
    return made


def check_names(text: str, env: Mapping[str, str] | None = None) -> None:
    """Check a list of names without creating or opening anything.

    Raises ``UnknownHandler`` for a name that is unknown or cannot be loaded, and for a wrong argument of a built-in
    one.
    """
    env = os.environ if env is None else env
    handler_names.check_names(text, _KIND, _own_makers({}, env), GROUP)
    readers: dict[str, Callable[[str], object]] = {
        "prometheus": _page_address,
        "statsd": _host_and_port,
        "dogstatsd": _host_and_port,
        "otel": lambda endpoint: _otlp_destination(endpoint, env),
    }
    for name, argument in handler_names.parse_names(text):
        if name in readers:
            _with_message(name, readers[name])(argument)


def _own_makers(labels: Mapping[str, str], env: Mapping[str, str]) -> dict[str, Make]:
    def prometheus(argument: str) -> MetricHandler:
        from tenax.metrics._prometheus import DEFAULT_PORT, PrometheusMetricHandler

        host, port = _page_address(argument)
        return PrometheusMetricHandler(DEFAULT_PORT if port is None else port, host or "127.0.0.1", labels)

    def statsd(argument: str, tags: bool = False) -> MetricHandler:
        from tenax.metrics._statsd import DEFAULT_PORT, StatsdMetricHandler

        host, port = _host_and_port(argument)
        return StatsdMetricHandler(host or "127.0.0.1", port or DEFAULT_PORT, tags=tags, labels=labels)

    def open_telemetry(endpoint: str) -> MetricHandler:
        from tenax.metrics._opentelemetry import OpenTelemetryMetricHandler

        return OpenTelemetryMetricHandler(_otlp_destination(endpoint, env), labels)

    makers: dict[str, Make] = {
        "console": lambda _: ConsoleMetricHandler(),
        "null": lambda _: NullMetricHandler(),
        "jsonl": lambda path: JsonLinesMetricHandler(path or "metrics.jsonl", labels),
        "prometheus": prometheus,
        "statsd": statsd,
        "dogstatsd": lambda argument: statsd(argument, tags=True),
        "otel": open_telemetry,
    }
    return {name: _with_message(name, make) for name, make in makers.items()}


def _with_message(name: str, make: Callable[[str], T]) -> Callable[[str], T]:
    """Turn errors into ``UnknownHandler`` with a message that names the handler."""

    def made(argument: str) -> T:
        written = hide_passwords(f"{name}:{argument}" if argument else name)
        try:
            return make(argument)
        except ImportError as error:
            raise UnknownHandler(
                f"the metric handler {written!r} needs the package {error.name}, which is not installed: "
                f"pip install 'tenax[{name}]'"
            ) from error
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UnknownHandler(f"could not create the metric handler {written!r}: {reason}") from error

    return made


def _otlp_destination(endpoint: str, env: Mapping[str, str]) -> str:
    """Return the endpoint; empty: the global meter provider. Raises ValueError if values would be dropped silently."""
    from tenax.metrics._opentelemetry import has_global_provider, otlp_address

    found = otlp_address(endpoint, "metrics", env)
    if not found and not has_global_provider():
        raise ValueError(
            "no endpoint is set; pass one such as otel:http://localhost:4318, set OTEL_EXPORTER_OTLP_ENDPOINT, or set "
            "a meter provider first"
        )
    return found


def _page_address(text: str) -> tuple[str, int | None]:
    """Parse an address in which a number alone is a port."""
    return _host_and_port(f":{text}" if text.isdigit() else text)


def _host_and_port(text: str) -> tuple[str, int | None]:
    """Parse ``HOST``, ``HOST:PORT``, ``:PORT`` or ``[::1]:PORT``. Raises ValueError."""
    host, port = text, ""
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        port = rest.removeprefix(":")
    elif ":" in text:
        host, _, port = text.rpartition(":")
    if not port:
        return host, None
    if not port.isdecimal() or int(port) > _MAX_PORT:
        raise ValueError(f"invalid port {port!r}; expected a number up to {_MAX_PORT}")
    return host, int(port)
