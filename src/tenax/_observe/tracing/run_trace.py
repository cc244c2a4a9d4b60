"""The trace of a run: one span for the run, one for each generation, and spans for the phases of a generation.

    run JOB
      rendezvous                   waiting for nodes
      generation 1                 with an event for each failed worker
        starting | training | stopping

All ids are derived from the run id, so a run's trace can be found, and a coordinator that takes over on another host
continues the same trace.

Invariants (tests cite the numbers):

T1  The loop's thread only reads the status and queues spans. Everything of OpenTelemetry, including its import, runs in
    a thread of its own.
T2  Errors are reported once and do not affect the run. The end of a run waits at most two seconds for the sender; a
    coordinator that moves to another host does not wait, because its node needs the loop.
T3  A span is sent once, after it has ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Any

import msgspec

from tenax._core.text import hide_passwords
from tenax._io.background_queue import BackgroundQueue
from tenax._io.interfaces import OperatorService
from tenax._view.history import with_one_first
from tenax._view.status import FailureStatus, GenerationStatus, RunStatus
from tenax.metrics._opentelemetry import otlp_address

Value = str | int | float | bool

_CLOSE_TIMEOUT_S = 2.0  # to send the last spans
_REST_PER_WORK = 20  # pause after reading the status, as a multiple of the time that took
_MAX_FAILURES = 32  # events of one span
_MAX_TEXT = 1000  # characters
_OPEN_TELEMETRY = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")


class Moment(msgspec.Struct, frozen=True):
    name: str
    at: float
    attributes: dict[str, Value]


class Part(msgspec.Struct, frozen=True):
    """One ended span. Times are seconds since the epoch."""

    name: str
    path: str  # unique within the run; the span's id is derived from it
    parent: str  # path of the parent span; empty: none
    since: float
    until: float
    attributes: dict[str, Value] = {}
    moments: tuple[Moment, ...] = ()
    error: str = ""  # why it failed; empty: it did not


class RunTrace:
    """Follows a coordinator and sends spans. ``spec``: ``otel``, or ``otel:URL``.

    Raises ValueError if no address is configured, and ImportError without OpenTelemetry, each with a message.
    """

    def __init__(
        self,
        spec: str,
        operators: OperatorService,
        on_error: Callable[[str], None],
        *,
        env: Mapping[str, str] | None = None,
        make_sender: Callable[[str, str], Any] | None = None,
    ) -> None:
        """``make_sender`` is called with the run id and the address, in the sending thread."""
        self._address = _address(spec, env or {})
        if make_sender is None:
            _check_installed()
            from tenax._observe.tracing.sender import SpanSender

            make_sender = SpanSender
        self._operators = operators
        self._on_error = on_error
        self._make_sender = make_sender
        self._sender: Any = None
        self._has_reported = False
        self._formed = 0  # the last generation whose rendezvous was sent
        self._settled = 0  # the last one that was sent
        self._failures: dict[int, dict[int, FailureStatus]] = {}  # generation -> rank
        self._next_read_at = 0.0
        self._is_closed = False
        self._run_id = operators.status().run_id
        self._queue = BackgroundQueue("the trace (--trace)", self._send, self._end_sending)
        operators.watch(self._on_step)

    # --- in the loop's thread -----------------------------------------------------------------------------------------

    def _on_step(self) -> None:
        """Read the status unless it is too soon. A status includes the past, so nothing is missed by waiting."""
        began = time.monotonic()
        if began < self._next_read_at:
            return
        self._read_status()
        took_s = time.monotonic() - began
        self._next_read_at = began + took_s * (1 + _REST_PER_WORK)
        self._report(self._queue.first_problem())

    def _read_status(self) -> RunStatus | None:
        """Queue new spans and return the status; None if it failed. Never raises: the coordinator's step continues."""
        try:
            status = self._operators.status()
            self._queue_spans(status)
        except Exception as error:
            self._report(f"the trace (--trace) is incomplete: {type(error).__name__}: {error}; the job is not affected")
            return None
        return status

    def _queue_spans(self, status: RunStatus) -> None:
        for failure in (*status.earlier, *status.failures):
            if failure.generation > self._settled:
                self._failures.setdefault(failure.generation, {})[failure.rank] = failure
        parts: list[Part] = []
        for each in status.generations:
            if each.number > self._formed:
                self._formed = each.number
                parts += rendezvous_part(each)
            if each.number > self._settled and each.settled_at is not None:
                self._settled = each.number
                failures = self._failures.pop(each.number, {})
                parts += generation_parts(each, list(failures.values()))
        if parts:
            self._queue.put(parts)

    def _report(self, trouble: str) -> None:
        if trouble and not self._has_reported:
            self._has_reported = True
            self._on_error(trouble)

    def close(self) -> None:
        """Stop following. If the run is over, wait up to two seconds for the last spans to be sent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._operators.unwatch(self._on_step)
        status = self._read_status()
        if status is None or not status.outcome:  # another coordinator continues the run
            self._queue.finish()
            return
        self._queue.put([run_part(status)])
        trouble = self._queue.close(_CLOSE_TIMEOUT_S)
        self._report(f"{trouble}; the job was not affected" if trouble else "")

    # --- in the sending thread ----------------------------------------------------------------------------------------

    def _send(self, parts: list[Part]) -> None:
        if self._sender is None:
            self._sender = self._make_sender(self._run_id, self._address)
        self._sender.send(parts)

    def _end_sending(self) -> None:
        if self._sender is not None:
            self._sender.close()


def run_part(status: RunStatus) -> Part:
    goodput = status.goodput
    spent = goodput.spent
    attributes: dict[str, Value] = {
        "tenax.run_id": status.run_id,
        "tenax.outcome": status.outcome,
        "tenax.why": status.why[:_MAX_TEXT],
        "tenax.generations": status.generation,
        "tenax.restarts_used": status.restarts_used,
        "tenax.max_restarts": status.max_restarts,
        "tenax.membership_changes": status.membership_changes,
        "tenax.training_ratio": round(spent.ratio or 0.0, 4),
        "tenax.lost_steps": goodput.lost_steps,
        **{f"tenax.{name}": round(getattr(spent, name), 3) for name in spent.__struct_fields__},
    }
    last = max((each.settled_at or 0.0 for each in status.generations), default=0.0)
    since = min([status.now - spent.total_s, *(each.formed_at - each.spent.waiting_s for each in status.generations)])
    until = min(status.now, max(last, since + spent.total_s))
    error = "" if status.outcome == "succeeded" else status.why
    return Part(f"run {status.run_id}", "run", "", since, max(since, until), attributes, error=error)


def rendezvous_part(each: GenerationStatus) -> list[Part]:
    """Return the span of the rendezvous before this generation; none if it did not wait for nodes."""
    waited_s = each.spent.waiting_s
    if waited_s <= 0:
        return []
    attributes: dict[str, Value] = {"tenax.generation": each.number, "tenax.nodes": each.nodes}
    path = f"rendezvous {each.number}"
    return [Part("rendezvous", path, "run", each.formed_at - waited_s, each.formed_at, attributes)]


def generation_parts(each: GenerationStatus, failures: list[FailureStatus]) -> list[Part]:
    """Return the spans of a generation that has ended on all nodes, and of its phases."""
    path = f"generation {each.number}"
    settled_at = each.settled_at if each.settled_at is not None else each.formed_at
    ended_at = each.ended_at if each.ended_at is not None else settled_at
    trains_since = min(each.formed_at + each.spent.starting_s, ended_at)
    attributes: dict[str, Value] = {
        "tenax.generation": each.number,
        "tenax.why": each.why[:_MAX_TEXT],
        "tenax.nodes": each.nodes,
        "tenax.workers": each.workers,
        "tenax.ended_by": each.ended_by,
        "tenax.ended_why": each.ended_why[:_MAX_TEXT],
    }
    if each.last_step >= 0:
        attributes |= {"tenax.first_step": each.first_step, "tenax.last_step": each.last_step}
    moments = tuple(_moment(failure) for failure in with_one_first(failures)[:_MAX_FAILURES])
    error = each.ended_why if each.ended_by in ("failure", "loss", "failed", "broken") else ""
    parts = [Part(path, path, "run", each.formed_at, settled_at, attributes, moments, error)]
    hangs = [("hung", since, ended_at if until is None else until) for since, until in each.hangs]
    for number, (name, since, until) in enumerate(
        (
            ("starting", each.formed_at, trains_since),
            ("training", trains_since, ended_at),
            ("stopping", ended_at, settled_at),
            *hangs,
        )
    ):
        if until > since:
            key = name if name != "hung" else f"{name} {number}"
            parts.append(Part(name, f"{path}/{key}", path, since, until, {"tenax.generation": each.number}))
    return parts


def _moment(failure: FailureStatus) -> Moment:
    attributes: dict[str, Value] = {
        "tenax.rank": failure.rank,
        "tenax.host": failure.host,
        "tenax.exit_code": failure.exit_code,
        "tenax.what": failure.what[:_MAX_TEXT],
        "tenax.cause": failure.kind,
        "tenax.role": failure.role,
        "tenax.is_consequence": failure.is_consequence,
    }
    return Moment("worker failed", failure.at, attributes)


def trace_id(run_id: str) -> int:
    return _first_bits(run_id, 128)


def span_id(run_id: str, path: str) -> int:
    return _first_bits(f"{run_id}\n{path}", 64)


def _first_bits(text: str, bits: int) -> int:
    """Return the first bits of the SHA-256 of a text; an id is never 0."""
    return int.from_bytes(sha256(text.encode("utf-8", "backslashreplace")).digest()[: bits // 8], "big") or 1


def _address(spec: str, env: Mapping[str, str]) -> str:
    name, _, written = spec.partition(":")
    if name != "otel":
        raise ValueError(f"{hide_passwords(spec)!r} is not a trace handler; expected otel or otel:URL")
    address = otlp_address(written, "traces", env)
    if not address:
        raise ValueError(
            "no address to send to; use --trace otel:http://localhost:4318, or set OTEL_EXPORTER_OTLP_ENDPOINT"
        )
    return address


def _check_installed() -> None:
    """Raise ImportError without OpenTelemetry. Does not import it, which would take longer than starting a run."""
    from importlib.util import find_spec

    for name in _OPEN_TELEMETRY:
        try:
            is_there = find_spec(name) is not None
        except ImportError:  # its parent package is missing too
            is_there = False
        if not is_there:
            raise ImportError(f"{name} is not installed; run: pip install 'tenax[otel]'", name=name)
