"""Which error handler a worker has, under the path where TorchElastic's users look for it."""

from __future__ import annotations

from tenax._failures.error_handler import get_error_handler

__all__ = ["get_error_handler"]
