"""Sends metrics to StatsD, one datagram per value. A missing server is not detected.

Counters are ``c``, durations ``ms``, everything else ``g``; names are ``group.name``. With ``tags`` (DogStatsD),
functions and roles are tags instead of parts of the name.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Mapping

from tenax.metrics._reading import COUNTER, DURATION, GAUGE, read
from tenax.metrics.api import MetricData, MetricHandler

DEFAULT_PORT = 8125
_TYPES = {COUNTER: "c", GAUGE: "g", DURATION: "ms"}
_NOT_IN_NAMES = dict.fromkeys(map(ord, ":|@#, \t\r\n"), "_")


class StatsdMetricHandler(MetricHandler):
    """Sends to ``host``, which is resolved once. Raises OSError."""

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = DEFAULT_PORT,
        *,
        tags: bool = False,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        self._has_tags = tags
        self._labels = dict(labels or {})
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        self._address = address
        self.where = f"{host}:{port}"
        # Not connected: otherwise a send would fail if the previous datagram had no receiver.
        self._socket = socket.socket(family, socket.SOCK_DGRAM)
        self._socket.setblocking(False)

    def emit(self, metric_data: MetricData) -> None:
        reading = read(metric_data)
        name, end = f"{metric_data.group_name}.{metric_data.name}", f"|{_TYPES[reading.kind]}"
        if self._has_tags:
            name = f"{metric_data.group_name}.{reading.name}"
            tags = {**self._labels, **reading.labels}
            if tags:
                end += "|#" + ",".join(f"{_plain(key)}:{_plain(value)}" for key, value in sorted(tags.items()))
        if not math.isfinite(reading.value):
            raise ValueError(f"the metric {metric_data.name!r} is {reading.value}; StatsD accepts only finite numbers")
        value = 1000 * reading.value if reading.kind == DURATION else reading.value
        lines = [f"{_plain(name)}:{_in_text(value)}{end}"]
        if reading.kind == GAUGE and value < 0:
            lines.insert(0, f"{_plain(name)}:0{end}")  # a signed value is relative to the current one, so set 0 first
        self._socket.sendto("\n".join(lines).encode(), self._address)

    def close(self) -> None:
        self._socket.close()


def _plain(text: str) -> str:
    return str(text).translate(_NOT_IN_NAMES)


def _in_text(value: float) -> str:
    return str(int(value)) if value == int(value) else f"{value:.6f}".rstrip("0").rstrip(".")
