"""Timers through a named pipe, standalone: tenax's and TorchElastic's client and server, real processes that hang."""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kit.processes import gone, leaving_nothing, needs_torch, on_linux, until
from tenax.timer import FileTimerClient, FileTimerRequest, FileTimerServer, expires

pytestmark = pytest.mark.process

LONG_S = 3600.0


class Events:
    """Records the events that a server logs."""

    def __init__(self) -> None:
        self.received: list[tuple[str, str]] = []
        self._changed = threading.Condition()

    def __call__(self, name: str, request: FileTimerRequest | None) -> None:
        with self._changed:
            self.received.append((name, request.scope_id if request is not None else ""))
            self._changed.notify_all()

    def until(self, name: str, scope: str) -> None:
        with self._changed:
            has_arrived = self._changed.wait_for(lambda: (name, scope) in self.received, timeout=30)
        assert has_arrived, f"{name!r} of {scope!r} was not received; received {self.received}"


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "timers")


@pytest.fixture
def serve(path: str) -> Iterator[Callable[..., FileTimerServer]]:
    """Creates, starts and stops servers."""
    started: list[FileTimerServer] = []

    def make(max_interval: float = LONG_S, **options: object) -> FileTimerServer:
        server = FileTimerServer(path, "run", max_interval, **options)
        started.append(server)
        server.start()
        return server

    with leaving_nothing():
        yield make
        for server in started:
            server.stop()


def worker(path: str, body: str, module: str = "tenax.timer") -> subprocess.Popen[bytes]:
    """A process with a client; ``body`` uses ``client``, ``expires`` and ``hang``."""
    source = f"""
        import os, signal, sys
        from {module} import FileTimerClient, expires
        client = FileTimerClient(sys.argv[1])
        def hang():
            while True:
                signal.pause()
    """
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(source) + textwrap.dedent(body), path])


HANGS = """
with expires(after=0.05, scope="step", client=client):
    hang()
"""
LEAVES = """
for _ in range(100):
    with expires(after=60, scope="step", client=client):
        pass
"""


def test_a_process_that_does_not_leave_its_scope_is_killed(path: str, serve) -> None:
    """With the requested signal; the server logs it and continues."""
    events = Events()
    serve(log_event=events)
    hanging = worker(path, HANGS)
    assert hanging.wait(30) == -signal.SIGKILL
    events.until("kill worker process", "step")
    assert events.received == [("watchdog started", ""), ("timer expired", "step"), ("kill worker process", "step")]


def test_each_process_is_ended_by_its_own_signal(path: str, serve) -> None:
    serve()
    asking = worker(path, HANGS.replace("client=client", "client=FileTimerClient(sys.argv[1], signal.SIGTERM)"))
    assert asking.wait(30) == -signal.SIGTERM


def test_a_process_that_leaves_in_time_is_left_alone(path: str, serve) -> None:
    server = serve()
    assert worker(path, LEAVES).wait(30) == 0
    until(lambda: server._request_count == 200, "all requests")
    assert server._timers == {}


def test_other_processes_are_not_signalled(path: str, serve) -> None:
    """Above all the server's own, which TorchElastic's server signals too."""
    serve()
    hanging = worker(path, HANGS)
    other = worker(path, "expires(after=3600, client=client).__enter__(); hang()")
    assert hanging.wait(30) == -signal.SIGKILL
    assert other.poll() is None
    other.kill()
    other.wait()


def test_the_servers_own_process_is_never_signalled(path: str, serve, caplog: pytest.LogCaptureFixture) -> None:
    """An expired timer of its own is logged and removed."""
    events = Events()
    server = serve(log_event=events)
    FileTimerClient(path).acquire("own", time.time() - 1)
    events.until("timer expired", "own")
    until(lambda: not server._timers, "the timer to be forgotten")
    assert "own process" in caplog.text
    assert ("kill worker process", "own") not in events.received


def test_without_a_signal_an_expired_timer_is_only_logged(path: str, serve) -> None:
    events = Events()
    server = serve(log_event=events)
    FileTimerClient(path, signal=0).acquire("soft", time.time() - 1)
    events.until("timer expired", "soft")
    until(lambda: not server._timers, "the timer to be forgotten")


def test_a_malformed_line_is_ignored_alone(path: str, serve, caplog: pytest.LogCaptureFixture) -> None:
    """Other requests in the same batch count; in TorchElastic a lost release kills a process."""
    server = serve()
    client = FileTimerClient(path)
    client.acquire("kept", time.time() + 60)
    writer = os.open(path, os.O_WRONLY)
    release = FileTimerRequest(os.getpid(), "kept", -1).to_json()
    other = FileTimerRequest(os.getpid(), "other", time.time() + 60).to_json()
    os.write(writer, f"this is no request, however long it may be\n{release}\n{{}}\n{other}\n".encode())
    os.close(writer)
    until(lambda: server._request_count == 3, "all requests")
    assert [scope for _, scope in server._timers] == ["other"]
    until(lambda: "not timer requests" in caplog.text, "a log line about it")


