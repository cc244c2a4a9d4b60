"""JSON lines: one object per line at the end of a file.

Each line is written with one call, so that several processes can share a file on a local disk, and a reader never
waits for the rest of a line. A line that a full disk cut in two is followed by a line break: it spoils no other. The
file may be read by everybody, as the log files may (less what the umask takes away).
"""

from __future__ import annotations

import errno
import os

import msgspec

from tenax.metrics.api import MetricHandler
from tenax.metrics.reading import number

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from tenax.metrics.api import MetricData


class JsonLinesMetricHandler(MetricHandler):
    """``{"timestamp":…,"group":…,"name":…,"value":…}``, and ``labels`` if there are any. Raises OSError."""

    def __init__(self, path: str, labels: Mapping[str, str] | None = None) -> None:
        self.where = path
        self._labels = dict(labels or {})
        self._encode = msgspec.json.Encoder().encode
        self._is_torn = False
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def emit(self, metric_data: MetricData) -> None:
        if self._descriptor < 0:
            raise ValueError(f"the metrics file {self.where} was closed; no value can be added")
        line = {
            "timestamp": metric_data.timestamp,
            "group": metric_data.group_name,
            "name": metric_data.name,
            "value": number(metric_data),
        }
        if self._labels:
            line["labels"] = self._labels
        self._write(self._encode(line) + b"\n")

    def _write(self, line: bytes) -> None:
        if self._is_torn:
            line = b"\n" + line
        written = os.write(self._descriptor, line)
        self._is_torn = written < len(line)
        if self._is_torn:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.where)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
