"""TorchElastic's factory for ``SubprocessHandler``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tenax.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

if TYPE_CHECKING:
    from tenax.numa.binding import NumaOptions

__all__ = ["get_subprocess_handler"]


def get_subprocess_handler(
    entrypoint: str,
    args: tuple[Any, ...],
    env: dict[str, str],
    stdout: str | None,
    stderr: str | None,
    local_rank_id: int,
    numa_options: NumaOptions | None = None,
) -> SubprocessHandler:
    """Start the program and return its handler."""
    return SubprocessHandler(entrypoint, args, env, stdout, stderr, local_rank_id, numa_options)
