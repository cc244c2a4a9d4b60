"""A property that does not hold: a bug in tenax, or in the model of what it runs on."""

from __future__ import annotations


class PropertyBroken(AssertionError):
    """Names the property by its number in the reliability plan, and says what was seen."""

    def __init__(self, name: str, what: str) -> None:
        super().__init__(f"{name}: {what}")
        self.name = name
