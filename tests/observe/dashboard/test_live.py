"""The server of the dashboard: access, when a status is computed, and streams."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from unittest.mock import ANY

import msgspec
import pytest

from kit.addresses import own_address
from kit.http import TIMEOUT_S, Received, raw, until_closed
from kit.processes import leaving_nothing, until
from tenax._core.coordinator import CancelRequested
from tenax._io.http.server import ClientLimits
from tenax._io.listen import listen
from tenax._observe.dashboard.live import Dashboard
from tenax._view.status import RunStatus
from tenax.metrics._prometheus import CONTENT_TYPE

from .fake_cluster import FakeCluster


@pytest.fixture(autouse=True)
def _no_leaks() -> Iterator[None]:
    with leaving_nothing():
        yield


def ask(cluster: FakeCluster, path: str, method: str = "GET", body: bytes = b"", **headers: str) -> Received:
    lines = [f"{method} {path} HTTP/1.1", f"Host: {cluster.host}:{cluster.port}", f"Content-Length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return raw(cluster.port, "".join(f"{line}\r\n" for line in [*lines, ""]).encode() + body, cluster.host)


class StreamClient:
    """The client of a stream, as in a browser."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.sock = socket.create_connection((cluster.host, cluster.port), TIMEOUT_S)
        self.sock.sendall(f"GET /events?key={cluster.key} HTTP/1.1\r\nHost: h\r\n\r\n".encode())
        self._file = self.sock.makefile("rb")
        self.head = [line for line in iter(self._file.readline, b"\r\n")]

    def next(self) -> tuple[str, Any]:
        """Return the next event except heartbeats."""
        kind = ""
        while line := self._file.readline():
            name, _, value = line.decode().rstrip("\n").partition(": ")
            if name == "event":
                kind = value
            elif name == "data" and kind != "heartbeat":
                return kind, json.loads(value)
        return "", None

    def until(self, condition: Callable[[str, Any], bool]) -> Any:
        while True:
            kind, data = self.next()
            assert kind, "the stream ended"
            if condition(kind, data):
                return data

    def close(self) -> None:
        self._file.close()
        self.sock.close()

    def __enter__(self) -> StreamClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _has_step(data: Any, step: int) -> bool:
    return any(step in node.get("steps", ()) for node in data.get("nodes", ()))


# --- access -----------------------------------------------------------------------------------------------------------


def test_requests_without_the_key_are_rejected(start_cluster: Callable[..., FakeCluster]) -> None:
    """D3: for everything about the run; with a wrong, empty, invalid or incomplete key."""
    cluster = start_cluster()
    for path in ("/", "/events", "/status.json", "/metrics", "/logs?node=id-0", "/whatever"):
        mark = "&" if "?" in path else "?"
        for given in ("", f"{mark}key=", f"{mark}key={cluster.key[:-1]}", f"{mark}key=%ff%00", f"{mark}key={'0' * 36}"):
            answer = ask(cluster, path + given)
            assert (answer.status, answer.body.count(b"\n")) == (403, 1), path
            assert cluster.key.encode() not in answer.body
    assert ask(cluster, "/", Authorization="Bearer wrong").status == 403


def test_the_key_is_accepted_in_the_link_and_in_headers(start_cluster: Callable[..., FakeCluster]) -> None:
    """D3: as sent by a browser, a script and a scraper."""
    cluster = start_cluster()
    assert re.fullmatch(r"http://127\.\d+\.\d+\.\d+:\d+/\?key=[0-9a-f]{36}", cluster.link)
    for answer in (
        ask(cluster, f"/status.json?key={cluster.key}"),
        ask(cluster, "/status.json", X_Tenax_Key=cluster.key),
        ask(cluster, "/status.json", Authorization=f"Bearer {cluster.key}"),
    ):
        assert answer.status == 200
        shown = msgspec.json.decode(answer.body, type=RunStatus)
        assert (shown.phase, shown.world_size, len(shown.nodes)) == ("running", 4, 2)


def test_every_dashboard_has_its_own_key(start_cluster: Callable[..., FakeCluster]) -> None:
    one, other = start_cluster(), start_cluster()
    assert one.key != other.key
    assert ask(one, f"/?key={other.key}").status == 403


