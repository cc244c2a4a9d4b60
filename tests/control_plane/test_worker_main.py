"""worker_main, as decorator and as context manager: errors are recorded, and the server is optional."""

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
    """In the error file, with a traceback of the script's own lines; the exception propagates."""
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
    """The function returns its own result."""
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
def test_the_socket_exists_while_the_function_runs(form: str, program: Callable[..., Program], tmp_path: Path) -> None:
    """It is removed at the end."""
    path = tmp_path / "s"
    body = "import os; assert os.path.exists(os.environ['TORCH_WORKER_SERVER_SOCKET'])"
    assert program(form.replace("BODY", body), env={"TORCH_WORKER_SERVER_SOCKET": str(path)}).wait() == 0
    assert not path.exists()


@FORMS
def test_an_unusable_socket_does_not_stop_the_worker(
    form: str, program: Callable[..., Program], tmp_path: Path
) -> None:
    """One line on stderr reports it."""
    (tmp_path / "s").mkdir()
    run = program(form.replace("BODY", "print('done')"), env={"TORCH_WORKER_SERVER_SOCKET": str(tmp_path / "s")})
    assert run.wait() == 0, run.errors
    assert run.pipe.line() == "done"
    assert "could not start the worker server" in run.errors


def test_a_forked_child_does_not_keep_the_socket_open(program: Callable[..., Program], tmp_path: Path) -> None:
    """The next worker can use the path while the child still runs."""
    run = program(
        """
        import os, socket, sys
        from tenax.control_plane import worker_main

        path = os.environ["TORCH_WORKER_SERVER_SOCKET"]
        parent, child = socket.socketpair()
        with worker_main():
            pid = os.fork()
            if pid == 0:
                parent.close()
                child.send(b"here")
                child.recv(1)
                os._exit(0)
            parent.recv(4)
        child.close()
        os.environ["TORCH_WORKER_SERVER_SOCKET"] = path
        with worker_main():
            assert os.path.exists(path)
        parent.close()
        assert os.waitpid(pid, 0)[1] == 0
        """,
        env={"TORCH_WORKER_SERVER_SOCKET": str(tmp_path / "s")},
    )
    assert run.wait() == 0, run.errors
    assert "could not start the worker server" not in run.errors


@FORMS
def test_a_forked_child_does_not_remove_its_parents_socket(
    form: str, program: Callable[..., Program], tmp_path: Path
) -> None:
    """Also if the child itself leaves worker_main, by a return or an exception."""
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


def test_without_the_variable_no_server_is_imported(program: Callable[..., Program]) -> None:
    """No HTTP and no threads."""
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
