"""Durations for people: settings exactly, measured times rounded."""

from __future__ import annotations

import pytest

from tenax._core.text import format_duration, format_seconds


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
