"""The channel to a worker: what it sends is checked strictly, and what it is sent fits into one line."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tenax._core import events
from tenax._io.loop import Loop
from tenax._node.supervisor import WorkerSocket

OPT_IN = {"type": "opt_in", "generation": 3, "timeout_s": 2}
HELD = {"type": "held", "generation": 3, "step": 7}
BEGUN_IN = 3


class Channel:
    """Both ends: of generation 3 and local rank 1."""

    def __init__(self) -> None:
        self.loop = Loop()
        ours, self.worker = socket.socketpair()
        self.agent = WorkerSocket(ours, BEGUN_IN, 1, self.loop)  # type: ignore[arg-type]

    def send(self, *messages: object) -> list[events.AnyEvent]:
        """Send lines, or raw bytes; return the events that follow."""
        for message in messages:
            data = message if isinstance(message, bytes) else json.dumps(message).encode() + b"\n"
            self.worker.sendall(data)
        return self.agent.read_all()

    def receive(self) -> Any:
        return json.loads(self.worker.makefile("rb").readline())

    @property
    def is_open(self) -> bool:
        return self.agent.fileno() >= 0

    def close(self) -> None:
        self.agent.close()
        self.worker.close()
        self.loop.close()


@pytest.fixture
def channel() -> Iterator[Channel]:
    made = Channel()
    yield made
    made.close()


def test_a_worker_opts_in_is_held_and_begins_again(channel: Channel) -> None:
    assert channel.send(OPT_IN) == [events.WorkerOptedIn(3, 1, 2.0)]
    channel.agent.opened().end(3, "rank 2 failed")
    assert channel.receive() == {"type": "end", "generation": 3, "why": "rank 2 failed"}
    assert channel.send(HELD) == [events.WorkerHeld(3, 1, 7)]
    channel.agent.generation = 4
    channel.agent.opened().begin(4, {"RANK": "5"})
    assert channel.receive() == {"type": "begin", "generation": 4, "env": {"RANK": "5"}}
    assert channel.send({**OPT_IN, "generation": 4}) == [events.WorkerOptedIn(4, 1, 2.0)]


def test_the_fencing_token_of_a_restarted_job_is_accepted(channel: Channel) -> None:
    assert channel.send({**OPT_IN, "generation": 2_000_003}) == [events.WorkerOptedIn(3, 1, 2.0)]


@pytest.mark.parametrize(
    "message",
    [
        b"garbage\n",
        b"\n",
        b"\xff\xfe\n",
        b"[]\n",
        b"x" * (1 << 17),
        {"type": "unknown", "generation": 3},
        {**OPT_IN, "more": 1},
        {**OPT_IN, "generation": 4},
        {**OPT_IN, "timeout_s": 0},
        {**OPT_IN, "timeout_s": 3601},
        {**OPT_IN, "timeout_s": "2"},
        {**HELD, "step": -2},
        {**HELD, "step": 1 << 60},
        HELD,
        OPT_IN,
    ],
    ids=lambda message: str(message)[:40],
)
def test_an_invalid_message_closes_the_channel(channel: Channel, message: object) -> None:
    """Also an acknowledgement of an end that was not sent, and a second opt-in."""
    channel.send(OPT_IN)
    (opted_out,) = channel.send(message)
    assert isinstance(opted_out, events.WorkerOptedOut)
    assert "\n" not in opted_out.why
    assert not channel.is_open


def test_a_worker_that_never_opted_in_may_send_anything(channel: Channel) -> None:
    """The channel is closed, and that is no event."""
    assert channel.send(b"garbage\n") == []
    assert not channel.is_open


def test_variables_may_have_bytes_that_are_not_utf_8(channel: Channel) -> None:
    path = os.fsdecode(b"/logs/\xff/notice")
    channel.agent.opened().begin(4, {"TENAX_NOTICE_FILE": path})
    assert channel.receive()["env"] == {"TENAX_NOTICE_FILE": path}


def test_variables_that_do_not_fit_into_a_line_close_the_channel(channel: Channel) -> None:
    """They are not cut: a wrong value would not be noticed."""
    channel.send(OPT_IN)
    channel.agent.opened().begin(3, {"RANK": "5", "LONG": "x" * (1 << 16)})
    assert not channel.is_open
    assert channel.worker.recv(1) == b""
    opted_out = channel.loop.next_event(lambda: None)
    assert isinstance(opted_out, events.WorkerOptedOut)
    assert opted_out.why.startswith("the variables of its next generation have 65605 bytes")


@pytest.mark.parametrize("is_late", [False, True], ids=["held before", "held after"])
def test_the_channel_of_a_held_worker_that_is_stopped_is_closed(channel: Channel, is_late: bool) -> None:
    """Also if it acknowledges the end of its generation after the stop. Without an acknowledgement it stays open."""
    channel.send(OPT_IN)
    channel.agent.opened().end(3, "rank 2 failed")
    if is_late:
        channel.agent.stop()
        assert channel.is_open
        assert channel.send(HELD, HELD) == [events.WorkerHeld(3, 1, 7)]
    else:
        channel.send(HELD)
        channel.agent.stop()
    assert not channel.is_open
