"""Formats times for people. Pure: the time zone is an argument."""

from __future__ import annotations

import time


def format_moment(at: float) -> str:
    """Return ``2026-11-16 08:02:39 UTC``; ``?`` for a time out of range, as in a damaged journal."""
    return _formatted("%Y-%m-%d %H:%M:%S UTC", at)


def format_local_moment(at: float, zone_s: int) -> str:
    """Return ``08:02:39 (2026-11-16, +01:00)``. ``zone_s``: the zone's offset from UTC."""
    minutes = abs(zone_s) // 60
    zone = f"{'-' if zone_s < 0 else '+'}{minutes // 60:02}:{minutes % 60:02}"
    return _formatted(f"%H:%M:%S (%Y-%m-%d, {zone})", at + zone_s)


def _formatted(form: str, at: float) -> str:
    try:
        return time.strftime(form, time.gmtime(at))
    except (OverflowError, OSError, ValueError):
        return "?"
