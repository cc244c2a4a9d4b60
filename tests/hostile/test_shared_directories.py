"""Files in directories that others may write to: links of other users are not followed, FIFOs are not waited for.

Links of other users are made by becoming another user, which takes root; the rest runs as anybody.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kit.jobs import PATIENCE_S
from tenax._failures.evidence import stacks_in
from tenax._io.json_lines import JsonLinesFile
from tenax._io.safe_open import create_safely, open_safely, read_regular
from tenax._logs.log_file import LogFile
from tenax._node.journal import Journal

OTHER = 65_534  # nobody
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="a link of another user can be made by root only")


def link_of_another(folder: Path, target: Path, mode: int = 0o1777) -> Path:
    """A link that another user has made, in a directory that others may write to."""
    folder.chmod(mode)
    link = folder / "link"
    link.symlink_to(target)
    os.lchown(link, OTHER, OTHER)
    return link


@needs_root
@pytest.mark.parametrize("mode", [0o1777, 0o777, 0o775])
def test_a_link_of_another_user_is_not_followed(mode: int, tmp_path: Path) -> None:
    """In a directory that others may write to: the file that it leads to stays as it is, and the error says why."""
    target = tmp_path / "target"
    target.write_text("precious")
    folder = tmp_path / "shared"
    folder.mkdir()
    link = link_of_another(folder, target, mode)
    with pytest.raises(OSError, match="link of another user") as raised:
        create_safely(str(link))
    assert raised.value.errno == errno.ELOOP
    with pytest.raises(OSError, match="link of another user"):
        JsonLinesFile(str(link))
    assert target.read_text() == "precious"


@needs_root
def test_a_link_of_another_user_in_our_own_directory_is_followed(tmp_path: Path) -> None:
    """Only this user could have put it there."""
    folder = tmp_path / "own"
    folder.mkdir()
    link = link_of_another(folder, tmp_path / "target", 0o755)
    with create_safely(str(link)) as file:
        file.write(b"report")
    assert (tmp_path / "target").read_bytes() == b"report"


def test_our_own_link_is_followed_in_any_directory(tmp_path: Path) -> None:
    """``--report latest.json`` may be a link of the user's own; also one that leads to another, or to nothing yet."""
    tmp_path.chmod(0o1777)
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to(tmp_path / "target")
    with create_safely(str(tmp_path / "one")) as file:
        file.write(b"report")
    assert (tmp_path / "target").read_bytes() == b"report"


def test_links_without_end_are_an_error(tmp_path: Path) -> None:
    """A link to itself."""
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="too many symbolic links"):
        create_safely(str(tmp_path / "loop"))


@pytest.mark.process
@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/stderr", "/dev/null", "/proc/self/fd/1"])
def test_names_of_the_system_work(name: str) -> None:
    """What a user writes to print a report or to drop it."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"from tenax._io.safe_open import create_safely\nwith create_safely({name!r}) as f: f.write(b'ok')",
        ],
        capture_output=True,
        timeout=PATIENCE_S,
        check=False,
    )
    printed = done.stdout + done.stderr
    assert (done.returncode, printed) == (0, b"" if name == "/dev/null" else b"ok")


def test_a_fifo_without_a_reader_is_an_error_and_not_a_wait(tmp_path: Path) -> None:
    """For what is written, and for what another process should have written."""
    fifo = str(tmp_path / "fifo")
    os.mkfifo(fifo)
    with pytest.raises(OSError, match=os.strerror(errno.ENXIO)):
        open_safely(fifo, os.O_WRONLY)
    with pytest.raises(OSError, match="not a regular file"):
        read_regular(fifo, 10)
    assert stacks_in(fifo) == ""


def test_journals_and_log_files_of_a_run_follow_no_link_of_another(tmp_path: Path) -> None:
    """The folder of a run is made by us: a link in it is nothing that we put there."""
    (tmp_path / "journal.jsonl").symlink_to(tmp_path / "target")
    said: list[str] = []
    Journal(str(tmp_path / "journal.jsonl"), warn=said.append)
    assert said
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
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


@pytest.mark.process
@needs_root
@pytest.mark.parametrize("flag", ["--report={}", "--metrics=jsonl:{}"])
def test_a_run_does_not_write_through_a_link_of_another_user(flag: str, tmp_path: Path) -> None:
    """What is asked for cannot be had, which is said; the file behind the link is not touched."""
    target = tmp_path / "target"
    target.write_text("precious")
    folder = tmp_path / "shared"
    folder.mkdir()
    link = link_of_another(folder, target)
    done = run(tmp_path, flag.format(link))
    assert "link of another user" in done.stderr
    assert target.read_text() == "precious"


@pytest.mark.process
@pytest.mark.parametrize(("mode", "is_noted"), [(0o777, True), (0o1777, False), (0o775, False), (0o700, False)])
def test_a_log_directory_in_which_all_may_replace_files_is_noted(mode: int, is_noted: bool, tmp_path: Path) -> None:
    """One line with the remedy. With the sticky bit nobody else can replace what is in it."""
    folder = tmp_path / "logs"
    folder.mkdir()
    folder.chmod(mode)
    done = run(tmp_path, f"--log-dir={folder}")
    assert done.returncode == 0
    assert ("any user of this host can replace logs" in done.stderr) == is_noted
