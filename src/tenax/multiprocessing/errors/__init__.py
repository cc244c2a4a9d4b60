"""TorchElastic's module path for recording and reporting errors. The code is in ``tenax._failures``.

``record`` and ``ErrorHandler`` are imported at once; the rest is loaded on first use, so that a worker that only uses
``record`` does not pay for it.
"""

from __future__ import annotations

from tenax._failures.error_handler import ErrorHandler, get_error_handler, record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from tenax._failures.process_failure import ChildFailedError, ProcessFailure

__all__ = ["ChildFailedError", "ErrorHandler", "ProcessFailure", "get_error_handler", "record"]


def __getattr__(name: str) -> Any:
    if name not in ("ChildFailedError", "ProcessFailure"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tenax._failures import process_failure

    return getattr(process_failure, name)
