"""Text of workers is made harmless and storable; durations for people: settings exactly, measured times rounded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenax._core.text import (
    decoded,
    format_duration,
    format_seconds,
    harmless,
    shortened,
    storable,
    without_middle,
)

# By default hypothesis generates no surrogates.
any_text = st.text(st.characters(codec=None, exclude_categories=()))


@given(any_text)
def test_harmless_text_contains_no_control_characters(text: str) -> None:
    """Only printable characters, tabs and newlines; it can be encoded."""
    safe = harmless(text)
    assert not any(ord(c) < 32 and c not in "\t\n" for c in safe)
    assert not any(0x7F <= ord(c) < 0xA0 for c in safe)
    assert "\u202e" not in safe
    safe.encode("utf-8")


def test_colours_are_removed_and_other_escapes_are_shown() -> None:
    """An escape sequence that clears the screen becomes visible text."""
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
    """Invalid UTF-8 becomes escapes; valid UTF-8 stays unchanged."""
    text = decoded(data)
    text.encode("utf-8")
    try:
        assert text == data.decode("utf-8")
    except UnicodeDecodeError:
        assert "\\x" in text


def test_shortened_text_is_marked() -> None:
    """More of the end is kept than of the beginning."""
    assert shortened("abcdefgh", 8) == "abcdefgh"
    assert shortened("abcdefghi", 8) == "abcde..."
    cut = without_middle("a" * 50 + "b" * 150, 100)
    assert cut == "a" * 25 + "\n[... 100 characters omitted ...]\n" + "b" * 75
    assert without_middle("short", 100) == "short"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.5, "0.5 s"),
        (30.0, "30 s"),
        (60, "1 min"),
        (90.5, "90.5 s"),
        (150, "2 min 30 s"),
        (3600, "1 h"),
        (86400, "24 h"),
    ],
)
def test_settings_are_exact(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1, "0 ms"),
        (0, "0 ms"),
        (0.003, "3 ms"),
        (0.0999, "100 ms"),
        (0.9996, "1 s"),
        (9.96, "10 s"),
        (59.7, "1 min"),
        (123, "2 min 3 s"),
        (3599.6, "1 h"),
        (7380, "2 h 3 min"),
        (86399, "1 d"),
        (3 * 86400 + 4 * 3600, "3 d 4 h"),
    ],
)
def test_durations_have_at_most_two_units(seconds: float, text: str) -> None:
    """Rounding never results in 60 s."""
    assert format_duration(seconds) == text
