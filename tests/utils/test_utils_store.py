"""Synchronization through a store: the same with tenax's and torch's stores."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest

from kit.processes import needs_torch
from kit.torch_python import TorchPython
from store.servers import our_server
from tenax.store import MemoryStore, StoreTimeoutError, TCPStore
from tenax.utils.distributed import create_c10d_store, get_free_port
from tenax.utils.store import barrier, get_all, store_timeout, synchronize

SOON_S = 0.05  # for what never comes
MEANWHILE_S = 30.0  # for what comes


@contextmanager
def ours() -> Iterator[Callable[[], Any]]:
    with our_server() as server:
        yield lambda: TCPStore(server.host, server.port, timeout=MEANWHILE_S)


@contextmanager
def torchs() -> Iterator[Callable[[], Any]]:
    """Torch's server and clients, which wait outside of Python."""
    dist = pytest.importorskip("torch.distributed", reason="torch is not installed")
    patience = timedelta(seconds=MEANWHILE_S)
    server = dist.TCPStore("127.0.0.1", 0, None, True, patience, wait_for_workers=False)
    yield lambda: dist.TCPStore("127.0.0.1", server.port, None, False, patience, wait_for_workers=False)


@pytest.fixture(params=[ours, torchs], ids=["ours", "torch's"])
def connect(request: pytest.FixtureRequest) -> Iterator[Callable[[], Any]]:
    with request.param() as connected:
        yield connected


