"""The check of the lines that workers printed."""

from __future__ import annotations

from benchmarks.logs import Check, check


def line(rank: int, number: int, prefix: str = "") -> bytes:
    """Return one line as the worker writes it."""
    return f"{prefix}{rank} {number:09d} a training step has a loss, a rate and a few more words to print\n".encode()


def test_every_line_arrives_once_whole_and_in_order() -> None:
    """Streams may be interleaved in any way, with or without a prefix."""
    lines = [line(0, 0, "[default0]:"), line(1, 0), line(1, 1, "[rank 1]: "), line(0, 1)]
    assert check(lines, ranks=2, per_rank=2) == Check(4, 0, 0, 0, 0)


def test_a_line_that_did_not_arrive_is_missing() -> None:
    """Also the last one, and also a whole stream."""
    assert check([line(0, 1)], ranks=2, per_rank=3) == Check(1, 5, 0, 0, 0)


def test_a_second_copy_counts_as_duplicated() -> None:
    """Copies do not compensate for missing lines."""
    assert check([line(0, 0), line(0, 0)], ranks=1, per_rank=2) == Check(1, 1, 1, 0, 0)


def test_a_line_after_its_successor_is_out_of_order() -> None:
    """It counts as delivered."""
    assert check([line(0, 1), line(0, 0), line(0, 2)], ranks=1, per_rank=3) == Check(3, 0, 0, 0, 1)


def test_cut_merged_unfinished_and_foreign_lines_are_broken() -> None:
    """A line counts only if it is exactly as a worker wrote it."""
    cut = line(0, 0)[:30] + b"\n"
    merged = line(0, 0)[:30] + line(0, 1)
    unfinished = line(0, 0).rstrip(b"\n")
    foreign = line(7, 0)
    assert check([cut, merged, unfinished, foreign], ranks=1, per_rank=2) == Check(0, 2, 0, 4, 0)
