"""The names of TorchElastic's older etcd rendezvous, over etcd v3.

``EtcdRendezvousHandler`` is a dynamic rendezvous whose state and store are in etcd, below ``etcd_prefix``. The old one
had a method for each of its phases; these do not exist, because ``tenax.rendezvous._dynamic.decisions`` has no such
phases. Its two internal retry exceptions are here for code that catches them.
"""

from __future__ import annotations

from contextlib import ExitStack
from datetime import timedelta

from tenax._io.etcd.blocking import BlockingEtcd
from tenax.rendezvous._dynamic.event_recorder import recorder_of
from tenax.rendezvous._engine_handler import ForwardingRendezvousHandler
from tenax.rendezvous._options import whole_seconds
from tenax.rendezvous.api import RendezvousHandler, RendezvousParameters
from tenax.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout
from tenax.rendezvous.etcd_rendezvous_backend import EtcdRendezvousBackend, client_from, store_prefix
from tenax.store import EtcdStore, PrefixStore, StoreTimeoutError

__all__ = [
    "EtcdRendezvous",
    "EtcdRendezvousHandler",
    "EtcdRendezvousRetryImmediately",
    "EtcdRendezvousRetryableFailure",
    "create_rdzv_handler",
]

_WHERE = "etcd_rendezvous.py:create_rdzv_handler"
_PREFIX = "/torchelastic/p2p"
_TIMEOUT_S = 600
_LAST_CALL_S = 30


class EtcdRendezvousRetryableFailure(Exception):
    """Never raised: retries are internal."""


class EtcdRendezvousRetryImmediately(Exception):
    """Never raised: retries are internal."""


class EtcdRendezvous:
    """One node in the rendezvous of a run. ``num_min_workers`` and ``num_max_workers`` count nodes; times are seconds.

    The state is under ``prefix/rendezvous/run_id``, the store's keys are below ``prefix/store/run_id/`` (``/`` and
    ``%`` in the run id are escaped there). The caller closes ``client``.
    """

    def __init__(
        self,
        client: BlockingEtcd,
        prefix: str,
        run_id: str,
        num_min_workers: int,
        num_max_workers: int,
        timeout: float,
        last_call_timeout: float,
    ) -> None:
        self._run_id = run_id
        self._nodes = (num_min_workers, num_max_workers)
        self._times_s = (timeout, last_call_timeout)
        root = prefix.rstrip("/")
        self._backend = EtcdRendezvousBackend(client, run_id, key_prefix=f"{root}/rendezvous")
        self._backend.get_state()  # fails now if etcd cannot be reached
        self._store = EtcdStore(client, store_prefix(f"{root}/store", run_id))
        self._handler: DynamicRendezvousHandler | None = None

    def handler(self, local_addr: str | None = None) -> DynamicRendezvousHandler:
        """Return the underlying handler, created once. ``local_addr`` is this node's address for the others."""
        if self._handler is None:
            join, last_call = (timedelta(seconds=each) for each in self._times_s)
            self._handler = DynamicRendezvousHandler.from_backend(
                self._run_id,
                self._store,
                self._backend,
                *self._nodes,
                local_addr=local_addr,
                timeout=RendezvousTimeout(join, last_call),
            )
        return self._handler

    def rendezvous_barrier(self) -> tuple[int, int, int]:
        """Wait for the next round with this node. Return its number, this node's rank and the number of nodes."""
        handler = self.handler()
        info = handler.next_rendezvous()
        return handler._last_round, info.rank, info.world_size

    def set_closed(self) -> None:
        """End the run for all nodes."""
        self.handler().set_closed()

    def setup_kv_store(self, rdzv_version: int) -> PrefixStore:
        """Return the store of one round."""
        return PrefixStore(f"tenax.rendezvous.{self._run_id}.{rdzv_version}", self._store)

    def store_extra_data(self, rdzv_version: int, key: str, value: str | bytes) -> None:
        """Store a value for the other nodes of a round."""
        self._extra_data(rdzv_version).set(key, value)

    def load_extra_data(self, rdzv_version: int, key: str, timeout: float | timedelta | None = None) -> bytes | None:
        """Wait for a value that a node stored for this round. Return None after the timeout."""
        store = self._extra_data(rdzv_version)
        try:
            store.wait([key], timeout)
        except StoreTimeoutError:
            return None
        return store.get(key)

    def _extra_data(self, rdzv_version: int) -> PrefixStore:
        return PrefixStore("extra_data", self.setup_kv_store(rdzv_version))


class EtcdRendezvousHandler(ForwardingRendezvousHandler):
    """A handler over an ``EtcdRendezvous``."""

    def __init__(self, rdzv_impl: EtcdRendezvous, local_addr: str | None) -> None:
        self._handler = rdzv_impl.handler(local_addr)

    def get_backend(self) -> str:
        return "etcd"

    def get_run_id(self) -> str:
        return self._handler.get_run_id()

    def _target(self) -> RendezvousHandler:
        return self._handler


def create_rdzv_handler(params: RendezvousParameters) -> EtcdRendezvousHandler:
    """Create a handler from parameters. The endpoint is ``host:port``, or several separated by commas.

    ``timeout``: seconds for a group to form (600). ``last_call_timeout``: seconds for more nodes, once there are enough
    (30). ``etcd_prefix``: prefix of all keys (``/torchelastic/p2p``). ``protocol``: ``http`` or ``https``. ``cert``,
    ``key``, ``cacert`` (or ``ssl_cert``, ``ssl_cert_key``, ``ca_cert``): files; any of them implies https. ``user``,
    ``password``, ``password_file`` and ``read_timeout`` are those of the backend ``etcd-v2``.
    """
    with recorder_of(params, _WHERE), ExitStack() as on_error:
        timeout_s = whole_seconds(params, "timeout", _TIMEOUT_S)
        last_call_s = whole_seconds(params, "last_call_timeout", _LAST_CALL_S)
        client = client_from(params)
        on_error.callback(client.close)
        prefix = str(params.get("etcd_prefix", _PREFIX))
        rendezvous = EtcdRendezvous(
            client, prefix, params.run_id, params.min_nodes, params.max_nodes, timeout_s, last_call_s
        )
        handler = EtcdRendezvousHandler(rendezvous, params.local_addr)
        on_error.pop_all()
        return handler
