"""Logs expired timers; a separate module, so that a site can replace it."""

from __future__ import annotations

import logging

__all__ = ["log_debug_info_for_expired_timers"]

logger = logging.getLogger(__name__)


def log_debug_info_for_expired_timers(run_id: str, expired_timers: dict[int, list[str]]) -> None:
    """``expired_timers``: by pid, each as JSON."""
    if expired_timers:
        logger.info("timers of the run %s expired: %s", run_id, expired_timers)
