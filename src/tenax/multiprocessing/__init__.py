"""TorchElastic's ``multiprocessing`` API. The code is in ``_processes``, ``_logs`` and ``_failures``.

Loaded on first use: a worker that only uses ``multiprocessing.errors.record`` imports this package and must not pay for
the rest.
"""
# ruff: noqa: F403, F405 - ``api`` lists its names

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from tenax.multiprocessing.api import *

__all__ = [
    "DefaultLogsSpecs",
    "LogsDest",
    "LogsSpecs",
    "MultiprocessContext",
    "PContext",
    "ProcessFailure",
    "RunProcsResult",
    "SignalException",
    "Std",
    "SubprocessContext",
    "start_processes",
    "to_map",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tenax.multiprocessing import api

    return getattr(api, name)
