"""The wall clock of a run: what the agent's own clock, which only counts, is in dates and times of day."""

from __future__ import annotations

import time

import msgspec

from tenax._core.bounds import DECODE_ERRORS


class WallClock(msgspec.Struct, frozen=True):
    offset_s: float  # what to add to the agent's clock to get seconds since the epoch
    zone_s: int = 0  # how far the zone of the host is ahead of UTC
    began_at: float | None = None  # when the agent began, by its own clock; None: not known


class _Header(msgspec.Struct):
    """What is needed of the first line of a journal."""

    wall_time: float
    at: float


def wall_clock_of(journal: str) -> WallClock:
    """As the journal has it, so that a report says the same times as a replay. Without one, as it is now."""
    zone_s = time.localtime().tm_gmtoff
    try:
        with open(journal, "rb") as file:
            header = msgspec.json.decode(file.readline(), type=_Header)
    except (OSError, *DECODE_ERRORS):
        return WallClock(time.time() - time.monotonic(), zone_s)
    return WallClock(header.wall_time - header.at, zone_s, header.at)
