"""From what a user names as entrypoint to something that can be started."""

from __future__ import annotations

from tenax.processes.entrypoint import CommandEntrypoint, FunctionEntrypoint

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any


def make_entrypoint(
    entrypoint: Callable[..., Any] | str,
    args_by_rank: Mapping[int, tuple[Any, ...]],
    start_method: str,
    name: str,
) -> CommandEntrypoint | FunctionEntrypoint:
    """A string is a program, anything else a function, whose exceptions are recorded without asking its author."""
    if isinstance(entrypoint, str):
        return CommandEntrypoint({rank: (entrypoint, *args) for rank, args in args_by_rank.items()}, name)
    from tenax.failures.record import record

    return FunctionEntrypoint(entrypoint, args_by_rank, wrap=record, start_method=start_method)
