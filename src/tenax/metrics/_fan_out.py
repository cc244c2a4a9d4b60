"""Fan-out: several metric handlers as one.

Each receives every value, even if others raise. The first exception is raised afterwards.
"""

from __future__ import annotations

from tenax.metrics.api import MetricHandler

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tenax.metrics.api import MetricData


class FanOutMetricHandler(MetricHandler):
    """Passes each value to all ``handlers``."""

    def __init__(self, handlers: Iterable[MetricHandler]) -> None:
        self.handlers = tuple(handlers)

    def emit(self, metric_data: MetricData) -> None:
        self._each(lambda handler: handler.emit(metric_data))

    def close(self) -> None:
        # A handler written for TorchElastic may have no `close`.
        self._each(lambda handler: getattr(handler, "close", lambda: None)())

    def _each(self, act: Callable[[MetricHandler], object]) -> None:
        errors = []
        for handler in self.handlers:
            try:
                act(handler)
            except Exception as error:  # raised below, after the other handlers
                errors.append(error)
        if errors:
            raise errors[0]
