"""Create a store that other processes can connect to, and pick a free port."""

from __future__ import annotations

import sys
from contextlib import closing

from tenax.store import StoreError, StoreTimeoutError, TCPStore
from tenax.utils.api import get_socket_with_port
from tenax.utils.store import barrier

__all__ = ["create_c10d_store", "get_free_port", "get_socket_with_port"]

_ALL_CONNECTED = "_tcp_store/num_members"  # the barrier of TorchElastic, whose agents may connect too


def create_c10d_store(
    is_server: bool,
    server_addr: str,
    server_port: int = -1,
    world_size: int = 1,
    timeout: float = 600,
    wait_for_workers: bool = True,
    retries: int = 3,  # noqa: ARG001 - not needed: the system chooses a free port
    use_libuv: bool | None = None,  # noqa: ARG001 - torch's choice between two servers; tenax has one
) -> TCPStore:
    """Return a ``tenax.store.TCPStore``: a server, or a client of a server of torch or tenax.

    ``server_port`` -1: a free port, for a server without other processes. With ``wait_for_workers`` it returns when all
    of ``world_size`` are connected, and raises TimeoutError otherwise. If torch is imported, errors are also torch's:
    ``DistStoreError`` if workers are missing, else ``DistNetworkError``.
    """
    if server_port == -1 and world_size > 1:
        raise ValueError(f"world_size is {world_size}, so other processes need the port; pass a server_port")
    if server_port == -1 and not is_server:
        raise ValueError("a client needs the port; pass a server_port")
    try:
        store = TCPStore(server_addr, max(server_port, 0), world_size, is_server, timeout, wait_for_workers)
    except StoreError as error:
        raise _as_torchs(error, is_connected=is_server) from error
    if wait_for_workers:
        try:
            barrier(store, world_size, _ALL_CONNECTED, barrier_timeout=timeout)
        except BaseException as error:
            store.close()
            if isinstance(error, StoreError):
                raise _as_torchs(error, is_connected=True) from error
            raise
    return store


def _as_torchs(error: StoreError, *, is_connected: bool) -> StoreError:
    """Return the error as one that torch's callers catch as well, if torch is imported here."""
    name = "_DistStoreError" if is_connected and isinstance(error, StoreTimeoutError) else "_DistNetworkError"
    torchs = getattr(sys.modules.get("torch._C"), name, None)
    if torchs is None:
        return error
    own = type(error)
    both: type[StoreError] = type(own.__name__, (own, torchs), {"__module__": own.__module__})
    return both(*error.args)


def get_free_port() -> int:
    """Return a port of localhost that is free now. It is not reserved: another process may take it."""
    with closing(get_socket_with_port()) as listener:
        return int(listener.getsockname()[1])
