"""SubprocessHandler: one program, for callers that manage processes themselves."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.processes import gone, leaving_nothing, on_linux
from tenax.multiprocessing.subprocess_handler import SubprocessHandler, get_subprocess_handler

pytestmark = on_linux


@pytest.fixture(autouse=True)
def _leave_nothing() -> Iterator[None]:
    with leaving_nothing():
        yield


def test_a_program_gets_its_files_and_variables(tmp_path: Path) -> None:
    """In addition to the inherited environment. It leads its own session."""
    out, err = tmp_path / "out", tmp_path / "err"
    script = "echo $TEXT $HOME; echo oops >&2; exit 3"
    handler = get_subprocess_handler("/bin/sh", ("-c", script), {"TEXT": "hello"}, str(out), str(err), 2)
    assert isinstance(handler, SubprocessHandler)
    assert handler.local_rank_id == 2
    assert handler.proc.wait() == 3
    handler.close()
    assert out.read_text() == f"hello {os.environ['HOME']}\n"
    assert err.read_text() == "oops\n"


def test_close_signals_the_whole_group(tmp_path: Path) -> None:
    """The program and its children, with SIGTERM or the given signal. It can be called twice."""
    out = tmp_path / "out"
    os.mkfifo(out)
    reader = os.open(out, os.O_RDONLY | os.O_NONBLOCK)
    handler = SubprocessHandler("/bin/sh", ("-c", "sleep 60 & echo $!; wait"), {}, str(out), None, 0)
    os.set_blocking(reader, True)
    child = int(os.read(reader, 100))
    os.close(reader)
    assert os.getsid(child) == handler.proc.pid
    handler.close(signal.SIGKILL)
    assert handler.proc.wait() == -signal.SIGKILL
    assert gone([child])
    handler.close()


def test_a_missing_program_raises_and_leaves_no_file_open(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        SubprocessHandler("/no/such", (), {}, str(tmp_path / "out"), str(tmp_path / "err"), 0)
