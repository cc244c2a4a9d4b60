"""Growth of a time with a size, as the exponent of the best-fitting power. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping


def exponent(times: Mapping[int, float]) -> float | None:
    """Return k of the best fit t = c · n^k, by least squares of the logarithms; None with fewer than two sizes."""
    if len(times) < 2:
        return None
    points = [(math.log(size), math.log(time)) for size, time in times.items()]
    middle_x = sum(x for x, _ in points) / len(points)
    middle_y = sum(y for _, y in points) / len(points)
    rise = sum((x - middle_x) * (y - middle_y) for x, y in points)
    return rise / sum((x - middle_x) ** 2 for x, _ in points)
