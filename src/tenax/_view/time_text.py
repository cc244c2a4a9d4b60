"""A moment in words: date and time of the clock, for whoever must say since when. Pure: the zone is an argument."""

from __future__ import annotations

import time


def moment_in_words(at: float) -> str:
    """``2026-11-16 08:02:39 UTC``; ``?`` for what no calendar has, as a broken journal may say."""
    return _formatted("%Y-%m-%d %H:%M:%S UTC", at)


def local_moment_in_words(at: float, zone_s: int) -> str:
    """``08:02:39 (2026-11-16, +01:00)``. ``zone_s``: how far the zone is ahead of UTC."""
    minutes = abs(zone_s) // 60
    zone = f"{'-' if zone_s < 0 else '+'}{minutes // 60:02}:{minutes % 60:02}"
    return _formatted(f"%H:%M:%S (%Y-%m-%d, {zone})", at + zone_s)


def _formatted(form: str, at: float) -> str:
    try:
        return time.strftime(form, time.gmtime(at))
    except (OverflowError, OSError, ValueError):
        return "?"
