"""The last case of a ``match`` over a closed union: mypy reports a member that no case handles."""

from __future__ import annotations

from typing import NoReturn


def unreachable(value: NoReturn) -> AssertionError:
    """Return the error to raise in ``case _``."""
    return AssertionError(f"not handled: {value!r}")
