"""TorchElastic's module path for recording and reporting errors. The code is in ``tenax._failures``.

``record`` and ``ErrorHandler`` are imported at once; the rest is loaded on first use, so that a worker that only uses
``record`` does not pay for it.
"""

from __future__ import annotations

from tenax._failures.error_handler import ErrorHandler, get_error_handler, record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from tenax._failures.child_failed import ChildFailedError
    from tenax._failures.process_failure import ProcessFailure

__all__ = ["ChildFailedError", "ErrorHandler", "ProcessFailure", "get_error_handler", "record"]


_HOMES = {"ChildFailedError": "child_failed", "ProcessFailure": "process_failure"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"tenax._failures.{_HOMES[name]}"), name)
