"""Redirects: on the level of file descriptors, and always undone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tenax.multiprocessing.redirects import get_libc, redirect

PROGRAM = """
import os, sys
from tenax.multiprocessing.redirects import get_libc, redirect_stderr, redirect_stdout
libc = get_libc()
print("before")
libc.printf(b"before in C\\n")
try:
    with redirect_stdout(sys.argv[1]), redirect_stderr(sys.argv[2]):
        print("inside")
        libc.printf(b"inside in C\\n")
        os.system("echo inside a child")
        print("inside stderr", file=sys.stderr)
        1 / 0
except ZeroDivisionError:
    pass
print("after")
libc.printf(b"after in C\\n")
print("after stderr", file=sys.stderr)
"""


@pytest.mark.process
def test_all_output_inside_goes_to_the_file(tmp_path: Path) -> None:
    """Output of Python, of C and of a child, within the context only, even if an exception ends it."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "out"), str(tmp_path / "err")],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    assert sorted((tmp_path / "out").read_text().splitlines()) == ["inside", "inside a child", "inside in C"]
    assert (tmp_path / "err").read_text() == "inside stderr\n"
    assert sorted(done.stdout.splitlines()) == ["after", "after in C", "before", "before in C"]
    assert done.stderr == "after stderr\n"


def test_only_stdout_and_stderr_can_be_redirected(tmp_path: Path) -> None:
    """Another stream is rejected, and no file is created."""
    with pytest.raises(ValueError, match="'stdin'"), redirect("stdin", str(tmp_path / "file")):
        pass
    assert not os.listdir(tmp_path)


def test_a_file_that_cannot_be_opened_changes_nothing(tmp_path: Path) -> None:
    before = os.fstat(1)
    with pytest.raises(FileNotFoundError), redirect("stdout", str(tmp_path / "missing" / "file")):
        pass
    assert os.path.samestat(before, os.fstat(1))


@pytest.mark.process
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_does_not_keep_the_redirect() -> None:
    """The last flush fails; what follows goes to the original stream again."""
    code = """
import os, sys
from tenax.multiprocessing.redirects import redirect_stdout
sys.stdout = open(1, "w", buffering=1000, closefd=False)
try:
    with redirect_stdout("/dev/full"):
        print("inside")
except OSError:
    os.write(1, b"after")
os._exit(0)
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"after"


@pytest.mark.process
def test_the_c_library_is_loaded_on_request() -> None:
    """Importing the module loads neither a library nor ctypes; get_libc() returns the one in use."""
    code = "import tenax.multiprocessing.redirects, sys; print('ctypes' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"False\n"
    assert get_libc().getpid() == os.getpid()
