"""The trace of a run, as a real collector receives it, and errors of the collector."""

from __future__ import annotations

import hashlib
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from kit.processes import leaving_nothing, python, until
from tenax._core.messages import FailureSeen, NodeReady, NodeStopped, NodeSucceeded, WorkersRunning
from tenax._observe.tracing.run_trace import Part, RunTrace

from .kit import WALL, FakeOperatorApi, attributes, boom, collecting


def collect_errors() -> tuple[list[str], Any]:
    errors: list[str] = []
    return errors, errors.append


def run_with_one_restart(operators: FakeOperatorApi) -> None:
    operators.start_generation()
    operators.receive(5.0, FailureSeen(1, boom(1, 5.0), 5.0))
    operators.receive(6.0, NodeStopped(1, 6.0, (boom(1, 5.0),)))
    operators.receive(6.5, NodeReady(1, "node0", 1235))
    operators.receive(7.0, WorkersRunning(2, (21, 22)))
    operators.receive(9.0, NodeSucceeded(2))


def test_a_run_is_sent_as_one_trace() -> None:
    """One span for the run, one per generation with its phases below it, failures as events; the trace id is derived
    from the run id. (T3)"""
    errors, on_error = collect_errors()
    with collecting() as collector:
        operators = FakeOperatorApi("job")
        trace = RunTrace(f"otel:{collector.endpoint}", operators, on_error)
        run_with_one_restart(operators)
        trace.close()
        trace.close()
    assert errors == []
    assert set(collector.paths) == {"/v1/traces"}
    spans = collector.spans
    assert sorted(span.name for span in spans) == sorted(
        ["run job", "rendezvous", "generation 1", "generation 2", *["starting", "training"] * 2, "stopping"]
    )
    assert {span.trace_id.hex() for span in spans} == {hashlib.sha256(b"job").hexdigest()[:32]}
    assert len({span.span_id for span in spans}) == len(spans)
    run, first = collector.span("run job"), collector.span("generation 1")
    assert run.parent_span_id == b""
    assert first.parent_span_id == collector.span("rendezvous").parent_span_id == run.span_id
    assert collector.span("stopping").parent_span_id == first.span_id
    of_run, of_first = attributes(run), attributes(first)
    assert (of_run["tenax.outcome"], of_run["tenax.restarts_used"]) == ("succeeded", 1)
    assert (of_run["tenax.training_s"], of_run["tenax.training_ratio"]) == (4.0, 0.5)
    assert (of_first["tenax.why"], of_first["tenax.nodes"], of_first["tenax.workers"]) == ("first generation", 1, 2)
    assert (of_first["tenax.ended_by"], of_first["tenax.ended_why"]) == ("failure", "rank 1 on node0 failed")
    (event,) = first.events
    failure = attributes(event)
    assert (event.name, event.time_unix_nano) == ("worker failed", int((WALL + 5) * 1e9))
    assert (failure["tenax.rank"], failure["tenax.host"], failure["tenax.cause"]) == (1, "node0", "RuntimeError")


def test_times_are_those_of_the_ledger() -> None:
    """The phases of a generation follow each other without gaps."""
    errors, on_error = collect_errors()
    with collecting() as collector:
        operators = FakeOperatorApi()
        trace = RunTrace(f"otel:{collector.endpoint}", operators, on_error)
        run_with_one_restart(operators)
        trace.close()

    def times(name: str) -> list[tuple[float, float]]:
        found = [span for span in collector.spans if span.name == name]
        return [(span.start_time_unix_nano / 1e9 - WALL, span.end_time_unix_nano / 1e9 - WALL) for span in found]

    assert times("run job") == [(1.0, 9.0)]
    assert times("rendezvous") == [(1.0, 2.0)]
    assert times("generation 1") == [(2.0, 6.5)]
    assert times("starting") == [(2.0, 3.0), (6.5, 7.0)]
    assert times("training") == [(3.0, 5.0), (7.0, 9.0)]
    assert times("stopping") == [(5.0, 6.5)]
    assert errors == []


