"""Creates the entrypoint of a run from a function or a program's path."""

from __future__ import annotations

import os

from tenax._processes.entrypoint import CommandEntrypoint, FunctionEntrypoint

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
    """Return a command for a string, else a function entrypoint. Exceptions of Python code are recorded for both."""
    if isinstance(entrypoint, str):
        argv = {rank: (entrypoint, *args) for rank, args in args_by_rank.items()}
        if not os.path.basename(entrypoint).startswith("python"):
            return CommandEntrypoint(argv, name)
        from tenax._failures.hook import hooked

        return CommandEntrypoint(argv, name, wrap_env=hooked)
    from tenax._failures.record import record

    return FunctionEntrypoint(entrypoint, args_by_rank, wrap=record, start_method=start_method)
