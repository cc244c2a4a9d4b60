"""Samples: what was measured, of which launcher, and its summary. Independent of launchers and measurements."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Summary:
    """The median of some samples, with their spread and number."""

    median: float
    min: float
    max: float
    n: int


def summarize(values: Iterable[float]) -> Summary | None:
    """Return median, smallest, largest and number of `values`; None if there are none."""
    ordered = sorted(values)
    if not ordered:
        return None
    return Summary(statistics.median(ordered), ordered[0], ordered[-1], len(ordered))


@dataclass
class Samples:
    """All samples of one measurement, by launcher and measure.

    Also what a reader needs to judge them: awaited events that did not happen (`misses`), launches without a sample
    (`failures`), launchers that do not support this and why (`unable`), and how many launches began on a busy machine
    (`restless`).
    """

    values: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    misses: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    unable: dict[str, str] = field(default_factory=dict)
    restless: int = 0

    def add(self, who: str, what: str, value: float) -> None:
        """Add one sample."""
        self.values.setdefault(who, {}).setdefault(what, []).append(value)

    def miss(self, who: str, what: str, instead: str) -> None:
        """Record that `what` did not happen, and what was seen instead."""
        self.misses.setdefault(who, {}).setdefault(what, []).append(instead)

    def fail(self, who: str, why: str) -> None:
        """Record that a launch gave no sample."""
        self.failures.append(f"{who}: {why}")

    def all(self, who: str, what: str) -> list[float]:
        """Return the samples of `what` for `who`, in order."""
        return self.values.get(who, {}).get(what, [])

    def missed(self, who: str, what: str) -> list[str]:
        """Return what was seen instead of `what`, once for each time that it did not happen."""
        return self.misses.get(who, {}).get(what, [])

    def has(self, who: str, what: str) -> bool:
        """Return whether `what` was tried with `who`."""
        return bool(self.all(who, what) or self.missed(who, what))

    def summary(self, who: str, what: str) -> Summary | None:
        """Return their summary; None if there are none."""
        return summarize(self.all(who, what))
