"""Serves metrics to Prometheus at ``GET /metrics``.

A counter is the sum of its values, and its name ends in ``_total``. A duration is a summary in seconds: ``_sum`` and
``_count``. A gauge is its last value. The group is the first part of the name; functions and roles are labels.
"""

from __future__ import annotations

import threading
from functools import cache

from tenax._io.http.message import METHOD_NOT_ALLOWED, NOT_FOUND, OK, Request, Response, text
from tenax._io.http.server import HttpServer
from tenax._io.listen import listen
from tenax.metrics._prometheus_text import CONTENT_TYPE, in_braces, in_text, plain
from tenax.metrics._reading import COUNTER, DURATION, GAUGE, read
from tenax.metrics.api import MetricHandler

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tenax.metrics._reading import Reading
    from tenax.metrics.api import MetricData

DEFAULT_PORT = 9464
_MAX_SERIES = 10_000
_TYPES = {COUNTER: "counter", GAUGE: "gauge", DURATION: "summary"}
_ENDINGS = {COUNTER: "_total", GAUGE: "", DURATION: ""}
_OF_CALLS = {
    COUNTER: "Calls of a function of the agent, by how they ended.",
    DURATION: "How long calls of a function took.",
}


class PrometheusMetricHandler(MetricHandler):
    """Starts serving when created. ``labels`` are on every line. Raises OSError if it cannot listen."""

    def __init__(
        self, port: int = DEFAULT_PORT, host: str = "127.0.0.1", labels: Mapping[str, str] | None = None
    ) -> None:
        self._labels = dict(labels or {})
        self._families: dict[str, _Family] = {}
        self._series = 0
        self._lock = threading.Lock()
        self._server = PageServer(self.page, path="/metrics", content_type=CONTENT_TYPE, host=host, port=port)

    @property
    def port(self) -> int:
        return self._server.port

    @property
    def where(self) -> str:
        return self._server.url

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
        self._server.close()


class PageServer:
    """Serves ``page()`` at ``http://host:port/path``. Raises OSError if it cannot listen there."""

    def __init__(
        self, page: Callable[[], str], *, path: str, content_type: str, host: str = "127.0.0.1", port: int = 0
    ) -> None:
        self._page = page
        self._path = path
        self._content_type = content_type
        listener = listen(host, port)
        self.host = host
        self.port: int = listener.getsockname()[1]
        self._server = HttpServer(listener, self._answer, name=f"tenax: page at {self.port}")
        self._server.start()

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}{self._path}"

    def close(self) -> None:
        """Close all connections. May be called twice."""
        self._server.stop()

    def _answer(self, request: Request) -> Response:
        if request.path != self._path:
            return text(NOT_FOUND, f"not found; the only page is {self._path}")
        if request.method not in ("GET", "HEAD"):
            return text(METHOD_NOT_ALLOWED, "only GET and HEAD are supported", Allow="GET, HEAD")
        return Response(OK, self._page().encode(), self._content_type)


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
        lines = [*_help(name), f"# TYPE {name} {_TYPES[self.kind]}"]
        for labels, (value, count) in sorted(self.series.items()):
            if self.kind == DURATION:
                lines += [f"{name}_sum{labels} {in_text(value)}", f"{name}_count{labels} {count}"]
            else:
                lines.append(f"{name}{labels} {in_text(value)}")
        return "\n".join(lines) + "\n"


def _help(name: str) -> list[str]:
    meaning = _meanings().get(name)
    return [f"# HELP {name} {meaning}"] if meaning else []


@cache
def _meanings() -> dict[str, str]:
    """Return the help texts by family name."""
    from tenax.metrics._measured import MEASURED
    from tenax.metrics.api import MetricData

    found: dict[str, str] = {}
    for row in MEASURED:
        reading = read(MetricData(0, row.group, row.name, 0))
        is_call = "function" in reading.labels  # one family for all functions
        meaning = _OF_CALLS[reading.kind] if is_call else row.meaning
        found[_family_name(row.group, reading)] = meaning
    return found


def _family_name(group: str, reading: Reading) -> str:
    unit = f"_{reading.unit}" if reading.unit else ""
    return plain(f"{group}_{reading.name}{unit}{_ENDINGS[reading.kind]}")
