"""The level of loggers when ``LOGLEVEL`` does not say one."""

from __future__ import annotations


def get_log_level() -> str:
    """``"WARNING"``, as in TorchElastic."""
    return "WARNING"
