"""Fan-out: several handlers where one is expected.

Each gets every value, whatever the others do with it. The first exception is raised when all have had their turn.
"""

from __future__ import annotations

from tenax.metrics.api import MetricHandler

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tenax.metrics.api import MetricData


class FanOutMetricHandler(MetricHandler):
    """Gives each value to all of ``handlers``."""

    def __init__(self, handlers: Iterable[MetricHandler]) -> None:
        self.handlers = tuple(handlers)

    def emit(self, metric_data: MetricData) -> None:
        self._each(lambda handler: handler.emit(metric_data))

    def close(self) -> None:
        # A handler that was written for TorchElastic has no `close` unless it is of our class.
        self._each(lambda handler: getattr(handler, "close", lambda: None)())

    def _each(self, act: Callable[[MetricHandler], object]) -> None:
        errors = []
        for handler in self.handlers:
            try:
                act(handler)
            except Exception as error:  # raised below, when the others have had their turn
                errors.append(error)
        if errors:
            raise errors[0]
