"""Metric handlers by name, and the messages for invalid ones."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from kit.processes import leaving_nothing
from tenax._io.handler_names import UnknownHandler
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
from tenax.metrics._by_name import check_names


def where(text: str, **options: object) -> str:
    """Return the destination of the one handler of this text."""
    (handler,) = make_handlers(text, **options)  # type: ignore[arg-type]
    handler.close()
    return handler.where  # type: ignore[attr-defined,no-any-return]


def test_names_become_handlers(tmp_path: Path) -> None:
    """In the order of the text; spaces and empty parts are ignored."""
    made = make_handlers(f"console, null,,jsonl:{tmp_path / 'm'},prometheus:0,statsd,otel:http://127.0.0.1:1")
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
        ("otel:http://127.0.0.1:1", "http://127.0.0.1:1/v1/metrics"),
    ],
)
def test_the_argument_is_the_destination(text: str, expected: str) -> None:
    """A host, a port, an endpoint, with defaults."""
    assert where(text, env={}) == expected


@pytest.mark.parametrize("text", ["prometheus:0", "prometheus:127.0.0.1:0", "prometheus::0", "prometheus:localhost:0"])
def test_a_prometheus_page_listens_on_loopback_by_default(text: str) -> None:
    """Port 0 is a free one."""
    host, _, port = where(text).removeprefix("http://").removesuffix("/metrics").rpartition(":")
    assert host in ("127.0.0.1", "localhost")
    assert int(port) > 0


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6")
def test_an_ipv6_address_is_written_in_brackets() -> None:
    """For statsd and prometheus, and in their messages."""
    try:
        assert where("prometheus:[::1]:0").startswith("http://[::1]:")
    except UnknownHandler as error:
        pytest.skip(str(error))


def test_json_lines_without_a_path_go_to_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert where("jsonl") == "metrics.jsonl"
    assert (tmp_path / "metrics.jsonl").exists()


def test_labels_reach_the_handlers(tmp_path: Path) -> None:
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
    """In OpenTelemetry's own variables; an argument has precedence."""
    assert where("otel", env=env) == expected
    assert where("otel:http://127.0.0.1:3", env=env) == "http://127.0.0.1:3/v1/metrics"


def test_open_telemetry_without_an_endpoint_is_rejected() -> None:
    """This process has no meter provider, so every value would be dropped silently."""
    with pytest.raises(UnknownHandler) as caught:
        make_handlers("otel", env={})
    assert str(caught.value) == (
        "could not create the metric handler 'otel': no endpoint is set; pass one such as "
        "otel:http://localhost:4318, set OTEL_EXPORTER_OTLP_ENDPOINT, or set a meter provider first"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prometheuss", "unknown metric handler 'prometheuss'; known: console, dogstatsd, jsonl, null, otel"),
        ("prometheus:http", "could not create the metric handler 'prometheus:http': "),
        ("prometheus:0.0.0.0:99999", "invalid port '99999'; expected a number up to 65535"),
        ("statsd:localhost:many", "invalid port 'many'; expected a number"),
        ("statsd:no such host.invalid", "could not create the metric handler 'statsd:no such host.invalid': "),
        ("otel:localhost:4318", "invalid endpoint 'localhost:4318'; expected a URL such as http://localhost:4318"),
        (
            "jsonl:/no/such/folder/m.jsonl",
            "could not create the metric handler 'jsonl:/no/such/folder/m.jsonl': No such file or directory",
        ),
    ],
)
def test_an_invalid_handler_is_rejected_with_a_message(text: str, message: str) -> None:
    """The message has the text and what is expected."""
    with pytest.raises(UnknownHandler) as caught:
        make_handlers(text)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("console,prometheuss", "unknown metric handler 'prometheuss'; known: console, "),
        ("prometheus:0.0.0.0:99999", "'prometheus:0.0.0.0:99999': invalid port '99999'"),
        ("dogstatsd:localhost:many", "invalid port 'many'; expected a number"),
        ("otel:localhost:4318", "invalid endpoint 'localhost:4318'"),
        ("otel", "could not create the metric handler 'otel': no endpoint is set"),
    ],
)
def test_a_check_rejects_invalid_texts(text: str, message: str) -> None:
    with pytest.raises(UnknownHandler) as caught:
        check_names(text, env={})
    assert message in str(caught.value)


def test_a_check_opens_nothing(tmp_path: Path) -> None:
    """Neither files nor ports: a port that is in use now may be free when the run begins."""
    with leaving_nothing(), socket.create_server(("127.0.0.1", 0)) as other:
        check_names(f"null,jsonl:{tmp_path / 'm'},statsd,prometheus:{other.getsockname()[1]},otel:http://127.0.0.1:1")
    assert list(tmp_path.iterdir()) == []


def test_a_port_in_use_is_reported() -> None:
    """The handlers that were created before are closed."""
    with leaving_nothing(), socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(
            UnknownHandler, match=f"could not create the metric handler 'prometheus:{port}': Address already in use"
        ):
            make_handlers(f"prometheus:0,statsd,prometheus:{port}")


@pytest.mark.process
def test_a_package_can_provide_a_handler(tmp_path: Path) -> None:
    """In the entry point group; it gets the text after the colon."""
    import subprocess
    import sys

    info = tmp_path / "offer-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: offer\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[tenax.metric_handlers]\nmine = offer:Mine\nno_method = offer:NoMethod\nbroken = offer:absent\n"
    )
    (tmp_path / "offer.py").write_text(
        "class Mine:\n"
        "    def __init__(self, argument): self.argument = argument\n"
        "    def emit(self, metric_data): pass\n"
        "class NoMethod:\n"
        "    def __init__(self, argument): pass\n"
    )
    program = (
        "from tenax.metrics import make_handlers\n"
        "print(make_handlers('mine:x:y')[0].argument)\n"
        "for name in ('broken', 'no_method'):\n"
        "    try:\n        make_handlers(name)\n    except ValueError as error:\n        print(error)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=env)
    first, second, third = done.stdout.splitlines()
    assert first == "x:y"
    assert "could not load the metric handler 'broken' from 'offer:absent'" in second
    assert third == (
        "the metric handler 'no_method' is of type 'NoMethod'; its factory must return an object with a method 'emit'"
    )


@pytest.mark.process
def test_a_missing_package_is_reported_with_its_extra(tmp_path: Path) -> None:
    import subprocess
    import sys

    (tmp_path / "opentelemetry").mkdir()
    (tmp_path / "opentelemetry" / "__init__.py").touch()  # an empty package hides the installed one
    program = (
        "from tenax.metrics import make_handlers\n"
        "try:\n    make_handlers('otel:http://localhost:4318')\nexcept ValueError as error:\n    print(error)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=env)
    assert "needs the package opentelemetry, which is not installed: pip install 'tenax[otel]'" in done.stdout