def test_the_page_has_strict_security_headers(start_cluster: Callable[..., FakeCluster]) -> None:
    """No inline or external content, no frames; and the key is not in the page."""
    cluster = start_cluster()
    for path in (f"/?key={cluster.key}", "/page.js", "/page.css", "/", f"/status.json?key={cluster.key}"):
        headers = ask(cluster, path).headers
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["Referrer-Policy"] == "no-referrer"
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cache-Control"] == "no-store"
    html = ask(cluster, f"/?key={cluster.key}").body.decode()
    assert cluster.key not in html
    assert not re.search(r"\son[a-z]+=|<script>|<style|style=|https?://(?!www\.w3\.org/2000/svg)", html)


def test_other_methods_are_rejected(start_cluster: Callable[..., FakeCluster]) -> None:
    cluster = start_cluster()
    for path, method in (("/", "POST"), ("/events", "DELETE"), ("/do", "GET"), ("/do", "OPTIONS"), ("/events", "HEAD")):
        answer = ask(cluster, f"{path}?key={cluster.key}", method)
        assert (answer.status, bool(answer.headers["Allow"])) == (405, True), (path, method)
    assert ask(cluster, f"/nothing?key={cluster.key}").status == 404


def test_requests_that_change_the_run_need_the_header(start_cluster: Callable[..., FakeCluster]) -> None:
    """D3: a form of another site can send the key in a URL, if it has it, but never in a header."""
    cluster = start_cluster()
    body = b'{"do": "stop"}'
    for headers in (
        {},
        {"Authorization": f"Bearer {cluster.key}"},
        {"X_Tenax_Key": "0" * 36},
        {"Origin": "http://evil"},
    ):
        answer = ask(cluster, f"/do?key={cluster.key}", "POST", body, **headers)
        assert answer.status == 403
    assert cluster.status.phase == "running"
    assert ask(cluster, "/do", "POST", body, X_Tenax_Key=cluster.key).json() == {
        "value": "stopping the run on every node"
    }
    until(lambda: cluster.status.outcome == "cancelled", "the end")


def test_invalid_actions_are_rejected(start_cluster: Callable[..., FakeCluster]) -> None:
    cluster = start_cluster()
    malformed = (b"", b"[]", b"{", b'{"do": "fly"}', b'{"do": "drain"}', b'{"do": "stop", "x": 1}', b"\xff" * 100)
    nested = (b"[" * 4000, b'{"do":' * 600, b'{"do": "stop", "x": ' + b"[" * 4000)
    for body in malformed + nested:
        assert ask(cluster, "/do", "POST", body, X_Tenax_Key=cluster.key).status == 400, body
    assert ask(cluster, "/do", "POST", b"x" * 5000, X_Tenax_Key=cluster.key).status == 413
    refused = ask(cluster, "/do", "POST", b'{"do": "drain", "node": "unknown"}', X_Tenax_Key=cluster.key)
    assert (refused.status, refused.json()) == (409, {"error": ANY})
    assert "no node 'unknown'; known nodes" in refused.json()["error"]
    assert ask(cluster, f"/logs?node=id-0&last=many&key={cluster.key}").status == 400


# --- statuses ---------------------------------------------------------------------------------------------------------


def test_without_a_browser_no_status_is_computed(start_cluster: Callable[..., FakeCluster]) -> None:
    """D1: before the first and after the last one."""
    cluster = start_cluster()
    cluster.fail(0)
    assert (cluster.operators.statuses, cluster.operators.watchers) == (0, 0)
    with StreamClient(cluster) as client:
        assert client.next()[0] == "whole"
        assert cluster.operators.watchers == 1
    until(lambda: cluster.operators.watchers == 0, "the unwatch")
    made = cluster.operators.statuses
    cluster.fail(1)
    cluster.do(lambda: None)
    assert cluster.operators.statuses == made


def test_a_stream_gets_the_full_status_and_then_changes(start_cluster: Callable[..., FakeCluster]) -> None:
    cluster = start_cluster()
    with StreamClient(cluster) as client:
        kind, whole = client.next()
        assert (kind, whole["generation"], len(whole["nodes"])) == ("whole", 1, 2)
        cluster.progress(5, 1)
        change = client.until(lambda kind, data: bool(data.get("nodes")))
        assert [node["node_id"] for node in change["nodes"]] == ["id-1"]
        cluster.fail(0, 3)
        client.until(lambda kind, data: data.get("run", {}).get("generation") == 2)


def test_many_changes_are_combined(start_cluster: Callable[..., FakeCluster]) -> None:
    """D2: a status is computed at most ten times a second."""
    cluster = start_cluster()
    with StreamClient(cluster) as client:
        client.next()
        before, began = cluster.operators.statuses, cluster.loop.now()
        for step in range(200):
            cluster.progress(step + 1)
        client.until(lambda kind, data: _has_step(data, 200))
        took_s = cluster.loop.now() - began
        assert cluster.operators.statuses - before <= took_s / 0.1 + 2


