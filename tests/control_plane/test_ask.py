"""``tenax ask``: one worker or all of a folder, with tenax's and torch's server; and its error messages."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kit.jobs import TENAX, Runner
from kit.processes import TIMEOUT_S, Program, leaving_nothing, needs_torch, on_linux, program
from tenax.cli.ask import Answer, Question, ask_worker, parse_question, sockets_at
from tenax.cli.flags import UsageError

__all__ = ["program"]

pytestmark = on_linux


def ask(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*TENAX, "ask", *arguments], capture_output=True, text=True, timeout=TIMEOUT_S)


# --- the question -----------------------------------------------------------------------------------------------------


def test_arguments_are_parsed() -> None:
    assert parse_question(["/tmp/x"]) == Question("/tmp/x")
    assert parse_question(["/tmp/x", "go", "a=1", "b=x=y", "c="]) == Question(
        "/tmp/x", "go", (("a", "1"), ("b", "x=y"), ("c", ""))
    )
    assert (
        parse_question(["--timeout", "2.5", "x"]).timeout_s == parse_question(["--timeout=2.5", "x"]).timeout_s == 2.5
    )


def test_the_timeout_is_accepted_at_any_position() -> None:
    """Also after the handler."""
    expected = Question("x", "go", (("a", "1"),), 2.0)
    for line in ("--timeout 2 x go a=1", "x --timeout=2 go a=1", "x go --timeout 2 a=1", "x go a=1 --timeout=2"):
        assert parse_question(line.split()) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--timeout", "soon", "x"], "--timeout takes a number of seconds, more than 0, not 'soon'"),
        (["--timeout"], "--timeout needs a value"),
        (["--timeout=1"], "no socket or folder given"),
        (["--all", "x"], "unknown flag '--all'"),
        (["x", "go", "--all"], "unknown flag '--all'"),
        (["x", "--timeout"], "--timeout needs a value"),
        (["x", "go", "fast"], "'fast' is not a parameter; write NAME=VALUE"),
        (["x", "a=1"], "'a=1' is not a handler; write the handler's name before its parameters"),
    ],
)
def test_invalid_arguments_are_rejected(arguments: list[str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_question(arguments)
    assert str(caught.value) == message


def test_the_sockets_of_a_folder_are_in_the_order_of_ranks(tmp_path: Path) -> None:
    """rank2 before rank10; other files are ignored."""
    (tmp_path / "notes").touch()
    for rank in (10, 2, 0):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(str(tmp_path / f"rank{rank}"))
    assert [os.path.basename(path) for path in sockets_at(str(tmp_path))] == ["rank0", "rank2", "rank10"]


def test_a_path_without_workers_is_rejected(tmp_path: Path) -> None:
    """Exit code 2 and a message, for a missing path, a file and an empty folder."""
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    for name, message in (
        ("gone", "does not exist; check that the job is running on this host"),
        ("file", "is neither a socket nor a folder"),
        ("empty", "the script must use tenax.control_plane.worker_main"),
    ):
        done = ask(str(tmp_path / name), "ping")
        assert (done.returncode, done.stdout) == (2, "")
        assert message in done.stderr


# --- the answer -------------------------------------------------------------------------------------------------------


def test_a_worker_that_exited_or_does_not_answer_is_reported(tmp_path: Path) -> None:
    """Exit code 1; the message names the worker and a possible reason."""
    dead, stuck = tmp_path / "rank0", tmp_path / "rank1"
    with leaving_nothing(), socket.socket(socket.AF_UNIX) as sock, socket.socket(socket.AF_UNIX) as silent:
        sock.bind(str(dead))
        silent.bind(str(stuck))
        silent.listen()
        done = ask("--timeout", "0.1", str(tmp_path), "ping")
    assert (done.returncode, done.stdout) == (1, "")
    assert "tenax ask: rank0: connection refused: the worker or its server has exited" in done.stderr
    assert "tenax ask: rank1: no answer within 0.1 s; the worker may be in native code" in done.stderr


@pytest.fixture(scope="module")
def torchs_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The socket of torch's own server, in a process that has imported torch, which takes two seconds."""
    folder = tmp_path_factory.mktemp("torch")
    path = str(folder / "socket")
    run = Program(
        """
        import sys
        from torch._C._distributed_c10d import _WorkerServer, _register_handler
        def echo(request, response):
            response.set_content(request.get_param("word"), "text/plain")
            response.set_status(200)
        _register_handler("echo", echo)
        server = _WorkerServer(sys.argv[1])
        print("here", flush=True)
        import signal
        signal.pause()
        """,
        folder,
        path,
    )
    assert run.pipe.line() == "here"
    yield path
    run.close()


@needs_torch
def test_torchs_own_worker_server_can_be_queried(torchs_server: str) -> None:
    """List, ping, traceback, parameters and errors."""
    path = torchs_server
    assert "dump_traceback" in ask(path).stdout.splitlines()
    assert ask(path, "ping").stdout == "pong\n"
    assert ask(path, "echo", "word=a b&c").stdout == "a b&c\n"
    assert "line " in ask(path, "dump_traceback").stdout
    done = ask(path, "unknown")
    assert done.returncode == 1
    assert "unknown" in done.stderr


