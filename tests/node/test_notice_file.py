"""The notice file and ``tenax.preemption``: workers read what the agent writes; without a file there is no notice."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tenax import preemption
from tenax._core.commands import ForwardNotice
from tenax._node.node import NOTICE_VARIABLE as VARIABLE
from tenax._node.node import NoticeFile


@pytest.fixture
def notices(tmp_path: Path) -> NoticeFile:
    return NoticeFile(str(tmp_path))


@pytest.fixture(autouse=True)
def outside() -> Iterator[None]:
    """Remove the worker variables for the test, and restore them afterwards."""
    before = {name: os.environ.pop(name, None) for name in (VARIABLE, "TENAX_GENERATION")}
    yield
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


def become_a_worker(notices: NoticeFile, generation: int) -> None:
    os.environ.update(notices.env(generation), TENAX_GENERATION=str(generation))


def test_without_tenax_there_is_no_notice_and_no_generation() -> None:
    """A script that checks for notices runs anywhere."""
    assert preemption.notice() is None
    assert preemption.generation() == 0


def test_before_a_notice_there_is_no_file(notices: NoticeFile, tmp_path: Path) -> None:
    """The variable names a file that does not exist yet."""
    become_a_worker(notices, 3)
    assert os.environ[VARIABLE] == str(tmp_path / "notice-3.json")
    assert preemption.notice() is None
    assert preemption.generation() == 3
    assert list(tmp_path.iterdir()) == []


def test_another_node_leaves(notices: NoticeFile) -> None:
    """The notice has the host, the reason and the remaining time on this host's clock."""
    become_a_worker(notices, 1)
    before = time.monotonic()
    notices.write(ForwardNotice(1, "gpu-08", "its agent received SIGTERM", 30.0))
    after = time.monotonic()
    notice = preemption.notice()
    assert notice is not None
    assert (notice.host, notice.is_this_host, notice.why) == ("gpu-08", False, "its agent received SIGTERM")
    assert notice.leaves_at is not None
    assert before + 30 <= notice.leaves_at <= after + 30
    assert notice.seconds_left is not None
    assert 0 <= notice.seconds_left <= 30
    assert "gpu-08" in repr(notice)


def test_this_node_leaves_at_an_unknown_time(notices: NoticeFile) -> None:
    """The notice has this host's name."""
    become_a_worker(notices, 1)
    notices.write(ForwardNotice(1, "", "maintenance"))
    notice = preemption.notice()
    assert notice is not None
    assert (notice.host, notice.is_this_host) == (os.uname().nodename, True)
    assert (notice.leaves_at, notice.seconds_left) == (None, None)


def test_the_remaining_time_is_never_negative(notices: NoticeFile) -> None:
    become_a_worker(notices, 1)
    notices.write(ForwardNotice(1, "", "now", 0.0))
    notice = preemption.notice()
    assert notice is not None
    assert notice.seconds_left == 0.0


def test_the_latest_notice_replaces_the_earlier_atomically(notices: NoticeFile, tmp_path: Path) -> None:
    become_a_worker(notices, 1)
    for number in range(5):
        notices.write(ForwardNotice(1, f"gpu-{number}", "why not" * number, float(number)))
    notice = preemption.notice()
    assert notice is not None
    assert notice.host == "gpu-4"
    assert [path.name for path in tmp_path.iterdir()] == ["notice-1.json"]


def test_a_notice_is_for_its_generation(notices: NoticeFile) -> None:
    """The next generation starts without one."""
    become_a_worker(notices, 1)
    notices.write(ForwardNotice(1, "gpu-08", "maintenance", 30.0))
    assert preemption.notice() is not None
    become_a_worker(notices, 2)
    assert preemption.notice() is None


def test_the_notice_of_an_earlier_run_in_the_same_folder_is_removed(notices: NoticeFile, tmp_path: Path) -> None:
    """Log specs may be reused for another run."""
    notices.write(ForwardNotice(1, "gpu-08", "maintenance", 30.0))
    become_a_worker(NoticeFile(str(tmp_path)), 1)
    assert preemption.notice() is None


def test_the_file_is_json_with_documented_names(notices: NoticeFile, tmp_path: Path) -> None:
    notices.write(ForwardNotice(4, "gpu-08", "maintenance", None))
    assert json.loads((tmp_path / "notice-4.json").read_text()) == {
        "version": 1,
        "generation": 4,
        "host": "gpu-08",
        "is_this_host": False,
        "why": "maintenance",
        "leaves_at": None,
    }


def test_without_a_folder_there_is_no_variable_and_no_file(tmp_path: Path) -> None:
    nowhere = NoticeFile()
    assert nowhere.env(1) == {}
    nowhere.write(ForwardNotice(1, "", "maintenance"))
    assert list(tmp_path.iterdir()) == []


def test_a_notice_that_cannot_be_written_is_lost_without_an_error(tmp_path: Path) -> None:
    """The folder is missing or the disk full: the run continues, and workers still get the stop signal."""
    gone = NoticeFile(str(tmp_path / "gone"))
    gone.write(ForwardNotice(1, "", "maintenance"))
    become_a_worker(gone, 1)
    assert preemption.notice() is None