def test_a_coordinator_that_moves_leaves_the_span_of_the_run_to_its_successor() -> None:
    """The spans of both have the span of the successor as tsuccessor parent."""
    errors, on_error = collect_errors()
    with collecting() as collector:
        operators = FakeOperatorApi()
        trace = RunTrace(f"otel:{collector.endpoint}", operators, on_error)
        operators.start_generation()
        operators.receive(5.0, FailureSeen(1, boom(1, 5.0), 5.0))
        operators.receive(6.5, NodeReady(1, "node0", 1235))
        trace.close()
        assert "run job" not in {span.name for span in collector.spans}
        successor = FakeOperatorApi()
        trace = RunTrace(f"otel:{collector.endpoint}", successor, on_error)
        run_with_one_restart(successor)
        trace.close()
    assert {span.parent_span_id for span in collector.spans if span.name.startswith("generation")} == {
        collector.span("run job").span_id
    }
    assert errors == []


def test_the_address_comes_from_the_environment_and_the_service_has_a_name() -> None:
    """``otel`` alone uses OpenTelemetry's variables."""
    errors, on_error = collect_errors()
    with collecting() as collector:
        operators = FakeOperatorApi()
        trace = RunTrace("otel", operators, on_error, env={"OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint})
        run_with_one_restart(operators)
        trace.close()
    resource = collector.requests[0].resource_spans[0].resource
    assert attributes(resource)["service.name"] == "tenax"
    assert errors == []


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("otel", "no address to send to; use --trace otel:http://localhost:4318, or set"),
        ("otel:localhost", "invalid endpoint 'localhost'; expected a URL such as http://localhost:4318"),
        ("jaeger", "'jaeger' is not a trace handler; expected otel or otel:URL"),
    ],
)
def test_an_invalid_address_is_rejected(spec: str, message: str) -> None:
    """Before the coordinator is observed."""
    operators = FakeOperatorApi()
    with pytest.raises(ValueError, match="^" + message.replace(".", r"\.")):
        RunTrace(spec, operators, print, env={})
    assert operators.watchers == []


def test_an_unreachable_collector_is_reported_once() -> None:
    """Without secrets, and closing does not wait for long. (T2)"""
    errors, on_error = collect_errors()
    threads = set(threading.enumerate())
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # does not listen
        operators = FakeOperatorApi()
        trace = RunTrace(f"otel:http://me:secret@127.0.0.1:{unused.getsockname()[1]}", operators, on_error)
        run_with_one_restart(operators)
        trace.close()
    until(lambda: not set(threading.enumerate()) - threads, "the end of the sending thread")
    (line,) = errors
    assert line.startswith("the trace (--trace) ")
    assert line.endswith("; the job was not affected") or line.endswith("; the job is not affected")
    assert "secret" not in line


def test_closing_does_not_wait_for_a_collector_that_never_answers() -> None:
    """The thread ends a moment later."""
    errors, on_error = collect_errors()
    threads = set(threading.enumerate())
    with socket.create_server(("127.0.0.1", 0)) as silent:
        operators = FakeOperatorApi()
        trace = RunTrace(f"otel:http://127.0.0.1:{silent.getsockname()[1]}", operators, on_error)
        run_with_one_restart(operators)
        trace.close()
    assert len(errors) == 1
    until(lambda: not set(threading.enumerate()) - threads, "the end of the sending thread")


def test_the_answer_of_a_collector_that_rejects_spans_is_reported() -> None:
    """Its status is in the message."""
    errors, on_error = collect_errors()
    with collecting(status=403) as collector:
        operators = FakeOperatorApi()
        trace = RunTrace(f"otel:{collector.endpoint}", operators, on_error)
        run_with_one_restart(operators)
        trace.close()
    (line,) = errors
    assert "403" in line


class FailingSender:
    def __init__(self, run_id: str, address: str) -> None: ...

    def send(self, parts: list[Part]) -> None:
        raise RuntimeError("cannot send")

    def close(self) -> None:
        raise RuntimeError("cannot close")


def test_an_error_of_the_exporter_is_reported_once() -> None:
    """The run is not affected. (T2)"""
    errors, on_error = collect_errors()
    with leaving_nothing():
        operators = FakeOperatorApi()
        trace = RunTrace("otel:http://x", operators, on_error, make_sender=FailingSender)
        run_with_one_restart(operators)
        trace.close()
    (line,) = errors
    assert "cannot send" in line or "cannot close" in line


