"""Text from strangers is made harmless and storable."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tenax._failures.plain_text import decoded, harmless, shortened, storable, without_middle

# hypothesis leaves surrogates out unless asked.
any_text = st.text(st.characters(codec=None, exclude_categories=()))


@given(any_text)
def test_harmless_text_acts_on_no_terminal(text: str) -> None:
    """Nothing but printable characters, tabs and newlines comes out, and it can be encoded."""
    safe = harmless(text)
    assert not any(ord(c) < 32 and c not in "\t\n" for c in safe)
    assert not any(0x7F <= ord(c) < 0xA0 for c in safe)
    assert "\u202e" not in safe
    safe.encode("utf-8")


def test_colours_vanish_and_other_escapes_show() -> None:
    """A coloured line reads like a plain one; what would clear the screen is seen instead of done."""
    assert harmless("\x1b[1;31mError\x1b[0m:\tx\n") == "Error:\tx\n"
    assert harmless("\x1b[2J\x07a\rb\x9b\u202e") == "\\x1b[2J\\x07a\\x0db\\x9b\\u202e"
    assert harmless("a\r\nb") == "a\nb"


@given(any_text)
def test_storable_text_can_be_encoded_and_is_otherwise_the_same(text: str) -> None:
    """Only lone surrogates change."""
    stored = storable(text)
    stored.encode("utf-8")
    if not any(0xD800 <= ord(c) < 0xE000 for c in text):
        assert stored == text


@given(st.binary())
def test_any_bytes_become_text(data: bytes) -> None:
    """Bytes that are no UTF-8 are shown, not refused; bytes that are come out as they are."""
    text = decoded(data)
    text.encode("utf-8")
    try:
        assert text == data.decode("utf-8")
    except UnicodeDecodeError:
        assert "\\x" in text


def test_long_text_says_what_it_leaves_out() -> None:
    """A cut is always marked, and the end of a text matters more than its beginning."""
    assert shortened("abcdefgh", 8) == "abcdefgh"
    assert shortened("abcdefghi", 8) == "abcde..."
    cut = without_middle("a" * 50 + "b" * 150, 100)
    assert cut == "a" * 25 + "\n[... 100 characters left out ...]\n" + "b" * 75
    assert without_middle("short", 100) == "short"
