"""The page's server: who may see what, what is computed and when, and what becomes of those who watch."""

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
from kit.http import PATIENCE_S, Received, raw, until_closed
from kit.processes import leaving_nothing, until
from tenax._core.coordinator import CancelRequested
from tenax._io.http.server import ClientLimits
from tenax._io.listen import listen
from tenax._observe.dashboard.live import Dashboard
from tenax._observe.metrics_page import CONTENT_TYPE
from tenax._view.status import RunStatus

from .stage import Stage


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    with leaving_nothing():
        yield


def ask(stage: Stage, path: str, method: str = "GET", body: bytes = b"", **headers: str) -> Received:
    lines = [f"{method} {path} HTTP/1.1", f"Host: {stage.host}:{stage.port}", f"Content-Length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return raw(stage.port, "".join(f"{line}\r\n" for line in [*lines, ""]).encode() + body, stage.host)


class Watcher:
    """A browser's end of a stream."""

    def __init__(self, stage: Stage) -> None:
        self.sock = socket.create_connection((stage.host, stage.port), PATIENCE_S)
        self.sock.sendall(f"GET /events?key={stage.key} HTTP/1.1\r\nHost: h\r\n\r\n".encode())
        self._file = self.sock.makefile("rb")
        self.head = [line for line in iter(self._file.readline, b"\r\n")]

    def next(self) -> tuple[str, Any]:
        """The next event that is not a sign of life."""
        kind = ""
        while line := self._file.readline():
            name, _, value = line.decode().rstrip("\n").partition(": ")
            if name == "event":
                kind = value
            elif name == "data" and kind != "beat":
                return kind, json.loads(value)
        return "", None

    def until(self, fact: Callable[[str, Any], bool]) -> Any:
        while True:
            kind, data = self.next()
            assert kind, "the stream ended"
            if fact(kind, data):
                return data

    def close(self) -> None:
        self._file.close()
        self.sock.close()

    def __enter__(self) -> Watcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _says_step(data: Any, step: int) -> bool:
    return any(step in node.get("steps", ()) for node in data.get("nodes", ()))


# --- who may see what -------------------------------------------------------------------------------------------------


def test_without_the_key_there_is_one_sentence(set_up: Callable[..., Stage]) -> None:
    """D3: for everything that is about the run; with a wrong one, an empty one, one that is no text, and a part."""
    stage = set_up()
    for path in ("/", "/events", "/status.json", "/metrics", "/logs?node=id-0", "/whatever"):
        mark = "&" if "?" in path else "?"
        for given in ("", f"{mark}key=", f"{mark}key={stage.key[:-1]}", f"{mark}key=%ff%00", f"{mark}key={'0' * 36}"):
            heard = ask(stage, path + given)
            assert (heard.status, heard.body.count(b"\n")) == (403, 1), path
            assert stage.key.encode() not in heard.body
    assert ask(stage, "/", Authorization="Bearer wrong").status == 403


def test_the_key_opens_by_link_and_by_header(set_up: Callable[..., Stage]) -> None:
    """D3: as a browser, a script and a scraper would give it."""
    stage = set_up()
    assert re.fullmatch(r"http://127\.\d+\.\d+\.\d+:\d+/\?key=[0-9a-f]{36}", stage.link)
    for heard in (
        ask(stage, f"/status.json?key={stage.key}"),
        ask(stage, "/status.json", X_Tenax_Key=stage.key),
        ask(stage, "/status.json", Authorization=f"Bearer {stage.key}"),
    ):
        assert heard.status == 200
        shown = msgspec.json.decode(heard.body, type=RunStatus)
        assert (shown.phase, shown.world_size, len(shown.nodes)) == ("running", 4, 2)


def test_two_pages_have_two_keys(set_up: Callable[..., Stage]) -> None:
    one, other = set_up(), set_up()
    assert one.key != other.key
    assert ask(one, f"/?key={other.key}").status == 403


def test_the_page_is_fenced_in(set_up: Callable[..., Stage]) -> None:
    """Nothing inline, nothing from elsewhere, in no frame; and the key is told to nobody."""
    stage = set_up()
    for path in (f"/?key={stage.key}", "/page.js", "/page.css", "/", f"/status.json?key={stage.key}"):
        headers = ask(stage, path).headers
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["Referrer-Policy"] == "no-referrer"
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cache-Control"] == "no-store"
    html = ask(stage, f"/?key={stage.key}").body.decode()
    assert stage.key not in html
    assert not re.search(r"\son[a-z]+=|<script>|<style|style=|https?://(?!www\.w3\.org/2000/svg)", html)


def test_other_methods_are_refused(set_up: Callable[..., Stage]) -> None:
    stage = set_up()
    for path, method in (("/", "POST"), ("/events", "DELETE"), ("/do", "GET"), ("/do", "OPTIONS"), ("/events", "HEAD")):
        heard = ask(stage, f"{path}?key={stage.key}", method)
        assert (heard.status, bool(heard.headers["Allow"])) == (405, True), (path, method)
    assert ask(stage, f"/nothing?key={stage.key}").status == 404


def test_what_changes_the_run_needs_the_header(set_up: Callable[..., Stage]) -> None:
    """D3: a form on another page can send the key in an address, if it knows it, but never a header."""
    stage = set_up()
    body = b'{"do": "stop"}'
    for headers in ({}, {"Authorization": f"Bearer {stage.key}"}, {"X_Tenax_Key": "0" * 36}, {"Origin": "http://evil"}):
        heard = ask(stage, f"/do?key={stage.key}", "POST", body, **headers)
        assert heard.status == 403
    assert stage.status.phase == "running"
    assert ask(stage, "/do", "POST", body, X_Tenax_Key=stage.key).json() == {
        "value": "the run is being ended on every node"
    }
    until(lambda: stage.status.outcome == "cancelled", "the end")


def test_wishes_that_are_none_are_refused(set_up: Callable[..., Stage]) -> None:
    stage = set_up()
    malformed = (b"", b"[]", b"{", b'{"do": "fly"}', b'{"do": "drain"}', b'{"do": "stop", "x": 1}', b"\xff" * 100)
    nested = (b"[" * 4000, b'{"do":' * 600, b'{"do": "stop", "x": ' + b"[" * 4000)
    for body in malformed + nested:
        assert ask(stage, "/do", "POST", body, X_Tenax_Key=stage.key).status == 400, body
    assert ask(stage, "/do", "POST", b"x" * 5000, X_Tenax_Key=stage.key).status == 413
    refused = ask(stage, "/do", "POST", b'{"do": "drain", "node": "nobody"}', X_Tenax_Key=stage.key)
    assert (refused.status, refused.json()) == (409, {"error": ANY})
    assert "there is no node 'nobody'" in refused.json()["error"]
    assert ask(stage, f"/logs?node=id-0&last=many&key={stage.key}").status == 400


# --- what is computed -------------------------------------------------------------------------------------------------


def test_with_nobody_watching_nothing_is_computed(set_up: Callable[..., Stage]) -> None:
    """D1: before the first, and after the last."""
    stage = set_up()
    stage.fail(0)
    assert (stage.desk.statuses, stage.desk.watchers) == (0, 0)
    with Watcher(stage) as watcher:
        assert watcher.next()[0] == "whole"
        assert stage.desk.watchers == 1
    until(lambda: stage.desk.watchers == 0, "the desk to be left")
    made = stage.desk.statuses
    stage.fail(1)
    stage.do(lambda: None)
    assert stage.desk.statuses == made


def test_a_watcher_gets_the_whole_and_then_what_changes(set_up: Callable[..., Stage]) -> None:
    stage = set_up()
    with Watcher(stage) as watcher:
        kind, whole = watcher.next()
        assert (kind, whole["generation"], len(whole["nodes"])) == ("whole", 1, 2)
        stage.progress(5, 1)
        change = watcher.until(lambda kind, data: bool(data.get("nodes")))
        assert [node["node_id"] for node in change["nodes"]] == ["id-1"]
        stage.fail(0, 3)
        watcher.until(lambda kind, data: data.get("run", {}).get("generation") == 2)


def test_a_storm_is_shown_in_few_pieces(set_up: Callable[..., Stage]) -> None:
    """D2: however many steps there are, a status is made no more than ten times a second."""
    stage = set_up()
    with Watcher(stage) as watcher:
        watcher.next()
        before, began = stage.desk.statuses, stage.loop.now()
        for step in range(200):
            stage.progress(step + 1)
        watcher.until(lambda kind, data: _says_step(data, 200))
        took_s = stage.loop.now() - began
        assert stage.desk.statuses - before <= took_s / 0.1 + 2


def test_many_watch_the_same(set_up: Callable[..., Stage]) -> None:
    """One status is made for all of them; one too many is told so."""
    stage = set_up(client_limits=ClientLimits(connections=64, streams=20))
    with ExitStack() as stack:
        watchers = [stack.enter_context(Watcher(stage)) for _ in range(20)]
        for watcher in watchers:
            watcher.until(lambda kind, data: kind == "whole")
        before = stage.desk.statuses
        stage.fail(0)
        for watcher in watchers:
            watcher.until(lambda kind, data: data.get("run", {}).get("generation") == 2)
        assert stage.desk.statuses - before < 20
        assert stage.desk.watchers == 1
        assert ask(stage, f"/events?key={stage.key}").status == 503
    until(lambda: stage.desk.watchers == 0, "the desk to be left")


def test_who_takes_nothing_loses_the_stream_and_can_come_back(set_up: Callable[..., Stage]) -> None:
    """D4: the others see everything meanwhile."""
    long_names = "host-{:04000d}".format
    stage = set_up(200, 2, client_limits=ClientLimits(stream_bytes=3 << 20), hosts=long_names)
    with socket.socket() as stuck, Watcher(stage) as watcher:
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stuck.connect((stage.host, stage.port))
        stuck.sendall(f"GET /events?key={stage.key} HTTP/1.1\r\nHost: h\r\n\r\n".encode())
        watcher.next()
        until(lambda: len(stage.dashboard._streams) == 2, "both")
        for step in range(10, 1000, 10):
            if len(stage.dashboard._streams) == 1:
                break
            stage.progress(step)
            watcher.until(lambda kind, data, step=step: _says_step(data, step))
        assert len(stage.dashboard._streams) == 1
        with Watcher(stage) as again:
            assert again.next()[0] == "whole"


def test_a_browser_that_goes_away_in_the_middle_is_forgotten(set_up: Callable[..., Stage]) -> None:
    stage = set_up()
    watcher = Watcher(stage)
    watcher.next()
    watcher.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    watcher.close()
    stage.fail(0)
    until(lambda: not stage.dashboard._streams and not stage.desk.watchers, "it to be forgotten")
    assert stage.complaints == []


def test_the_end_is_told_before_the_page_closes(set_up: Callable[..., Stage]) -> None:
    """Also if it comes faster than statuses are made."""
    stage = set_up()
    with Watcher(stage) as watcher:
        watcher.next()
        stage.do(lambda: (stage.seat.step(CancelRequested("enough")), stage.dashboard.close()))
        last = watcher.until(lambda kind, data: data.get("run", {}).get("phase") == "over")
        assert last["run"]["outcome"] == "cancelled"
        assert watcher.next()[0] == "farewell"
        assert until_closed(watcher.sock) == b""
    with pytest.raises(ConnectionRefusedError):
        Watcher(stage)


def test_a_desk_that_breaks_is_told_once_and_breaks_nothing_else(set_up: Callable[..., Stage]) -> None:
    """A page that cannot be made must never end a run."""
    stage = set_up()

    class Broken:
        watch, unwatch = stage.desk.watch, stage.desk.unwatch

        def status(self) -> RunStatus:
            raise RuntimeError("no")

        def ask(self, request: object, reply: object) -> None:
            raise RuntimeError("no")

    said: list[str] = []
    dashboard = stage.do(lambda: Dashboard(f"{own_address()}:0", Broken(), stage.loop, said.append))
    host, _, port = dashboard.link.removeprefix("http://").partition("/")[0].partition(":")
    key = dashboard.link.partition("key=")[2]
    with socket.create_connection((host, int(port)), PATIENCE_S) as sock:
        sock.sendall(f"GET /events?key={key} HTTP/1.1\r\nHost: h\r\n\r\n".encode())
        until(lambda: said, "the complaint")
        stage.fail(0)
    heard = raw(int(port), f"GET /status.json?key={key} HTTP/1.1\r\nHost: h\r\n\r\n".encode(), host)
    assert (heard.status, heard.body) == (500, b"RuntimeError: no\n")
    stage.do(dashboard.close)
    assert said == ["the page shows nothing new any more: RuntimeError: no"]
    assert stage.desk.watchers == 0
    assert stage.status.generation == 2


def test_what_cannot_be_told_to_a_stream_is_told_once_and_the_server_lives(set_up: Callable[..., Stage]) -> None:
    """What is found in the server's thread, where nobody would hear of it."""
    stage = set_up()
    with Watcher(stage) as watcher:
        watcher.next()
        stage.do(lambda: setattr(stage.desk, "really", NoDesk(stage.desk.really, "what a bug may make of a status")))
        stage.fail(0)
        until(lambda: stage.complaints, "the complaint")
        stage.fail(1)
        assert ask(stage, f"/logs?node=id-0&key={stage.key}").status == 200
    assert len(stage.complaints) == 1
    assert "the page shows nothing new any more" in stage.complaints[0]


class NoDesk:
    def __init__(self, really: Any, status: Any) -> None:
        self.watch, self.unwatch = really.watch, really.unwatch
        self.status = lambda: status


def test_a_wait_that_is_no_number_is_no_wait_without_an_end(set_up: Callable[..., Stage]) -> None:
    stage = set_up()
    path = f"/logs?node=id-0&cursor={len(stage.printed)}&key={stage.key}&wait_s="
    for wait_s in ("nan", "-nan", "-inf", "-1"):
        assert ask(stage, path + wait_s).json()["value"]["lines"] == []
    assert stage.held == []


# --- the rest ---------------------------------------------------------------------------------------------------------


def test_lines_of_a_worker_are_passed_on_and_waited_for(set_up: Callable[..., Stage]) -> None:
    stage = set_up()
    first = ask(stage, f"/logs?node=id-0&local_rank=1&key={stage.key}").json()["value"]
    assert [line["text"] for line in first["lines"]] == stage.printed
    with socket.create_connection((stage.host, stage.port), PATIENCE_S) as sock:
        query = f"node=id-0&local_rank=1&cursor={first['cursor']}&wait_s=1000000&key={stage.key}"
        sock.sendall(f"GET /logs?{query} HTTP/1.1\r\nHost: h\r\n\r\n".encode())
        until(lambda: stage.held, "the request to wait")
        assert stage.held[0][0].wait_s == 20.0
        stage.print("the next")
        assert b'"text":"the next"' in until_closed(sock)
    unknown = ask(stage, f"/logs?node=id-9&key={stage.key}")
    assert (unknown.status, "id-9" in unknown.json()["error"]) == (409, True)


def test_metrics_are_on_the_same_port(set_up: Callable[..., Stage]) -> None:
    """For a scraper that gives the key as a token."""
    stage = set_up()
    heard = ask(stage, "/metrics", Authorization=f"Bearer {stage.key}")
    assert (heard.status, heard.headers["Content-Type"]) == (200, CONTENT_TYPE)
    assert b"tenax_run_" in heard.body
    assert b'run_id="train-large"' in heard.body


def test_a_port_that_is_taken_is_said_in_a_sentence(set_up: Callable[..., Stage]) -> None:
    stage = set_up()
    taken = f"{stage.host}:{stage.port}"
    with pytest.raises(OSError, match=rf"port {stage.port} of {stage.host} is taken by another program; choose"):
        stage.do(lambda: Dashboard(taken, stage.desk, stage.loop, stage.complaints.append))
    with pytest.raises(OSError, match="is no address of this host"):
        stage.do(lambda: Dashboard("192.0.2.1:0", stage.desk, stage.loop, stage.complaints.append))
    with pytest.raises(OSError, match=r"port 0 of .* cannot be listened at"):
        stage.do(lambda: Dashboard("no such host.invalid:0", stage.desk, stage.loop, stage.complaints.append))


def test_the_link_of_a_page_for_everybody_has_the_name_of_this_host(set_up: Callable[..., Stage]) -> None:
    """Nobody can open http://0.0.0.0 from elsewhere."""
    stage = set_up()
    dashboard = stage.do(lambda: Dashboard("0.0.0.0:0", stage.desk, stage.loop, stage.complaints.append))
    assert dashboard.link.startswith(f"http://{socket.gethostname()}:")
    stage.do(dashboard.close)
    if socket.has_dualstack_ipv6():
        listen("::1", 0).close()
        dashboard = stage.do(lambda: Dashboard("[::1]:0", stage.desk, stage.loop, stage.complaints.append))
        assert dashboard.link.startswith("http://[::1]:")
        stage.do(dashboard.close)
