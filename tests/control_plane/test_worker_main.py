"""worker_main: errors are recorded, in both of its forms; a socket that cannot be had costs nothing but the socket."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kit.processes import Program, on_linux, program

__all__ = ["program"]

pytestmark = on_linux

AS_DECORATOR = """
    from tenax.control_plane import worker_main

    @worker_main()
    def main(number):
        BODY
        return number

    assert main(5) == 5
"""
AS_CONTEXT = """
    from tenax.control_plane import worker_main

    def main(number):
        BODY
        return number

    with worker_main():
        assert main(5) == 5
"""
FORMS = pytest.mark.parametrize("form", [AS_DECORATOR, AS_CONTEXT], ids=["decorator", "context"])


@FORMS
def test_an_error_inside_is_recorded(form: str, program: Callable[..., Program], tmp_path: Path) -> None:
    """In the error file, with a traceback of the script's own lines; and it goes on."""
    error_file = tmp_path / "error.json"
    run = program(form.replace("BODY", "raise RuntimeError('boom')"), env={"TORCHELASTIC_ERROR_FILE": str(error_file)})
    assert run.wait() == 1
    assert "RuntimeError: boom" in run.errors
    message = json.loads(error_file.read_text())["message"]
    assert message["message"] == "RuntimeError: boom"
    stack = message["extraInfo"]["py_callstack"]
    assert "in main" in stack
    assert "control_plane" not in stack


@FORMS
def test_without_an_error_there_is_no_file(form: str, program: Callable[..., Program], tmp_path: Path) -> None:
    """Nor is anything else changed: the function returns what it returns."""
    error_file = tmp_path / "error.json"
    assert program(form.replace("BODY", "pass"), env={"TORCHELASTIC_ERROR_FILE": str(error_file)}).wait() == 0
    assert not error_file.exists()


@FORMS
def test_an_exit_is_not_an_error(form: str, program: Callable[..., Program], tmp_path: Path) -> None:
    """sys.exit(3) ends the process with 3 and records nothing."""
    error_file = tmp_path / "error.json"
    run = program(form.replace("BODY", "import sys; sys.exit(3)"), env={"TORCHELASTIC_ERROR_FILE": str(error_file)})
    assert run.wait() == 3
    assert not error_file.exists()


@FORMS
def test_the_socket_is_there_while_it_runs(form: str, program: Callable[..., Program], tmp_path: Path) -> None:
    """From the beginning to the end, and not after it."""
    path = tmp_path / "s"
    body = "import os; assert os.path.exists(os.environ['TORCH_WORKER_SERVER_SOCKET'])"
    assert program(form.replace("BODY", body), env={"TORCH_WORKER_SERVER_SOCKET": str(path)}).wait() == 0
    assert not path.exists()


@FORMS
def test_a_socket_that_cannot_be_had_does_not_stop_the_work(
    form: str, program: Callable[..., Program], tmp_path: Path
) -> None:
    """One sentence on stderr; the work is done."""
    (tmp_path / "s").mkdir()
    run = program(form.replace("BODY", "print('done')"), env={"TORCH_WORKER_SERVER_SOCKET": str(tmp_path / "s")})
    assert run.wait() == 0, run.errors
    assert run.pipe.line() == "done"
    assert "this worker cannot be asked" in run.errors


def test_children_of_the_worker_do_not_hold_its_socket(program: Callable[..., Program], tmp_path: Path) -> None:
    """A forked loader lives on; the next worker can have the path."""
    run = program(
        """
        import os, socket, sys
        from tenax.control_plane import worker_main

        path = os.environ["TORCH_WORKER_SERVER_SOCKET"]
        ours, theirs = socket.socketpair()
        with worker_main():
            pid = os.fork()
            if pid == 0:
                ours.close()
                theirs.send(b"here")
                theirs.recv(1)
                os._exit(0)
            ours.recv(4)
        theirs.close()
        os.environ["TORCH_WORKER_SERVER_SOCKET"] = path
        with worker_main():
            assert os.path.exists(path)
        ours.close()
        assert os.waitpid(pid, 0)[1] == 0
        """,
        env={"TORCH_WORKER_SERVER_SOCKET": str(tmp_path / "s")},
    )
    assert run.wait() == 0, run.errors
    assert "cannot be asked" not in run.errors


@FORMS
def test_a_forked_child_leaves_its_parents_socket_alone(
    form: str, program: Callable[..., Program], tmp_path: Path
) -> None:
    """Also when it leaves worker_main itself, as a child does that returns or raises."""
    body = """
        import os
        pid = os.fork()
        if pid:
            assert os.waitpid(pid, 0)[1] == 0
            assert os.path.exists(os.environ["TORCH_WORKER_SERVER_SOCKET"])
    """
    run = program(form.replace("BODY", body.strip()), env={"TORCH_WORKER_SERVER_SOCKET": str(tmp_path / "s")})
    assert run.wait() == 0, run.errors
    assert not (tmp_path / "s").exists()


def test_nothing_is_imported_that_is_not_needed(program: Callable[..., Program]) -> None:
    """Without the variable: no server, no HTTP, no threads."""
    run = program(
        """
        import sys
        before = set(sys.modules)
        from tenax.control_plane import worker_main
        with worker_main():
            loaded = set(sys.modules) - before
        print(sorted(name for name in loaded if "http" in name or name.startswith("tenax._observe.health")))
        """
    )
    assert run.wait() == 0, run.errors
    assert run.pipe.line() == "[]"