@pytest.mark.parametrize("pid", [0, -1])
def test_pids_that_mean_many_processes_are_ignored(path: str, serve, pid: int) -> None:
    """Signals to these would reach a process group or all processes."""
    server = serve()
    writer = os.open(path, os.O_WRONLY)
    os.write(writer, FileTimerRequest(pid, "step", 1.0, signal.SIGKILL).to_json().encode() + b"\n")
    os.close(writer)
    FileTimerClient(path).acquire("after", time.time() + 60)
    until(lambda: server._request_count == 1, "the sound request")
    assert [scope for _, scope in server._timers] == ["after"]


def test_a_callback_that_raises_does_not_end_the_server(path: str, serve, caplog: pytest.LogCaptureFixture) -> None:
    """It is logged; the next process that hangs is still killed."""

    def fail(name: str, _: FileTimerRequest | None) -> None:
        raise OSError("the log is full")

    server = serve(log_event=fail)
    for _ in range(2):
        assert worker(path, HANGS).wait(30) == -signal.SIGKILL
    until(lambda: not server._timers, "the timers to be forgotten")
    assert caplog.text.count("could not log the event 'kill worker process'") == 2


@pytest.mark.parametrize("has_client", [False, True])
def test_stop_is_prompt_and_leaves_nothing(path: str, has_client: bool) -> None:
    """No thread blocked in ``open``, no pipe, whatever the interval."""
    with leaving_nothing():
        server = FileTimerServer(path, "run", LONG_S)
        server.start()
        if has_client:
            FileTimerClient(path).acquire("step", time.time() + 60)
        begun = time.monotonic()
        server.stop()
        assert time.monotonic() - begun < 10
        assert not os.path.exists(path)
        server.stop()


def test_a_server_that_was_never_started_can_be_stopped(path: str) -> None:
    FileTimerServer(path, "run").stop()
    assert not os.path.exists(path)


def test_run_once_handles_pending_requests_and_stops(path: str) -> None:
    """Also expired ones."""
    with leaving_nothing():
        events = Events()
        server = FileTimerServer(path, "run", LONG_S, log_event=events)
        server.start()
        client = FileTimerClient(path)
        for number in range(50):
            client.acquire(f"scope {number}", time.time() + 60)
        client.release("scope 0")
        server.run_once()
        assert server._request_count == 51
        assert len(server._timers) == 49
        assert not os.path.exists(path)


def test_only_the_owner_can_access_the_pipe(path: str, serve) -> None:
    """A process that can write to it can have processes of this user killed."""
    Path(path).write_text("left behind")
    serve()
    mode = os.stat(path).st_mode
    assert stat.S_ISFIFO(mode)
    assert stat.S_IMODE(mode) == 0o600


def test_last_progress_is_now_before_the_first_client(path: str, serve) -> None:
    """Afterwards it is the time of the last round."""
    server = FileTimerServer(path, "run", 0.01)
    assert abs(server.get_last_progress_time() - time.time()) < 5
    server.start()
    FileTimerClient(path).acquire("step", time.time() + 60)
    until(lambda: server._request_count == 1, "the request")
    assert isinstance(server.get_last_progress_time(), int)
    assert abs(server.get_last_progress_time() - time.time()) < 30
    server.stop()


def test_timers_are_registered_listed_and_cleared(path: str) -> None:
    """Without a thread; timers of dead processes are removed."""
    server = FileTimerServer(path, "run")
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    mine, parent = os.getpid(), os.getppid()
    server.register_timers(
        [
            FileTimerRequest(mine, "a", 5.0, 9),
            FileTimerRequest(mine, "b", 10.0, 9),
            FileTimerRequest(parent, "a", 1.0, 9),
            FileTimerRequest(mine, "c", 1.0, 9),
            FileTimerRequest(mine, "c", -1.0, 0),
            FileTimerRequest(dead.pid, "a", 1.0, 9),
        ]
    )
    expired = server.get_expired_timers(5.0)
    assert {pid: [request.scope_id for request in requests] for pid, requests in expired.items()} == {
        mine: ["a"],
        parent: ["a"],
        dead.pid: ["a"],
    }
    server.clear_timers({parent})
    assert sorted(server._timers) == [(mine, "a"), (mine, "b")]
    assert FileTimerServer.is_process_running(mine)
    assert not FileTimerServer.is_process_running(dead.pid)
    server.stop()


