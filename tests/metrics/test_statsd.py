"""StatsD, received on a real socket."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from kit.processes import TIMEOUT_S, leaving_nothing
from tenax.metrics import MetricData, StatsdMetricHandler


@pytest.fixture
def peer() -> Iterator[socket.socket]:
    with leaving_nothing(), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
        made.bind(("127.0.0.1", 0))
        made.settimeout(TIMEOUT_S)
        yield made


def received(peer: socket.socket, *data: MetricData, **options: object) -> list[str]:
    """Return the received texts, one per value."""
    handler = StatsdMetricHandler("127.0.0.1", peer.getsockname()[1], **options)  # type: ignore[arg-type]
    try:
        for each in data:
            handler.emit(each)
        return [peer.recv(4096).decode() for _ in data]
    finally:
        handler.close()


@pytest.mark.parametrize(
    ("name", "value", "datagram"),
    [
        ("loss", 2, "g.loss:2|g"),
        ("loss", 0.125, "g.loss:0.125|g"),
        ("loss", 0, "g.loss:0|g"),
        ("loss", 1e-9, "g.loss:0|g"),
        ("steps_total", 3, "g.steps_total:3|c"),
        ("Bar.baz.success", 1, "g.Bar.baz.success:1|c"),
        ("Bar.baz.duration.ms", 250, "g.Bar.baz.duration.ms:250|ms"),
        ("step_ms", 0.5, "g.step_ms:0.5|ms"),
        ("loss", -2, "g.loss:0|g\ng.loss:-2|g"),
        ("a b:c|d@e\nf", 1, "g.a_b_c_d_e_f:1|g"),
    ],
)
def test_a_value_is_a_datagram(peer: socket.socket, name: str, value: float, datagram: str) -> None:
    """Counters, gauges, timers; a negative gauge is set to 0 first, because a sign alone means a change."""
    assert received(peer, MetricData(1.0, "g", name, value)) == [datagram]


def test_labels_are_not_sent_by_default(peer: socket.socket) -> None:
    """Plain StatsD has no tags, and many servers drop lines with tags."""
    assert received(peer, MetricData(1.0, "g", "n", 1), labels={"run_id": "r"}) == ["g.n:1|g"]


def test_with_tags_labels_are_sent_as_tags(peer: socket.socket) -> None:
    """In the format of DogStatsD, with the labels of the run."""
    data = [
        MetricData(1.0, "torchelastic", "workers.trainer.healthy", 1),
        MetricData(1.0, "g", "Bar.baz.duration.ms", 250),
        MetricData(1.0, "g", "n", -1),
    ]
    assert received(peer, *data, tags=True, labels={"run_id": "a,b|c"}) == [
        "torchelastic.workers_state:1|g|#role:trainer,run_id:a_b_c,state:healthy",
        "g.call:250|ms|#function:Bar.baz,run_id:a_b_c",
        "g.n:0|g|#run_id:a_b_c\ng.n:-1|g|#run_id:a_b_c",
    ]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_rejected(peer: socket.socket, value: float) -> None:
    with pytest.raises(ValueError, match=r"the metric 'n' is .*; StatsD accepts only finite numbers"):
        received(peer, MetricData(1.0, "g", "n", value))


def test_sending_without_a_server_does_not_raise() -> None:
    """Not even the second value."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as gone:
        gone.bind(("127.0.0.1", 0))
        port = gone.getsockname()[1]
    with leaving_nothing():
        handler = StatsdMetricHandler("127.0.0.1", port)
        for _ in range(3):
            handler.emit(MetricData(1.0, "g", "n", 1))
        handler.close()
