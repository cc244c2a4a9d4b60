"""A collector that decodes real OTLP requests, and a coordinator machine that the test feeds with events."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from kit.processes import TIMEOUT_S, leaving_nothing
from tenax._core.coordinator import CoordinatorMachine, Opened, Received, RunSettings
from tenax._core.messages import NodeInfo, NodeJoined, NodeProgress, NodeReady, WorkerProgress, WorkersRunning
from tenax._core.model import Evidence, Failure
from tenax._core.requests import AnyRequest
from tenax._view.status import RunStatus, status_of

# Imported here, so that the two seconds that a trace has for its last spans do not pass with importing.
pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter", reason="needs OpenTelemetry")
service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")

WALL = 1_700_000_000.0


class Collector:
    """Receives traces, in a thread. ``status``: its HTTP status; ``mark``: a file that it creates at the first one."""

    def __init__(self, status: int = 200, mark: Path | None = None) -> None:
        self.paths: list[str] = []
        self.requests: list[Any] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                request = service.ExportTraceServiceRequest()
                request.ParseFromString(body)
                collector.paths.append(self.path)
                collector.requests.append(request)
                self.send_response(status)
                self.end_headers()
                if mark is not None:
                    mark.touch()

            def log_message(self, *_: object) -> None: ...

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join(TIMEOUT_S)
        self._server.server_close()

    @property
    def spans(self) -> list[Any]:
        return [
            span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def span(self, name: str) -> Any:
        (found,) = [span for span in self.spans if span.name == name]
        return found


@contextmanager
def collecting(status: int = 200, mark: Path | None = None) -> Iterator[Collector]:
    with leaving_nothing():
        collector = Collector(status, mark)
        try:
            yield collector
        finally:
            collector.close()


def attributes(thing: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, str(pair.value.WhichOneof("value"))) for pair in thing.attributes}


class FakeOperatorApi:
    """Implements ``interfaces.OperatorService`` with a machine that the test feeds with events and times."""

    def __init__(self, run_id: str = "job", max_restarts: int = 1) -> None:
        self.machine = CoordinatorMachine(RunSettings(run_id, max_restarts=max_restarts))
        self.watchers: list[Callable[[], None]] = []
        self.now = 0.0
        self.status_count = 0

    def step(self, at: float, event: Any) -> None:
        self.now = at
        self.machine.step(event, at)
        for watch in self.watchers:
            watch()

    def receive(self, at: float, message: Any) -> None:
        self.step(at, Received("n0", message))

    def watch(self, on_step: Callable[[], None]) -> None:
        self.watchers.append(on_step)

    def unwatch(self, on_step: Callable[[], None]) -> None:
        self.watchers.remove(on_step)

    def status(self) -> RunStatus:
        self.status_count += 1
        return status_of(self.machine.state, (), self.machine.describe_activity(self.now), self.now, WALL)

    def submit(self, request: AnyRequest, reply: Any) -> None:
        raise AssertionError("unexpected request")

    # --- events that every test needs ---------------------------------------------------------------------------------

    def start_generation(self) -> None:
        """Generation 1 runs from second 3 on."""
        self.step(0.0, Opened())
        self.receive(1.0, NodeJoined(NodeInfo("n0", "node0", 2)))
        self.receive(2.0, NodeReady(0, "node0", 1234))
        self.receive(3.0, WorkersRunning(1, (11, 12)))

    def report_step(self, at: float, generation: int, first: int, last: int, first_at: float) -> None:
        workers = (WorkerProgress(0, first, last, first_at, at),)
        self.receive(at, NodeProgress(generation, at, workers))


def boom(generation: int, at: float, message: str = "RuntimeError: boom") -> Failure:
    return Failure(generation, 1, 1, 12, 1, at, evidence=Evidence("RuntimeError", message))
