"""The c10d backend: the state of a dynamic rendezvous under one key of a key-value store.

Any store with ``compare_set`` will do, torch's or tenax's. The value is base64, because torch's stores take text.
TorchElastic uses the same key, so that nodes of both detect each other instead of forming two groups.
"""

from __future__ import annotations

import binascii
import os
import sys
import tempfile
from base64 import b64decode, b64encode
from datetime import timedelta
from typing import Any

from tenax import store as tenax_stores
from tenax._engines.secret import TLS_OPTIONS, refuse_unused_options
from tenax.rendezvous._dynamic.event_recorder import INIT, recorder_of
from tenax.rendezvous._dynamic.state import MAX_BYTES
from tenax.rendezvous._options import whole_seconds
from tenax.rendezvous.api import RendezvousConnectionError, RendezvousParameters, RendezvousStateError
from tenax.rendezvous.dynamic_rendezvous import RendezvousBackend, Token
from tenax.rendezvous.utils import STORE_ERRORS, _matches_machine_hostname, can_bind, parse_rendezvous_endpoint  # noqa: F401 - imported by third parties

__all__ = ["DEFAULT_PORT", "C10dRendezvousBackend", "create_backend"]

DEFAULT_PORT = 29400
_WHERE = "c10d_rendezvous_backend.py:create_backend"
_READ_TIMEOUT_S = 60


class C10dRendezvousBackend(RendezvousBackend):
    """Holds the state in ``store``.

    It uses a clone of the store: a call that blocks for minutes, such as an exit barrier, must not delay the heartbeats
    on the same connection.
    """

    _NOTHING = b"Y2FuaW1hZGFt"  # TorchElastic's value for "no state yet"

    def __init__(self, store: Any, run_id: str) -> None:
        if not run_id:
            raise ValueError("the run id is empty; give the run a name")
        self._key = f"torch.rendezvous.{run_id}"
        self._given = store  # kept alive: it may be the one that runs the server
        self._store = self._call(getattr(store, "clone", lambda: store))
        self._read()

    @property
    def name(self) -> str:
        return "c10d"

    def get_state(self) -> tuple[bytes, Token] | None:
        return self._decoded(self._read())

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        if token is not None and not isinstance(token, bytes):  # not a token of this backend: it matches no state
            found = self.get_state()
            return None if found is None else (*found, False)
        expected = self._NOTHING if token is None else token
        desired = b64encode(state)
        value = self._compare_set(expected, desired)
        if value == expected != desired:  # also if the key does not exist: it was lost, so create it again
            value = self._read()
        found = self._decoded(value)
        return None if found is None else (*found, found[0] == state)

    def _read(self) -> bytes:
        """Return the value; create the key if it does not exist. A ``get`` would block until it does."""
        return self._compare_set(b"", self._NOTHING)

    def _compare_set(self, expected: bytes, desired: bytes) -> bytes:
        value = self._call(self._store.compare_set, self._key, expected.decode(), desired.decode())
        return value.encode() if isinstance(value, str) else bytes(value)

    def _call(self, function: Any, *args: Any) -> Any:
        try:
            return function(*args)
        except STORE_ERRORS as error:
            raise RendezvousConnectionError(f"cannot reach the rendezvous store: {error}") from error

    def _decoded(self, value: bytes) -> tuple[bytes, Token] | None:
        if value == self._NOTHING:
            return None
        if len(value) > 2 * MAX_BYTES:
            raise RendezvousStateError(
                f"the value of {self._key!r} has {len(value)} bytes: it is not a rendezvous state"
            )
        try:
            return b64decode(value, validate=True), value
        except binascii.Error as error:
            raise RendezvousStateError(
                f"the value of {self._key!r} is not base64 ({error}): another program wrote it; use another run id"
            ) from error


def create_backend(params: RendezvousParameters) -> tuple[C10dRendezvousBackend, Any]:
    """Create a backend and its store from parameters.

    ``store_type``: ``tcp`` (the default; the endpoint is host:port) or ``file`` (the endpoint is a path that all nodes
    share). ``read_timeout``: timeout of a tcp store's operation in seconds (60). ``is_host``: whether this node serves
    the tcp store; by default the node that can listen on the endpoint does.
    The store is torch's if torch is already imported, so that torch can use it, else tenax's.
    """
    with recorder_of(params, _WHERE):
        why = "an agent that calls next_rendezvous() itself uses a store without a secret and without TLS"
        refuse_unused_options(params, TLS_OPTIONS, why)
        store_type = str(params.get("store_type", "tcp")).strip().lower()
        if store_type == "tcp":
            store = _create_tcp_store(params)
        elif store_type == "file":
            store = _file_store(params)
        else:
            raise ValueError(f"the rendezvous option 'store_type' is {store_type!r}; expected 'tcp' or 'file'")
        return C10dRendezvousBackend(store, params.run_id), store


def _create_tcp_store(params: RendezvousParameters) -> Any:
    host, port = parse_rendezvous_endpoint(params.endpoint, DEFAULT_PORT)
    is_host = params.get_as_bool("is_host")
    read_timeout_s = whole_seconds(params, "read_timeout", _READ_TIMEOUT_S)
    try:
        # If another process on this host was faster, it is the host and this one a client.
        attempts = [is_host] if is_host is not None else [True, False] if can_bind(host, port) else [False]
    except OSError as error:
        raise RendezvousConnectionError(
            f"cannot resolve the host {host!r} of the rendezvous endpoint: {error}"
        ) from error
    for is_server in attempts:
        try:
            store = _stores().TCPStore(
                host,
                port,
                is_master=is_server,
                timeout=timedelta(seconds=read_timeout_s),
                wait_for_workers=False,
                multi_tenant=is_host is None,  # on request, only this process is the host
            )
            if is_server:
                with recorder_of(params, _WHERE) as recorder:
                    where = f"{host}:{port}"
                    recorder.record(_WHERE, "hosts the rendezvous store", state=INIT, master_endpoint=where)
            return store
        except STORE_ERRORS as error:
            failure: Exception = error
    raise RendezvousConnectionError(
        f"cannot {'serve' if is_server else 'reach'} the rendezvous store at {host}:{port}: {failure}"
    ) from failure


def _file_store(params: RendezvousParameters) -> Any:
    path = params.endpoint
    try:
        if path:
            os.stat(os.path.dirname(path) or ".")  # torch would wait minutes for a missing folder
        else:
            descriptor, path = tempfile.mkstemp(prefix="tenax-rendezvous-")
            os.close(descriptor)
        return _stores().FileStore(path, -1)
    except STORE_ERRORS as error:
        raise RendezvousConnectionError(f"cannot use the rendezvous file {path!r}: {error}") from error


def _stores() -> Any:
    """Return the module with the store classes: torch's if torch is loaded, else tenax's. Never imports torch."""
    torch_distributed = sys.modules.get("torch.distributed")
    return torch_distributed if "torch" in sys.modules and hasattr(torch_distributed, "TCPStore") else tenax_stores
