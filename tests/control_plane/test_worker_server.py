"""The worker server: what it answers, to whom, and that it shares its path with nobody."""

from __future__ import annotations

import json
import os
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.http import Received, heard_from
from kit.processes import PATIENCE_S, leaving_nothing, on_linux
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
    made = WorkerServer(path)
    made.start()
    yield made
    made.stop()
    assert not os.path.lexists(path)


@pytest.fixture
def own_handlers() -> Iterator[None]:
    """Handlers that a test registers are gone after it."""
    before = dict(handlers._registered)
    yield
    handlers._registered.clear()
    handlers._registered.update(before)


def ask(path: str, method: str, target: str, body: bytes = b"") -> Received:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(PATIENCE_S)
        sock.connect(path)
        sock.sendall(f"{method} {target} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        return heard_from(sock)


def test_it_lists_what_it_can_be_asked(server: WorkerServer) -> None:
    """In JSON, as torch does; and a page for a browser."""
    assert ask(server.path, "GET", "/handler/").json() == ["ping", "dump_traceback", "status"]
    assert ask(server.path, "GET", "/").body.startswith(b"<h1>")
    assert ask(server.path, "POST", "/handler/ping").body == b"pong"


@pytest.mark.parametrize(
    ("method", "target", "status"),
    [
        ("GET", "/nowhere", 404),
        ("POST", "/handler/nobody", 404),
        ("GET", "/handler/ping", 405),
        ("POST", "/handler/", 405),
    ],
)
def test_what_it_cannot_be_asked_is_said(server: WorkerServer, method: str, target: str, status: int) -> None:
    assert ask(server.path, method, target).status == status


def test_dump_traceback_shows_where_every_thread_is(server: WorkerServer) -> None:
    """By name, the main thread first, with the line it is at."""
    hold, here = threading.Event(), threading.Event()

    def wait_in_a_place_with_a_name() -> None:
        here.set()
        hold.wait(PATIENCE_S)

    thread = threading.Thread(target=wait_in_a_place_with_a_name, name="the loader")
    thread.start()
    try:
        here.wait(PATIENCE_S)
        said = ask(server.path, "POST", "/handler/dump_traceback").body.decode()
    finally:
        hold.set()
        thread.join()
    assert said.startswith("thread 'MainThread'")
    assert "thread 'the loader'" in said
    assert "in wait_in_a_place_with_a_name\n    hold.wait(PATIENCE_S)" in said
    assert "'tenax worker server'" not in said  # it is busy with this very answer


def test_status_says_who_it_is_and_how_far(server: WorkerServer) -> None:
    """And nothing of the environment but numbers."""
    said = ask(server.path, "POST", "/handler/status").json()
    assert set(said) == {
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
    assert (said["pid"], said["step"], said["rank"]) == (os.getpid(), None, None)
    control_plane.report_step(7)
    try:
        said = ask(server.path, "POST", "/handler/status").json()
    finally:
        handlers._step = (None, None)
    assert said["step"] == 7
    assert 0 <= said["seconds_since_step"] < PATIENCE_S


@pytest.mark.usefixtures("own_handlers")
def test_a_handler_of_the_script_is_asked_with_parameters_and_a_body(server: WorkerServer) -> None:
    """Registered while the server runs; what it returns is text, bytes, nothing, or JSON."""

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
    heard = ask(server.path, "POST", "/handler/echo?kind=json&a=b%20c")
    assert heard.json() == {"name": "echo", "kind": "json", "a": "b c"}
    assert heard.headers["Content-Type"] == "application/json"


@pytest.mark.usefixtures("own_handlers")
def test_a_handler_that_raises_harms_nothing(server: WorkerServer) -> None:
    """500, with the exception's line; also when what it returns cannot be told."""
    control_plane.register_handler("bad", lambda _: 1 / 0)
    control_plane.register_handler("odd", lambda _: threading.Lock())
    heard = ask(server.path, "POST", "/handler/bad")
    assert (heard.status, heard.body) == (500, b"the handler 'bad' raised ZeroDivisionError: division by zero\n")
    assert ask(server.path, "POST", "/handler/odd").status == 500
    assert ask(server.path, "POST", "/handler/ping").status == 200


@pytest.mark.usefixtures("own_handlers")
def test_a_handler_that_hangs_holds_up_nobody(server: WorkerServer) -> None:
    """The worker can still be asked where it hangs."""
    hold, here = threading.Event(), threading.Event()

    def hang(_: object) -> str:
        here.set()
        hold.wait(PATIENCE_S)
        return "at last"

    control_plane.register_handler("hang", hang)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(server.path)
        sock.sendall(b"POST /handler/hang HTTP/1.1\r\nHost: h\r\n\r\n")
        assert here.wait(PATIENCE_S)
        assert "in hang\n" in ask(server.path, "POST", "/handler/dump_traceback").body.decode()
        hold.set()
        assert heard_from(sock).body == b"at last"


@pytest.mark.usefixtures("own_handlers")
def test_a_handler_that_exits_is_told_like_any_other(server: WorkerServer) -> None:
    """sys.exit in a handler ends neither the worker nor its server; it can be asked as often as one likes."""

    def leave(_: object) -> None:
        raise SystemExit(3)

    control_plane.register_handler("leave", leave)
    for _ in range(10):
        heard = ask(server.path, "POST", "/handler/leave")
        assert (heard.status, heard.body) == (500, b"the handler 'leave' raised SystemExit: 3\n")


@pytest.mark.usefixtures("own_handlers")
def test_names_of_handlers() -> None:
    """A second one replaces the first; the built-in ones stay; a name is a plain word."""
    control_plane.register_handler("mine", lambda _: "1")
    control_plane.register_handler("mine", lambda _: "2")
    with pytest.raises(ValueError, match="is built in"):
        control_plane.register_handler("ping", lambda _: "gotcha")
    for wrong in ("", "a/b", "a b", "x" * 101):
        with pytest.raises(ValueError, match="cannot be the name of a handler"):
            control_plane.register_handler(wrong, lambda _: None)


def test_only_its_user_may_ask(server: WorkerServer) -> None:
    """The socket's mode is 0600."""
    assert stat.S_IMODE(os.lstat(server.path).st_mode) == 0o600


def test_a_socket_that_was_left_is_replaced(path: str) -> None:
    """As a worker leaves it that was killed."""
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
    server = WorkerServer(path)
    server.start()
    assert ask(path, "POST", "/handler/ping").body == b"pong"
    server.stop()


def test_what_is_somebody_elses_is_not(path: str, server: WorkerServer, tmp_path: Path) -> None:
    """A socket that is being served, and a file that is no socket, stay; the sentence says what to do."""
    with pytest.raises(ValueError, match=r"another process answers at .*; every worker needs a path of its own"):
        WorkerServer(path).start()
    file = tmp_path / "precious"
    file.write_text("data")
    with pytest.raises(ValueError, match="is not a socket; name another path"):
        WorkerServer(str(file)).start()
    assert file.read_text() == "data"
    assert ask(path, "POST", "/handler/ping").body == b"pong"


def test_a_successors_socket_is_not_removed(path: str) -> None:
    """Who stops late leaves the path to who has taken it."""
    first = WorkerServer(path)
    first.start()
    os.unlink(path)
    second = WorkerServer(path)
    second.start()
    first.stop()
    assert ask(path, "POST", "/handler/ping").body == b"pong"
    second.stop()


def test_a_path_that_is_too_long_is_refused(tmp_path: Path) -> None:
    """In a sentence with both numbers."""
    path = str(tmp_path / ("x" * 120))
    with pytest.raises(ValueError, match=r"has \d+ bytes, and the system allows 10[37]"):
        WorkerServer(path).start()


def test_json_is_what_a_program_can_read() -> None:
    """The status is one object."""
    assert isinstance(json.loads(handlers._status().body), dict)
