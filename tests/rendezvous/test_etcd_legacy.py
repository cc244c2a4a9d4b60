"""TorchElastic's names of the older etcd rendezvous work with etcd v3."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kit.etcd import EtcdCluster, unique_prefix
from kit.processes import TIMEOUT_S
from tenax._core.etcd.operations import Range, prefix_end
from tenax._io.etcd.blocking import BlockingEtcd
from tenax.rendezvous.api import RendezvousClosedError, RendezvousHandler, RendezvousParameters
from tenax.rendezvous.etcd_rendezvous import (
    EtcdRendezvous,
    EtcdRendezvousHandler,
    EtcdRendezvousRetryableFailure,
    EtcdRendezvousRetryImmediately,
    create_rdzv_handler,
)
from tenax.rendezvous.etcd_store import EtcdStore
from tenax.testing.rendezvous_contract import RendezvousHandlerContract

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def client(etcd: EtcdCluster) -> Iterator[BlockingEtcd]:
    blocking = etcd.client()
    yield blocking
    blocking.close()


@pytest.fixture
def prefix() -> str:
    return f"/{unique_prefix().decode()}p2p"


class TestHandlerContract(RendezvousHandlerContract):
    @pytest.fixture(autouse=True)
    def _set_up(self, client: BlockingEtcd, prefix: str) -> None:
        self.client, self.prefix = client, prefix

    def make_handler(
        self, run_id: str, min_nodes: int, max_nodes: int, join_timeout_s: float = 60, last_call_s: float = 0.1
    ) -> RendezvousHandler:
        rendezvous = EtcdRendezvous(self.client, self.prefix, run_id, min_nodes, max_nodes, join_timeout_s, last_call_s)
        return EtcdRendezvousHandler(rendezvous, "127.0.0.1")


def test_etcd_store_is_the_class_of_tenax_store() -> None:
    import tenax.store

    assert EtcdStore is tenax.store.EtcdStore


def test_nodes_of_a_round_pass_a_barrier_and_share_data(client: BlockingEtcd, prefix: str) -> None:
    nodes = [EtcdRendezvous(client, prefix, "run", 2, 2, 60, 0.1) for _ in range(2)]
    results: list[tuple[int, int, int]] = []
    threads = [threading.Thread(target=lambda node=node: results.append(node.rendezvous_barrier())) for node in nodes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert sorted(results) == [(1, 0, 2), (1, 1, 2)]

    one, other = nodes
    one.setup_kv_store(1).set("key", "value")
    assert other.setup_kv_store(1).get("key") == b"value"
    assert not other.setup_kv_store(2).check(["key"])
    assert other.load_extra_data(1, "extra", timeout=0.05) is None
    one.store_extra_data(1, "extra", "data")
    assert other.load_extra_data(1, "extra", timeout=TIMEOUT_S) == b"data"
    assert not other.setup_kv_store(1).check(["extra"])

    one.set_closed()
    with pytest.raises(RendezvousClosedError):
        EtcdRendezvous(client, prefix, "run", 2, 2, 60, 0.1).rendezvous_barrier()
    for node in nodes:
        node.handler().shutdown()


def test_a_handler_is_created_from_parameters(etcd: EtcdCluster, client: BlockingEtcd, prefix: str) -> None:
    params = RendezvousParameters(
        "etcd", etcd.endpoints, "run", 1, 1, "127.0.0.1", timeout=60, last_call_timeout=1, etcd_prefix=prefix
    )
    handler = create_rdzv_handler(params)
    assert isinstance(handler, EtcdRendezvousHandler)
    assert (handler.get_backend(), handler.get_run_id()) == ("etcd", "run")
    info = handler.next_rendezvous()
    assert (info.rank, info.world_size) == (0, 1)
    assert info.bootstrap_store_info is not None
    assert info.bootstrap_store_info.master_addr == "127.0.0.1"
    assert handler.num_nodes_waiting() == 0
    assert not handler.is_closed()
    assert handler.shutdown()
    assert handler.is_closed()
    start = prefix.encode()
    names = [kv.key for kv in client.call(Range(start, prefix_end(start), keys_only=True)).kvs]
    assert f"{prefix}/rendezvous/run".encode() in names
    assert f"{prefix}/store/run/tenax.rendezvous.run.1/MASTER_ADDR".encode() in names


def test_the_older_option_names_for_certificates_work(make_etcd: Callable[..., EtcdCluster]) -> None:
    cluster = make_etcd(tls="mutual")
    assert cluster.certificates is not None
    cert, key = cluster.certificates.client
    options: dict[str, Any] = {"protocol": "https", "cacert": cluster.certificates.ca, "cert": cert, "key": key}
    handler = create_rdzv_handler(RendezvousParameters("etcd", cluster.endpoints, "run", 1, 1, **options))
    assert handler.next_rendezvous().world_size == 1
    assert handler.shutdown()


@pytest.mark.parametrize("options", [{"timeout": 0}, {"last_call_timeout": "-1"}, {"timeout": "soon"}])
def test_invalid_timeouts_are_rejected(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="timeout"):
        create_rdzv_handler(RendezvousParameters("etcd", "127.0.0.1:1", "run", 1, 1, **options))


def test_the_legacy_exceptions_exist() -> None:
    for kind in (EtcdRendezvousRetryableFailure, EtcdRendezvousRetryImmediately):
        assert issubclass(kind, Exception)


@pytest.mark.parametrize(("one", "other"), [("job", "job/2"), ("job", "job/"), ("a%2Fb", "a/b"), ("..", "../x")])
def test_the_stores_of_two_runs_have_disjoint_keys(client: BlockingEtcd, prefix: str, one: str, other: str) -> None:
    """Keys of one run are not counted, read or deleted as keys of another."""
    stores = {}
    for run_id in (one, other):
        rendezvous = EtcdRendezvous(client, prefix, run_id, 1, 1, 60, 1)
        rendezvous.setup_kv_store(1).set("key", run_id)
        stores[run_id] = rendezvous
    for run_id, rendezvous in stores.items():
        assert rendezvous.setup_kv_store(1).get("key") == run_id.encode()
        assert rendezvous._store.num_keys() == 1, "only its own key"
