"""Handlers by name: what a person writes, and what they are told when it cannot be."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from tenax.handler_names import UnknownHandler
from tenax.metrics import (
    ConsoleMetricHandler,
    JsonLinesMetricHandler,
    MetricData,
    NullMetricHandler,
    OpenTelemetryMetricHandler,
    PrometheusMetricHandler,
    StatsdMetricHandler,
    make_handlers,
)
from watching import leaving_nothing


def where(text: str, **options: object) -> str:
    """What the one handler of this text says of its place."""
    (handler,) = make_handlers(text, **options)  # type: ignore[arg-type]
    handler.close()
    return handler.where  # type: ignore[attr-defined,no-any-return]


def test_names_become_handlers(tmp_path: Path) -> None:
    """In the order in which they are written; blanks and empty parts do not matter."""
    made = make_handlers(f"console, null,,jsonl:{tmp_path / 'm'},prometheus:0,statsd,otel")
    for handler in made:
        handler.close()
    assert [type(handler) for handler in made] == [
        ConsoleMetricHandler,
        NullMetricHandler,
        JsonLinesMetricHandler,
        PrometheusMetricHandler,
        StatsdMetricHandler,
        OpenTelemetryMetricHandler,
    ]
    assert make_handlers("") == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("statsd", "127.0.0.1:8125"),
        ("statsd:localhost", "localhost:8125"),
        ("statsd:127.0.0.1:9125", "127.0.0.1:9125"),
        ("dogstatsd:127.0.0.1:9125", "127.0.0.1:9125"),
        ("otel", "the global meter provider"),
        ("otel:http://127.0.0.1:1", "http://127.0.0.1:1/v1/metrics"),
    ],
)
def test_the_argument_says_where(text: str, expected: str) -> None:
    """A host, a port, an endpoint; what is left out is the usual one."""
    assert where(text, env={}) == expected


@pytest.mark.parametrize("text", ["prometheus:0", "prometheus:127.0.0.1:0", "prometheus::0", "prometheus:localhost:0"])
def test_a_prometheus_page_is_on_this_host_alone(text: str) -> None:
    """Unless another address is asked for; port 0 is one that is free."""
    host, _, port = where(text).removeprefix("http://").removesuffix("/metrics").rpartition(":")
    assert host in ("127.0.0.1", "localhost")
    assert int(port) > 0


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6")
def test_an_ipv6_address_stands_in_brackets() -> None:
    """For statsd and for prometheus, and in what they say."""
    try:
        assert where("prometheus:[::1]:0").startswith("http://[::1]:")
    except UnknownHandler as error:
        pytest.skip(str(error))


def test_json_lines_without_a_path_go_to_the_directory(tmp_path: Path) -> None:
    """The agent says which: that of its logs."""
    assert where("jsonl", directory=str(tmp_path)) == str(tmp_path / "metrics.jsonl")


def test_labels_reach_the_handlers(tmp_path: Path) -> None:
    """What all values of a run have in common is said once, when the handlers are made."""
    path = tmp_path / "m.jsonl"
    (handler,) = make_handlers(f"jsonl:{path}", {"run_id": "r"})
    handler.emit(MetricData(1.0, "g", "n", 1))
    handler.close()
    assert '"labels":{"run_id":"r"}' in path.read_text()


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1/otlp/"}, "http://127.0.0.1:1/otlp/v1/metrics"),
        (
            {"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://127.0.0.1:2/m", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"},
            "http://127.0.0.1:2/m",
        ),
    ],
)
def test_an_endpoint_may_be_in_the_environment(env: dict[str, str], expected: str) -> None:
    """OpenTelemetry's own variables name it, as they do for every program; what is written wins."""
    assert where("otel", env=env) == expected
    assert where("otel:http://127.0.0.1:3", env=env) == "http://127.0.0.1:3/v1/metrics"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("prometheuss", "there is no metric handler 'prometheuss'; known are console, dogstatsd, jsonl, null, otel"),
        ("prometheus:http", "'prometheus:http' cannot be made: "),
        ("prometheus:0.0.0.0:99999", "'99999' is no port; expected a number up to 65535"),
        ("statsd:localhost:many", "'many' is no port; expected a number"),
        ("statsd:no such host.invalid", "'statsd:no such host.invalid' cannot be made: "),
        ("otel:localhost:4318", "'localhost:4318' is no endpoint; expected one such as http://localhost:4318"),
        ("jsonl:/no/such/folder/m.jsonl", "cannot be made: No such file or directory"),
    ],
)
def test_what_cannot_be_made_is_said(text: str, sentence: str) -> None:
    """One sentence with what was written and what is expected."""
    with pytest.raises(UnknownHandler) as caught:
        make_handlers(text)
    assert sentence in str(caught.value)


def test_a_taken_port_is_said() -> None:
    """And the handlers that had been made before it are closed again."""
    with leaving_nothing(), socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(UnknownHandler, match=f"'prometheus:{port}' cannot be made: Address already in use"):
            make_handlers(f"prometheus:0,statsd,prometheus:{port}")


def test_a_package_may_offer_a_handler(tmp_path: Path) -> None:
    """Under the entry point group; it gets the text behind the colon."""
    import subprocess
    import sys

    info = tmp_path / "offer-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: offer\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[tenax.metric_handlers]\nmine = offer:make\nbroken = offer:absent\n")
    (tmp_path / "offer.py").write_text("def make(argument):\n    return ['mine', argument]\n")
    program = (
        "from tenax.metrics import make_handlers\n"
        "print(make_handlers('mine:x:y')[0])\n"
        "try:\n    make_handlers('broken')\nexcept ValueError as error:\n    print(error)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=env)
    first, second = done.stdout.splitlines()
    assert first == "['mine', 'x:y']"
    assert "the metric handler 'broken' of 'offer:absent' cannot be loaded" in second


def test_a_missing_package_is_said(tmp_path: Path) -> None:
    """With the extra that brings it."""
    import subprocess
    import sys

    (tmp_path / "opentelemetry").mkdir()
    (tmp_path / "opentelemetry" / "__init__.py").touch()  # as if it were not there: nothing is in it
    program = (
        "from tenax.metrics import make_handlers\n"
        "try:\n    make_handlers('otel:http://localhost:4318')\nexcept ValueError as error:\n    print(error)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=env)
    assert "needs a package that is not installed (opentelemetry): pip install 'tenax[otel]'" in done.stdout
