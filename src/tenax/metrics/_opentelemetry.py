"""Sends metrics through OpenTelemetry's SDK, as counters, gauges and histograms.

With an endpoint, the handler has its own meter provider, which sends OTLP over HTTP. Without one, it uses the process's
global provider, which the program configures. Needs the extra ``otel``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tenax._core.text import hide_passwords
from tenax.metrics._reading import COUNTER, GAUGE, Reading, read
from tenax.metrics.api import MetricData, MetricHandler

_EXPORT_INTERVAL_S = 10.0
_TIMEOUT_S = 2.0
_UNITS = {"seconds": "s"}


class OpenTelemetryMetricHandler(MetricHandler):
    """``endpoint``: ``http://host:4318``, with or without a path; empty: the global provider.

    ``labels``: attributes of every value. ``timeout_s``: timeout of an export, and of the final flush. Raises
    ImportError without the packages.
    """

    def __init__(
        self, endpoint: str = "", labels: Mapping[str, str] | None = None, timeout_s: float = _TIMEOUT_S
    ) -> None:
        from opentelemetry import metrics

        self.where = _with_path(endpoint, "metrics") if endpoint else "the global meter provider"
        self._timeout_s = timeout_s
        self._provider: Any = _own_provider(self.where, timeout_s) if endpoint else None
        self._meter: Any = (self._provider or metrics.get_meter_provider()).get_meter("tenax")
        self._labels = dict(labels or {})
        self._instruments: dict[tuple[str, str], Callable[[float, dict[str, str]], None]] = {}

    def emit(self, metric_data: MetricData) -> None:
        reading = read(metric_data)
        key = (f"{metric_data.group_name}.{reading.name}", reading.kind)
        if key not in self._instruments:
            self._instruments[key] = self._instrument(_plain(key[0]), reading)
        self._instruments[key](reading.value, {**self._labels, **reading.labels})

    def close(self) -> None:
        """Flush and shut down the handler's own provider. The global one belongs to the program."""
        provider, self._provider = self._provider, None
        if provider is not None:
            provider.shutdown(timeout_millis=1000 * self._timeout_s)

    def _instrument(self, name: str, reading: Reading) -> Callable[[float, dict[str, str]], None]:
        unit = _UNITS.get(reading.unit, "")
        record: Callable[[float, dict[str, str]], None]
        if reading.kind == COUNTER:
            record = self._meter.create_counter(name, unit).add
        elif reading.kind == GAUGE:
            record = self._meter.create_gauge(name, unit).set
        else:
            record = self._meter.create_histogram(name, unit).record
        return record


def has_global_provider() -> bool:
    """Return True if the process has a meter provider. OpenTelemetry's default one drops everything."""
    from opentelemetry import metrics

    # The provider classes in OpenTelemetry's API drop everything; its SDK and third-party packages have others.
    return not type(metrics.get_meter_provider()).__module__.startswith("opentelemetry.metrics")


def _own_provider(endpoint: str, timeout_s: float) -> Any:
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

    exporter = OTLPMetricExporter(endpoint, timeout=timeout_s)
    reader = PeriodicExportingMetricReader(exporter, export_interval_millis=1000 * _EXPORT_INTERVAL_S)
    return MeterProvider([reader], own_resource())


def own_resource() -> Any:
    """Return the source of metrics and traces, from OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME."""
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource

    resource = Resource.create()
    if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: "tenax"}))
    return resource


def otlp_address(written: str, signal: str, env: Mapping[str, str]) -> str:
    """Return the full address for a signal ("metrics", "traces"); empty if none is configured. Raises ValueError."""
    if written and not written.startswith(("http://", "https://")):
        shown = hide_passwords(written)
        raise ValueError(f"invalid endpoint {shown!r}; expected a URL such as http://localhost:4318")
    if written:
        return _with_path(written, signal)
    base = env.get("OTEL_EXPORTER_OTLP_ENDPOINT", "")
    # The variable of this signal is a full address; the general one has no path.
    whole = f"{base.rstrip('/')}/v1/{signal}" if base else ""
    return env.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT") or whole


def _with_path(endpoint: str, signal: str) -> str:
    """Add the default path to an address without one."""
    path = endpoint.partition("://")[2].partition("/")[2]
    return endpoint if path else f"{endpoint.rstrip('/')}/v1/{signal}"


def _plain(name: str) -> str:
    """Return a name that the SDK accepts: a letter, then letters, digits and ``_.-/``; at most 255 characters."""
    text = "".join(each if each.isascii() and (each.isalnum() or each in "_.-/") else "_" for each in name)
    return (text if text[:1].isalpha() else f"m_{text}")[:255]
