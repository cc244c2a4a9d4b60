"""Lines: bytes in, whole lines out."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tenax._logs.lines import LineCutter, lines_with, with_prefix

PIECES = st.lists(st.lists(st.sampled_from([b"a", b"bc", b"\n", b"\r", b"\xff", b"\r\n"])).map(b"".join))


@settings(max_examples=150, deadline=None)
@given(pieces=PIECES, at_returns=st.booleans(), longest=st.sampled_from([4, 1000]))
def test_every_byte_comes_out_once_and_in_order(pieces: list[bytes], at_returns: bool, longest: int) -> None:
    """Invariant 1: however the input is divided, the same bytes come out."""
    cutter = LineCutter(longest)
    out = [cutter.cut(piece, at_returns=at_returns) for piece in pieces]
    assert b"".join(out) + cutter.end() == b"".join(pieces)


@settings(max_examples=150, deadline=None)
@given(pieces=PIECES)
def test_only_whole_lines_come_out(pieces: list[bytes]) -> None:
    """Invariant 2: output before the end of the stream ends with a newline, and comes as early as possible."""
    cutter = LineCutter()
    whole = b""
    for piece in pieces:
        whole += cutter.cut(piece)
        assert not whole or whole.endswith(b"\n")
    joined = b"".join(pieces)
    assert whole == joined[: joined.rfind(b"\n") + 1]


@settings(max_examples=150, deadline=None)
@given(pieces=PIECES)
def test_a_cut_at_a_carriage_return_never_splits_crlf(pieces: list[bytes]) -> None:
    """A carriage return counts only once the next byte shows that it is not the start of CRLF."""
    cutter = LineCutter()
    whole, joined = b"", b"".join(pieces)
    for piece in pieces:
        whole += cutter.cut(piece, at_returns=True)
        assert not (whole.endswith(b"\r") and joined[len(whole) :].startswith(b"\n"))
        assert not whole or whole[-1:] in b"\r\n"


def test_a_line_longer_than_the_maximum_comes_out_in_pieces() -> None:
    """It does not fill the memory."""
    cutter = LineCutter(max_bytes=10)
    assert cutter.cut(b"0123456789") == b""
    assert cutter.cut(b"a") == b"0123456789a"
    assert cutter.cut(b"b\n") == b"b\n"


def test_every_line_gets_the_prefix() -> None:
    """The prefix comes before each line, also an empty one, and not after the last."""
    assert with_prefix(b"a\n\nb\n", b"P:") == b"P:a\nP:\nP:b\n"
    assert with_prefix(b"a\nb", b"P:") == b"P:a\nP:b"
    assert with_prefix(b"a\nb\n", b"P:", continues=True) == b"a\nP:b\n"
    assert with_prefix(b"a\n", b"") == b"a\n"
    assert with_prefix(b"", b"P:") == b""


def test_progress_bars_keep_their_prefix() -> None:
    """Text after a carriage return overwrites the prefix, so it gets its own; CRLF does not."""
    assert with_prefix(b"10%\r20%\r", b"P:", at_returns=True) == b"P:10%\rP:20%\r"
    assert with_prefix(b"a\r\nb\r\n", b"P:", at_returns=True) == b"P:a\r\nP:b\r\n"
    assert with_prefix(b"10%\r20%\n", b"P:", at_returns=True) == b"P:10%\rP:20%\n"
    assert with_prefix(b"10%\r20%\n", b"P:") == b"P:10%\r20%\n"


def test_lines_are_found_by_any_needle() -> None:
    """A line with several needles is returned once; the unfinished last line counts too."""
    text = b"loss 3\nERROR and WARN\nfine\nlast WARN"
    assert lines_with(text, [b"ERROR", b"WARN"]) == b"ERROR and WARN\nlast WARN\n"
    assert lines_with(text, [b"absent"]) == b""
