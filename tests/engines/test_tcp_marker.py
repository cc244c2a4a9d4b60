"""The marker file: what a coordinator leaves for its successor, and what is ignored."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from kit.processes import UNPRIVILEGED_UID, needs_root, python
from tenax._core.model import Outcome, Verdict
from tenax._engines.tcp.marker import Marker, Note

SEVEN = Note(7)


@pytest.fixture
def marker(tmp_path: Path) -> Marker:
    return Marker("run", "host:29400", str(tmp_path))


def age(path: Path, seconds: float) -> None:
    """Make the file look as old as this."""
    os.utime(path, (time.time() - seconds,) * 2)


def only_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def test_a_note_is_found_by_the_next_coordinator_of_the_same_run_and_endpoint(marker: Marker, tmp_path: Path) -> None:
    assert marker.read() is None
    for note in (Note(), Note(7, 3, "a-store"), Note(7, 3, "a-store", Verdict(Outcome.SUCCEEDED, "all succeeded"))):
        marker.write(note)
        assert Marker("run", "host:29400", str(tmp_path)).read() == note
    assert only_file(tmp_path).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(("run_id", "endpoint"), [("other", "host:29400"), ("run", "host:29401")])
def test_another_run_or_endpoint_has_another_file(marker: Marker, tmp_path: Path, run_id: str, endpoint: str) -> None:
    marker.write(SEVEN)
    assert Marker(run_id, endpoint, str(tmp_path)).read() is None


def test_the_file_is_in_the_folder_for_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    Marker("run", "host:29400").write(SEVEN)
    assert Marker("run", "host:29400", str(tmp_path)).read() == SEVEN


def test_removing_the_file_twice_is_not_an_error(marker: Marker, tmp_path: Path) -> None:
    marker.write(SEVEN)
    marker.remove()
    marker.remove()
    assert marker.read() is None
    assert not list(tmp_path.iterdir())


def test_an_old_file_is_ignored(marker: Marker, tmp_path: Path) -> None:
    marker.write(SEVEN)
    age(only_file(tmp_path), 30)
    assert marker.read() == SEVEN
    age(only_file(tmp_path), 70)
    assert marker.read() is None


def test_a_verdict_is_valid_for_a_shorter_time(marker: Marker, tmp_path: Path) -> None:
    """The user may start the same command again."""
    marker.write(Note(7, verdict=Verdict(Outcome.SUCCEEDED, "all succeeded")))
    age(only_file(tmp_path), 15)
    assert marker.read() is None


def test_a_running_coordinator_keeps_the_file_current(marker: Marker, tmp_path: Path) -> None:
    marker.write(SEVEN)
    age(only_file(tmp_path), 70)
    marker.touch()
    assert marker.read() == SEVEN
    marker.remove()
    marker.touch()
    assert not list(tmp_path.iterdir()), "touching creates no file"


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
def test_invalid_content_is_ignored(marker: Marker, tmp_path: Path, content: bytes) -> None:
    marker.write(SEVEN)
    only_file(tmp_path).write_bytes(content)
    assert marker.read() is None


def test_a_symlink_is_not_followed(marker: Marker, tmp_path: Path) -> None:
    """Neither for reading nor for writing."""
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
def test_a_pipe_or_folder_at_the_path_does_not_block(marker: Marker, tmp_path: Path, kind: str) -> None:
    """Opening a pipe without a writer would block."""
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
    assert list(tmp_path.iterdir()) == [path], "no temporary file is left"


@needs_root
def test_a_file_of_another_user_is_ignored(marker: Marker, tmp_path: Path) -> None:
    marker.write(SEVEN)
    os.chown(only_file(tmp_path), UNPRIVILEGED_UID, UNPRIVILEGED_UID)
    assert marker.read() is None


def test_a_missing_folder_is_not_an_error(tmp_path: Path) -> None:
    marker = Marker("run", "host:29400", str(tmp_path / "missing"))
    marker.write(SEVEN)
    marker.remove()
    assert marker.read() is None


@pytest.mark.process
def test_the_file_is_never_half_written(marker: Marker, tmp_path: Path) -> None:
    """A reader always finds a complete note while a writer replaces it, also when the writer is killed."""
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