class SlowOperatorApi(FakeOperatorApi):
    """Computing the status of a huge run is slow."""

    def status(self) -> Any:
        status = super().status()
        for _ in range(200_000):
            pass
        return status


def test_an_expensive_status_is_read_rarely() -> None:
    """Many events in a short time are read together; nothing is missed. (T1)"""
    sent: list[Part] = []

    class KeepingSender(FailingSender):
        def send(self, parts: list[Part]) -> None:
            sent.extend(parts)

        def close(self) -> None: ...

    operators = SlowOperatorApi()
    trace = RunTrace("otel:http://x", operators, print, make_sender=KeepingSender)
    operators.start_generation()
    for number in range(200):
        operators.report_step(3.0 + number / 1000, 1, 0, number, 3.0)
    operators.receive(9.0, NodeSucceeded(1))
    trace.close()
    assert operators.status_count < 100
    assert [part.name for part in sent] == ["rendezvous", "generation 1", "starting", "training", "run job"]


@pytest.mark.process
def test_a_missing_package_is_reported_with_the_install_command(tmp_path: Path) -> None:
    """Nothing of it is imported."""
    code = """
    import sys
    sys.path[:0] = sys.argv[1:]
    sys.modules["opentelemetry"] = None
    from tenax._observe.tracing.run_trace import RunTrace
    try:
        RunTrace("otel:http://localhost:4318", None, print)
    except ImportError as error:
        print(error)
    """
    done = subprocess.run(
        python(code, *[path for path in sys.path if path], flags=()), capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip().endswith("is not installed; run: pip install 'tenax[otel]'"), done.stderr


@pytest.mark.process
def test_creating_a_trace_does_not_import_opentelemetry() -> None:
    """The import is slower than the start of a run; it happens in the sending thread. (T1)"""
    code = """
    import sys
    sys.path[:0] = sys.argv[1:]
    from observe.tracing.kit import FakeOperatorApi
    before = set(sys.modules)
    for name in list(sys.modules):
        if name.startswith("opentelemetry"):
            del sys.modules[name]
    from tenax._observe.tracing.run_trace import RunTrace
    trace = RunTrace("otel:http://127.0.0.1:9", FakeOperatorApi(), print)
    print([name for name in sys.modules if name.startswith("opentelemetry.sdk.trace")])
    """
    command = python(code, *[path for path in sys.path if path], flags=())
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


class FailingOperatorApi(FakeOperatorApi):
    """``status`` raises an exception once ``is_failing`` is set."""

    is_failing = False

    def status(self) -> Any:
        if self.is_failing:
            raise RuntimeError("no status")
        return super().status()


def test_an_error_of_the_status_is_reported_once_and_does_not_reach_the_coordinator() -> None:
    """T2. The trace reads the status during a step of the coordinator."""
    errors, on_error = collect_errors()
    with leaving_nothing():
        operators = FailingOperatorApi("job")
        trace = RunTrace("otel:http://192.0.2.1:4318", operators, on_error, make_sender=lambda *_: pytest.fail("sent"))
        operators.is_failing = True
        operators.start_generation()
        trace.close()
        assert len(errors) == 1
        assert "RuntimeError: no status" in errors[0]
        until(lambda: not any("--trace" in each.name for each in threading.enumerate()), "the end of its thread")


def test_a_coordinator_that_moves_does_not_wait_for_the_collector() -> None:
    """T2. Its node needs the loop."""
    is_sending, may_finish = threading.Event(), threading.Event()

    class BlockedSender:
        def send(self, _: list[Part]) -> None:
            is_sending.set()
            may_finish.wait(30.0)

        def close(self) -> None: ...

    errors, on_error = collect_errors()
    with leaving_nothing():
        operators = FakeOperatorApi("job")
        trace = RunTrace("otel:http://192.0.2.1:4318", operators, on_error, make_sender=lambda *_: BlockedSender())
        operators.start_generation()
        trace.close()  # would report a slow collector if it had waited
        assert errors == []
        assert is_sending.wait(30.0)
        may_finish.set()
        until(lambda: not any("--trace" in each.name for each in threading.enumerate()), "the end of its thread")
