"""The wall clock of a report: from the first line of the journal, otherwise from the clocks of the host."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tenax._core.model import AgentSettings
from tenax._failures.report import wall_clock_of
from tenax._node.journal import Journal


def test_the_journal_has_the_start_time(tmp_path: Path) -> None:
    """So report, replay and timeline of a journal show the same times."""
    before = time.time()
    journal = Journal(str(tmp_path / "journal.jsonl"))
    journal.begin(AgentSettings("job", "default", 2, 3), "train.py", 1000.0)
    clock = wall_clock_of(journal.path)
    assert clock.began_at == 1000.0
    assert before <= clock.offset_s + 1000.0 <= time.time()
    assert clock.zone_s == time.localtime().tm_gmtoff
    journal.close(1001.0)


@pytest.mark.parametrize("written", [None, b"", b"hello\n", b'{"line":"header","at":"noon"}\n'])
def test_without_a_journal_the_clock_of_the_host_is_used(tmp_path: Path, written: bytes | None) -> None:
    """The start time is unknown then."""
    path = tmp_path / "journal.jsonl"
    if written is not None:
        path.write_bytes(written)
    before = time.time() - time.monotonic()
    clock = wall_clock_of(str(path))
    assert clock.began_at is None
    assert clock.offset_s == pytest.approx(before, abs=60.0)
