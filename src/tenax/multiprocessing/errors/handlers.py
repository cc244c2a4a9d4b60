"""TorchElastic's module path for ``get_error_handler``. The code is in ``tenax._failures.error_handler``."""

from __future__ import annotations

from tenax._failures.error_handler import get_error_handler

__all__ = ["get_error_handler"]
