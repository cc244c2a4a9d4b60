"""Sends spans as OTLP over HTTP with OpenTelemetry's SDK. The only module of tenax that imports its tracing.

Used by one thread only. Errors are raised.
"""

from __future__ import annotations

import logging
import re
import threading
from typing import Any

from tenax._observe.tracing.run_trace import Part, span_id, trace_id
from tenax.metrics._opentelemetry import own_resource

_EXPORT_TIMEOUT_S = 1.5  # for one request
_MAX_REASON = 120


class NotSent(Exception):
    """The collector could not be reached or rejected the spans. The message has the reason."""


class SpanSender:
    """Sends the spans of one run. ``address`` is a full URL; headers and certificates come from OpenTelemetry's
    variables."""

    def __init__(self, run_id: str, address: str) -> None:
        from opentelemetry.exporter.otlp.proto.http import trace_exporter
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        self._run_id = run_id
        self._address = address
        # The exporter logs every error; tenax reports only the first.
        self._logger = logging.getLogger(trace_exporter.__name__)
        self._log_filter = _LogCapture()
        self._logger.addFilter(self._log_filter)
        self._exporter: Any = trace_exporter.OTLPSpanExporter(address, timeout=_EXPORT_TIMEOUT_S)
        self._resource = own_resource()
        self._scope: Any = InstrumentationScope("tenax")

    def send(self, parts: list[Part]) -> None:
        from opentelemetry.sdk.trace.export import SpanExportResult

        self._log_filter.reason = ""
        if self._exporter.export([self._span(part) for part in parts]) is not SpanExportResult.SUCCESS:
            what = "a span" if len(parts) == 1 else f"{len(parts)} spans"
            why = _short(self._log_filter.reason) or "unknown reason"
            raise NotSent(f"could not send {what} to {_host(self._address)}: {why}")

    def close(self) -> None:
        self._exporter.shutdown()
        self._logger.removeFilter(self._log_filter)

    def _span(self, part: Part) -> Any:
        from opentelemetry.sdk.trace import Event, ReadableSpan
        from opentelemetry.trace.status import Status, StatusCode

        status = Status(StatusCode.ERROR, part.error) if part.error else Status(StatusCode.OK)
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
    """Return the system's error message, if there is one, without what libraries wrap around it."""
    found = re.search(r"\[Errno -?\d+\] ([\w ]+)", reason)
    return found[1] if found else reason[:_MAX_REASON]


def _host(address: str) -> str:
    """Return scheme and host only: the rest of the URL may contain a password or a key."""
    scheme, _, rest = address.partition("://")
    return f"{scheme}://{rest.partition('/')[0].rpartition('@')[2]}"


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


class _LogCapture(logging.Filter):
    """Suppresses and keeps what the exporter logs in this thread. Other threads' log records pass."""

    def __init__(self) -> None:
        super().__init__()
        self.reason = ""  # of the first record; later ones only report that the exporter gave up
        self._thread = threading.get_ident()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.thread != self._thread:
            return True
        self.reason = self.reason or " ".join(record.getMessage().split())
        return False
