"""The workers' key-value store: torch's Store methods, its TCPStore protocol, and no torch.

Stores: ``MemoryStore`` (threads), ``FileStore`` (processes of a host), ``TCPStore`` (a client of tenax's or torch's
server), ``EtcdStore`` (in etcd), ``PrefixStore`` (a part of another store). ``StoreServer`` also serves torch's
clients; ``StoreHost`` is the agent's handle of a server in its own process.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from tenax.store._api import QueueEmptyError as QueueEmptyError
    from tenax.store._api import Store as Store
    from tenax.store._api import StoreConnectionError as StoreConnectionError
    from tenax.store._api import StoreError as StoreError
    from tenax.store._api import StoreTimeoutError as StoreTimeoutError
    from tenax.store._client import TCPStore as TCPStore
    from tenax.store._etcd import EtcdStore as EtcdStore
    from tenax.store._file import FileStore as FileStore
    from tenax.store._host import StoreHost as StoreHost
    from tenax.store._key_values import Limits as Limits
    from tenax.store._local import MemoryStore as MemoryStore
    from tenax.store._prefix import PrefixStore as PrefixStore
    from tenax.store._server import StoreServer as StoreServer

# Imported on demand: the server's process imports this package too, and needs little of it.
_HOMES = {
    "EtcdStore": "_etcd",
    "FileStore": "_file",
    "Limits": "_key_values",
    "MemoryStore": "_local",
    "PrefixStore": "_prefix",
    "QueueEmptyError": "_api",
    "Store": "_api",
    "StoreConnectionError": "_api",
    "StoreError": "_api",
    "StoreHost": "_host",
    "StoreServer": "_server",
    "StoreTimeoutError": "_api",
    "TCPStore": "_client",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
