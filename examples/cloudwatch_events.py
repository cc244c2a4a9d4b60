"""An event handler for CloudWatch Logs: sends events in batches, in order, with retries.

    import boto3
    from tenax import events
    from cloudwatch_events import CloudWatchEventHandler

    handler = CloudWatchEventHandler(boto3.client("logs"), group="/training", stream="run-7/host-a")
    with events.configure(handler):
        ...  # run the agent
    handler.close()

To choose it on the command line, install it as a package with an entry point in its ``pyproject.toml``:

    [project.entry-points."tenax.event_handlers"]
    cloudwatch = "cloudwatch_events:from_name"

    $ tenax run --event-log-handler cloudwatch:/training train.py

It follows CloudWatch's limits: a batch has at most 10,000 events and 1 MiB, is sorted by time and spans at most 24
hours; an event that is too long is truncated. The client retries requests after throttling and server errors; events
that fail in the end are counted, and the next ``record`` or ``close`` raises the reason.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from tenax.events import Event, EventHandler

if TYPE_CHECKING:
    from tenax.events import RdzvEvent

Line = tuple[int, str]  # milliseconds since the epoch, text

MAX_EVENTS = 10_000
MAX_BYTES = 1_048_576
OVERHEAD_BYTES = 26  # that CloudWatch adds to each event
MAX_EVENT_BYTES = 256 * 1024 - OVERHEAD_BYTES
MAX_SPAN_MS = 24 * 3600 * 1000
MAX_WAITING = 100_000


class CloudWatchEventHandler(EventHandler):
    """Sends events to one log stream, which it creates. ``record`` does not wait for the network.

    ``client``: boto3's client for ``logs``; its configuration sets the number of retries.
    ``linger_s``: how long an event may wait to be sent together with others.
    """

    def __init__(self, client: Any, group: str, stream: str, linger_s: float = 1.0) -> None:
        self.lost = 0
        self._client = client
        self._where = {"logGroupName": group, "logStreamName": stream}
        self._linger_s = linger_s
        self._waiting: list[Line] = []
        self._error: Exception | None = None
        self._is_closing = False
        self._changed = threading.Condition()
        self._create(client.create_log_group, logGroupName=group)
        self._create(client.create_log_stream, **self._where)
        self._thread = threading.Thread(target=self._run, name="cloudwatch events", daemon=True)
        self._thread.start()

    def record(self, event: Event | RdzvEvent) -> None:
        """Queue the event. Raises the error of earlier ones."""
        at_ms = event.timestamp if isinstance(event, Event) and event.timestamp else time.time_ns() // 1_000_000
        with self._changed:
            if self._is_closing:
                raise ValueError("the handler was closed; create a new one")
            if len(self._waiting) >= MAX_WAITING:
                self.lost += 1
            else:
                self._waiting.append((at_ms, event.serialize()))
                self._changed.notify()
        self._raise_error()

    def close(self) -> None:
        """Send the remaining events, and end the thread."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join()
        self._raise_error()

    def _create(self, create: Any, **what: str) -> None:
        try:
            create(**what)
        except self._client.exceptions.ResourceAlreadyExistsException:
            return

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closing)
                self._changed.wait_for(lambda: self._is_closing, timeout=self._linger_s)
                lines, self._waiting = self._waiting, []
                if not lines:
                    return
            for batch in batches(lines):
                self._send(batch)

    def _send(self, batch: list[Line]) -> None:
        try:
            answer = self._client.put_log_events(
                **self._where, logEvents=[{"timestamp": at_ms, "message": text} for at_ms, text in batch]
            )
            refused = answer.get("rejectedLogEventsInfo")
            if refused:  # some events are too old or too new
                raise ValueError(f"CloudWatch rejected events because of their time: {refused}")
        except Exception as error:  # raised by the next call
            with self._changed:
                self.lost += len(batch)
                self._error = error

    def _raise_error(self) -> None:
        with self._changed:
            error, self._error = self._error, None
        if error is not None:
            raise RuntimeError(f"{self.lost} events did not reach CloudWatch so far: {error}") from error


def batches(lines: list[Line]) -> list[list[Line]]:
    """Return the lines in the order of their times, split into requests of allowed size."""
    found: list[list[Line]] = []
    size = 0
    for at_ms, text in sorted(((at_ms, truncate(text)) for at_ms, text in lines), key=lambda line: line[0]):
        added = len(text.encode()) + OVERHEAD_BYTES
        last = found[-1] if found else None
        is_full = (
            last is None or len(last) >= MAX_EVENTS or size + added > MAX_BYTES or at_ms - last[0][0] >= MAX_SPAN_MS
        )
        if last is None or is_full:
            last, size = [], 0
            found.append(last)
        last.append((at_ms, text))
        size += added
    return found


def truncate(text: str) -> str:
    """Return as much of the text as one event of CloudWatch may hold."""
    data = text.encode()
    return text if len(data) <= MAX_EVENT_BYTES else data[:MAX_EVENT_BYTES].decode(errors="ignore")


def from_name(argument: str) -> CloudWatchEventHandler:
    """Create the handler for ``cloudwatch:GROUP``. Each host has its own stream."""
    import os

    import boto3
    from botocore.config import Config

    client = boto3.client("logs", config=Config(retries={"mode": "standard", "max_attempts": 8}))
    return CloudWatchEventHandler(client, argument or "/tenax", f"{os.uname().nodename}-{os.getpid()}-{time.time_ns()}")
