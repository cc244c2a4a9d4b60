"""TorchElastic's module path for the error handler. The code is in ``tenax._failures.error_handler``."""

from __future__ import annotations

from tenax._failures.error_handler import ErrorHandler

__all__ = ["ErrorHandler"]