@needs_torch
def test_the_worker_server_answers_like_torchs(
    program: Callable[..., Program], tmp_path: Path, torchs_server: str
) -> None:
    """The same requests get the same status and content type."""
    tenaxs_server = str(tmp_path / "tenax")
    run = program(
        """
        import signal, sys
        from tenax.control_plane._server import WorkerServer
        server = WorkerServer(sys.argv[1])
        server.start()
        print("here", flush=True)
        signal.pause()
        """,
        tenaxs_server,
    )
    assert run.pipe.line() == "here"
    answers = []
    for path in (torchs_server, tenaxs_server):
        found = {}
        for request in ("POST /handler/ping", "POST /handler/unknown", "GET /handler/", "GET /", "GET /nowhere"):
            with socket.socket(socket.AF_UNIX) as sock:
                sock.settimeout(TIMEOUT_S)
                sock.connect(path)
                sock.sendall(
                    f"{request} HTTP/1.1\r\nHost: h\r\nConnection: close\r\nContent-Length: 0\r\n\r\n".encode()
                )
                head, _, body = sock.makefile("rb").read().partition(b"\r\n\r\n")
                kind = [line for line in head.split(b"\r\n") if line.lower().startswith(b"content-type")]
                is_json = any(b"json" in line for line in kind)
                found[request] = (head.split()[1], is_json, body if b"ping" in request.encode() else b"")
        answers.append(found)
    assert answers[0] == answers[1]


def test_the_workers_of_a_run_can_be_queried(runner: Runner) -> None:
    """All by the folder, one by its socket, also after a restart; the folder is removed at the end."""
    script = runner.script("""
        import os
        from tenax import control_plane
        from worker_kit import ATTEMPT, RANK, ready, stay, wait_for
        control_plane.register_handler("greet", lambda request: f"{request.get_param('word')} from {RANK}")

        @control_plane.worker_main()
        def main():
            control_plane.report_step(40 + RANK)
            ready()
            if ATTEMPT == 0 and RANK == 1:
                wait_for("may_fail")
                os._exit(3)
            stay()

        main()
    """)
    folder = f"/tmp/tenax ask {os.getpid()}"
    arguments = ["--nproc-per-node", "2", "--virtual-local-rank", "--max-restarts", "1", script]
    run = runner.start(*arguments, env={"TORCH_WORKER_SERVER_SOCKET": folder})
    runner.pids(2)
    run.until_printed(f"to query workers that use worker_main: tenax ask '{folder}'")
    assert ask(folder, "greet", "word=hello").stdout == "== rank0\nhello from 0\n== rank1\nhello from 1\n"
    assert '"generation":1,' in ask(f"{folder}/rank1", "status").stdout
    assert "in stay" in ask(f"{folder}/rank0", "dump_traceback").stdout
    runner.leave_note("may_fail", 1)
    runner.pids(2, attempt=1)
    status = ask(folder, "status")
    assert status.stdout.count('"generation":2,') == 2
    assert '"step":41,' in status.stdout
    assert ask(folder).stdout.splitlines() == [
        *("== rank0", "ping", "dump_traceback", "status", "greet"),
        *("== rank1", "ping", "dump_traceback", "status", "greet"),
    ]
    run.send(signal.SIGTERM)
    assert run.wait().code == 143
    assert not os.path.exists(folder)


@needs_torch
def test_workers_with_torchs_worker_main_can_be_queried(runner: Runner) -> None:
    """Each worker has its own path, which is free for the next generation."""
    script = runner.script("""
        import os
        from torch.distributed.elastic.control_plane import worker_main
        from worker_kit import ATTEMPT, ready, stay, wait_for
        with worker_main():
            ready()
            if ATTEMPT == 0:
                wait_for("may_fail")
                os._exit(3)
            stay()
    """)
    folder = f"/tmp/tenax-ask-torch-{os.getpid()}"
    run = runner.start("--max-restarts", "1", script, env={"TORCH_WORKER_SERVER_SOCKET": folder})
    for attempt in range(2):
        runner.pids(1, attempt)
        assert ask(folder, "ping").stdout == "== rank0\npong\n"
        runner.leave_note("may_fail")
    run.send(signal.SIGTERM)
    assert run.wait().code == 143
    assert not os.path.exists(folder)


def test_an_unusable_folder_is_rejected_before_the_start(runner: Runner) -> None:
    """A file instead of a folder."""
    done = runner.run(runner.script("pass"), env={"TORCH_WORKER_SERVER_SOCKET": str(runner.home / "train.py")})
    assert done.code == 2
    assert "which is not a folder; expected a folder for the workers' sockets" in done.err


def test_a_worker_that_exits_during_a_query_is_reported(tmp_path: Path) -> None:
    """Before its answer, and in the middle of it."""
    for number, begun in enumerate((b"", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhal")):
        path = str(tmp_path / f"rank{number}")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen()
            thread = threading.Thread(target=_answer_partly, args=(listener, begun))
            thread.start()
            answer = ask_worker(path, Question(path, "ping"))
            thread.join()
        assert answer == Answer(False, "the worker exited before it answered")


def _answer_partly(listener: socket.socket, data: bytes) -> None:
    connection, _ = listener.accept()
    with connection:
        connection.recv(4096)
        connection.sendall(data)
