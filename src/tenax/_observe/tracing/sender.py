"""Sends spans as OTLP over HTTP, with OpenTelemetry's SDK. The only module of ours that imports its tracing.

It lives in one thread and is called by nobody else. What cannot be sent is raised.
"""

from __future__ import annotations

import logging
import threading

from tenax._observe.tracing.run_trace import span_id, trace_id

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from tenax._observe.tracing.run_trace import Part

_EXPORT_S = 1.5  # for one request
_LONGEST_REASON = 120


class NotSent(Exception):
    """The collector could not be reached, or did not take it. The message says what is known of it."""


class SpanSender:
    """Of one run. ``address`` has the path. Headers and certificates come from OpenTelemetry's variables."""

    def __init__(self, run_id: str, address: str) -> None:
        from opentelemetry.exporter.otlp.proto.http import trace_exporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        self._run_id = run_id
        self._address = address
        # It writes what goes wrong to its logger, often; we say it once.
        self._logger = logging.getLogger(trace_exporter.__name__)
        self._ours = _OfThisThread()
        self._logger.addFilter(self._ours)
        self._exporter: Any = trace_exporter.OTLPSpanExporter(address, timeout=_EXPORT_S)
        resource = Resource.create()  # from OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME
        if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: "tenax"}))
        self._resource: Any = resource
        self._scope: Any = InstrumentationScope("tenax")

    def send(self, parts: list[Part]) -> None:
        from opentelemetry.sdk.trace.export import SpanExportResult

        self._ours.reason = ""
        if self._exporter.export([self._span(part) for part in parts]) is not SpanExportResult.SUCCESS:
            what = "a span" if len(parts) == 1 else f"{len(parts)} spans"
            why = _short(self._ours.reason) or "no reason was given"
            raise NotSent(f"{what} did not reach {_host(self._address)}: {why}")

    def close(self) -> None:
        self._exporter.shutdown()
        self._logger.removeFilter(self._ours)

    def _span(self, part: Part) -> Any:
        from opentelemetry.sdk.trace import Event, ReadableSpan
        from opentelemetry.trace.status import Status, StatusCode

        status = Status(StatusCode.ERROR, part.trouble) if part.trouble else Status(StatusCode.OK)
        return ReadableSpan(
            part.name,
            context=self._context(part.path),
            parent=self._context(part.parent) if part.parent else None,
            resource=self._resource,
            attributes=part.attributes,
            events=[Event(each.name, each.attributes, _ns(each.at)) for each in part.moments],
            status=status,
            start_time=_ns(part.since),
            end_time=_ns(part.until),
            instrumentation_scope=self._scope,
        )

    def _context(self, path: str) -> Any:
        from opentelemetry.trace import SpanContext, TraceFlags

        flags = TraceFlags(TraceFlags.SAMPLED)
        return SpanContext(trace_id(self._run_id), span_id(self._run_id, path), is_remote=False, trace_flags=flags)


def _short(reason: str) -> str:
    """What the system said, if it said anything: libraries wrap it in many words."""
    import re

    said = re.search(r"\[Errno -?\d+\] ([\w ]+)", reason)
    return said[1] if said else reason[:_LONGEST_REASON]


def _host(address: str) -> str:
    """Without what may be a secret: a name and a password in front of the host, a key behind it."""
    scheme, _, rest = address.partition("://")
    return f"{scheme}://{rest.partition('/')[0].rpartition('@')[2]}"


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


class _OfThisThread(logging.Filter):
    """Keeps what the exporter logs for us from a console, and remembers why. What it logs for others passes."""

    def __init__(self) -> None:
        super().__init__()
        self.reason = ""  # the first that it gave: what follows is only that it gave up
        self._thread = threading.get_ident()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.thread != self._thread:
            return True
        self.reason = self.reason or " ".join(record.getMessage().split())
        return False
