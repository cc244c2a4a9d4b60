"""Files in shared directories: links of other users are not followed, and FIFOs do not block.

Creating links of other users needs root; the other tests run as any user.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kit.jobs import TIMEOUT_S
from tenax._failures.evidence import stacks_in
from tenax._io.json_lines import JsonLinesFile
from tenax._io.safe_open import create_safely, open_safely, read_regular
from tenax._logs.log_file import LogFile
from tenax._node.journal import Journal

OTHER = 65_534  # usually the user nobody
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can create a link of another user")


def link_of_another(folder: Path, target: Path, mode: int = 0o1777) -> Path:
    """Create a link that belongs to another user, in a directory with this mode."""
    folder.chmod(mode)
    link = folder / "link"
    link.symlink_to(target)
    os.lchown(link, OTHER, OTHER)
    return link


@needs_root
@pytest.mark.parametrize("mode", [0o1777, 0o777, 0o775])
def test_a_link_of_another_user_is_not_followed(mode: int, tmp_path: Path) -> None:
    """In a directory that others may write to: its target is unchanged, and the error has the reason."""
    target = tmp_path / "target"
    target.write_text("precious")
    folder = tmp_path / "shared"
    folder.mkdir()
    link = link_of_another(folder, target, mode)
    with pytest.raises(OSError, match="the link belongs to another user") as raised:
        create_safely(str(link))
    assert raised.value.errno == errno.ELOOP
    with pytest.raises(OSError, match="the link belongs to another user"):
        JsonLinesFile(str(link))
    assert target.read_text() == "precious"


@needs_root
def test_a_link_of_another_user_in_a_private_directory_is_followed(tmp_path: Path) -> None:
    """Only this user could have put it there."""
    folder = tmp_path / "own"
    folder.mkdir()
    link = link_of_another(folder, tmp_path / "target", 0o755)
    with create_safely(str(link)) as file:
        file.write(b"report")
    assert (tmp_path / "target").read_bytes() == b"report"


def test_a_link_of_this_user_is_followed_in_any_directory(tmp_path: Path) -> None:
    """``--report latest.json`` may be such a link, also to another link or to a missing file."""
    tmp_path.chmod(0o1777)
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to(tmp_path / "target")
    with create_safely(str(tmp_path / "one")) as file:
        file.write(b"report")
    assert (tmp_path / "target").read_bytes() == b"report"


def test_a_link_to_itself_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="too many symbolic links"):
        create_safely(str(tmp_path / "loop"))


@pytest.mark.process
@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/stderr", "/dev/null", "/proc/self/fd/1"])
def test_device_files_can_be_written(name: str) -> None:
    """To print a report, or to drop it."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"from tenax._io.safe_open import create_safely\nwith create_safely({name!r}) as f: f.write(b'ok')",
        ],
        capture_output=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    printed = done.stdout + done.stderr
    assert (done.returncode, printed) == (0, b"" if name == "/dev/null" else b"ok")


def test_a_fifo_without_a_reader_is_an_error(tmp_path: Path) -> None:
    """For writing and for reading; neither blocks."""
    fifo = str(tmp_path / "fifo")
    os.mkfifo(fifo)
    with pytest.raises(OSError, match=os.strerror(errno.ENXIO)):
        open_safely(fifo, os.O_WRONLY)
    with pytest.raises(OSError, match="not a regular file"):
        read_regular(fifo, 10)
    assert stacks_in(fifo) == ""


def test_journals_and_log_files_of_a_run_follow_no_foreign_link(tmp_path: Path) -> None:
    """The agent creates the folder of a run: a link in it is foreign."""
    (tmp_path / "journal.jsonl").symlink_to(tmp_path / "target")
    warnings: list[str] = []
    Journal(str(tmp_path / "journal.jsonl"), warn=warnings.append)
    assert warnings
    assert not (tmp_path / "target").exists()
    if os.geteuid() == 0:
        tmp_path.chmod(0o1777)
        os.symlink(tmp_path / "target", tmp_path / "stdout.log")
        os.lchown(tmp_path / "stdout.log", OTHER, OTHER)
        log = LogFile(os.fsencode(tmp_path / "stdout.log"))
        assert not log.open()
        assert not (tmp_path / "target").exists()


def run(tmp_path: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "train.py").write_text("")
    command = [sys.executable, "-m", "tenax", "run", *flags, str(tmp_path / "train.py")]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


@pytest.mark.process
@needs_root
@pytest.mark.parametrize("flag", ["--report={}", "--metrics=jsonl:{}"])
def test_a_run_does_not_write_through_a_link_of_another_user(flag: str, tmp_path: Path) -> None:
    """The link is reported, and its target is unchanged."""
    target = tmp_path / "target"
    target.write_text("precious")
    folder = tmp_path / "shared"
    folder.mkdir()
    link = link_of_another(folder, target)
    done = run(tmp_path, flag.format(link))
    assert "the link belongs to another user" in done.stderr
    assert target.read_text() == "precious"


@pytest.mark.process
@pytest.mark.parametrize(("mode", "is_noted"), [(0o777, True), (0o1777, False), (0o775, False), (0o700, False)])
def test_a_world_writable_log_directory_is_reported(mode: int, is_noted: bool, tmp_path: Path) -> None:
    """One line with the remedy. With the sticky bit, other users cannot replace files."""
    folder = tmp_path / "logs"
    folder.mkdir()
    folder.chmod(mode)
    done = run(tmp_path, f"--log-dir={folder}")
    assert done.returncode == 0
    assert ("any user of this host can replace logs" in done.stderr) == is_noted
