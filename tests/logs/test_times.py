"""The times file of a log file: rarely written, quickly searched; errors in it affect nothing else."""

from __future__ import annotations

import os
from pathlib import Path

from tenax._logs.log_file import LogFile
from tenax._logs.times import TimesReader, TimesWriter, times_path


def log_in(folder: Path) -> bytes:
    """Return the path of a log file in the layout of a run."""
    path = folder / "attempt_0" / "3" / "stdout.log"
    path.parent.mkdir(parents=True)
    return os.fsencode(path)


def test_only_files_in_the_layout_of_tenax_have_times() -> None:
    """For custom paths no file is created."""
    assert times_path(b"/logs/run_1/attempt_2.1/10/stderr.log") == b"/logs/run_1/journal.times/attempt_2.1.10.stderr"
    for elsewhere in (b"/logs/stdout.log", b"/logs/attempt_0/x/stdout.log", b"/logs/run/0/1/stdout.log", b"/dev/null"):
        assert times_path(elsewhere) == b""


def test_at_most_ten_times_a_second_are_recorded(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    writer = TimesWriter(log)
    for hundredth in range(1000):
        writer.record(hundredth * 5, 1000 + hundredth / 100)
    writer.close()
    marks = TimesReader(log).between(0, 1 << 40)
    assert 90 <= len(marks) <= 101
    assert marks[0] == (0, 1000.0)
    assert all(position == round((at - 1000) * 500) for position, at in marks)


def test_times_are_looked_up_by_position(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    writer = TimesWriter(log)
    for number in range(10_000):
        writer.record(number * 100, 1000.0 + number)
    writer.close()
    reader = TimesReader(log)
    assert reader.between(250_050, 250_250) == [(250_000, 3500.0), (250_100, 3501.0), (250_200, 3502.0)]
    assert reader.position_at(3500.5) == 250_000
    assert reader.position_at(0.0) == 0
    assert reader.position_at(1e12) == 999_900


def test_all_times_of_a_range_are_found(tmp_path: Path) -> None:
    """A worker that prints short lines has more of them than one read returns."""
    log = log_in(tmp_path)
    writer = TimesWriter(log)
    for number in range(10_000):
        writer.record(number * 11, 1000.0 + number)
    writer.close()
    reader = TimesReader(log)
    assert reader.between(0, 1 << 40) == [(number * 11, 1000.0 + number) for number in range(10_000)]
    assert reader.between(0, 9000 * 11)[-1] == (8999 * 11, 9999.0)


def test_a_partial_record_is_ignored(tmp_path: Path) -> None:
    """Its writer was killed. The next one continues, and a reader skips it."""
    log = log_in(tmp_path)
    path = tmp_path / "journal.times" / "attempt_0.3.stdout"
    writer = TimesWriter(log)
    writer.record(0, 1.0)
    writer.close()
    path.write_bytes(path.read_bytes() + b"\1\2\3")
    assert TimesReader(log).between(0, 100) == [(0, 1.0)]
    writer = TimesWriter(log)
    writer.record(50, 2.0)
    writer.close()
    assert TimesReader(log).between(0, 100) == [(0, 1.0), (50, 2.0)]


def test_missing_times_are_tolerated(tmp_path: Path) -> None:
    """No file; a file where their folder would be."""
    log = log_in(tmp_path)
    reader = TimesReader(log)
    assert (reader.between(0, 100), reader.position_at(5.0)) == ([], 0)
    (tmp_path / "journal.times").write_text("in the way")
    file = LogFile(log)
    file.append(b"kept\n", 5.0)
    file.append(b"and this\n", 6.0)
    file.close()
    assert Path(os.fsdecode(log)).read_bytes() == b"kept\nand this\n"
    assert not file.lost_bytes
    assert TimesReader(log).between(0, 100) == []


def test_a_log_file_records_its_own_positions(tmp_path: Path) -> None:
    """Also in a file that had content before."""
    log = log_in(tmp_path)
    Path(os.fsdecode(log)).write_bytes(b"before\n")
    file = LogFile(log)
    file.append(b"first\n", 100.0)
    file.append(b"second\n", 101.0)
    file.append(b"third\n")  # do not record the time
    file.close()
    assert TimesReader(log).between(0, 100) == [(7, 100.0), (13, 101.0)]
    assert file.began_at == 7
    assert file.is_in_step


def test_a_device_has_no_times(tmp_path: Path) -> None:
    file = LogFile(b"/dev/null")
    file.append(b"gone\n", 5.0)
    file.close()
    assert not file.is_in_step
