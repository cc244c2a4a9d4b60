"""The workers' store in the agent: there when somebody connects, new for every generation, gone with the run."""

from __future__ import annotations

import os
import signal

import pytest

from kit.jobs import Bench, holders, is_alive, until
from store.users import NOBODY, answer_to
from tenax._engines.free_port import free_port


def test_a_job_that_never_connects_starts_no_store(bench: Bench) -> None:
    """It is told where one would be, and pays for one socket; also after a restart."""
    script = bench.script(
        """
        import os, sys
        from worker_kit import *
        note("where", f"{os.environ['TORCHELASTIC_USE_AGENT_STORE']} {os.environ['MASTER_PORT']}")
        ready()
        wait_for("go")
        sys.exit(ATTEMPT == 0)
        """
    )
    job = bench.start("--nproc-per-node", "2", "--max-restarts", "1", script)
    ports = []
    for attempt in range(2):
        workers = bench.pids(2, attempt)
        assert bench.store_pids() == []
        used, port = bench.note("where", attempt=attempt).split()
        assert used == "True"
        assert holders(int(port), [job.process.pid, *workers]) == [job.process.pid]
        ports.append(port)
        for rank in range(2):
            bench.tell("go", rank, attempt)
    assert job.wait().code == 0
    assert len(set(ports)) == 2


# Workers that meet in the store with nothing but tenax, and leave a key behind.
MEETS = """
    import os, sys
    from tenax.store import TCPStore
    from worker_kit import *

    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=30)
    note("stale", store.check(["left behind"]) if RANK == 0 else "")
    store.wait(["nobody is first"]) if RANK else store.set("nobody is first", b"")
    count = store.add("here", 1)
    store.set(f"rank {RANK}", str(os.getpid()))
    store.wait([f"rank {rank}" for rank in range(WORLD)])
    store.set("left behind", str(ATTEMPT))
    note("met", f"{os.environ['MASTER_PORT']} {store.get('here').decode()}")
    ready()
    wait_for("go")
    sys.exit(ATTEMPT == 0)
"""


def test_workers_meet_in_a_store_that_is_new_for_every_generation(bench: Bench) -> None:
    """One process serves one generation after the other, at another port and without a key of the one before."""
    job = bench.start("--nproc-per-node", "2", "--max-restarts", "1", bench.script(MEETS))
    seen = []
    for attempt in range(2):
        workers = bench.pids(2, attempt)
        (store,) = bench.store_pids()
        assert bench.note("stale", attempt=attempt) == "False"
        (port, here), _ = [bench.note("met", rank, attempt).split() for rank in range(2)]
        assert here == "2"
        assert holders(int(port), [store, *workers]) == [store]
        seen.append((store, port))
        for rank in range(2):
            bench.tell("go", rank, attempt)
    assert job.wait().code == 0
    (first, old_port), (second, new_port) = seen
    assert first == second
    assert old_port != new_port
    assert not is_alive(first)


def test_a_port_that_was_named_serves_every_generation(bench: Bench) -> None:
    """'--master-port': the same port, and new keys all the same."""
    port = str(free_port())
    job = bench.start("--nproc-per-node", "2", "--max-restarts", "1", "--master-port", port, bench.script(MEETS))
    for attempt in range(2):
        bench.pids(2, attempt)
        assert bench.note("met", attempt=attempt) == f"{port} 2"
        assert bench.note("stale", attempt=attempt) == "False"
        for rank in range(2):
            bench.tell("go", rank, attempt)
    assert job.wait().code == 0


def test_a_store_that_is_killed_is_told_and_the_run_goes_on(bench: Bench) -> None:
    """The person learns of it, and the next generation gets a new one."""
    job = bench.start("--nproc-per-node", "2", "--max-restarts", "1", bench.script(MEETS))
    bench.pids(2)
    (store,) = bench.store_pids()
    os.kill(store, signal.SIGKILL)
    job.until_said("the workers' store was lost: its process was killed by SIGKILL")
    for rank in range(2):
        bench.tell("go", rank)
    bench.pids(2, 1)
    (another,) = bench.store_pids()
    assert another != store
    for rank in range(2):
        bench.tell("go", rank, 1)
    assert job.wait().code == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped and killed"])
def test_the_store_ends_with_a_killed_agent(bench: Bench, number: signal.Signals) -> None:
    """However the agent goes, its store does not stay."""
    job = bench.start("--nproc-per-node", "2", bench.script(MEETS))
    bench.pids(2)
    (store,) = bench.store_pids()
    job.send(number)
    if number is signal.SIGSTOP:
        job.send(signal.SIGKILL)
    assert job.wait().code == -signal.SIGKILL
    until(lambda: not is_alive(store), "the end of the store")


def test_a_stopped_store_does_not_hold_up_the_end(bench: Bench) -> None:
    """It has nothing to finish: it is ended, whatever it does."""
    job = bench.start("--nproc-per-node", "2", "--max-restarts", "1", bench.script(MEETS))
    bench.pids(2)
    (store,) = bench.store_pids()
    os.kill(store, signal.SIGSTOP)
    job.send(signal.SIGTERM)
    assert job.wait().code == 143
    assert not is_alive(store)


@pytest.mark.parametrize(
    ("words", "env"),
    [
        (["--rdzv-conf", "use_agent_store=false"], {}),
        ([], {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}),
    ],
    ids=["flag", "torch's variable"],
)
def test_a_worker_may_host_the_store_itself(bench: Bench, words: list[str], env: dict[str, str]) -> None:
    """Then the port is free for rank 0, and the workers are told so."""
    script = bench.script(
        """
        import os
        from tenax.store import TCPStore
        from worker_kit import *
        assert os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "False"
        store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), WORLD, RANK == 0, timeout=30)
        store.set(f"rank {RANK}", "here")
        store.wait(["rank 0", "rank 1"])
        ready()
        wait_for("go")
        """
    )
    job = bench.start("--nproc-per-node", "2", *words, script, env=env)
    bench.pids(2)
    assert bench.store_pids() == []
    for rank in range(2):
        bench.tell("go", rank)
    assert job.wait().code == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="a process of another user needs root to be started")
def test_another_user_of_the_host_cannot_use_the_store(bench: Bench) -> None:
    """Of a run of one node with default flags. The console says what was rejected, and how to allow it."""
    script = bench.script(
        """
        import os
        from worker_kit import *
        note("port", os.environ["MASTER_PORT"])
        ready()
        wait_for("go")
        """
    )
    job = bench.start(script)
    bench.pids(1)
    port = int(bench.note("port"))
    assert answer_to("127.0.0.1", port, NOBODY) == b""
    assert answer_to("127.0.0.1", port, 0) == b"abcd"
    bench.tell("go")
    done = job.wait()
    assert done.code == 0
    said = " ".join(done.err.split())
    assert f"127.0.0.1 is a process of uid {NOBODY}, and the run belongs to uid 0" in said
    assert "--rdzv-conf store_allow=127.0.0.1" in said