def test_all_streams_share_one_status(start_cluster: Callable[..., FakeCluster]) -> None:
    """One stream too many is rejected."""
    cluster = start_cluster(client_limits=ClientLimits(connections=64, streams=20))
    with ExitStack() as stack:
        clients = [stack.enter_context(StreamClient(cluster)) for _ in range(20)]
        for client in clients:
            client.until(lambda kind, data: kind == "whole")
        before = cluster.operators.statuses
        cluster.fail(0)
        for client in clients:
            client.until(lambda kind, data: data.get("run", {}).get("generation") == 2)
        assert cluster.operators.statuses - before < 20
        assert cluster.operators.watchers == 1
        assert ask(cluster, f"/events?key={cluster.key}").status == 503
    until(lambda: cluster.operators.watchers == 0, "the unwatch")


def test_a_browser_that_stops_reading_loses_its_stream_and_can_reconnect(
    start_cluster: Callable[..., FakeCluster],
) -> None:
    """D4: the others get everything meanwhile."""
    long_names = "host-{:04000d}".format
    cluster = start_cluster(200, 2, client_limits=ClientLimits(stream_bytes=3 << 20), hosts=long_names)
    with socket.socket() as stuck, StreamClient(cluster) as client:
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stuck.connect((cluster.host, cluster.port))
        stuck.sendall(f"GET /events?key={cluster.key} HTTP/1.1\r\nHost: h\r\n\r\n".encode())
        client.next()
        until(lambda: len(cluster.dashboard._streams) == 2, "both")
        for step in range(10, 1000, 10):
            if len(cluster.dashboard._streams) == 1:
                break
            cluster.progress(step)
            client.until(lambda kind, data, step=step: _has_step(data, step))
        assert len(cluster.dashboard._streams) == 1
        with StreamClient(cluster) as again:
            assert again.next()[0] == "whole"


def test_the_stream_of_a_lost_browser_is_removed(start_cluster: Callable[..., FakeCluster]) -> None:
    cluster = start_cluster()
    client = StreamClient(cluster)
    client.next()
    client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    client.close()
    cluster.fail(0)
    until(lambda: not cluster.dashboard._streams and not cluster.operators.watchers, "its removal")
    assert cluster.errors == []


def test_the_last_status_is_sent_before_the_dashboard_closes(start_cluster: Callable[..., FakeCluster]) -> None:
    """Also if it comes sooner than the next status is due."""
    cluster = start_cluster()
    with StreamClient(cluster) as client:
        client.next()
        cluster.do(lambda: (cluster.coordinator.step(CancelRequested("enough")), cluster.dashboard.close()))
        last = client.until(lambda kind, data: data.get("run", {}).get("phase") == "over")
        assert last["run"]["outcome"] == "cancelled"
        assert client.next()[0] == "closed"
        assert until_closed(client.sock) == b""
    with pytest.raises(ConnectionRefusedError):
        StreamClient(cluster)


def test_an_error_of_the_status_is_reported_once_and_does_not_affect_the_run(
    start_cluster: Callable[..., FakeCluster],
) -> None:
    """The dashboard stops updating."""
    cluster = start_cluster()

    class FailingOperatorApi:
        watch, unwatch = cluster.operators.watch, cluster.operators.unwatch

        def status(self) -> RunStatus:
            raise RuntimeError("no")

        def submit(self, request: object, reply: object) -> None:
            raise RuntimeError("no")

    errors: list[str] = []
    dashboard = cluster.do(lambda: Dashboard(f"{own_address()}:0", FailingOperatorApi(), cluster.loop, errors.append))
    host, _, port = dashboard.link.removeprefix("http://").partition("/")[0].partition(":")
    key = dashboard.link.partition("key=")[2]
    with socket.create_connection((host, int(port)), TIMEOUT_S) as sock:
        sock.sendall(f"GET /events?key={key} HTTP/1.1\r\nHost: h\r\n\r\n".encode())
        until(lambda: errors, "the error")
        cluster.fail(0)
    answer = raw(int(port), f"GET /status.json?key={key} HTTP/1.1\r\nHost: h\r\n\r\n".encode(), host)
    assert (answer.status, answer.body) == (500, b"RuntimeError: no\n")
    cluster.do(dashboard.close)
    assert errors == ["the dashboard stopped updating: RuntimeError: no"]
    assert cluster.operators.watchers == 0
    assert cluster.status.generation == 2


