"""Small helpers under TorchElastic's names. Importing this package costs nothing: what a helper needs, it imports.

``store`` (meet in a store), ``distributed`` (make one, find a port), ``data`` (samplers and iterators for elastic
jobs), ``logging``, ``log_level``, ``process_state``, ``gpu_health_check``.
"""

from __future__ import annotations

from tenax.utils.api import get_env_variable_or_raise, get_socket_with_port, macros

__all__ = ["get_env_variable_or_raise", "get_socket_with_port", "macros"]
