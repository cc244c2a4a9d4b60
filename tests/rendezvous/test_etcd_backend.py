"""The etcd backend: one state under one key, changed by compare-and-set, bound to a lease."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from kit.addresses import own_address
from kit.etcd import ROOT, ROOT_PASSWORD, EtcdCluster, unique_prefix
from tenax._core.etcd.operations import Delete, KeepAlive, Operation, Put, Range, RevokeLease, Transaction
from tenax._io.etcd.blocking import BlockingEtcd
from tenax.rendezvous._options import PASSWORD_VARIABLE
from tenax.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousParameters,
    RendezvousStateError,
)
from tenax.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout, create_handler
from tenax.rendezvous.etcd_rendezvous_backend import EtcdRendezvousBackend, create_backend
from tenax.store import EtcdStore
from tenax.testing.rendezvous_contract import RendezvousHandlerContract

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def client(etcd: EtcdCluster) -> Iterator[BlockingEtcd]:
    blocking = etcd.client()
    yield blocking
    blocking.close()


@pytest.fixture
def prefix() -> str:
    return f"/{unique_prefix().decode()}"


@pytest.fixture
def backend(client: BlockingEtcd, prefix: str) -> EtcdRendezvousBackend:
    return EtcdRendezvousBackend(client, "run", prefix)


# --- the state --------------------------------------------------------------------------------------------------------


def test_a_state_is_written_only_with_the_token_of_the_last_one(backend: EtcdRendezvousBackend) -> None:
    assert backend.name == "etcd-v2"
    assert backend.get_state() is None
    written = backend.set_state(b"one")
    assert written is not None
    assert (written[0], written[2]) == (b"one", True)
    assert backend.get_state() == written[:2]
    too_late = backend.set_state(b"another one")  # without a token: only if there is none
    assert too_late == (*written[:2], False)
    newer = backend.set_state(b"two", written[1])
    assert newer is not None
    assert (newer[0], newer[2]) == (b"two", True)
    assert backend.set_state(b"three", written[1]) == (*newer[:2], False)
    assert backend.set_state(b"three", "not a valid token") == (*newer[:2], False)
    assert backend.get_state() == newer[:2]


def test_two_backends_see_the_same_state(client: BlockingEtcd, prefix: str) -> None:
    one, other = (EtcdRendezvousBackend(client, "run", prefix) for _ in range(2))
    one.set_state(b"\x00 any bytes \xff")
    found = other.get_state()
    assert found is not None
    assert found[0] == b"\x00 any bytes \xff"
    assert EtcdRendezvousBackend(client, "another run", prefix).get_state() is None


def test_one_of_two_writers_of_the_same_state_succeeds(client: BlockingEtcd, prefix: str) -> None:
    one, other = (EtcdRendezvousBackend(client, "run", prefix) for _ in range(2))
    first = one.set_state(b"same")
    assert first is not None
    assert first[2]
    assert other.set_state(b"same") == (*first[:2], False)


def test_a_lost_state_reads_as_none(client: BlockingEtcd, backend: EtcdRendezvousBackend, prefix: str) -> None:
    written = backend.set_state(b"one")
    assert written is not None
    client.call(Delete(f"{prefix}run".encode()))
    assert backend.set_state(b"two", written[1]) is None
    assert backend.get_state() is None
    again = backend.set_state(b"two")
    assert again is not None
    assert again[2]


class RetryingClient(BlockingEtcd):
    """The first answer to every transaction is lost, and the client retries."""

    def __init__(self, client: BlockingEtcd) -> None:
        self._inner = client

    def call(self, operation: Operation[Any], patience_s: float | None = None) -> Any:
        if isinstance(operation, Transaction):
            self._inner.call(operation, patience_s)
        return self._inner.call(operation, patience_s)


def test_a_write_whose_answer_was_lost_counts_as_written(client: BlockingEtcd, prefix: str) -> None:
    backend = EtcdRendezvousBackend(RetryingClient(client), "run", prefix)
    written = backend.set_state(b"one")
    assert written is not None
    assert written[2]
    newer = backend.set_state(b"two", written[1])
    assert newer is not None
    assert newer[2]
    assert backend.get_state() == newer[:2]


def test_a_value_that_is_too_large_is_rejected(client: BlockingEtcd, prefix: str) -> None:
    """When reading, with a fake client (etcd's default limit is 1.5 MiB), and when writing."""

    class Large(BlockingEtcd):
        def __init__(self) -> None:
            return

        def call(self, operation: Operation[Any], patience_s: float | None = None) -> Any:
            from tenax._core.etcd.operations import Header, KeyValue, RangeAnswer

            return RangeAnswer(Header(1), (KeyValue(f"{prefix}run".encode(), b"x" * (5 << 20), 1, 1, 1),), 1)

    with pytest.raises(RendezvousStateError, match=f"the value of '{prefix}run' in etcd has 5242880 bytes"):
        EtcdRendezvousBackend(Large(), "run", prefix).get_state()
    with pytest.raises(RendezvousStateError, match="etcd rejected the rendezvous state"):
        EtcdRendezvousBackend(client, "run", prefix).set_state(b"x" * (3 << 20))


def test_an_empty_run_id_and_a_ttl_of_0_are_rejected(client: BlockingEtcd) -> None:
    with pytest.raises(ValueError, match="run id"):
        EtcdRendezvousBackend(client, "")
    with pytest.raises(ValueError, match="ttl"):
        EtcdRendezvousBackend(client, "run", ttl=0)


# --- the lease --------------------------------------------------------------------------------------------------------


def test_a_state_expires_after_the_last_write(client: BlockingEtcd, prefix: str) -> None:
    key = f"{prefix}run".encode()
    for ttl, expected in ((None, 7200), (60, 60)):
        backend = EtcdRendezvousBackend(client, "run", prefix, ttl)
        found = backend.get_state()
        backend.set_state(b"state", None if found is None else found[1])
        (kv,) = client.call(Range(key)).kvs
        assert kv.lease != 0
        assert client.call(KeepAlive(kv.lease)).ttl_s == expected
        backend.set_state(b"again", kv.mod_revision)
        assert client.call(Range(key)).kvs[0].lease == kv.lease


def test_a_state_is_bound_to_the_lease_of_its_last_writer(client: BlockingEtcd, prefix: str) -> None:
    """So it does not expire with the lease of a node that left long ago."""
    one, other = (EtcdRendezvousBackend(client, "run", prefix) for _ in range(2))
    written = one.set_state(b"one")
    assert written is not None
    lease_of_one = client.call(Range(f"{prefix}run".encode())).kvs[0].lease
    other.set_state(b"two", written[1])
    client.call(RevokeLease(lease_of_one))
    found = other.get_state()
    assert found is not None
    assert found[0] == b"two"


def test_an_expired_lease_is_replaced(client: BlockingEtcd, backend: EtcdRendezvousBackend, prefix: str) -> None:
    """For example after the node was suspended for hours."""
    backend.set_state(b"one")
    client.call(RevokeLease(client.call(Range(f"{prefix}run".encode())).kvs[0].lease))
    assert backend.get_state() is None
    again = backend.set_state(b"two")
    assert again is not None
    assert again[2]
    newer = backend.set_state(b"three", again[1])
    assert newer is not None
    assert newer[2]


# --- create_backend ---------------------------------------------------------------------------------------------------


def params(endpoint: str, **options: Any) -> RendezvousParameters:
    return RendezvousParameters("etcd-v2", endpoint, unique_prefix().decode(), 1, 2, **options)


def use(params: RendezvousParameters) -> None:
    """Create a backend and a store, and use them as a handler does."""
    backend, store = create_backend(params)
    with store:
        written = backend.set_state(b"hello")
        assert written is not None
        assert written[2]
        store.set(params.run_id, "value")
        assert store.get(params.run_id) == b"value"


def test_a_backend_and_a_store_are_created_from_parameters(etcd: EtcdCluster, client: BlockingEtcd) -> None:
    for endpoint in (etcd.endpoints, etcd.url(), f"{etcd.endpoints},127.0.0.1:1", f"127.0.0.1:1, {etcd.endpoints}"):
        parameters = params(endpoint, read_timeout="20")
        use(parameters)
        assert client.call(Range(f"/torch/elastic/rendezvous/{parameters.run_id}".encode())).kvs[0].value == b"hello"
        name = f"/torch/elastic/store/{parameters.run_id.replace('/', '%2F')}/{parameters.run_id}"
        assert client.call(Range(name.encode())).kvs[0].value == b"value"


def test_an_unreachable_etcd_is_a_connection_error() -> None:
    host = own_address()
    with pytest.raises(RendezvousConnectionError, match=f"cannot reach etcd: .*{host}"):
        create_backend(params(f"{host}:2379", read_timeout=1))


def test_the_connection_can_use_tls(make_etcd: Callable[..., EtcdCluster]) -> None:
    cluster = make_etcd(tls="mutual")
    assert cluster.certificates is not None
    cert, key = cluster.certificates.client
    files = {"ssl_cert": cert, "ssl_cert_key": key, "ca_cert": cluster.certificates.ca}
    use(params(cluster.endpoints, **files))
    use(params(cluster.endpoints, protocol="HTTPS ", **files))
    use(params(cluster.endpoints, cert=cert, key=key, cacert=cluster.certificates.ca))
    with pytest.raises(ValueError, match="TLS files are set, but the etcd endpoint is 'http://"):
        create_backend(params(cluster.endpoints, protocol="http", **files))
    with pytest.raises(RendezvousConnectionError, match="cannot use etcd"):
        create_backend(params(cluster.endpoints, **{**files, "ca_cert": cluster.certificates.other_ca}))


def test_a_user_and_a_password_can_be_given(make_etcd: Callable[..., EtcdCluster], tmp_path: Path) -> None:
    cluster = make_etcd(users=True)
    use(params(cluster.endpoints, user=ROOT, password=ROOT_PASSWORD))
    file = tmp_path / "password"
    file.write_text(f"{ROOT_PASSWORD}\n")
    file.chmod(0o600)
    use(params(cluster.endpoints, user=ROOT, password_file=str(file)))
    with pytest.raises(RendezvousConnectionError, match="cannot use etcd") as raised:
        create_backend(params(cluster.endpoints, user=ROOT, password="a wrong one"))
    assert "a wrong one" not in str(raised.value)
    with pytest.raises(RendezvousConnectionError, match="cannot use etcd"):
        create_backend(params(cluster.endpoints))


def test_the_password_can_be_in_the_environment(make_etcd: Callable[..., EtcdCluster]) -> None:
    cluster = make_etcd(users=True)
    assert PASSWORD_VARIABLE == "TENAX_ETCD_PASSWORD"
    os.environ[PASSWORD_VARIABLE] = ROOT_PASSWORD
    try:
        use(params(cluster.endpoints, user=ROOT))
    finally:
        del os.environ[PASSWORD_VARIABLE]


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"protocol": "pigeon"}, "protocol"),
        ({"read_timeout": 0}, "read_timeout"),
        ({"password": "secret"}, "without a user"),
        ({"user": "u", "password": "secret", "password_file": "f"}, "both rendezvous options"),
        ({"user": "u", "password_file": "/no/such/file"}, "cannot read the file"),
        ({"user": "u", "password_file": os.devnull}, "is empty or too long"),
    ],
)
def test_invalid_options_are_rejected(options: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=fault) as raised:
        create_backend(params("127.0.0.1:1", **options))
    assert "secret" not in str(raised.value)


