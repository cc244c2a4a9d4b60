"""The trace of a run: what arrives at a real collector, and what happens when there is none."""

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

from .kit import WALL, ToldDesk, attributes, boom, collecting


def complaints() -> tuple[list[str], Any]:
    said: list[str] = []
    return said, said.append


def a_run_with_one_restart(desk: ToldDesk) -> None:
    desk.begins()
    desk.hear(5.0, FailureSeen(1, boom(1, 5.0), 5.0))
    desk.hear(6.0, NodeStopped(1, 6.0, (boom(1, 5.0),)))
    desk.hear(6.5, NodeReady(1, "node0", 1235))
    desk.hear(7.0, WorkersRunning(2, (21, 22)))
    desk.hear(9.0, NodeSucceeded(2))


def test_a_run_arrives_as_one_trace() -> None:
    """One span for the run, one per generation with what its time went on below it, failures as events; the id of the
    trace is derived from the run's. (T3)"""
    said, complain = complaints()
    with collecting() as collector:
        desk = ToldDesk("job")
        trace = RunTrace(f"otel:{collector.endpoint}", desk, complain)
        a_run_with_one_restart(desk)
        trace.close()
        trace.close()
    assert said == []
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
    told = attributes(event)
    assert (event.name, event.time_unix_nano) == ("worker failed", int((WALL + 5) * 1e9))
    assert (told["tenax.rank"], told["tenax.host"], told["tenax.cause"]) == (1, "node0", "RuntimeError")


def test_times_are_those_of_the_ledger() -> None:
    """Spans of one generation follow each other, and end where the coordinator says."""
    said, complain = complaints()
    with collecting() as collector:
        desk = ToldDesk()
        trace = RunTrace(f"otel:{collector.endpoint}", desk, complain)
        a_run_with_one_restart(desk)
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
    assert said == []


def test_a_coordinator_that_goes_elsewhere_leaves_the_run_to_its_heir() -> None:
    """It sends no span for the run, and the heir's has the id that its own spans point to."""
    said, complain = complaints()
    with collecting() as collector:
        desk = ToldDesk()
        trace = RunTrace(f"otel:{collector.endpoint}", desk, complain)
        desk.begins()
        desk.hear(5.0, FailureSeen(1, boom(1, 5.0), 5.0))
        desk.hear(6.5, NodeReady(1, "node0", 1235))
        trace.close()
        assert "run job" not in {span.name for span in collector.spans}
        heir = ToldDesk()
        trace = RunTrace(f"otel:{collector.endpoint}", heir, complain)
        a_run_with_one_restart(heir)
        trace.close()
    assert {span.parent_span_id for span in collector.spans if span.name.startswith("generation")} == {
        collector.span("run job").span_id
    }
    assert said == []


def test_the_service_has_a_name_and_the_environment_says_where() -> None:
    """``otel`` alone goes to where OpenTelemetry's variables say."""
    said, complain = complaints()
    with collecting() as collector:
        desk = ToldDesk()
        trace = RunTrace("otel", desk, complain, env={"OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint})
        a_run_with_one_restart(desk)
        trace.close()
    resource = collector.requests[0].resource_spans[0].resource
    assert attributes(resource)["service.name"] == "tenax"
    assert said == []


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("otel", "nothing says where to send it; write --trace otel:http://localhost:4318, or set"),
        ("otel:localhost", "invalid endpoint 'localhost'; expected a URL such as http://localhost:4318"),
        ("jaeger", "'jaeger' is not a trace handler; expected otel or otel:URL"),
    ],
)
def test_a_trace_that_cannot_be_sent_anywhere_is_refused(spec: str, says: str) -> None:
    """Before anything is watched."""
    desk = ToldDesk()
    with pytest.raises(ValueError, match="^" + says.replace(".", r"\.")):
        RunTrace(spec, desk, print, env={})
    assert desk.watchers == []


def test_nobody_listens() -> None:
    """It is said once, without what may be a secret, and the end does not wait for long. (T2)"""
    said, complain = complaints()
    threads = set(threading.enumerate())
    with socket.socket() as gone:
        gone.bind(("127.0.0.1", 0))  # and does not listen
        desk = ToldDesk()
        trace = RunTrace(f"otel:http://me:secret@127.0.0.1:{gone.getsockname()[1]}", desk, complain)
        a_run_with_one_restart(desk)
        trace.close()
    until(lambda: not set(threading.enumerate()) - threads, "the end of the thread that sends")
    (line,) = said
    assert line.startswith("the trace (--trace) ")
    assert line.endswith("; the job was not affected") or line.endswith("; the job is not affected")
    assert "secret" not in line


def test_a_collector_that_never_answers() -> None:
    """Closing gives up on it, and the thread ends a moment later."""
    said, complain = complaints()
    threads = set(threading.enumerate())
    with socket.create_server(("127.0.0.1", 0)) as silent:
        desk = ToldDesk()
        trace = RunTrace(f"otel:http://127.0.0.1:{silent.getsockname()[1]}", desk, complain)
        a_run_with_one_restart(desk)
        trace.close()
    assert len(said) == 1
    until(lambda: not set(threading.enumerate()) - threads, "the end of the thread that sends")


