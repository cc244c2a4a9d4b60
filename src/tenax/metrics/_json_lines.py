"""Writes metrics to a file of JSON lines (``tenax._io.json_lines``)."""

from __future__ import annotations

import msgspec

from tenax._io.json_lines import JsonLinesFile
from tenax.metrics._reading import number
from tenax.metrics.api import MetricHandler

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from tenax.metrics.api import MetricData


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
