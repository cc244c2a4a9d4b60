"""SubprocessHandler: one program, for callers that manage processes themselves."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.processes import children, gone, leaving_nothing, on_linux
from tenax._node.workers import decide_placements
from tenax.multiprocessing.subprocess_handler import SubprocessHandler, get_subprocess_handler
from tenax.numa.binding import AffinityMode, NumaOptions

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


@pytest.mark.parametrize("size", ["3", "many"])
def test_a_wrong_local_world_size_starts_nothing(size: str, tmp_path: Path) -> None:
    started = tmp_path / "started"
    env, before = {"LOCAL_WORLD_SIZE": size}, children()
    with pytest.raises(ValueError, match=f"LOCAL_WORLD_SIZE.*{size}"):
        SubprocessHandler("/bin/sleep", ("60",), env, str(started), None, 3, NumaOptions(AffinityMode.NODE))
    assert children() == before
    assert not started.exists()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs a CPU for each of two programs")
def test_a_program_is_bound_to_its_cpus() -> None:
    options = NumaOptions(AffinityMode.EXCLUSIVE, should_fall_back_if_binding_fails=True)
    placement = decide_placements(options, 2).placement
    assert placement is not None
    handler = SubprocessHandler("/bin/sleep", ("60",), {"LOCAL_WORLD_SIZE": "2"}, None, None, 1, options)
    try:
        cpus = placement.bindings[1].cpus if placement.bindings else os.sched_getaffinity(0)
        assert os.sched_getaffinity(handler.proc.pid) == set(cpus)
    finally:
        handler.close()
        handler.proc.wait()
