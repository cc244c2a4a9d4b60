"""The error for a property that does not hold: a bug in tenax, or in the simulator's models."""

from __future__ import annotations


class PropertyBroken(AssertionError):
    """A property does not hold. Carries its number in the reliability plan and what was observed."""

    def __init__(self, name: str, what: str) -> None:
        super().__init__(f"{name}: {what}")
        self.name = name