# --- the client -------------------------------------------------------------------------------------------------------


def test_a_request_line_equals_torchelastics(tmp_path: Path) -> None:
    """With the same keys in the same order."""
    path = str(tmp_path / "pipe")
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    client = FileTimerClient(path, signal.SIGTERM)
    client.acquire("step", 123.5)
    client.release("step")
    first, second = os.read(reader, 4096).splitlines()
    os.close(reader)
    assert list(json.loads(first)) == ["version", "pid", "scope_id", "expiration_time", "signal"]
    assert json.loads(first) == {
        "version": 1,
        "pid": os.getpid(),
        "scope_id": "step",
        "expiration_time": 123.5,
        "signal": 15,
    }
    assert (json.loads(second)["expiration_time"], json.loads(second)["signal"]) == (-1, 0)


def test_a_client_waits_a_little_for_its_server(path: str) -> None:
    """The server may still be starting."""
    with leaving_nothing():
        server = FileTimerServer(path, "run", LONG_S)
        starter = threading.Timer(0.2, server.start)
        starter.start()
        FileTimerClient(path).acquire("step", time.time() + 60)
        starter.join()
        server.run_once()
        assert server._request_count == 1


def test_without_a_server_a_client_raises(path: str) -> None:
    os.mkfifo(path)
    with pytest.raises(BrokenPipeError, match="no timer server at"):
        FileTimerClient(path).acquire("step", 1.0)


def test_a_request_too_long_for_an_atomic_write_is_rejected(path: str, serve) -> None:
    serve()
    with pytest.raises(RuntimeError, match="shorten the name of the scope"):
        FileTimerClient(path).acquire("x" * select.PIPE_BUF, 1.0)


@pytest.fixture
def full(tmp_path: Path) -> Iterator[tuple[str, int]]:
    """A full pipe and its reader."""
    path = str(tmp_path / "pipe")
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    filler = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    with suppress(BlockingIOError):
        while True:
            os.write(filler, b"\n" * 4096)
    yield path, reader
    os.close(filler)


def waits(path: str, act: Callable[[FileTimerClient], None]) -> threading.Thread:
    """Start a thread that waits for room; return when it has the pipe open."""
    thread = threading.Thread(target=act, args=(FileTimerClient(path),))
    thread.start()
    until(lambda: openings(path) == 3, "the client to open the pipe")  # with the reader and what filled it
    return thread


def openings(path: str) -> int:
    found = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{descriptor}") == path
    return found


@on_linux
def test_a_client_waits_for_room_in_the_pipe_without_a_limit(full: tuple[str, int]) -> None:
    """A stopped agent loses no request and fails no worker."""
    path, reader = full
    thread = waits(path, lambda client: client.release("step"))
    assert thread.is_alive()
    os.read(reader, 1 << 20)
    thread.join(30)
    assert not thread.is_alive()
    assert b'"step"' in os.read(reader, 1 << 20)
    os.close(reader)


@on_linux
def test_a_client_that_waits_for_room_fails_when_the_last_reader_closes(full: tuple[str, int]) -> None:
    path, reader = full
    raised: list[BaseException] = []

    def acquire(client: FileTimerClient) -> None:
        try:
            client.acquire("step", 1.0)
        except BrokenPipeError as error:
            raised.append(error)

    thread = waits(path, acquire)
    os.close(reader)
    thread.join(30)
    assert not thread.is_alive()
    assert "no process reads" in str(raised[0])


# --- with TorchElastic's ----------------------------------------------------------------------------------------------


@needs_torch
def test_torchelastics_client_works_with_our_server(path: str, serve) -> None:
    serve()
    hanging = worker(path, HANGS, "torch.distributed.elastic.timer")
    assert hanging.wait(60) == -signal.SIGKILL


def test_our_client_works_with_torchelastics_server(path: str, caplog: pytest.LogCaptureFixture) -> None:
    """It parses both lines: after the release no timer is left."""
    theirs = pytest.importorskip("torch.distributed.elastic.timer")
    caplog.set_level(logging.CRITICAL)
    server = theirs.FileTimerServer(path, "run", max_interval=0.05)
    server.start()
    client = FileTimerClient(path)
    with expires(after=60, scope="left", client=client):
        client.acquire("held", time.time() + 60)
    server.run_once()
    ((key, request),) = server._timers.items()
    assert key == (os.getpid(), "held")
    assert request.signal == signal.SIGKILL


def test_timers_of_a_killed_process_are_removed(path: str, serve) -> None:
    server = serve()
    hanging = worker(path, HANGS)
    assert gone([hanging.pid])
    hanging.wait()
    until(lambda: not server._timers, "the timers to be forgotten")
