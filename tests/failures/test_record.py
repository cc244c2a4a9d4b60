"""record and ErrorHandler, partly in real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kit.processes import needs_torch
from kit.torch_python import TorchPython
from tenax._failures import error_file
from tenax._failures.error_handler import ErrorHandler, get_error_handler, record
from tenax._failures.process_failure import ChildFailedError, ProcessFailure


class Recorder(ErrorHandler):
    """A user's own handler, which writes to a given path."""

    def __init__(self, path: Path | str | None) -> None:
        self.path = path
        self.initialized = 0

    def initialize(self) -> None:
        self.initialized += 1

    def _get_error_file_path(self) -> str | None:
        return None if self.path is None else str(self.path)


def run(script: str, folder: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    path = folder / "script.py"
    path.write_text(script)
    env = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(folder / "error.json"), **environ}
    return subprocess.run([sys.executable, str(path)], env=env, capture_output=True, text=True, timeout=60, check=False)


def raising(error: BaseException) -> Callable[[], None]:
    def main() -> None:
        raise error

    return main


def test_a_recorded_function_behaves_like_the_function(tmp_path: Path) -> None:
    """Arguments, result, name and docstring are kept; the handler is initialized at each call."""
    handler = Recorder(tmp_path / "e")

    def add(a: int, b: int = 2) -> int:
        """Adds."""
        return a + b

    recorded = record(add, handler)
    assert recorded(1, b=5) == 6
    assert (recorded.__name__, recorded.__doc__) == ("add", "Adds.")
    assert handler.initialized == 1
    assert not (tmp_path / "e").exists()


def test_an_exception_is_recorded_and_raised_again(tmp_path: Path) -> None:
    """The error file has its traceback without the frame of record; the caller gets the same object."""
    error = ValueError("boom")
    with pytest.raises(ValueError, match="boom") as caught:
        record(raising(error), Recorder(tmp_path / "e"))()
    assert caught.value is error
    found = error_file.read(str(tmp_path / "e"))
    assert found.message == "ValueError: boom"
    assert found.traceback.startswith("Traceback (most recent call last):\n")
    assert found.traceback.endswith("ValueError: boom\n")
    assert "in main" in found.traceback
    assert "in recorded" not in found.traceback


@pytest.mark.parametrize("code", [0, None, False])
def test_an_exit_with_success_is_a_return(tmp_path: Path, code: int | None) -> None:
    """So sys.exit(0) ends only the function."""
    assert record(raising(SystemExit(code)), Recorder(tmp_path / "e"))() is None
    assert not (tmp_path / "e").exists()


@pytest.mark.parametrize("error", [SystemExit(3), SystemExit("bad"), SystemExit(""), KeyboardInterrupt()])
def test_other_exits_and_interrupts_are_not_recorded(tmp_path: Path, error: BaseException) -> None:
    """They are not errors; the exit code or the signal shows them."""
    with pytest.raises(type(error)) as caught:
        record(raising(error), Recorder(tmp_path / "e"))()
    assert caught.value is error
    assert not (tmp_path / "e").exists()


def test_without_a_path_nothing_is_written(tmp_path: Path) -> None:
    """The exception is raised, and no file is created."""
    for path in (None, ""):
        with pytest.raises(ValueError, match="x"):
            record(raising(ValueError("x")), Recorder(path))()
    assert os.listdir(tmp_path) == []


@pytest.mark.process
def test_the_path_comes_from_the_environment(tmp_path: Path) -> None:
    """A script needs only the decorator; the exit code is Python's."""
    script = (
        "from tenax.multiprocessing.errors import record\n@record\ndef main():\n    raise OSError(5, 'disk')\nmain()\n"
    )
    done = run(script, tmp_path)
    assert done.returncode == 1
    assert done.stderr.endswith("OSError: [Errno 5] disk\n")
    assert error_file.read(str(tmp_path / "error.json")).message == "OSError: [Errno 5] disk"


@pytest.mark.process
def test_a_crash_prints_the_python_stack(tmp_path: Path) -> None:
    """The fault handler is enabled; there is no error file."""
    script = (
        "import ctypes\nfrom tenax.multiprocessing.errors import record\n"
        "@record\ndef main():\n    ctypes.string_at(0)\nmain()\n"
    )
    done = run(script, tmp_path)
    assert done.returncode == -signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in done.stderr
    assert "in main" in done.stderr
    assert not (tmp_path / "error.json").exists()


