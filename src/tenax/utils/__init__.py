"""TorchElastic's utilities. Each imports what it needs on first use, so importing this package is fast.

``store`` (barriers and exchange of values in a store), ``distributed`` (create a store, pick a port), ``data``
(samplers and iterators for elastic jobs), ``logging``, ``log_level``, ``process_state``, ``gpu_health_check``.
"""

from __future__ import annotations

from tenax.utils.api import get_env_variable_or_raise, get_socket_with_port, macros

__all__ = ["get_env_variable_or_raise", "get_socket_with_port", "macros"]
