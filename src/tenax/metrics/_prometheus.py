"""Serves metrics to Prometheus at ``GET /metrics``.

A counter is the sum of its values, and its name ends in ``_total``. A duration is a summary in seconds: ``_sum`` and
``_count``. A gauge is its last value. The group is the first part of the name; functions and roles are labels.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from functools import cache

from tenax._io.http.message import METHOD_NOT_ALLOWED, NOT_FOUND, OK, Request, Response, text
from tenax._io.http.server import HttpServer
from tenax._io.listen import listen
from tenax.metrics._reading import COUNTER, DURATION, GAUGE, MEASURED, Reading, read
from tenax.metrics.api import MetricData, MetricHandler

DEFAULT_PORT = 9464
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PATH = "/metrics"
_MAX_SERIES = 10_000
_TYPES = {COUNTER: "counter", GAUGE: "gauge", DURATION: "summary"}
_ENDINGS = {COUNTER: "_total", GAUGE: "", DURATION: ""}
_ESCAPES = str.maketrans({'"': '\\"', "\\": "\\\\", "\n": "\\n"})
_OF_CALLS = {
    COUNTER: "Calls of a function of the agent, by how they ended.",
    DURATION: "How long calls of a function took.",
}


class PrometheusMetricHandler(MetricHandler):
    """Starts serving when created, on ``port``, at the URL ``where``. ``labels`` are on every line. Raises OSError."""

    def __init__(
        self, port: int = DEFAULT_PORT, host: str = "127.0.0.1", labels: Mapping[str, str] | None = None
    ) -> None:
        self._labels = dict(labels or {})
        self._families: dict[str, _Family] = {}
        self._series = 0
        self._lock = threading.Lock()
        listener = listen(host, port)
        self.port: int = listener.getsockname()[1]
        self.where = f"http://{f'[{host}]' if ':' in host else host}:{self.port}{_PATH}"
        self._server = HttpServer(listener, self._answer, name=f"tenax: page at {self.port}")
        self._server.start()

    def emit(self, metric_data: MetricData) -> None:
        reading = read(metric_data)
        name = _family_name(metric_data.group_name, reading)
        labels = in_braces({**self._labels, **reading.labels})
        with self._lock:
            family = self._families.get(name) or _Family(reading.kind)
            if family.kind != reading.kind:
                raise ValueError(
                    f"the metric {metric_data.name!r} is a {reading.kind}, but {name!r} is already a {family.kind}; "
                    "choose another name"
                )
            is_new = labels not in family.series
            if is_new and self._series >= _MAX_SERIES:
                raise ValueError(
                    f"the metric {metric_data.name!r} would exceed the maximum of {_MAX_SERIES} series; "
                    "put variable parts into values, not into names"
                )
            family.add(labels, reading.value)
            self._families[name] = family
            self._series += is_new

    def page(self) -> str:
        """Return the page."""
        with self._lock:
            return "".join(family.text(name) for name, family in sorted(self._families.items()))

    def close(self) -> None:
        """Close all connections. May be called twice."""
        self._server.stop()

    def _answer(self, request: Request) -> Response:
        if request.path != _PATH:
            return text(NOT_FOUND, f"not found; the only page is {_PATH}")
        if request.method not in ("GET", "HEAD"):
            return text(METHOD_NOT_ALLOWED, "only GET and HEAD are supported", Allow="GET, HEAD")
        return Response(OK, self.page().encode(), CONTENT_TYPE)


class _Family:
    """All series of one name, by formatted labels."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.series: dict[str, tuple[float, int]] = {}  # value or sum, and count

    def add(self, labels: str, value: float) -> None:
        total, count = self.series.get(labels, (0, 0))
        if self.kind == GAUGE:
            total = 0
        elif not value >= 0:
            raise ValueError(f"the value of a {self.kind} cannot be {value}; expected a number of at least 0")
        self.series[labels] = (total + value, count + 1)

    def text(self, name: str) -> str:
        meaning = _meanings().get(name)
        lines = [f"# HELP {name} {meaning}"] if meaning else []
        lines.append(f"# TYPE {name} {_TYPES[self.kind]}")
        for labels, (value, count) in sorted(self.series.items()):
            if self.kind == DURATION:
                lines += [f"{name}_sum{labels} {in_text(value)}", f"{name}_count{labels} {count}"]
            else:
                lines.append(f"{name}{labels} {in_text(value)}")
        return "\n".join(lines) + "\n"


@cache
def _meanings() -> dict[str, str]:
    found: dict[str, str] = {}
    for row in MEASURED:
        reading = read(MetricData(0, row.group, row.name, 0))
        is_call = "function" in reading.labels  # one family for all functions
        found[_family_name(row.group, reading)] = _OF_CALLS[reading.kind] if is_call else row.meaning
    return found


def _family_name(group: str, reading: Reading) -> str:
    unit = f"_{reading.unit}" if reading.unit else ""
    return plain(f"{group}_{reading.name}{unit}{_ENDINGS[reading.kind]}")


def plain(name: str) -> str:
    """Return a valid name of a metric or label."""
    text = "".join(each if each.isascii() and (each.isalnum() or each == "_") else "_" for each in name)
    return f"_{text}" if text[:1].isdigit() else text


def in_braces(labels: Mapping[str, str]) -> str:
    """Return the labels as a line has them."""
    pairs = (f'{plain(name)}="{escaped(str(value))}"' for name, value in sorted(labels.items()))
    return f"{{{','.join(pairs)}}}" if labels else ""


def escaped(value: str) -> str:
    return value.translate(_ESCAPES) if '"' in value or "\\" in value or "\n" in value else value


def in_text(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)
