"""What is logged when timers of a run expire: one place, so that a site can put its own in."""

from __future__ import annotations

import logging

__all__ = ["log_debug_info_for_expired_timers"]

logger = logging.getLogger(__name__)


def log_debug_info_for_expired_timers(run_id: str, expired_timers: dict[int, list[str]]) -> None:
    """``expired_timers``: by pid, each as JSON."""
    if expired_timers:
        logger.info("timers of the run %s expired: %s", run_id, expired_timers)