def at_once(actions: list[Callable[[], Any]]) -> list[Any]:
    """Call each in its own thread; return the results and exceptions."""
    results: list[Any] = [None] * len(actions)

    def act(number: int) -> None:
        try:
            results[number] = actions[number]()
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=act, args=(number,)) for number in range(len(actions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(MEANWHILE_S)
        assert not thread.is_alive()
    return results


@pytest.mark.process
def test_synchronize_returns_all_values_in_order_of_ranks(connect: Callable[[], Any]) -> None:
    stores = [connect() for _ in range(3)]
    actions = [lambda r=r: synchronize(stores[r], f"data {r}".encode(), r, 3, "here/") for r in (2, 0, 1)]
    assert at_once(actions) == [[b"data 0", b"data 1", b"data 2"]] * 3


@pytest.mark.process
def test_rank_0_leaves_last(connect: Callable[[], Any]) -> None:
    """It waits until the others have read, because it may host the store."""
    store, other = connect(), connect()
    for rank in range(2):
        store.set(f"x{rank}", str(rank))
    with store_timeout(store, SOON_S), pytest.raises(RuntimeError):
        get_all(store, 0, "x", 2)
    assert get_all(other, 1, "x", 2) == [b"0", b"1"]


@pytest.mark.process
def test_a_barrier_opens_for_all(connect: Callable[[], Any]) -> None:
    stores = [connect() for _ in range(3)]
    assert at_once([lambda s=s: barrier(s, 3, "gate", rank=0) for s in stores]) == [None] * 3


@pytest.mark.process
def test_rank_0_names_the_missing_ranks(connect: Callable[[], Any]) -> None:
    """In order."""
    store, other = connect(), connect()
    other.set("gate2/TRACE", "rank 2 gave up waiting as well")
    with pytest.raises(RuntimeError) as caught:
        barrier(store, 5, "gate", SOON_S, 0, lambda rank: f"host{rank}", SOON_S)
    assert str(caught.value).endswith("missing_ranks=[host1, host3, host4]")
    assert other.check(["gate/TRACING_GATE"])


@pytest.mark.process
def test_the_others_point_to_rank_0(connect: Callable[[], Any]) -> None:
    store, other = connect(), connect()
    other.set("gate/TRACING_GATE", "rank 0 has looked")
    with pytest.raises(RuntimeError, match=r"missing_ranks=\[<see rank 0 \(host0\)>\]"):
        barrier(store, 5, "gate", SOON_S, 2, lambda rank: f"host{rank}")
    assert other.check(["gate2/TRACE"])


@pytest.mark.process
def test_if_rank_0_is_missing_the_stores_error_is_raised(connect: Callable[[], Any]) -> None:
    with pytest.raises(RuntimeError) as caught:
        barrier(connect(), 5, "gate", SOON_S, 2)
    assert "missing_ranks" not in str(caught.value)


@pytest.mark.process
def test_without_a_rank_the_stores_error_is_raised(connect: Callable[[], Any]) -> None:
    with pytest.raises(RuntimeError) as caught:
        barrier(connect(), 2, "gate", barrier_timeout=SOON_S)
    assert "missing_ranks" not in str(caught.value)


def test_a_decoder_without_a_rank_is_rejected() -> None:
    with pytest.raises(AssertionError, match="requires rank"):
        barrier(MemoryStore(), 1, "gate", rank_tracing_decoder=str)


def test_many_missing_ranks_are_not_all_named() -> None:
    """At most 16."""
    with pytest.raises(StoreTimeoutError) as caught:
        barrier(MemoryStore(), 1000, "gate", barrier_timeout=SOON_S, rank=0, trace_timeout=SOON_S)
    assert str(caught.value).endswith(f"missing_ranks=[{', '.join(map(str, range(1, 17)))}]")


@pytest.mark.process
def test_the_timeout_is_restored(connect: Callable[[], Any]) -> None:
    """Also after an error inside the block."""
    store = connect()
    before = store.timeout
    with pytest.raises(KeyError) as caught, store_timeout(store, 7):
        raise KeyError(store.timeout)
    assert caught.value.args == (timedelta(seconds=7),)
    assert store.timeout == before


def test_a_server_and_a_client_connect() -> None:
    port = get_free_port()
    server, client = at_once(
        [
            lambda: create_c10d_store(True, "127.0.0.1", port, world_size=2, timeout=MEANWHILE_S),
            lambda: create_c10d_store(False, "127.0.0.1", port, world_size=2, timeout=MEANWHILE_S),
        ]
    )
    with server, client:
        server.set("key", "value")
        assert client.get("key") == b"value"


def test_a_server_alone_chooses_its_port() -> None:
    with create_c10d_store(True, "127.0.0.1") as store:
        assert store.port > 0
        store.set("key", "value")
        with create_c10d_store(False, "127.0.0.1", store.port, wait_for_workers=False) as other:
            assert other.get("key") == b"value"


def test_too_few_members_time_out() -> None:
    with pytest.raises(TimeoutError):
        create_c10d_store(True, "127.0.0.1", get_free_port(), world_size=2, timeout=SOON_S)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"is_server": True, "world_size": 2}, "other processes need the port"),
        ({"is_server": False}, "client needs the port"),
    ],
)
def test_a_port_is_required_if_other_processes_need_it(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        create_c10d_store(server_addr="127.0.0.1", **options)


def test_a_port_that_is_taken_is_an_error() -> None:
    with (
        create_c10d_store(True, "127.0.0.1") as store,
        pytest.raises(RuntimeError, match="in use"),
    ):
        create_c10d_store(True, "127.0.0.1", store.port, timeout=MEANWHILE_S)


@needs_torch
@pytest.mark.process
def test_torchelastics_helper_and_tenaxs_share_one_store() -> None:
    """In two processes: one barrier, one exchange."""
    theirs = """
        import sys
        from torch.distributed.elastic.utils.distributed import create_c10d_store
        from torch.distributed.elastic.utils.store import barrier, synchronize
        store = create_c10d_store(False, "127.0.0.1", int(sys.argv[1]), world_size=2, timeout=60)
        print(synchronize(store, b"theirs", 1, 2, "meeting/"))
        barrier(store, 2, "gate", rank=1)
    """
    port = get_free_port()
    command = [sys.executable, "-c", textwrap.dedent(theirs), str(port)]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process,
        create_c10d_store(True, "127.0.0.1", port, world_size=2, timeout=60) as store,
    ):
        assert synchronize(store, b"ours", 0, 2, "meeting/") == [b"ours", b"theirs"]
        barrier(store, 2, "gate", rank=0)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert output.strip() == "[b'ours', b'theirs']"


# Asks torch's function and ours, in a process that has imported torch, and prints what each raised.
BOTH = """
import socket, torch.distributed as dist
from torch.distributed.elastic.utils.distributed import create_c10d_store as theirs
from tenax.utils.distributed import create_c10d_store as ours

def raised(create, is_server, port, world_size):
    try:
        create(is_server, "127.0.0.1", port, world_size=world_size, timeout=1, retries=1)
    except Exception as error:
        kinds = (dist.DistNetworkError, dist.DistStoreError)
        return [kind.__name__ for kind in kinds if isinstance(error, kind)]

taken = socket.create_server(("", 0))
free = socket.socket()
free.bind(("127.0.0.1", 0))
for create in (theirs, ours):
    print(
        raised(create, True, taken.getsockname()[1], 1),
        raised(create, False, free.getsockname()[1], 2),
        raised(create, True, 0, 2),
    )
"""


@needs_torch
@pytest.mark.process
def test_errors_have_torchs_types_if_torch_is_imported(torch_python: TorchPython) -> None:
    """A port in use, a missing server, a missing worker."""
    done = torch_python.run("-c", BOTH)
    assert done.returncode == 0, done.stderr
    theirs, ours = done.stdout.splitlines()
    assert ours == theirs == "['DistNetworkError'] ['DistNetworkError'] ['DistStoreError']"
