"""The worker server: its answers, its permissions, and its exclusive path."""

from __future__ import annotations

import json
import os
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.http import Received, receive_response
from kit.processes import TIMEOUT_S, leaving_nothing, on_linux
from tenax import control_plane
from tenax.control_plane import _handlers as handlers
from tenax.control_plane._server import WorkerServer

pytestmark = [on_linux, pytest.mark.unit]


@pytest.fixture
def path(tmp_path: Path) -> Iterator[str]:
    with leaving_nothing():
        yield str(tmp_path / "s")


@pytest.fixture
def server(path: str) -> Iterator[WorkerServer]:
    server = WorkerServer(path)
    server.start()
    yield server
    server.stop()
    assert not os.path.lexists(path)


@pytest.fixture
def own_handlers() -> Iterator[None]:
    """Restore the registered handlers after the test."""
    before = dict(handlers._registered)
    yield
    handlers._registered.clear()
    handlers._registered.update(before)


def ask(path: str, method: str, target: str, body: bytes = b"") -> Received:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(TIMEOUT_S)
        sock.connect(path)
        sock.sendall(f"{method} {target} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        return receive_response(sock)


def test_the_handlers_are_listed(server: WorkerServer) -> None:
    """In JSON, as torch does; and a page for a browser."""
    assert ask(server.path, "GET", "/handler/").json() == ["ping", "dump_traceback", "status"]
    assert ask(server.path, "GET", "/").body.startswith(b"<h1>")
    assert ask(server.path, "POST", "/handler/ping").body == b"pong"


@pytest.mark.parametrize(
    ("method", "target", "status"),
    [
        ("GET", "/nowhere", 404),
        ("POST", "/handler/unknown", 404),
        ("GET", "/handler/ping", 405),
        ("POST", "/handler/", 405),
    ],
)
def test_invalid_requests_are_rejected(server: WorkerServer, method: str, target: str, status: int) -> None:
    assert ask(server.path, method, target).status == status


def test_dump_traceback_shows_the_stack_of_every_thread(server: WorkerServer) -> None:
    """By name, the main thread first, with the current line."""
    release, entered = threading.Event(), threading.Event()

    def wait_in_loader() -> None:
        entered.set()
        release.wait(TIMEOUT_S)

    thread = threading.Thread(target=wait_in_loader, name="the loader")
    thread.start()
    try:
        entered.wait(TIMEOUT_S)
        answer = ask(server.path, "POST", "/handler/dump_traceback").body.decode()
    finally:
        release.set()
        thread.join()
    assert answer.startswith("thread 'MainThread'")
    assert "thread 'the loader'" in answer
    assert "in wait_in_loader\n    release.wait(TIMEOUT_S)" in answer
    assert "'tenax worker server'" not in answer  # the thread of the answer


def test_status_contains_ranks_and_progress(server: WorkerServer) -> None:
    """And no other environment variables."""
    answer = ask(server.path, "POST", "/handler/status").json()
    assert set(answer) == {
        "rank",
        "local_rank",
        "world_size",
        "generation",
        "restarts",
        "pid",
        "uptime_s",
        "step",
        "seconds_since_step",
    }
    assert (answer["pid"], answer["step"], answer["rank"]) == (os.getpid(), None, None)
    control_plane.report_step(7)
    try:
        answer = ask(server.path, "POST", "/handler/status").json()
    finally:
        handlers._step = (None, None)
    assert answer["step"] == 7
    assert 0 <= answer["seconds_since_step"] < TIMEOUT_S


@pytest.mark.usefixtures("own_handlers")
def test_a_handler_of_the_script_gets_parameters_and_body(server: WorkerServer) -> None:
    """Registered while the server runs; it returns text, bytes, None, or a value for JSON."""

    def echo(request: control_plane.HandlerRequest) -> object:
        kind = request.get_param("kind")
        answers = {
            "text": "é\n",
            "bytes": request.body,
            "nothing": None,
            "json": {"name": request.name, **request.params},
        }
        return answers[kind]

    control_plane.register_handler("echo", echo)
    assert "echo" in ask(server.path, "GET", "/handler/").json()
    assert ask(server.path, "POST", "/handler/echo?kind=text").body == "é\n".encode()
    assert ask(server.path, "POST", "/handler/echo?kind=bytes", b"\0\1" * 5000).body == b"\0\1" * 5000
    assert ask(server.path, "POST", "/handler/echo?kind=nothing").body == b""
    answer = ask(server.path, "POST", "/handler/echo?kind=json&a=b%20c")
    assert answer.json() == {"name": "echo", "kind": "json", "a": "b c"}
    assert answer.headers["Content-Type"] == "application/json"


@pytest.mark.usefixtures("own_handlers")
def test_an_exception_of_a_handler_is_the_answer(server: WorkerServer) -> None:
    """Status 500; also if its result cannot be encoded."""
    control_plane.register_handler("bad", lambda _: 1 / 0)
    control_plane.register_handler("odd", lambda _: threading.Lock())
    answer = ask(server.path, "POST", "/handler/bad")
    assert (answer.status, answer.body) == (500, b"the handler 'bad' raised ZeroDivisionError: division by zero\n")
    assert ask(server.path, "POST", "/handler/odd").status == 500
    assert ask(server.path, "POST", "/handler/ping").status == 200


@pytest.mark.usefixtures("own_handlers")
def test_a_hanging_handler_does_not_block_others(server: WorkerServer) -> None:
    """dump_traceback shows where it hangs."""
    release, entered = threading.Event(), threading.Event()

    def hang(_: object) -> str:
        entered.set()
        release.wait(TIMEOUT_S)
        return "at last"

    control_plane.register_handler("hang", hang)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(server.path)
        sock.sendall(b"POST /handler/hang HTTP/1.1\r\nHost: h\r\n\r\n")
        assert entered.wait(TIMEOUT_S)
        assert "in hang\n" in ask(server.path, "POST", "/handler/dump_traceback").body.decode()
        release.set()
        assert receive_response(sock).body == b"at last"


@pytest.mark.usefixtures("own_handlers")
def test_an_exit_in_a_handler_is_an_error(server: WorkerServer) -> None:
    """sys.exit in a handler ends neither the worker nor its server."""

    def leave(_: object) -> None:
        raise SystemExit(3)

    control_plane.register_handler("leave", leave)
    for _ in range(10):
        answer = ask(server.path, "POST", "/handler/leave")
        assert (answer.status, answer.body) == (500, b"the handler 'leave' raised SystemExit: 3\n")


@pytest.mark.usefixtures("own_handlers")
def test_handler_names_are_checked() -> None:
    """A second handler replaces the first; built-in ones cannot be replaced."""
    control_plane.register_handler("mine", lambda _: "1")
    control_plane.register_handler("mine", lambda _: "2")
    with pytest.raises(ValueError, match="is built in"):
        control_plane.register_handler("ping", lambda _: "replaced")
    for wrong in ("", "a/b", "a b", "x" * 101):
        with pytest.raises(ValueError, match="invalid handler name"):
            control_plane.register_handler(wrong, lambda _: None)


def test_only_its_user_can_connect(server: WorkerServer) -> None:
    """The socket's mode is 0600."""
    assert stat.S_IMODE(os.lstat(server.path).st_mode) == 0o600


def test_a_stale_socket_is_replaced(path: str) -> None:
    """A killed worker leaves one."""
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
    server = WorkerServer(path)
    server.start()
    assert ask(path, "POST", "/handler/ping").body == b"pong"
    server.stop()


def test_a_served_socket_or_another_file_is_not_replaced(path: str, server: WorkerServer, tmp_path: Path) -> None:
    """The message has the next step."""
    with pytest.raises(ValueError, match=r"another process listens at .*; every worker needs its own path"):
        WorkerServer(path).start()
    file = tmp_path / "other"
    file.write_text("data")
    with pytest.raises(ValueError, match="is not a socket; choose another path"):
        WorkerServer(str(file)).start()
    assert file.read_text() == "data"
    assert ask(path, "POST", "/handler/ping").body == b"pong"


def test_the_socket_of_a_later_server_is_not_removed(path: str) -> None:
    """A server that stops late checks the identity of the file."""
    first = WorkerServer(path)
    first.start()
    os.unlink(path)
    second = WorkerServer(path)
    second.start()
    first.stop()
    assert ask(path, "POST", "/handler/ping").body == b"pong"
    second.stop()


def test_a_path_that_is_too_long_is_rejected(tmp_path: Path) -> None:
    """The message has length and maximum."""
    path = str(tmp_path / ("x" * 120))
    with pytest.raises(ValueError, match=r"has \d+ bytes, the maximum is 10[37]"):
        WorkerServer(path).start()


def test_the_status_is_a_json_object() -> None:
    """For programs."""
    assert isinstance(json.loads(handlers._status().body), dict)