def test_an_error_in_the_servers_thread_is_reported_once(start_cluster: Callable[..., FakeCluster]) -> None:
    """The server keeps answering."""
    cluster = start_cluster()
    with StreamClient(cluster) as client:
        client.next()
        cluster.do(
            lambda: setattr(cluster.operators, "wrapped", InvalidOperatorApi(cluster.operators.wrapped, "not a status"))
        )
        cluster.fail(0)
        until(lambda: cluster.errors, "the error")
        cluster.fail(1)
        assert ask(cluster, f"/logs?node=id-0&key={cluster.key}").status == 200
    assert len(cluster.errors) == 1
    assert "the dashboard stopped updating" in cluster.errors[0]


class InvalidOperatorApi:
    def __init__(self, wrapped: Any, status: Any) -> None:
        self.watch, self.unwatch = wrapped.watch, wrapped.unwatch
        self.status = lambda: status


def test_an_invalid_wait_time_does_not_wait(start_cluster: Callable[..., FakeCluster]) -> None:
    cluster = start_cluster()
    path = f"/logs?node=id-0&cursor={len(cluster.printed)}&key={cluster.key}&wait_s="
    for wait_s in ("nan", "-nan", "-inf", "-1"):
        assert ask(cluster, path + wait_s).json()["value"]["lines"] == []
    assert cluster.held == []


# --- other answers ----------------------------------------------------------------------------------------------------


def test_log_lines_of_a_worker_are_returned_and_waited_for(start_cluster: Callable[..., FakeCluster]) -> None:
    cluster = start_cluster()
    first = ask(cluster, f"/logs?node=id-0&local_rank=1&key={cluster.key}").json()["value"]
    assert [line["text"] for line in first["lines"]] == cluster.printed
    with socket.create_connection((cluster.host, cluster.port), TIMEOUT_S) as sock:
        query = f"node=id-0&local_rank=1&cursor={first['cursor']}&wait_s=1000000&key={cluster.key}"
        sock.sendall(f"GET /logs?{query} HTTP/1.1\r\nHost: h\r\n\r\n".encode())
        until(lambda: cluster.held, "the request to wait")
        assert cluster.held[0][0].wait_s == 20.0
        cluster.print("the next")
        assert b'"text":"the next"' in until_closed(sock)
    unknown = ask(cluster, f"/logs?node=id-9&key={cluster.key}")
    assert (unknown.status, "id-9" in unknown.json()["error"]) == (409, True)


def test_metrics_are_on_the_same_port(start_cluster: Callable[..., FakeCluster]) -> None:
    """For a scraper that sends the key as a token."""
    cluster = start_cluster()
    answer = ask(cluster, "/metrics", Authorization=f"Bearer {cluster.key}")
    assert (answer.status, answer.headers["Content-Type"]) == (200, CONTENT_TYPE)
    assert b"tenax_run_" in answer.body
    assert b'run_id="train-large"' in answer.body


def test_an_unusable_address_is_reported(start_cluster: Callable[..., FakeCluster]) -> None:
    cluster = start_cluster()
    address = f"{cluster.host}:{cluster.port}"
    with pytest.raises(OSError, match=rf"port {cluster.port} of {cluster.host} is already in use; choose"):
        cluster.do(lambda: Dashboard(address, cluster.operators, cluster.loop, cluster.errors.append))
    with pytest.raises(OSError, match="is not an address of this host"):
        cluster.do(lambda: Dashboard("192.0.2.1:0", cluster.operators, cluster.loop, cluster.errors.append))
    with pytest.raises(OSError, match=r"could not listen on port 0 of "):
        cluster.do(lambda: Dashboard("no such host.invalid:0", cluster.operators, cluster.loop, cluster.errors.append))


def test_the_link_of_a_wildcard_address_has_the_name_of_this_host(start_cluster: Callable[..., FakeCluster]) -> None:
    """http://0.0.0.0 cannot be opened from other hosts."""
    cluster = start_cluster()
    dashboard = cluster.do(lambda: Dashboard("0.0.0.0:0", cluster.operators, cluster.loop, cluster.errors.append))
    assert dashboard.link.startswith(f"http://{socket.gethostname()}:")
    cluster.do(dashboard.close)
    if socket.has_dualstack_ipv6():
        listen("::1", 0).close()
        dashboard = cluster.do(lambda: Dashboard("[::1]:0", cluster.operators, cluster.loop, cluster.errors.append))
        assert dashboard.link.startswith("http://[::1]:")
        cluster.do(dashboard.close)
