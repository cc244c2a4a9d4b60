"""Samples: what was measured, by whom, and its summary. Knows nothing of launchers or of how a figure was taken."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Summary:
    """The middle of some samples, with their spread and their number."""

    median: float
    min: float
    max: float
    n: int


def summarize(values: Iterable[float]) -> Summary | None:
    """Median, smallest, largest and number of `values`; None when there are none."""
    ordered = sorted(values)
    if not ordered:
        return None
    return Summary(statistics.median(ordered), ordered[0], ordered[-1], len(ordered))


@dataclass
class Samples:
    """Every sample of one measurement, by who was measured and what of it.

    Beside them, what a reader needs to trust them: what was waited for and did not happen (`misses`), every launch that
    gave no sample (`failures`), who cannot do this at all and why (`unable`), and how many began although the machine
    was not quiet (`restless`).
    """

    values: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    misses: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    unable: dict[str, str] = field(default_factory=dict)
    restless: int = 0

    def add(self, who: str, what: str, value: float) -> None:
        """Keep one sample."""
        self.values.setdefault(who, {}).setdefault(what, []).append(value)

    def miss(self, who: str, what: str, instead: str) -> None:
        """Keep the fact that `what` did not happen, and what was seen instead."""
        self.misses.setdefault(who, {}).setdefault(what, []).append(instead)

    def fail(self, who: str, why: str) -> None:
        """Keep the fact that a launch gave no sample."""
        self.failures.append(f"{who}: {why}")

    def all(self, who: str, what: str) -> list[float]:
        """The samples of `what` taken of `who`, in the order they were taken."""
        return self.values.get(who, {}).get(what, [])

    def missed(self, who: str, what: str) -> list[str]:
        """What was seen in place of `what`, once for every time that it did not happen."""
        return self.misses.get(who, {}).get(what, [])

    def has(self, who: str, what: str) -> bool:
        """Whether `what` was tried with `who` at all."""
        return bool(self.all(who, what) or self.missed(who, what))

    def summary(self, who: str, what: str) -> Summary | None:
        """Their summary; None when there are none."""
        return summarize(self.all(who, what))
