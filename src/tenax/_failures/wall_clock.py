"""The wall clock of a run: converts the agent's monotonic clock to dates and times of day."""

from __future__ import annotations

import time

import msgspec

from tenax._core.bounds import DECODE_ERRORS


class WallClock(msgspec.Struct, frozen=True):
    offset_s: float  # seconds since the epoch minus the agent's clock
    zone_s: int = 0  # offset of the host's time zone from UTC
    began_at: float | None = None  # start of the agent on its own clock; None: unknown


class _Header(msgspec.Struct):
    """The fields used from the first line of a journal."""

    wall_time: float
    at: float


def wall_clock_of(journal: str) -> WallClock:
    """Read the clock from the journal, so that report and replay show the same times; otherwise use the current one."""
    zone_s = time.localtime().tm_gmtoff
    try:
        with open(journal, "rb") as file:
            header = msgspec.json.decode(file.readline(), type=_Header)
    except (OSError, *DECODE_ERRORS):
        return WallClock(time.time() - time.monotonic(), zone_s)
    return WallClock(header.wall_time - header.at, zone_s, header.at)
