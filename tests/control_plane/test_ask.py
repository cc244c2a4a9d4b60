"""``tenax ask``: one worker or all of a folder, ours and torch's; and clear words when it cannot be."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kit.jobs import TENAX, Bench
from kit.processes import PATIENCE_S, Program, leaving_nothing, on_linux, program
from tenax.cli.ask import Answer, Question, WrongQuestion, parse_question, sockets_at
from tenax.cli.ask import ask as ask_one

__all__ = ["program"]

pytestmark = on_linux

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


def ask(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*TENAX, "ask", *words], capture_output=True, text=True, timeout=PATIENCE_S)


# --- the question -----------------------------------------------------------------------------------------------------


def test_words_become_a_question() -> None:
    assert parse_question(["/tmp/x"]) == Question("/tmp/x")
    assert parse_question(["/tmp/x", "go", "a=1", "b=x=y", "c="]) == Question(
        "/tmp/x", "go", (("a", "1"), ("b", "x=y"), ("c", ""))
    )
    assert (
        parse_question(["--timeout", "2.5", "x"]).timeout_s == parse_question(["--timeout=2.5", "x"]).timeout_s == 2.5
    )


def test_the_timeout_may_stand_anywhere() -> None:
    """Also behind what is asked, where people add it."""
    expected = Question("x", "go", (("a", "1"),), 2.0)
    for words in ("--timeout 2 x go a=1", "x --timeout=2 go a=1", "x go --timeout 2 a=1", "x go a=1 --timeout=2"):
        assert parse_question(words.split()) == expected


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--timeout", "soon", "x"], "--timeout takes a number of seconds, more than 0, not 'soon'"),
        (["--timeout"], "--timeout takes a number of seconds, more than 0, not ''"),
        (["--timeout=1"], "no socket or folder given"),
        (["--all", "x"], "unknown flag '--all'"),
        (["x", "go", "--all"], "unknown flag '--all'"),
        (["x", "--timeout"], "--timeout takes a number of seconds, more than 0, not ''"),
        (["x", "go", "fast"], "'fast' is not a parameter; write NAME=VALUE"),
        (["x", "a=1"], "'a=1' is not a handler; write the handler's name before its parameters"),
    ],
)
def test_what_cannot_be_asked_is_refused(words: list[str], sentence: str) -> None:
    with pytest.raises(WrongQuestion) as caught:
        parse_question(words)
    assert str(caught.value) == sentence


def test_the_sockets_of_a_folder_are_in_the_order_of_ranks(tmp_path: Path) -> None:
    """rank2 before rank10; what is no socket is not asked."""
    (tmp_path / "notes").touch()
    for rank in (10, 2, 0):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(str(tmp_path / f"rank{rank}"))
    assert [os.path.basename(path) for path in sockets_at(str(tmp_path))] == ["rank0", "rank2", "rank10"]


def test_a_place_without_workers_is_refused(tmp_path: Path) -> None:
    """Exit code 2 and a sentence, for nothing, for a file and for an empty folder."""
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    for name, sentence in (
        ("gone", "does not exist; check that the job is running on this host"),
        ("file", "is neither a socket nor a folder"),
        ("empty", "the script must use tenax.control_plane.worker_main"),
    ):
        done = ask(str(tmp_path / name), "ping")
        assert (done.returncode, done.stdout) == (2, "")
        assert sentence in done.stderr


# --- the answer -------------------------------------------------------------------------------------------------------


def test_a_worker_that_has_ended_or_does_not_answer_is_named(tmp_path: Path) -> None:
    """Exit code 1; the sentence says which, and what it may be."""
    dead, stuck = tmp_path / "rank0", tmp_path / "rank1"
    with leaving_nothing(), socket.socket(socket.AF_UNIX) as sock, socket.socket(socket.AF_UNIX) as silent:
        sock.bind(str(dead))
        silent.bind(str(stuck))
        silent.listen()
        done = ask("--timeout", "0.1", str(tmp_path), "ping")
    assert (done.returncode, done.stdout) == (1, "")
    assert "tenax ask: rank0: connection refused: the worker or its server has exited" in done.stderr
    assert "tenax ask: rank1: no answer within 0.1 s; the worker may be in native code" in done.stderr


@needs_torch
def test_torchs_own_worker_server_is_asked_in_the_same_way(program: Callable[..., Program], tmp_path: Path) -> None:
    """Its list, its ping, its traceback, its parameters and its refusals."""
    path = str(tmp_path / "torch")
    run = program(
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
        path,
    )
    assert run.pipe.line() == "here"
    assert "dump_traceback" in ask(path).stdout.splitlines()
    assert ask(path, "ping").stdout == "pong\n"
    assert ask(path, "echo", "word=a b&c").stdout == "a b&c\n"
    assert "line " in ask(path, "dump_traceback").stdout
    done = ask(path, "nobody")
    assert done.returncode == 1
    assert "nobody" in done.stderr
    run.send(signal.SIGKILL)
    run.wait()


@needs_torch
def test_ours_speaks_as_torchs_does(program: Callable[..., Program], tmp_path: Path) -> None:
    """The same question to both: the same status, the same content."""
    answers = []
    for name, make in (
        ("torch", "from torch._C._distributed_c10d import _WorkerServer as Server; server = Server(sys.argv[1])"),
        (
            "ours",
            "from tenax.control_plane._server import WorkerServer; server = WorkerServer(sys.argv[1]); server.start()",
        ),
    ):
        path = str(tmp_path / name)
        run = program(f"import signal, sys\n{make}\nprint('here', flush=True)\nsignal.pause()", path)
        assert run.pipe.line() == "here"
        found = {}
        for request in ("POST /handler/ping", "POST /handler/nobody", "GET /handler/", "GET /", "GET /nowhere"):
            with socket.socket(socket.AF_UNIX) as sock:
                sock.settimeout(PATIENCE_S)
                sock.connect(path)
                sock.sendall(
                    f"{request} HTTP/1.1\r\nHost: h\r\nConnection: close\r\nContent-Length: 0\r\n\r\n".encode()
                )
                head, _, body = sock.makefile("rb").read().partition(b"\r\n\r\n")
                kind = [line for line in head.split(b"\r\n") if line.lower().startswith(b"content-type")]
                is_json = any(b"json" in line for line in kind)
                found[request] = (head.split()[1], is_json, body if b"ping" in request.encode() else b"")
        answers.append(found)
        run.send(signal.SIGKILL)
        run.wait()
    assert answers[0] == answers[1]


def test_the_workers_of_a_run_are_asked(bench: Bench) -> None:
    """All at once by the folder, one by its socket; after a restart as well; at the end the folder is gone."""
    script = bench.script("""
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
    words = ["--nproc-per-node", "2", "--virtual-local-rank", "--max-restarts", "1", script]
    run = bench.start(*words, env={"TORCH_WORKER_SERVER_SOCKET": folder})
    bench.pids(2)
    run.until_said(f"to query workers that use worker_main: tenax ask '{folder}'")
    assert ask(folder, "greet", "word=hello").stdout == "== rank0\nhello from 0\n== rank1\nhello from 1\n"
    assert '"generation":1,' in ask(f"{folder}/rank1", "status").stdout
    assert "in stay" in ask(f"{folder}/rank0", "dump_traceback").stdout
    bench.tell("may_fail", 1)
    bench.pids(2, attempt=1)
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
def test_scripts_that_use_torchs_own_are_asked_too(bench: Bench) -> None:
    """Each worker has a path of its own, and the next generation finds it free."""
    script = bench.script("""
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
    run = bench.start("--max-restarts", "1", script, env={"TORCH_WORKER_SERVER_SOCKET": folder})
    for attempt in range(2):
        bench.pids(1, attempt)
        assert ask(folder, "ping").stdout == "== rank0\npong\n"
        bench.tell("may_fail")
    run.send(signal.SIGTERM)
    assert run.wait().code == 143
    assert not os.path.exists(folder)


def test_a_folder_that_cannot_be_is_refused_at_the_command_line(bench: Bench) -> None:
    """A file in its place, before anything starts."""
    done = bench.run(bench.script("pass"), env={"TORCH_WORKER_SERVER_SOCKET": str(bench.home / "train.py")})
    assert done.code == 2
    assert "which is not a folder; name one for the workers' sockets" in done.err


def test_a_worker_that_ends_while_it_is_asked_is_named(tmp_path: Path) -> None:
    """Before the first word of its answer, and in the middle of it."""
    for number, begun in enumerate((b"", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhal")):
        path = str(tmp_path / f"rank{number}")
        with socket.socket(socket.AF_UNIX) as dying:
            dying.bind(path)
            dying.listen()
            thread = threading.Thread(target=_hear_and_end, args=(dying, begun))
            thread.start()
            answer = ask_one(path, Question(path, "ping"))
            thread.join()
        assert answer == Answer(False, "the worker exited before it answered")


def _hear_and_end(listener: socket.socket, said: bytes) -> None:
    connection, _ = listener.accept()
    with connection:
        connection.recv(4096)
        connection.sendall(said)
