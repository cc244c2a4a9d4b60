"""Real torch with the server: a process group, prefix stores, clones and cancelled waits."""

from __future__ import annotations

import os
import textwrap

import pytest

from kit.torch_python import TorchPython
from store.servers import our_server, torch_client

pytestmark = pytest.mark.process

WORLD = """
    import os, sys
    import torch
    import torch.distributed as dist

    def work(rank, world_size):
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
        dist.init_process_group("gloo", init_method="env://")
        value = torch.tensor([float(rank + 1)])
        dist.all_reduce(value)
        assert value.item() == world_size * (world_size + 1) / 2
        gathered = [None] * world_size
        dist.all_gather_object(gathered, {"rank": rank})
        assert gathered == [{"rank": other} for other in range(world_size)]
        pair = dist.new_group([0, 1])
        if rank < 2:
            dist.barrier(pair)
        dist.monitored_barrier()
        dist.destroy_process_group()

    world_size = int(sys.argv[1])
    torch.set_num_threads(1)
    children = []
    for rank in range(world_size):
        pid = os.fork()
        if pid == 0:
            try:
                work(rank, world_size)
                os._exit(0)
            except BaseException as error:
                print(rank, repr(error), file=sys.stderr, flush=True)
            finally:
                os._exit(1)
        children.append(pid)
    sys.exit(any([os.waitpid(pid, 0)[1] for pid in children]))
"""


def test_four_workers_create_a_process_group_over_the_server(torch_python: TorchPython) -> None:
    with our_server() as server:
        address = {"MASTER_ADDR": server.host, "MASTER_PORT": str(server.port)}
        environ = {**os.environ, **address, "TORCHELASTIC_USE_AGENT_STORE": "True"}
        done = torch_python.run("-c", textwrap.dedent(WORLD), "4", environ=environ)
        assert done.returncode == 0, done.stderr
        assert server.counted("accepted") >= 4
        assert server.counted("refused_requests") == 0


def test_torchs_prefix_stores_and_clones_work_over_the_server() -> None:
    import torch.distributed as dist

    with our_server() as server:
        store = torch_client(server.port)
        part = dist.PrefixStore("a", dist.PrefixStore("b", store))
        part.set("key", "value")
        assert store.get("b/a/key") == b"value"
        assert part.clone().get("key") == b"value"
        assert part.list_keys() == ["key"]


def test_torchs_client_works_after_a_cancelled_wait() -> None:
    """The wait is cancelled on the same connection, and later answers stay in sync."""
    from datetime import timedelta

    with our_server() as server:
        store = torch_client(server.port)
        for number in range(20):
            with pytest.raises(RuntimeError, match="timeout"):
                store.wait([f"never {number}"], timedelta(milliseconds=1))
            assert store.add("n", 1) == number + 1
        assert server.counted("accepted") == 1
