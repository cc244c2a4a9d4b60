"""The CloudWatch example, against a server with the real protocol, through boto3."""

from __future__ import annotations

import http.client
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tenax import events
from tenax._core import events as agent_events
from tenax._core.agent import AgentMachine
from tenax._core.model import AgentSettings, Assignment, Evidence, Outcome, Verdict
from tenax.agent.server import LocalElasticAgent, WorkerSpec
from tenax.events import Event, EventSource, NodeState, RdzvEvent
from tenax.events._view import EventView
from tenax.multiprocessing import DefaultLogsSpecs

pytestmark = pytest.mark.process

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import cloudwatch_events  # noqa: E402
from cloudwatch_events import CloudWatchEventHandler, batches  # noqa: E402

WHERE = {"logGroupName": "/training", "logStreamName": "run/host"}
PUT = "Logs_20140328.PutLogEvents"
SECOND_MS = 1000


class Flaky(ThreadingHTTPServer):
    """A proxy for the real server that answers some requests itself, as in ``faults``."""

    daemon_threads = True

    def __init__(self, behind: tuple[str, int]) -> None:
        super().__init__(("127.0.0.1", 0), _Passing)
        self.behind = behind
        self.faults: list[tuple[int, bytes]] = []  # for the next PutLogEvents: status, body
        self.puts = 0


class _Passing(BaseHTTPRequestHandler):
    server: Flaky

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        assert "Credential=" in self.headers["Authorization"]
        is_put = self.headers["X-Amz-Target"] == PUT
        self.server.puts += is_put
        if is_put and self.server.faults:
            status, answer = self.server.faults.pop(0)
        else:
            behind = http.client.HTTPConnection(*self.server.behind, timeout=30)
            behind.request("POST", self.path, body, dict(self.headers))
            response = behind.getresponse()
            status, answer = response.status, response.read()
            behind.close()
        self.send_response(status)
        self.send_header("Content-Type", "application/x-amz-json-1.1")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, int]]:
    moto_server = pytest.importorskip("moto.server", reason="moto is not installed")
    stand_in = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    stand_in.start()
    yield stand_in.get_host_and_port()
    stand_in.stop()


