"""Metrics of a run and their handlers, under TorchElastic's names, with additional handlers.

``put_metric`` and ``prof`` are for your code; ``configure`` and ``initialize_metrics`` choose the handlers.
``tenax.metrics._view`` derives the agent's own metrics from the steps of its machine.
"""

from __future__ import annotations

from tenax.metrics.api import *  # noqa: F403
from tenax.metrics.api import FanOutMetricHandler as FanOutMetricHandler
from tenax.metrics.api import MetricHandler, MetricsConfig, NullMetricHandler, configure
from tenax.metrics.api import __all__ as _of_api

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from tenax.metrics._by_name import JsonLinesMetricHandler as JsonLinesMetricHandler
    from tenax.metrics._by_name import make_handlers as make_handlers
    from tenax.metrics._opentelemetry import OpenTelemetryMetricHandler as OpenTelemetryMetricHandler
    from tenax.metrics._prometheus import PrometheusMetricHandler as PrometheusMetricHandler
    from tenax.metrics._statsd import StatsdMetricHandler as StatsdMetricHandler

# Imported on first use: most runs use none of them.
_HOMES = {
    "JsonLinesMetricHandler": "_by_name",
    "OpenTelemetryMetricHandler": "_opentelemetry",
    "PrometheusMetricHandler": "_prometheus",
    "StatsdMetricHandler": "_statsd",
    "make_handlers": "_by_name",
}
__all__ = [*_of_api, *_HOMES, "FanOutMetricHandler", "initialize_metrics"]  # noqa: PLE0604 - the names of these lists

_initialized: list[MetricHandler] = []  # created by initialize_metrics


def initialize_metrics(cfg: MetricsConfig | None = None) -> None:
    """Create the handlers in ``cfg.params["handlers"]`` for all groups without a handler of their own.

    The value is a list such as ``"prometheus:9464,jsonl:/tmp/metrics.jsonl"``. Without it nothing happens. A further
    call closes the handlers of the previous one.
    """
    text = cfg.params.get("handlers", "") if cfg is not None else ""
    if not text:
        return
    from tenax.metrics._by_name import make_handlers

    while _initialized:  # first, because the new ones may need the same port
        configure(NullMetricHandler())
        _initialized.pop().close()
    handler = FanOutMetricHandler(make_handlers(text))
    _initialized.append(handler)
    configure(handler)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
