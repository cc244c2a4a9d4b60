"""The etcd backend: the state of a dynamic rendezvous under one key of etcd (v3 API).

The token of a state is the revision that wrote it. The key is bound to a lease, as in TorchElastic: the state of an
abandoned run expires. Every node has its own lease, and each write binds the key to the writer's lease. Leases are not
revoked when a node leaves, because the state would be deleted with the last writer's; they expire.
"""

from __future__ import annotations

import random
import time
from contextlib import ExitStack
from typing import TypeVar

from tenax._core.etcd import operations
from tenax._core.etcd.errors import EtcdError, EtcdRejected, EtcdUnavailable
from tenax._core.etcd.operations import Compare, GrantLease, KeepAlive, Put, Range, RangeAnswer, Transaction
from tenax._io.etcd.blocking import BlockingEtcd
from tenax.rendezvous._dynamic.event_recorder import recorder_of
from tenax.rendezvous._dynamic.state import MAX_BYTES
from tenax.rendezvous._options import etcd_settings_from, refuse_engine_options, whole_seconds
from tenax.rendezvous.api import RendezvousConnectionError, RendezvousParameters, RendezvousStateError
from tenax.rendezvous.dynamic_rendezvous import RendezvousBackend, Token
from tenax.store import EtcdStore

__all__ = ["EtcdRendezvousBackend", "create_backend"]

A = TypeVar("A")

_WHERE = "etcd_rendezvous_backend.py:create_backend"
_KEY_PREFIX = "/torch/elastic/rendezvous"
_STORE_PREFIX = "/torch/elastic/store"
_READ_TIMEOUT_S = 60
_TTL_S = 7200
_RENEWALS_PER_TTL = 4


class EtcdRendezvousBackend(RendezvousBackend):
    """Holds the state in etcd under ``key_prefix/run_id``. The caller closes ``client``.

    The state expires ``ttl`` seconds after the last write (at least 3/4 of it).
    """

    def __init__(
        self, client: BlockingEtcd, run_id: str, key_prefix: str | None = None, ttl: int | None = None
    ) -> None:
        if not run_id:
            raise ValueError("the run id is empty; give the run a name")
        self._ttl_s = _TTL_S if ttl is None else ttl
        if self._ttl_s < 1:
            raise ValueError(f"ttl is {ttl}; expected at least 1 second")
        self._client = client
        self._key = f"{(_KEY_PREFIX if key_prefix is None else key_prefix).rstrip('/')}/{run_id}".encode()
        self._lease = 0
        self._renewed_at = 0.0

    @property
    def name(self) -> str:
        return "etcd-v2"

    def get_state(self) -> tuple[bytes, Token] | None:
        return self._state(self._ask(Range(self._key)))

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        if token is not None and not isinstance(token, int):  # not a token of this backend: it matches no state
            found = self.get_state()
            return None if found is None else (*found, False)
        guard = Compare(self._key, "create", 0) if token is None else Compare(self._key, "mod", token)
        self._renew_lease()
        try:
            answer = self._ask(self._write(state, guard))
        except RendezvousStateError:
            if not self._renew_lease(must_check=True):
                raise
            answer = self._ask(self._write(state, guard))  # rejected because the lease had expired
        if answer.succeeded:
            return state, answer.revision, True
        # The client retries if an answer is lost, and its first attempt may have written the state: only this node
        # uses this lease.
        (there,) = answer.answers
        assert isinstance(there, RangeAnswer)
        found = self._state(there)
        return None if found is None else (*found, found[0] == state and there.kvs[0].lease == self._lease)

    def _write(self, state: bytes, guard: Compare) -> Transaction:
        return Transaction((guard,), (Put(self._key, state, self._lease),), (Range(self._key),))

    def _renew_lease(self, *, must_check: bool = False) -> bool:
        """Renew the lease if needed, or grant a new one. Return whether it is new."""
        now = time.monotonic()
        if self._lease and not must_check and now - self._renewed_at < self._ttl_s / _RENEWALS_PER_TTL:
            return False
        is_new = self._lease == 0 or self._ask(KeepAlive(self._lease)).ttl_s == 0
        if is_new:
            lease = random.SystemRandom().randrange(1, 1 << 62)
            self._ask(GrantLease(self._ttl_s, lease))
            self._lease = lease
        self._renewed_at = now
        return is_new

    def _state(self, answer: RangeAnswer) -> tuple[bytes, Token] | None:
        if not answer.kvs:
            return None
        found = answer.kvs[0]
        if len(found.value) > MAX_BYTES:
            raise RendezvousStateError(
                f"the value of {self._key.decode()!r} in etcd has {len(found.value)} bytes: it is not a rendezvous "
                "state"
            )
        return found.value, found.mod_revision

    def _ask(self, operation: operations.Operation[A]) -> A:
        try:
            return self._client.call(operation)
        except EtcdRejected as error:
            raise RendezvousStateError(f"etcd rejected the rendezvous state: {error}") from error
        except EtcdError as error:
            what = "reach" if isinstance(error, EtcdUnavailable) else "use"
            raise RendezvousConnectionError(f"cannot {what} etcd: {error}") from error


def create_backend(params: RendezvousParameters) -> tuple[EtcdRendezvousBackend, EtcdStore]:
    """Create a backend and a store from parameters. The endpoint is ``host:port``, or several separated by commas.

    ``read_timeout``: timeout of a request in seconds (60). ``protocol``: ``http`` or ``https``. ``ssl_cert``,
    ``ssl_cert_key``, ``ca_cert`` (or the older ``cert``, ``key``, ``cacert``): files; any of them implies https.
    ``user``, and ``password`` or ``password_file`` or the variable TENAX_ETCD_PASSWORD. Backend and store share one
    client, which is closed with the store.
    """
    with recorder_of(params, _WHERE), ExitStack() as on_error:
        client = client_from(params)
        on_error.callback(client.close)
        backend = EtcdRendezvousBackend(client, params.run_id, key_prefix=_KEY_PREFIX)
        backend.get_state()  # fails now if etcd cannot be reached
        store = EtcdStore(client, store_prefix(_STORE_PREFIX, params.run_id), owns_client=True)
        on_error.pop_all()
        return backend, store


def store_prefix(root: str, run_id: str) -> str:
    """Return the prefix of a run's store. The run id is escaped, so that no run's keys are below another's."""
    return f"{root}/{operations.key_part(run_id).decode('utf-8', 'surrogatepass')}"


def client_from(params: RendezvousParameters) -> BlockingEtcd:
    """Create a client, which connects on first use. Raises ValueError, also for unsupported options."""
    refuse_engine_options(params)
    patience_s = whole_seconds(params, "read_timeout", _READ_TIMEOUT_S)
    return BlockingEtcd(etcd_settings_from(params), patience_s=patience_s)
