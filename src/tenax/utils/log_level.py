"""The level of loggers if ``LOGLEVEL`` is not set."""

from __future__ import annotations


def get_log_level() -> str:
    """Return ``"WARNING"``, as TorchElastic does."""
    return "WARNING"
