"""The c10d backend: the state of a dynamic rendezvous under one key of a key-value store.

Any store with ``compare_set`` will do: torch's and ours. The value is base64 text, because stores of torch take text.
TorchElastic uses the same key, so that its nodes and ours find each other out instead of forming two groups.
"""

from __future__ import annotations

import binascii
import os
import sys
from base64 import b64decode, b64encode
from typing import Any

from tenax._engines.secret import TLS_OPTIONS, check_nothing_is_ignored
from tenax.rendezvous._dynamic.event_recorder import INIT, EventRecorder
from tenax.rendezvous._dynamic.state import MAX_BYTES
from tenax.rendezvous.api import RendezvousConnectionError, RendezvousParameters, RendezvousStateError
from tenax.rendezvous.dynamic_rendezvous import RendezvousBackend, Token
from tenax.rendezvous.utils import _matches_machine_hostname, parse_rendezvous_endpoint  # noqa: F401 - as others import it

__all__ = ["DEFAULT_PORT", "C10dRendezvousBackend", "create_backend"]

DEFAULT_PORT = 29400
_HERE = "c10d_rendezvous_backend.py:"
_READ_TIMEOUT_S = 60
_STORE_ERRORS = (
    RuntimeError,
    ValueError,
    OSError,
)  # what stores of torch and of tenax raise; TimeoutError is an OSError


class C10dRendezvousBackend(RendezvousBackend):
    """Holds the state in ``store``.

    It works on a clone of the store: somebody who blocks on the store of a round for minutes, as in an exit barrier,
    must not hold up our heartbeats on the same connection.
    """

    _NOTHING = b"Y2FuaW1hZGFt"  # TorchElastic's word for "no state yet"

    def __init__(self, store: Any, run_id: str) -> None:
        if not run_id:
            raise ValueError("the run id is empty; give the run a name")
        self._key = f"torch.rendezvous.{run_id}"
        self._given = store  # which may be the one that serves: it must live as long as we do
        self._store = self._call(_clone, store)
        self._read()

    @property
    def name(self) -> str:
        return "c10d"

    def get_state(self) -> tuple[bytes, Token] | None:
        return self._decoded(self._read())

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        if token is not None and not isinstance(token, bytes):  # no token of ours: it cannot be what is there
            found = self.get_state()
            return None if found is None else (*found, False)
        expected = self._NOTHING if token is None else token
        desired = b64encode(state)
        value = self._compare_set(expected, desired)
        if value == expected != desired:  # also what stores say when there is no such key: it was lost, begin anew
            value = self._read()
        found = self._decoded(value)
        return None if found is None else (*found, found[0] == state)

    def _read(self) -> bytes:
        """A ``get`` would block while there is no such key. This creates it instead, and changes nothing else."""
        return self._compare_set(b"", self._NOTHING)

    def _compare_set(self, expected: bytes, desired: bytes) -> bytes:
        value = self._call(self._store.compare_set, self._key, expected.decode(), desired.decode())
        return value.encode() if isinstance(value, str) else bytes(value)

    def _call(self, function: Any, *args: Any) -> Any:
        try:
            return function(*args)
        except _STORE_ERRORS as error:
            raise RendezvousConnectionError(f"the store of the rendezvous cannot be reached: {error}") from error

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
                f"the value of {self._key!r} is not base64 ({error}): somebody else wrote it; use another run id"
            ) from error


def create_backend(params: RendezvousParameters) -> tuple[C10dRendezvousBackend, Any]:
    """A backend and its store from parameters.

    ``store_type``: ``tcp`` (the default; the endpoint is host:port) or ``file`` (the endpoint is a path that all nodes
    see). ``read_timeout``: seconds that an operation of a tcp store may take (60). ``is_host``: whether this node
    serves the tcp store; without it, the node that can listen at the endpoint does.
    The store is torch's if torch was imported before, so that torch can use it, and ours if not.
    """
    teller = _teller(params)
    try:
        with teller.errors_of(f"{_HERE}create_backend"):
            return _create_backend(params)
    finally:
        teller.close()


def _teller(params: RendezvousParameters) -> EventRecorder:
    return EventRecorder(params.run_id, params.local_addr or os.uname().nodename)


def _create_backend(params: RendezvousParameters) -> tuple[C10dRendezvousBackend, Any]:
    check_nothing_is_ignored(
        params,
        TLS_OPTIONS,
        "an agent that calls next_rendezvous() itself meets the others in a store, which has neither a secret nor TLS",
    )
    store_type = str(params.get("store_type", "tcp")).strip().lower()
    if store_type == "tcp":
        store = _create_tcp_store(params)
    elif store_type == "file":
        store = _file_store(params)
    else:
        raise ValueError(f"the store_type of the rendezvous is {store_type!r}; expected 'tcp' or 'file'")
    return C10dRendezvousBackend(store, params.run_id), store


def _create_tcp_store(params: RendezvousParameters) -> Any:
    from datetime import timedelta

    host, port = parse_rendezvous_endpoint(params.endpoint, DEFAULT_PORT)
    is_host = params.get_as_bool("is_host")
    read_timeout_s = params.get_as_int("read_timeout", _READ_TIMEOUT_S)
    if read_timeout_s is None or read_timeout_s <= 0:
        raise ValueError(
            f"the read_timeout of the rendezvous is {read_timeout_s}; expected a positive number of seconds"
        )
    # If somebody on this host was faster than us, it hosts and we are a client.
    attempts = [is_host] if is_host is not None else [True, False] if _can_listen(host, port) else [False]
    for is_server in attempts:
        try:
            store = _stores().TCPStore(
                host,
                port,
                is_master=is_server,
                timeout=timedelta(seconds=read_timeout_s),
                wait_for_workers=False,
                multi_tenant=True,
            )
            if is_server:
                teller = _teller(params)
                where, endpoint = f"{_HERE}create_backend", f"{host}:{port}"
                teller.say(where, "hosts the store of the rendezvous", state=INIT, master_endpoint=endpoint)
                teller.close()
            return store
        except _STORE_ERRORS as error:
            failure: Exception = error
    raise RendezvousConnectionError(
        f"the store of the rendezvous at {host}:{port} cannot be {'served' if is_server else 'reached'}: {failure}"
    ) from failure


def _can_listen(host: str, port: int) -> bool:
    """Whether the address is one of this machine, and its port free. Names say less: a host can have many."""
    import socket

    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise RendezvousConnectionError(
            f"the host {host!r} of the rendezvous endpoint is not known: {error}"
        ) from error
    for family, kind, proto, _, address in found:
        try:
            with socket.socket(family, kind, proto) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
                return True
        except OSError:
            continue
    return False


def _file_store(params: RendezvousParameters) -> Any:
    path = params.endpoint
    try:
        if path:
            os.stat(os.path.dirname(path) or ".")  # torch waits minutes for a folder that does not exist
        else:
            import tempfile

            descriptor, path = tempfile.mkstemp(prefix="tenax-rendezvous-")
            os.close(descriptor)
        return _stores().FileStore(path, -1)
    except _STORE_ERRORS as error:
        raise RendezvousConnectionError(f"the file {path!r} of the rendezvous cannot be used: {error}") from error


def _stores() -> Any:
    """The module to take stores from. We never import torch; where it is loaded already, its stores fit better."""
    torch_distributed = sys.modules.get("torch.distributed")
    if "torch" in sys.modules and hasattr(torch_distributed, "TCPStore"):
        return torch_distributed
    import tenax.store

    return tenax.store


def _clone(store: Any) -> Any:
    return store.clone() if hasattr(store, "clone") else store
