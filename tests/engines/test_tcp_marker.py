"""The marker: what a coordinator leaves for its successor, and what is not believed."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from kit.processes import NOBODY, needs_root, python
from tenax._core.model import Outcome, Verdict
from tenax._engines.tcp.marker import Marker, Note

SEVEN = Note(7)


@pytest.fixture
def marker(tmp_path: Path) -> Marker:
    return Marker("run", "host:29400", str(tmp_path))


def age(path: Path, seconds: float) -> None:
    """As if it had been written that long ago."""
    os.utime(path, (time.time() - seconds,) * 2)


def only_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def test_what_was_written_is_found_by_the_next_of_the_same_run_and_endpoint(marker: Marker, tmp_path: Path) -> None:
    assert marker.read() is None
    for note in (Note(), Note(7, 3, "a-store"), Note(7, 3, "a-store", Verdict(Outcome.SUCCEEDED, "all succeeded"))):
        marker.write(note)
        assert Marker("run", "host:29400", str(tmp_path)).read() == note
    assert only_file(tmp_path).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(("run_id", "endpoint"), [("other", "host:29400"), ("run", "host:29401")])
def test_another_run_or_endpoint_has_another(marker: Marker, tmp_path: Path, run_id: str, endpoint: str) -> None:
    marker.write(SEVEN)
    assert Marker(run_id, endpoint, str(tmp_path)).read() is None


def test_it_lies_in_the_folder_for_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    Marker("run", "host:29400").write(SEVEN)
    assert Marker("run", "host:29400", str(tmp_path)).read() == SEVEN


def test_after_removal_there_is_none_and_removing_again_is_no_error(marker: Marker, tmp_path: Path) -> None:
    marker.write(SEVEN)
    marker.remove()
    marker.remove()
    assert marker.read() is None
    assert not list(tmp_path.iterdir())


def test_an_old_one_is_not_believed(marker: Marker, tmp_path: Path) -> None:
    marker.write(SEVEN)
    age(only_file(tmp_path), 30)
    assert marker.read() == SEVEN
    age(only_file(tmp_path), 70)
    assert marker.read() is None


def test_a_verdict_is_believed_for_a_shorter_time(marker: Marker, tmp_path: Path) -> None:
    """The same command may be meant to run again."""
    marker.write(Note(7, verdict=Verdict(Outcome.SUCCEEDED, "all succeeded")))
    age(only_file(tmp_path), 15)
    assert marker.read() is None


def test_a_living_coordinator_keeps_it_young(marker: Marker, tmp_path: Path) -> None:
    marker.write(SEVEN)
    age(only_file(tmp_path), 70)
    marker.touch()
    assert marker.read() == SEVEN
    marker.remove()
    marker.touch()
    assert not list(tmp_path.iterdir()), "touching makes none"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[7]",
        b'{"generation": "7"}',
        b'{"generation": -1}',
        b'{"generation": 99999999999999999999999}',
        b'{"generation": 7',
        b"\xff\xfe",
        bytes(range(256)),
        b'{"restarts_used": -1}',
        b'{"generation": 7, "verdict": "good"}',
        b'{"generation": 7, "x": "' + b"x" * 70_000 + b'"}',
        b'{"generation": 7, "x": ' + b"[" * 900,
    ],
    ids=lambda content: repr(content[:20]),
)
def test_garbage_is_as_if_it_were_not_there(marker: Marker, tmp_path: Path, content: bytes) -> None:
    marker.write(SEVEN)
    only_file(tmp_path).write_bytes(content)
    assert marker.read() is None


def test_a_symlink_is_not_followed(marker: Marker, tmp_path: Path) -> None:
    """Neither to read what somebody points us to, nor to write there."""
    marker.write(SEVEN)
    path = only_file(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    assert marker.read() is None
    marker.write(Note(8))
    assert b"7" in elsewhere.read_bytes()
    assert not path.is_symlink()
    assert marker.read() == Note(8)


@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_what_is_not_a_file_does_not_hold_us(marker: Marker, tmp_path: Path, kind: str) -> None:
    """A pipe without a writer would let a reader wait for ever."""
    marker.write(SEVEN)
    path = only_file(tmp_path)
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    assert marker.read() is None
    marker.write(Note(8))
    assert marker.read() == (Note(8) if kind == "pipe" else None)
    assert list(tmp_path.iterdir()) == [path], "what could not be put in place is not left behind"


@needs_root
def test_one_of_another_user_is_not_believed(marker: Marker, tmp_path: Path) -> None:
    marker.write(SEVEN)
    os.chown(only_file(tmp_path), NOBODY, NOBODY)
    assert marker.read() is None


def test_a_folder_that_is_not_there_costs_the_marker_only(tmp_path: Path) -> None:
    marker = Marker("run", "host:29400", str(tmp_path / "missing"))
    marker.write(SEVEN)
    marker.remove()
    assert marker.read() is None


@pytest.mark.process
def test_it_survives_a_writer_that_was_killed(marker: Marker, tmp_path: Path) -> None:
    """Old or new, never half: whoever reads while it is replaced again and again finds one of them."""
    code = """
        import sys
        sys.path[:0] = sys.argv[2].split(":")
        from tenax._engines.tcp.marker import Marker, Note
        marker = Marker("run", "host:29400", sys.argv[1])
        for generation in range(1, 1 << 30):
            marker.write(Note(generation))
            if generation == 1:
                print("begun", flush=True)
    """
    import sys

    writer = subprocess.Popen(python(code, tmp_path, ":".join(filter(None, sys.path))), stdout=subprocess.PIPE)
    assert writer.stdout is not None
    writer.stdout.readline()
    seen = [marker.read() for _ in range(2000)]
    writer.kill()
    writer.communicate()
    assert None not in seen
    assert marker.read() is not None
