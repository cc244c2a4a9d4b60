"""Sends metrics through OpenTelemetry's SDK, as counters, gauges and histograms.

With an endpoint, the handler has its own meter provider, which sends OTLP over HTTP. Without one, it uses the process's
global provider, which the program configures. Needs the extra ``otel``.
"""

from __future__ import annotations

from tenax.metrics._otlp_address import with_path
from tenax.metrics._reading import COUNTER, GAUGE, read
from tenax.metrics.api import MetricHandler

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from tenax.metrics._reading import Reading
    from tenax.metrics.api import MetricData

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

        self.where = with_path(endpoint, "metrics") if endpoint else "the global meter provider"
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
        if reading.kind == COUNTER:
            add: Callable[[float, dict[str, str]], None] = self._meter.create_counter(name, unit).add
            return add
        if reading.kind == GAUGE:
            put: Callable[[float, dict[str, str]], None] = self._meter.create_gauge(name, unit).set
            return put
        record: Callable[[float, dict[str, str]], None] = self._meter.create_histogram(name, unit).record
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
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource

    exporter = OTLPMetricExporter(endpoint, timeout=timeout_s)
    reader = PeriodicExportingMetricReader(exporter, export_interval_millis=1000 * _EXPORT_INTERVAL_S)
    resource = Resource.create()  # from OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME
    if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: "tenax"}))
    return MeterProvider([reader], resource)


def _plain(name: str) -> str:
    """Return a name that the SDK accepts: a letter, then letters, digits and ``_.-/``; at most 255 characters."""
    text = "".join(each if each.isascii() and (each.isalnum() or each in "_.-/") else "_" for each in name)
    return (text if text[:1].isalpha() else f"m_{text}")[:255]