# --- with the dynamic rendezvous --------------------------------------------------------------------------------------


class TestHandlerContract(RendezvousHandlerContract):
    @pytest.fixture(autouse=True)
    def _set_up(self, client: BlockingEtcd) -> None:
        self.client = client
        self.prefix = f"/{unique_prefix().decode()}"

    def make_handler(
        self, run_id: str, min_nodes: int, max_nodes: int, join_timeout_s: float = 60, last_call_s: float = 0.1
    ) -> RendezvousHandler:
        return DynamicRendezvousHandler.from_backend(
            run_id,
            EtcdStore(self.client, f"{self.prefix}store", timedelta(seconds=60)),
            EtcdRendezvousBackend(self.client, run_id, f"{self.prefix}state"),
            min_nodes,
            max_nodes,
            local_addr="127.0.0.1",
            timeout=RendezvousTimeout(timedelta(seconds=join_timeout_s), timedelta(seconds=last_call_s)),
            keep_alive_interval=1,
            keep_alive_max_attempt=20,  # no node counts as dead on a busy machine
        )


def test_a_handler_is_created_from_parameters(etcd: EtcdCluster) -> None:
    parameters = params(etcd.endpoints, join_timeout=60, last_call_timeout=0.1)
    with ExitStack() as stack:
        backend, store = create_backend(parameters)
        stack.enter_context(store)
        handler = create_handler(store, backend, parameters)
        assert handler.get_backend() == "etcd-v2"
        info = handler.next_rendezvous()
        assert (info.rank, info.world_size) == (0, 1)
        info.store.set("key", "value")
        assert info.store.get("key") == b"value"
        assert handler.shutdown()
        assert handler.is_closed()


def test_a_round_survives_a_restart_of_etcd(make_etcd: Callable[..., EtcdCluster]) -> None:
    """The group continues, and the next round forms."""
    cluster = make_etcd()
    parameters = params(cluster.endpoints, join_timeout=60, last_call_timeout=0.1, keep_alive_interval=1)
    parameters.config["keep_alive_max_attempt"] = 60
    backend, store = create_backend(parameters)
    with store:
        handler = create_handler(store, backend, parameters)
        assert handler.next_rendezvous().world_size == 1
        cluster.kill(0)
        cluster.start(0)
        assert handler.next_rendezvous().world_size == 1
        assert handler.shutdown()


def test_a_value_of_another_program_is_rejected(client: BlockingEtcd, prefix: str) -> None:
    client.call(Put(f"{prefix}run".encode(), b"\x80 a pickle"))
    backend = EtcdRendezvousBackend(client, "run", prefix)
    handler = DynamicRendezvousHandler.from_backend("run", EtcdStore(client, f"{prefix}store"), backend, 1, 1)
    with pytest.raises(RendezvousStateError):
        handler.next_rendezvous()