@pytest.fixture
def flaky(server: tuple[str, int]) -> Iterator[Flaky]:
    reset = http.client.HTTPConnection(*server, timeout=30)
    reset.request("POST", "/moto-api/reset")
    assert reset.getresponse().status == 200
    reset.close()
    front = Flaky(server)
    thread = threading.Thread(target=front.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield front
    front.shutdown()
    front.server_close()
    thread.join()


@pytest.fixture
def client(flaky: Flaky) -> Iterator[Any]:
    from botocore.config import Config

    boto3 = pytest.importorskip("boto3", reason="boto3 is not installed")
    made = boto3.client(
        "logs",
        endpoint_url=f"http://127.0.0.1:{flaky.server_address[1]}",
        region_name="eu-central-1",
        aws_access_key_id="test",
        aws_secret_access_key="test",
        config=Config(retries={"mode": "standard", "max_attempts": 3}),
    )
    yield made
    made.close()


def stored(client: Any) -> list[tuple[int, str]]:
    found = client.get_log_events(**WHERE, startFromHead=True)["events"]
    return [(each["timestamp"], each["message"]) for each in found]


def events_of_a_run() -> list[Event]:
    """Return the events of a real machine, with current times."""
    settings = AgentSettings("run-7", "trainer", 1, 1)
    machine = AgentMachine(settings)
    view = EventView(settings, "train.py", "host-a", "tcp", time.time() - 10)
    steps = [
        (0.0, agent_events.RunRequested()),
        (1.0, agent_events.GenerationFormed(Assignment(1))),
        (2.0, agent_events.WorkerStarted(1, 0, 100)),
        (3.0, agent_events.WorkerExited(1, 0, 1)),
        (4.0, agent_events.FailureExamined(1, 0, Evidence("E", "E: böse", "Traceback"))),
        (5.0, agent_events.NodeCleared(1)),
        (6.0, agent_events.GenerationFormed(Assignment(2, restarts_used=1))),
        (6.5, agent_events.WorkerStarted(2, 0, 101)),
        (7.0, agent_events.WorkerExited(2, 0, 0)),
        (7.5, agent_events.NodeCleared(2)),
        (8.0, agent_events.RunEnded(Verdict(Outcome.SUCCEEDED, "all workers succeeded"), 8.0)),
    ]
    found = []
    for at, event in steps:
        found += view.take(at, event, machine.step(event, at), machine.state)
    return found


def test_the_events_of_a_run_arrive_complete_and_in_order(client: Any) -> None:
    """Both kinds; events that are queued together are one request, sorted by time."""
    mine = events_of_a_run()
    assert len(mine) == 9
    of_rendezvous = RdzvEvent("f.py:C.m", "run-7", "joined", "host-a", 7, NodeState.RUNNING)
    handler = CloudWatchEventHandler(client, "/training", "run/host", linger_s=60)
    with events.configure(handler):
        events.record_rdzv_event(of_rendezvous)
        for event in mine:
            events.record(event)
    handler.close()
    found = stored(client)
    assert [at for at, _ in found] == sorted(at for at, _ in found)
    assert [Event.deserialize(text) for _, text in found[:-1]] == sorted(mine, key=lambda event: event.timestamp)
    assert RdzvEvent.deserialize(found[-1][1]) == of_rendezvous  # it has no timestamp, so it gets the current time


def test_a_real_agents_events_arrive(client: Any, tmp_path: Path) -> None:
    """A worker that fails once and then succeeds."""
    spec = WorkerSpec(entrypoint="sh", args=("-c", "exit $((1 - TORCHELASTIC_RESTART_COUNT))"), max_restarts=1)
    handler = CloudWatchEventHandler(client, "/training", "run/host", linger_s=60)
    with events.configure(handler):
        result = LocalElasticAgent(spec, DefaultLogsSpecs(str(tmp_path))).run()
    handler.close()
    assert not result.is_failed()
    found = [Event.deserialize(text) for _, text in stored(client)]
    workers = [event.metadata["state"] for event in found if event.source is EventSource.WORKER]
    assert workers == ["START", "FAILED", "START", "SUCCEEDED"]


def test_events_are_sent_during_the_run(client: Any, flaky: Flaky) -> None:
    """An agent that is killed has sent everything up to a moment before."""
    handler = CloudWatchEventHandler(client, "/training", "run/host", linger_s=0.01)
    handler.record(events_of_a_run()[0])
    deadline = time.monotonic() + 60
    while not stored(client):
        assert time.monotonic() < deadline
    handler.close()


def test_a_throttled_or_failed_request_is_retried(client: Any, flaky: Flaky) -> None:
    flaky.faults = [(400, b'{"__type": "ThrottlingException", "message": "slow down"}'), (503, b"{}")]
    handler = CloudWatchEventHandler(client, "/training", "run/host", linger_s=60)
    for event in events_of_a_run():
        handler.record(event)
    handler.close()
    assert (flaky.puts, handler.lost, len(stored(client))) == (3, 0, 9)


def test_events_that_are_lost_are_counted_and_raised(client: Any, flaky: Flaky) -> None:
    flaky.faults = [(400, b'{"__type": "AccessDeniedException", "message": "not yours"}')]
    handler = CloudWatchEventHandler(client, "/training", "run/host", linger_s=60)
    for event in events_of_a_run()[:2]:
        handler.record(event)
    with pytest.raises(RuntimeError, match=r"2 events did not reach CloudWatch so far: .*not yours"):
        handler.close()
    with pytest.raises(ValueError, match="was closed"):
        handler.record(events_of_a_run()[0])


def test_an_existing_stream_is_used(client: Any) -> None:
    for number in range(2):
        handler = CloudWatchEventHandler(client, "/training", "run/host", linger_s=60)
        handler.record(Event(str(number), EventSource.AGENT, time.time_ns() // 1_000_000))
        handler.close()
    assert [Event.deserialize(text).name for _, text in stored(client)] == ["0", "1"]


def test_events_that_are_too_old_are_reported(client: Any) -> None:
    """CloudWatch rejects events from more than two weeks ago."""
    handler = CloudWatchEventHandler(client, "/training", "run/host", linger_s=60)
    handler.record(Event("old", EventSource.AGENT, 1_000))
    with pytest.raises(RuntimeError, match="rejected events because of their time"):
        handler.close()


class TestBatches:
    def test_each_batch_respects_the_limits(self) -> None:
        day_ms = cloudwatch_events.MAX_SPAN_MS
        lines = [(n * SECOND_MS, "x") for n in reversed(range(25_000))]
        found = batches(lines)
        assert [len(batch) for batch in found] == [10_000, 10_000, 5_000]
        assert [line for batch in found for line in batch] == sorted(lines)
        assert [len(batch) for batch in batches([(0, "a"), (day_ms - 1, "b"), (day_ms, "c")])] == [2, 1]

    def test_no_batch_exceeds_the_maximum_size_of_a_request(self) -> None:
        lines = [(n, "ü" * 100_000) for n in range(20)]
        found = batches(lines)
        assert sum(map(len, found)) == 20
        for batch in found:
            size = sum(len(text.encode()) + cloudwatch_events.OVERHEAD_BYTES for _, text in batch)
            assert size <= cloudwatch_events.MAX_BYTES

    def test_a_text_that_is_too_long_is_truncated(self) -> None:
        (((_, text),),) = batches([(0, "ü" * 1_000_000)])
        assert len(text.encode()) <= cloudwatch_events.MAX_EVENT_BYTES
        assert set(text) == {"ü"}

    def test_events_of_the_same_time_keep_their_order(self) -> None:
        assert batches([(5, "b"), (5, "a"), (4, "c")]) == [[(4, "c"), (5, "b"), (5, "a")]]