def test_a_collector_that_refuses() -> None:
    """What it answers is in the sentence."""
    said, complain = complaints()
    with collecting(status=403) as collector:
        desk = ToldDesk()
        trace = RunTrace(f"otel:{collector.endpoint}", desk, complain)
        a_run_with_one_restart(desk)
        trace.close()
    (line,) = said
    assert "403" in line


class BrokenSender:
    def __init__(self, run_id: str, address: str) -> None: ...

    def send(self, parts: list[Part]) -> None:
        raise RuntimeError("no more ink")

    def close(self) -> None:
        raise RuntimeError("cannot even close")


def test_a_broken_exporter_is_told_once_and_stopped_by_nothing() -> None:
    """While the run goes on as soon as it is seen, and never again. (T2)"""
    said, complain = complaints()
    with leaving_nothing():
        desk = ToldDesk()
        trace = RunTrace("otel:http://x", desk, complain, make_sender=BrokenSender)
        a_run_with_one_restart(desk)
        trace.close()
    (line,) = said
    assert "no more ink" in line or "cannot even close" in line


class SlowDesk(ToldDesk):
    """A status of a huge run takes its time."""

    def status(self) -> Any:
        status = super().status()
        for _ in range(200_000):
            pass
        return status


def test_looking_is_rare_where_it_is_dear() -> None:
    """Many facts in a short time are one look; nothing is missed. (T1)"""
    sent: list[Part] = []

    class Keeping(BrokenSender):
        def send(self, parts: list[Part]) -> None:
            sent.extend(parts)

        def close(self) -> None: ...

    desk = SlowDesk()
    trace = RunTrace("otel:http://x", desk, print, make_sender=Keeping)
    desk.begins()
    for number in range(200):
        desk.said_step(3.0 + number / 1000, 1, 0, number, 3.0)
    desk.hear(9.0, NodeSucceeded(1))
    trace.close()
    assert desk.looked < 100
    assert [part.name for part in sent] == ["rendezvous", "generation 1", "starting", "training", "run job"]


@pytest.mark.process
def test_without_the_package_it_says_what_to_install(tmp_path: Path) -> None:
    """And without importing anything of it."""
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
    assert done.stdout.strip().endswith("which is not installed: pip install 'tenax[otel]'"), done.stderr


@pytest.mark.process
def test_making_one_imports_no_opentelemetry() -> None:
    """The import would take longer than a run takes to start; it happens in the thread that sends. (T1)"""
    code = """
    import sys
    sys.path[:0] = sys.argv[1:]
    from observe.tracing.kit import ToldDesk
    before = set(sys.modules)
    for name in list(sys.modules):
        if name.startswith("opentelemetry"):
            del sys.modules[name]
    from tenax._observe.tracing.run_trace import RunTrace
    trace = RunTrace("otel:http://127.0.0.1:9", ToldDesk(), print)
    print([name for name in sys.modules if name.startswith("opentelemetry.sdk.trace")])
    """
    words = python(code, *[path for path in sys.path if path], flags=())
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


class BrokenDesk(ToldDesk):
    """One whose status cannot be made any more once the test says so."""

    is_broken = False

    def status(self) -> Any:
        if self.is_broken:
            raise RuntimeError("no status")
        return super().status()


def test_a_status_that_cannot_be_made_is_said_once_and_reaches_nobody_who_works() -> None:
    """T2. The trace looks in the middle of the coordinator's work."""
    said, complain = complaints()
    with leaving_nothing():
        desk = BrokenDesk("job")
        trace = RunTrace("otel:http://192.0.2.1:4318", desk, complain, make_sender=lambda *_: pytest.fail("sent"))
        desk.is_broken = True
        desk.begins()
        trace.close()
        assert len(said) == 1
        assert "RuntimeError: no status" in said[0]
        until(lambda: not any("--trace" in each.name for each in threading.enumerate()), "the end of its thread")


def test_a_coordinator_that_goes_elsewhere_does_not_wait_for_its_collector() -> None:
    """T2. Its nodes need the loop that would wait."""
    taken, is_free = threading.Event(), threading.Event()

    class Stuck:
        def send(self, _: list[Part]) -> None:
            taken.set()
            is_free.wait(30.0)

        def close(self) -> None: ...

    said, complain = complaints()
    with leaving_nothing():
        desk = ToldDesk("job")
        trace = RunTrace("otel:http://192.0.2.1:4318", desk, complain, make_sender=lambda *_: Stuck())
        desk.begins()
        trace.close()  # would say that the collector was too slow if it had waited
        assert said == []
        assert taken.wait(30.0)
        is_free.set()
        until(lambda: not any("--trace" in each.name for each in threading.enumerate()), "the end of its thread")