@pytest.mark.process
def test_the_users_own_fault_handler_stays(tmp_path: Path) -> None:
    """It keeps writing to its file."""
    script = (
        "import ctypes, faulthandler\nfrom tenax.multiprocessing.errors import record\n"
        "faulthandler.enable(open('crash.txt', 'w'))\n@record\ndef main():\n    ctypes.string_at(0)\nmain()\n"
    )
    (tmp_path / "script.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == -signal.SIGSEGV
    assert done.stderr == ""
    assert "Segmentation fault" in (tmp_path / "crash.txt").read_text()


@pytest.mark.process
def test_the_fault_handler_works_without_sys_stderr(tmp_path: Path) -> None:
    """If sys.stderr is replaced or missing, descriptor 2 is used."""
    for replacement in ("None", "__import__('io').StringIO()"):
        script = (
            "import ctypes, sys\nfrom tenax.multiprocessing.errors import record\n"
            f"sys.stderr = {replacement}\n@record\ndef main():\n    ctypes.string_at(0)\nmain()\n"
        )
        done = run(script, tmp_path)
        assert done.returncode == -signal.SIGSEGV
        assert "Segmentation fault" in done.stderr


def test_the_first_of_nested_records_wins(tmp_path: Path) -> None:
    """The error of the inner function is the cause of the outer one's."""

    @record
    def unused() -> None:
        """Show that the decorator works without arguments."""

    unused()
    handlers = Recorder(tmp_path / "e"), Recorder(tmp_path / "e")

    def outer() -> None:
        try:
            record(raising(ValueError("cause")), handlers[0])()
        except ValueError:
            raise RuntimeError("consequence") from None

    with pytest.raises(RuntimeError, match="consequence"):
        record(outer, handlers[1])()
    assert error_file.read(str(tmp_path / "e")).message == "ValueError: cause"


class UnprintableError(Exception):
    """An exception that cannot be printed."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_an_exception_that_cannot_be_printed_is_recorded_too(tmp_path: Path) -> None:
    """Its type is still known."""
    with pytest.raises(UnprintableError):
        record(raising(UnprintableError()), Recorder(tmp_path / "e"))()
    assert error_file.read(str(tmp_path / "e")).message.startswith("UnprintableError: ")


@pytest.mark.parametrize(
    "path", ["/dev/full", "no/such/folder/e", "/proc/nonsense", "nul\0"], ids=["full", "folder", "proc", "nul"]
)
def test_a_file_that_cannot_be_written_does_not_hide_the_exception(
    path: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The user's exception is raised, and one line on stderr reports the problem."""
    if path == "/dev/full":
        path = str(tmp_path)  # a folder instead of a file
    with pytest.raises(ValueError, match="the real one"):
        record(raising(ValueError("the real one")), Recorder(path))()
    printed = capfd.readouterr().err
    assert printed.startswith("tenax: could not write the error to ")
    assert printed.count("\n") == 1


class FailingHandler(Recorder):
    def record_exception(self, e: BaseException) -> None:
        raise KeyError("bug in the handler")


def test_a_failing_handler_does_not_hide_the_exception(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The user's exception is raised; the handler's own is printed in one line."""
    with pytest.raises(ValueError, match="the real one"):
        record(raising(ValueError("the real one")), FailingHandler(tmp_path / "e"))()
    assert "tenax: the error handler failed while recording an error: KeyError" in capfd.readouterr().err


def failure(path: Path | str, exitcode: int = -11) -> ProcessFailure:
    return ProcessFailure(0, 123, exitcode, str(path))


def test_the_error_file_of_a_failed_child_is_copied(tmp_path: Path) -> None:
    """With its exit code, which only the parent knows."""
    error_file.write(str(tmp_path / "child"), error_file.content("ValueError: in the child", "Traceback ...", 1e9))
    (tmp_path / "parent").write_text('{"message": "from before"}')
    error = ChildFailedError("train.py", {0: failure(tmp_path / "child")})
    with pytest.raises(ChildFailedError) as caught:
        record(raising(error), Recorder(tmp_path / "parent"))()
    assert caught.value is error
    data = json.loads((tmp_path / "parent").read_text())
    assert data["message"]["message"] == "ValueError: in the child"
    assert data["message"]["errorCode"] == -11
    assert data["message"]["extraInfo"]["timestamp"] == "1000000000"


def test_without_an_error_file_of_the_child_there_is_none(tmp_path: Path) -> None:
    """As in TorchElastic."""
    with pytest.raises(ChildFailedError):
        record(raising(ChildFailedError("x", {0: failure("<N/A>")})), Recorder(tmp_path / "parent"))()
    assert not (tmp_path / "parent").exists()


def test_the_readable_part_of_a_childs_damaged_file_is_copied(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """With the exit code; the problem is printed."""
    (tmp_path / "child").write_text('{"message": {"message": "ValueError: tor')
    Recorder(tmp_path / "parent").dump_error_file(str(tmp_path / "child"), 7)
    data = json.loads((tmp_path / "parent").read_text())
    assert data["message"]["message"] == "ValueError: tor"
    assert data["message"]["errorCode"] == 7
    assert "truncated or not JSON" in capfd.readouterr().err
    Recorder(tmp_path / "other").dump_error_file(str(tmp_path / "nothing"), 7)
    assert json.loads((tmp_path / "other").read_text())["message"]["message"] == "no error file was written"


def test_the_older_format_is_copied_without_an_exit_code(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A message that is a string cannot contain a code; it is copied unchanged."""
    (tmp_path / "child").write_text('{"message": "text", "timestamp": 5}')
    Recorder(tmp_path / "parent").dump_error_file(str(tmp_path / "child"), 7)
    assert json.loads((tmp_path / "parent").read_text()) == {"message": "text", "timestamp": 5}
    assert "exit code 7 was not recorded" in capfd.readouterr().err
    data: dict[str, object] = {}
    get_error_handler().override_error_code_in_rootcause_data("f", data, 7)
    assert data == {}


@pytest.mark.process
def test_the_decorator_is_cheap_to_import() -> None:
    """It imports neither torch nor modules that only the agent needs."""
    script = (
        "import sys\nfrom tenax._failures.error_handler import record\n@record\ndef main(): return 1\nmain()\n"
        "print(sorted({'torch', 'numpy', 'msgspec', 'typing', 'json', 'dataclasses', 'logging', 're', 'traceback'}"
        " & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-S", "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{script}"],
                          capture_output=True, text=True, timeout=60, check=False)  # fmt: skip
    assert done.stderr == ""
    assert done.stdout == "[]\n"


def test_the_public_names_are_those_of_torchelastic() -> None:
    """In the same modules."""
    from tenax.multiprocessing import errors
    from tenax.multiprocessing.errors.error_handler import ErrorHandler as SameHandler

    assert set(errors.__all__) == {
        "ChildFailedError",
        "ErrorHandler",
        "ProcessFailure",
        "get_error_handler",
        "record",
    }
    assert (errors.ChildFailedError, errors.ProcessFailure) == (ChildFailedError, ProcessFailure)
    assert errors.ErrorHandler is SameHandler is ErrorHandler
    assert isinstance(errors.get_error_handler(), ErrorHandler)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = errors.nonsense


@needs_torch
@pytest.mark.process
def test_tenax_and_torch_read_each_others_error_files(tmp_path: Path, torch_python: TorchPython) -> None:
    """And accept each other's exception types."""
    script = """
import json, os, sys
from torch.distributed.elastic.multiprocessing import errors as torch_errors
from tenax.multiprocessing import errors as tenax_errors
from tenax._failures import error_file
folder = os.path.dirname(os.environ["TORCHELASTIC_ERROR_FILE"])
def boom():
    raise ValueError("boom")
def recorded(module, name):
    os.environ["TORCHELASTIC_ERROR_FILE"] = os.path.join(folder, name)
    try:
        module.record(boom)()
    except ValueError:
        return os.environ["TORCHELASTIC_ERROR_FILE"]
def shape(value):
    return {k: shape(v) for k, v in value.items()} if isinstance(value, dict) else type(value).__name__
written = recorded(torch_errors, "torch_errors"), recorded(tenax_errors, "tenax_errors")
a, b = (json.load(open(path)) for path in written)
del b["message"]["extraInfo"]["timestamp_s"]
assert shape(a) == shape(b), (a, b)
read = torch_errors.ProcessFailure(0, 1, 1, written[1]), tenax_errors.ProcessFailure(0, 1, 1, written[1])
assert read[0].message == read[1].message and read[0].timestamp == read[1].timestamp
found = error_file.read(written[0])
assert (found.error_type, found.message, found.problem) == ("ValueError", "ValueError: boom", "")
for mine, other in ((tenax_errors, torch_errors), (torch_errors, tenax_errors)):
    failure = other.ProcessFailure(0, 1, 3, written[0])
    texts = [m.ChildFailedError("x", {0: failure}).format_msg() for m in (mine, other)]
    lines = [[line.split() for line in text.splitlines() if "host" not in line] for text in texts]
    assert lines[0] == lines[1], texts
def launcher():
    raise torch_errors.ChildFailedError("x", {0: torch_errors.ProcessFailure(0, 1, 3, written[0])})
os.environ["TORCHELASTIC_ERROR_FILE"] = os.path.join(folder, "launcher")
try:
    tenax_errors.record(launcher)()
except torch_errors.ChildFailedError:
    pass
assert json.load(open(os.path.join(folder, "launcher")))["message"]["errorCode"] == 3
print("ok")
"""
    environ = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")}
    done = torch_python.run("-c", script, environ=environ)
    assert done.stdout == "ok\n", done.stderr
