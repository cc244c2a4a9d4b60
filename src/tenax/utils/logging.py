"""A logger for a launcher's module, whose level comes from ``LOGLEVEL``. tenax itself has no loggers."""

from __future__ import annotations

import logging
import os
import sys

from tenax.utils.log_level import get_log_level

__all__ = ["get_logger"]


def get_logger(name: str | None = None) -> logging.Logger:
    """Return a logger with this name, or that of the calling module, and the level of ``LOGLEVEL``.

    Its handlers are not configured here. Raises ValueError for an unknown level.
    """
    logger = logging.getLogger(name or sys._getframe(1).f_globals.get("__name__"))
    logger.setLevel(_level(os.environ.get("LOGLEVEL") or get_log_level()))
    return logger


def _level(text: str) -> int:
    name = text.strip()
    level = int(name) if name.isdecimal() else logging.getLevelName(name.upper())
    if not isinstance(level, int):
        raise ValueError(f"LOGLEVEL is {text!r}; expected a name such as DEBUG, INFO or WARNING, or a number")
    return level
